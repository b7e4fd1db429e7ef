"""The training loop: batches in, a better model out, nothing hidden.

    for each step:  loss = sum of token losses over all micro-batches / number of target tokens in the step
                    gradients of it, clipped to one norm;  is all of it finite?;  AdamW;  every so often look
                    and save

Nothing random is hidden state. The batch of a step is a pure function of (seed, step); dropout is seeded from
(seed, step, first sample) before each micro-batch. So a run that is killed and resumed ends with the very
same bits.
"""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.model.experts import Routing, correct_balance
from clearhead.model.transformer import Transformer
from clearhead.text.batches import Batch
from clearhead.training.activations import recompute_blocks
from clearhead.training.ahead import Ahead
from clearhead.training.checkpoint import checkpoints, load_checkpoint
from clearhead.training.dry_run import check_size
from clearhead.training.learner import Learner, learning_rate
from clearhead.training.lora import Lora, add_adapters, describe
from clearhead.training.machine import keep_freed_memory, stop_requests
from clearhead.training.norms import find_idle, to_host
from clearhead.training.parallel import Distributed, Single, start_parallel, was_restarted
from clearhead.training.probe import Probes
from clearhead.training.recipe import Recipe
from clearhead.training.report import Watcher
from clearhead.training.run_folder import RunFolder, recipe_to_resume
from clearhead.training.saver import Saver
from clearhead.training.start import Start, fill, fit_recipe, open_start, recipe_as_begun
from clearhead.training.tasks import Task, make_task

Parallel = Single | Distributed


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


@dataclass(frozen=True)
class StepResult:
    """Loss in nats per target token, the gradient's norm before clipping, target tokens: of one step."""

    loss: float
    norm: float
    n_targets: int
    watched: dict[str, float]  # norms of the model's parts, idle units and experts, at the steps that look


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
        self.share = self.parallel.share(self.settings.accumulation, self.settings.batch_size)
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
        wrapped = self.parallel.wrap(self.model)
        if self.settings.probes and self.parallel.shares_weights:
            self.note("no probes are kept: the ranks share the weights out")
        elif self.settings.probes and self.parallel.is_main:
            self.watchers = [*watchers, Probes(self.model, self.settings.probes, self.note)]
        self.learner = Learner(self.model, self.settings)
        self.compiled = self._compile()
        self.forward: Callable[..., Tensor] = torch.compile(wrapped) if self.compiled else wrapped
        self.wrapped = wrapped
        self.ahead = Ahead(self._batches)
        self.step = 0
        self.saved_step: int | None = None  # of the checkpoint on disk that holds this very state
        self.tokens = 0
        self.skipped = 0
        self.best: float | None = None  # lowest validation loss, and how many looks ago it was
        self.waited = 0

    def start(self, resume: bool) -> None:
        """Fix the number of steps; write the run's folder, or load its newest valid checkpoint."""
        if resume and self.parallel.gather(bool(checkpoints(self.run.path)))[0]:
            state = load_checkpoint(self.run.path, self.model, self.learner.optimizer, self.parallel.saving)
            self._check_made_with(state["made_with"])
            self.step, self.tokens = int(state["step"]), int(state["tokens"])
            self.saved_step = self.step
            self.skipped = int(state["skipped"])
            self.learner.restore(state)
            self.best, self.waited = state.get("best"), int(state.get("waited", 0))
        budget = self.run.budget() if resume else self.settings.budget()
        self.steps = self._count_steps()
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
                if self.compiled and self.step < last:
                    self._compile_now()
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
            self.ahead.close()
            self.saver.close()
            for watcher in self.watchers:
                watcher.on_end()

    def save(self, last: bool = False) -> None:
        """Write a checkpoint of this very moment; the last one of a run must succeed."""
        for watcher in self.watchers:
            watcher.before_save(self.step)
        if self.saver.save(self.step, self.model, self.learner.optimizer, self._state(), last=last):
            self.saved_step = self.step

    def _state(self) -> dict[str, Any]:
        """What a checkpoint tells beside tensors."""
        return {
            "tokens": self.tokens,
            "skipped": self.skipped,
            "best": self.best,
            "waited": self.waited,
            **self.learner.state(),
            "made_with": self._made_with(),
            "torch": torch.__version__,
        }

    def _asked(self, stop_requested: Callable[[], bool]) -> bool:
        """Whether any rank was asked to stop; what went wrong in a save is told here, to all."""
        stop, failed = self.parallel.count(stop_requested(), self.saver.failed)
        if failed:
            self.saver.tell()
        return stop > 0

    def _take_step(self) -> None:
        started = time.perf_counter()
        settings, step = self.settings, self.step
        lr = learning_rate(settings, step, self.steps)
        self.learner.set_rate(lr)
        result = self._learn(step)
        self.step, self.tokens = step + 1, self.tokens + result.n_targets
        seconds = time.perf_counter() - started
        metrics = {
            "loss": result.loss,
            "norm": result.norm,
            "lr": lr,
            "tokens": self.tokens,
            "seconds": seconds,
            "tokens_per_second": result.n_targets / seconds,
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
        self.parallel.hurry()

    def _batches(self, step: int) -> list[Batch]:
        """What this rank learns from in a step: some of the micro-batches, or its rows of each."""
        first, share = step * self.settings.accumulation, self.share
        return [self.task.batch(first + i, share.part, share.parts) for i in share.micro_batches]

    def _learn(self, step: int) -> StepResult:
        """One optimizer step: forward and backward over the micro-batches, the finite check, the update."""
        batches = self.ahead.get(step)
        (n_targets,) = self.parallel.count(sum(self.task.n_targets(batch) for batch in batches))
        total, loads = self._gradients(step, batches, max(n_targets, 1))
        norm = self.parallel.clip(self.model, self.settings.clip or math.inf)
        total = self.parallel.sum(total)
        loss_value, norm_value = torch.stack([total, norm]).tolist()  # the step's one wait for the device
        watched: dict[str, Tensor] = {}
        if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
            self._refuse(step, loss_value)
        elif (spike := self.learner.spike(loss_value, norm_value)) is not None:
            self._skip(f"step {step + 1}: {spike}; no update was made")
        else:
            watch = self.settings.norms_every and (step + 1) % self.settings.norms_every == 0
            watched = self.learner.move(loss_value, norm_value, bool(watch))
            self.skipped = 0
            if loads:
                correct_balance(self.model.stack, self.parallel.sum(torch.stack(loads).sum(0)))
        self.learner.optimizer.zero_grad(set_to_none=True)
        if watched:
            batch = batches[0].to(self.device)
            watched |= find_idle(self.model, lambda routing: self.task.loss(self.model, batch, routing))
        return StepResult(loss_value, norm_value, n_targets, to_host(watched))

    def _gradients(
        self, step: int, batches: list[Batch], n_targets: int
    ) -> tuple[Float[Tensor, ""], list[Tensor]]:
        """Loss per target of all micro-batches, its gradient in every parameter, the load of each expert."""
        experts = self.model.config.experts
        self.model.train()
        total = torch.zeros((), device=self.device)
        loads: list[Tensor] = []
        for batch in batches:
            with self.parallel.accumulate(self.wrapped, last=batch is batches[-1]):
                torch.manual_seed(dropout_seed(self.settings.seed, step, batch.first_sample))
                routing = None if experts is None else Routing()
                there = batch.to(self.device)
                loss = self.task.loss(self._forward, there, routing) / n_targets
                total += loss.detach()
                if experts is not None and routing is not None:  # padding does not count
                    share = self.task.n_targets(batch) / n_targets
                    loss = loss + routing.loss(experts, there.mask) * share
                    loads.append(routing.load(there.mask))
                (loss * self.parallel.data_size).backward()  # ranks average their gradients
        return total, loads

    def _forward(self, *inputs: Tensor, **how: Any) -> Tensor:
        """The model in the arithmetic of the recipe."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16"):
            return self.forward(*inputs, **how)

    def _refuse(self, step: int, loss: float) -> None:
        """A loss or a gradient is not finite: no update; stop, or skip a bounded number of times in a row."""
        bad = [name for name in self.parallel.gather(first_nonfinite_gradient(self.model)) if name]
        culprit = "the loss" if not math.isfinite(loss) else bad[0]
        message = f"step {step + 1}: {culprit} is not finite; no update was made"
        if self.settings.on_nonfinite == "stop":
            raise ValueError(f"{message}; lower train.lr or train.clip, or set train.on_nonfinite=skip")
        self._skip(message)

    def _skip(self, message: str) -> None:
        """Leave a step out, but not too many in a row."""
        self.skipped += 1
        if self.skipped > self.settings.max_skips:
            raise ValueError(
                f"{message}; that was {self.skipped} times in a row (max_skips={self.settings.max_skips})"
            )
        self.note(message)

    def _look(self, step: int) -> None:
        """What the model is worth on validation examples: a part of them on the way, all at the end."""
        with self.learner.best_weights():
            metrics = self.task.evaluate(self.model, whole=self.step == self.steps)
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

    def _count_steps(self) -> int:
        """The budget as a number of steps."""
        settings = self.settings
        if settings.steps is not None:
            return settings.steps
        per_step = settings.accumulation * self.task.targets_per_batch
        if settings.tokens is not None:
            return math.ceil(settings.tokens / per_step)
        assert settings.minutes is not None, "Recipe.check() demands one budget"
        seconds = self._measure()
        steps = max(1, int(settings.minutes * 60 / seconds))
        self.note(f"{settings.minutes:g} minutes at {seconds:.3f} s per step: {steps} steps")
        return steps

    def _measure(self, n_steps: int = 12, unmeasured: int = 4) -> float:
        """Median seconds of a step. The steps are real but for a learning rate of 0, which moves nothing."""
        self.learner.set_rate(0.0)
        times, corrections = [], {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        for step in range(n_steps):
            started = time.perf_counter()
            self._learn(step)
            times.append(time.perf_counter() - started)
        self.model.load_state_dict(corrections, strict=False)
        self.learner, self.skipped = Learner(self.model, self.settings), 0
        return self.parallel.gather(sorted(times[unmeasured:])[(n_steps - unmeasured) // 2])[0]

    def _compile(self) -> bool:
        choice = self.settings.compile
        if choice == "auto":
            chosen = self.device.type == "cuda"
            self.note(f"compile=auto: {'compiled, on a GPU' if chosen else 'not compiled, on a CPU'}")
            return chosen
        return choice == "on"

    def _compile_now(self) -> None:
        """Compile with the next step's first batch, so that no step's time contains it."""
        started = time.perf_counter()
        self._gradients(self.step, self.ahead.get(self.step)[:1], 1)
        self.learner.optimizer.zero_grad(set_to_none=True)
        self.note(f"compiled in {time.perf_counter() - started:.1f} s")

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


def dropout_seed(seed: int, step: int, first_sample: int) -> int:
    """Where dropout's random numbers of a micro-batch start: a function of (seed, step, first sample)
    alone.
    """
    digest = hashlib.sha256(f"{seed} {step} {first_sample}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # a non-negative 64-bit integer


def first_nonfinite_gradient(model: nn.Module) -> str:
    """The name of the first parameter whose gradient has an infinite or NaN value."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not torch.isfinite(parameter.grad).all():
            return f"the gradient of {name}"
    return "the gradient's norm"


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
