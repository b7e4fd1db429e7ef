"""The weights of a run at some of its steps, kept so that one can go back and look inside at each of them.

    run/probes/step-00000000/    model.safetensors, state.json, manifest.json: a checkpoint without optimizer

The first is taken before the first step, the others when all three hold: the step is a few per cent above the
one before, two seconds have passed, and what probes have cost, with this one, stays within 1 % of the time
that the steps took. So they lie close where a model changes fast. When there are too many, the most crowded
one goes. Nothing is computed with the model here: its numbers are copied, and a run with probes ends with the
very bits of one without.
"""

import math
import shutil
import time
from collections.abc import Callable
from typing import Any

from torch import nn

from clearhead.training.checkpoint import step_of, steps_in, write_checkpoint
from clearhead.training.durable import remove_folder
from clearhead.training.lora import merged
from clearhead.training.report import Watcher
from clearhead.training.run_folder import RunFolder

SHARE = 0.01  # of the steps' time, at most
PAUSE = 2.0  # seconds between two, at least
ROOM = 8  # times the weights must be free on the disk: checkpoints come first
_SPEED = 1e8  # bytes a second, until it was measured


class Probes(Watcher):
    """Keeps the weights of `keep` steps. `spent` and `elapsed`: seconds in probes, and in steps."""

    def __init__(
        self,
        model: nn.Module,
        keep: int,
        note: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.model, self.keep, self.note, self.clock = model, keep, note, clock
        self.n_bytes = sum(tensor.nbytes for tensor in model.state_dict().values())
        self.run: RunFolder | None = None
        self.spent, self.elapsed = 0.0, 0.0
        self.cost = self.n_bytes / _SPEED  # of the next one, in seconds
        self.due, self.ratio = 1, 2.0
        self.latest = -math.inf  # when the last one was taken, as `elapsed` counts

    def on_start(self, run: RunFolder, first_step: int, steps: int) -> None:
        """Drop the probes of steps that will be taken again; take that of the model as it begins."""
        self.run = run
        self.ratio = (steps + 1) ** (1 / (2 * self.keep))
        there = steps_in(run.probes)
        for path in there:
            if step_of(path) > first_step:
                remove_folder(path)
        if first_step == 0:
            self._take(0)
        else:
            self._next(max([step_of(path) for path in there if step_of(path) <= first_step], default=0))

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        self.elapsed += metrics["seconds"]
        done = step + 1
        if (
            done >= self.due
            and self.elapsed - self.latest >= PAUSE
            and self.spent + self.cost <= SHARE * self.elapsed
        ):
            self._take(done)

    def _take(self, done: int) -> None:
        """Write the weights after `done` steps. A disk that refuses ends the probes, not the run."""
        if self.run is None or not self.keep:
            return
        began = self.clock()
        try:
            free = shutil.disk_usage(self.run.path).free
            if free < ROOM * self.n_bytes:
                raise OSError(f"only {free:,} bytes are free on the disk")
            about = {"training_seconds": self.elapsed, "probe_seconds": self.spent}
            write_checkpoint(self.run.probes / f"step-{done:08d}", done, merged(self.model), state=about)
            paths = sorted(steps_in(self.run.probes), key=step_of)
            while len(paths) > self.keep:
                remove_folder(paths.pop(most_crowded([step_of(path) for path in paths])))
        except OSError as error:
            self.keep = 0
            self.note(f"no more weights are kept for looking at: {error.args[-1]}")
        seconds = self.clock() - began
        self.spent += seconds
        self.cost = seconds if not done else max(seconds, self.cost / 2)
        self.latest = self.elapsed
        self._next(done)

    def _next(self, done: int) -> None:
        self.due = max(done + 1, math.ceil(done * self.ratio))


def most_crowded(steps: list[int]) -> int:
    """The place of the step that can go: its neighbours are the closest, as a ratio; never the first or last.

    >>> most_crowded([0, 10, 12, 40, 80])
    2
    """
    gaps = [(steps[i + 1] + 1) / (steps[i - 1] + 1) for i in range(1, len(steps) - 1)]
    return 1 + gaps.index(min(gaps)) if gaps else 0
