"""Schedules: equal to the course's published numbers, to closed forms and to `transformers`."""

import doctest
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.training import schedules
from clearhead.training.schedules import (
    SCHEDULES,
    constant_schedule,
    cosine_schedule,
    inverse_sqrt_schedule,
    linear_schedule,
    trapezoid_schedule,
)


def rate_of(name: str, step: int, high: float, low: float, warmup: int, end: int) -> float:
    """The rate of any schedule; a trapezoid descends over a third of its steps after the warm-up."""
    more = {"decay_steps": (end - warmup) // 3} if name == "trapezoid" else {}
    return SCHEDULES[name](step, high, low, warmup, end, **more)


def test_get_lr_cosine_schedule():
    """The course's published vector: max 1, min .1, warm-up 7, end 21, steps 0 to 24."""
    expected = """
        0 .142857 .285714 .428571 .571429 .714286 .857143 1 .988718 .955436 .901824 .830570 .745248 .650134
        .55 .449866 .354752 .269430 .198176 .144564 .111282 .1 .1 .1 .1
    """
    actual = [cosine_schedule(step, 1.0, 0.1, 7, 21) for step in range(25)]
    assert actual == pytest.approx([float(rate) for rate in expected.split()], abs=5e-7)


@given(
    warmup=st.integers(1, 30),
    length=st.integers(3, 200),
    high=st.floats(1e-5, 1.0),
    share=st.floats(0, 1),
    name=st.sampled_from(sorted(SCHEDULES)),
    steps=st.lists(st.integers(0, 240), min_size=2, max_size=12),
)
@settings(deadline=None, max_examples=100)
def test_schedules_rise_then_never_rise_again(warmup, length, high, share, name, steps):
    """Every schedule climbs to the highest rate, then falls or stays; most reach the lowest."""
    low, end = high * share, warmup + length

    def rate(step: int) -> float:
        return rate_of(name, step, high, low, warmup, end)

    rising, falling = ([rate(s) for s in sorted(steps) if (s <= warmup) == early] for early in (True, False))
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)
    assert rate(warmup) == pytest.approx(high)
    if name != "inverse_sqrt":
        assert rate(end) == rate(end + 1000) == pytest.approx(high if name == "constant" else low, abs=1e-15)


def test_linear_and_constant_values():
    """Half-way down the straight line is the mean; the constant stays."""
    assert linear_schedule(60, 1.0, 0.2, 20, 100) == pytest.approx(0.6)
    assert linear_schedule(10, 1.0, 0.2, 20, 100) == constant_schedule(10, 1.0, 0.2, 20, 100) == 0.5
    assert constant_schedule(10_000, 1.0, 0.2, 20, 100) == 1.0


def test_trapezoid_is_three_straight_lines():
    """Up over 10 steps, flat, down over the last 20; the flat part does not know how long the run is."""
    corners = [trapezoid_schedule(step, 2.0, 1.0, 10, 100, 20) for step in (0, 5, 10, 80, 90, 100, 200)]
    assert corners == pytest.approx([0.0, 1.0, 2.0, 2.0, 1.5, 1.0, 1.0])
    short, long = ([trapezoid_schedule(s, 2.0, 0.0, 10, end, 20) for s in range(81)] for end in (100, 900))
    assert short == long
    assert trapezoid_schedule(99, 2.0, 0.0, 10, 100, 0) == 2.0


def test_inverse_sqrt_is_that_of_the_original_transformer():
    """lr = d^-1/2 min(s^-1/2, s w^-3/2), the paper's equation 3, for d = 512 and w = 4000."""
    for step in (1, 17, 3999, 4000, 4001, 100_000):
        paper = 512**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert inverse_sqrt_schedule(step, (512 * 4000) ** -0.5, 0.0, 4000, 200_000) == pytest.approx(paper)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_equals_transformers(name):
    """The same rate as `transformers`' schedule of that kind, at every step of a run, to rounding."""
    from transformers import optimization

    steps, warmup, decay, high = 60, 9, 17, 0.3
    low = 0.06 if name == "cosine" else 0.0
    makers: dict[str, Any] = {
        "cosine": lambda o: optimization.get_cosine_with_min_lr_schedule_with_warmup(
            o, warmup, steps, min_lr_rate=low / high
        ),
        "linear": lambda o: optimization.get_linear_schedule_with_warmup(o, warmup, steps),
        "constant": lambda o: optimization.get_constant_schedule_with_warmup(o, warmup),
        "trapezoid": lambda o: optimization.get_wsd_schedule(
            o, warmup, decay, num_stable_steps=steps - warmup - decay, decay_type="linear"
        ),
        "inverse_sqrt": lambda o: optimization.get_inverse_sqrt_schedule(o, warmup),
    }
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=high)
    schedule = makers[name](optimizer)
    more = {"decay_steps": decay} if name == "trapezoid" else {}
    for step in range(steps + 1):  # after the end their cosine rises again
        ours = SCHEDULES[name](step, high, low, warmup, steps, **more)
        assert schedule.get_last_lr()[0] == pytest.approx(ours, rel=1e-9, abs=1e-15), step
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_warm_up_longer_than_the_run_is_refused(name):
    """Both numbers are named."""
    with pytest.raises(ValueError, match=r"warmup_steps=11 .*end_step=10"):
        SCHEDULES[name](3, 1.0, 0.1, 11, 10, **({"decay_steps": 0} if name == "trapezoid" else {}))


def test_what_two_of_them_need():
    """A trapezoid's parts must fit the run; the inverse square root needs a warm-up to fall from."""
    with pytest.raises(ValueError, match="warmup_steps=4 and decay_steps=7 do not fit into end_step=10"):
        trapezoid_schedule(3, 1.0, 0.1, 4, 10, 7)
    with pytest.raises(ValueError, match="warmup_steps=0"):
        inverse_sqrt_schedule(3, 1.0, 0.0, 0, 10)
    assert math.isclose(inverse_sqrt_schedule(9, 1.0, 0.0, 1, 10), 1 / 3)


def test_examples_in_the_docstrings():
    """The worked examples run."""
    assert doctest.testmod(schedules).failed == 0
