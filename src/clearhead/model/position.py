"""Where a token stands: sinusoidal tables, rotary embeddings and their scalings, relative distances.

    sinusoidal   x + p, one fixed vector p per position
    rotary       queries and keys are turned by angles that grow with the position
    relative     each score + b, one learned number per head and bucket of distances

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
from clearhead.model.config_parts import RotaryScaling


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

    def __init__(
        self,
        d_head: int,
        theta: float = 10_000.0,
        layout: RotaryLayout = "half",
        scaling: RotaryScaling | None = None,
        max_len: int = 0,
    ) -> None:
        super().__init__()
        if d_head % 2:
            raise ValueError(f"rotary positions turn pairs of features: d_head={d_head} must be even")
        if layout not in ("half", "interleaved"):
            raise ValueError(f"rotary layout {layout!r} is unknown; choose half or interleaved")
        self.d_head, self.theta = d_head, theta
        self.layout: RotaryLayout = layout
        self.scaling, self.max_len = scaling, max_len

    def angles(self, positions: Int[Tensor, "*batch T"]) -> Rotation:
        """The rotation of every position, made once per forward pass and shared by all layers and heads."""
        frequencies, factor = frequencies_at(positions, self.d_head, self.theta, self.scaling, self.max_len)
        angles = positions.float()[..., None] * frequencies
        return Rotation(angles.cos() * factor, angles.sin() * factor, self.layout)

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
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:  # the other features stand still
        return torch.cat([rotate(x[..., :width], rotation), x[..., width:]], dim=-1)
    if rotation.layout == "half":
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)


def frequencies_at(
    positions: Int[Tensor, "*batch T"],
    d_head: int,
    theta: float,
    scaling: RotaryScaling | None = None,
    max_len: int = 0,
) -> tuple[Float[Tensor, " pairs"], float | Float[Tensor, ""]]:
    """The turning speed of each pair, theta^(-2i / K) before scaling, and the factor on cosines and sines."""
    exponents = torch.arange(0, d_head, 2, dtype=torch.float32, device=positions.device) / d_head
    plain = 1.0 / theta**exponents
    if scaling is None:
        return plain, 1.0
    original = scaling.original_max_len or max_len
    match scaling.kind:
        case "linear":
            return plain / scaling.factor, 1.0
        case "llama3":
            return blended_frequencies(plain, scaling, original), 1.0
        case "yarn":
            return yarn_frequencies(plain, scaling, original, d_head, theta), yarn_factor(scaling)
        case "dynamic":  # the base grows with the longest sequence, so the angles depend on it
            longest = torch.clamp(positions.max() + 1, min=max_len)
            stretch = scaling.factor * longest / max_len - (scaling.factor - 1)
            return 1.0 / (theta * stretch ** (d_head / (d_head - 2))) ** exponents, 1.0
        case "longrope":  # so do these, at original_max_len
            short, long = (
                torch.tensor(factors, device=positions.device)
                for factors in (scaling.short_factors, scaling.long_factors)
            )
            beyond = positions.max() + 1 > original
            return plain / torch.where(beyond, long, short), longrope_factor(scaling, original, max_len)


def blended_frequencies(
    plain: Float[Tensor, " pairs"], scaling: RotaryScaling, original: int
) -> Float[Tensor, " pairs"]:
    """Slow pairs are stretched by the factor, fast ones kept, those between blended (Llama 3.1)."""
    turns = original * plain / (2 * math.pi)  # within the original length
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return (1 - kept) * plain / scaling.factor + kept * plain


def yarn_frequencies(
    plain: Float[Tensor, " pairs"], scaling: RotaryScaling, original: int, d_head: int, theta: float
) -> Float[Tensor, " pairs"]:
    """The same blend, but linear in the pair's number (Peng et al. 2023, arXiv:2309.00071)."""

    def pair_that_turns(times: float) -> float:
        return d_head * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, d_head - 1)
    high = high + 0.001 if low == high else high
    stretched = torch.arange(len(plain), dtype=torch.float32, device=plain.device)
    stretched = ((stretched - low) / (high - low)).clamp(0, 1)
    return stretched * plain / scaling.factor + (1 - stretched) * plain


def yarn_factor(scaling: RotaryScaling) -> float:
    """0.1 ln(factor) + 1, or the ratio of two such with their own weights; a given one goes before."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all:
        return yarn_growth(scaling.factor, scaling.mscale) / yarn_growth(scaling.factor, scaling.mscale_all)
    return yarn_growth(scaling.factor)


def yarn_growth(factor: float, weight: float = 1.0) -> float:
    """0.1 weight ln(factor) + 1: how much sharper attention becomes for a context `factor` times longer."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def longrope_factor(scaling: RotaryScaling, original: int, max_len: int) -> float:
    """sqrt(1 + ln(times longer) / ln(original)) (Ding et al. 2024, arXiv:2402.13753); a given one goes
    before.
    """
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    longer = scaling.factor if scaling.factor != 1 else max_len / original
    return 1.0 if longer <= 1 else math.sqrt(1 + math.log(longer) / math.log(original))


def relative_bucket(
    distance: Int[Tensor, "T S"], n_buckets: int, max_distance: int, causal: bool
) -> Int[Tensor, "T S"]:
    """The row of the bias table for each key - query distance: near ones one by one, far ones by logarithm.

    Without causality half of the rows are for keys after the query (Raffel et al. 2019, arXiv:1910.10683).
    """
    offset = torch.zeros_like(distance)
    if causal:
        distance = -distance.clamp(max=0)
    else:
        n_buckets //= 2
        offset = (distance > 0) * n_buckets
        distance = distance.abs()
    exact = n_buckets // 2
    spread = torch.log(distance.float() / exact) / math.log(max_distance / exact) * (n_buckets - exact)
    far = (exact + spread.clamp(min=0).long()).clamp(max=n_buckets - 1)
    return offset + torch.where(distance < exact, distance, far)
