"""Cached equals uncached, token by token and in chunks, with padding on either side."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clearhead.model.cache import Cache
from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer

TOLERANCE = {"atol": 1e-5, "rtol": 0}
KINDS = {
    "rotary, grouped": {"n_kv_heads": 2},
    "learned, window": {"positions": "learned", "window": 3, "norm": "layer", "gated": False},
    "sinusoidal, one head": {"positions": "sinusoidal", "n_kv_heads": 1, "norm_placement": "post"},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def build(kind: str) -> Transformer:
    sizes = {"vocab_size": 61, "max_len": 24, "d_model": 24, "n_layers": 2, "n_heads": 6, "d_ff": 40}
    model = Transformer(ModelConfig(**(sizes | KINDS[kind])), seed=1)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model.eval()


def run(model: Transformer, cache: Cache, tokens: Tensor, cuts: list[int], mask: Tensor | None) -> Tensor:
    """Feed the tokens in chunks that end at `cuts`; return all logits."""
    edges = [0, *sorted(cuts), tokens.shape[1]]
    chunks = [slice(start, end) for start, end in itertools.pairwise(edges)]
    with torch.no_grad():
        logits = [model(tokens[:, c], mask=None if mask is None else mask[:, c], cache=cache) for c in chunks]
    return torch.cat(logits, dim=1)


@every_kind
@settings(deadline=None, max_examples=6)
@given(cuts=st.lists(st.integers(1, 11), max_size=11, unique=True), spare=st.integers(0, 5))
def test_chunks_of_any_size_give_the_logits_of_one_pass(kind: str, cuts: list[int], spare: int) -> None:
    """Also with room to spare, which nothing may look at."""
    model, tokens = build(kind), torch.randint(61, (3, 12))
    cached = run(model, model.new_cache(3, 12 + spare), tokens, cuts, None)
    torch.testing.assert_close(cached, model(tokens), **TOLERANCE)


@every_kind
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_prompts_continue_like_each_sequence_alone(kind: str, side: str) -> None:
    """Prompts of 6, 2 and 4 tokens in one batch, then 5 single steps; the mask names new tokens only."""
    model, lengths = build(kind), [6, 2, 4]
    sequences = [torch.randint(61, (length + 5,)) for length in lengths]
    prompts, mask = torch.zeros(3, 6, dtype=torch.long), torch.zeros(3, 6, dtype=torch.bool)
    for row, length in enumerate(lengths):
        place = slice(6 - length, 6) if side == "left" else slice(0, length)
        prompts[row, place], mask[row, place] = sequences[row][:length], True
    steps = torch.stack([sequence[-5:] for sequence in sequences])
    cache = model.new_cache(3, 12)
    with torch.no_grad():
        first = model(prompts, mask=mask, cache=cache)
        rest = run(model, cache, steps, [1, 2, 3, 4], None)
    for row, sequence in enumerate(sequences):
        found = torch.cat([first[row][mask[row]], rest[row]])
        torch.testing.assert_close(found, model(sequence[None])[0], **TOLERANCE)


@every_kind
@settings(deadline=None, max_examples=6)
@given(data=st.data())
def test_padding_anywhere_and_cuts_anywhere(kind: str, data: st.DataObject) -> None:
    """A row may rest for some steps, as a finished or a waiting request does."""
    model = build(kind)
    mask = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=10, max_size=10), min_size=2, max_size=2))
    )
    cuts = data.draw(st.lists(st.integers(1, 9), max_size=9, unique=True))
    tokens = torch.randint(61, (2, 10))
    logits = run(model, model.new_cache(2), tokens, cuts, mask)
    assert logits.isfinite().all()
    for row in range(2):
        if mask[row].any():
            alone = model(tokens[row][mask[row]][None])[0]
            torch.testing.assert_close(logits[row][mask[row]], alone, **TOLERANCE)


def test_rows_may_be_dropped_reordered_and_doubled() -> None:
    """Beam search keeps some rows twice and drops others."""
    model, tokens = build("rotary, grouped"), torch.randint(61, (3, 6))
    rows, new = torch.tensor([2, 0, 2, 2]), torch.randint(61, (4, 3))
    mask = torch.tensor([[True] * 6, [True] * 6, [False] * 2 + [True] * 4])
    cache = model.new_cache(3)
    with torch.no_grad():
        model(tokens, mask=mask, cache=cache)
        cache.keep_rows(rows)
        cached = run(model, cache, new, [1], None)
        whole = torch.cat([mask[rows], torch.ones(4, 3, dtype=torch.bool)], dim=1)
        expected = model(torch.cat([tokens[rows], new], dim=1), mask=whole)[:, 6:]
    torch.testing.assert_close(cached, expected, **TOLERANCE)


def test_a_cache_counts_positions_and_real_tokens() -> None:
    model, cache = build("rotary, grouped"), build("rotary, grouped").new_cache(2, 8)
    assert cache.layers[0].keys.shape == (2, 2, 8, 4) and len(cache.layers) == 2
    mask = torch.tensor([[False, True, True], [True, True, True]])
    with torch.no_grad():
        model(torch.randint(61, (2, 3)), mask=mask, cache=cache)
        model(torch.randint(61, (2, 2)), cache=cache)
    assert cache.length.shape == () and cache.length == 5
    assert cache.seen.tolist() == [4, 5]
    assert cache.real.tolist() == [
        [False, True, True, True, True, False, False, False],
        [True] * 5 + [False] * 3,
    ]
    assert (cache.layers[0].keys[:, :, 5:] == 0).all()


def test_a_full_cache_works_and_one_more_does_not() -> None:
    """The message names both numbers; the cache stays as it was and goes on working."""
    model, tokens = build("rotary, grouped"), torch.randint(61, (1, 8))
    cache = model.new_cache(1, 8)
    with torch.no_grad():
        model(tokens[:, :6], cache=cache)
        with pytest.raises(ValueError, match="room for 8 positions; 6 are filled and 3 more were given"):
            model(tokens[:, :3], cache=cache)
        torch.testing.assert_close(model(tokens[:, 6:], cache=cache), model(tokens)[:, 6:], **TOLERANCE)
        with pytest.raises(ValueError, match="room for 8 positions; 8 are filled and 1 more"):
            model(tokens[:, :1], cache=cache)


def test_a_pass_that_fails_leaves_the_cache_as_it_was() -> None:
    model, tokens = build("rotary, grouped"), torch.randint(61, (1, 8))
    cache = model.new_cache(1)
    with torch.no_grad():
        model(tokens[:, :4], cache=cache)
        with pytest.raises(ValueError, match="do not fit a table"):
            model(torch.tensor([[3, 99, 7]]), cache=cache)
        torch.testing.assert_close(model(tokens[:, 4:], cache=cache), model(tokens)[:, 4:], **TOLERANCE)


def test_two_caches_do_not_know_each_other() -> None:
    """Two conversations interleaved on one model."""
    model = build("rotary, grouped")
    one, two = torch.randint(61, (2, 1, 6))
    caches = model.new_cache(1), model.new_cache(1)
    with torch.no_grad():
        for t in range(6):
            logits = [
                model(tokens[:, t : t + 1], cache=c) for tokens, c in zip((one, two), caches, strict=True)
            ]
    torch.testing.assert_close(logits[0][:, -1], model(one)[:, -1], **TOLERANCE)
    torch.testing.assert_close(logits[1][:, -1], model(two)[:, -1], **TOLERANCE)


def test_a_cache_follows_the_type_of_the_weights() -> None:
    model, tokens = build("rotary, grouped").bfloat16(), torch.randint(61, (1, 6))
    cache = model.new_cache(1)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    cached = run(model, cache, tokens, [2, 4], None)
    torch.testing.assert_close(cached.float(), model(tokens).float(), atol=0.1, rtol=0.05)
