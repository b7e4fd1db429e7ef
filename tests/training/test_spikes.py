"""Which steps stand out."""

import doctest
import json
import random

from clearhead.training import spikes
from clearhead.training.spikes import ENOUGH, Spikes


def test_only_what_is_far_above_the_median_stands_out():
    """Usual values, however noisy, do not; five times the median does, in the loss or in the norm."""
    draw = random.Random(0)
    known = Spikes(factor=5.0, window=20)
    for _ in range(200):
        loss, norm = 3 + draw.random(), draw.lognormvariate(0, 0.3)
        assert known.find(loss, norm) is None
        known.remember(loss, norm)
    assert "the loss 20 is" in (known.find(20.0, 1.0) or "")
    assert "the gradient norm 1e+04 is" in (known.find(3.0, 1e4) or "")
    assert len(known.losses) == 20


def test_nothing_stands_out_before_enough_is_known():
    """The first steps are not judged, nor is anything against a median of 0."""
    known = Spikes(factor=2.0, window=20)
    for _ in range(ENOUGH - 1):
        known.remember(1.0, 0.0)
    assert known.find(1e9, 1e9) is None
    known.remember(1.0, 0.0)
    assert known.find(1.5, 1e9) is None
    assert known.find(2.5, 0.0) is not None


def test_state_survives_json():
    """What is restored from JSON judges to the same words."""
    known, again = Spikes(3.0, 12), Spikes(3.0, 12)
    for i in range(30):
        known.remember(1 / (i + 1), 0.1 * i)
    again.restore(json.loads(json.dumps(known.state())))
    assert again.state() == known.state()
    assert again.find(0.5, 1.0) == known.find(0.5, 1.0) is not None


def test_examples_in_the_docstrings():
    """The worked example runs."""
    assert doctest.testmod(spikes).failed == 0
