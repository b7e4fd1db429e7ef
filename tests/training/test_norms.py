"""Norms of parts and what lies idle, against plain sums."""

import doctest
from typing import Any

import torch

from clearhead.model.config import ModelConfig
from clearhead.model.config_parts import ExpertsConfig
from clearhead.model.experts import Routing
from clearhead.model.transformer import Transformer
from clearhead.training import norms
from clearhead.training.norms import Norms, find_idle, part_of, to_host


def tiny_model(**more: Any) -> Transformer:
    sizes: dict[str, Any] = {"vocab_size": 20, "d_model": 16, "n_layers": 2, "n_heads": 2, "max_len": 16}
    return Transformer(ModelConfig(**sizes, **more), seed=0)


def test_norms_are_those_of_the_parts():
    """Weights before, gradients, and the way from before to after, part by part."""
    model = tiny_model()
    model(torch.arange(8)[None]).square().mean().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = to_host(Norms(model).around(lambda: optimizer.step()))
    for part in {part_of(name) for name in before}:
        names = [name for name in before if part_of(name) == part]
        weights = torch.cat([before[name].flatten() for name in names]).norm()
        moved = torch.cat([(model.get_parameter(n) - before[n]).flatten() for n in names]).norm()
        assert torch.isclose(weights, torch.tensor(found[f"weight_norm/{part}"]))
        assert torch.isclose(moved, torch.tensor(found[f"update_norm/{part}"]))
        assert abs(found[f"update_norm/{part}"] - 0.1 * found[f"gradient_norm/{part}"]) < 1e-5
    assert len(found) == 3 * len({part_of(name) for name in before})


def test_units_that_nothing_wakes_are_counted():
    """A quarter of a ReLU layer's units, shut by their bias, are idle; in the other layer none is."""
    model = tiny_model(activation="relu", gated=False, ff_bias=True)
    feed = model.decoder.blocks[0].get_submodule("ff")
    shut = feed.get_parameter("up.bias")
    with torch.no_grad():
        feed.get_parameter("up.weight").mul_(0.1)
        shut.fill_(1.0)
        shut[: len(shut) // 4] = -100.0
    tokens = torch.arange(16)[None]
    model.train()
    found = to_host(find_idle(model, lambda routing: model(tokens, routing=routing)))
    assert found["idle_units/decoder.blocks.0.ff"] == 0.25
    assert model.training


def test_experts_that_nobody_chose_are_counted():
    """A router that loves two of four experts leaves two idle, and the busiest has twice the mean load."""
    model = tiny_model(experts=ExpertsConfig(n_experts=4, top_k=2, d_ff=8, router_bias=True))
    with torch.no_grad():
        model.get_parameter("decoder.blocks.1.ff.router.bias").copy_(torch.tensor([9.0, -9.0, 9.0, -9.0]))
    seen: list[Routing | None] = []

    def run(routing: Routing | None) -> None:
        seen.append(routing)
        model(torch.arange(16)[None], routing=routing)

    found = to_host(find_idle(model, run))
    assert seen[0] is not None
    assert found["idle_experts/decoder.blocks.1.ff"] == 2
    assert found["expert_load/decoder.blocks.1.ff"] == 2.0
    load = seen[0].load()[0]
    assert found["expert_load/decoder.blocks.0.ff"] == (load.max() / load.mean()).item()


def test_the_experts_of_both_stacks_are_counted():
    """An encoder-decoder of experts is looked at like any other."""
    model = tiny_model(shape="encoder-decoder", experts=ExpertsConfig(n_experts=4, top_k=2, d_ff=8))
    tokens = torch.arange(16)[None]
    found = to_host(find_idle(model, lambda routing: model(tokens, source=tokens, routing=routing)))
    assert {name for name in found if name.startswith("expert_load/")} == {
        f"expert_load/{stack}.blocks.{number}.ff" for stack in ("encoder", "decoder") for number in range(2)
    }


def test_examples_in_the_docstrings():
    """The worked examples run; nothing to tell needs no transfer."""
    assert doctest.testmod(norms).failed == 0
    assert to_host({}) == {}
