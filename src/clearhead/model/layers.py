"""The elementary layers: Linear, Embedding, norms, softmax, activations, FeedForward.

Each class is its formula and nothing more. All accept any number of leading dimensions and act on the last
one. Every layer initialises itself by the course's rule (Stanford CS336, assignment 1), so it can be used
alone; a whole model takes its initial weights from the table in initial.py.
"""

import math
from collections.abc import Callable
from typing import get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.model.config import Activation, ModelConfig, NormKind, default_d_ff
from clearhead.model.products import linear
from clearhead.model.tap import tap


class Linear(nn.Module):
    """y = x W^T (+ b), with W stored (out, in).

    Initial W: truncated normal, mean 0, std sqrt(2 / (in + out)), cut at 3 std; b: zeros.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(d_out, d_in, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(d_out, device=device, dtype=dtype)) if bias else None
        std = math.sqrt(2 / (d_in + d_out))
        nn.init.trunc_normal_(self.weight, mean=0.0, std=std, a=-3 * std, b=3 * std)

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        return linear(x, self.weight, self.bias)


class Embedding(nn.Module):
    """A table of vectors: row i is the vector of token i. Initial rows: N(0, 1) cut at 3."""

    def __init__(
        self,
        n_rows: int,
        d_model: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_rows, d_model, device=device, dtype=dtype))
        nn.init.trunc_normal_(self.weight, mean=0.0, std=1.0, a=-3.0, b=3.0)

    def forward(self, ids: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch D"]:
        try:
            return F.embedding(ids, self.weight)
        except IndexError:  # looking at the ids beforehand would wait for the device
            raise ValueError(
                f"ids from {int(ids.min())} to {int(ids.max())} do not fit a table of {len(self.weight)} rows"
            ) from None


class LayerNorm(nn.Module):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * gain + shift, over the last dimension; var divides by its
    size.

    Statistics in float32 or wider (Ba et al. 2016, arXiv:1607.06450).
    """

    def __init__(self, d_model: int, eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model)) if bias else None

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * gain, over the last dimension, computed in float32 or wider.

    Zhang & Sennrich 2019, arXiv:1910.07467. gain = offset + weight. The result is cast back to x's type
    before the gain, or after it with `wide_gain`: the same in float32.
    """

    def __init__(self, d_model: int, eps: float = 1e-5, offset: float = 0.0, wide_gain: bool = False) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.full((d_model,), 1.0 - offset))
        self.multiply = multiply_then_cast if wide_gain or offset else cast_then_multiply

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        wide = widen(x)
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.multiply(self, wide * scale, x.dtype)


def cast_then_multiply(
    norm: RMSNorm, normed: Float[Tensor, "*batch D"], dtype: torch.dtype
) -> Float[Tensor, "*batch D"]:
    """The gain in x's own type."""
    return normed.to(dtype) * norm.weight


def multiply_then_cast(
    norm: RMSNorm, normed: Float[Tensor, "*batch D"], dtype: torch.dtype
) -> Float[Tensor, "*batch D"]:
    """The gain in float32 or wider; only this face knows an offset."""
    return (normed * (norm.offset + widen(norm.weight))).to(dtype)


class BatchNorm(nn.Module):
    """y = (x - mean) / sqrt(var + eps) * gain + shift, with mean and var of each feature over all other
    dimensions.

    In training the statistics are the batch's (var divides by n) and running averages are kept: running = (1
    - momentum) running + momentum batch (there var divides by n - 1); in eval the running ones are used. All
    in float32 or wider (Ioffe & Szegedy 2015, arXiv:1502.03167). It mixes the sequences of a batch, which is
    why Transformers avoid it.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, d_model: int, eps: float = 1e-5, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(d_model))
        self.bias = nn.Parameter(torch.zeros(d_model))
        self.register_buffer("running_mean", torch.zeros(d_model))
        self.register_buffer("running_var", torch.ones(d_model))

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        wide = widen(x)
        mean, var = self._statistics(wide) if self.training else (self.running_mean, self.running_var)
        return ((wide - mean) / torch.sqrt(var + self.eps) * self.weight + self.bias).to(x.dtype)

    def _statistics(self, x: Float[Tensor, "*batch D"]) -> tuple[Float[Tensor, " D"], Float[Tensor, " D"]]:
        rows = x.reshape(-1, x.shape[-1])
        n = rows.shape[0]
        if n < 2:
            raise ValueError(
                f"BatchNorm in training needs at least 2 rows for a variance, got {n}; use eval()"
            )
        mean, var = rows.mean(0), rows.var(0, correction=0)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
            self.running_var.lerp_((var * n / (n - 1)).to(self.running_var.dtype), self.momentum)
        return mean, var


def make_norm(
    kind: NormKind,
    d_model: int,
    eps: float,
    bias: bool = True,
    offset: float = 0.0,
    wide_gain: bool = False,
) -> LayerNorm | RMSNorm:
    """The norm layer of a config: "layer" or "rms"; another name raises ValueError."""
    if kind == "layer":
        return LayerNorm(d_model, eps, bias)
    if kind == "rms":
        return RMSNorm(d_model, eps, offset, wide_gain)
    raise ValueError(f"norm={kind!r} is unknown; choose one of {', '.join(get_args(NormKind))}")


def make_config_norm(config: ModelConfig) -> LayerNorm | RMSNorm:
    """The norm layer of this config's width and kind."""
    return make_norm(
        config.norm,
        config.d_model,
        config.norm_eps,
        config.norm_bias,
        config.norm_offset,
        config.norm_wide_gain,
    )


def widen(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """`x` in float32 if its type is narrower (bfloat16, float16); float32 and float64 stay as they are."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def softmax(x: Float[Tensor, "*shape"], dim: int) -> Float[Tensor, "*shape"]:
    """exp(x) / sum(exp(x)) along `dim`. The maximum is subtracted first, which changes nothing but the
    overflow.

    >>> softmax(torch.tensor([1.0, 5.0, 100.0, 10000.0]), dim=0)
    tensor([0., 0., 0., 1.])
    """
    wide = widen(x)
    exps = torch.exp(wide - wide.amax(dim, keepdim=True))
    return (exps / exps.sum(dim, keepdim=True)).to(x.dtype)


def relu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """max(0, x)."""
    return F.relu(x)


def relu_squared(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """max(0, x)^2 (So et al. 2021, arXiv:2109.08668)."""
    return F.relu(x).square()


def silu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """x * sigmoid(x) = x / (1 + exp(-x))."""
    return F.silu(x)


def gelu(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """x * Phi(x) = x/2 (1 + erf(x / sqrt 2)), with Phi the normal distribution (arXiv:1606.08415)."""
    return F.gelu(x)


def gelu_tanh(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """GELU's tanh form, x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))): what GPT-2 uses."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": relu,
    "relu_squared": relu_squared,
}


def find_activation(name: Activation) -> Callable[[Tensor], Tensor]:
    """The activation function of this name; an unknown one raises ValueError listing the known."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is unknown; choose one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


class FeedForward(nn.Module):
    """Two linear layers with a non-linearity between them, applied to each position alone.

    Plain:  down(act(up(x))).
    Gated:  down(act(gate(x)) * up(x)), SwiGLU when act = silu (Shazeer 2020, arXiv:2002.05202).
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        activation: Activation = "silu",
        gated: bool = True,
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        width = default_d_ff(d_model, gated=gated) if d_ff is None else d_ff
        self.activation = find_activation(activation)
        if gated:
            self.gate = Linear(d_model, width, bias)
        self.up = Linear(d_model, width, bias)
        self.down = Linear(width, d_model, bias)
        self.dropout = nn.Dropout(dropout)
        self.expand = expand_gated if gated else expand_plain

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        return self.down(self.dropout(tap("hidden", self.expand(self, x))))


def expand_plain(ff: FeedForward, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch F"]:
    """act(up(x))."""
    return ff.activation(ff.up(x))


def expand_gated(ff: FeedForward, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch F"]:
    """act(gate(x)) * up(x)."""
    return ff.activation(ff.gate(x)) * ff.up(x)
