"""What a run asks of the machine: a device, memory that stays, and to be told before it is stopped."""

import contextlib
import ctypes
import signal
import sys
from collections.abc import Callable, Iterator

import torch


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
