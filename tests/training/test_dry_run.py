"""What a run will need: the bytes are those of a real step, mistakes are found, nothing is written."""

import doctest
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clearhead.model.transformer import Transformer
from clearhead.text.tokenizer import Tokenizer
from clearhead.training import dry_run as module
from clearhead.training import memory
from clearhead.training.activations import recompute_blocks
from clearhead.training.dry_run import dry_run, foresee, one_pass, spell, training_flops
from clearhead.training.learner import Learner
from clearhead.training.loop import train
from clearhead.training.memory import LiveBytes
from clearhead.training.run_folder import RunFolder
from clearhead.training.tasks import make_task
from tiny_run import tiny_recipe, write_corpus

pytestmark = pytest.mark.usefixtures("unchecked")

EXPERTS = {"experts": {"n_experts": 4, "top_k": 2, "d_ff": 16}}


@pytest.mark.parametrize(
    ("model", "train"),
    [
        ({}, {}),
        ({}, {"optimizer": "muon", "average": 0.9, "accumulation": 3}),
        ({"n_layers": 6}, {"checkpoint_activations": True}),
        ({"shape": "encoder-decoder"}, {"objective": "translation"}),
        ({"shape": "encoder", "head": "sequence", "n_labels": 3}, {"objective": "classes"}),
    ],
    ids=["plain", "muon", "recomputed", "translation", "classes"],
)
def test_the_bytes_are_those_of_a_real_step(model, train):
    """Counted from tensors without values, each figure equals what a real second step holds, to the byte."""
    recipe = tiny_recipe("x", model=model, **train)
    needs, settings = foresee(recipe), recipe.train
    real = Transformer(recipe.model, seed=0)
    if settings.checkpoint_activations:
        recompute_blocks(real)
    learner = Learner(real, settings)
    cpu = torch.device("cpu")

    def step() -> None:
        for _ in range(settings.accumulation):
            one_pass(real, settings, cpu)
        learner.move(1.0, 1.0)
        learner.optimizer.zero_grad(set_to_none=True)

    with LiveBytes() as first:
        step()
    with LiveBytes() as second:
        step()
    assert first.now == needs.optimizer
    assert sum(p.nbytes for p in real.parameters()) == needs.gradients == needs.weights
    assert second.peak + needs.optimizer == pytest.approx(needs.total - needs.weights, rel=0.01)
    assert needs.n_parameters == sum(p.numel() for p in real.parameters())


def test_experts_can_be_foreseen():
    """A mixture of experts is counted without values, too; adapters leave most weights without a gradient."""
    from clearhead.model.config_parts import ExpertsConfig

    experts = ExpertsConfig(n_experts=4, top_k=2, d_ff=16)
    needs = foresee(tiny_recipe("x", model={"experts": experts}))
    assert needs.activations > 0
    adapted = foresee(tiny_recipe("x", lora_rank=2, start_from="y"))
    assert 0 < adapted.n_learning < adapted.n_parameters / 5
    assert adapted.gradients == 4 * adapted.n_learning


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("dry") / "corpus", documents=7)


def test_the_report(corpus, tmp_path):
    """Steps, targets and FLOPs follow from the recipe; a few steps were tried; nothing was written."""
    recipe = tiny_recipe(corpus, accumulation=2)
    found = dry_run(recipe, RunFolder(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []
    assert (found.steps, found.targets_per_step) == (10, 2 * 4 * 16)
    assert found.measured == "a few steps were tried" and 0 < found.seconds_per_step < 60
    text = "\n".join(found.lines())
    for told in (
        f"{found.needs.n_parameters:,} parameters",
        "7 files",
        "10 steps of 128 tokens at most",
        "FLOPs",
        "MiB",
    ):
        assert told in text
    assert "TOO MUCH" not in text
    poor = "\n".join(replace(found, memory=1000, disk=1000).lines())
    assert poor.count("THAT IS TOO MUCH") == 2


def test_other_budgets(corpus, tmp_path, monkeypatch):
    """Tokens become steps; minutes become steps by the time that was found."""
    run = RunFolder(tmp_path / "run")
    assert dry_run(tiny_recipe(corpus, tokens=1000), run).steps == 16  # of 64 targets
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    found = dry_run(tiny_recipe(corpus, minutes=1.0), run)
    assert "matrix products" in found.measured
    assert found.steps == max(1, int(60 / found.seconds_per_step))


@pytest.mark.parametrize("objective", ["masked", "classes", "contrastive"])
def test_budgets_of_all_objectives_are_those_of_training(objective, tmp_path):
    """Where not every token is a target, a budget in targets is as many steps as the loop makes of it."""
    write_corpus(tmp_path / "text", documents=60)
    if objective == "classes":
        lines = "".join(f"{word} {number}\t{word}\n" for number in range(60) for word in ("good", "bad"))
        (tmp_path / "a.tsv").write_text(f"text\tlabel\n{lines}", encoding="utf-8")
    else:
        lines = "".join(f"good {number}\tbad {number}\n" for number in range(120))
        (tmp_path / "a.tsv").write_text(lines, encoding="utf-8")
    source = tmp_path / ("text" if objective == "masked" else "a.tsv")
    recipe = tiny_recipe(source, objective=objective, model={"shape": "encoder"}, tokens=300)
    foreseen = dry_run(recipe, RunFolder(tmp_path / "run"))
    task, _ = make_task(recipe, RunFolder(tmp_path / "run"), lambda text: None)
    assert foreseen.targets_per_step == task.targets_per_batch
    assert foreseen.steps == -(-300 // task.targets_per_batch)
    assert foreseen.tokens_per_step == 4 * 16 * (2 if objective == "contrastive" else 1)


def test_ids_and_a_folder_with_a_run(tmp_path):
    """Files of ids are counted as training counts them; a run that is there is neither read nor touched."""
    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)}, [], ["<|endoftext|>"])
    tokenizer.save(tmp_path / "vocab")
    (np.arange(4000) % 251).astype(np.uint16).tofile(tmp_path / "a.bin")
    run = RunFolder(tmp_path / "run")
    data = {"tokenizer": str(tmp_path / "vocab"), "vocab_size": 257}
    recipe = tiny_recipe(tmp_path / "a.bin", data=data, model={"vocab_size": 257})
    train(recipe, run.path)
    there = {path: path.stat().st_mtime_ns for path in run.path.rglob("*")}
    found = dry_run(recipe, run)
    assert "3,800 tokens are ready in" in found.data and found.recipe.model.vocab_size == 257
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("*")} == there


def test_flops_are_those_of_the_context():
    """Attention counts the context that is learned, not max_len; recomputed blocks make four thirds of it."""
    short, long = (tiny_recipe("x", context_length=n, model={"max_len": 64}) for n in (16, 64))
    assert training_flops(long) - training_flops(short) == 3 * 4 * 2 * 32 * (64 - 16)
    again = tiny_recipe("x", context_length=16, model={"max_len": 64}, checkpoint_activations=True)
    assert training_flops(again) * 3 == training_flops(short) * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"source": "no/such/file.txt"}}, "no/such/file.txt"),
        ({"data": {"tokenizer": "no/such/tokenizer.json"}}, "tokenizer.json"),
        ({"context_length": 999}, "context_length=999"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"start_from": "no/such/model"}, "no/such/model"),
    ],
)
def test_mistakes_are_found(change: dict[str, Any], message, corpus, tmp_path):
    """What training would refuse, a dry run refuses, in the same words."""
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        dry_run(tiny_recipe(corpus, **change), RunFolder(tmp_path / "run"))


def test_examples_in_the_docstrings():
    """The worked examples run."""
    assert doctest.testmod(module).failed == doctest.testmod(memory).failed == 0
    assert spell(1.5) == "1.5 s"
