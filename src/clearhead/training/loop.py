"""The training loop: batches in, a better model out, nothing hidden.

    for each step:  set its rate, take it (step.py), tell what came of it;  every so often look, write, save

Nothing random is hidden state: the batches of a step and the seeds of its dropout are pure functions of its
number. So a run that is killed and resumed ends with the very same bits.
"""

import contextlib
import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from clearhead.model.transformer import Transformer
from clearhead.training.activations import recompute_blocks
from clearhead.training.budget import count_steps
from clearhead.training.checkpoint import checkpoints, load_checkpoint
from clearhead.training.dry_run import check_size
from clearhead.training.learner import Learner, learning_rate
from clearhead.training.lora import Lora, add_adapters, describe
from clearhead.training.machine import keep_freed_memory, stop_requests
from clearhead.training.parallel import Single, start_parallel, was_restarted
from clearhead.training.probe import Probes
from clearhead.training.recipe import Recipe
from clearhead.training.report import Watcher
from clearhead.training.run_folder import RunFolder, recipe_to_resume
from clearhead.training.saver import Saver
from clearhead.training.start import Start, fill, fit_recipe, open_start, recipe_as_begun
from clearhead.training.step import Parallel, Stepper
from clearhead.training.tasks import Task, make_task


class Interrupted(Exception):
    """Training was asked to stop (Ctrl-C, SIGTERM) and has saved its state at `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after {step} steps")
        self.step = step


def train(
    recipe: Recipe,
    folder: str | Path,
    *,
    resume: bool = False,
    stop_after: int | None = None,
    watchers: Sequence[Watcher] = (),
) -> RunFolder:
    """Run a recipe in `folder` from text to trained weights, or go on where its newest checkpoint left off.

    `stop_after`: save and return after this many steps in all; the schedule does not change. Raises
    ValueError for a recipe that cannot work and for a folder that holds another run, Interrupted after Ctrl-C
    or SIGTERM, when the state is saved.
    """
    run = RunFolder(folder)
    resume = resume or (was_restarted() and run.exists())
    begun, start = resume and run.exists(), None
    if begun:
        recipe = recipe_as_begun(recipe, run)
    if recipe.train.start_from is not None and not (begun and checkpoints(run.path)):
        start = open_start(recipe.train.start_from)  # also for a run that was killed before its first save
        recipe = recipe if begun else fit_recipe(recipe, start)
    recipe.check()
    if stop_after is not None and stop_after < 1:
        raise ValueError(f"stop_after={stop_after} must be at least 1 step")
    if resume and not run.exists():
        raise FileNotFoundError(f"{run.path} holds no run to resume; leave --resume away to start one")
    if not resume and run.exists():
        raise ValueError(
            f"{run.path} already holds a run; add --resume to go on with it, or choose another folder"
        )
    if not resume:
        run.check_free(recipe.data.source, recipe.data.validation)
    keep_freed_memory()
    with start_parallel(recipe.train, run.path, _announcer(watchers)) as parallel:
        watchers = watchers if parallel.is_main else ()
        if resume:
            recipe = recipe_to_resume(recipe, run)
        elif parallel.world_size == 1:
            check_size(recipe, parallel.device)
        task, recipe = _prepare(recipe, run, watchers, parallel)
        trainer = Trainer(recipe, run, task, watchers, start, parallel)
        trainer.start(resume)
        trainer.go(stop_after)
    return run


def _prepare(
    recipe: Recipe, run: RunFolder, watchers: Sequence[Watcher], parallel: Parallel
) -> tuple[Task, Recipe]:
    """The task of the recipe, its data prepared by the main rank; the others find it on the disk."""

    def make(first: bool) -> tuple[Task, Recipe]:
        run.begun = not first
        return make_task(recipe, run, _announcer(watchers), _progress(watchers))

    return parallel.main_first(make, lambda made: made[0].tokenizer.save(run.tokenizer_file))


class Trainer:
    """One run: its model, optimizer and task, and the few methods that move it forward."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        task: Task,
        watchers: Sequence[Watcher],
        start: Start | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        self.recipe, self.run, self.task, self.watchers = recipe, run, task, watchers
        self.note = _announcer(watchers)
        self.settings = recipe.train
        self.parallel = Single(self.settings) if parallel is None else parallel
        self.device = self.parallel.device
        if self.settings.device == "auto":
            seen = "a CUDA GPU is there" if self.device.type == "cuda" else "no CUDA GPU is there"
            self.note(f"device=auto: {self.device.type}, {seen}")
        self.saver = Saver(run.path, self.settings, self.note, self.parallel.saving)
        self.model = Transformer(recipe.model, seed=self.settings.seed)
        if start is not None:
            self.note(fill(self.model, start, run.labels()))
        elif run.exists():
            self.model.origin = run.origin()
        if self.settings.lora_rank:
            lora = Lora(self.settings.lora_rank, self.settings.lora_alpha, self.settings.lora_on)
            self.note(describe(self.model, add_adapters(self.model, lora, self.settings.seed)))
        if self.settings.checkpoint_activations:
            recompute_blocks(self.model)
        self.stepper = Stepper(self.model, task, self.settings, self.parallel, self.note)
        if self.settings.probes and self.parallel.shares_weights:
            self.note("no probes are kept: the ranks share the weights out")
        elif self.settings.probes and self.parallel.is_main:
            self.watchers = [*watchers, Probes(self.model, self.settings.probes, self.note)]
        self.step = 0
        self.saved_step: int | None = None  # of the checkpoint on disk that holds this very state
        self.tokens = 0
        self.best: float | None = None  # lowest validation loss, and how many looks ago it was
        self.waited = 0

    @property
    def learner(self) -> Learner:
        """What moves the weights."""
        return self.stepper.learner

    def start(self, resume: bool) -> None:
        """Fix the number of steps; write the run's folder, or load its newest valid checkpoint."""
        if resume and self.parallel.gather(bool(checkpoints(self.run.path)))[0]:
            state = load_checkpoint(self.run.path, self.model, self.learner.optimizer, self.parallel.saving)
            self._check_made_with(state["made_with"])
            self.step, self.tokens = int(state["step"]), int(state["tokens"])
            self.saved_step = self.step
            self.stepper.skipped = int(state["skipped"])
            self.learner.restore(state)
            self.best, self.waited = state.get("best"), int(state.get("waited", 0))
        budget = self.run.budget() if resume else self.settings.budget()
        per_step = self.settings.accumulation * self.task.targets_per_batch
        self.steps = count_steps(self.settings, per_step, self.stepper.measure, self.note)
        self.settings = replace(self.settings, steps=self.steps, tokens=None, minutes=None)
        self.recipe = replace(self.recipe, train=self.settings)
        if self.parallel.is_main and self.model.origin is not None and not resume:
            self.run.write_origin(self.model.origin)
        if self.parallel.is_main:
            self.run.write(self.recipe, self.task.tokenizer, budget)

    def go(self, stop_after: int | None = None) -> None:
        """Train until the budget, `stop_after` or a signal ends it; always end with a checkpoint."""
        last = self.steps if stop_after is None else min(self.steps, stop_after)
        if stop_after is not None and stop_after <= self.step:
            raise ValueError(f"stop_after={stop_after}, but {self.run.path} is at step {self.step} already")
        for watcher in self.watchers:
            watcher.on_start(self.run, self.step, self.steps)
        try:
            with stop_requests() as stop_requested:
                if self.step < last:
                    self.stepper.compile(self.step)
                while self.step < last and not self._asked(stop_requested) and not self._out_of_patience():
                    self._take_step()
                    if self.step % self.settings.save_every == 0 and self.step < last:
                        self.save()
                if self.saved_step != self.step:
                    self.save(last=True)
                self.saver.finish()
            if self.step < last and not self._out_of_patience():
                raise Interrupted(self.step)
        finally:
            self.stepper.close()
            self.saver.close()
            self._part(failed=sys.exc_info()[0] not in (None, Interrupted))

    def _part(self, failed: bool) -> None:
        """Let the watchers end; after a failure none of theirs takes its place, as when memory is gone."""
        for watcher in self.watchers:
            with contextlib.suppress(*[Exception] if failed else []):
                watcher.on_end()

    def save(self, last: bool = False) -> None:
        """Write a checkpoint of this very moment; the last one of a run must succeed."""
        ready = self.saver.told(self._settle, must=last)
        if self.parallel.any(not ready):  # a checkpoint is never ahead of its log
            return
        if self.saver.save(self.step, self.model, self.learner.optimizer, self._state(), last=last):
            self.saved_step = self.step

    def _settle(self) -> None:
        for watcher in self.watchers:
            watcher.before_save(self.step)

    def _state(self) -> dict[str, Any]:
        """What a checkpoint tells beside tensors."""
        return {
            "tokens": self.tokens,
            "skipped": self.stepper.skipped,
            "best": self.best,
            "waited": self.waited,
            **self.learner.state(),
            "made_with": self._made_with(),
            "torch": torch.__version__,
        }

    def _asked(self, stop_requested: Callable[[], bool]) -> bool:
        """Whether any rank was asked to stop before the next step, which is made ready; what went wrong in a
        save is told here, to all.
        """
        stop, failed = self.stepper.agree(self.step, stop_requested(), self.saver.failed)
        if failed:
            self.saver.tell()
        return stop > 0

    def _take_step(self) -> None:
        settings, step = self.settings, self.step
        lr = learning_rate(settings, step, self.steps)
        self.learner.set_rate(lr)
        result = self.stepper.take(step)
        self.step, self.tokens = step + 1, self.tokens + result.n_targets
        metrics = {
            "loss": result.loss,
            "norm": result.norm,
            "lr": lr,
            "tokens": self.tokens,
            "seconds": result.seconds,
            "tokens_per_second": result.n_targets / result.seconds,
            **result.watched,
        }
        for watcher in self.watchers:
            watcher.on_step(step, metrics)
        if self.step % settings.eval_every == 0 or self.step == self.steps:
            self._look(step)
        if settings.sample_every and (self.step % settings.sample_every == 0 or self.step == self.steps):
            self._sample(step)
        if settings.milestones and self.step % settings.milestones == 0:
            with self.learner.best_weights():
                self.saver.keep_milestone(self.step, self.model, self._state())
        if settings.compare_every and self.step % settings.compare_every == 0:
            self.parallel.check_same(self.model, self.step)
        if self.stepper.settled:
            self.parallel.hurry()

    def _look(self, step: int) -> None:
        """What the model is worth on validation examples: a part of them on the way, all at the end."""
        with self.learner.best_weights():
            metrics = self.task.evaluate(self.model, self.step == self.steps, self.parallel.looking)
        metrics = self.parallel.gather(metrics)[0]  # what follows is for all ranks or for none
        loss = metrics["validation_loss"]
        improved = self.best is None or loss < self.best
        self.best, self.waited = (loss, 0) if improved else (self.best, self.waited + 1)
        if improved and self.settings.keep_best:
            with self.learner.best_weights():
                self.saver.keep_best(self.step, self.model, self._state())
        for watcher in self.watchers:
            watcher.on_evaluation(step, metrics)
        if self._out_of_patience():
            self.note(
                f"step {step + 1}: no better validation loss in {self.waited} looks, so this is the end"
            )

    def _out_of_patience(self) -> bool:
        return 0 < self.settings.patience <= self.waited

    def _sample(self, step: int) -> None:
        with self.learner.best_weights():
            text = self.task.sample(self.model)
        if text is not None:
            for watcher in self.watchers:
                watcher.on_sample(step, text)

    def _made_with(self) -> dict[str, str]:
        """What a checkpoint must share with the run that resumes it."""
        config = hashlib.sha256(repr(self.model.config).encode()).hexdigest()
        return {
            "tokenizer": self.task.tokenizer.fingerprint,
            "text": self.task.fingerprint,
            "model": config,
            "seed": str(self.settings.seed),
        }

    def _check_made_with(self, saved: dict[str, str]) -> None:
        other = [name for name, value in self._made_with().items() if saved[name] != value]
        if other:
            raise ValueError(
                f"the checkpoints in {self.run.path} were made with another {' and another '.join(other)}; "
                "resume with what they were made with, or start a new run"
            )


def _announcer(watchers: Sequence[Watcher]) -> Callable[[str], None]:
    def note(text: str) -> None:
        for watcher in watchers:
            watcher.on_note(text)

    return note


def _progress(watchers: Sequence[Watcher]) -> Callable[[str, int, int | None], None]:
    def progress(stage: str, done: int, total: int | None) -> None:
        for watcher in watchers:
            watcher.on_progress(stage, done, total)

    return progress
