"""A run on disk: it may be killed at any moment and goes on exactly where it was.

    run/checkpoints/step-00001200/
        model.safetensors       the tensors of the model's state dict; tied ones once
        optimizer.safetensors   the optimizer's, named <parameter>.exp_avg and so on
        state.json              the step, the caller's own state, tied names, the optimizer's settings
        manifest.json           size and SHA-256 of each of these

A checkpoint appears whole or not at all (see durable.py), and no pointer says which is the latest: it is the
newest whose every byte is as written. Names are the model's own, whatever torch.compile or DDP wraps around
it. Nothing is pickled, so nothing in a checkpoint can run.
"""

import errno
import json
import logging
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from clearhead.training.durable import ASIDE, MANIFEST, damage, remove_folder, write_folder
from clearhead.training.durable import lock_run as lock_run  # the loop takes all it needs from here

logger = logging.getLogger(__name__)

FORMAT = 1
MODEL, OPTIMIZER, STATE = "model.safetensors", "optimizer.safetensors", "state.json"


def save_checkpoint(
    run: str | Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    state: dict[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Write `run`/checkpoints/step-00001200 (for step 1200), keep the newest `keep` in all, return its path.

    `state` is whatever else the run needs, in JSON values (tuples come back as lists). A checkpoint of the
    same step is replaced. ValueError: fewer than two to keep, or something that a checkpoint cannot hold.
    OSError: the disk refused; the message names path and size, and every earlier checkpoint is as it was.
    """
    if keep < 2:
        raise ValueError(f"keep={keep} must be at least 2, so that a damaged checkpoint leaves a good one")
    final = Path(run) / "checkpoints" / f"step-{step:08d}"
    write_checkpoint(final, step, model, optimizer, state)
    _prune(Path(run), step, keep)
    return final


def write_checkpoint(
    final: Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    state: dict[str, Any] | None = None,
) -> None:
    """Write one checkpoint as the folder `final`, wherever that is; the errors are `save_checkpoint`'s."""
    if step < 0:
        raise ValueError(f"step={step} must be 0 or more")
    if state is not None and state.get("step", step) != step:
        raise ValueError(f"state['step'] is {state['step']}, but the checkpoint is of step {step}")
    weights, tied = _model_tensors(model)
    moments, settings = ({}, None) if optimizer is None else _optimizer_tensors(model, optimizer)
    content = {"format": FORMAT, "step": step, "state": state or {}, "tied": tied, "optimizer": settings}
    text = _to_json(content).encode()
    files: dict[str, Callable[[Path], object]] = {MODEL: partial(_write_tensors, weights)}
    if optimizer is not None:
        files[OPTIMIZER] = partial(_write_tensors, moments)
    files[STATE] = lambda path: path.write_bytes(text)
    try:
        write_folder(final, files)
    except (OSError, SafetensorError) as error:
        size = sum(t.nbytes for t in (*weights.values(), *moments.values())) + len(text)
        code, reason = _errno_of(error), getattr(error, "strerror", None) or error
        message = f"{final} ({size:,} bytes) could not be written: {reason}; earlier checkpoints are intact"
        raise OSError(code, message) from error


def load_checkpoint(
    path_or_run: str | Path, model: nn.Module, optimizer: Optimizer | None = None
) -> dict[str, Any]:
    """Fill `model` and `optimizer` from a checkpoint, or a run's newest intact one; return state and step.

    Every hash is checked first; what is wrong with a checkpoint that is passed over is logged, in one line.
    Nothing is changed unless all of it fits. FileNotFoundError: there is none. ValueError: none is intact; or
    names, shapes or dtypes are not the model's or the optimizer's, both sides listed.
    """
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
            return _load(path, model, optimizer)
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
        for file in {path / MODEL, *path.glob("*.safetensors")}:
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
    for name, value in zip(_plain(raw), raw.values(), strict=True):
        if not isinstance(value, Tensor) or value.is_meta:
            raise ValueError(f"{name} has no values to save or to fill: it is {_form(value)}")
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


def _write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    packed: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        own = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in storages
        packed[name] = tensor if own else tensor.clone()
        storages.add(storage.data_ptr())
    save_file(packed, path, metadata={"format": "pt"})  # with more entries, their order would be random
    path.chmod(0o644)  # safetensors leaves it to its owner alone


def _errno_of(error: Exception) -> int:
    """The system's number of the error, which safetensors gives in its text only."""
    told = re.search(r"os error (\d+)", str(error))
    return getattr(error, "errno", None) or (int(told.group(1)) if told else errno.EIO)


def _prune(run: Path, step: int, keep: int) -> None:
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
    weights = _weights_for(path, content["tied"], model)
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


def _weights_for(path: Path, tied: dict[str, str], model: nn.Module) -> dict[str, Tensor]:
    """The file's tensors under the model's own names, once names, shapes, dtypes and ties fit."""
    complaint = f"{path / MODEL} does not fit the model"
    _, model_ties = _model_tensors(model)
    there = model.state_dict()
    names = dict(zip(there, _plain(there), strict=True))
    with safe_open(path / MODEL, framework="pt") as file:
        stored = list(file.keys())
        source = {name: kept for name, kept in tied.items() if kept in stored} | {
            name: name for name in stored
        }
        _same_names(complaint, set(source), set(names.values()))
        found = {raw: file.get_tensor(source[name]) for raw, name in names.items()}
    unlike = [
        f"{names[raw]} is {_form(found[raw])} in the file, {_form(there[raw])} in the model"
        for raw in names
        if _form(found[raw]) != _form(there[raw])
    ]
    if unlike:
        raise ValueError(f"{complaint}: {_some(unlike, '; ')}")
    plain = {name: found[raw] for raw, name in names.items()}
    for name, kept in model_ties.items():
        if not torch.equal(plain[name], plain[kept]):
            raise ValueError(f"{complaint}: it ties {name} to {kept}, and the file has two different tensors")
    return found


def _state_for(path: Path, saved: Any, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The saved state in the form that Optimizer.load_state_dict takes, matched by the parameters' names."""
    kind = type(optimizer).__name__
    if saved is None or saved["kind"] != kind:
        held = "no optimizer's state" if saved is None else f"the state of {saved['kind']}"
        raise ValueError(f"{path} holds {held}, not that of {kind}; load it with optimizer=None")
    groups = _group_names(model, optimizer)
    index = {name: i for i, name in enumerate(name for names in groups for name in names)}
    with safe_open(path / OPTIMIZER, framework="pt") as file:
        keys = list(file.keys())
        values = {key: file.get_tensor(key).clone() for key in keys} | saved["values"]
    known = {key.rpartition(".")[0] for key in values}.union(*(group["params"] for group in saved["groups"]))
    _same_names(f"{path / OPTIMIZER} does not fit the optimizer", known, set(index))
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
