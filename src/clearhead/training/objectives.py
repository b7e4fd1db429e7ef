"""What a model is asked to get right, as numbers: the loss of each objective.

With logits o over a vocabulary of V tokens (or over classes) and the target y, one token costs

    loss = -log softmax(o)[y] = logsumexp(o) - o[y]      and its gradient is      softmax(o) - onehot(y)

`logsumexp` subtracts the largest logit first, so logits of any size are fine. `_formula` is the loss;
`_TokenLoss` adds the gradient, which keeps one number per row for the backward pass where a graph of
elementary operations keeps tensors of the logits' size. A compiled graph takes the bare formula, because the
compiler derives and fuses the gradient itself.

    next token, masked token, class, token label    -log softmax(o)[y]
    label smoothing e (Szegedy et al. 2016)         (1 - e) times that, + e times its mean over all y
    several labels at once                          -log sigmoid(o) where one holds, else -log sigmoid(-o)
    numbers                                         (o - y)^2
    span                                            -log softmax over the places, of its start, of its end
    contrastive (van den Oord et al. 2018)          -log softmax(scale cos(a, all b))[its own b]

Where ranks share the vocabulary out (tensor_parallel.py), each has some columns of the logits. Of each token
they tell each other three numbers, their largest logit m, s = sum exp(o - m), and o[y] where they have it:

    M = max m over ranks,      logsumexp(o) = M + log(sum over ranks of s exp(m - M))

and each makes the gradient of its own columns.

A step's loss is the sum over its targets divided by their number, over all its micro-batches together. Each
`..._loss` gives that sum and that number, so that cutting a batch differently changes nothing.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from clearhead.training.sharded import Columns, columns_of, is_shared_out, local

IGNORE = -100  # the target that asks for nothing, as in torch and transformers

SumAndCount = tuple[Float[Tensor, ""], Int[Tensor, ""]]


def cross_entropy(
    logits: Float[Tensor, "*batch V"],
    targets: Int[Tensor, "*batch"],
    ignore_index: int = IGNORE,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
) -> Float[Tensor, "..."]:
    """Return the loss of `logits` on `targets` in nats, for any leading dimensions, in float32 or wider.

    "mean" divides by the number of targets that are not `ignore_index`; where there are none the loss is 0
    and its gradients are 0. "none" gives one loss per target, 0 where ignored. `label_smoothing`
    e takes e of the target's probability and spreads it evenly over the vocabulary, the target included. A
    target outside the vocabulary is a ValueError; that check is left out of a compiled graph and on a GPU,
    because it would wait for the device. Logits that ranks share out along the vocabulary give every rank the
    whole loss; all of them call this at once.

    >>> cross_entropy(torch.tensor([[0.0, 0.0], [1000.0, 0.0]]), torch.tensor([1, 0]), reduction="none")
    tensor([0.6931, 0.0000])
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is unknown; choose 'mean', 'sum' or 'none'")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing={label_smoothing} must be between 0 and 1")
    _check(logits, targets, ignore_index)
    wanted = targets != ignore_index
    if is_shared_out(logits):
        losses = _SharedTokenLoss.apply(
            local(logits), targets.long(), wanted, label_smoothing, columns_of(logits)
        )
    elif torch.compiler.is_compiling():
        losses, _ = _formula(logits, targets.long(), wanted, label_smoothing)
    else:
        losses = _TokenLoss.apply(logits, targets.long(), wanted, label_smoothing)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / wanted.sum().clamp(min=1)


def token_loss(
    logits: Float[Tensor, "*batch V"], targets: Int[Tensor, "*batch"], label_smoothing: float = 0.0
) -> SumAndCount:
    """Return the summed loss in nats and the number of targets that count (those that are not -100).

    Add both over everything that belongs together (the micro-batches of a step, a validation set), divide
    once. exp(sum / count) is the perplexity. Classes are tokens of a small vocabulary.
    """
    losses = cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing)
    return losses, (targets != IGNORE).sum()


def label_loss(logits: Float[Tensor, "B labels"], targets: Float[Tensor, "B labels"]) -> SumAndCount:
    """Several labels at once: each is decided on its own. `targets` are 1 where a label holds, else 0.

    Return the sum of the binary cross-entropies in nats, and the number of decisions: B times labels.
    """
    scores = _wide(logits)
    losses = F.binary_cross_entropy_with_logits(scores, targets.to(scores.dtype), reduction="sum")
    return losses, _count(targets)


def squared_error(outputs: Float[Tensor, "B labels"], targets: Float[Tensor, "..."]) -> SumAndCount:
    """Return the sum of squared differences and the number of numbers. `targets` has the shape of `outputs`,
    or (B) where a row has one number.

    >>> squared_error(torch.tensor([[1.0], [5.0]]), torch.tensor([2.0, 2.0]))
    (tensor(10.), tensor(2))
    """
    if targets.numel() != outputs.numel():
        raise ValueError(f"outputs {tuple(outputs.shape)} need as many targets, not {tuple(targets.shape)}")
    scores = _wide(outputs)
    return (scores - targets.reshape(scores.shape).to(scores.dtype)).square().sum(), _count(targets)


def span_loss(
    logits: Float[Tensor, "B T 2"], spans: Int[Tensor, "B 2"], mask: Bool[Tensor, "B T"] | None = None
) -> SumAndCount:
    """Where an answer starts and where it ends: places in the row, its last token included.

    Return the summed loss of starts and ends in nats, and how many of them count: the mean is half the mean
    of the starts and half of the ends. A place beyond the row's real tokens (`mask` True; None: all are) asks
    for nothing, nor does -100. Padding gets no probability, so that its amount changes nothing.
    """
    places = logits.transpose(1, 2)
    if mask is not None:
        closed = ~mask & mask.any(1, keepdim=True)
        places = places.masked_fill(closed[:, None], -torch.inf)
    return token_loss(places, real_spans(spans, mask, logits.shape[1]))


def real_spans(
    spans: Int[Tensor, "B 2"], mask: Bool[Tensor, "B T"] | None, length: int
) -> Int[Tensor, "B 2"]:
    """The places of `spans` that are real tokens of rows of this length; the others become -100."""
    inside = spans < length
    if mask is not None:
        inside &= mask.gather(1, spans.clamp(0, length - 1))
    return spans.where(inside, IGNORE)


def contrastive_loss(
    one: Float[Tensor, "B D"],
    other: Float[Tensor, "N D"],
    scale: float = 20.0,
    symmetric: bool = False,
) -> SumAndCount:
    """Find for each row of `one` its own among all rows of `other`: the one of the same number.

    The others are its negatives (Henderson et al. 2017, arXiv:1705.00652); rows of `other` beyond B belong
    to nobody. The scores are scale times the cosine. `symmetric`: the mean of that and of finding for each of
    the first B rows of `other` its own in `one`. Return the sum in nats and B.
    """
    if len(other) < len(one):
        raise ValueError(f"each of {len(one)} rows needs its own among {len(other)}; give at least as many")
    scores = scale * F.normalize(_wide(one), dim=-1) @ F.normalize(_wide(other), dim=-1).T
    own = torch.arange(len(one), device=one.device)
    loss, count = token_loss(scores, own)
    if symmetric:
        loss = (loss + token_loss(scores[:, : len(one)].T, own)[0]) / 2
    return loss, count


def shift_right(labels: Int[Tensor, "B T"], start_id: int, pad_id: int) -> Int[Tensor, "B T"]:
    """What a decoder reads when it is to say `labels`: [start] + labels[:-1]; -100 becomes `pad_id`.

    So position t sees the right tokens before t, whatever the model would have said ("teacher forcing",
    Williams and Zipser 1989).

    >>> shift_right(torch.tensor([[7, 8, 2, -100]]), start_id=0, pad_id=1)
    tensor([[0, 7, 8, 2]])
    """
    shifted = torch.full_like(labels, start_id)
    shifted[:, 1:] = labels[:, :-1]
    return shifted.masked_fill(shifted == IGNORE, pad_id)


def _formula(
    logits: Float[Tensor, "*batch V"],
    targets: Int[Tensor, "*batch"],
    wanted: Bool[Tensor, "*batch"],
    smoothing: float,
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    scores = _wide(logits)
    total = scores.logsumexp(-1)
    chosen = scores.gather(-1, targets.where(wanted, 0)[..., None]).squeeze(-1)
    if smoothing:
        chosen = (1 - smoothing) * chosen + smoothing * scores.mean(-1)
    return (total - chosen).where(wanted, 0), total


class _TokenLoss(torch.autograd.Function):
    """loss = logsumexp(o) - o[y] for each row, with its gradient softmax(o) - onehot(y) written out.

    Smoothed: logsumexp(o) - (1 - e) o[y] - e mean(o), and softmax(o) - (1 - e) onehot(y) - e / V.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, wanted: Tensor, smoothing: float) -> Tensor:
        losses, total = _formula(logits, targets, wanted, smoothing)
        ctx.save_for_backward(logits, targets, wanted, total)
        ctx.smoothing = smoothing
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, wanted, total = ctx.saved_tensors
        weight = upstream[0].where(wanted, 0)[..., None]
        scores = _wide(logits)
        if torch.is_grad_enabled():  # a second derivative is wanted, so `total` may not be a constant
            gradient = scores.softmax(-1) * weight
        else:
            gradient = (scores - total[..., None]).exp_().mul_(weight)
        gradient.scatter_add_(-1, targets.where(wanted, 0)[..., None], -(1 - ctx.smoothing) * weight)
        if ctx.smoothing:
            gradient = gradient - ctx.smoothing / scores.shape[-1] * weight
        return gradient.to(logits.dtype), None, None, None


class _SharedTokenLoss(torch.autograd.Function):
    """`_TokenLoss` of logits of which only some columns are here: the same loss on every rank.

    loss = log(sum over ranks of s exp(m - M)) + (M - o[y]), so that large logits enter by differences alone.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, wanted: Tensor, smoothing: float, columns: Columns
    ) -> Tensor:
        scores = _wide(logits)
        place = targets - columns.first
        here = wanted & (place >= 0) & (place < scores.shape[-1])
        place = place.where(here, 0)[..., None]
        most = scores.amax(-1)
        chosen = scores.gather(-1, place).squeeze(-1).where(here, 0)
        if smoothing:  # of the mean too, what is here
            chosen = (1 - smoothing) * chosen + smoothing / columns.total * scores.sum(-1)
        told = columns.from_all(torch.stack([most, (scores - most[..., None]).exp_().sum(-1), chosen]))
        tops, sums, chosen = told.unbind(1)
        top = tops.amax(0)
        log_sum = (sums * (tops - top).exp()).sum(0).log()
        ctx.save_for_backward(logits, place, here, wanted, top, log_sum)
        ctx.smoothing, ctx.total = smoothing, columns.total
        return (log_sum + (top - chosen.sum(0))).where(wanted, 0)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None, None, None]:
        assert not torch.is_grad_enabled(), "`top` and `log_sum` are constants here: no second derivative"
        logits, place, here, wanted, top, log_sum = ctx.saved_tensors
        weight = upstream[0].where(wanted, 0)[..., None]
        gradient = (_wide(logits) - top[..., None]).sub_(log_sum[..., None]).exp_().mul_(weight)
        gradient.scatter_add_(-1, place, -(1 - ctx.smoothing) * weight.where(here[..., None], 0))
        if ctx.smoothing:
            gradient -= ctx.smoothing / ctx.total * weight
        return gradient.to(logits.dtype), None, None, None, None


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _count(targets: Tensor) -> Int[Tensor, ""]:
    return torch.full((), targets.numel(), device=targets.device)


def _check(logits: Tensor, targets: Tensor, ignore_index: int) -> None:
    if logits.shape[:-1] != targets.shape:
        need = tuple(logits.shape[:-1])
        raise ValueError(f"logits {tuple(logits.shape)} need targets {need}, not {tuple(targets.shape)}")
    if torch.compiler.is_compiling() or logits.is_cuda or isinstance(logits, FakeTensor):
        return
    size = logits.shape[-1]
    outside = (targets != ignore_index) & ((targets < 0) | (targets >= size))
    if outside.any():
        raise ValueError(
            f"target {int(targets[outside][0])} is outside the vocabulary 0..{size - 1} "
            f"({int(outside.sum())} of {targets.numel()} targets are; {ignore_index} means: ignore)"
        )
