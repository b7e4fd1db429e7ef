"""Steps that stand out: a loss or a gradient far above what it lately was, as a damaged batch gives.

    spike:  loss > factor x median of the last losses,  or the same of the gradient's norm before clipping

The median hardly moves when a few values are wild. A step that is left out is not remembered, so that a row
of bad ones does not become the rule; the loop bounds how many may follow each other.
"""

from collections import deque
from statistics import median
from typing import Any

ENOUGH = 10  # steps to know before one can stand out


class Spikes:
    """What losses and gradient norms have been over the last `window` steps, and which ones stand out."""

    def __init__(self, factor: float, window: int) -> None:
        self.factor = factor
        self.losses: deque[float] = deque(maxlen=window)
        self.norms: deque[float] = deque(maxlen=window)

    def find(self, loss: float, norm: float) -> str | None:
        """Say what stands out of this step, with the figures; None: nothing does. It is not remembered.

        >>> spikes = Spikes(factor=5.0, window=50)
        >>> for _ in range(10):
        ...     spikes.remember(2.0, 0.5)
        >>> spikes.find(2.1, 3.0)
        'the gradient norm 3 is 6.0 times the median 0.5 of the last 10 steps'
        """
        if len(self.losses) < ENOUGH:
            return None
        for name, value, known in (("loss", loss, self.losses), ("gradient norm", norm, self.norms)):
            usual = median(known)
            if 0 < self.factor * usual < value:
                times = f"{value / usual:.1f} times the median {usual:.4g} of the last {len(known)} steps"
                return f"the {name} {value:.4g} is {times}"
        return None

    def remember(self, loss: float, norm: float) -> None:
        """Take in a step that was made."""
        self.losses.append(loss)
        self.norms.append(norm)

    def state(self) -> dict[str, Any]:
        """All it knows, in JSON values."""
        return {"losses": list(self.losses), "norms": list(self.norms)}

    def restore(self, state: dict[str, Any]) -> None:
        """Know again what `state` gave."""
        self.losses.extend(state["losses"])
        self.norms.extend(state["norms"])
