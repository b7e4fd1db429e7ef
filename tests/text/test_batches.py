"""Batches: packed windows, an order that is a pure function, every token once in evaluation."""

import hashlib
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.text.batches import IGNORED, Batch, Batches, evaluation_batches, permutation, sample_batch
from clearhead.text.shards import Shards, ShardWriter, write_index

END = 999


def shards_of(folder: Path, shards: list[list[int]], end_of_text: int | None = END) -> Shards:
    """Shards of documents with these numbers of tokens; the ids count 0, 1, 2, ... through all of them."""
    entries, next_id = [], 0
    for number, lengths in enumerate(shards):
        writer = ShardWriter(folder, f"shard-{number:05d}", 1000, "ab" * 32)
        for length in lengths:
            writer.add(np.arange(next_id, next_id + length) % END, end_of_text, length)
            next_id += length
        entries.append(writer.finish())
    write_index(folder, entries, 1000, "ab" * 32, end_of_text)
    return Shards(folder)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    """What fsync is for, a power cut, happens in no test."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def shards(tmp_path) -> Shards:
    """101 tokens in two shards: no document ends, so that the ids are the positions."""
    return shards_of(tmp_path, [[60], [41]], end_of_text=None)


def same(one: Batch, two: Batch) -> bool:
    pairs = [(one.inputs, two.inputs), (one.targets, two.targets), (one.documents, two.documents)]
    return one.first_sample == two.first_sample and all(
        a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs
    )


# ---------------------------------------------------------------- the order


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(-(2**70), 2**70), st.integers(0, 10**9))
def test_the_permutation_is_a_bijection(n, seed, epoch):
    order = permutation(np.arange(n), n, seed, epoch)
    assert order.dtype == np.int64 and sorted(order.tolist()) == list(range(n))


@settings(deadline=None)
@given(st.integers(1, 2**62 - 1), st.data())
def test_the_permutation_of_any_size_stays_inside_and_keeps_numbers_apart(n, data):
    """Beyond 2^32 samples too; one index at a time or many at once, the result is the same."""
    some = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20, unique=True))
    order = permutation(np.array(some), n, seed=3, epoch=1)
    assert ((order >= 0) & (order < n)).all() and len(set(order.tolist())) == len(some)
    assert order.tolist() == [int(permutation(np.array([i]), n, 3, 1)[0]) for i in some]


def feistel_by_hand(index: int, n: int, seed: int, epoch: int) -> int:
    """The permutation of one number in plain integers."""
    half = max(2, ((n - 1).bit_length() + 1) // 2)
    digest = hashlib.sha512(f"{seed}/{epoch}".encode()).digest()
    keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(6)]
    while True:
        left, right = index >> half, index % 2**half
        for key in keys:
            x = right ^ key
            x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
            x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
            left, right = right, left ^ (x ^ x >> 31) % 2**half
        index = left * 2**half + right
        if index < n:
            return index


@settings(deadline=None)
@given(st.integers(2, 2**62 - 1), st.integers(0, 2**62), st.integers(), st.integers(0))
def test_the_permutation_equals_its_plain_twin(n, index, seed, epoch):
    index %= n
    assert permutation(np.array([index]), n, seed, epoch).tolist() == [feistel_by_hand(index, n, seed, epoch)]


def test_the_permutation_is_the_same_on_every_machine():
    """Written down once: a run resumed elsewhere, or by a later version, must see the same samples."""
    assert permutation(np.arange(12), 12, seed=1, epoch=2).tolist() == [3, 0, 4, 5, 9, 8, 11, 7, 1, 2, 6, 10]
    large = permutation(np.array([0, 10**15]), 10**18, seed=1)
    assert large.tolist() == [411995146689538533, 425384715073223923]


def test_the_permutation_spreads_evenly_and_changes_with_seed_and_epoch():
    """Each of 20 things comes to each of 20 places equally often (chi-squared, 361 degrees of freedom)."""
    counts = np.zeros((20, 20))
    for seed in range(1000):
        counts[np.arange(20), permutation(np.arange(20), 20, seed)] += 1
    assert ((counts - 50) ** 2 / 50).sum() < 361 + 5 * np.sqrt(2 * 361)
    orders = {tuple(permutation(np.arange(50), 50, s, e)) for s in range(10) for e in range(10)}
    assert len(orders) == 100


@pytest.mark.parametrize("n", [0, -1, 2**62])
def test_a_permutation_of_nothing_or_of_too_much_is_an_error(n):
    with pytest.raises(ValueError, match=f"n is {n}; a permutation needs at least 1"):
        permutation(np.arange(1), n, 0)


# ---------------------------------------------------------------- training batches


def test_windows_are_the_packed_tokens_cut_into_equal_pieces(shards):
    """101 tokens, windows of 10: ten of them, targets one token further on; one epoch shows each once."""
    batches = Batches(shards, batch_size=5, context_length=10, seed=7)
    assert (batches.n_windows, batches.steps_per_epoch) == (10, 2)
    rows = torch.cat([batches.batch(step).inputs for step in range(2)])
    assert sorted(rows[:, 0].tolist()) == list(range(0, 100, 10))
    for step in range(2):
        batch = batches.batch(step)
        assert batch.inputs.dtype == batch.targets.dtype == torch.int64 and batch.documents is None
        assert torch.equal(batch.inputs, batch.inputs[:, :1] + torch.arange(10))
        assert torch.equal(batch.targets, batch.inputs + 1)
        assert batch.first_sample == step * 5


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 30), st.integers(0, 60), st.integers(0, 5))
def test_a_sample_is_a_pure_function_of_seed_epoch_and_index(tmp_path_factory, batch_size, context, g, seed):
    """Sample g is window permutation(g mod n; seed, g div n), in whatever batch it comes, in any order."""
    shards = shards_of(tmp_path_factory.mktemp("pure"), [[60], [41]], end_of_text=None)
    batches = Batches(shards, batch_size, context, seed)
    n = batches.n_windows
    window = int(permutation(np.array([g % n]), n, seed, g // n)[0])
    step, row = divmod(g, batch_size)
    assert batches.samples(g, 1).inputs[0].tolist() == list(range(window * context, (window + 1) * context))
    batch = batches.batch(step)
    assert torch.equal(batch.inputs[row], batches.samples(g, 1).inputs[0])
    assert same(batch, Batches(shards, batch_size, context, seed).batch(step))
    halves = [batches.samples(0, g + 1), batches.samples(g + 1, 3)]
    together = batches.samples(0, g + 4)
    assert torch.equal(torch.cat([half.targets for half in halves]), together.targets)


def test_every_epoch_shows_every_window_once_in_another_order(shards):
    batches = Batches(shards, batch_size=3, context_length=10)
    epochs = [batches.samples(epoch * 10, 10).inputs[:, 0].tolist() for epoch in range(4)]
    assert all(sorted(epoch) == list(range(0, 100, 10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert batches.steps_per_epoch == 4


def test_a_batch_says_which_windows_its_rows_are_and_moves_as_a_whole(shards):
    """Token positions are ids here, so that a row begins with the number of its window."""
    batch = Batches(shards, batch_size=4, context_length=10, seed=1).batch(1)
    assert batch.sample_ids is not None
    assert (batch.inputs[:, 0] // 10).tolist() == batch.sample_ids
    moved = batch.to("meta")
    assert moved.inputs.is_meta and moved.targets.is_meta and moved.mask is None
    assert (moved.sample_ids, moved.first_sample) == (batch.sample_ids, 4)


def test_a_context_of_exactly_all_tokens_works_and_one_more_is_an_error(shards):
    batches = Batches(shards, batch_size=2, context_length=100)
    assert batches.n_windows == 1 and torch.equal(batches.batch(3).targets[1], torch.arange(1, 101))
    with pytest.raises(ValueError, match=r"context_length 101 needs at least 102 tokens, .* has 101"):
        Batches(shards, 2, 101)


@pytest.mark.parametrize(("batch_size", "context_length"), [(0, 4), (4, 0), (-1, 4)])
def test_sizes_below_one_are_an_error(shards, batch_size, context_length):
    message = f"batch_size {batch_size} and context_length {context_length} have to be at least 1"
    for make in (lambda *sizes: next(evaluation_batches(*sizes)), Batches):
        with pytest.raises(ValueError, match=message):
            make(shards, batch_size, context_length)
    with pytest.raises(ValueError, match=message):
        sample_batch(range(100), batch_size, context_length)


def test_a_negative_step_is_an_error(shards):
    with pytest.raises(ValueError, match=r"samples\(-4, 4\): the first is at least 0"):
        Batches(shards, 4, 10).batch(-1)


def test_an_id_outside_the_vocabulary_never_reaches_the_model(tmp_path):
    """R12: a damaged file is noticed in the batch that reads it, also without verification."""
    shards_of(tmp_path, [[60]])
    path = tmp_path / "shard-00000.bin"
    path.write_bytes(path.read_bytes()[:-4] + b"\xff\xff" + path.read_bytes()[-2:])
    shards = Shards(tmp_path)
    with pytest.raises(ValueError, match=r"holds token id 65535, its vocabulary has 1000 tokens"):
        Batches(shards, 1, 60).batch(0)
    with pytest.raises(ValueError, match=r"holds token id 65535"):
        list(evaluation_batches(shards, 1, 10))


# ---------------------------------------------------------------- documents


def test_a_document_mask_by_hand(tmp_path):
    """Documents a b c E | d E | e f g h i E, a window over all of it and one more token."""
    shards = shards_of(tmp_path, [[3, 1], [5, 4]])
    batch = Batches(shards, 1, 12, document_mask=True).batch(0)
    assert batch.documents is not None
    assert batch.inputs.tolist() == [[0, 1, 2, END, 3, END, 4, 5, 6, 7, 8, END]]
    assert batch.documents.tolist() == [[0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2]]
    n = IGNORED
    assert batch.targets.tolist() == [[1, 2, END, n, END, n, 5, 6, 7, 8, END, n]]


@settings(deadline=None)
@given(st.lists(st.integers(1, 6), min_size=3, max_size=20), st.integers(1, 9), st.booleans())
def test_document_masks_follow_the_ends_of_documents(tmp_path_factory, lengths, context, ends):
    """Numbered from 0 in each window; a target is ignored where the next token is another document's."""
    folder = tmp_path_factory.mktemp("mask")
    shards = shards_of(folder, [lengths[:2], lengths[2:]], END if ends else None)
    if shards.n_tokens <= context:
        return
    document = np.repeat(np.arange(len(lengths)), np.array(lengths) + ends)
    masked, plain = (Batches(shards, 4, context, 5, document_mask=mask) for mask in (True, False))
    ids = shards.tokens[:].astype(int)
    for step in range(3):
        batch, unmasked = masked.batch(step), plain.batch(step)
        assert batch.documents is not None and torch.equal(batch.inputs, unmasked.inputs)
        for row in range(4):
            index = 4 * step + row
            n = masked.n_windows
            start = int(permutation(np.array([index % n]), n, 5, index // n)[0]) * context
            here = document[start : start + context + 1]
            assert batch.documents[row].tolist() == (here[:-1] - here[0]).tolist()
            targets = np.where(here[1:] == here[:-1], ids[start + 1 : start + context + 1], IGNORED)
            assert batch.targets[row].tolist() == targets.tolist()


# ---------------------------------------------------------------- evaluation


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=20), st.integers(1, 5), st.integers(1, 12), st.booleans()
)
def test_evaluation_predicts_every_token_exactly_once(tmp_path_factory, lengths, batch_size, context, ends):
    """From the end-of-text token on, if there is one; each input is the token before its target."""
    folder = tmp_path_factory.mktemp("evaluation")
    shards = shards_of(folder, [lengths], END if ends else None)
    ids = shards.tokens[:].tolist()
    if not ends and len(ids) == 1:
        with pytest.raises(ValueError, match=r"context_length 1 needs at least 2 tokens, .* has 1"):
            next(evaluation_batches(shards, batch_size, context))
        return
    batches = list(evaluation_batches(shards, batch_size, context))
    targets = torch.cat([batch.targets.flatten() for batch in batches])
    inputs = torch.cat([batch.inputs.flatten() for batch in batches])
    assert targets[targets != IGNORED].tolist() == (ids if ends else ids[1:])
    assert inputs[targets != IGNORED].tolist() == ([END, *ids[:-1]] if ends else ids[:-1])
    assert len({batch.inputs.shape for batch in batches}) == 1
    assert inputs.min() >= 0
    n_windows = -(-int((targets != IGNORED).sum()) // context)
    assert len(batches) == -(-n_windows // min(batch_size, n_windows))


def test_evaluation_with_a_document_mask_leaves_out_what_a_document_begins_with(tmp_path):
    shards = shards_of(tmp_path, [[3, 1], [2]])
    (batch,) = evaluation_batches(shards, 8, 6, document_mask=True)
    assert batch.documents is not None
    n = IGNORED
    assert batch.inputs.tolist() == [[END, 0, 1, 2, END, 3], [END, 4, 5, END, END, END]]
    assert batch.targets.tolist() == [[0, 1, 2, END, n, END], [n, 5, END, n, n, n]]
    assert batch.documents.tolist() == [[0, 0, 0, 0, 0, 1], [0, 1, 1, 1, 2, 2]]


# ---------------------------------------------------------------- sample_batch (CS336)


def test_get_batch():
    """The course's test: shapes, y is x shifted, starts uniform over [0, n - context_length)."""
    n, batch_size, context = 100, 32, 7
    starts: Counter[int] = Counter()
    for _ in range(1000):
        x, y = sample_batch(np.arange(n), batch_size, context, "cpu")
        assert x.shape == y.shape == (batch_size, context) and x.dtype == y.dtype == torch.int64
        assert torch.equal(y, x + 1) and torch.equal(x, x[:, :1] + torch.arange(context))
        starts.update(x[:, 0].tolist())
    assert sorted(starts) == list(range(n - context))
    mean = 1000 * batch_size / (n - context)
    deviation = np.sqrt(mean * (1 - 1 / (n - context)))
    assert all(abs(count - mean) < 6 * deviation for count in starts.values())


def test_sample_batch_reads_any_one_dimensional_array(tmp_path, shards):
    numbers = np.arange(101)
    numbers.astype(np.uint16).tofile(tmp_path / "ids.bin")
    arrays = [
        numbers,
        numbers.tolist(),
        range(101),
        torch.arange(101),
        numbers.astype(np.uint16),
        torch.arange(101, dtype=torch.int32),
        np.memmap(tmp_path / "ids.bin", np.uint16, "r"),
        shards.tokens,
    ]
    drawn = [sample_batch(a, 4, 9, generator=torch.Generator().manual_seed(3)) for a in arrays]
    for x, y in drawn:
        assert torch.equal(x, drawn[0][0]) and torch.equal(y, drawn[0][1])
        assert x.is_contiguous() and y.is_contiguous()


def test_sample_batch_draws_from_the_generator_only():
    state = torch.get_rng_state()
    one, two = (sample_batch(range(50), 8, 5, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one[0], two[0]) and torch.equal(state, torch.get_rng_state())
    three = sample_batch(range(50), 8, 5, generator=torch.Generator().manual_seed(2))
    assert not torch.equal(one[0], three[0])


def test_sample_batch_of_the_shortest_array_and_of_one_too_short():
    x, y = sample_batch([5, 6, 7], 2, 2)
    assert x.tolist() == [[5, 6]] * 2 and y.tolist() == [[6, 7]] * 2
    with pytest.raises(ValueError, match="context_length 3 needs at least 4 tokens, the array has 3"):
        sample_batch([5, 6, 7], 2, 3)


def test_an_unknown_device_is_torch_s_own_error():
    with pytest.raises((RuntimeError, AssertionError), match=r"CUDA|cuda"):
        sample_batch(range(50), 2, 5, device="cuda:99")
