"""From encoded examples to batches: rows of like length together, filled up at the right, in a known order.

An epoch shows every example once. Its order is a pure function of (seed, epoch): shuffle; in windows of
`bucket` batches sort by length, so that a batch needs little padding; cut into batches; shuffle these.

    lengths   3 9 4 1 | 8 2 5 7     shuffled, two windows of two batches of two
              1 3 | 4 9   2 5 | 7 8     sorted in each window, cut
              7 8 | 1 3 | 2 5 | 4 9     shuffled as batches

Sample g of a run is example g mod n of epoch g div n. To resume is to go on counting g, and any number of
processes can share the counting. Where an epoch ends inside a batch, the next begins in the same batch, with
examples of any length.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from clearhead.text.batches import IGNORED, Batch, permutation
from clearhead.text.encode_examples import Encoded
from clearhead.text.normalise import pad_batch


class PaddedBatches:
    """The batches of a run over `rows`, without end: `batch(index)` for index 0, 1, 2, ...

    pad_id, source_pad_id: what fills up `inputs` and `source`; the masks are False there, targets -100.
    bucket: how many batches are sorted together; 1 sorts nothing. vocab_size, source_vocab_size: an id
        that is not below is a ValueError before anything is learned.

    A batch has `mask`, and `source_mask` where there is a source; `token_types` where any row has them.
    """

    def __init__(
        self,
        rows: Sequence[Encoded],
        batch_size: int,
        seed: int = 0,
        pad_id: int = 0,
        *,
        source_pad_id: int | None = None,
        bucket: int = 64,
        vocab_size: int | None = None,
        source_vocab_size: int | None = None,
    ):
        if batch_size < 1 or bucket < 1:
            raise ValueError(f"batch_size {batch_size} and bucket {bucket} have to be at least 1")
        if not rows:
            raise ValueError("there are no examples to make batches of")
        self.rows, self.batch_size, self.seed, self.bucket = rows, batch_size, seed, bucket
        self.pad_id, self.source_pad_id = pad_id, pad_id if source_pad_id is None else source_pad_id
        sided = source_vocab_size if source_vocab_size is not None else vocab_size
        self.typed, lengths = False, []
        for number, row in enumerate(rows):  # once: rows may be made as they are looked at
            self.typed |= row.token_types is not None
            lengths.append(max(len(row.inputs), len(row.source or ())))
            _check_ids(row.inputs, vocab_size, number)
            if row.source is not None:
                _check_ids(row.source, sided, number)
        self.lengths = np.array(lengths)
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def steps_per_epoch(self) -> int:
        """The batches after which every example has been seen; the last may begin the next epoch."""
        return -(-len(self.rows) // self.batch_size)

    def batch(self, index: int) -> Batch:
        """Return a batch: samples [index * batch_size, (index + 1) * batch_size)."""
        return self.samples(index * self.batch_size, self.batch_size)

    def samples(self, first: int, count: int) -> Batch:
        """Return samples [first, first + count) of the run, each a function of (seed, its number) alone."""
        if first < 0 or count < 1:
            raise ValueError(f"samples({first}, {count}): the first is at least 0, the count at least 1")
        chosen: list[int] = []
        while len(chosen) < count:
            epoch, index = divmod(first + len(chosen), len(self.rows))
            chosen += self._order(epoch)[index : index + count - len(chosen)].tolist()
        return self.collate(chosen, first)

    def evaluation(self, batch_size: int | None = None) -> Iterator[Batch]:
        """Yield batches with every example once, in an order that is always the same; the last may be short.

        The first batches are a fair sample of all.
        """
        size = self.batch_size if batch_size is None else batch_size
        order = _epoch_order(self.lengths, size, self.bucket, seed=0, epoch=0, head=0)
        for first in range(0, len(order), size):
            yield self.collate(order[first : first + size].tolist(), first)

    def collate(self, chosen: Sequence[int], first_sample: int = 0) -> Batch:
        """Return the rows of these numbers as one batch."""
        import torch

        rows = [self.rows[number] for number in chosen]
        inputs, mask = pad_batch([row.inputs for row in rows], self.pad_id)
        arrays: dict[str, np.ndarray] = {"inputs": inputs, "mask": mask, "targets": _targets(rows)}
        if rows[0].source is not None:
            sources = [row.source or [] for row in rows]
            arrays["source"], arrays["source_mask"] = pad_batch(sources, self.source_pad_id)
        if self.typed:
            arrays["token_types"], _ = pad_batch(
                [row.token_types or [0] * len(row.inputs) for row in rows], 0
            )
        tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return Batch(first_sample=first_sample, sample_ids=list(chosen), **tensors)

    def _order(self, epoch: int) -> np.ndarray:
        order = self._orders.get(epoch)
        if order is None:
            head = -epoch * len(self.rows) % self.batch_size
            order = _epoch_order(self.lengths, self.batch_size, self.bucket, self.seed, epoch, head)
            kept = {key: one for key, one in self._orders.items() if key == epoch - 1}
            self._orders = kept | {epoch: order}  # another thread may be reading the former
        return order


def _epoch_order(
    lengths: np.ndarray, batch_size: int, bucket: int, seed: int, epoch: int, head: int
) -> np.ndarray:
    """The numbers of all rows: `head` of any length, whole batches of like length, and what is left."""
    n = len(lengths)
    shuffled = permutation(np.arange(n), n, seed, epoch)
    head = min(head, n)
    whole = (n - head) // batch_size * batch_size
    middle = shuffled[head : head + whole]
    for start in range(0, whole, bucket * batch_size):
        window = middle[start : start + bucket * batch_size]
        middle[start : start + bucket * batch_size] = window[np.argsort(lengths[window], kind="stable")]
    if whole and bucket > 1:
        batches = middle.reshape(-1, batch_size)
        shuffle = permutation(np.arange(len(batches)), len(batches), seed, -1 - epoch)
        middle = batches[shuffle].reshape(-1)
    return np.concatenate([shuffled[:head], middle, shuffled[head + whole :]])


def _targets(rows: Sequence[Encoded]) -> np.ndarray:
    """Targets as one array: ids or tags filled with -100, rows of numbers, classes, numbers or spans."""
    targets: list[Any] = [row.targets for row in rows]
    if not isinstance(targets[0], list):
        return np.array(targets, np.float32 if isinstance(targets[0], float) else np.int64)
    if any(isinstance(value, float) for value in targets[0]):
        return np.array(targets, np.float32)
    return pad_batch(targets, IGNORED)[0]


def _check_ids(ids: Sequence[int], vocab_size: int | None, number: int) -> None:
    if not ids:
        raise ValueError(f"example {number} has no tokens")
    if vocab_size is not None and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = max(ids) if max(ids) >= vocab_size else min(ids)
        raise ValueError(f"example {number} holds token id {wrong}; the model knows 0 to {vocab_size - 1}")
