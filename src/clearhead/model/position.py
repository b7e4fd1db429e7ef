"""Where a token stands: sinusoidal tables, rotary embeddings.

Learned positions are an ordinary Embedding. All angles are float32 or wider and made by elementwise products:
a position that passed through bfloat16 or a reduced-precision matrix product would be wrong from about 256
on.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.model.config import RotaryLayout


def sinusoidal(
    positions: Int[Tensor, "*batch T"], d_model: int, concatenated: bool = False
) -> Float[Tensor, "*batch T D"]:
    """The fixed position vectors of the original Transformer (Vaswani et al. 2017, arXiv:1706.03762, 3.5).

    p[2i] = sin(position / 10000^(2i / D)), p[2i + 1] = cos of the same angle; `concatenated` puts all sines
    first, then all cosines. D must be even.

    >>> sinusoidal(torch.tensor([0]), 4)
    tensor([[0., 1., 0., 1.]])
    """
    if d_model % 2:
        raise ValueError(f"sinusoidal positions need an even d_model, got {d_model}")
    # float64: the angles of far positions lose their fraction in float32
    exponents = torch.arange(0, d_model, 2, dtype=torch.float64, device=positions.device) / d_model
    angles = positions.double()[..., None] / 10_000.0**exponents
    sines, cosines = angles.sin().float(), angles.cos().float()
    if concatenated:
        return torch.cat([sines, cosines], dim=-1)
    return torch.stack([sines, cosines], dim=-1).flatten(-2)


class Rotation(NamedTuple):
    """Cosines and sines of the angles by which pairs of features turn, shape (..., T, K/2), and the pairs'
    layout.
    """

    cos: Tensor
    sin: Tensor
    layout: RotaryLayout


class Rotary(nn.Module):
    """Rotary position embedding: turn each pair of features by position * theta^(-2i / K).

    With (a, b) the pair i and angle w:  (a cos w - b sin w, a sin w + b cos w).  A rotation keeps lengths,
    and the product of a turned query and a turned key depends only on the difference of their positions (Su
    et al. 2021, arXiv:2104.09864). `layout`: "half" pairs feature i with i + K/2 (the published Llama-type
    weights), "interleaved" pairs 2i with 2i + 1 (the paper, and course CS336).

    >>> x = torch.tensor([[1.0, 0.0]])
    >>> Rotary(2)(x, torch.tensor([1]))  # cos 1, sin 1
    tensor([[0.5403, 0.8415]])
    """

    def __init__(self, d_head: int, theta: float = 10_000.0, layout: RotaryLayout = "half") -> None:
        super().__init__()
        if d_head % 2:
            raise ValueError(f"rotary positions turn pairs of features: d_head={d_head} must be even")
        if layout not in ("half", "interleaved"):
            raise ValueError(f"rotary layout {layout!r} is unknown; choose half or interleaved")
        self.d_head, self.theta = d_head, theta
        self.layout: RotaryLayout = layout

    def angles(self, positions: Int[Tensor, "*batch T"]) -> Rotation:
        """The rotation of every position, made once per forward pass and shared by all layers and heads."""
        exponents = (
            torch.arange(0, self.d_head, 2, dtype=torch.float32, device=positions.device) / self.d_head
        )
        frequencies = 1.0 / self.theta**exponents
        angles = positions.float()[..., None] * frequencies
        return Rotation(angles.cos(), angles.sin(), self.layout)

    def forward(
        self, x: Float[Tensor, "*batch T K"], positions: Int[Tensor, "*positions T"]
    ) -> Float[Tensor, "*batch T K"]:
        """Turn queries or keys (..., T, K). `positions` is (T), the same for all, or has every dimension of x
        but the last: for x (B, H, T, K) and positions (B, T), give positions[:, None].
        """
        shared = math.prod(positions.shape[:-1]) == 1
        if x.shape[-1] != self.d_head or x.shape[-2] != positions.shape[-1]:
            raise ValueError(
                f"x {tuple(x.shape)} must end in a length of {positions.shape[-1]} and d_head={self.d_head}"
            )
        if not shared and positions.dim() != x.dim() - 1:  # (B, T) against (B, H, T, K) would mix up B and H
            raise ValueError(
                f"positions {tuple(positions.shape)} must be one row or have every dimension of "
                f"x {tuple(x.shape)} but the last; insert the missing ones"
            )
        return rotate(x, self.angles(positions))


def rotate(x: Float[Tensor, "*batch T K"], rotation: Rotation) -> Float[Tensor, "*batch T K"]:
    """Turn the pairs of features of queries or keys by the angles of their positions."""
    cos, sin = rotation.cos.to(x.dtype), rotation.sin.to(x.dtype)
    if rotation.layout == "half":
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
