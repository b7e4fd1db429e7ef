"""The training loop: batches in, a better model out, nothing hidden.

    for each step:  loss = sum of token losses over all micro-batches / number of target tokens in the step
                    gradients of it, clipped to one norm;  is all of it finite?;  AdamW;  every so often look
                    and save

Nothing random is hidden state. The batch of a step is a pure function of (seed, step); dropout is seeded from
(seed, step, first sample) before each micro-batch. So a run that is killed and resumed ends with the very
same bits.
"""

import contextlib
import ctypes
import hashlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from clearhead.generation.decode import generate
from clearhead.model.experts import Routing, correct_balance
from clearhead.model.transformer import Transformer
from clearhead.text.batches import Batch, Batches
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.checkpoint import checkpoints, load_checkpoint, lock_run, save_checkpoint
from clearhead.training.data import PreparedData, prepare_data
from clearhead.training.evaluate import evaluate
from clearhead.training.objectives import token_loss
from clearhead.training.optim import SCHEDULES, AdamW, clip_gradients, parameter_groups
from clearhead.training.probe import Probes
from clearhead.training.recipe import Recipe, TrainConfig, differences, with_vocabulary
from clearhead.training.report import Watcher
from clearhead.training.run_folder import RunFolder


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
    recipe.check()
    find_device(recipe.train.device)
    if stop_after is not None and stop_after < 1:
        raise ValueError(f"stop_after={stop_after} must be at least 1 step")
    run = RunFolder(folder)
    if resume and not run.exists():
        raise FileNotFoundError(f"{run.path} holds no run to resume; leave --resume away to start one")
    if not resume and run.exists():
        raise ValueError(
            f"{run.path} already holds a run; add --resume to go on with it, or choose another folder"
        )
    run.path.mkdir(parents=True, exist_ok=True)
    keep_freed_memory()
    with lock_run(run.path):
        note = _announcer(watchers)
        if resume:
            recipe = _same_recipe(recipe, run)
        data = prepare_data(recipe.data, run, note, _progress(watchers))
        recipe = _fit_vocabulary(recipe, data.tokenizer)
        trainer = Trainer(recipe, run, data, watchers)
        trainer.start(resume)
        trainer.go(stop_after)
    return run


@dataclass(frozen=True)
class StepResult:
    """Loss in nats per target token, the gradient's norm before clipping, target tokens: of one step."""

    loss: float
    norm: float
    n_targets: int


class Trainer:
    """One run: its model, optimizer and data, and the few methods that move it forward."""

    def __init__(
        self, recipe: Recipe, run: RunFolder, data: PreparedData, watchers: Sequence[Watcher]
    ) -> None:
        self.recipe, self.run, self.data, self.watchers = recipe, run, data, watchers
        self.note = _announcer(watchers)
        self.settings = recipe.train
        self.device = find_device(self.settings.device)
        if self.settings.device == "auto":
            seen = "a CUDA GPU is there" if self.device.type == "cuda" else "no CUDA GPU is there"
            self.note(f"device=auto: {self.device.type}, {seen}")
        self.model = Transformer(recipe.model, seed=self.settings.seed).to(self.device)
        if self.settings.probes:
            self.watchers = [*watchers, Probes(self.model, self.settings.probes, self.note)]
        self.optimizer = make_optimizer(self.model, self.settings)
        self.batches = Batches(
            data.train,
            self.settings.batch_size,
            self.settings.context_length,
            seed=self.settings.seed,
            document_mask=self.settings.document_mask,
        )
        self.forward: Callable[..., Tensor] = self._compiled() if self._compile() else self.model
        self.step = 0
        self.saved_step: int | None = None  # of the checkpoint on disk that holds this very state
        self.tokens = 0
        self.skipped = 0

    def start(self, resume: bool) -> None:
        """Fix the number of steps; write the run's folder, or load its newest valid checkpoint."""
        if resume and checkpoints(self.run.path):
            state = load_checkpoint(self.run.path, self.model, self.optimizer)
            self._check_made_with(state["made_with"])
            self.step, self.tokens = int(state["step"]), int(state["tokens"])
            self.saved_step = self.step
            self.skipped = int(state["skipped"])
        if self.settings.sample_every:
            self.data.tokenizer.encode(self.settings.sample_prompt)  # it can be one that has no tokens
        budget = self.run.budget() if resume else self.settings.budget()
        self.steps = self._count_steps()
        self.settings = replace(self.settings, steps=self.steps, tokens=None, minutes=None)
        self.recipe = replace(self.recipe, train=self.settings)
        self.run.write(self.recipe, self.data.tokenizer, budget)

    def go(self, stop_after: int | None = None) -> None:
        """Train until the budget, `stop_after` or a signal ends it; always end with a checkpoint."""
        last = self.steps if stop_after is None else min(self.steps, stop_after)
        if stop_after is not None and stop_after <= self.step:
            raise ValueError(f"stop_after={stop_after}, but {self.run.path} is at step {self.step} already")
        for watcher in self.watchers:
            watcher.on_start(self.run, self.step, self.steps)
        try:
            with stop_requests() as stop_requested:
                while self.step < last and not stop_requested():
                    self._take_step()
                    if self.step % self.settings.save_every == 0 and self.step < last:
                        self.save()
                if self.saved_step != self.step:
                    self.save()
            if self.step < last:
                raise Interrupted(self.step)
        finally:
            for watcher in self.watchers:
                watcher.on_end()

    def save(self) -> None:
        """Write a checkpoint of this very moment."""
        for watcher in self.watchers:
            watcher.before_save(self.step)
        state = {
            "tokens": self.tokens,
            "skipped": self.skipped,
            "made_with": self._made_with(),
            "torch": torch.__version__,
        }
        save_checkpoint(
            self.run.path, self.step, self.model, self.optimizer, state=state, keep=self.settings.keep
        )
        self.saved_step = self.step

    def _take_step(self) -> None:
        started = time.perf_counter()
        settings, step = self.settings, self.step
        lr = learning_rate(settings, step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
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
        }
        for watcher in self.watchers:
            watcher.on_step(step, metrics)
        if self.step % settings.eval_every == 0 or self.step == self.steps:
            self._look(step)
        if settings.sample_every and (self.step % settings.sample_every == 0 or self.step == self.steps):
            self._sample(step)

    def _learn(self, step: int) -> StepResult:
        """One optimizer step: forward and backward over the micro-batches, the finite check, the update."""
        settings = self.settings
        first = step * settings.accumulation
        parts = [self.batches.batch(first + i) for i in range(settings.accumulation)]
        n_targets = sum(int((part.targets != -100).sum()) for part in parts)
        self.model.train()
        total = torch.zeros((), device=self.device)
        routings: list[Routing] = []
        for part in parts:
            torch.manual_seed(dropout_seed(settings.seed, step, part.first_sample))
            loss, extra, routing = self._loss(part)
            ((loss + extra) / max(n_targets, 1)).backward()
            total += loss.detach() / max(n_targets, 1)
            routings += [] if routing is None else [routing]
        norm = clip_gradients(self.model.parameters(), settings.clip or math.inf)
        loss_value, norm_value = torch.stack([total, norm]).tolist()  # the step's one wait for the device
        if math.isfinite(loss_value) and math.isfinite(norm_value):
            self.optimizer.step()
            self.skipped = 0
            if routings:
                correct_balance(self.model, torch.stack([routing.load() for routing in routings]).sum(0))
        else:
            self._refuse(step, loss_value)
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss_value, norm_value, n_targets)

    def _loss(self, batch: Batch) -> tuple[Tensor, Tensor | float, Routing | None]:
        """Sum of the token losses of one micro-batch; what its routers add, per target; what they decided."""
        documents = None if batch.documents is None else batch.documents.to(self.device)
        experts = self.model.config.experts
        routing = None if experts is None else Routing()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.settings.dtype == "bfloat16"):
            logits = self.forward(batch.inputs.to(self.device), documents=documents, routing=routing)
        loss, n_targets = token_loss(logits, batch.targets.to(self.device))
        if experts is None or routing is None:
            return loss, 0.0, None
        return loss, routing.loss(experts) * n_targets, routing

    def _refuse(self, step: int, loss: float) -> None:
        """A loss or a gradient is not finite: no update; stop, or skip a bounded number of times in a row."""
        culprit = "the loss" if not math.isfinite(loss) else first_nonfinite_gradient(self.model)
        message = f"step {step + 1}: {culprit} is not finite; no update was made"
        self.skipped += 1
        if self.settings.on_nonfinite == "stop":
            raise ValueError(f"{message}; lower train.lr or train.clip, or set train.on_nonfinite=skip")
        if self.skipped > self.settings.max_skips:
            raise ValueError(
                f"{message}; that was {self.skipped} times in a row (max_skips={self.settings.max_skips})"
            )
        self.note(message)

    def _look(self, step: int) -> None:
        """Loss on the validation text: part of it on the way, all of it at the end."""
        settings = self.settings
        result = evaluate(
            self.model,
            self.data.validation,
            batch_size=settings.batch_size,
            context_length=settings.context_length,
            max_tokens=None if self.step == self.steps else settings.eval_tokens,
            document_mask=settings.document_mask,
        )
        metrics = {
            "validation_loss": result.loss,
            "perplexity": result.perplexity,
            "bits_per_byte": result.bits_per_byte,
        }
        for watcher in self.watchers:
            watcher.on_evaluation(step, metrics)

    def _sample(self, step: int) -> None:
        settings = self.settings
        text = generate(
            self.model,
            settings.sample_prompt,
            tokenizer=self.data.tokenizer,
            max_new_tokens=settings.sample_tokens,
            temperature=0.8,
            seed=settings.seed,
            overflow="slide",
        )
        for watcher in self.watchers:
            watcher.on_sample(step, settings.sample_prompt + str(text))

    def _count_steps(self) -> int:
        """The budget as a number of steps."""
        settings = self.settings
        if settings.steps is not None:
            return settings.steps
        per_step = settings.batch_size * settings.accumulation * settings.context_length
        if settings.tokens is not None:
            return math.ceil(settings.tokens / per_step)
        assert settings.minutes is not None, "Recipe.check() demands one budget"
        seconds = self._measure()
        steps = max(1, int(settings.minutes * 60 / seconds))
        self.note(f"{settings.minutes:g} minutes at {seconds:.3f} s per step: {steps} steps")
        return steps

    def _measure(self, n_steps: int = 12, unmeasured: int = 4) -> float:
        """Median seconds of a step. The steps are real but for a learning rate of 0, which moves nothing."""
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        times, corrections = [], {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        for step in range(n_steps):
            started = time.perf_counter()
            self._learn(step)
            times.append(time.perf_counter() - started)
        self.model.load_state_dict(corrections, strict=False)
        self.optimizer, self.skipped = make_optimizer(self.model, self.settings), 0
        return sorted(times[unmeasured:])[(n_steps - unmeasured) // 2]

    def _compile(self) -> bool:
        choice = self.settings.compile
        if choice == "auto":
            chosen = self.device.type == "cuda"
            self.note(f"compile=auto: {'compiled, on a GPU' if chosen else 'not compiled, on a CPU'}")
            return chosen
        return choice == "on"

    def _compiled(self) -> Callable[..., Tensor]:
        return torch.compile(self.model)

    def _made_with(self) -> dict[str, str]:
        """What a checkpoint must share with the run that resumes it."""
        config = hashlib.sha256(repr(self.model.config).encode()).hexdigest()
        return {
            "tokenizer": self.data.tokenizer.fingerprint,
            "text": self.data.fingerprint,
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


def learning_rate(settings: TrainConfig, step: int, steps: int) -> float:
    """The rate of step `step` (from 0): up over the warm-up, then down to `min_lr` just after the last
    step.
    """
    warmup_steps = round(settings.warmup * steps)
    return SCHEDULES[settings.schedule](step + 1, settings.lr, settings.min_lr, warmup_steps, steps + 1)


def make_optimizer(model: nn.Module, settings: TrainConfig) -> AdamW:
    """AdamW over the model's parameters, without decay on vectors."""
    return AdamW(
        parameter_groups(model, settings.weight_decay, {"embed": settings.embed_lr_scale}),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def keep_freed_memory() -> None:
    """Let glibc keep freed blocks for the next step instead of giving them back and faulting them in again.

    Large activations are allocated and freed in every step; on a CPU that costs a tenth of the time. Other
    systems' allocators are left as they are.
    """
    if sys.platform != "linux":
        return
    trim_threshold, mmap_threshold = -1, -3  # of mallopt(3)
    with contextlib.suppress(AttributeError, OSError):  # musl has no mallopt
        libc = ctypes.CDLL(None)
        libc.mallopt(trim_threshold, 1 << 30)
        libc.mallopt(mmap_threshold, 1 << 30)


def find_device(name: str) -> torch.device:
    """The device of this name; "auto": cuda if there is one, else cpu."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device={name!r} is unknown; try auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r} was asked for, but this PyTorch sees no CUDA GPU; use device=cpu")
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"device={name!r} cannot be used on this machine; try auto, cpu or cuda") from None
    return device


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


@contextlib.contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Turn Ctrl-C and SIGTERM into a question that the loop asks after each step.

    A second Ctrl-C stops at once.
    """
    requested = False

    def ask(signum: int, frame: object) -> None:
        nonlocal requested
        if requested and signum == signal.SIGINT:
            raise KeyboardInterrupt
        requested = True

    try:
        previous = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: whoever runs us handles signals
        previous = {}
    try:
        yield lambda: requested
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


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


def _same_recipe(new: Recipe, run: RunFolder) -> Recipe:
    """The recipe of the run; what the caller gives must agree with it, but for what changes no number.

    The budget was fixed when the run began: it may be given as it was, or as the steps that it became.
    """
    old, begun, given = run.recipe(), run.budget(), new.train.budget()
    if given not in (begun, old.train.budget()):
        was, now = (", ".join(f"{n}={v:g}" for n, v in budget.items()) for budget in (begun, given))
        became = "" if "steps" in begun else f", which became steps={old.train.steps},"
        raise ValueError(
            f"{run.path} was started with {was}{became} and stays with it, got {now}; "
            "leave it as it was, or start a new run in another folder"
        )
    free = {name: getattr(new.train, name) for name in ("on_nonfinite", "max_skips", "probes")}
    old = replace(old, train=replace(old.train, **free))
    fixed = replace(new.train, steps=old.train.steps, minutes=None, tokens=None)
    model = new.model.replace(vocab_size=old.model.vocab_size)
    changed = differences(old, replace(new, train=fixed, model=model))
    if changed:
        raise ValueError(
            f"{run.path} was started with another recipe ({'; '.join(changed)}); undo that to resume"
        )
    return old


def _fit_vocabulary(recipe: Recipe, tokenizer: Tokenizer) -> Recipe:
    wanted, default = recipe.model.vocab_size, type(recipe.model)().vocab_size
    if wanted not in (tokenizer.vocab_size, default, recipe.data.vocab_size):
        raise ValueError(
            f"model.vocab_size={wanted} but the tokenizer has {tokenizer.vocab_size} tokens; "
            "leave model.vocab_size away, it follows from the tokenizer"
        )
    return with_vocabulary(recipe, tokenizer.vocab_size)
