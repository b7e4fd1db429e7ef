"""What a benchmark ran on, in one line, and where its report goes."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"


def describe_machine(*packages: str, threads: int | None = None) -> str:
    """Processor, cores (or the threads that were used), Python, the packages' versions, and the load."""
    cpu, names = platform.machine(), Path("/proc/cpuinfo")
    if names.exists():
        for line in names.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    cores = f"{os.cpu_count()} cores" if threads is None else f"{threads} threads"
    versions = ", ".join([f"Python {platform.python_version()}", *(f"{p} {version(p)}" for p in packages)])
    load = "/".join(f"{value:.1f}" for value in os.getloadavg())
    return f"{cpu}, {cores}, {versions}, load {load}"


def record(report: str) -> None:
    """Append a report to RESULTS.md."""
    with RESULTS.open("a", encoding="utf-8") as file:
        file.write(f"\n{report.strip()}\n")
