"""What moves the weights, in a whole run: rates, Muon, the mean of the weights, spikes, norms."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.model.experts import Routing
from clearhead.model.transformer import Transformer
from clearhead.text.batches import Batch
from clearhead.training.checkpoint import checkpoints
from clearhead.training.data import prepare_data
from clearhead.training.learner import Learner, learning_rate, make_optimizer
from clearhead.training.loop import Trainer, train
from clearhead.training.muon import Muon
from clearhead.training.recipe import Recipe, TrainConfig
from clearhead.training.report import TIMINGS, JsonLines, Watcher, read_metrics
from clearhead.training.run_folder import RunFolder
from clearhead.training.tasks import Forward, NextToken
from tiny_run import tiny_recipe, write_corpus

pytestmark = pytest.mark.usefixtures("unchecked")

EVERYTHING: dict[str, Any] = {
    "optimizer": "muon",
    "average": 0.8,
    "on_spike": "skip",
    "spike_window": 10,
    "schedule": "trapezoid",
    "norms_every": 2,
    "checkpoint_activations": True,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny corpus, prepared once."""
    corpus = write_corpus(tmp_path_factory.mktemp("learner") / "corpus", documents=7)
    folder = tmp_path_factory.mktemp("prepared")
    prepare_data(tiny_recipe(corpus).data, RunFolder(folder), note=lambda text: None)
    return folder / "data"


def run(recipe: Recipe, folder: Path, *watchers: Watcher, **how: Any) -> RunFolder:
    return train(recipe, folder, watchers=[JsonLines(), *watchers], **how)


def outcome(run: RunFolder) -> dict[str, Any]:
    """All that a run ends with, to the bit."""
    files = sorted(checkpoints(run.path)[0].iterdir())
    log = [{n: v for n, v in entry.items() if n not in TIMINGS} for entry in read_metrics(run.metrics_file)]
    return {"log": log, **{file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}}


class Notes(Watcher):
    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_note(self, text: str) -> None:
        self.heard.append(text)


# ----------------------------------------------------------------------------------------------- rates


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant", "trapezoid", "inverse_sqrt"])
def test_the_shape_of_the_learning_rate(schedule):
    """Up in equal steps to the highest rate at the warm-up's end, down to just above the lowest, never 0."""
    flat = schedule in ("constant", "inverse_sqrt")
    low = 0.0 if flat else 0.1
    settings = TrainConfig(steps=100, lr=1.0, min_lr=low, warmup=0.1, schedule=schedule)
    rates = [learning_rate(settings, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert max(rates) == 1.0
    assert rates[9:] == sorted(rates[9:], reverse=True)
    middle = {
        "linear": 1 - 0.9 * 45 / 91,
        "cosine": 0.1 + 0.9 * (1 + math.cos(math.pi * 45 / 91)) / 2,
        "constant": 1.0,
        "trapezoid": 1.0,
        "inverse_sqrt": math.sqrt(10 / 55),
    }
    assert rates[54] == pytest.approx(middle[schedule])
    if not flat:
        assert 0.1 < rates[-1] < 0.15


def test_no_warm_up_starts_at_the_highest_rate_but_one():
    """Of four steps the first has four fifths of the rate."""
    settings = TrainConfig(steps=4, lr=1.0, warmup=0.0)
    assert [learning_rate(settings, step, 4) for step in range(4)] == pytest.approx([0.8, 0.6, 0.4, 0.2])


def test_muon_has_its_own_rate_on_the_same_schedule():
    """At half the height of the schedule all groups are at half of theirs; scale "rms" takes AdamW's rate."""
    model = Transformer(tiny_recipe("x").model, seed=0)
    cases: list[tuple[dict[str, Any], float]] = [
        ({"muon_lr": 0.05}, 0.05),
        ({}, 0.02),
        ({"muon_scale": "rms"}, 4e-3),
    ]
    for more, rate in cases:
        settings = TrainConfig(steps=1, lr=4e-3, optimizer="muon", embed_lr_scale=3.0, **more)
        learner = Learner(model, settings)
        learner.set_rate(2e-3)
        assert isinstance(learner.optimizer, Muon)
        found = {
            (g["muon"], g["lr_scale"] == 3.0): g["lr"] * g["lr_scale"] for g in learner.optimizer.param_groups
        }
        assert found == pytest.approx({(True, False): rate / 2, (False, True): 6e-3, (False, False): 2e-3})


def test_both_embeddings_of_an_encoder_decoder_have_the_factor():
    """Also that of a source with a vocabulary of its own; nothing else has it."""
    model = Transformer(tiny_recipe("x", model={"shape": "encoder-decoder", "source_vocab_size": 90}).model)
    groups = make_optimizer(model, TrainConfig(steps=1, embed_lr_scale=3.0)).param_groups
    scaled = {p for group in groups if group["lr_scale"] == 3.0 for p in group["params"]}
    assert {name for name, p in model.named_parameters() if p in scaled} == {
        "embed.weight",
        "source_embed.weight",
    }


def test_adamw_is_the_default():
    """Without a word about it, the optimizer is AdamW, fused where it can be."""
    optimizer = make_optimizer(Transformer(tiny_recipe("x").model, seed=0), TrainConfig(steps=1))
    assert type(optimizer).__name__ == "AdamW" and not optimizer.defaults["formula"]


# ---------------------------------------------------------------------------------------- a whole run


def test_ten_steps_are_five_and_five(data, tmp_path):
    """Muon, mean, spikes and norms together: stopped and resumed, log and files are the same bits."""
    recipe = tiny_recipe(data, model={"residual_dropout": 0.1}, **EVERYTHING)
    straight = run(recipe, tmp_path / "straight")
    run(recipe, tmp_path / "twice", stop_after=5)
    twice = run(recipe, tmp_path / "twice", resume=True)
    assert outcome(twice) == outcome(straight)


def test_what_is_evaluated_and_loaded_is_the_mean(data, tmp_path):
    """The last validation loss is that of the weights `RunFolder.model` gives, and not the last step's."""
    recipe = tiny_recipe(data, average=0.8)
    done = run(recipe, tmp_path / "run")
    model, state = done.model()
    assert state["averaged"] == 10
    task = NextToken(prepare_data(recipe.data, done, lambda text: None), recipe.train)
    logged = [e["validation_loss"] for e in read_metrics(done.metrics_file) if "validation_loss" in e][-1]
    assert task.evaluate(model, whole=True)["validation_loss"] == logged
    plain = run(replace(recipe, train=replace(recipe.train, average=0.0)), tmp_path / "plain")
    last, _ = plain.model()
    assert task.evaluate(last, whole=True)["validation_loss"] != logged
    losses = [[e["loss"] for e in read_metrics(r.metrics_file) if "loss" in e] for r in (done, plain)]
    assert losses[0] == losses[1]  # training itself goes on from the weights


def test_recomputing_changes_no_bit_of_a_run(data, tmp_path):
    """`checkpoint_activations` ends with the same weights, with dropout; a resumed run may begin it."""
    weights = []
    for again in (False, True):
        recipe = tiny_recipe(data, steps=4, model={"residual_dropout": 0.2}, checkpoint_activations=again)
        done = run(recipe, tmp_path / str(again))
        weights.append(outcome(done)["model.safetensors"])
    recipe = tiny_recipe(data, steps=4, model={"residual_dropout": 0.2})
    run(recipe, tmp_path / "half", stop_after=2)
    again = replace(recipe, train=replace(recipe.train, checkpoint_activations=True, norms_every=2))
    weights.append(outcome(run(again, tmp_path / "half", resume=True))["model.safetensors"])
    assert weights[0] == weights[1] == weights[2]


# --------------------------------------------------------------------------------------------- spikes


def spoilt(recipe: Recipe, folder: Path, factor: float, at: set[int], *watchers: Watcher) -> Trainer:
    """A trainer whose loss is `factor` times what it is in some steps, as a damaged batch would make it."""
    folder.mkdir()
    task = NextToken(prepare_data(recipe.data, RunFolder(folder), lambda text: None), recipe.train)
    honest = task.loss
    made = Trainer(recipe, RunFolder(folder), task, watchers)

    def loss(forward: Forward, batch: Batch, routing: Routing | None = None) -> Tensor:
        return honest(forward, batch, routing) * (factor if made.step in at else 1.0)

    task.loss = loss
    made.start(resume=False)
    return made


def test_a_spike_is_left_out(data, tmp_path):
    """A batch of 1e4 times the loss changes no weight; the note names step, figures and median (R9)."""
    notes = Notes()
    recipe = tiny_recipe(data, steps=14, on_spike="skip", spike_window=10, clip=0.0, probes=0)
    made = spoilt(recipe, tmp_path / "run", 1e4, {11}, notes)
    before: dict[str, torch.Tensor] = {}

    class Compare(Watcher):
        def on_step(self, step: int, metrics: dict[str, Any]) -> None:
            now = {name: value.clone() for name, value in made.model.state_dict().items()}
            same = bool(before) and all(torch.equal(now[name], before[name]) for name in now)
            assert same == (step == 11)
            before.update(now)

    made.watchers = [notes, Compare()]
    made.go()
    told = [text for text in notes.heard if "no update was made" in text]
    assert len(told) == 1 and told[0].startswith("step 12: the loss ") and "times the median" in told[0]
    assert "of the last 10 steps" in told[0]


def test_spikes_are_kept_by_default(data, tmp_path):
    """The same batch moves the weights when nothing was said about spikes."""
    notes = Notes()
    made = spoilt(tiny_recipe(data, steps=12, probes=0), tmp_path / "run", 1e4, {11}, notes)
    made.go()
    assert not any("no update" in text for text in notes.heard)


def test_too_many_spikes_in_a_row_stop_the_run(data, tmp_path):
    """With max_skips=2 the third in a row is an error that names the bound."""
    recipe = tiny_recipe(data, steps=20, on_spike="skip", spike_window=10, max_skips=2, probes=0)
    made = spoilt(recipe, tmp_path / "run", 1e4, {11, 12, 13})
    with pytest.raises(ValueError, match=r"step 14: .*3 times in a row \(max_skips=2\)"):
        made.go()


# ---------------------------------------------------------------------------------------------- norms


def test_norms_are_logged_when_asked_for(data, tmp_path):
    """Every fourth step has the norms of all parts and the idle units; the others have none of it."""
    done = run(tiny_recipe(data, norms_every=4, model={"activation": "relu"}), tmp_path / "run")
    entries = [entry for entry in read_metrics(done.metrics_file) if "loss" in entry]
    assert [entry["step"] for entry in entries if "weight_norm/embed" in entry] == [3, 7]
    looked = entries[3]
    for kind in ("weight_norm", "gradient_norm", "update_norm"):
        parts = {name.removeprefix(f"{kind}/") for name in looked if name.startswith(f"{kind}/")}
        assert parts >= {"embed", "decoder.norm", "decoder.blocks.0.attn", "decoder.blocks.1.ff"}
    assert 0 <= looked["idle_units/decoder.blocks.0.ff"] <= 1
    parts = [value for name, value in looked.items() if name.startswith("gradient_norm/")]
    assert math.sqrt(sum(part**2 for part in parts)) == pytest.approx(min(looked["norm"], 1.0), rel=1e-4)


def test_looking_changes_nothing(data, tmp_path):
    """With and without a look at the norms a run ends with the same bits, dropout included."""
    ends = []
    for every in (0, 3):
        recipe = tiny_recipe(data, norms_every=every, model={"residual_dropout": 0.1})
        done = run(recipe, tmp_path / str(every))
        ends.append(outcome(done))
        assert json.loads(done.budget_file.read_text()) == {"steps": 10}
    assert ends[0]["model.safetensors"] == ends[1]["model.safetensors"]
    assert ends[0]["optimizer.safetensors"] == ends[1]["optimizer.safetensors"]
