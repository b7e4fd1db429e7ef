"""The sizes of a model, from its config alone."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from clearhead.model.config import ModelConfig
from clearhead.model.summary import summarise
from clearhead.model.transformer import Transformer

CONFIGS = {
    "gated, grouped, tied": ModelConfig(
        vocab_size=97, max_len=40, d_model=36, n_layers=3, n_heads=6, n_kv_heads=2, d_head=10, d_ff=56
    ),
    "plain, learned, untied": ModelConfig(
        vocab_size=97, max_len=40, d_model=36, n_layers=2, n_heads=6, positions="learned", norm="layer",
        gated=False, qkv_bias=True, out_bias=True, ff_bias=True, head_bias=True, tied=False,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_those_of_the_model(name: str) -> None:
    summary, model = summarise(CONFIGS[name]), Transformer(CONFIGS[name])
    assert summary.n_parameters == sum(p.numel() for p in model.parameters())
    assert {part.name for part in summary.parts} == set(model.state_dict())
    assert all(part.shape == tuple(model.state_dict()[part.name].shape) for part in summary.parts)
    assert summary.weight_bytes == 4 * summary.n_parameters


def test_a_tied_head_is_counted_once_and_says_whose_it_is() -> None:
    head = summarise(CONFIGS["gated, grouped, tied"]).parts[-1]
    assert (head.name, head.n_parameters, head.shared_with) == ("head.weight", 0, "embed.weight")


@pytest.mark.parametrize("name", CONFIGS)
def test_flops_are_those_that_torch_counts(name: str) -> None:
    """One new token over a full cache costs what `flops_per_token` says, to the last operation."""
    config = CONFIGS[name]
    model = Transformer(config).eval()
    cache = model.new_cache(1, config.max_len)
    with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(torch.zeros(1, config.max_len - 1, dtype=torch.long), cache=cache)
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
    assert counter.get_total_flops() == summarise(config).flops_per_token


@pytest.mark.parametrize("name", CONFIGS)
def test_cache_bytes_are_those_of_a_cache(name: str) -> None:
    model = Transformer(CONFIGS[name])
    layers = model.new_cache(1, 30).layers
    held = sum(x.numel() * x.element_size() for layer in layers for x in (layer.keys, layer.values))
    assert held == 30 * summarise(CONFIGS[name]).cache_bytes_per_token


def test_a_window_bounds_the_keys_seen() -> None:
    config = CONFIGS["gated, grouped, tied"]
    full, windowed = summarise(config), summarise(config.replace(window=8))
    assert full.flops_per_token - windowed.flops_per_token == 4 * 3 * 6 * 10 * (40 - 8)


def test_a_huge_model_is_summed_without_its_memory() -> None:
    """GPT-3's sizes: 175 billion parameters, 700 GB that are never taken."""
    config = ModelConfig(
        vocab_size=50257, max_len=2048, d_model=12288, n_layers=96, n_heads=96, positions="learned",
        norm="layer", gated=False, qkv_bias=True, out_bias=True, ff_bias=True,
    )  # fmt: skip
    assert summarise(config).n_parameters == 174_604_259_328
