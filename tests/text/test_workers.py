"""Worker processes: results, reuse, errors, and no trouble with the caller's script."""

import operator
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from clearhead.text.workers import Workers, in_workers


def test_every_job_is_done_once() -> None:
    """Any number of processes gives every result once; a job is drawn only when a process is free."""
    drawn = []
    jobs = (drawn.append(number) or number for number in range(9))
    results = in_workers(partial, (operator.mul, 3), jobs, 2)
    first = next(results)
    assert len(drawn) <= 3
    assert sorted([first, *results]) == [0, 3, 6, 9, 12, 15, 18, 21, 24]


def test_workers_are_reused_and_end() -> None:
    """One pool serves several rounds, starts no process without a job, and leaves none behind."""
    with Workers(2, partial, (operator.neg,)) as workers:
        assert list(workers.do([1])) == [-1]
        assert len(workers.processes) == 1
        assert sorted(workers.do([1, 2, 3])) == [-3, -2, -1]
        processes = list(workers.processes.values())
        assert [process.is_alive() for process in processes] == [True, True]
    with pytest.raises(ValueError, match="closed"):
        processes[0].is_alive()


@pytest.mark.parametrize("limit", [1, 3])
def test_the_first_error_is_raised(limit: int) -> None:
    """The error of the first failed job reaches the caller, for any number of processes."""
    with pytest.raises(ZeroDivisionError, match="division"):
        list(in_workers(partial, (divmod, 1), [2, 0, "1", 4], limit))


def test_workers_serve_on_after_an_error() -> None:
    with Workers(2, partial, (divmod, 7)) as workers:
        with pytest.raises(ZeroDivisionError):
            list(workers.do([1, 0, 2]))
        assert list(workers.do([2])) == [(3, 1)]


def test_a_killed_worker_is_an_error() -> None:
    """Not a hang, and the message says how it ended."""
    with Workers(1, partial, (operator.neg,)) as workers:
        assert list(workers.do([1])) == [-1]
        for process in workers.processes.values():
            process.kill()
            process.join()
        with pytest.raises(ChildProcessError, match="ended with exit code -9"):
            list(workers.do([1]))


SCRIPT = """
import functools, operator
from clearhead.text.workers import in_workers
print(sorted(in_workers(functools.partial, (operator.neg,), [1, 2, 3], 2)))
"""


@pytest.mark.parametrize("how", ["script", "stdin"])
def test_no_main_guard_is_needed(tmp_path: Path, how: str) -> None:
    """A script without `if __name__ == "__main__"`, or a script on stdin, runs once, not once per worker."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    arguments = [sys.executable, str(script) if how == "script" else "-"]
    given = SCRIPT if how == "stdin" else None
    done = subprocess.run(arguments, input=given, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[-3, -2, -1]\n", "")
