"""What moves the weights of a run, as its recipe says: the optimizer, its rate, and what watches them.

for each step:  set_rate(step);  the gradients are made and clipped;  spike?  leave it out : move
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from clearhead.training.average import Average
from clearhead.training.muon import Muon, muon_groups
from clearhead.training.norms import Norms
from clearhead.training.optim import AdamW, parameter_groups
from clearhead.training.recipe import TrainConfig
from clearhead.training.schedules import SCHEDULES
from clearhead.training.spikes import Spikes


class Learner:
    """The optimizer of a model with its schedule, the mean of the weights, and the steps that stand out."""

    def __init__(self, model: nn.Module, settings: TrainConfig) -> None:
        self.model, self.settings = model, settings
        self.optimizer = make_optimizer(model, settings)
        self.average = Average(self.optimizer, settings.average) if settings.average else None
        skip = settings.on_spike == "skip"
        self.spikes = Spikes(settings.spike_factor, settings.spike_window) if skip else None
        self.norms = Norms(model) if settings.norms_every else None

    def set_rate(self, lr: float) -> None:
        """Set the learning rate of all groups; each has its own factor on it."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def spike(self, loss: float, norm: float) -> str | None:
        """What stands out of this step so far that it should not be made, with the figures."""
        return None if self.spikes is None else self.spikes.find(loss, norm)

    def move(self, loss: float, norm: float, watched: bool = False) -> dict[str, Tensor]:
        """Take the step; return the norms of the model's parts around it, if they are watched."""
        found: dict[str, Tensor] = {}
        if watched and self.norms is not None:
            found = self.norms.around(self.optimizer.step)
        else:
            self.optimizer.step()
        if self.average is not None:
            self.average.update()
        if self.spikes is not None:
            self.spikes.remember(loss, norm)
        return found

    @contextmanager
    def best_weights(self) -> Iterator[None]:
        """The model with the weights it is worth most with: the mean, if one is kept."""
        if self.average is None:
            yield
            return
        forget_gathered(self.model)
        try:
            with self.average.in_place():
                yield
        finally:
            forget_gathered(self.model)

    def state(self) -> dict[str, Any]:
        """What a checkpoint needs beside the optimizer's state, in JSON values."""
        return {
            "averaged": 0 if self.average is None else self.average.count,
            "spikes": None if self.spikes is None else self.spikes.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        if self.average is not None:
            self.average.count = int(state["averaged"])
        if self.spikes is not None:
            self.spikes.restore(state["spikes"])


def forget_gathered(model: nn.Module) -> None:
    """Let go of the whole embedding and head that a look has left here, before ranks change their parts."""
    if hasattr(model, "reshard"):  # FSDP's, which one process does not import
        from torch.distributed.fsdp import FSDPModule

        assert isinstance(model, FSDPModule)
        model.reshard()


def learning_rate(settings: TrainConfig, step: int, steps: int) -> float:
    """The rate of step `step` (from 0): up over the warm-up, then down to `min_lr` just after the last
    step.
    """
    warmup_steps = round(settings.warmup * steps)
    schedule: Callable[..., float] = SCHEDULES[settings.schedule]
    more: dict[str, int] = {}
    if settings.schedule == "trapezoid":
        more = {"decay_steps": round(settings.decay * steps)}
    elif settings.schedule == "inverse_sqrt":
        warmup_steps = max(1, warmup_steps)
    return schedule(step + 1, settings.lr, settings.min_lr, warmup_steps, steps + 1, **more)


def make_optimizer(model: nn.Module, settings: TrainConfig) -> AdamW:
    """AdamW over the model's parameters, without decay on vectors; or Muon for its matrices and AdamW else.

    Muon's groups follow the same schedule, at `muon_rate() / lr` times its height.
    """
    tables = [part for part in ("embed", "source_embed") if hasattr(model, part)]
    scales = dict.fromkeys(tables, settings.embed_lr_scale)
    betas = (settings.beta1, settings.beta2)
    if settings.optimizer == "adamw":
        groups = parameter_groups(model, settings.weight_decay, scales)
        return AdamW(groups, settings.lr, betas, settings.eps, settings.weight_decay)
    groups = muon_groups(model, settings.weight_decay, scales, settings.muon_rate() / settings.lr)
    return Muon(
        groups,
        settings.lr,
        betas,
        settings.eps,
        settings.weight_decay,
        momentum=settings.muon_momentum,
        scale=settings.muon_scale,
        dtype=settings.dtype,
    )
