"""Worker processes for jobs that share nothing: one job at a time each, results as they come.

The processes are spawned, not forked: safe beside threads, and the same on every system. They end with
their parent, even when that is killed: the pipe that brings the jobs closes, and there is nothing left to do.
"""

import os
import signal
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any


def cores() -> int:
    """Return how many processes may run at once: the cores of this process, 1 inside a worker."""
    if current_process().daemon:  # a daemon must not have children
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_workers(
    prepare: Callable[..., Callable[[Any], Any]], arguments: tuple, jobs: Sequence[Any], limit: int
) -> Iterator[Any]:
    """Yield `prepare(*arguments)(job)` for every job from up to `limit` processes, as they are done.

    Each process calls `prepare` once; it is a function of an importable module. When jobs raise, no new ones
    are begun and the error of the first failed job is raised: which one that is does not depend on `limit`.
    """
    processes: dict[Connection, BaseProcess] = {}
    busy: dict[Connection, int] = {}
    failures: dict[int, Exception] = {}
    begun = 0
    try:
        while busy or (begun < len(jobs) and not failures):
            if begun < len(jobs) and len(processes) < limit and not failures:
                free = [_start(processes, prepare, arguments)]
            else:
                free = []
                for pipe in wait(list(busy)):
                    assert isinstance(pipe, Connection)
                    number, result = busy.pop(pipe), _receive(pipe, processes[pipe])
                    if isinstance(result, Exception):
                        failures[number] = result
                    else:
                        yield result
                    free.append(pipe)
            for pipe in free:
                if begun < len(jobs) and not failures:
                    busy[pipe] = begun
                    _send(pipe, jobs[begun])
                    begun += 1
        if failures:
            raise failures[min(failures)]
    finally:
        for pipe, process in processes.items():
            pipe.close()
            process.terminate()
            process.join()
            process.close()


def _start(processes: dict, prepare: Callable, arguments: tuple) -> Connection:
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs, prepare, arguments), daemon=True)
    with _without_main():
        process.start()
    theirs.close()
    processes[ours] = process
    return ours


def _send(pipe: Connection, job: Any) -> None:
    with suppress(ConnectionError):  # the worker has died; `_receive` will say so
        pipe.send(job)


def _receive(pipe: Connection, process: BaseProcess) -> Any:
    try:
        return pipe.recv()
    except (EOFError, ConnectionError):
        process.join()
        return ChildProcessError(
            f"a worker process ended with exit code {process.exitcode}; workers=1 needs none"
        )


def _serve(pipe: Connection, prepare: Callable, arguments: tuple) -> None:
    """The whole life of a worker: do what comes through `pipe` until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends its workers
    work = None
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            work = work or prepare(*arguments)
            result = work(job)
        except Exception as error:
            result = error
        try:
            pipe.send(result)
        except ConnectionError:
            return


@contextmanager
def _without_main() -> Iterator[None]:
    """Start processes that do not run the caller's script again.

    A spawned process imports the script it comes from, so a script without `if __name__ == "__main__"` would
    begin once more in every worker. Ours need nothing from it: while they start, `__main__` is empty.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
