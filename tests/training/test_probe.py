"""Weights that are kept along the way: a run with them ends with the very bits of one without."""

import hashlib
import itertools
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.model.transformer import Transformer
from clearhead.training import durable, probe
from clearhead.training.checkpoint import checkpoints, load_checkpoint, step_of, steps_in, verify_checkpoint
from clearhead.training.data import prepare_data
from clearhead.training.loop import train
from clearhead.training.probe import PAUSE, SHARE, Probes, most_crowded
from clearhead.training.recipe import Recipe, TrainConfig
from clearhead.training.report import TIMINGS, JsonLines, Watcher, read_metrics
from clearhead.training.run_folder import RunFolder
from tiny_run import tiny_recipe, write_corpus

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared corpus."""
    folder = tmp_path_factory.mktemp("probe")
    corpus = write_corpus(folder / "corpus", documents=7)
    prepare_data(tiny_recipe(corpus).data, RunFolder(folder), note=lambda text: None)
    return folder / "data"


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step is worth a probe, whatever it costs."""
    monkeypatch.setattr(probe, "PAUSE", 0.0)
    monkeypatch.setattr(probe, "SHARE", 1e9)


def run(recipe: Recipe, folder: Path, *watchers: Watcher, **how: Any) -> Path:
    return train(recipe, folder, watchers=[JsonLines(), *watchers], **how).path


def outcome(folder: Path) -> dict[str, Any]:
    """What a run ends with: its last checkpoint to the bit, and its log but for the timings."""
    newest = checkpoints(folder)[0]
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(newest.iterdir())}
    log = [
        {name: value for name, value in entry.items() if name not in TIMINGS}
        for entry in read_metrics(folder / "metrics.jsonl")
    ]
    return {"step": newest.name, "log": log, **hashes}


def kept(folder: Path) -> list[int]:
    return sorted(step_of(path) for path in steps_in(folder / "probes"))


def test_invariant_34_probing_leaves_a_run_unchanged_bit_for_bit(template, tmp_path, eager):
    """Losses, weights and optimizer with dropout are those of the same run without probes."""
    model = {"embed_dropout": 0.1, "ff_dropout": 0.1}
    recipe = tiny_recipe(template, model=model, sample_every=4)
    without = run(tiny_recipe(template, model=model, sample_every=4, probes=0), tmp_path / "without")
    with_probes = run(recipe, tmp_path / "with")
    assert outcome(with_probes) == outcome(without)
    assert not (without / "probes").exists()
    assert kept(with_probes)[0] == 0 and len(kept(with_probes)) > 4


def test_a_probe_is_the_model_at_its_step(template, tmp_path, eager):
    """The first is the model as it began; one at the step of a checkpoint has that checkpoint's weights."""
    recipe = tiny_recipe(template, probes=30)
    folder = run(recipe, tmp_path / "run")
    config, seed = RunFolder(folder).config(), recipe.train.seed
    fresh, first = Transformer(config, seed=seed), Transformer(config, seed=seed + 1)
    load_checkpoint(folder / "probes" / "step-00000000", first)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), first.parameters(), strict=True))
    for step in (5, 10):
        names = [
            folder / part / f"step-{step:08d}" / "model.safetensors" for part in ("probes", "checkpoints")
        ]
        assert names[0].read_bytes() == names[1].read_bytes()
    assert all(not verify_checkpoint(path) for path in steps_in(folder / "probes"))


def test_probes_survive_a_resume(template, tmp_path, eager):
    """Parts give the whole; probes of steps that are taken again are dropped first."""
    whole = run(tiny_recipe(template), tmp_path / "whole")
    parts = run(tiny_recipe(template), tmp_path / "parts", stop_after=5)
    shutil.copytree(parts / "probes" / "step-00000005", parts / "probes" / "step-00000009")
    seen: list[list[int]] = []

    class Look(Watcher):
        def on_step(self, step: int, metrics: dict[str, Any]) -> None:
            seen.append(kept(parts))

    run(tiny_recipe(template), parts, Look(), resume=True)
    assert outcome(parts) == outcome(whole)
    assert 9 not in seen[0] and 5 in seen[0]
    assert kept(parts) == kept(whole)


def test_the_number_of_probes_may_change_on_resume(template, tmp_path, eager):
    """It changes no number of the run."""
    folder = run(tiny_recipe(template), tmp_path / "run", stop_after=5)
    run(tiny_recipe(template, probes=3), folder, resume=True)
    assert len(kept(folder)) == 3 and kept(folder)[0] == 0
    assert "probes = 3" in (folder / "recipe.toml").read_text()


@pytest.mark.parametrize("point", ["model.safetensors", "before rename"])
def test_killed_inside_a_probe(template, tmp_path, point, eager):
    """Kill -9 at any point of a probe: what bears a name is whole, and the run goes on to the same bits."""
    whole = run(tiny_recipe(template, steps=6), tmp_path / "whole")
    folder = tmp_path / "run"
    pid = os.fork()
    if pid == 0:  # a child, which dies in its fourth probe
        hits = 0

        def die(name: str) -> None:
            nonlocal hits
            hits += name == point
            if hits == 4:
                os.kill(os.getpid(), signal.SIGKILL)

        durable._point = die
        try:
            run(tiny_recipe(template, steps=6), folder)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert kept(folder) and all(not verify_checkpoint(path) for path in steps_in(folder / "probes"))
    run(tiny_recipe(template, steps=6), folder, resume=True)
    assert outcome(folder) == outcome(whole)
    assert not list((folder / "probes").glob(".tmp-*"))


def timed(tmp_path: Path, keep: int, cost: float, n_bytes_model: int = 8) -> tuple[Probes, list[int]]:
    """Probes under a clock that says that each takes `cost` seconds."""
    now = [0.0]

    def clock() -> float:
        now[0] += cost
        return now[0]

    made = Probes(torch.nn.Linear(n_bytes_model, 1), keep, clock=clock)
    taken: list[int] = []
    take = made._take
    made._take = lambda done: (taken.append(done), take(done))[1]
    made.on_start(RunFolder(tmp_path), 0, 2000)
    return made, taken


@pytest.mark.parametrize(("seconds", "cost"), [(0.5, 0.05), (0.01, 0.02), (3.0, 0.5)])
def test_probes_take_no_more_than_their_share(tmp_path, seconds, cost):
    """At every probe but the first: at most 1 % of the steps' time with this one; 2 s lie between."""
    made, taken = timed(tmp_path, 12, cost)
    times = []
    for step in range(2000):
        before = len(taken)
        made.on_step(step, {"seconds": seconds})
        if len(taken) > before:
            assert made.spent <= SHARE * made.elapsed
            times.append(made.elapsed)
    assert len(taken) > 2
    assert all(b - a >= PAUSE - 1e-9 for a, b in itertools.pairwise(times))
    assert len(kept(tmp_path)) <= 12 and kept(tmp_path)[0] == 0


def test_probes_lie_close_where_a_model_changes_fast(tmp_path):
    """Cheap probes of long steps: more of them in the first tenth than in the last half."""
    made, _ = timed(tmp_path, 12, 0.001)
    for step in range(2000):
        made.on_step(step, {"seconds": 3.0})
    there = kept(tmp_path)
    assert len(there) == 12
    assert sum(step <= 200 for step in there) > sum(step > 1000 for step in there) > 0


@pytest.mark.parametrize("steps", [[0, 1, 2, 3], [0, 5], [7]])
def test_the_most_crowded_is_never_the_newest(steps):
    """The first goes only when nothing lies between it and the newest."""
    place = most_crowded(steps)
    assert place < len(steps) - 1 or len(steps) == 1
    assert place > 0 or len(steps) <= 2


def test_a_full_disk_ends_the_probes_and_not_the_run(template, tmp_path, monkeypatch, eager):
    """One note, and the run goes on as it would."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    notes: list[str] = []

    class Notes(Watcher):
        def on_note(self, text: str) -> None:
            notes.append(text)

    folder = run(tiny_recipe(template, device="cpu", compile="off"), tmp_path / "run", Notes())
    assert [note for note in notes if "free" in note] == [
        "no more weights are kept for looking at: only 1 bytes are free on the disk"
    ]
    assert checkpoints(folder)[0].name == "step-00000010" and not kept(folder)


@pytest.mark.parametrize("probes", [-1, 31])
def test_a_number_of_probes_out_of_bounds(probes):
    """The message names the bounds."""
    with pytest.raises(ValueError, match=f"probes={probes} must be between 0 and 30"):
        TrainConfig(probes=probes)
