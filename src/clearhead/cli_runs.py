"""The verbs around runs: start one in several processes; see whether one is whole."""

import json
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


TELLS = "CLEARHEAD_LAUNCH_TELLS"  # in a rank's environment: who started it says what ended it


def read_launch(argv: Sequence[str], parse: Callable[..., Launch]) -> tuple[Launch, list[str]]:
    """The flags of `clearhead launch`, and what it is to start: "train" and the words after it."""
    words = list(argv)
    place = words.index("train") if "train" in words else len(words)
    flags = parse(Launch, words[:place], prog="clearhead launch")
    if place == len(words):
        raise ValueError("say what to start, as in: clearhead launch --processes 2 train RECIPE --run FOLDER")
    return flags, words[place:]


def launch(command: list[str], environment: dict[str, str]) -> None:
    """Become torchrun, or on Windows wait for it."""
    if sys.platform == "win32":
        raise SystemExit(subprocess.run(command, env=environment, check=False).returncode)
    sys.stdout.flush()
    os.execve(command[0], command, environment)  # so that a request to stop reaches torchrun, and the ranks


def torchrun(flags: Launch, words: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The command and the environment that start `clearhead WORDS` in several processes."""
    processes = count_processes(flags)
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
        *(sys.executable, "-m", "clearhead.cli_ranks"),
        *(f"--nproc-per-node={processes}", f"--nnodes={flags.machines}"),
        *(f"--max-restarts={flags.max_restarts}", "--rdzv-backend=c10d", f"--rdzv-endpoint={flags.meet}"),
        *("--rdzv-id=clearhead", "-m", "--", "clearhead.cli", *words),
    ]
    threads = max(1, (os.cpu_count() or 1) // processes)
    defaults = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else ranks started anew may look for dead ones
        "OMP_NUM_THREADS": str(threads),
    }
    return command, {**defaults, **os.environ, TELLS: "1"}


def tell_launcher(line: str, mistake: bool) -> bool:
    """Leave to `clearhead launch` what ended this rank: it says it once for all. False: nobody is there to.

    `mistake`: the same end would come again, so that nothing is to be started anew.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if TELLS not in os.environ or not file:
        return False
    try:
        Path(file).write_text(json.dumps({"message": line, "mistake": mistake}), encoding="utf-8")
    except OSError:  # then it is better told by every rank than by none
        return False
    return True


def count_processes(flags: Launch) -> int:
    """How many processes are started on this machine; ValueError if nobody says, and it has no GPU."""
    return count_gpus() if flags.processes is None else flags.processes


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
