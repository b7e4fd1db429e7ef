"""What a page asks for: what the model would say at every depth, where its heads look, slices of any value.

    lens      word(row, t) = argmax of head(norm(row_t)): what the model would say if it stopped there
    heads     32 x 32 pictures of the weights, each pixel the largest of n x n cells; scores measured on them
    slices    any part of a value, at a level of detail: each cell the max or sum of 2^level x 2^level

Everything is arithmetic on recorded values; nothing here runs the model's blocks. The lens of the last row is
the model's own logits.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped, UInt8
from torch import Tensor, nn

from clearhead.inspector.manifest import manifest as manifest
from clearhead.inspector.manifest import map_rows as map_rows
from clearhead.model.heads import TokenLogits, keep
from clearhead.model.layers import LayerNorm, RMSNorm
from clearhead.model.transformer import Transformer

THUMBNAIL = 32  # pixels on a side
SCORES = ("entropy", "distance", "previous", "same", "induction", "first")
LARGEST_SLICE = 4_194_304  # numbers in one answer
_LENS_NUMBERS = 1 << 24  # logits held at once while the lens is worked out

Reduce = Literal["max", "sum"]


# -------------------------------------------------------------------------------------------------- the lens


class Lens(NamedTuple):
    """What each row of the map would say at each position, and how surely."""

    ids: Int[Tensor, "R T"]
    p: Float[Tensor, "R T"]


def top_words(logits: Float[Tensor, "N V"]) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """The likeliest word of each row and its probability, softmax in float32."""
    wide = logits.float()
    top, ids = wide.max(-1)
    return ids.int(), torch.exp(top - wide.logsumexp(-1))


def lens(
    model: Transformer,
    rows: Float[Tensor, "R T D"],
    logits: Float[Tensor, "T V"],
    stop: Callable[[], None] = lambda: None,
) -> Lens:
    """The lens of every row: the final norm and the head, applied to each position of it.

    `rows`: the rows of the map above the last one. The last row's lens is read off the model's `logits`.
    `stop` is called now and then and may raise.
    """
    stack = model.stack
    flat = rows.flatten(0, 1)
    step = max(1, _LENS_NUMBERS // max(1, logits.shape[-1]))
    found = []
    for part in flat.split(step):
        stop()
        found.append(top_words(model.head(stack.norm(part)[None])[0]))
    found.append(top_words(logits))
    shape = (rows.shape[0] + 1, rows.shape[1])
    return Lens(*(torch.cat(parts).view(shape) for parts in zip(*found, strict=True)))


def of_tokens(
    model: Transformer, rows: Float[Tensor, "R T D"], logits: Float[Tensor, "T V"], ids: Int[Tensor, " n"]
) -> tuple[Float[Tensor, "n R1 T"], Float[Tensor, "n R1 T"]]:
    """The logits and probabilities of some tokens at every row and position, by the lens.

    The rows are those of `lens`; one more follows them, read off the model's `logits`.
    """
    flat = rows.flatten(0, 1)
    step = max(1, _LENS_NUMBERS // max(1, logits.shape[-1]))
    parts = [model.head(model.stack.norm(part)[None])[0].float() for part in flat.split(step)]
    found = []
    for part in (*parts, logits.float()):
        said = part[:, ids]
        found.append(torch.stack([said, torch.exp(said - part.logsumexp(-1, keepdim=True))]))
    both = torch.cat(found, 1).unflatten(1, (rows.shape[0] + 1, rows.shape[1])).permute(0, 3, 1, 2)
    return both[0].contiguous(), both[1].contiguous()


def norms(rows: Float[Tensor, "R T D"]) -> Float[Tensor, "R T"]:
    """The length of every vector."""
    return rows.float().norm(dim=-1)


@torch.no_grad()
def pushes(
    model: Transformer, rows: Float[Tensor, "R D"], word: int
) -> tuple[Float[Tensor, " R"], float] | None:
    """What each row of the map adds to the logit of a word at one position, and what biases add.

        logit = Σ_r u · (row_r - row_(r-1)) + rest      u: the word's row of the head, through the final norm

    The scale of that norm is held as it is here, and a softcap comes after the sum. None for a model whose
    head is no plain product.
    """
    head, norm = model.head, model.stack.norm
    if not isinstance(head, TokenLogits) or head.prepare is not keep:
        return None
    wide, toward = rows.float(), head.weight[word].float() * head.scale
    rest = 0.0 if head.bias is None else float(head.bias[word])
    if isinstance(norm, RMSNorm):
        scale = torch.rsqrt(wide[-1].pow(2).mean() + norm.eps)
        toward = toward * (norm.weight.float() + norm.offset) * scale
    elif isinstance(norm, LayerNorm):
        rest += 0.0 if norm.bias is None else float(toward @ norm.bias.float())
        gained = toward * norm.weight.float()
        toward = (gained - gained.mean()) * torch.rsqrt(wide[-1].var(correction=0) + norm.eps)
    elif not isinstance(norm, nn.Identity):
        return None
    added = torch.cat([wide[:1], wide[1:] - wide[:-1]])
    return added @ toward, rest


def nearest_rows(table: Float[Tensor, "V D"], row: int, n: int = 8) -> list[tuple[int, float]]:
    """The rows of a table whose direction is nearest to that of one row, and the cosine of the angle between.

    >>> nearest_rows(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]), 0, 2)
    [(1, 1.0), (2, 0.0)]
    """
    if not 0 <= row < len(table):
        raise ValueError(f"row={row} should be one of the {len(table)} rows of the table")
    wide = table.float()
    lengths = wide.norm(dim=-1).clamp(min=1e-12)
    cosines = wide @ wide[row] / lengths / lengths[row]
    cosines[row] = -2  # a row is nearest to itself
    best = cosines.topk(min(n, len(table) - 1))
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


# --------------------------------------------------------------------------------------------------- heads


def pool_factor(n_queries: int, n_keys: int) -> int:
    """How many cells on a side one pixel of a thumbnail stands for: a power of two, so that pictures of a
    text that grows can be halved.
    """
    return 1 << max(0, math.ceil(math.log2(max(n_queries, n_keys, 1) / THUMBNAIL)))


def halved(picture: UInt8[Tensor, "H 32 32"], times: int) -> UInt8[Tensor, "H 32 32"]:
    """The picture whose pixels stand for twice as many cells on a side, or 2^times as many."""
    for _ in range(times):
        small = picture.unflatten(2, (-1, 2)).amax(3).unflatten(1, (-1, 2)).amax(2)
        picture = F.pad(small, (0, THUMBNAIL // 2, 0, THUMBNAIL // 2))
    return picture


def thumbnails(weights: Float[Tensor, "H T S"], factor: int, first: int = 0) -> UInt8[Tensor, "H 32 32"]:
    """Pictures of attention weights, 255 = 1; a pixel is the largest of factor x factor cells.

    `first`: the position of the first row given, where rows are added to a picture that exists.
    """
    heads, n_queries, n_keys = weights.shape
    before = first % factor
    below, right = -(before + n_queries) % factor, -n_keys % factor
    padded = F.pad(weights.float(), (0, right, before, below))
    pooled = padded.unflatten(2, (-1, factor)).amax(3).unflatten(1, (-1, factor)).amax(2)
    picture = torch.zeros(heads, THUMBNAIL, THUMBNAIL, dtype=torch.uint8, device=weights.device)
    row = first // factor
    pixels = (pooled * 255).round().clamp(0, 255).byte()
    picture[:, row : row + pixels.shape[1], : pixels.shape[2]] = pixels
    return picture


def head_scores(
    weights: Float[Tensor, "H T S"],
    queries: Int[Tensor, " T"],
    keys: Int[Tensor, " S"],
    first: int = 0,
    cross: bool = False,
) -> Float[Tensor, "H T 6"]:
    """Of every row of weights: entropy in nats, mean distance, and the weight on certain keys.

    previous: the token just before. same: other places of the query's token. induction: what followed the
    other places of the query's token. first: the first key. `queries`, `keys`: their tokens; `first`: the
    position of the first query. In cross-attention only entropy and the first key have a meaning; the rest
    is 0.
    """
    wide = weights.float()
    entropy = -torch.xlogy(wide, wide).sum(-1)
    places = torch.arange(first, first + len(queries), device=weights.device)[:, None]
    spots = torch.arange(len(keys), device=weights.device)[None]
    nothing = torch.zeros_like(entropy)
    if cross:
        return torch.stack([entropy, nothing, nothing, nothing, nothing, wide[..., 0]], -1)
    apart = (places - spots).abs()
    equal = (queries[:, None] == keys[None]) & (apart > 0)
    followed = F.pad(equal[:, :-1], (1, 0)) & (spots <= places)
    parts = [apart, spots == places - 1, equal, followed]
    masses = [torch.einsum("hts,ts->ht", wide, part.to(wide.dtype)) for part in parts]
    return torch.stack([entropy, *masses, wide[..., 0]], -1)


def mean_scores(scores: Float[Tensor, "H T 6"]) -> Float[Tensor, "H 6"]:
    """The mean over positions; the first one, which has no choice, counts only if it is alone."""
    return scores[:, 1:].mean(1) if scores.shape[1] > 1 else scores.mean(1)


# -------------------------------------------------------------------------------------------------- slices


Place = tuple[int | slice, ...]


def parse_place(text: str, shape: Sequence[int]) -> Place:
    """The place that "0,1,:,0:64" means in a value of this shape; axes left out are whole.

    >>> parse_place("0,:,2:4", (1, 5, 9))
    (0, slice(0, 5, None), slice(2, 4, None))
    """
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    if len(parts) > len(shape):
        raise ValueError(f"at={text!r:.60} names {len(parts)} axes; the value has shape {list(shape)}")
    parts += [":"] * (len(shape) - len(parts))
    place: list[int | slice] = []
    for part, size in zip(parts, shape, strict=True):
        found = re.fullmatch(r"(\d{1,9})|(\d{1,9})?:(\d{1,9})?", part, re.ASCII)
        if found is None:
            raise ValueError(f"at={text!r:.60} is no place; each axis is a number, a:b, or :")
        if found[1] is not None:
            if int(found[1]) >= size:
                raise ValueError(f"at={text!r:.60} is outside the shape {list(shape)}")
            place.append(int(found[1]))
            continue
        start, end = int(found[2] or 0), size if found[3] is None else min(int(found[3]), size)
        if start >= end:
            raise ValueError(f"at={text!r:.60} holds nothing of the shape {list(shape)}")
        place.append(slice(start, end))
    return tuple(place)


def pool(value: Shaped[Tensor, "..."], level: int, reduce: Reduce = "max") -> Shaped[Tensor, "..."]:
    """Each cell the max or sum of 2^level cells along each of the last two axes; exactly those cells.

    >>> pool(torch.tensor([1.0, 3.0, 2.0]), 1)
    tensor([3., 2.])
    """
    if not 0 <= level <= 20:
        raise ValueError(f"level={level} must be between 0 and 20")
    if reduce not in ("max", "sum"):
        raise ValueError(f"reduce={reduce!r:.20} is unknown; choose max or sum")
    for axis in range(max(0, value.dim() - 2), value.dim()) if level else ():
        size = min(1 << level, value.shape[axis])
        parts = value.split(size, dim=axis)
        whole = parts[:-1] if parts[-1].shape[axis] < size else parts
        rest = parts[len(whole) :]
        joined = value.narrow(axis, 0, size * len(whole)).unflatten(axis, (len(whole), size))
        blocks = [_reduced(joined, axis + 1, reduce), *(_reduced(part, axis, reduce, True) for part in rest)]
        value = torch.cat(blocks, dim=axis)
    return value


def _reduced(value: Tensor, axis: int, reduce: Reduce, keep: bool = False) -> Tensor:
    return value.amax(axis, keepdim=keep) if reduce == "max" else value.sum(axis, keepdim=keep)


class Cut(NamedTuple):
    """A slice as it is sent; a byte stands for low + byte (high - low) / 255."""

    x: Tensor
    low: float
    high: float


def cut(
    value: Shaped[Tensor, "..."], at: str = "", level: int = 0, reduce: Reduce = "max", dtype: str = "f32"
) -> Cut:
    """The slice of a value that a page asks for. ValueError for a place that is not there, or too large."""
    if dtype not in ("f32", "u8"):
        raise ValueError(f"dtype={dtype!r:.20} is unknown; choose f32 or u8")
    part = value[parse_place(at, value.shape)]
    if part.numel() >> (2 * level if part.dim() > 1 else level) > LARGEST_SLICE:
        raise ValueError(
            f"this slice holds {part.numel()} numbers and at most {LARGEST_SLICE} are sent at once; "
            "ask for a part of it, or a higher level"
        )
    if part.dtype in (torch.bool, torch.float16, torch.bfloat16, torch.float64):
        part = part.float()
    part = pool(part, level, reduce)
    if dtype == "f32":
        return Cut(part.contiguous(), 0.0, 1.0)
    wide = part.float()
    finite = wide[wide.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 1.0)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    span = high - low if high > low else 1.0
    scaled = ((wide - low) / span * 255).nan_to_num(0, 255, 0).round().clamp(0, 255).byte()
    return Cut(scaled.contiguous(), low, high)
