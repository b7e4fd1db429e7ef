"""tap(name, value): name a value of a forward pass, so that a recorder outside can see or replace it.

A model's modules already show their outputs to forward hooks. A few values that matter are no module's
output: the scores and weights of attention, the product in a gated feed-forward layer. `tap` names those. It
returns its argument; while nobody listens it costs one comparison, and a compiled graph holds no trace of it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

Listener = Callable[[str, Tensor], Tensor]

_listener: Listener | None = None


def tap(name: str, value: Tensor) -> Tensor:
    """Return `value`; when somebody listens, show it under `name` first and return the listener's answer."""
    if _listener is None:
        return value
    return _listener(name, value)


def listening() -> bool:
    """Whether a recorder is attached: then attention computes its scores step by step."""
    return _listener is not None


@contextmanager
def listen(listener: Listener) -> Iterator[None]:
    """Send every tap inside the `with` block to `listener(name, value) -> value`."""
    global _listener
    if _listener is not None:
        raise ValueError("a recording is already running; leave its `with` block before starting another")
    _listener = listener
    try:
        yield
    finally:
        _listener = None
