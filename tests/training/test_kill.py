"""A run that is killed at any moment, again and again, ends with the very same bits as one that never was.

Nothing here but the real loop, in processes of its own: the parent has loaded torch once, and a child is
forked from it for every trial. It trains until the parent's kill -9 meets it, in a step or in a save; the
next child goes on from what lies on the disk.
"""

import hashlib
import os
import random
import select
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clearhead.training import durable, loop, tasks
from clearhead.training.checkpoint import checkpoints
from clearhead.training.recipe import Recipe
from clearhead.training.report import TIMINGS, JsonLines, Samples, Watcher, read_metrics
from clearhead.training.run_folder import RunFolder
from clearhead.training.saver import Saver
from tiny_run import tiny_recipe, write_corpus

STOPPED = 3
KILLS, AFTER_A_CHECKPOINT, INSIDE_A_SAVE = 50, 30, 5


class Steps(Watcher):
    """Tells of every step."""

    def __init__(self, tell: Callable[[bytes], object]) -> None:
        self.tell = tell

    def on_step(self, step: int, metrics: dict[str, float]) -> None:
        self.tell(b"s")


def train(recipe: Recipe, folder: Path, tell: Callable[[bytes], object] = lambda event: None) -> None:
    """Start the run, or go on with it. `tell` hears of a step ("s"), of its half ("m"), of a save's beginning
    and end ("(", ")") and of each point within it (".").
    """
    resume = RunFolder(folder).exists()
    loop.train(recipe, folder, resume=resume, watchers=[JsonLines(), Samples(), Steps(tell)])


def train_and_tell(recipe: Recipe, folder: Path, pipe: int) -> None:
    """The life of a child. It may change the modules: they are its own."""

    def tell(event: bytes) -> None:
        os.write(pipe, event)

    token_loss, save_checkpoint = tasks.token_loss, Saver.save

    def loss(*args, **kwargs):
        tell(b"m")
        return token_loss(*args, **kwargs)

    def save(*args, **kwargs):
        tell(b"(")
        saved = save_checkpoint(*args, **kwargs)
        tell(b")")
        return saved

    tasks.token_loss, Saver.save = loss, save
    durable._point = lambda name: tell(b".")
    train(recipe, folder, tell)


def trial(
    recipe: Recipe,
    folder: Path,
    enough: Callable[[bytes], bool],
    delay: float,
    signals: tuple[int, ...] = (signal.SIGKILL,),
) -> tuple[bool, bytes, float]:
    """Train in a child, signal it `delay` seconds after its events are `enough`; was it ended, at which of
    its events, and how many seconds after the signal?
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reading)
            train_and_tell(recipe, folder, writing)
            code = 0
        except loop.Interrupted:
            code = STOPPED
        finally:
            os._exit(code)
    os.close(writing)
    events = b""
    while not enough(events) and (told := os.read(reading, 1)):
        events += told
    select.select([], [], [], delay)
    asked = time.monotonic()
    for number in signals:
        os.kill(pid, number)  # a child that has ended waits to be asked: its number is still its own
    while told := os.read(reading, 4096):
        events += told
    os.close(reading)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, STOPPED, -signal.SIGKILL), f"the child failed with exit code {code}"
    return code != 0, events, time.monotonic() - asked


def outcome(folder: Path) -> dict[str, Any]:
    """What a run ends with: the bits of weights and optimizer, and its logs but for the timings."""
    run, newest = RunFolder(folder), checkpoints(folder)[0]
    files = {
        name: hashlib.sha256((newest / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "optimizer.safetensors", "state.json")
    }
    log = [
        {name: value for name, value in entry.items() if name not in TIMINGS}
        for entry in read_metrics(run.metrics_file)
    ]
    return files | {"step": newest.name, "log": log, "samples": run.samples_file.read_text()}


def moment(source: random.Random) -> tuple[Callable[[bytes], bool], float]:
    """A random moment to kill at: so many events from now, or so many points into a save."""
    if source.random() < 0.7:
        count = source.randint(0, 50)
        return lambda events: len(events) >= count, source.uniform(0, 0.004)
    points = source.randint(0, 8)
    return lambda events: b"(" in events and events.rpartition(b"(")[2].count(b".") >= points, 0.0


def dropout_recipe(folder: Path) -> Recipe:
    dropout = {"embed_dropout": 0.1, "attn_dropout": 0.1, "residual_dropout": 0.1, "ff_dropout": 0.1}
    return tiny_recipe(
        write_corpus(folder / "corpus", documents=7),
        model=dropout,
        steps=45,
        batch_size=2,
        accumulation=2,
        eval_every=10,
        sample_every=15,
        sample_tokens=4,
        save_every=3,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.usefixtures("unchecked")
def test_fifty_kills_leave_no_trace(tmp_path: Path) -> None:
    """Weights, optimizer and logs equal bit for bit those of the uninterrupted run: 2 layers with dropout,
    two micro-batches in a step, five epochs.
    """
    recipe = dropout_recipe(tmp_path)
    train(recipe, tmp_path / "reference")
    expected = outcome(tmp_path / "reference")

    source = random.Random(2026)
    kills = after_a_checkpoint = inside_a_save = runs = 0
    folder = tmp_path / "run-0"
    while kills < KILLS or after_a_checkpoint < AFTER_A_CHECKPOINT or inside_a_save < INSIDE_A_SAVE:
        assert kills < 3 * KILLS, "the kills do not meet the saves"
        had_checkpoint = bool(checkpoints(folder))
        killed, events, _ = trial(recipe, folder, *moment(source))
        if killed:
            kills += 1
            after_a_checkpoint += had_checkpoint
            inside_a_save += events.count(b"(") > events.count(b")")
        else:
            assert outcome(folder) == expected
            runs += 1
            folder = tmp_path / f"run-{runs}"
    train(recipe, folder)
    assert outcome(folder) == expected
    assert not [path for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]
    print(f"{kills} kills: {after_a_checkpoint} after a checkpoint, {inside_a_save} inside a save")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.usefixtures("unchecked")
def test_twenty_requests_to_stop_lose_no_step(tmp_path: Path) -> None:
    """SIGTERM at random moments, in saves, and twice in a row: each time the last finished step is on the
    disk, and the run goes on to the very same end (R6).
    """
    recipe = dropout_recipe(tmp_path)
    train(recipe, tmp_path / "reference")
    expected = outcome(tmp_path / "reference")
    source = random.Random(6)
    stops = in_saves = runs = 0
    slowest = 0.0
    folder = tmp_path / "run-0"
    while stops < 20 or in_saves < 3:
        assert stops < 60, "the signals do not meet the saves"
        before = int(checkpoints(folder)[0].name[5:]) if checkpoints(folder) else 0
        twice = (signal.SIGTERM,) * (1 + stops % 2)
        if stops % 4 == 3:  # in the first save after some steps
            moment = (lambda events: b"s" in events and events.endswith(b"(.")), 0.0
        else:
            steps = source.randint(1, 6)
            moment = (lambda events, steps=steps: events.count(b"s") >= steps), source.uniform(0, 0.004)
        stopped, events, seconds = trial(recipe, folder, *moment, twice)
        assert int(checkpoints(folder)[0].name[5:]) == before + events.count(b"s")
        if stopped:
            stops += 1
            slowest = max(slowest, seconds)
            in_saves += events.rstrip(b".)").endswith(b"(") and stops % 4 == 0
        else:
            assert outcome(folder) == expected
            runs += 1
            folder = tmp_path / f"run-{runs}"
    train(recipe, folder)
    assert outcome(folder) == expected
    print(f"{stops} requests to stop, {in_saves} in saves; the slowest was obeyed after {slowest:.2f} s")
