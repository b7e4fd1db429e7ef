"""When a run is saved, where, and what stays: the newest few, the best, and milestones.

    run/checkpoints/step-00001200/   all that going on needs; the newest `keep` of them
    run/best/step-00001000/          the weights of the lowest validation loss so far
    run/milestones/step-00001000/    the weights of every so many steps, for good

With `async_save` a checkpoint is copied at once and written by a thread while training goes on, one at a
time. It bears its name when all ranks have written their parts; what went wrong is told at the next step.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from clearhead.training.checkpoint import Content, prune, steps_in, take_content, write_content
from clearhead.training.durable import ALONE, Ranks, clear_unfinished, remove_folder
from clearhead.training.recipe import TrainConfig


class Saver:
    """Writes the checkpoints of one run; all ranks call every method at the same step."""

    def __init__(
        self, run: Path, settings: TrainConfig, note: Callable[[str], None], ranks: Ranks = ALONE
    ) -> None:
        self.run, self.settings, self.note, self.ranks = run, settings, note, ranks
        self.thread: ThreadPoolExecutor | None = None
        if settings.async_save:
            self.thread = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self.writing: Future[None] | None = None
        for where in ("checkpoints", "best", "milestones") if ranks.is_main else ():
            clear_unfinished(run / where)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: Optimizer,
        state: dict[str, Any],
        *,
        last: bool = False,
    ) -> bool:
        """Write a checkpoint of this very moment, or begin to; the `last` one is waited for.

        Returns whether it is there, or begun. OSError: it could not be written, or the one before could not;
        with on_save_error="warn" only the last one raises, and others are noted.
        """
        self.told(self.finish)
        content = take_content(step, model, optimizer, state)
        if self.thread is None or last:
            return self.told(lambda: self._write(content), must=last)
        self.writing = self.thread.submit(self._write, content.copy())
        return True

    def keep_best(self, step: int, model: nn.Module, state: dict[str, Any]) -> None:
        """Keep the weights of this moment as the best so far, instead of those before."""
        self.tell()
        self.told(lambda: self._keep("best", step, model, state, alone=True))

    def keep_milestone(self, step: int, model: nn.Module, state: dict[str, Any]) -> None:
        """Keep the weights of this moment for good."""
        self.tell()
        self.told(lambda: self._keep("milestones", step, model, state, alone=False))

    @property
    def failed(self) -> bool:
        """Whether the thread has ended with an error that is not told yet."""
        return self.writing is not None and self.writing.done() and self.writing.exception() is not None

    def tell(self) -> None:
        """Wait for the thread, with whose words those of the ranks must not mix; raise or note what it died
        of.
        """
        self.told(self.finish)

    def finish(self) -> None:
        """Wait for what is being written; raise what went wrong."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait for the thread, and end it."""
        if self.thread is not None:
            self.thread.shutdown(wait=True)

    def _write(self, content: Content) -> None:
        write_content(self.run / "checkpoints" / f"step-{content.step:08d}", content, self.ranks)
        if self.ranks.is_main:
            prune(self.run, content.step, self.settings.keep)

    def _keep(self, where: str, step: int, model: nn.Module, state: dict[str, Any], alone: bool) -> None:
        final = self.run / where / f"step-{step:08d}"
        write_content(final, take_content(step, model, None, state), self.ranks)
        if alone and self.ranks.is_main:
            for former in steps_in(final.parent):
                if former != final:
                    remove_folder(former)

    def told(self, action: Callable[[], None], must: bool = False) -> bool:
        """Do what may meet a full disk; return whether it went well. OSError: on_save_error="stop", or it
        `must` go well; else the error is noted.
        """
        try:
            action()
            return True
        except OSError as error:
            if must or self.settings.on_save_error == "stop":
                raise
            self.note(f"{error.strerror or error}; training goes on (on_save_error=warn)")
            return False
