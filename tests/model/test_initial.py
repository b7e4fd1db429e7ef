"""The table of initial.py, weight by weight."""

import math

import pytest
import torch

from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer

CUT = 0.98658  # the deviation of a normal distribution cut at 3 deviations, as a share of its own

LINEAR = ("q", "k", "v", "o", "gate", "up", "down", "head")
SHAPES = {  # (out, in)
    "q": (160, 128), "k": (80, 128), "v": (80, 128), "o": (128, 160),
    "gate": (300, 128), "up": (300, 128), "down": (128, 300), "head": (500, 128),
}  # fmt: skip


def wide_model(**settings) -> Transformer:
    config = ModelConfig(
        vocab_size=500, max_len=100, d_model=128, n_layers=3, n_heads=4, n_kv_heads=2, d_head=40, d_ff=300,
        **({"tied": False} | settings),
    )  # fmt: skip
    return Transformer(config, seed=5)


def part_of(name: str) -> str:
    return name.split(".")[-2]


def expected_std(init: str, part: str, tied: bool) -> float:
    """The table, written again as formulas."""
    out, into = SHAPES.get(part, (500, 128))
    xavier = math.sqrt(2 / (out + into))
    if init == "gpt2":
        return 0.02 / math.sqrt(2 * 3) if part in ("o", "down") else 0.02
    if part == "embed" and tied:
        return xavier * CUT
    if part in ("embed", "positions"):
        return CUT
    if init == "zero_out":
        return 0.0 if part in ("o", "down", "head") else CUT / math.sqrt(into)
    return xavier * CUT


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("positions", ["learned", "rotary"])
@pytest.mark.parametrize("init", ["course", "gpt2", "zero_out"])
def test_every_matrix_has_its_deviation(init: str, positions: str, tied: bool) -> None:
    """Within 2 % for each weight, and the cut at 3 deviations is kept."""
    model = wide_model(init=init, positions=positions, tied=tied)
    seen = set()
    for name, weight in model.named_parameters():
        if weight.dim() != 2:
            continue
        part = part_of(name)
        seen.add(part)
        std = expected_std(init, part, tied)
        assert weight.std().item() == pytest.approx(std, rel=0.02), name
        assert abs(weight.mean().item()) <= 0.05 * std, name
        if init != "gpt2":
            assert weight.abs().max().item() <= 3 * std / CUT + 1e-7, name
    expected = {*LINEAR, "embed"} | ({"positions"} if positions == "learned" else set())
    assert seen == (expected - {"head"} if tied else expected)


@pytest.mark.parametrize("init", ["course", "gpt2", "zero_out"])
@pytest.mark.parametrize("placement", ["pre", "post", "branch", "sandwich"])
def test_gains_start_at_1_and_shifts_at_0(init: str, placement: str) -> None:
    """Every vector of every kind of model is a gain or a bias: nothing falls through the table."""
    model = wide_model(
        init=init, norm="layer", norm_placement=placement, qk_norm="head", positions="learned",
        qkv_bias=True, out_bias=True, ff_bias=True, head_bias=True,
    )  # fmt: skip
    vectors = {name: weight for name, weight in model.named_parameters() if weight.dim() == 1}
    gains = {name for name in vectors if name.endswith("norm.weight")}
    assert {part_of(name) for name in gains} >= {"q_norm", "k_norm", "norm"}
    for name, weight in vectors.items():
        assert name in gains or name.endswith(".bias"), name
        assert torch.equal(weight, torch.ones_like(weight) if name in gains else torch.zeros_like(weight))


def test_the_first_logits_are_small_when_tied() -> None:
    """A tied embedding of deviation 1 would give logits of deviation sqrt(d_model)."""
    tokens = torch.randint(500, (2, 20))
    for init in ("course", "gpt2", "zero_out"):
        assert wide_model(init=init, tied=True)(tokens).std() < 2


def test_a_seed_gives_the_same_weights_whatever_came_before() -> None:
    one = wide_model()
    torch.manual_seed(123)
    torch.randn(7)
    two = wide_model()
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    other = Transformer(one.config, seed=6)
    assert not torch.equal(one.embed.weight, other.embed.weight)


def test_without_a_seed_the_global_generator_decides() -> None:
    config = wide_model().config
    torch.manual_seed(1)
    one = Transformer(config)
    two = Transformer(config)
    torch.manual_seed(1)
    three = Transformer(config)
    assert not torch.equal(one.embed.weight, two.embed.weight)
    assert torch.equal(one.embed.weight, three.embed.weight)
