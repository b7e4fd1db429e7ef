"""Worker processes for jobs that share nothing: one job at a time each, results as they come.

The processes are spawned, not forked: safe beside threads, and the same on every system. They end with
their parent, even when that is killed: the pipe that brings the jobs closes, and there is nothing left to do.
"""

import os
import signal
import sys
import types
from collections.abc import Callable, Iterable, Iterator
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
    prepare: Callable[..., Callable[[Any], Any]], arguments: tuple, jobs: Iterable[Any], limit: int
) -> Iterator[Any]:
    """Yield `prepare(*arguments)(job)` for every job from up to `limit` processes, as they are done."""
    with Workers(limit, prepare, arguments) as workers:
        yield from workers.do(jobs)


class Workers:
    """Up to `limit` processes; each calls `prepare(*arguments)` once and then does one job after another.

    `prepare` is a function of an importable module. A process starts when there is a job for it, and all end
    with the `with` block.
    """

    def __init__(self, limit: int, prepare: Callable[..., Callable[[Any], Any]], arguments: tuple = ()):
        self.limit, self.prepare, self.arguments = limit, prepare, arguments
        self.processes: dict[Connection, BaseProcess] = {}
        self.idle: list[Connection] = []

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_) -> None:
        for pipe, process in self.processes.items():
            pipe.close()
            process.terminate()
            process.join()
            process.close()

    def do(self, jobs: Iterable[Any]) -> Iterator[Any]:
        """Yield the result of every job, as they are done; a job is drawn when there is a process for it.

        When jobs raise, no new ones are begun and the error of the first failed job is raised: which one that
        is does not depend on `limit`.
        """
        busy: dict[Connection, int] = {}
        failures: dict[int, Exception] = {}
        for number, job in enumerate(jobs):
            done = []
            if self.idle:
                pipe = self.idle.pop()
            elif len(self.processes) < self.limit:
                pipe = self._start()
            else:
                pipe, done = self._finish_one(busy, failures)
            if failures:
                self.idle.append(pipe)
                break
            busy[pipe] = number
            with suppress(ConnectionError):  # the worker has died; receiving from it will say so
                pipe.send(job)
            yield from done
        while busy:
            pipe, done = self._finish_one(busy, failures)
            self.idle.append(pipe)
            yield from done
        if failures:
            raise failures[min(failures)]

    def _start(self) -> Connection:
        spawn = get_context("spawn")
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_serve, args=(theirs, self.prepare, self.arguments), daemon=True)
        with _without_main():
            process.start()
        theirs.close()
        self.processes[ours] = process
        return ours

    def _finish_one(
        self, busy: dict[Connection, int], failures: dict[int, Exception]
    ) -> tuple[Connection, list[Any]]:
        """Wait for a busy process: return its pipe and its result, or none and note the failure."""
        ready = wait(list(busy))
        pipe = next(pipe for pipe in busy if pipe in ready)
        number = busy.pop(pipe)
        try:
            result = pipe.recv()
        except (EOFError, ConnectionError):
            self.processes[pipe].join()
            code = self.processes[pipe].exitcode
            result = ChildProcessError(f"a worker process ended with exit code {code}; workers=1 needs none")
        if isinstance(result, Exception):
            failures[number] = result
            return pipe, []
        return pipe, [result]


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
