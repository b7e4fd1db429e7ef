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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.optim import Optimizer

from clearhead.training.durable import ALONE, ASIDE, MANIFEST, Ranks, damage, remove_folder, write_folder
from clearhead.training.durable import lock_run as lock_run  # the loop takes all it needs from here
from clearhead.training.lora import MergedPart, has_adapters
from clearhead.training.sharded import is_shared_out
from clearhead.training.tensor_files import (
    MeanPart,
    copy_tensors,
    form_of,
    has_part,
    open_part,
    write_shards,
    write_tensors,
)

logger = logging.getLogger(__name__)

FORMAT = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


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
    weights, tied = _model_tensors(model)
    moments, settings = (None, None) if optimizer is None else _optimizer_tensors(model, optimizer)
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
    return _load(Path(path), model, optimizer)


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
        _read_state(path)
        for file in set(path.glob("*.safetensors")) or {path / MODEL}:
            with safe_open(file, framework="pt"):
                pass
    except (ValueError, OSError) as error:
        return [str(error)]
    except SafetensorError as error:
        return [f"a .safetensors file is not of that format: {error}"]
    return []


# What is saved --------------------------------------------------------------------------------------------


def _model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict under plain names, each tensor once; and {second name: first name} of those tied."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    raw = model.state_dict()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for path, name, value in zip(raw, _plain(raw), raw.values(), strict=True):
        if not isinstance(value, Tensor) or value.is_meta:
            raise ValueError(f"{name} has no values to save or to fill: it is {_form(value)}")
        if is_shared_out(value):  # what of it is here may be empty
            place: tuple[Any, ...] = (id(parameters[path]),)
        else:
            place = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and place in first:
            tied[name] = first[place]
        else:
            first[place], tensors[name] = name, value
    return tensors, tied


def _optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's tensors as <parameter>.<key>; and the rest of it in JSON values."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    groups = []
    for group, names in zip(optimizer.param_groups, _group_names(model, optimizer), strict=True):
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"params": names, "settings": settings})
        for name, p in zip(names, group["params"], strict=True):
            for key, value in optimizer.state.get(p, {}).items():
                (tensors if isinstance(value, Tensor) else values)[f"{name}.{key}"] = value
    return tensors, {"kind": type(optimizer).__name__, "groups": groups, "values": values}


def _group_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    parameters = dict(model.named_parameters())
    names = {id(p): name for name, p in zip(_plain(parameters), parameters.values(), strict=True)}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if id(p) not in names:
            raise ValueError(f"the optimizer holds a parameter {_form(p)} that is not the model's")
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def _plain(names: Iterable[str]) -> list[str]:
    """Names without what torch.compile (`_orig_mod.`, anywhere) and DDP (`module.`, before all) add."""
    plain = [name.replace("_orig_mod.", "") for name in names]
    while plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return plain


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
            logger.warning("%s is newer than step %d, just saved, and is loaded first", path, step)
        elif kept == keep:
            remove_folder(path)
        elif not damage(path, hashes=False):
            kept += 1


# What is loaded -------------------------------------------------------------------------------------------


def _load(path: Path, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    content = _read_state(path)
    weights = _weights_for(path, content["tied"], model, mean=optimizer is None)
    if optimizer is not None:
        optimizer.load_state_dict(_state_for(path, content["optimizer"], model, optimizer))
    model.load_state_dict(weights)
    return {**content["state"], "step": content["step"]}


def _read_state(path: Path) -> dict[str, Any]:
    """The content of state.json; ValueError unless it has the form that `save_checkpoint` writes."""
    try:
        content = json.loads((path / STATE).read_bytes())
        saved = content["optimizer"]
        good = isinstance(content["step"], int) and isinstance(content["state"], dict)
        good = good and all(isinstance(kept, str) for kept in content["tied"].values())
        if saved is not None:
            groups = [(group["params"], group["settings"]) for group in saved["groups"]]
            good = good and isinstance(saved["kind"], str) and isinstance(saved["values"], dict)
            good = good and all(isinstance(p, list) and isinstance(s, dict) for p, s in groups)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, FileNotFoundError):
        good, content = False, {}
    if not good:
        raise ValueError(f"{STATE} is not the state of a checkpoint")
    if content.get("format") != FORMAT:
        raise ValueError(f"{STATE} is of format {content.get('format')!r}; this version reads {FORMAT}")
    return content


def _weights_for(path: Path, tied: dict[str, str], model: nn.Module, mean: bool) -> dict[str, Tensor]:
    """The file's tensors under the model's own names, once names, shapes, dtypes and ties fit.

    Adapters that the model does not have are merged into the weights that they correct. `mean`: where the
    optimizer's state has a mean of the weights (average.py), it takes their place.
    """
    part = open_part(path, "model")
    part = MeanPart(part, open_part(path, "optimizer")) if mean and has_part(path, "optimizer") else part
    part = part if has_adapters(model) else MergedPart(part)
    complaint = f"{part.path} does not fit the model"
    _, model_ties = _model_tensors(model)
    there = model.state_dict()
    names = dict(zip(there, _plain(there), strict=True))
    stored = part.forms
    source = {name: kept for name, kept in tied.items() if kept in stored} | {name: name for name in stored}
    _same_names(complaint, set(source), set(names.values()))
    unlike = [
        f"{name} is {stored[source[name]]} in the file, {_form(there[raw])} in the model"
        for raw, name in names.items()
        if stored[source[name]] != form_of(there[raw])
    ]
    if unlike:
        raise ValueError(f"{complaint}: {_some(unlike, '; ')}")
    found = part.read({source[name]: there[raw] for raw, name in names.items()})
    for name, kept in model_ties.items():
        one, other = (found[source[n]] for n in (name, kept))
        if one is not other and not torch.equal(one, other):
            raise ValueError(f"{complaint}: it ties {name} to {kept}, and the file has two different tensors")
    return {raw: found[source[name]] for raw, name in names.items()}


def _state_for(path: Path, saved: Any, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The saved state in the form that Optimizer.load_state_dict takes, matched by the parameters' names."""
    kind = type(optimizer).__name__
    if saved is None or saved["kind"] != kind:
        held = "no optimizer's state" if saved is None else f"the state of {saved['kind']}"
        raise ValueError(f"{path} holds {held}, not that of {kind}; load it with optimizer=None")
    groups = _group_names(model, optimizer)
    names = [name for group in groups for name in group]
    index = {name: i for i, name in enumerate(names)}
    parameters = dict(zip(names, (p for g in optimizer.param_groups for p in g["params"]), strict=True))
    part = open_part(path, "optimizer")
    owners = {key: key.rpartition(".")[0] for key in (*part.forms, *saved["values"])}
    known = set(owners.values()).union(*(group["params"] for group in saved["groups"]))
    _same_names(f"{part.path} does not fit the optimizer", known, set(index))
    like = {}
    for key, form in part.forms.items():
        p = parameters[owners[key]]
        like[key] = p if is_shared_out(p) and form.shape == tuple(p.shape) else None
    values: dict[str, Any] = part.read(like)
    # A whole tensor that was read may be a window on the file, and is to outlive it.
    values = {key: value if is_shared_out(value) else value.clone() for key, value in values.items()}
    values |= saved["values"]
    state: dict[int, dict[str, Any]] = {}
    for key, value in values.items():
        name, _, what = key.rpartition(".")
        state.setdefault(index[name], {})[what] = value
    same_groups = [group["params"] for group in saved["groups"]] == groups
    if not same_groups:
        logger.warning("%s was saved with other parameter groups: their settings are not restored", path)
    param_groups = []
    for i, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        for key, value in (saved["groups"][i]["settings"] if same_groups else {}).items():
            if key in settings:
                settings[key] = tuple(value) if isinstance(settings[key], tuple) else value
        param_groups.append({**settings, "params": [index[name] for name in groups[i]]})
    return {"state": state, "param_groups": param_groups}


def _candidates(run: Path) -> list[Path]:
    """The checkpoints, newest first, with any that a killed save had set aside and not yet replaced."""
    found = checkpoints(run)
    steps = {step_of(path) for path in found}
    aside = (run / "checkpoints").glob(f"{ASIDE}step-*")
    return sorted([*found, *(p for p in aside if step_of(p) not in steps)], key=step_of, reverse=True)


def _same_names(complaint: str, stored: set[str], wanted: set[str]) -> None:
    if stored != wanted:
        missing, left = sorted(wanted - stored), sorted(stored - wanted)
        raise ValueError(f"{complaint}: missing {_some(missing)}; left over {_some(left)}")


def _some(items: list[str], separator: str = ", ") -> str:
    rest = f"{separator}and {len(items) - 8} more" if len(items) > 8 else ""
    return (separator.join(items[:8]) or "none") + rest


def _form(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    where = " on the meta device" if value.is_meta else ""
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{where}"
