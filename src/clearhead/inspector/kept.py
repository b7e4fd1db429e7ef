"""What is kept of a pass: what was asked, what the map shows of it, and pictures of its heads that can grow.

A head is kept as a picture of its weights, scores measured on them, the row of the last query, and where they
are small all rows. When a text grows by tokens, only what the new queries add is worked out:

    picture(T + n) = max(picture(T), thumbnail of the new rows)      scores(T + n) = [scores(T), new scores]
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from clearhead.inspector.record import Edit
from clearhead.inspector.trace import Trace
from clearhead.inspector.views import Lens, halved, head_scores, pool_factor, thumbnails
from clearhead.model.stack import Memory

_MOST_PARTS = 48


@dataclass(frozen=True)
class Question:
    """What a pass is asked: tokens, what an encoder-decoder reads, and changes on the way."""

    ids: tuple[int, ...]
    source: tuple[int, ...] | None = None
    edits: tuple[Edit, ...] = ()
    edit_key: str = ""  # says the edits as text
    step: int | None = None  # of a run: after how many steps of its training


class Look(NamedTuple):
    """One attention of the model: the stack it stands in, its layer there, and what it looks at."""

    path: str
    stack: str
    layer: int
    cross: bool


@dataclass(frozen=True)
class Heads:
    """What is kept of the heads of one attention. `rows`: the weights, as the parts in which they came."""

    picture: UInt8[Tensor, "H 32 32"]
    factor: int
    scores: Float[Tensor, "H T 6"]
    rows: tuple[Tensor, ...] | None  # each (H, n, S) with the S of its time
    last: Float[Tensor, "H S"]

    def row(self, position: int) -> Float[Tensor, "H S"] | None:
        """The weights of one query; None if they were not kept."""
        if position == self.scores.shape[1] - 1:
            return self.last
        for part in self.rows or ():
            if position < part.shape[1]:
                return part[:, position]
            position -= part.shape[1]
        return None


@dataclass
class Pass:
    """What is kept of one pass."""

    id: str
    question: Question
    output: Tensor  # what the model says: (T, V), or (labels,), or anything of a foreign module
    lens: Lens | None
    norms: dict[str, Tensor]  # stack -> (R, T)
    heads: dict[str, Heads]  # by the path of the attention
    delta: float | None  # how far the fused path's logits are from these, once that was measured
    seconds: float
    trace: Trace | None = None  # all values, of a whole pass
    rows: dict[str, Tensor] = field(default_factory=dict)  # of a long pass: the rows of the map, (1, T, D)
    given: dict[str, dict[str, Any]] = field(default_factory=dict)  # of a long pass: what its blocks got
    memory: Memory | None = None
    joined: bool = False  # made longer, token by token
    n_bytes: int = 0

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.question.ids)

    def weigh(self) -> int:
        """The memory that this pass holds, tensors shared with others counted in full."""
        tensors = [self.output, *self.rows.values(), *self.norms.values()]
        tensors += [part for heads in self.heads.values() for part in heads.rows or ()]
        tensors += list(self.trace.values.values()) if self.trace is not None else []
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


def heads_of(
    weights: Float[Tensor, "H T S"],
    queries: Int[Tensor, " T"],
    keys: Int[Tensor, " S"],
    *,
    cross: bool,
    keep_rows: bool,
) -> Heads:
    """What is kept of the weights of all queries. `queries`, `keys`: their tokens."""
    factor = pool_factor(*weights.shape[1:])
    return Heads(
        thumbnails(weights, factor),
        factor,
        head_scores(weights, queries, keys, cross=cross),
        (weights,) if keep_rows else None,
        weights[:, -1].clone(),
    )


def first_heads(heads: Heads, start: int, factor: int, cross: bool) -> Heads:
    """The same heads at their first `start` queries, pictured for a text whose pixels stand for `factor`."""
    if start == heads.scores.shape[1]:
        if factor == heads.factor:
            return heads
        grown = halved(heads.picture, (factor // heads.factor).bit_length() - 1)
        return replace(heads, picture=grown, factor=factor)
    assert heads.rows is not None
    rows, left = [], start
    for part in heads.rows:
        if left > 0:
            rows.append(part[:, :left])
            left -= part.shape[1]
    width = heads.last.shape[-1] if cross else start
    if factor == heads.factor:  # the row of pixels that is cut through is painted again, those below are not
        line = start // factor
        picture = heads.picture.clone()
        picture[:, line:] = 0
        if start % factor:
            cut = last_rows(rows, start % factor, width)
            picture = torch.maximum(picture, thumbnails(cut, factor, line * factor))
    else:
        picture = thumbnails(last_rows(rows, start, width), factor)
    return Heads(picture, factor, heads.scores[:, :start], tuple(rows), last_rows(rows, 1, width)[:, 0])


def more_heads(
    heads: Heads,
    weights: Float[Tensor, "H n S"],
    queries: Int[Tensor, " n"],
    keys: Int[Tensor, " S"],
    start: int,
    cross: bool,
) -> Heads:
    """The heads with the weights of new queries, the first of them at position `start`."""
    more = head_scores(weights, queries, keys, start, cross)
    picture = torch.maximum(heads.picture, thumbnails(weights, heads.factor, start))
    kept = None if heads.rows is None else (*heads.rows, weights.clone())
    if kept is not None and len(kept) > _MOST_PARTS:  # many small parts are slow to look through
        kept = (torch.cat([widen(part, weights.shape[-1]) for part in kept], 1),)
    return Heads(picture, heads.factor, torch.cat([heads.scores, more], 1), kept, weights[:, -1].clone())


def last_rows(rows: list[Tensor], n: int, width: int) -> Float[Tensor, "H n W"]:
    """The last `n` rows of weights that came in parts, over `width` keys."""
    parts = []
    for part in reversed(rows):
        parts.append(widen(part[:, max(0, part.shape[1] - n) :], width))
        n -= part.shape[1]
        if n <= 0:
            break
    return torch.cat(parts[::-1], 1)


def widen(weights: Float[Tensor, "H n S"], width: int) -> Float[Tensor, "H n W"]:
    """The same rows over `width` keys: those after a query have no weight."""
    if weights.shape[-1] >= width:
        return weights[..., :width]
    return nn.functional.pad(weights, (0, width - weights.shape[-1]))


def joined(before: Tensor, start: int, new: Tensor | None) -> Tensor:
    """The first `start` positions of a value (1, T, D), and the new ones."""
    kept = before[:, :start]
    return kept if new is None else torch.cat([kept, new], 1)
