"""What a run says of a machine where others are at work."""

import os

import pytest
import torch

from clearhead.training import machine
from clearhead.training.machine import crowd, tell_crowd


@pytest.fixture
def busy(tmp_path, monkeypatch):
    """A machine of so many cores with this load in the last minute, and as many threads at work now."""

    def make(cores: int, load: float, now: int | None) -> None:
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 9.0, 9.0), raising=False)
        told = tmp_path / "loadavg"
        told.unlink(missing_ok=True)
        if now is not None:
            told.write_text(f"{load:.2f} 9.00 9.00 {now}/151 14238\n", encoding="ascii")
        monkeypatch.setattr(machine, "LOADAVG", told)

    return make


@pytest.mark.parametrize(
    ("cores", "load", "now", "threads", "advice"),
    [
        (2, 2.0, 3, 2, "OMP_NUM_THREADS=1,"),
        (2, 1.1, 2, 2, "OMP_NUM_THREADS=1,"),
        (2, 1.1, None, 2, "OMP_NUM_THREADS=1,"),  # a system that does not tell who is at work now
        (16, 9.0, 5, 16, "OMP_NUM_THREADS=7,"),
        (16, 40.0, 5, 16, "OMP_NUM_THREADS=1,"),
        (2, 1.0, 3, 2, None),  # just full
        (2, 2.0, 1, 2, None),  # what was at work has ended: only this process is
        (2, 3.0, 4, 1, None),  # one thread waits for nobody
        (2, 0.1, 2, 8, None),  # its own threads are too many, but nobody else is there
        (16, 9.0, 5, 8, None),
    ],
)
def test_a_crowd_is_told_with_what_to_do(cores, load, now, threads, advice, busy):
    busy(cores, load, now)
    told = crowd(threads)
    assert (told is None) == (advice is None)
    if told is not None and advice is not None:
        assert f"load {load:.1f}, {cores} cores" in told
        assert f"the {threads} threads" in told
        assert advice in told
        assert "\n" not in told


def test_a_system_without_a_load_says_nothing(busy, monkeypatch):
    busy(2, 9.0, 9)
    monkeypatch.delattr(os, "getloadavg")
    assert crowd(2) is None


def test_it_is_said_once_by_a_run_alone_on_the_processor(busy, monkeypatch):
    """Not by the ranks of a run, which are each other's load."""
    busy(4, 4.0, 5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    heard: list[str] = []
    tell_crowd("cpu", heard.append)
    for launched_by in ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS"):
        with monkeypatch.context() as patch:
            patch.setenv(launched_by, "2")
            tell_crowd("cpu", heard.append)
    assert len(heard) == 1
    assert heard[0].startswith("others are at work on this machine (load 4.0, 4 cores): the 4 threads")
