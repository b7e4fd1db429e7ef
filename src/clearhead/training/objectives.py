"""What a model is asked to get right: the negative log-probability of the token that really came next.

With logits o over a vocabulary of V tokens and the target y, one token costs

    loss = -log softmax(o)[y] = logsumexp(o) - o[y]      and its gradient is      softmax(o) - onehot(y)

`logsumexp` subtracts the largest logit first, so logits of any size are fine. `_formula` is the loss;
`_TokenLoss` adds the gradient, which keeps one number per row for the backward pass where a graph of
elementary operations keeps tensors of the logits' size. A compiled graph takes the bare formula, because the
compiler derives and fuses the gradient itself.

A step's loss is the sum over its target tokens divided by their number, over all its micro-batches together;
`token_loss` gives that sum and that number, so that cutting a batch differently changes nothing.
"""

from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

IGNORE = -100  # the target that asks for nothing, as in torch and transformers


def cross_entropy(
    logits: Float[Tensor, "*batch V"],
    targets: Int[Tensor, "*batch"],
    ignore_index: int = IGNORE,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Float[Tensor, "..."]:
    """Return the loss of `logits` on `targets` in nats, for any leading dimensions, in float32 or wider.

    "mean" divides by the number of targets that are not `ignore_index`; where there are none the loss is 0
    and its gradients are 0. "none" gives one loss per target, 0 where ignored. A target outside the
    vocabulary is a ValueError; a compiled graph leaves that check out, because it would wait for the device.

    >>> cross_entropy(torch.tensor([[0.0, 0.0], [1000.0, 0.0]]), torch.tensor([1, 0]), reduction="none")
    tensor([0.6931, 0.0000])
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction={reduction!r} is unknown; choose 'mean', 'sum' or 'none'")
    _check(logits, targets, ignore_index)
    wanted = targets != ignore_index
    if torch.compiler.is_compiling():
        losses, _ = _formula(logits, targets.long(), wanted)
    else:
        losses = _TokenLoss.apply(logits, targets.long(), wanted)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / wanted.sum().clamp(min=1)


def token_loss(
    logits: Float[Tensor, "*batch V"], targets: Int[Tensor, "*batch"]
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Return the summed loss in nats and the number of targets that count (those that are not -100).

    Add both over everything that belongs together (the micro-batches of a step, a validation set), divide
    once. exp(sum / count) is the perplexity.
    """
    return cross_entropy(logits, targets, reduction="sum"), (targets != IGNORE).sum()


def _formula(
    logits: Float[Tensor, "*batch V"], targets: Int[Tensor, "*batch"], wanted: Bool[Tensor, "*batch"]
) -> tuple[Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    scores = _wide(logits)
    total = scores.logsumexp(-1)
    chosen = scores.gather(-1, targets.where(wanted, 0)[..., None]).squeeze(-1)
    return (total - chosen).where(wanted, 0), total


class _TokenLoss(torch.autograd.Function):
    """loss = logsumexp(o) - o[y] for each row, with its gradient softmax(o) - onehot(y) written out."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, wanted: Tensor) -> Tensor:
        losses, total = _formula(logits, targets, wanted)
        ctx.save_for_backward(logits, targets, wanted, total)
        return losses

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        logits, targets, wanted, total = ctx.saved_tensors
        weight = upstream[0].where(wanted, 0)[..., None]
        scores = _wide(logits)
        if torch.is_grad_enabled():  # a second derivative is wanted, so `total` may not be a constant
            gradient = scores.softmax(-1) * weight
        else:
            gradient = (scores - total[..., None]).exp_().mul_(weight)
        gradient.scatter_add_(-1, targets.where(wanted, 0)[..., None], -weight)
        return gradient.to(logits.dtype), None, None


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _check(logits: Tensor, targets: Tensor, ignore_index: int) -> None:
    if logits.shape[:-1] != targets.shape:
        need = tuple(logits.shape[:-1])
        raise ValueError(f"logits {tuple(logits.shape)} need targets {need}, not {tuple(targets.shape)}")
    if torch.compiler.is_compiling():
        return
    size = logits.shape[-1]
    outside = (targets != ignore_index) & ((targets < 0) | (targets >= size))
    if outside.any():
        raise ValueError(
            f"target {int(targets[outside][0])} is outside the vocabulary 0..{size - 1} "
            f"({int(outside.sum())} of {targets.numel()} targets are; {ignore_index} means: ignore)"
        )
