"""Budgets in tokens and minutes as steps; the loop's own use of them is in test_loop.py."""

import doctest

from clearhead.training import budget
from clearhead.training.budget import count_steps, median_seconds
from clearhead.training.recipe import TrainConfig


def test_examples_in_the_docstrings():
    assert doctest.testmod(budget).failed == 0


def test_nothing_is_measured_where_the_clock_does_not_decide():
    """Tokens are rounded up; a budget that is too short for a step makes one."""

    def never() -> float:
        raise AssertionError("measured")

    assert count_steps(TrainConfig(steps=7), 64, never) == 7
    assert [count_steps(TrainConfig(tokens=n), 64, never) for n in (1, 64, 65)] == [1, 1, 2]
    notes: list[str] = []
    assert count_steps(TrainConfig(minutes=0.01), 64, lambda: 2.0, notes.append) == 1
    assert notes == ["0.01 minutes at 2.000 s per step: 1 steps"]


def test_the_first_steps_and_the_slow_ones_do_not_decide(monkeypatch):
    """Four of six are timed; the median of an even number is the upper of the two in the middle."""
    clock = map(float, [0, 90, 100, 180, 0, 1, 0, 2, 0, 3, 0, 40])
    monkeypatch.setattr(budget, "time", type("Clock", (), {"perf_counter": lambda self: next(clock)})())
    taken: list[int] = []
    assert median_seconds(taken.append, n_steps=6, unmeasured=2) == 3
    assert taken == [0, 1, 2, 3, 4, 5]
