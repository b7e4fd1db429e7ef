"""Latent attention: its formula head by head, its narrow cache, and its two faces."""

import pytest
import torch
from torch import Tensor

from clearhead.inspector.record import record
from clearhead.model.attention import LatentAttention, attend_folded, attend_unfolded
from clearhead.model.config import ModelConfig
from clearhead.model.config_parts import LatentConfig
from clearhead.model.masks import causal_mask
from clearhead.model.position import Rotary, rotate
from clearhead.model.summary import summarise
from clearhead.model.transformer import Transformer

SIZES = LatentConfig(q_rank=20, kv_rank=18, d_plain=10, d_rotary=8, d_value=14)
DIRECT = LatentConfig(q_rank=None, kv_rank=18, d_plain=10, d_rotary=8, d_value=14)


def make(sizes: LatentConfig = SIZES, **options: object) -> LatentAttention:
    """Latent attention with a random number in every tensor."""
    attention = LatentAttention(24, 3, sizes, **options).double()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.copy_(torch.randn(parameter.shape) * (0.5 if parameter.dim() == 1 else 0.2))
    return attention


def head_by_head(attention: LatentAttention, x: Tensor, rotary: Rotary) -> Tensor:
    """The class docstring's formula for one sequence (T, D), one head after the other, causal."""
    sizes, n_tokens = attention.latent, len(x)
    rotation = rotary.angles(torch.arange(n_tokens))
    if sizes.q_rank is None:
        queries = x @ attention.q.weight.t()
    else:
        queries = attention.q_b(attention.q_a_norm(attention.q_a(x)))
    folded = attention.kv_a(x)
    latent, key = (
        attention.kv_a_norm(folded[:, : sizes.kv_rank]),
        rotate(folded[:, sizes.kv_rank :], rotation),
    )
    unfolded = attention.kv_b(latent)
    mixed = []
    for head in range(attention.n_heads):
        q = queries[:, head * sizes.d_key : (head + 1) * sizes.d_key]
        q = torch.cat([q[:, : sizes.d_plain], rotate(q[:, sizes.d_plain :], rotation)], dim=-1)
        width = sizes.d_plain + sizes.d_value
        own = unfolded[:, head * width : (head + 1) * width]
        k, v = torch.cat([own[:, : sizes.d_plain], key], dim=-1), own[:, sizes.d_plain :]
        scores = (q @ k.t() * sizes.d_key**-0.5).masked_fill(
            ~torch.ones(n_tokens, n_tokens).tril().bool(), -1e30
        )
        mixed.append(scores.softmax(-1) @ v)
    return attention.o(torch.cat(mixed, dim=-1))


@pytest.mark.parametrize("sizes", [SIZES, DIRECT])
@pytest.mark.parametrize("bias", [False, True])
def test_it_follows_its_formula(sizes: LatentConfig, bias: bool) -> None:
    attention, rotary = make(sizes, bias=bias), Rotary(8, 500.0, "interleaved")
    x, places = torch.randn(2, 7, 24, dtype=torch.float64), torch.arange(7)
    found = attention(x, rotation=rotary.angles(places), mask=causal_mask(places, places))
    wanted = torch.stack([head_by_head(attention, row, rotary) for row in x])
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)  # angles are float32


def test_both_faces_are_equal() -> None:
    """One query per head; also one that sees nothing."""
    attention, n_queries = make(), 1
    parts = [
        torch.randn(2, 3, n_queries, 10),
        torch.randn(2, 3, n_queries, 8),
        torch.randn(2, 1, 9, 18),
        torch.randn(2, 1, 9, 8),
    ]
    mask = torch.rand(2, 1, n_queries, 9) > 0.3
    mask[0] = False
    inputs = [part.double().requires_grad_() for part in parts]
    options = {"scale": 0.2, "bias": None, "dropout": 0.0}
    one, other = (face(attention, *inputs, mask, options) for face in (attend_folded, attend_unfolded))
    torch.testing.assert_close(one, other, atol=1e-13, rtol=1e-13)
    direction = torch.randn_like(one)
    inputs.append(attention.kv_b.weight)
    slopes = [torch.autograd.grad(found, inputs, direction) for found in (one, other)]
    for found, wanted in zip(*slopes, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)


def latent_model(**fields: object) -> Transformer:
    config = {"vocab_size": 50, "d_model": 24, "n_layers": 2, "n_heads": 3, "max_len": 32, "latent": SIZES}
    return Transformer(ModelConfig(**(config | fields)), seed=1).eval()


@torch.no_grad()
def test_cached_and_padded_passes_equal_the_whole() -> None:
    """A prompt, then single tokens, then two at once; with and without padding on the left."""
    model = latent_model()
    ids = torch.randint(0, 50, (2, 9))
    whole = model(ids)
    cache = model.new_cache(2, 12)
    steps = [
        model(ids[:, start:stop], cache=cache) for start, stop in [(0, 4), (4, 5), (5, 6), (6, 8), (8, 9)]
    ]
    torch.testing.assert_close(torch.cat(steps, 1), whole, atol=1e-5, rtol=0)
    pads = torch.zeros(2, 3, dtype=torch.long)
    real = torch.cat([pads, torch.ones_like(ids)], dim=1).bool()
    cache = model.new_cache(2, 12)
    padded = [
        model(torch.cat([pads, ids[:, :5]], 1), mask=real[:, :8], cache=cache)[:, 3:],
        *(model(ids[:, place : place + 1], cache=cache) for place in range(5, 9)),
    ]
    torch.testing.assert_close(torch.cat(padded, 1), whole, atol=1e-5, rtol=0)


def test_the_cache_keeps_a_latent_and_one_key_for_all_heads() -> None:
    model = latent_model()
    layers = model.new_cache(2, 12).layers
    assert [tuple(layer.keys.shape) for layer in layers] == [(2, 1, 12, 8)] * 2
    assert [tuple(layer.values.shape) for layer in layers] == [(2, 1, 12, 18)] * 2
    assert summarise(model.config).cache_bytes_per_token == 4 * 2 * (8 + 18)


@torch.no_grad()
def test_a_recorder_sees_every_heads_keys_also_in_a_single_step() -> None:
    model = latent_model()
    cache = model.new_cache(1, 6)
    model(torch.tensor([[3, 1, 4]]), cache=cache)
    expected = model(torch.tensor([[3, 1, 4, 1]]))[:, -1:]
    with record(model, layers=[1]) as values:
        found = model(torch.tensor([[1]]), cache=cache)
    assert values["decoder.blocks.1.attn.keys"].shape == (1, 3, 6, 18)
    assert values["decoder.blocks.1.attn.weights"].shape == (1, 3, 1, 6)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_sizes_follow_the_latent_and_wrong_ones_are_refused() -> None:
    assert latent_model().config.d_head == 18
    assert latent_model(n_heads=5).config.d_head == 18  # d_model need not be a multiple
    with pytest.raises(ValueError, match="d_head=8 is not the latent's d_plain \\+ d_rotary = 18"):
        latent_model(d_head=8)
    with pytest.raises(ValueError, match="kv_rank=0 must be at least 1"):
        LatentConfig(q_rank=20, kv_rank=0, d_plain=10, d_rotary=8, d_value=14)
    with pytest.raises(ValueError, match="turns pairs of features and d_rotary=7 is odd"):
        latent_model(latent=LatentConfig(q_rank=20, kv_rank=18, d_plain=10, d_rotary=7, d_value=14))


@pytest.mark.compiled
@torch.no_grad()
def test_a_compiled_step_is_one_graph() -> None:
    model = latent_model()
    compiled = torch.compile(model, fullgraph=True)
    ids = torch.randint(0, 50, (1, 6))
    whole, cache = model(ids), model.new_cache(1, 8)
    model(ids[:, :3], cache=cache)
    steps = [compiled(ids[:, place : place + 1], cache=cache) for place in (3, 4, 5)]
    torch.testing.assert_close(torch.cat(steps, 1), whole[:, 3:], atol=1e-5, rtol=0)
