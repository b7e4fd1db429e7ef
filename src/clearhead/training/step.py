"""One optimizer step, the thing that training repeats.

    loss = sum of token losses over all micro-batches / number of target tokens in the step
    gradients of it, clipped to one norm;  is all of it finite, is none of it a spike?;  the update

Dropout is seeded from (seed, step, first sample) before each micro-batch, so that a step is a function of the
weights, the optimizer's state and its own number.
"""

import hashlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.model.experts import Routing, correct_balance
from clearhead.model.transformer import Transformer
from clearhead.text.batches import Batch
from clearhead.training.ahead import Ahead
from clearhead.training.budget import median_seconds
from clearhead.training.learner import Learner
from clearhead.training.norms import find_idle, to_host
from clearhead.training.parallel import Distributed, Single
from clearhead.training.recipe import TrainConfig
from clearhead.training.sharded import local
from clearhead.training.tasks import Task

Parallel = Single | Distributed


@dataclass(frozen=True)
class StepResult:
    """Loss in nats per target token, the gradient's norm before clipping, target tokens: of one step."""

    loss: float
    norm: float
    n_targets: int
    seconds: float  # from when its batches were asked for
    watched: dict[str, float]  # norms of the model's parts, idle units and experts, at the steps that look


@dataclass(frozen=True)
class Ready:
    """A step that can be taken: this rank's batches, target tokens of all ranks, and when that began."""

    step: int
    batches: list[Batch]
    n_targets: int
    started: float


class Stepper:
    """Takes the steps of a run. All ranks call every method at the same step."""

    def __init__(
        self,
        model: Transformer,
        task: Task,
        settings: TrainConfig,
        parallel: Parallel,
        note: Callable[[str], None],
    ) -> None:
        self.model, self.task, self.settings = model, task, settings
        self.parallel, self.device, self.note = parallel, parallel.device, note
        self.share = parallel.share(settings.accumulation, settings.batch_size)
        self.wrapped = parallel.wrap(model)
        self.learner = Learner(model, settings)
        self.compiled = self._choose_compile()
        self.forward: Callable[..., Tensor] = torch.compile(self.wrapped) if self.compiled else self.wrapped
        self.ahead = Ahead(self._batches)
        self.ready: Ready | None = None
        self.skipped = 0  # steps in a row that were left out

    @property
    def settled(self) -> bool:
        """Whether no later step compiles. A rank that meets a new length of batch may, while others wait."""
        return not (self.compiled and self.task.lengths_vary)

    def agree(self, step: int, *flags: bool) -> list[int]:
        """Make a step ready; on how many ranks each flag is set. What is told of both travels at once."""
        started = time.perf_counter()
        batches = self.ahead.get(step)
        n_targets, *said = self.parallel.count(sum(self.task.n_targets(batch) for batch in batches), *flags)
        self.ready = Ready(step, batches, n_targets, started)
        return said

    def take(self, step: int) -> StepResult:
        """Forward and backward over the micro-batches, the finite check, the update."""
        if self.ready is None or self.ready.step != step:
            self.agree(step)
        assert self.ready is not None
        ready, self.ready = self.ready, None
        batches, n_targets = ready.batches, ready.n_targets
        total, loads = self._gradients(step, batches, max(n_targets, 1))
        load = [torch.stack(loads).sum(0)] if loads else []
        norm, (total, *load) = self.parallel.clip(self.model, self.settings.clip or math.inf, total, *load)
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
            if load:
                correct_balance(self.model, load[0])
        self.learner.optimizer.zero_grad(set_to_none=True)
        if watched:
            batch = batches[0].to(self.device)
            watched |= find_idle(self.model, lambda routing: self.task.loss(self.model, batch, routing))
        seconds = time.perf_counter() - ready.started
        return StepResult(loss_value, norm_value, n_targets, seconds, to_host(watched))

    def compile(self, step: int) -> None:
        """Compile, if that is chosen, with the first batch of a step, so that no step's time contains it."""
        if not self.compiled:
            return
        started = time.perf_counter()
        self._gradients(step, self.ahead.get(step)[:1], 1)
        self.learner.optimizer.zero_grad(set_to_none=True)
        self.note(f"compiled in {time.perf_counter() - started:.1f} s")

    def measure(self, n_steps: int = 12, unmeasured: int = 4) -> float:
        """Median seconds of a step. The steps are real but for a learning rate of 0, which moves nothing."""
        self.learner.set_rate(0.0)
        corrections = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        seconds = median_seconds(self.take, n_steps, unmeasured)
        self.model.load_state_dict(corrections, strict=False)
        self.learner, self.skipped = Learner(self.model, self.settings), 0
        return self.parallel.gather(seconds)[0]

    def close(self) -> None:
        """End the thread that makes batches."""
        self.ahead.close()

    def _batches(self, step: int) -> list[Batch]:
        """What this rank learns from in a step: some of the micro-batches, or its rows of each."""
        first, share = step * self.settings.accumulation, self.share
        batches = [self.task.batch(first + i, share.part, share.parts) for i in share.micro_batches]
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):  # a new thread stands at the first GPU
                batches = [batch.pinned() for batch in batches]
        return batches

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
                    stacks = routing.stacks(there.mask, there.source_mask)
                    for stack, real in stacks:
                        loss = loss + stack.loss(experts, real) * share
                    loads.append(torch.cat([stack.load(real) for stack, real in stacks]))
                (loss * self.parallel.data_size).backward()  # ranks average their gradients
        return total, loads

    def _forward(self, *inputs: Tensor, **how: Any) -> Tensor:
        """The model in the arithmetic of the recipe."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16"):
            return self.forward(*inputs, **how)

    def _refuse(self, step: int, loss: float) -> None:
        """A loss or a gradient is not finite: no update; stop, or skip a bounded number of times in a row."""
        first = min(self.parallel.gather(first_nonfinite_gradient(self.model)))
        named = [f"the gradient of {name}" for name, _ in self.model.named_parameters()]
        culprit = "the loss" if not math.isfinite(loss) else [*named, "the gradient's norm"][first]
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

    def _choose_compile(self) -> bool:
        choice = self.settings.compile
        if choice == "auto":
            chosen = self.device.type == "cuda"
            self.note(f"compile=auto: {'compiled, on a GPU' if chosen else 'not compiled, on a CPU'}")
            return chosen
        return choice == "on"


def dropout_seed(seed: int, step: int, first_sample: int) -> int:
    """Where dropout's random numbers of a micro-batch start: a function of (seed, step, first sample)
    alone.
    """
    digest = hashlib.sha256(f"{seed} {step} {first_sample}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1  # a non-negative 64-bit integer


def first_nonfinite_gradient(model: nn.Module) -> int:
    """Which of the model's parameters, counted from 0, is the first whose gradient is not finite somewhere in
    the part that is here; the number of parameters if none is.
    """
    number = -1
    for number, parameter in enumerate(model.parameters()):
        if parameter.grad is not None and not torch.isfinite(local(parameter.grad)).all():
            return number
    return number + 1
