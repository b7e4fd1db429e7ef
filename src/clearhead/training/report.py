"""The log of a run. The loop tells its watchers what happens; each watcher writes it down in its own way.

JsonLines    metrics.jsonl, one line per step and evaluation; cut back to the checkpoint on resume
Terminal     progress while it runs: loss, bits per byte, speed, time left
Curve        loss.png, when training ends or is stopped
Samples      samples.txt
TensorBoard  with the extra `clearhead[tensorboard]`
"""

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from clearhead.training.run_folder import RunFolder

# What differs between two runs of the same recipe: everything else in the log is equal bit for bit.
TIMINGS = ("seconds", "tokens_per_second")
ROOM_FOR_BAR = 100  # columns; in a narrower terminal the figures need the place


class Watcher:
    """Hears what happens in a run. All methods do nothing; a watcher overrides those it cares about."""

    def on_note(self, text: str) -> None:
        """A choice the loop made, or a thing worth knowing, in one line."""

    def on_progress(self, stage: str, done: int, total: int | None) -> None:
        """Text is being prepared: "count" and "merge" when a vocabulary is learned, "encode" after that."""

    def on_start(self, run: RunFolder, first_step: int, steps: int) -> None:
        """Training starts at `first_step` (0, or where a checkpoint left off) and ends at `steps`."""

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        """A step is done: loss, norm, lr, seconds, and in targets tokens (so far) and tokens_per_second."""

    def on_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        """The validation examples were looked at: validation_loss and what else the task measures."""

    def on_sample(self, step: int, text: str) -> None:
        """The model wrote something."""

    def before_save(self, step: int) -> None:
        """A checkpoint is about to be written: make durable what belongs to it. OSError: the disk refused,
        and there is no checkpoint without it.
        """

    def on_end(self) -> None:
        """Training is over, finished or interrupted."""


class GrowingFile:
    """A file that text is added to. What a full disk refuses waits in memory, and is tried again with the
    next text, from the very byte where it stopped.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.waiting = path, b""
        # without a buffer, so that whoever looks at the run sees every step when it is done
        self.file = path.open("ab", buffering=0)

    def add(self, text: str) -> None:
        """Write the text at the end, now or later."""
        self.waiting += text.encode()
        with contextlib.suppress(OSError):
            self._write()

    def settle(self) -> None:
        """Make all of it durable. OSError: the disk refused some, which still waits."""
        try:
            self._write()
            os.fsync(self.file.fileno())
        except OSError as error:
            what = f"{self.path} could not be written: {error.strerror}; {len(self.waiting):,} bytes wait"
            raise OSError(error.errno, what) from error

    def close(self) -> None:
        """End it. OSError: the disk still refuses what waits."""
        with self.file:
            self._write()

    def _write(self) -> None:
        while self.waiting:
            self.waiting = self.waiting[self.file.write(self.waiting) :]


class JsonLines(Watcher):
    """metrics.jsonl: one JSON object per line, `step` first."""

    def __init__(self) -> None:
        self.file: GrowingFile | None = None

    def on_start(self, run: RunFolder, first_step: int, steps: int) -> None:
        keep_lines_before(run.metrics_file, first_step)
        self.file = GrowingFile(run.metrics_file)

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        self._add({"step": step, **plain(metrics)})

    def on_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        self._add({"step": step, **plain(metrics)})

    def before_save(self, step: int) -> None:
        if self.file is not None:
            self.file.settle()

    def on_end(self) -> None:
        if self.file is not None:
            self.file.close()

    def _add(self, entry: dict[str, Any]) -> None:
        assert self.file is not None, "on_start comes first"
        self.file.add(json.dumps(entry) + "\n")


def plain(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry with None for NaN and infinity, which JSON does not know."""
    return {name: value if math.isfinite(value) else None for name, value in entry.items()}


def keep_lines_before(metrics_file: Path, step: int) -> None:
    """Cut a log back to the lines of steps below `step`; a torn last line goes too."""
    lines = [entry for entry in read_metrics(metrics_file) if entry["step"] < step]
    temporary = metrics_file.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(entry) + "\n" for entry in lines), encoding="utf-8")
    temporary.replace(metrics_file)


def read_metrics(metrics_file: Path) -> list[dict[str, Any]]:
    """The entries of a log, up to the first line that is not whole."""
    entries: list[dict[str, Any]] = []
    if not metrics_file.is_file():
        return entries
    for line in metrics_file.read_bytes().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            break
        entries.append(entry)
    return entries


class Terminal(Watcher):
    """A live line on a terminal; on anything else a plain line every so often.

    clock: seconds that go by, from any start.
    """

    def __init__(
        self,
        console: Console | None = None,
        seconds_between_lines: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.console = console or Console(stderr=True)
        self.pause, self.clock = seconds_between_lines, clock
        self.last_line = 0.0
        self.latest = ""  # the last figure of the latest evaluation
        self.unit, self.per_step = "tokens", None
        self.progress: Progress | None = None
        self.task: TaskID | None = None
        self.stages: Progress | None = None
        self.bars: dict[str, TaskID] = {}

    def on_progress(self, stage: str, done: int, total: int | None) -> None:
        if not self.console.is_terminal:
            return
        if self.stages is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"))
            self.stages = Progress(*columns, TimeElapsedColumn(), console=self.console, transient=True)
            self.stages.start()
        if stage not in self.bars:
            self.bars[stage] = self.stages.add_task(stage, total=total)
        self.stages.update(self.bars[stage], completed=done, total=total)
        if done == total:
            self._end_stages()

    def _end_stages(self) -> None:
        if self.stages is not None:
            self.stages.stop()
        self.stages, self.bars = None, {}

    def on_note(self, text: str) -> None:
        # As it stands: no [markup], no :emoji:, no line broken where a file or a pipe has no width.
        self.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def on_start(self, run: RunFolder, first_step: int, steps: int) -> None:
        self._end_stages()
        self.unit, self.per_step = run.recipe().pace()
        self.last_line = self.clock()
        wide = self.console.width >= ROOM_FOR_BAR
        self.progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            *([BarColumn()] if wide else []),
            TextColumn("{task.fields[figures]}"),
            *([TimeElapsedColumn()] if wide else []),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,  # it still reckons the time that is left
            speed_estimate_period=600.0,  # seconds: steps may be slow, and looks come between them
            get_time=self.clock,
        )
        self.progress.start()
        self.task = self.progress.add_task("train", total=steps, completed=first_step, figures="")

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        assert self.progress is not None and self.task is not None, "on_start comes first"
        figures = f"loss {metrics['loss']:.3f}  {self._speed(metrics)}{self.latest}"
        self.progress.update(self.task, completed=step + 1, figures=figures)
        if not self.console.is_terminal and self.clock() - self.last_line >= self.pause:
            self.last_line = self.clock()
            (task,) = self.progress.tasks
            left = task.time_remaining
            figures += "" if left is None else f"  {timedelta(seconds=left)} left"
            self.on_note(f"step {step + 1}/{task.total}  {figures}")

    def _speed(self, metrics: dict[str, Any]) -> str:
        """How fast a step was, in what people count for this objective."""
        per_second = metrics["tokens_per_second"]  # targets, whatever they are
        if self.per_step is not None:
            per_second = self.per_step / metrics["seconds"]
        return f"{per_second:,.{0 if per_second >= 10 else 1}f} {self.unit}/s"

    def on_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        names = {name: name.replace("_", " ") for name in metrics}
        name = next(reversed(metrics))
        self.latest = f"  {names[name]} {metrics[name]:.3f}"
        figures = ", ".join(f"{names[name]} {value:.4f}" for name, value in metrics.items())
        self.on_note(f"step {step + 1}: {figures}")

    def on_sample(self, step: int, text: str) -> None:
        self.on_note(f"step {step + 1}, the model writes:\n{text}")

    def on_end(self) -> None:
        self.close()

    def close(self) -> None:
        """Take the bars off the screen."""
        self._end_stages()
        if self.progress is not None:
            self.progress.stop()


class Samples(Watcher):
    """samples.txt: what the model wrote, and when."""

    def __init__(self) -> None:
        self.path: Path | None = None
        self.file: GrowingFile | None = None  # made for the first sample

    def on_start(self, run: RunFolder, first_step: int, steps: int) -> None:
        self.path = run.samples_file
        keep_samples_before(self.path, first_step)

    def on_sample(self, step: int, text: str) -> None:
        assert self.path is not None, "on_start comes first"
        self.file = self.file or GrowingFile(self.path)
        self.file.add(f"--- step {step + 1}\n{text}\n")

    def before_save(self, step: int) -> None:
        if self.file is not None:
            self.file.settle()

    def on_end(self) -> None:
        if self.file is not None:
            self.file.close()


def keep_samples_before(samples_file: Path, step: int) -> None:
    """Cut the samples back to those of a run that stands at `step`, as the log is."""
    if not samples_file.is_file():
        return
    for header in re.finditer(rb"^--- step (\d+)$", samples_file.read_bytes(), re.MULTILINE):
        if int(header[1]) > step:
            os.truncate(samples_file, header.start())
            return


class Curve(Watcher):
    """loss.png: training and validation loss over steps, drawn when training ends or is stopped."""

    def __init__(self) -> None:
        self.run: RunFolder | None = None

    def on_start(self, run: RunFolder, first_step: int, steps: int) -> None:
        self.run = run

    def on_end(self) -> None:
        if self.run is not None:
            draw_curve(self.run)


def draw_curve(run: RunFolder) -> None:
    """Draw metrics.jsonl into loss.png: the mean loss of the targets, in training also as a running mean."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    entries = read_metrics(run.metrics_file)
    training, validation = (
        [(entry["step"] + 1, entry[name]) for entry in entries if entry.get(name) is not None]
        for name in ("loss", "validation_loss")
    )
    if not training:
        return
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = [step for step, _ in training]
    losses = [loss for _, loss in training]
    axes.plot(steps, losses, color="#9bb8d3", linewidth=0.6, label="training, each step")
    axes.plot(steps, running_mean(losses), color="#1f5a91", linewidth=1.6, label="training, running mean")
    if validation:
        axes.plot(
            *zip(*validation, strict=True), color="#c8502d", marker="o", markersize=3.5, label="validation"
        )
    targets = run.recipe().targets()
    unit = "nats per token" if targets == "tokens" else f"mean over {targets}"
    axes.set(xlabel="step", ylabel=f"loss ({unit})", title=run.path.name)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(run.curve_file)


def running_mean(values: list[float], memory: float = 0.95) -> list[float]:
    """Exponential running mean, corrected for its start: each value counts `memory` times less than the next.

    >>> running_mean([2.0, 2.0, 2.0])
    [2.0, 2.0, 2.0]
    """
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = memory * total + (1 - memory) * value, memory * weight + (1 - memory)
        means.append(total / weight)
    return means


class TensorBoard(Watcher):
    """Scalars for TensorBoard, in the run's own folder."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError(
                "TensorBoard is not installed; run: pip install 'clearhead[tensorboard]'"
            ) from None
        self._writer_class = SummaryWriter
        self.writer: Any = None

    def on_start(self, run: RunFolder, first_step: int, steps: int) -> None:
        self.writer = self._writer_class(str(run.path / "tensorboard"), purge_step=first_step)

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def on_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)

    def on_end(self) -> None:
        if self.writer is not None:
            self.writer.close()
