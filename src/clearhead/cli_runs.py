"""The verbs around runs: start one in several processes; see whether one is whole."""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional


@dataclass(frozen=True)
class Launch:
    """Start `clearhead train` in several processes, by torchrun: clearhead launch [FLAGS] train RECIPE ..."""

    processes: int | None = None  # on this machine; by default one for each GPU
    machines: int = 1  # how many; give the same command on each
    meet: str = "127.0.0.1:0"  # host:port of one of them, where all find each other
    max_restarts: int = 0  # how often all processes are started anew when one has died


def launch(argv: Sequence[str], parse: Callable[..., Launch]) -> None:
    """Start `clearhead train` in several processes, by torchrun: clearhead launch [FLAGS] train RECIPE ..."""
    words = list(argv)
    place = words.index("train") if "train" in words else len(words)
    flags: Launch = parse(Launch, words[:place], prog="clearhead launch")
    if place == len(words):
        raise ValueError("say what to start, as in: clearhead launch --processes 2 train RECIPE --run FOLDER")
    command, environment = torchrun(flags, words[place:])
    if sys.platform == "win32":
        raise SystemExit(subprocess.run(command, env=environment, check=False).returncode)
    sys.stdout.flush()
    os.execve(command[0], command, environment)  # so that a request to stop reaches torchrun, and the ranks


def torchrun(flags: Launch, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command and the environment that start `clearhead WORDS` in several processes."""
    processes = flags.processes if flags.processes is not None else count_gpus()
    if processes < 1 or flags.machines < 1 or flags.max_restarts < 0:
        raise ValueError(
            f"processes={processes} and machines={flags.machines} must be at least 1, "
            f"max_restarts={flags.max_restarts} at least 0"
        )
    if flags.machines > 1 and flags.meet == Launch.meet:
        raise ValueError(
            f"{flags.machines} machines must know where to meet; give one's name as --meet HOST:29400"
        )
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *(f"--nproc-per-node={processes}", f"--nnodes={flags.machines}"),
        *(f"--max-restarts={flags.max_restarts}", "--rdzv-backend=c10d", f"--rdzv-endpoint={flags.meet}"),
        *("--rdzv-id=clearhead", "-m", "--", "clearhead.cli", *words),
    ]
    threads = max(1, (os.cpu_count() or 1) // processes)
    defaults = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else ranks started anew may look for dead ones
        "OMP_NUM_THREADS": str(threads),
    }
    return command, {**defaults, **os.environ}


def count_gpus() -> int:
    """How many GPUs this machine has; ValueError if none."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError("this machine has no CUDA GPU to count; give --processes, how many to start")
    return torch.cuda.device_count()


def verify(run: Positional[Path]) -> None:
    """Read every checkpoint and every shard of a run, and say what is not as it was written.

    Args:
        run: the folder of a run.
    """
    from clearhead.training.verify import verify_run

    found = 0
    for path, problems in verify_run(run):
        found += len(problems)
        print(f"{path}: {'; '.join(problems) or 'whole'}")
    if found:
        raise ValueError(
            f"{run} is damaged in {found} places; a run goes on from its newest whole checkpoint"
        )
