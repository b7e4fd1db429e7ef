"""Muon: equal to a decomposition, to torch.optim.Muon, and exact through a checkpoint."""

import doctest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead.model.config import ModelConfig
from clearhead.model.config_parts import ExpertsConfig
from clearhead.model.transformer import Transformer
from clearhead.training import muon
from clearhead.training.checkpoint import load_checkpoint, save_checkpoint
from clearhead.training.muon import NEWTON_SCHULZ, POLAR_EXPRESS, Muon, muon_groups, orthogonalise
from clearhead.training.optim import AdamW
from reference.naive_muon import naive_muon

SHAPES = [(8, 8), (24, 6), (6, 24)]


def with_spectrum(rows: int, columns: int, lowest: float) -> tuple[Tensor, Tensor]:
    """A matrix with singular values from 1 down to `lowest`, and the U V^T it should become."""
    torch.manual_seed(rows * columns)
    u, _, vt = torch.linalg.svd(torch.randn(rows, columns, dtype=torch.float64), full_matrices=False)
    values = torch.logspace(0, torch.tensor(lowest).log10().item(), min(rows, columns), dtype=torch.float64)
    return ((u * values) @ vt).float(), (u @ vt).float()


CLASSICAL = (1.875, -1.25, 0.375)  # a step that converges from where the five end


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (40, 12), (12, 40)])
def test_singular_values_become_one(rows, columns):
    """All above 0.01 of the norm come within 0.13 of 1 (the older way: 0.32); more steps find U V^T."""
    matrix, polar = with_spectrum(rows, columns, 0.03)
    for polynomials, distance in ((POLAR_EXPRESS, 0.13), (NEWTON_SCHULZ, 0.32)):
        found = orthogonalise(1e3 * matrix[None], polynomials)[0]
        assert (torch.linalg.svdvals(found) - 1).abs().max() < distance
    exact = orthogonalise(1e3 * matrix[None], (*POLAR_EXPRESS, *[CLASSICAL] * 3))[0]
    torch.testing.assert_close(exact, polar, rtol=0, atol=1e-5)


def test_a_batch_is_its_matrices_and_zeros_stay():
    """Each matrix of a batch becomes what it becomes alone; one of zeros, an unused expert, stays so."""
    torch.manual_seed(0)
    batch = torch.randn(3, 5, 7) * torch.tensor([1.0, 1e-4, 0.0])[:, None, None]
    together = orthogonalise(batch)
    for one, all_ in zip(batch, together, strict=True):
        torch.testing.assert_close(orthogonalise(one[None])[0], all_, rtol=1e-5, atol=1e-6)
    assert together[2].abs().max() == 0


@pytest.mark.parametrize("scale", ["shape", "rms"])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_decomposition(shape, scale, monkeypatch):
    """Ten steps with gradients of all sizes end where the dull twin, which decomposes, ends.

    With the polynomials carried on until they converge, to 0.1 %; with the five steps as they are, to 15 %.
    """
    torch.manual_seed(1)
    start, gradients = torch.randn(shape), [torch.randn(shape) * 10 ** (-(i % 4)) for i in range(10)]
    expected = naive_muon(start, gradients, 0.1, 0.1, 0.9, scale)
    monkeypatch.setitem(muon.POLYNOMIALS, "newton_schulz", (*POLAR_EXPRESS, *[CLASSICAL] * 6))
    for polynomials, distance in (("newton_schulz", 1e-3), ("polar_express", 0.15)):
        p = nn.Parameter(start.clone())
        group = {"params": [p], "muon": True, "scale": scale, "polynomials": polynomials}
        optimizer = Muon([group], lr=0.1, weight_decay=0.1, momentum=0.9)
        for gradient in gradients:
            p.grad = gradient.clone()
            optimizer.step()
        assert (p - expected).norm() < distance * (start - expected).norm()


@pytest.mark.parametrize(("ours", "theirs"), [("shape", "original"), ("rms", "match_rms_adamw")])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch(shape, ours, theirs):
    """With the same polynomial and bfloat16 inside, each step is torch.optim.Muon's to its last digit."""
    torch.manual_seed(2)
    start = torch.randn(shape)
    p, q = (nn.Parameter(start.clone()) for _ in range(2))
    setting: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    group = {"params": [p], "muon": True}
    a = Muon([group], scale=ours, dtype="bfloat16", polynomials="newton_schulz", **setting)
    b = torch.optim.Muon([q], adjust_lr_fn=theirs, **setting)
    for _ in range(5):
        p.grad = torch.randn(shape)
        q.grad = p.grad.clone()
        before = p.detach().clone()
        with torch.no_grad():
            q.copy_(p)
        a.step()
        b.step()
        assert (p - q).norm() < 0.02 * (p - before).norm()
        torch.testing.assert_close(a.state[p]["momentum"], b.state[q]["momentum_buffer"])


def test_experts_are_batches_of_matrices():
    """A tensor (E, out, in) moves as E matrices would, each with its own parameter."""
    torch.manual_seed(3)
    start, gradient = torch.randn(4, 6, 5), torch.randn(4, 6, 5)
    whole, parts = nn.Parameter(start.clone()), [nn.Parameter(each.clone()) for each in start]
    a, b = (Muon([{"params": ps, "muon": True}], lr=0.1) for ps in ([whole], parts))
    whole.grad = gradient
    for part, each in zip(parts, gradient, strict=True):
        part.grad = each
    a.step()
    b.step()
    torch.testing.assert_close(whole.detach(), torch.stack([part.detach() for part in parts]))


def test_groups_without_muon_are_adamw():
    """What is not marked moves bit for bit as AdamW moves it, with the group's own rate."""
    torch.manual_seed(4)
    start = torch.randn(5, 4)
    p, q = (nn.Parameter(start.clone()) for _ in range(2))
    setting: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    a = Muon([{"params": [p], "lr_scale": 0.5}], **setting)
    b = AdamW([{"params": [q], "lr_scale": 0.5}], **setting)
    for _ in range(5):
        p.grad = q.grad = torch.randn(5, 4)
        a.step()
        b.step()
    assert torch.equal(p, q)


def tiny_model(**experts: Any) -> Transformer:
    config = ModelConfig(
        vocab_size=30,
        d_model=16,
        n_layers=2,
        n_heads=2,
        max_len=16,
        positions="learned",
        qkv_bias=True,
        experts=ExpertsConfig(n_experts=4, top_k=2, d_ff=8, **experts) if experts else None,
    )
    return Transformer(config, seed=5)


def test_which_parameters_are_matrices():
    """Maps between hidden states go to Muon, experts' among them; tables, head and vectors to AdamW."""
    model = tiny_model(bias=True)
    names = {p: name for name, p in model.named_parameters()}
    groups = muon_groups(model, 0.1, {"embed": 2.0}, muon_lr_scale=10.0)
    inner = {names[p] for group in groups if group.get("muon") for p in group["params"]}
    outer = {names[p] for group in groups if not group.get("muon") for p in group["params"]}
    assert len(inner) + len(outer) == len(names) and not inner & outer
    first, second = "decoder.blocks.0", "decoder.blocks.1.ff"
    assert {f"{first}.attn.q.weight", f"{second}.gate", f"{second}.router.weight"} <= inner
    vectors = {f"{first}.attn.q.bias", f"{first}.ff.gate_bias", "decoder.norm.gain"}
    tables = {"embed.weight", "decoder.positions.weight", "head.weight", "head.out.weight"}
    assert (vectors | tables) & set(names.values()) <= outer
    scales = {group["lr_scale"] for group in groups}
    assert scales == {10.0, 2.0, 1.0}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, n: int) -> None:
    for step in range(first, first + n):
        tokens = torch.randint(30, (2, 8), generator=torch.Generator().manual_seed(step))
        logits = model(tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("experts", [{}, {"bias": True}], ids=["dense", "experts"])
def test_a_checkpoint_goes_on_bit_for_bit(experts, tmp_path: Path):
    """6 steps are 3, a checkpoint by parameter name, and 3 more in a new process's optimizer, to the bit."""

    def fresh() -> tuple[Transformer, Muon]:
        model = tiny_model(**experts)
        return model, Muon(muon_groups(model, 0.1, muon_lr_scale=4.0), lr=5e-3)

    straight, optimizer = fresh()
    steps(straight, optimizer, 0, 6)
    first, optimizer = fresh()
    steps(first, optimizer, 0, 3)
    save_checkpoint(tmp_path, 3, first, optimizer)
    second, optimizer = fresh()
    load_checkpoint(tmp_path, second, optimizer)
    steps(second, optimizer, 3, 3)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def test_it_learns():
    """A small model learns a fixed text to a loss below 0.1 in 60 steps."""
    model, tokens = tiny_model(), torch.randint(30, (1, 16), generator=torch.Generator().manual_seed(0))
    optimizer = Muon(muon_groups(model, 0.0, muon_lr_scale=4.0), lr=1e-2)
    loss = torch.tensor(9.0)
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(tokens)[0, :-1], tokens[0, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"scale": "wide"}, "scale='wide' is unknown; choose one of shape, rms"),
        ({"dtype": "float8"}, "dtype='float8' is unknown; choose one of float32, bfloat16"),
        ({"polynomials": "cubic"}, "polynomials='cubic' is unknown"),
        ({"momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1"),
        ({"lr": -1.0}, "lr=-1.0"),
    ],
)
def test_values_out_of_range_are_named(setting, message, unchecked):
    """A wrong setting raises ValueError naming it and its value."""
    with pytest.raises(ValueError, match=message):
        Muon([{"params": [nn.Parameter(torch.zeros(2, 2))], "muon": True}], **setting)


def test_a_vector_has_no_directions():
    """A vector marked for Muon is refused by its shape."""
    with pytest.raises(ValueError, match=r"shape \(3,\) is no matrix"):
        Muon([{"params": [nn.Parameter(torch.zeros(3))], "muon": True}])


def test_examples_in_the_docstrings():
    """The worked examples run; the constants are five steps each."""
    assert doctest.testmod(muon).failed == 0
    assert len(POLAR_EXPRESS) == len(NEWTON_SCHULZ) == 5
