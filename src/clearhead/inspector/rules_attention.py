"""Where the numbers of an attention come from: queries and keys turned by position, scores, weights, the mix.

    scores[h, t, s] = scale Σ_k queries[h, t, k] keys[g, s, k]      g the key/value head that serves head h
    weights = softmax of a row of scores over the keys that may be seen      mixed = Σ_s weights values

Each function is a rule: it takes the place of a number and says which others it was made from.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from clearhead.inspector.cells import Factor, Index, Made, Place, within
from clearhead.inspector.rules import product, same
from clearhead.model.attention import Attention
from clearhead.model.masks import Causal
from clearhead.model.position import Rotation


def head_of(at: Place, part: str, heads: str, width: int) -> tuple[str, Index]:
    """Where the feature (b, h, t, k) of cut heads stands: in the normed heads, or in the projection."""
    b, h, t, k = at.index
    normed = at.below(heads)
    if normed in at.trace.nodes and at.trace.values[normed].dim() == 4:
        return normed, at.index
    return (normed if normed in at.trace.nodes else at.below(part)), (b, t, h * width + k)


def turned(at: Place, part: str, heads: str) -> Made:
    """A feature of a query or key: clipped, and turned with its partner by the angle of its position."""
    module, rotation = at.module, at.given.get("rotation")
    place = head_of(at, part, heads, module.d_head)
    if rotation is None:
        return clipped(at, *place)
    return turn(at, rotation, place, limit=limit_of(module))


def turn(
    at: Place, rotation: Rotation, place: tuple[str, Index], first: int = 0, limit: float | None = None
) -> Made:
    """x cos - y sin, or y cos + x sin of the pair that the feature belongs to; `first`: where pairs begin."""
    (name, index), (b, _, t, k), pairs = place, at.index, rotation.cos.shape[-1]
    k -= first
    if k >= 2 * pairs:  # this feature stands still
        return clipped(at, name, index)
    half = rotation.layout == "half"
    pair, second = (k % pairs, k >= pairs) if half else (k // 2, bool(k % 2))
    other = index[-1] + (pairs if half else 1) * (-1 if second else 1)
    cos, sin = angle_at(rotation.cos, b, t, pair), angle_at(rotation.sin, b, t, pair)
    own, across = at.factor(name, *index), at.factor(name, *index[:-1], other)
    if limit is not None:
        own, across = (
            Factor(min(max(x.value, -limit), limit), x.name, x.index, "clipped") for x in (own, across)
        )
    terms = (
        (own, Factor(cos, label=f"cos of pair {pair}'s angle at position {t}")),
        (across, Factor(sin if second else -sin, label=f"{'' if second else '-'}sin of the same angle")),
    )
    return Made("rotate", "sum", terms, params={"pair": pair, "angle": math.atan2(sin, cos), "place": t})


def angle_at(values: Tensor, b: int, t: int, pair: int) -> float:
    """A cosine or sine of (..., T, pairs), whose leading sizes may be 1 or missing."""
    values = values[(None,) * (4 - values.dim())]
    return float(values[within((b, 0, t, pair), values)])


def limit_of(module: Attention) -> float | None:
    """The clip of queries, keys and values, if there is one."""
    return getattr(module.limit, "keywords", {}).get("max")


def clipped(at: Place, name: str, index: Index, limit: float | None = None) -> Made:
    """The same cell, clipped if the module clips."""
    limit = limit_of(at.module) if limit is None and isinstance(at.module, Attention) else limit
    if limit is None:
        return same(name, index, at=at)
    return Made("clip", "clip", ((at.factor(name, *index),),), params={"limit": limit})


def queries(at: Place) -> Made:
    """Queries of an attention."""
    return turned(at, "q", "q_norm")


def keys(at: Place) -> Made:
    """Keys of an attention."""
    return turned(at, "k", "k_norm")


def values(at: Place) -> Made:
    """Values: a head's share of the projection."""
    b, g, t, k = at.index
    return clipped(at, at.below("v"), (b, t, g * at.module.d_head + k))


def shared(at: Place, name: str, head: int) -> int:
    """The key/value head that serves a query head."""
    heads = at.trace.values[at.below("queries")].shape[1]
    return head // (heads // at.trace.values[at.below(name)].shape[1])


def scores(at: Place) -> Made:
    """query . key, scaled."""
    b, h, t, s = at.index
    width = at.trace.values[at.below("queries")].shape[-1]
    g, scale = shared(at, "keys", h), at.module.scale
    terms = tuple(
        (at.factor(at.below("queries"), b, h, t, k), at.factor(at.below("keys"), b, g, s, k))
        for k in range(width)
    )
    scale = 1 / math.sqrt(width) if scale is None else scale
    params = {"head": h, "shared_head": g}
    return Made("contract", "sum", terms, scale, params=params, code={"q": "queries", "k": "keys"})


def weights(at: Place) -> Made:
    """Softmax over the keys that may be seen."""
    b, h, t, s = at.index
    row = at.trace.values[at.below("scores")].shape[-1]
    terms = tuple((at.factor(at.below("scores"), b, h, t, j),) for j in range(row))
    allowed = cut(at.given.get("mask"), at.index, row)
    bias = cut(at.given.get("bias"), at.index, row)
    sinks = getattr(at.module, "sinks", None)
    params: dict[str, Any] = {"at": s, "allowed": allowed, "bias": bias}
    params["sink"] = None if sinks is None else at.weight("sinks", h).value
    params["softcap"] = getattr(at.module, "softcap", None)
    note = "" if allowed is None or allowed[s] else why_hidden(at, t, s)
    return Made("softmax", "softmax", terms, params=params, note=note, code={"scores": "scores"})


def cut(values: Tensor | Causal | None, index: Index, row: int) -> list[Any] | None:
    """The row of a mask or bias that belongs to a row of the scores (b, h, t)."""
    if values is None:
        return None
    if isinstance(values, str):
        return [s <= index[-2] for s in range(row)]
    place = [min(i, size - 1) for i, size in zip(index[-values.dim() : -1], values.shape[:-1], strict=True)]
    return values[tuple(place)].expand(row).tolist()


def why_hidden(at: Place, t: int, s: int) -> str:
    """Why a query may not see a key."""
    cross = at.given.get("remembered") is not None
    real = at.trace.source_mask if cross else at.trace.mask
    if real is not None and not bool(real[at.index[0], s]):
        return "masked: the key is padding"
    if s > t:
        return "masked: the key comes after the query (causal)"
    return "masked: the key is outside the window"


def mixed(at: Place) -> Made:
    """The mean of the values by the weights."""
    b, h, t, k = at.index
    g, row = shared(at, "values", h), at.trace.values[at.below("weights")].shape[-1]
    terms = tuple(
        (at.factor(at.below("weights"), b, h, t, s), at.factor(at.below("values"), b, g, s, k))
        for s in range(row)
    )
    code = {"weights": "weights", "v": "values"}
    return Made("contract", "sum", terms, params={"head": h, "shared_head": g}, code=code)


def projected(part: str) -> Callable[[Place], Made]:
    """Queries, keys or values when one product makes all three."""

    def rule(at: Place) -> Made:
        b, t, feature = at.index
        source = at.trace.input_of(at.node.path)
        return product(at, source, (b, t), f"{part}.weight", f"{part}.bias", feature)

    return rule


def merged(at: Place) -> Made:
    """Features of all heads side by side, made from the mix of each."""
    path = at.node.path.rpartition(".")[0]
    b, t, feature = at.index
    width = at.trace.values[f"{path}.mixed"].shape[-1]
    return same(f"{path}.mixed", (b, feature // width, t, feature % width), at=at)


def split_projection(part: str) -> Callable[[Place], Made]:
    """Heads cut out of a projection, in front of their norm."""

    def rule(at: Place) -> Made:
        path = at.node.path.rpartition(".")[0]
        b, h, t, k = at.index
        return same(f"{path}.{part}", (b, t, h * at.trace.modules[path].d_head + k), at=at)

    return rule


# latent attention: queries and keys are [plain | turned]


def latent_queries(at: Place) -> Made:
    """The plain features of a query, or the turned ones."""
    b, h, t, k = at.index
    sizes = at.module.latent
    source = at.below("q" if sizes.q_rank is None else "q_b")
    place = source, (b, t, h * sizes.d_key + k)
    if k < sizes.d_plain or at.given.get("rotation") is None:
        return same(*place, at=at)
    return turn(at, at.given["rotation"], place, first=sizes.d_plain)


def latent_keys(at: Place) -> Made:
    """The plain features of a key come from the latent, the turned ones are the same in every head."""
    b, h, t, k = at.index
    sizes = at.module.latent
    if k < sizes.d_plain:
        return same(at.below("kv_b"), (b, t, h * (sizes.d_plain + sizes.d_value) + k), at=at)
    place = at.below("kv_a"), (b, t, sizes.kv_rank + k - sizes.d_plain)
    if at.given.get("rotation") is None:
        return same(*place, at=at)
    return turn(at, at.given["rotation"], place, first=sizes.d_plain)


def latent_values(at: Place) -> Made:
    """Values come from the latent."""
    b, h, t, k = at.index
    sizes = at.module.latent
    return same(at.below("kv_b"), (b, t, h * (sizes.d_plain + sizes.d_value) + sizes.d_plain + k), at=at)


def latent_part(at: Place) -> Made:
    """The latent in front of its norm is the first part of kv_a."""
    return same(f"{at.node.path.rpartition('.')[0]}.kv_a", at.index, at=at)


def latent_itself(at: Place) -> Made:
    """What kv_b reads is the normed latent."""
    path = at.node.path.rpartition(".")[0]
    b, t, r = at.index
    four = at.trace.values[f"{path}.kv_a_norm"].dim() == 4
    return same(f"{path}.kv_a_norm", (b, 0, t, r) if four else at.index, at=at)
