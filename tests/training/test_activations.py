"""Blocks that are computed again: the same bits, less kept."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead.model.config import ModelConfig
from clearhead.model.config_parts import ExpertsConfig
from clearhead.model.experts import Routing
from clearhead.model.transformer import Transformer
from clearhead.training.activations import RecomputedBlock, recompute_blocks
from clearhead.training.memory import LiveBytes

DROPOUT = {"embed_dropout": 0.1, "attn_dropout": 0.1, "residual_dropout": 0.1, "ff_dropout": 0.1}
SHAPES: dict[str, dict[str, Any]] = {
    "decoder": {},
    "encoder": {"shape": "encoder", "head": "lm"},
    "encoder-decoder": {"shape": "encoder-decoder", "head": "lm"},
    "experts": {"experts": ExpertsConfig(n_experts=4, top_k=2, d_ff=16, balance_loss=0.01, z_loss=1e-3)},
}


def make(recomputed: bool, shape: str = "decoder", n_layers: int = 3) -> Transformer:
    sizes: dict[str, Any] = {
        "vocab_size": 40,
        "d_model": 32,
        "n_layers": n_layers,
        "n_heads": 2,
        "max_len": 32,
    }
    dropout = {name: rate for name, rate in DROPOUT.items() if shape != "experts" or name != "ff_dropout"}
    model = Transformer(ModelConfig(**sizes, **dropout, **SHAPES[shape]), seed=1)
    if recomputed:
        recompute_blocks(model)
    return model


def learn(model: Transformer) -> tuple[Tensor, Routing]:
    """One pass with dropout and its gradient."""
    tokens = torch.randint(40, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.manual_seed(7)
    routing = Routing()
    how: dict[str, Any] = {"source": tokens} if model.config.shape == "encoder-decoder" else {}
    logits = model(tokens, routing=None if model.config.experts is None else routing, **how)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten())
    if model.config.experts is not None:
        loss = loss + routing.loss(model.config.experts)
    loss.backward()
    return loss.detach(), routing


@pytest.mark.parametrize("shape", SHAPES)
def test_loss_and_gradients_are_the_same_bits(shape):
    """With dropout everywhere, in every shape, with and without experts."""
    plain, again = make(False, shape), make(True, shape)
    (loss, routing), (other, seen) = learn(plain), learn(again)
    assert torch.equal(loss, other)
    for (name, p), q in zip(plain.named_parameters(), again.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None and torch.equal(p.grad, q.grad), name
    if routing.layers:  # each decision is on record once
        assert torch.equal(routing.load(), seen.load())


def test_memory_hardly_grows_with_the_layers():
    """Peak of the live bytes: 8 more layers cost less than a third of what they cost otherwise."""
    peak = {}
    for recomputed in (False, True):
        for n_layers in (2, 10):
            model = make(recomputed, n_layers=n_layers)
            with LiveBytes() as live:
                learn(model)
            gradients = sum(p.numel() * 4 for p in model.parameters())
            peak[recomputed, n_layers] = live.peak - gradients
    assert peak[True, 10] - peak[True, 2] < (peak[False, 10] - peak[False, 2]) / 3


def test_what_it_leaves_alone():
    """Names, values without a gradient, and a copy's independence."""
    plain, again = make(False), make(True)
    assert list(plain.state_dict()) == list(again.state_dict())
    tokens = torch.arange(6)[None]
    with torch.no_grad():
        assert torch.equal(plain.eval()(tokens), again.eval()(tokens))
    twin = copy.deepcopy(again)
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    assert torch.equal(twin(tokens), plain(tokens))
    assert sum(isinstance(module, RecomputedBlock) for module in twin.modules()) == 3
