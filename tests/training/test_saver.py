"""What a run keeps, and what it does when the disk refuses or memory ends (R5, R13, R15, R17)."""

import errno
import json
import os
import subprocess
import threading
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer
from clearhead.training import durable, loop, saver
from clearhead.training.checkpoint import checkpoints, load_checkpoint, steps_in, verify_checkpoint
from clearhead.training.optim import AdamW, parameter_groups
from clearhead.training.recipe import TrainConfig
from clearhead.training.report import Watcher
from clearhead.training.run_folder import RunFolder
from clearhead.training.saver import Saver
from tiny_run import tiny_recipe, write_corpus

SMALL = ModelConfig(vocab_size=48, d_model=16, n_layers=1, n_heads=2, max_len=16)
STORED = Path(__file__).with_name("stored")


class Notes(Watcher):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def on_note(self, text: str) -> None:
        self.notes.append(text)


def stepped(seed: int = 0) -> tuple[Transformer, AdamW]:
    """A model after one step of its optimizer."""
    model = Transformer(SMALL, seed=seed)
    optimizer = AdamW(parameter_groups(model, 0.1))
    ids = torch.arange(12).reshape(1, 12)
    model(ids).logsumexp(-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def make(run: Path, notes: list[str] | None = None, **settings: Any) -> Saver:
    """A saver of a run with these settings."""
    run.mkdir(exist_ok=True)
    heard = [] if notes is None else notes
    return Saver(run, TrainConfig(steps=9, **settings), heard.append)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", documents=7)


# ------------------------------------------------------------------------------------------ what is kept


def test_the_best_and_the_milestones_are_kept(tmp_path, corpus):
    """The weights of the lowest validation loss, one of them; those of every so many steps, all of them."""
    losses = iter([3.0, 1.0, 2.0, 2.0])
    recipe = tiny_recipe(corpus, steps=8, eval_every=2, save_every=2, milestones=3, keep_best=True)
    evaluate = loop.make_task
    run = RunFolder(tmp_path / "run")

    def scripted(*args: Any) -> Any:
        task, fitted = evaluate(*args)
        task.evaluate = lambda model, whole, looking: {"validation_loss": next(losses)}
        return task, fitted

    loop.make_task = scripted
    try:
        loop.train(recipe, run.path)
    finally:
        loop.make_task = evaluate
    assert [path.name for path in steps_in(run.path / "best")] == ["step-00000004"]
    assert [path.name for path in steps_in(run.path / "milestones")] == ["step-00000006", "step-00000003"]
    assert [path.name for path in checkpoints(run.path)] == ["step-00000008", "step-00000006"]
    model = Transformer(run.config(), seed=0)
    for path in (*steps_in(run.path / "best"), *steps_in(run.path / "milestones")):
        assert verify_checkpoint(path) == []
        assert load_checkpoint(path, model)["step"] == int(path.name[5:])
    ours = run.path / "milestones" / "step-00000006" / "model.safetensors"
    assert ours.read_bytes() == (checkpoints(run.path)[1] / "model.safetensors").read_bytes()


# -------------------------------------------------------------------------- saving while training goes on


def test_weights_that_change_at_once_are_saved_as_they_were(tmp_path):
    """R17: ten saves in a thread, each followed at once by changes of everything in place: none is harmed."""
    kept = make(tmp_path / "run", async_save=True, keep=10)
    expected = []
    model, optimizer = stepped()
    for step in range(1, 11):
        expected.append([p.detach().clone() for p in model.parameters()])
        assert kept.save(step, model, optimizer, {})
        with torch.no_grad():
            for tensor in (*model.parameters(), *(s["exp_avg"] for s in optimizer.state.values())):
                tensor.add_(1.0)
    kept.finish()
    kept.close()
    for step, weights in zip(range(10, 0, -1), reversed(expected), strict=True):
        other, moments = stepped(seed=5)
        path = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
        assert verify_checkpoint(path) == []
        load_checkpoint(path, other, moments)
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), weights, strict=True))


def test_one_save_at_a_time(tmp_path, monkeypatch):
    """A save that comes while one is written waits for it; the order on the disk is that of the steps."""
    kept, written, gate = make(tmp_path / "run", async_save=True), [], threading.Event()
    write = saver.write_content

    def slow(final: Path, content: Any, ranks: Any) -> None:
        assert gate.wait(20)
        written.append(content.step)
        write(final, content, ranks)

    monkeypatch.setattr(saver, "write_content", slow)
    model, optimizer = stepped()
    kept.save(1, model, optimizer, {})
    assert written == [] and not kept.failed
    gate.set()
    kept.save(2, model, optimizer, {})
    kept.finish()
    kept.close()
    assert written == [1, 2]


@pytest.mark.parametrize("policy", ["stop", "warn"])
def test_a_failed_save_is_told_at_the_next_step(tmp_path, corpus, monkeypatch, policy):
    """R17: "stop" ends the run right after the step in which the thread failed; "warn" notes it and goes on.

    The checkpoint before stays whole, and nothing half-written beside it.
    """
    write, notes = saver.write_content, Notes()

    def fail(final: Path, content: Any, ranks: Any) -> None:
        if content.step != 4:
            write(final, content, ranks)
            return
        raise OSError(errno.ENOSPC, "No space left on device")

    class Wait(Watcher):
        def on_step(self, step: int, metrics: dict[str, float]) -> None:
            if step == 4 and (writing := waiting[0].writing):  # by the end of the next step it has failed
                wait([writing], timeout=20)

    waiting: list[Saver] = []
    init = Saver.__init__

    def remembered(self: Saver, *args: Any) -> None:
        init(self, *args)
        waiting.append(self)

    monkeypatch.setattr(Saver, "__init__", remembered)
    monkeypatch.setattr(saver, "write_content", fail)
    recipe = tiny_recipe(corpus, steps=7, save_every=2, async_save=True, on_save_error=policy)
    run = tmp_path / "run"
    if policy == "stop":
        with pytest.raises(OSError, match="No space left"):
            loop.train(recipe, run, watchers=[notes, Wait()])
        assert [path.name for path in checkpoints(run)] == ["step-00000002"]
    else:
        loop.train(recipe, run, watchers=[notes, Wait()])
        assert any("No space left on device; training goes on" in note for note in notes.notes)
        assert [path.name for path in checkpoints(run)] == ["step-00000007", "step-00000006"]
    assert all(verify_checkpoint(path) == [] for path in checkpoints(run))


# ------------------------------------------------------------------------------------ a full disk (R5)


def test_a_full_disk_is_survived_if_asked(tmp_path, corpus, monkeypatch):
    """on_save_error=warn: the run goes on, says path, bytes and what to do, and saves again when it can."""
    notes = Notes()
    full = {"before rename": 1}  # times that the disk is full

    def point(name: str) -> None:
        if full.pop(name, 0):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable, "_point", point)
    recipe = tiny_recipe(corpus, steps=9, save_every=3, on_save_error="warn", probes=0)
    loop.train(recipe, tmp_path / "run", watchers=[notes])
    (told,) = (note for note in notes.notes if "could not be written" in note)
    assert "step-00000003" in told and "bytes) could not be written: No space left on device" in told
    assert "make room there" in told and "training goes on" in told
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000009", "step-00000006"]


def test_a_log_that_cannot_be_written_is_survived_if_asked(tmp_path, corpus):
    """on_save_error=warn: no checkpoint is ahead of its log, the next one is written; the last must be."""

    class Full(Notes):
        full_at = 3

        def before_save(self, step: int) -> None:
            if step == self.full_at:
                raise OSError(errno.ENOSPC, f"the log is full at step {step}")

    recipe, full = tiny_recipe(corpus, steps=9, save_every=3, on_save_error="warn", probes=0), Full()
    loop.train(recipe, tmp_path / "run", watchers=[full], stop_after=7)
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000007", "step-00000006"]
    assert "the log is full at step 3; training goes on (on_save_error=warn)" in full.notes
    full.full_at = 9
    with pytest.raises(OSError, match="full at step 9"):
        loop.train(recipe, tmp_path / "run", watchers=[full], resume=True)
    assert checkpoints(tmp_path / "run")[0].name == "step-00000007"


def test_leftovers_of_a_killed_save_go_at_the_next_start(tmp_path, corpus):
    """.tmp and .trash folders of a killed process are cleared away before the first step."""
    recipe = tiny_recipe(corpus)
    run = loop.train(recipe, tmp_path / "run", stop_after=5).path
    for name in ("checkpoints/.tmp-step-00000006-1", "checkpoints/.trash-step-00000001-1", "best/.tmp-x-1"):
        (run / name).mkdir(parents=True)
        (run / name / "model.safetensors").write_bytes(b"half")

    class Look(Watcher):
        def on_start(self, run: RunFolder, first_step: int, steps: int) -> None:
            assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000005"]
            assert not list((run.path / "best").iterdir())

    loop.train(recipe, run, resume=True, watchers=[Look()])


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root mounts a disk")
def test_a_disk_that_is_really_full(tmp_path):
    """A tmpfs of 256 kB takes three checkpoints or so; what was saved stays whole, nothing half beside it."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        kept = make(disk / "run", keep=50)
        model, optimizer = stepped()
        saved = 0
        with pytest.raises(OSError, match=r"step-\d+ \([\d,]+ bytes\) could not be written.*make room") as e:
            for saved in range(1, 50):
                kept.save(saved, model, optimizer, {})
        assert e.value.errno == errno.ENOSPC
        assert 2 <= saved < 49
        assert all(verify_checkpoint(path) == [] for path in checkpoints(disk / "run"))
        assert len(checkpoints(disk / "run")) == saved - 1
        assert all(not path.name.startswith(".") for path in (disk / "run" / "checkpoints").iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --------------------------------------------------------------------------------- old checkpoints (R15)


@pytest.mark.parametrize("kind", ["whole", "shards"])
def test_checkpoints_of_earlier_releases_load(kind):
    """R15: those kept in stored/, one of a single process and one of two ranks, give the stored logits."""
    folder = STORED / f"0.1.0-{kind}"
    told = json.loads((folder / "told.json").read_text(encoding="utf-8"))
    model = Transformer(ModelConfig.from_dict(told["config"]), seed=1)
    optimizer = AdamW(parameter_groups(model, 0.1))
    path = folder / "step-00000003"
    assert verify_checkpoint(path) == []
    assert load_checkpoint(path, model, optimizer)["step"] == 3
    assert len(optimizer.state) == len(list(model.parameters()))
    with torch.no_grad():
        logits = model.eval()(torch.tensor(told["ids"]))
    assert float((logits - torch.tensor(told["logits"])).abs().max()) <= 1e-6


def test_the_best_is_kept_although_a_checkpoint_failed(tmp_path, monkeypatch):
    """What the thread died of is told, and does not take the best weights with it."""
    told: list[str] = []
    kept = make(tmp_path / "run", told, async_save=True, on_save_error="warn")
    write = saver.write_content

    def refuse(final: Path, content: Any, ranks: Any) -> None:
        if final.parent.name == "checkpoints":
            raise OSError(28, "no space left")
        write(final, content, ranks)

    monkeypatch.setattr(saver, "write_content", refuse)
    model, optimizer = stepped()
    kept.save(1, model, optimizer, {})
    kept.keep_best(1, model, {})
    kept.close()
    assert told == ["no space left; training goes on (on_save_error=warn)"]
    assert [path.name for path in steps_in(tmp_path / "run" / "best")] == ["step-00000001"]
