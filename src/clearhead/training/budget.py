"""How many steps a run makes. Its budget is given in steps, in target tokens, or in minutes:

    steps = tokens / targets of a step, rounded up          steps = 60 minutes / seconds of a step, at least 1

The number is fixed when a run begins, so that its schedule is the same however often it is resumed.
"""

import math
import time
from collections.abc import Callable
from statistics import median_high

from clearhead.training.recipe import TrainConfig


def count_steps(
    settings: TrainConfig,
    targets_per_step: int,
    measure: Callable[[], float],
    note: Callable[[str], object] = lambda text: None,
) -> int:
    """The budget as a number of steps; `measure` finds the seconds of a step where they decide.

    >>> count_steps(TrainConfig(tokens=300), 64, measure=lambda: 0.5)
    5
    >>> count_steps(TrainConfig(minutes=1.0), 64, measure=lambda: 0.5)
    120
    """
    if settings.steps is not None:
        return settings.steps
    if settings.tokens is not None:
        return math.ceil(settings.tokens / targets_per_step)
    assert settings.minutes is not None, "Recipe.check() demands one budget"
    seconds = measure()
    steps = max(1, int(settings.minutes * 60 / seconds))
    note(f"{settings.minutes:g} minutes at {seconds:.3f} s per step: {steps} steps")
    return steps


def median_seconds(take: Callable[[int], object], n_steps: int, unmeasured: int) -> float:
    """The median time of take(0), take(1), ..., the first few left out, which are slower."""
    times = []
    for step in range(n_steps):
        started = time.perf_counter()
        take(step)
        times.append(time.perf_counter() - started)
    return median_high(times[unmeasured:])
