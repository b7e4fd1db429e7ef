"""The script for machines with a GPU runs: its tiny form here, and without a GPU it says so and ends well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HOME = Path(__file__).parents[1]


def run(*options: str) -> str:
    """What the script writes, with nothing but src on the path."""
    done = subprocess.run(
        [sys.executable, str(HOME / "benchmarks" / "gpu.py"), *options],
        env={**os.environ, "PYTHONPATH": str(HOME / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_gpu_script_runs_at_tiny_sizes(tmp_path: Path) -> None:
    said = run("--tiny", "--out", str(tmp_path / "report.md"))
    assert "exact: yes" in said
    report = (tmp_path / "report.md").read_text()
    assert report.startswith("## GPU, ")
    for row in ("| float32, compiled |", "| flash, causal |", "| compiled, first step", "| eager | 2 |"):
        assert row in report


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: the script would measure it")
def test_without_a_gpu_the_script_says_so() -> None:
    assert run().startswith("no GPU:")
