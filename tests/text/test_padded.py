"""Padded batches: every example once an epoch, rows of like length, the same rows for any way of counting."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.text.batches import IGNORED
from clearhead.text.encode_examples import Encoded
from clearhead.text.padded import PaddedBatches


def rows_of(lengths: list[int]) -> list[Encoded]:
    """Rows whose first id is their number, with as many ids as said."""
    return [Encoded([n] * length, [n] * length) for n, length in enumerate(lengths)]


# ------------------------------------------------------------------------------------------------- the order


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=70),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(0, 5),
)
def test_every_epoch_shows_every_example_once(lengths, batch_size, bucket, seed):
    batches = PaddedBatches(rows_of(lengths), batch_size, seed, bucket=bucket)
    n = len(lengths)
    seen: list[int] = []
    step = 0
    while len(seen) < 3 * n:
        batch = batches.batch(step)
        shown = batch.inputs[:, 0].tolist()
        assert batch.sample_ids == shown and len(shown) == batch_size
        assert batch.first_sample == step * batch_size
        seen += shown
        step += 1
    for epoch in range(3):
        assert sorted(seen[epoch * n : (epoch + 1) * n]) == list(range(n))


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=40),
    st.sampled_from([2, 4, 6]),
    st.integers(0, 3),
    st.integers(0, 30),
)
def test_any_number_of_processes_sees_the_same_examples_and_any_order_of_asking(lengths, size, seed, step):
    """A sample is a function of (seed, its number): halves of a batch, and going back, change nothing."""
    rows = rows_of(lengths)
    whole = PaddedBatches(rows, size, seed).batch(step)
    other = PaddedBatches(rows, size, seed)
    half = size // 2
    later = other.batch(step + 17)
    parts = [other.samples(step * size + part * half, half) for part in (1, 0)]
    assert [i for part in reversed(parts) for i in part.sample_ids or []] == whole.sample_ids
    assert other.batch(step + 17).sample_ids == later.sample_ids
    for row, number in enumerate(whole.sample_ids or []):
        assert whole.mask is not None
        assert whole.inputs[row][whole.mask[row]].tolist() == rows[number].inputs


def test_rows_of_like_length_are_together_and_the_order_changes():
    """With 1,000 rows of 1 to 50 ids, padding is below a tenth; without buckets it is near a half."""
    lengths = [1 + (n * 7919) % 50 for n in range(1000)]

    def filled(bucket: int) -> float:
        batches = PaddedBatches(rows_of(lengths), 8, bucket=bucket)
        masks = [batch.mask for batch in map(batches.batch, range(125)) if batch.mask is not None]
        return sum(mask.sum().item() for mask in masks) / sum(mask.numel() for mask in masks)

    assert filled(bucket=64) > 0.9 > 0.65 > filled(bucket=1)
    batches = PaddedBatches(rows_of(lengths), 8)
    orders = [batches.batch(step).sample_ids for step in (0, 1, 125)]
    other = PaddedBatches(rows_of(lengths), 8, seed=1).batch(0).sample_ids
    assert len({tuple(order or ()) for order in (*orders, other)}) == 4
    widths = [batches.batch(step).inputs.shape[1] for step in range(125)]
    assert widths != sorted(widths)


def test_evaluation_shows_every_example_once_and_begins_with_a_fair_sample():
    lengths = [1 + (n * 7919) % 50 for n in range(2003)]
    batches = PaddedBatches(rows_of(lengths), 8, seed=5)
    found = list(batches.evaluation())
    assert sorted(i for batch in found for i in batch.sample_ids or []) == list(range(2003))
    assert [len(batch.inputs) for batch in found] == [8] * 250 + [3]
    assert [batch.sample_ids for batch in PaddedBatches(rows_of(lengths), 4, seed=6).evaluation(8)] == [
        batch.sample_ids for batch in found
    ]
    means = [lengths[i] for batch in found[:100] for i in batch.sample_ids or []]
    assert abs(sum(means) / len(means) - 25.5) < 5


# ------------------------------------------------------------------------------------------------ the tensors


def test_what_a_batch_holds_by_hand():
    rows = [
        Encoded([1, 2, 3], [5, IGNORED, 7], source=[9], token_types=[0, 1, 1]),
        Encoded([4], [6], source=[8, 8]),
    ]
    batch = PaddedBatches(rows, 2, pad_id=0, source_pad_id=99).collate([0, 1], 4)
    assert batch.inputs.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert batch.targets.tolist() == [[5, IGNORED, 7], [6, IGNORED, IGNORED]]
    assert batch.mask is not None and batch.mask.tolist() == [[True] * 3, [True, False, False]]
    assert batch.source is not None and batch.source.tolist() == [[9, 99], [8, 8]]
    assert batch.source_mask is not None and batch.source_mask.tolist() == [[True, False], [True, True]]
    assert batch.token_types is not None and batch.token_types.tolist() == [[0, 1, 1], [0, 0, 0]]
    assert (batch.sample_ids, batch.first_sample, batch.documents) == ([0, 1], 4, None)


KINDS = [
    ([1, 0], torch.int64),
    ([0.5, 2.0], torch.float32),
    ([(1, 2), (0, 0)], torch.int64),
    ([[1.0, 0.0], [0.0, 0.0]], torch.float32),
]


@pytest.mark.parametrize(("targets", "dtype"), KINDS, ids=["classes", "numbers", "answers", "several labels"])
def test_targets_of_each_kind(targets, dtype):
    batch = PaddedBatches([Encoded([1], target) for target in targets], 2).collate([0, 1])
    assert batch.targets.dtype == dtype and batch.targets.tolist() == [
        list(target) if isinstance(target, tuple) else target for target in targets
    ]
    assert batch.source is None and batch.token_types is None


def test_what_cannot_be_a_batch_is_refused_before_anything_is_learned():
    with pytest.raises(ValueError, match="there are no examples to make batches of"):
        PaddedBatches([], 2)
    with pytest.raises(ValueError, match="batch_size 0 and bucket 64 have to be at least 1"):
        PaddedBatches(rows_of([1]), 0)
    with pytest.raises(ValueError, match="example 1 has no tokens"):
        PaddedBatches(rows_of([1, 0]), 2)
    with pytest.raises(ValueError, match="example 2 holds token id 2; the model knows 0 to 1"):
        PaddedBatches(rows_of([1, 1, 1]), 2, vocab_size=2)
    with pytest.raises(ValueError, match="example 0 holds token id 7; the model knows 0 to 6"):
        PaddedBatches([Encoded([1], [1], source=[7])], 2, vocab_size=9, source_vocab_size=7)
    with pytest.raises(ValueError, match=r"samples\(-2, 2\)"):
        PaddedBatches(rows_of([1]), 2).batch(-1)
