"""What a model predicts from its last hidden states: the next token, a masked one, labels, a span.

Every head is called as head(hidden, mask): hidden (B, T, D), mask (B, T) True at real tokens or None.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from clearhead.model.config import ModelConfig
from clearhead.model.layers import Linear, find_activation, make_norm

Mask = Bool[Tensor, "B T"] | None


class TokenLogits(nn.Module):
    """Logits over the vocabulary: (scale x) W^T (+ b), squashed to c tanh(logit / c) with a softcap c.

    A masked-token head transforms x first: norm(act(dense(x))).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.head_activation is not None:
            self.dense = Linear(config.d_model, config.d_model, bias=config.norm_bias)
            self.activation = find_activation(config.head_activation)
            self.norm = make_norm(config.norm, config.d_model, config.norm_eps, config.norm_bias)
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.bias = nn.Parameter(torch.zeros(config.vocab_size)) if config.head_bias else None
        self.scale, self.softcap = config.logit_scale, config.logit_softcap
        self.transform = keep if config.head_activation is None else transform
        self.finish = squash if config.logit_softcap is not None else leave
        self.prepare = scaled if config.logit_scale != 1.0 else leave

    def forward(self, hidden: Float[Tensor, "B T D"], mask: Mask = None) -> Float[Tensor, "B T V"]:
        x = self.prepare(self, self.transform(self, hidden))
        return self.finish(self, F.linear(x, self.weight, self.bias))


def transform(head: TokenLogits, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
    """norm(act(dense(x)))."""
    return head.norm(head.activation(head.dense(x)))


def keep(head: TokenLogits, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
    """x as it is."""
    return x


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


class SequenceLabel(nn.Module):
    """One row of logits per sequence, from one position or the mean: out(act(dense(pool(x)))) or
    out(pool(x)).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        has_dense = config.pool_activation != "none"
        self.dense = Linear(config.d_model, config.d_model, bias=True) if has_dense else nn.Identity()
        self.activation = POOL_ACTIVATIONS[config.pool_activation]
        self.pool = POOLS[config.pool]
        self.out = Linear(config.d_model, config.n_labels, bias=config.head_bias)

    def forward(self, hidden: Float[Tensor, "B T D"], mask: Mask = None) -> Float[Tensor, "B labels"]:
        return self.out(self.activation(self.dense(self.pool(hidden, mask))))


class TokenLabel(nn.Module):
    """A row of logits per token; with two labels the start and the end of a span."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.out = Linear(config.d_model, config.n_labels, bias=config.head_bias)

    def forward(self, hidden: Float[Tensor, "B T D"], mask: Mask = None) -> Float[Tensor, "B T labels"]:
        return self.out(hidden)


class Hidden(nn.Module):
    """The hidden states themselves."""

    def forward(self, hidden: Float[Tensor, "B T D"], mask: Mask = None) -> Float[Tensor, "B T D"]:
        return hidden


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
    """The mean over the real positions."""
    if mask is None:
        return hidden.mean(1)
    weights = mask.to(hidden.dtype)[..., None]
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1e-9)


POOLS: dict[str, Callable[..., Tensor]] = {"first": pool_first, "last": pool_last, "mean": pool_mean}
POOL_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
}


def make_head(config: ModelConfig) -> nn.Module:
    """The head this config describes."""
    heads: dict[str, Callable[[ModelConfig], nn.Module]] = {
        "lm": TokenLogits,
        "masked": TokenLogits,
        "sequence": SequenceLabel,
        "token": TokenLabel,
        "span": TokenLabel,
        "none": lambda config: Hidden(),
    }
    return heads[config.head](config)
