"""The next step's batches are made while this step computes."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Ahead(Generic[T]):
    """Calls `make(step)` for steps in order, one ahead of whoever asks, in a thread.

    `make` is a pure function, so that a result made ahead and never asked for changes nothing. What it raises
    is raised by `get`.
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        self.make = make
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.next: tuple[int, Future[T]] | None = None

    def get(self, step: int) -> T:
        """make(step); the one after it is begun."""
        if self.next is not None and self.next[0] == step:
            made = self.next[1].result()
        else:
            made = self.make(step)
        self.next = (step + 1, self.thread.submit(self.make, step + 1))
        return made

    def close(self) -> None:
        """End the thread; what it has begun is left."""
        self.thread.shutdown(wait=True, cancel_futures=True)
