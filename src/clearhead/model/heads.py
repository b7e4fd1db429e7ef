"""What a model predicts from its last hidden states: the next token, a masked one, labels, a span, a vector.

    language model, masked       logits = prepared(x) W^T + b        at every position
    sequence                     logits = prepared(pool(x)) W^T + b  once per sequence
    token, span                  logits = prepared(x) W^T + b        at every position
    embedding                    pool(x) / |pool(x)|                 once per sequence

prepared(x) is x, or norm(act(dense(x))) with the layers the config names. Every head is called as
head(hidden, mask): hidden (B, T, D), mask (B, T) True at real tokens or None.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from clearhead.model.config import ModelConfig, Pool
from clearhead.model.layers import ACTIVATIONS, Linear, make_config_norm
from clearhead.model.products import linear

Mask = Bool[Tensor, "B T"] | None


class Prepared(nn.Module):
    """What comes before a head's output: x as it is, act(dense(x)), or norm(act(dense(x)))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.prepare = keep if config.head_activation is None else transform
        if config.head_activation is None:
            return
        self.dense = Linear(config.d_model, config.d_model, bias=config.head_dense_bias)
        self.activation = HEAD_ACTIVATIONS[config.head_activation]
        self.norm = nn.Identity()
        if config.head_norm:
            self.norm = make_config_norm(config)


def transform(head: Prepared, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
    """norm(act(dense(x)))."""
    return head.norm(head.activation(head.dense(x)))


def keep(head: Prepared, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
    """x as it is."""
    return x


class TokenLogits(Prepared):
    """Logits over the vocabulary: (scale prepared(x)) W^T (+ b), with a softcap c squashed to
    c tanh(logit / c).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.head_bias else None
        self.scale, self.softcap = config.logit_scale, config.logit_softcap
        self.rescale = leave if config.logit_scale == 1.0 else scaled
        self.finish = leave if config.logit_softcap is None else squash

    def forward(self, hidden: Float[Tensor, "B T D"], mask: Mask = None) -> Float[Tensor, "B T V"]:
        x = self.rescale(self, self.prepare(self, hidden))
        return self.finish(self, linear(x, self.weight, self.bias))


def scaled(head: TokenLogits, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
    """scale x."""
    return x * head.scale


def squash(head: TokenLogits, logits: Float[Tensor, "B T V"]) -> Float[Tensor, "B T V"]:
    """c tanh(logits / c)."""
    assert head.softcap is not None
    return head.softcap * torch.tanh(logits / head.softcap)


def leave(head: TokenLogits, x: Tensor) -> Tensor:
    """x as it is."""
    return x


class SequenceLabel(Prepared):
    """One row of logits per sequence: out(prepared(pool(x)))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.pool = POOLS[config.pool]
        self.out = Linear(config.d_model, config.n_labels, bias=config.head_bias)

    def forward(self, hidden: Float[Tensor, "B T D"], mask: Mask = None) -> Float[Tensor, "B labels"]:
        return self.out(self.prepare(self, self.pool(hidden, mask)))


class TokenLabel(Prepared):
    """A row of logits per token: out(prepared(x)). For a span two: how well it starts here, and ends here."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        n_labels = 2 if config.head == "span" else config.n_labels
        self.out = Linear(config.d_model, n_labels, bias=config.head_bias)

    def forward(self, hidden: Float[Tensor, "B T D"], mask: Mask = None) -> Float[Tensor, "B T labels"]:
        return self.out(self.prepare(self, hidden))


class Pooled(nn.Module):
    """One vector per sequence, pool(x), of length 1 if the config says so: cosines are then dot products."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.pool = POOLS[config.pool]
        self.finish = unit_length if config.unit_length else nn.Identity()

    def forward(self, hidden: Float[Tensor, "B T D"], mask: Mask = None) -> Float[Tensor, "B D"]:
        return self.finish(self.pool(hidden, mask))


class Hidden(Prepared):
    """The hidden states themselves. A dense layer that the weights bring along serves `pooled` only."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.pool = POOLS[config.pool]

    def forward(self, hidden: Float[Tensor, "B T D"], mask: Mask = None) -> Float[Tensor, "B T D"]:
        return hidden

    def pooled(self, hidden: Float[Tensor, "B T D"], mask: Mask = None) -> Float[Tensor, "B D"]:
        """prepared(pool(hidden)): what a sequence head of these weights was trained to read."""
        return self.prepare(self, self.pool(hidden, mask))


def pool_first(hidden: Float[Tensor, "B T D"], mask: Mask = None) -> Float[Tensor, "B D"]:
    """The first real position."""
    if mask is None:
        return hidden[:, 0]
    return hidden[torch.arange(len(hidden), device=hidden.device), mask.int().argmax(1)]


def pool_last(hidden: Float[Tensor, "B T D"], mask: Mask = None) -> Float[Tensor, "B D"]:
    """The last real position."""
    if mask is None:
        return hidden[:, -1]
    places = torch.arange(hidden.shape[1], device=hidden.device)
    last = (mask * places).argmax(1)
    return hidden[torch.arange(len(hidden), device=hidden.device), last]


def pool_mean(hidden: Float[Tensor, "B T D"], mask: Mask = None) -> Float[Tensor, "B D"]:
    """The mean over the real positions; 0 for a row of padding alone."""
    if mask is None:
        return hidden.mean(1)
    kept = hidden.masked_fill(~mask[..., None], 0)
    return kept.sum(1) / mask.sum(1, keepdim=True).clamp(min=1).to(hidden.dtype)


def unit_length(x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
    """x / |x|; the zero vector stays."""
    return F.normalize(x, dim=-1)


POOLS: dict[Pool, Callable[..., Tensor]] = {"first": pool_first, "last": pool_last, "mean": pool_mean}
HEAD_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {**ACTIVATIONS, "tanh": torch.tanh}


def make_head(config: ModelConfig) -> nn.Module:
    """The head this config describes, called as head(hidden, mask)."""
    heads: dict[str, Callable[[ModelConfig], nn.Module]] = {
        "lm": TokenLogits,
        "masked": TokenLogits,
        "sequence": SequenceLabel,
        "token": TokenLabel,
        "span": TokenLabel,
        "embedding": Pooled,
        "none": Hidden,
    }
    return heads[config.head](config)
