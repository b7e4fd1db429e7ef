"""Masked language modelling: the batches of `transformers`, and a function of (seed, sample) alone."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.training.masking import mask_samples, mask_tokens

SIZE, MASK = 60, 4


def some_ids(rows: int, length: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ordinary ids between special ones: a first, a last, and padding of different lengths (ids below 5)."""
    source = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, SIZE, (rows, length), generator=source)
    ids[:, 0] = 2
    stops = torch.randint(2, length + 1, (rows, 1), generator=source)
    places = torch.arange(length)
    ids = ids.masked_fill(places >= stops, 1).masked_fill(places == stops - 1, 3)
    return ids, ids < 5


def test_the_batches_are_those_of_transformers(transformers: Any):
    """One generator, the same calls in the same order: inputs and labels are identical, batch after batch."""

    class Words:
        mask_token, pad_token = "[MASK]", "[PAD]"

        def __len__(self) -> int:
            return SIZE

        def convert_tokens_to_ids(self, token: str) -> int:
            return MASK

    ours = torch.Generator().manual_seed(3)
    collator = transformers.DataCollatorForLanguageModeling(Words(), mlm_probability=0.3)
    collator.generator = torch.Generator().manual_seed(3)
    for number in range(5):
        ids, special = some_ids(6, 40, number)
        theirs = collator.torch_mask_tokens(ids.clone(), special_tokens_mask=special)
        inputs, targets = mask_tokens(ids, special, MASK, SIZE, 0.3, ours)
        assert torch.equal(inputs, theirs[0]) and torch.equal(targets, theirs[1])


def test_shares_of_what_becomes_of_a_token():
    """Of 200,000 tokens 15 % are asked for, of these 80 % hidden, 10 % another, 10 % as they were."""
    ids = torch.full((200, 1000), 7)
    inputs, targets = mask_tokens(ids, ids == 0, MASK, 10_000, generator=torch.Generator().manual_seed(1))
    asked = targets != -100
    assert targets[asked].eq(7).all() and inputs[~asked].eq(7).all()
    shares = [x.float().mean().item() for x in (asked, inputs[asked] == MASK, inputs[asked] == 7)]
    assert shares == pytest.approx([0.15, 0.8, 0.1], abs=0.01)


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 5), length=st.integers(2, 30), share=st.sampled_from([0.15, 0.5, 1.0]))
def test_special_tokens_are_never_hidden_nor_asked_for(rows: int, length: int, share: float):
    ids, special = some_ids(rows, length, rows)
    inputs, targets = mask_samples(ids, special, MASK, SIZE, share, 0, 0)
    assert torch.equal(inputs[special], ids[special]) and targets[special].eq(-100).all()
    asked = targets != -100
    assert torch.equal(targets[asked], ids[asked]) and torch.equal(inputs[~asked], ids[~asked])
    if share == 1:
        assert torch.equal(asked, ~special)


def test_a_sample_loses_the_same_tokens_in_any_batch():
    """Rows alone, in pairs, and with more padding: a function of (seed, sample number)."""
    ids, special = some_ids(6, 20)
    whole = mask_samples(ids, special, MASK, SIZE, 0.4, 5, 100)
    for rows in (1, 2, 3):
        for first in range(0, 6, rows):
            part = slice(first, first + rows)
            cut = mask_samples(ids[part], special[part], MASK, SIZE, 0.4, 5, 100 + first)
            assert all(torch.equal(one, other[part]) for one, other in zip(cut, whole, strict=True))
    longer = torch.cat([ids, torch.ones(6, 9, dtype=torch.long)], dim=1)
    for one, other in zip(mask_samples(longer, longer < 5, MASK, SIZE, 0.4, 5, 100), whole, strict=True):
        assert torch.equal(one[:, :20], other)
    again = mask_samples(ids, special, MASK, SIZE, 0.4, 5, 106)
    seeded = mask_samples(ids, special, MASK, SIZE, 0.4, 6, 100)
    assert not torch.equal(again[1], whole[1]) and not torch.equal(seeded[1], whole[1])


def test_the_global_generator_is_left_alone():
    before = torch.random.get_rng_state()
    mask_samples(*some_ids(3, 9), MASK, SIZE, 0.15, 0, 0)
    assert torch.equal(before, torch.random.get_rng_state())


def test_mistakes_are_named():
    ids, special = some_ids(1, 5)
    with pytest.raises(ValueError, match=r"share=1\.5 of tokens to hide"):
        mask_tokens(ids, special, MASK, SIZE, 1.5)
    with pytest.raises(ValueError, match=r"the mask token 60 is outside the vocabulary 0\.\.59"):
        mask_tokens(ids, special, 60, SIZE)
