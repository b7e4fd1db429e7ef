"""What a run asks of the machine: a device, memory that stays, and to be told before it is stopped."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

LOADAVG = Path("/proc/loadavg")  # on Linux; its fourth word is "runnable/all", threads that is


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


def crowd(threads: int) -> str | None:
    """What to say of other programs that take the processor from a run of so many threads; None: nothing.

    Threads that share a matrix product wait for the slowest of them, in a loop that itself takes time from
    the others, so that a run beside another is slower by much more than its share. The load is that of the
    last minute; where the system tells (Linux), somebody else must also be at work at this moment.
    """
    cores = os.cpu_count() or 1
    try:
        load = os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows knows none
        return None
    if threads < 2 or load < 0.5 or load + threads <= 1.5 * cores:
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        if int(LOADAVG.read_text(encoding="ascii").split()[3].partition("/")[0]) <= 1:  # this very thread
            return None
    free = max(1, min(threads - 1, cores - round(load)))
    return (
        f"others are at work on this machine (load {load:.1f}, {cores} cores): the {threads} threads of this "
        f"run will wait for each other and may be several times slower; start it with "
        f"OMP_NUM_THREADS={free}, or when the others are done"
    )


def tell_crowd(device: str, note: Callable[[str], object]) -> None:
    """Say so where other programs keep the processor from a run in this one process."""
    sizes = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
    alone = all(os.environ.get(name, "1") == "1" for name in sizes)  # of several, each has a share of threads
    told = crowd(torch.get_num_threads()) if alone and find_device(device).type == "cpu" else None
    if told is not None:
        note(told)


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
