"""A run on disk: it may be killed at any moment and goes on exactly where it was.

    run/checkpoints/step-00001200/
        model.safetensors       the tensors of the model's state dict; tied ones once
        optimizer.safetensors   the optimizer's, named <parameter>.exp_avg and so on
        state.json              the step, the caller's own state, tied names, the optimizer's settings
        manifest.json           size and SHA-256 of each of these

Where ranks share the weights out, `shard-00001-...safetensors` and so on hold each rank's part of both.
Either kind is read by any number of ranks. A checkpoint appears whole or not at all (see durable.py), and no
pointer says which is the latest: it is the newest whose every byte is as written. Names are the model's own,
whatever torch.compile or DDP wraps around it. Nothing is pickled, so nothing in a checkpoint can run.
"""

import errno
import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from clearhead.training.durable import ALONE, ASIDE, MANIFEST, Ranks, damage, remove_folder, write_folder
from clearhead.training.named_tensors import model_tensors, optimizer_tensors
from clearhead.training.restore import FORMAT, STATE, read_state, restore
from clearhead.training.sharded import is_shared_out
from clearhead.training.tensor_files import copy_tensors, write_shards, write_tensors

logger = logging.getLogger(__name__)

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


@dataclass(frozen=True)
class Content:
    """All that goes into a checkpoint, as it is at one moment: tensors under plain names, and JSON."""

    step: int
    weights: dict[str, Tensor]
    moments: dict[str, Tensor] | None
    state: bytes

    def tensors(self) -> dict[str, Tensor]:
        """Weights and moments under names of their own."""
        parts = {"model": self.weights, "optimizer": self.moments or {}}
        return {f"{part}.{name}": t for part, tensors in parts.items() for name, t in tensors.items()}

    def is_shared_out(self) -> bool:
        """Whether ranks hold some of it in parts."""
        return any(map(is_shared_out, self.weights.values()))

    def copy(self) -> "Content":
        """The same with tensors of its own, on the CPU."""
        moments = None if self.moments is None else copy_tensors(self.moments)
        return Content(self.step, copy_tensors(self.weights), moments, self.state)


def save_checkpoint(
    run: str | Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    state: dict[str, Any] | None = None,
    keep: int = 2,
    ranks: Ranks = ALONE,
) -> Path:
    """Write `run`/checkpoints/step-00001200 (for step 1200), keep the newest `keep` in all, return its path.

    `state` is whatever else the run needs, in JSON values (tuples come back as lists). A checkpoint of the
    same step is replaced. All `ranks` call this at once. ValueError: fewer than two to keep, or something
    that a checkpoint cannot hold. OSError: the disk refused; the message names path and size, and every
    earlier checkpoint is as it was.
    """
    if keep < 2:
        raise ValueError(f"keep={keep} must be at least 2, so that a damaged checkpoint leaves a good one")
    final = Path(run) / "checkpoints" / f"step-{step:08d}"
    write_content(final, take_content(step, model, optimizer, state), ranks)
    if ranks.is_main:
        prune(Path(run), step, keep)
    return final


def write_checkpoint(
    final: Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    state: dict[str, Any] | None = None,
    ranks: Ranks = ALONE,
) -> None:
    """Write one checkpoint as the folder `final`, wherever that is; the errors are `save_checkpoint`'s."""
    write_content(final, take_content(step, model, optimizer, state), ranks)


def take_content(
    step: int, model: nn.Module, optimizer: Optimizer | None = None, state: dict[str, Any] | None = None
) -> Content:
    """What a checkpoint of this very moment holds. Its tensors are the model's own, not copies."""
    if step < 0:
        raise ValueError(f"step={step} must be 0 or more")
    if state is not None and state.get("step", step) != step:
        raise ValueError(f"state['step'] is {state['step']}, but the checkpoint is of step {step}")
    weights, tied = model_tensors(model)
    moments, settings = (None, None) if optimizer is None else optimizer_tensors(model, optimizer)
    told = {"format": FORMAT, "step": step, "state": state or {}, "tied": tied, "optimizer": settings}
    return Content(step, weights, moments, _to_json(told).encode())


def write_content(final: Path, content: Content, ranks: Ranks = ALONE) -> None:
    """Write what was taken as the folder `final`; the errors are `save_checkpoint`'s."""
    files: dict[str, Callable[[Path], object]] = {STATE: lambda path: path.write_bytes(content.state)}
    try:
        if content.is_shared_out():
            write = partial(write_shards, content.tensors(), group=ranks.group)
            write_folder(final, files, ranks, write)
            return
        whole: dict[str, Callable[[Path], object]] = {MODEL: partial(write_tensors, content.weights)}
        if content.moments is not None:
            whole[OPTIMIZER] = partial(write_tensors, content.moments)
        write_folder(final, whole | files, ranks)
    except (OSError, SafetensorError) as error:
        size = sum(t.nbytes for t in content.tensors().values()) + len(content.state)
        code, reason = _errno_of(error), getattr(error, "strerror", None) or error
        advice = "make room there; " if code in (errno.ENOSPC, errno.EDQUOT) else ""
        message = (
            f"{final} ({size:,} bytes) could not be written: {reason}; {advice}earlier checkpoints are intact"
        )
        raise OSError(code, message) from error


def load_checkpoint(
    path_or_run: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Fill `model` and `optimizer` from a checkpoint, or a run's newest intact one; return state and step.

    Without an optimizer the weights are those to use: the mean of them, if the run keeps one.
    Every hash is checked first; what is wrong with a checkpoint that is passed over is logged, in one line.
    Nothing is changed unless all of it fits. Of several `ranks`, which all call this at once, the main one
    checks and chooses. FileNotFoundError: there is none. ValueError: none is intact; or names, shapes or
    dtypes are not the model's or the optimizer's, both sides listed.
    """
    chosen, problem = None, None
    try:
        chosen = choose_checkpoint(path_or_run) if ranks.is_main else None
    except (ValueError, FileNotFoundError) as error:
        problem = error
    path, trouble = ranks.gather(
        (None if chosen is None else str(chosen), None if problem is None else str(problem))
    )[0]
    if problem is not None:
        raise problem
    if path is None:
        raise ValueError(trouble)
    return restore(Path(path), model, optimizer)


def choose_checkpoint(path_or_run: str | Path) -> Path:
    """The checkpoint itself, or a run's newest intact one; the errors are `load_checkpoint`'s."""
    source = Path(path_or_run)
    is_run = (source / "checkpoints").is_dir()
    candidates = _candidates(source) if is_run else [source]
    if not candidates or not (is_run or any((source / name).exists() for name in (MANIFEST, MODEL, STATE))):
        there = "holds no checkpoint" if source.is_dir() else "does not exist"
        raise FileNotFoundError(f"{source} {there}; give the folder of a run that has saved, or of one step")
    found = []
    for path in candidates:
        problems = verify_checkpoint(path)
        if not problems:
            for what in found:
                logger.warning("a damaged checkpoint of %s is passed over: %s", source, what)
            return path
        found.append(f"{path.name}: {'; '.join(problems)}")
    advice = "no other is left" if is_run else "give the folder of the run to fall back on another one"
    raise ValueError(f"{source} cannot be loaded ({' | '.join(found)}); {advice}")


def checkpoints(run: str | Path) -> list[Path]:
    """List the checkpoints of `run`, newest first, intact or not."""
    return steps_in(Path(run) / "checkpoints")


def steps_in(folder: Path) -> list[Path]:
    """List the folders step-00001200 and so on in a folder, the last step first."""
    try:
        found = list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    steps = [path for path in found if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir()]
    return sorted(steps, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step that the name of a checkpoint says."""
    return int(path.name.rpartition("-")[2])


def verify_checkpoint(path: str | Path) -> list[str]:
    """Say what is wrong with a checkpoint, naming the files; an empty list: every byte is as written."""
    path = Path(path)
    if problems := damage(path):
        return problems
    try:
        read_state(path)
        for file in set(path.glob("*.safetensors")) or {path / MODEL}:
            with safe_open(file, framework="pt"):
                pass
    except (ValueError, OSError) as error:
        return [str(error)]
    except SafetensorError as error:
        return [f"a .safetensors file is not of that format: {error}"]
    return []


def _to_json(content: dict[str, Any]) -> str:
    try:
        return json.dumps(content, indent=2) + "\n"
    except TypeError as error:
        raise TypeError(f"state and the optimizer's settings must be JSON values: {error}") from None


def _errno_of(error: Exception) -> int:
    """The system's number of the error, which safetensors gives in its text only."""
    told = re.search(r"os error (\d+)", str(error))
    return getattr(error, "errno", None) or (int(told.group(1)) if told else errno.EIO)


def prune(run: Path, step: int, keep: int) -> None:
    """Remove all checkpoints of `run` up to `step` but the newest `keep`; damaged ones are not counted."""
    kept = 0
    for path in checkpoints(run):
        if step_of(path) > step:
            logger.warning(
                "%s is newer than step %d, just saved; unless damaged, it is loaded first", path, step
            )
        elif kept == keep:
            remove_folder(path)
        elif not damage(path, hashes=False):
            kept += 1


def _candidates(run: Path) -> list[Path]:
    """The checkpoints, newest first, with any that a killed save had set aside and not yet replaced."""
    found = checkpoints(run)
    steps = {step_of(path) for path in found}
    aside = (run / "checkpoints").glob(f"{ASIDE}step-*")
    return sorted([*found, *(p for p in aside if step_of(p) not in steps)], key=step_of, reverse=True)
