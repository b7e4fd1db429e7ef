"""From shards to batches: packed windows in an order that is a pure function of (seed, epoch, index).

Packing concatenates all documents and cuts the ids into windows of `context_length`; a window and the same
one shifted by one are inputs and targets:

    ids      7 3 9 4 1 8 2        windows of 3: inputs 7 3 9 | 4 1 8
                                               targets 3 9 4 | 1 8 2

Nothing about the order is hidden state. Sample g of a run (g = 0, 1, 2, ...) is window

    permutation(g mod n_windows; n_windows, seed, epoch)        epoch = g div n_windows

where the permutation is a small Feistel network (Luby and Rackoff 1988) with cycle walking (Black and Rogaway
2002): it shuffles a trillion windows without a list of them. To resume is to go on counting g, and any number
of processes can share the counting.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Int

from clearhead.text.shards import Shards

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    Tensor = Any  # torch is not imported by text/, only used where it is there already

IGNORED = -100
"""The target of a position that predicts nothing, as in torch's cross-entropy."""

_ROUNDS = 6


def permutation(index: np.ndarray, n: int, seed: int, epoch: int = 0) -> np.ndarray:
    """Return where `index` (numbers in [0, n)) goes in a shuffle of n things chosen by (seed, epoch).

    A bijection of [0, n), the same on every machine; int64, n below 2^62. A Feistel network permutes the
    2^(2h) >= n numbers of 2h bits, round by round (left, right) -> (right, left xor hash(right, key)); what
    lands outside [0, n) goes through it again until it is inside (cycle walking).

    >>> permutation(np.arange(6), 6, seed=0).tolist()
    [1, 0, 4, 2, 5, 3]
    """
    if not 0 < n < 1 << 62:
        raise ValueError(f"n is {n}; a permutation needs at least 1 and less than 2**62 things")
    if n == 1:
        return np.zeros(np.shape(index), np.int64)
    half = max(2, ((n - 1).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    digest = hashlib.sha512(f"{seed}/{epoch}".encode()).digest()
    keys = np.frombuffer(digest, "<u8")[:_ROUNDS]
    values = np.array(index, dtype=np.uint64)
    outside = np.ones(values.shape, bool)
    while outside.any():
        left, right = values[outside] >> np.uint64(half), values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        values[outside] = (left << np.uint64(half)) | right
        outside = values >= n
    return values.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Spread every bit of a uint64 over all of them: the finaliser of SplitMix64 (Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Batch:
    """B examples of T ids, int64, and what is to be predicted at or for them.

    `targets` are ids or labels "B T" (-100: nothing is predicted there), classes "B", numbers "B" or "B L",
    or the first and last token of an answer "B 2".
    """

    inputs: Int[Tensor, "B T"]
    targets: Int[Tensor, "B ..."] | Float[Tensor, "B ..."]
    first_sample: int
    """The number of the first row, counted from the beginning of the run."""
    documents: Int[Tensor, "B T"] | None = None
    """Which document of its window a token belongs to: 0, 1, 2, ...; None without a document mask."""
    mask: Bool[Tensor, "B T"] | None = None
    """True at real tokens, False at padding; None: all are real."""
    source: Int[Tensor, "B S"] | None = None
    """What is translated; `inputs` are then what the decoder reads. Also the second text of a pair."""
    source_mask: Bool[Tensor, "B S"] | None = None
    token_types: Int[Tensor, "B T"] | None = None
    """Which of two texts a token belongs to: 0 or 1."""
    sample_ids: list[int] | None = None
    """Which example or window each row is."""

    def to(self, device: "str | torch.device") -> "Batch":
        """Return the batch with its tensors on `device`. From pinned memory that is not waited for."""
        return self._with_each(lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()))

    def pinned(self) -> "Batch":
        """Return the batch in memory that stays in its place, from where a GPU fetches it by itself."""
        return self._with_each(lambda tensor: tensor.pin_memory())

    def _with_each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        changed: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            changed[field.name] = change(value) if hasattr(value, "to") else value
        return Batch(**changed)


class Batches:
    """The training batches of a run over `shards`, without end: `batch(step)` for step 0, 1, 2, ...

    With `document_mask` a batch says which document each token belongs to, so that the model lets no token
    see another document and restarts positions. The last token of a document (its end-of-text) then predicts
    nothing: what the next one begins with cannot be known from it. Without it a token sees its whole window.

    The last tokens, fewer than a window, are in no window. Fewer tokens than one window needs: ValueError.
    """

    def __init__(
        self,
        shards: Shards,
        batch_size: int,
        context_length: int,
        seed: int = 0,
        document_mask: bool = False,
    ):
        _check_sizes(batch_size, context_length)
        _check_length(shards.n_tokens, context_length, str(shards.folder))
        self.shards = shards
        self.batch_size = batch_size
        self.context_length = context_length
        self.seed = seed
        self.document_mask = document_mask
        self.n_windows = (shards.n_tokens - 1) // context_length

    @property
    def steps_per_epoch(self) -> int:
        """The steps after which every window has been seen; the last of them may begin the next epoch."""
        return -(-self.n_windows // self.batch_size)

    def batch(self, step: int) -> Batch:
        """Return the batch of a step: samples [step * batch_size, (step + 1) * batch_size)."""
        return self.samples(step * self.batch_size, self.batch_size)

    def samples(self, first: int, count: int) -> Batch:
        """Return samples [first, first + count) of the run, each a function of (seed, its number) alone."""
        if first < 0 or count < 1:
            raise ValueError(f"samples({first}, {count}): the first is at least 0, the count at least 1")
        windows: list[int] = []
        while len(windows) < count:
            epoch, index = divmod(first + len(windows), self.n_windows)
            here = np.arange(index, min(index + count - len(windows), self.n_windows))
            windows += permutation(here, self.n_windows, self.seed, epoch).tolist()
        starts = [window * self.context_length for window in windows]
        batch = _read(self.shards, starts, self.context_length, self.document_mask, first)
        return replace(batch, sample_ids=windows)


def evaluation_batches(
    shards: Shards,
    batch_size: int,
    context_length: int,
    document_mask: bool = False,
    stride: int | None = None,
) -> Iterator[Batch]:
    """Yield batches in which every token of `shards` is a target exactly once, in order: loss = sum / count.

    The first token is predicted from the end-of-text token, as the beginning of any document; a tokenizer
    without one leaves it out. A window starts every `stride` tokens, by default where the last one ended: a
    token then sees on average half of `context_length` tokens before it. With a smaller stride only the last
    `stride` targets of a window count (all of the first), and each sees at least context_length - stride.
    All batches have the same shape; what does not count has targets of -100. With `document_mask` the last
    token of each document predicts nothing, as in training.
    """
    _check_sizes(batch_size, context_length)
    stride = context_length if stride is None else stride
    if not 1 <= stride <= context_length:
        raise ValueError(f"stride={stride} is at least 1 and at most context_length={context_length}")
    lead = 0 if shards.end_of_text is None else 1  # the stream is [end of text] + tokens
    _check_length(shards.n_tokens + lead, 1, str(shards.folder))
    n_windows = 1 + max(0, -(-(shards.n_tokens + lead - 1 - context_length) // stride))
    n_rows = min(batch_size, n_windows)
    for first in range(0, n_windows, n_rows):
        starts = [row * stride - lead for row in range(first, first + n_rows)]
        batch = _read(shards, starts, context_length, document_mask, first)
        batch.targets[1 if first == 0 else 0 :, : context_length - stride] = -100
        yield batch


def sample_batch(
    tokens: Any,
    batch_size: int,
    context_length: int,
    device: "str | torch.device" = "cpu",
    generator: "torch.Generator | None" = None,
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Return (x, y): `batch_size` windows at random places of `tokens`, and the same shifted by one, int64.

    Starts are drawn uniformly from [0, len(tokens) - context_length), so that y is always inside. `tokens` is
    any one-dimensional array of ids that can be sliced: numpy, memory-mapped, tensor, list, `Shards.tokens`.
    Too few of them: ValueError. This is `get_batch` of Stanford's course CS336.
    """
    import torch

    _check_sizes(batch_size, context_length)
    _check_length(len(tokens), context_length, "the array")
    where = "cpu" if generator is None else generator.device
    places = torch.randint(
        len(tokens) - context_length, (batch_size,), generator=generator, device=where
    ).tolist()
    windows = torch.stack([_as_int64(tokens[start : start + context_length + 1]) for start in places])
    windows = windows.to(device)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _as_int64(ids: Any) -> Int[Tensor, " T"]:
    import torch

    if isinstance(ids, torch.Tensor):
        return ids.to(torch.int64)
    return torch.from_numpy(np.array(ids, dtype=np.int64))


def _read(
    shards: Shards, starts: list[int], context_length: int, document_mask: bool, first_sample: int
) -> Batch:
    """The windows that begin at `starts`, which may reach over the ends of the tokens (see `_window`)."""
    import torch

    shape = (len(starts), context_length + 1)
    ids, documents = np.empty(shape, np.int64), np.empty(shape, np.int64)
    for row, start in enumerate(starts):
        ids[row] = _window(shards, start, context_length + 1)
        if document_mask:
            documents[row] = _documents(shards, start, context_length + 1)
    if ids.max() >= shards.vocab_size:
        raise ValueError(
            f"{shards.folder} holds token id {ids.max()}, its vocabulary has {shards.vocab_size} tokens;"
            " prepare the corpus again"
        )
    inputs, targets = ids[:, :-1].copy(), ids[:, 1:].copy()
    inputs[inputs == IGNORED] = shards.end_of_text or 0
    if document_mask:
        targets[documents[:, 1:] != documents[:, :-1]] = IGNORED
    return Batch(
        inputs=torch.from_numpy(inputs),
        targets=torch.from_numpy(targets),
        documents=torch.from_numpy(documents[:, :-1].copy()) if document_mask else None,
        first_sample=first_sample,
    )


def _window(shards: Shards, start: int, length: int) -> np.ndarray:
    """Tokens [start, start + length); before the first comes the end of text, after the last IGNORED."""
    window = np.full(length, IGNORED, np.int64)
    found = shards.tokens[max(start, 0) : max(start + length, 0)]
    window[max(-start, 0) : max(-start, 0) + len(found)] = found
    if start < 0:
        window[:-start] = shards.end_of_text or 0
    return window


def _documents(shards: Shards, start: int, length: int) -> np.ndarray:
    """The documents of the tokens of a window, counted from its first; filling is a document of its own."""
    found = shards.documents_between(max(start, 0), min(start + length, shards.n_tokens))
    if not len(found):
        return np.zeros(length, np.int64)
    documents = np.full(length, found[-1] + 1, np.int64)
    documents[max(-start, 0) : max(-start, 0) + len(found)] = found
    documents[: max(-start, 0)] = found[0]
    return documents - documents[0]


def _check_sizes(batch_size: int, context_length: int) -> None:
    if batch_size < 1 or context_length < 1:
        raise ValueError(f"batch_size {batch_size} and context_length {context_length} have to be at least 1")


def _check_length(n_tokens: int, context_length: int, name: str) -> None:
    if n_tokens <= context_length:
        needs = f"context_length {context_length} needs at least {context_length + 1} tokens"
        raise ValueError(f"{needs}, {name} has {n_tokens}")
