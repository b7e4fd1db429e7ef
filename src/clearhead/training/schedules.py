"""The learning rate over time. Every schedule climbs straight from 0 to `max_lr`; they differ after.

    gone = share of the way from the end of the warm-up to `end_step`, 0 to 1

    linear         max + gone (min - max)                              straight down
    cosine         min + (1 + cos(pi gone)) / 2 (max - min)            half a wave
    constant       max                                                 flat
    trapezoid      max, then straight down over the last `decay_steps`
    inverse_sqrt   max sqrt(warmup_steps / step)                       never ends

With max = (d_model warmup_steps)^-1/2 the last is the schedule of the original Transformer.

Sources: cosine, Loshchilov and Hutter 2016, arXiv:1608.03983; trapezoid, Zhai et al. 2021, arXiv:2106.04560,
and Hägele et al. 2024, arXiv:2405.18392; inverse square root, Vaswani et al. 2017, arXiv:1706.03762.
"""

import math
from collections.abc import Callable


def cosine_schedule(step: int, max_lr: float, min_lr: float, warmup_steps: int, end_step: int) -> float:
    """Return the learning rate at `step`: linear up to `max_lr`, half a cosine down to `min_lr`, flat.

    The rate is 0 at step 0, `max_lr` at `warmup_steps` and `min_lr` from `end_step` on. ValueError: a warm-up
    longer than the schedule.

    >>> [round(cosine_schedule(step, 1.0, 0.1, 2, 6), 3) for step in range(8)]
    [0.0, 0.5, 1.0, 0.868, 0.55, 0.232, 0.1, 0.1]
    """
    gone = _gone(step, warmup_steps, end_step)
    if gone is None:
        return max_lr * step / warmup_steps
    return min_lr + (1 + math.cos(math.pi * gone)) / 2 * (max_lr - min_lr)


def linear_schedule(step: int, max_lr: float, min_lr: float, warmup_steps: int, end_step: int) -> float:
    """Return the learning rate at `step`: as `cosine_schedule`, but straight down to `min_lr`.

    >>> [round(linear_schedule(step, 1.0, 0.0, 2, 6), 3) for step in range(8)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    gone = _gone(step, warmup_steps, end_step)
    if gone is None:
        return max_lr * step / warmup_steps
    return max_lr + gone * (min_lr - max_lr)


def constant_schedule(step: int, max_lr: float, min_lr: float, warmup_steps: int, end_step: int) -> float:
    """Return the learning rate at `step`: linear from 0 to `max_lr`, then flat; `min_lr` plays no part.

    >>> [constant_schedule(step, 1.0, 0.0, 2, 6) for step in range(4)]
    [0.0, 0.5, 1.0, 1.0]
    """
    gone = _gone(step, warmup_steps, end_step)
    return max_lr * step / warmup_steps if gone is None else max_lr


def trapezoid_schedule(
    step: int, max_lr: float, min_lr: float, warmup_steps: int, end_step: int, decay_steps: int
) -> float:
    """Return the learning rate at `step`: up, flat, and straight down to `min_lr` in the last `decay_steps`.

    Until the descent begins, the rate does not depend on `end_step`: the run can be made longer from there.
    ValueError: a warm-up and a descent that together are longer than the schedule.

    >>> [round(trapezoid_schedule(step, 1.0, 0.0, 2, 8, 4), 3) for step in range(10)]
    [0.0, 0.5, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    """
    if decay_steps < 0 or warmup_steps + decay_steps > end_step:
        raise ValueError(
            f"warmup_steps={warmup_steps} and decay_steps={decay_steps} do not fit into end_step={end_step}"
        )
    if _gone(step, warmup_steps, end_step) is None:
        return max_lr * step / warmup_steps
    left = max(end_step - step, 0)
    return max_lr if left >= decay_steps else min_lr + left / decay_steps * (max_lr - min_lr)


def inverse_sqrt_schedule(step: int, max_lr: float, min_lr: float, warmup_steps: int, end_step: int) -> float:
    """Return the learning rate at `step`: up, then as 1 / sqrt(step); `min_lr` and the end play no part.

    ValueError: no warm-up, whose length says how steep the descent is.

    >>> [round(inverse_sqrt_schedule(step, 1.0, 0.0, 4, 100), 3) for step in (0, 2, 4, 16, 64)]
    [0.0, 0.5, 1.0, 0.5, 0.25]
    """
    if warmup_steps == 0:
        raise ValueError("warmup_steps=0: an inverse_sqrt schedule falls as sqrt(warmup_steps / step)")
    gone = _gone(step, warmup_steps, end_step)
    return max_lr * step / warmup_steps if gone is None else max_lr * math.sqrt(warmup_steps / step)


def _gone(step: int, warmup_steps: int, end_step: int) -> float | None:
    """The share 0..1 of the way from `warmup_steps` to `end_step`; None while warming up."""
    if not 0 <= warmup_steps <= end_step:
        raise ValueError(f"warmup_steps={warmup_steps} must be between 0 and end_step={end_step}")
    if step < warmup_steps:
        return None
    return 1.0 if step >= end_step else (step - warmup_steps) / (end_step - warmup_steps)


SCHEDULES: dict[str, Callable[..., float]] = {
    "cosine": cosine_schedule,
    "linear": linear_schedule,
    "constant": constant_schedule,
    "trapezoid": trapezoid_schedule,
    "inverse_sqrt": inverse_sqrt_schedule,
}
