"""The log of a run: whole lines, cut back to the checkpoint, readable by anything that reads JSON."""

import errno
import io
import json
import math
import re
import struct
import sys
from typing import Any

import pytest
from rich.console import Console

from clearhead.training.recipe import Recipe, TrainConfig, recipe_from_dict, save_recipe
from clearhead.training.report import (
    Curve,
    JsonLines,
    Samples,
    TensorBoard,
    Terminal,
    Watcher,
    draw_curve,
    keep_lines_before,
    read_metrics,
    running_mean,
)
from clearhead.training.run_folder import RunFolder


def metrics(loss: float = 2.0) -> dict[str, float]:
    return {"loss": loss, "norm": 1.0, "lr": 0.1, "tokens": 64, "seconds": 0.5, "tokens_per_second": 128.0}


EVALUATION = {"validation_loss": 2.5, "perplexity": math.exp(2.5), "bits_per_byte": 1.25}


@pytest.fixture
def run(tmp_path) -> RunFolder:
    run = RunFolder(tmp_path)
    save_recipe(Recipe(train=TrainConfig(steps=4)), run.recipe_file)
    return run


def log(run: RunFolder, watcher: Watcher, steps: range) -> None:
    watcher.on_start(run, steps.start, steps.stop)
    for step in steps:
        watcher.on_step(step, metrics(loss=3.0 - step / 10))
        if step % 2:
            watcher.on_evaluation(step, EVALUATION)
            watcher.on_sample(step, f"text of {step}")
    watcher.before_save(steps.stop)
    watcher.on_end()


def test_one_json_object_per_line(run):
    log(run, JsonLines(), range(4))
    entries = [json.loads(line) for line in run.metrics_file.read_text(encoding="utf-8").splitlines()]
    assert [entry["step"] for entry in entries] == [0, 1, 1, 2, 3, 3]
    assert entries[0] == {"step": 0, **metrics(3.0)}
    assert entries[2] == {"step": 1, **EVALUATION}
    assert entries == read_metrics(run.metrics_file)


def test_the_log_is_cut_back_to_the_checkpoint(run):
    """What came after the checkpoint is written again by the resumed run, not twice."""
    log(run, JsonLines(), range(7))
    whole = run.metrics_file.read_bytes()
    log(run, JsonLines(), range(4, 7))
    assert run.metrics_file.read_bytes() == whole
    log(run, JsonLines(), range(0))
    assert run.metrics_file.read_bytes() == b""


def test_a_torn_last_line_is_cut(run):
    """A kill may leave any part of the last line; every whole line before it stays."""
    log(run, JsonLines(), range(3))
    whole = run.metrics_file.read_bytes()
    start = whole.rstrip(b"\n").rindex(b"\n") + 1
    before = read_metrics(run.metrics_file)[:-1]
    for cut in range(start, len(whole) - 1):
        run.metrics_file.write_bytes(whole[:cut])
        keep_lines_before(run.metrics_file, 99)
        assert read_metrics(run.metrics_file) == before
        assert run.metrics_file.read_bytes() == whole[:start]


class FullDisk(io.FileIO):
    """A file that takes `room` bytes, and no more."""

    room = 0

    def write(self, data: Any) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = super().write(data[: self.room])
        self.room -= taken
        return taken


def test_a_full_disk_tears_no_line(run):
    """What it refuses waits, is told when a checkpoint is to be saved, and follows when there is room again,
    from the byte where it stopped.
    """
    log(run, JsonLines(), range(3))
    expected = run.metrics_file.read_bytes()
    run.metrics_file.unlink()
    watcher = JsonLines()
    watcher.on_start(run, 0, 3)
    assert watcher.file is not None
    watcher.file.close()
    watcher.file.file = full = FullDisk(run.metrics_file, "a")
    full.room = len(expected) // 2
    for step in range(3):
        watcher.on_step(step, metrics(loss=3.0 - step / 10))
        if step % 2:
            watcher.on_evaluation(step, EVALUATION)
    assert run.metrics_file.read_bytes() == expected[: len(expected) // 2]
    with pytest.raises(OSError, match=r"metrics\.jsonl could not be written: No space .*; \d+ bytes wait"):
        watcher.before_save(3)
    full.room = 10_000
    watcher.before_save(3)
    assert run.metrics_file.read_bytes() == expected
    watcher.on_end()


def test_lines_of_another_kind_end_the_log(run):
    for strange in (b"[1]\n", b'{"loss": 1}\n', b'{"step": "x"}\n', b"\xff\n"):
        run.metrics_file.write_bytes(b'{"step": 0}\n' + strange + b'{"step": 1}\n')
        assert read_metrics(run.metrics_file) == [{"step": 0}]


def test_no_log_is_an_empty_log(run):
    assert read_metrics(run.metrics_file) == []


def test_what_is_not_finite_is_null(run):
    """NaN is no JSON: other programs stop at it."""
    watcher = JsonLines()
    watcher.on_start(run, 0, 1)
    watcher.on_step(0, metrics(loss=math.nan) | {"norm": math.inf})
    watcher.on_end()
    text = run.metrics_file.read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=pytest.fail)["loss"] is None
    assert json.loads(text)["norm"] is None
    draw_curve(run)
    assert not run.curve_file.exists()  # there is no loss to draw


def test_samples_are_cut_back_too(run):
    log(run, Samples(), range(6))
    whole = run.samples_file.read_text(encoding="utf-8")
    assert whole == "--- step 2\ntext of 1\n--- step 4\ntext of 3\n--- step 6\ntext of 5\n"
    log(run, Samples(), range(3, 6))
    assert run.samples_file.read_text(encoding="utf-8") == whole
    log(run, Samples(), range(2, 2))
    assert run.samples_file.read_text(encoding="utf-8") == "--- step 2\ntext of 1\n"


def test_the_curve_is_a_picture(run):
    """A PNG of 960 x 540 dots, with validation points and without."""
    for watchers in ([JsonLines(), Curve()],):
        for watcher in watchers:
            log(run, watcher, range(6))
    head = run.curve_file.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", head[16:24]) == (960, 540)
    log(run, JsonLines(), range(1))
    draw_curve(run)
    assert run.curve_file.read_bytes().endswith(b"IEND\xaeB`\x82")


def test_no_curve_of_nothing(run):
    log(run, Curve(), range(0))
    assert not run.curve_file.exists()
    Curve().on_end()  # training that failed before it started


def test_running_mean():
    """m_i = sum of memory^(i-j) x_j / sum of memory^(i-j), by the definition."""
    values = [3.0, 1.0, 4.0, 1.0, 5.0]
    weights = [[0.9 ** (i - j) for j in range(i + 1)] for i in range(5)]
    expected = [sum(w * x for w, x in zip(row, values, strict=False)) / sum(row) for row in weights]
    assert running_mean(values, memory=0.9) == pytest.approx(expected)
    assert running_mean([]) == []


def test_terminal_writes_plain_lines_to_a_file(run):
    """No bars and no control characters where nobody watches; a line every so often."""
    output = io.StringIO()
    log(run, Terminal(Console(file=output, width=200), seconds_between_lines=0.0), range(2))
    assert output.getvalue().splitlines() == [
        "step 1/2  loss 3.000  128 tokens/s",
        "step 2/2  loss 2.900  128 tokens/s  0:00:00 left",
        "step 2: validation loss 2.5000, perplexity 12.1825, bits per byte 1.2500",
        "step 2, the model writes:",
        "text of 1",
    ]
    rare = io.StringIO()
    log(run, Terminal(Console(file=rare), seconds_between_lines=3600.0), range(1))
    assert rare.getvalue() == ""


@pytest.mark.parametrize("watched", [False, True])
def test_terminal_tells_the_time_that_is_left(watched, run):
    """On a terminal and in a file alike: the steps to go at the pace of those since the run went on."""
    output, seconds = io.StringIO(), [0.0]
    terminal = Terminal(
        Console(file=output, width=200, force_terminal=watched), 0.0, clock=lambda: seconds[0]
    )
    terminal.on_start(run, 40, 100)
    for step in range(40, 44):
        seconds[0] += 90.0
        terminal.on_step(step, metrics())
    terminal.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
    if watched:
        assert "left 1:24:00" in shown
    else:
        left = [line.partition("tokens/s")[2].strip() for line in shown.splitlines()]
        assert left == ["", "1:27:00 left", "1:25:30 left", "1:24:00 left"]


def test_a_narrow_terminal_shows_all_figures(run):
    """80 columns, as most windows have: bar and time passed give way."""
    output, seconds = io.StringIO(), [0.0]
    terminal = Terminal(Console(file=output, width=80, force_terminal=True), 0.0, clock=lambda: seconds[0])
    terminal.on_start(run, 140, 300)
    terminal.on_evaluation(140, {"validation_loss": 2.5, "perplexity": 12.18, "bits_per_byte": 1.25})
    for step in range(140, 144):
        seconds[0] += 90.0
        terminal.on_step(step, metrics() | {"tokens_per_second": 40_077.0})
    terminal.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.getvalue())
    assert "bits per byte 1.250 left 3:54:00" in shown and "40,077 tokens/s" in shown


SPEEDS = {
    "next_token": "128 tokens/s",
    "chat": "128 answer tokens/s",
    "masked": "1,344 tokens/s",
    "translation": "128 target tokens/s",
    "classes": "42 examples/s",
    "several_labels": "42 examples/s",
    "regression": "42 examples/s",
    "token_labels": "128 words/s",
    "span": "42 windows/s",
    "contrastive": "42 pairs/s",
}


@pytest.mark.parametrize("what", SPEEDS)
def test_speed_is_told_in_what_people_count(what, run):
    """128 targets a second; 7 rows of 32 tokens in 3 passes of half a second."""
    objective, form = ("next_token", "chat") if what == "chat" else (what, "text")
    sizes = {"steps": 2, "batch_size": 7, "accumulation": 3, "context_length": 32}
    save_recipe(
        recipe_from_dict({"data": {"form": form}, "train": {"objective": objective, **sizes}}),
        run.recipe_file,
    )
    output = io.StringIO()
    log(run, Terminal(Console(file=output, width=200), seconds_between_lines=0.0), range(1))
    assert output.getvalue() == f"step 1/1  loss 3.000  {SPEEDS[what]}  0:00:00 left\n"


def test_terminal_shows_progress(run):
    """Where somebody watches: the step, the loss, bits per byte, the speed, and the preparation before it."""
    output = io.StringIO()
    terminal = Terminal(Console(file=output, force_terminal=True, width=120))
    terminal.on_progress("count", 10, None)
    terminal.on_progress("merge", 5, 10)
    terminal.on_progress("merge", 10, 10)
    log(run, terminal, range(3))
    shown = output.getvalue()
    for part in ("count", "merge", "step 3/3", "loss 2.800", "128 tokens/s", "bits per byte 1.250", "left"):
        assert part in shown


def test_text_of_the_model_is_no_markup(run):
    output = io.StringIO()
    terminal = Terminal(Console(file=output, width=20))
    text = "a[0] = [bold]x[/bold] :smile: and no line is broken"
    terminal.on_sample(0, text)
    assert output.getvalue() == f"step 1, the model writes:\n{text}\n"


def test_tensorboard_writes_events(run):
    log(run, TensorBoard(), range(3))
    [events] = (run.path / "tensorboard").glob("events.out.tfevents.*")
    content = events.read_bytes()
    assert b"loss" in content
    assert b"bits_per_byte" in content


def test_tensorboard_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match=r"pip install 'clearhead\[tensorboard\]'"):
        TensorBoard()


def test_a_watcher_may_leave_out_what_it_does_not_care_for(run):
    log(run, Watcher(), range(2))
    Watcher().on_note("x")
    Watcher().on_progress("count", 1, None)
    assert list(run.path.iterdir()) == [run.recipe_file]  # nothing was added


def test_ending_before_the_start(run):
    """An error before the first step ends watchers that never started."""
    for watcher in (JsonLines(), Terminal(Console(file=io.StringIO())), Samples(), Curve(), TensorBoard()):
        watcher.on_end()
    assert list(run.path.iterdir()) == [run.recipe_file]  # nothing was added
