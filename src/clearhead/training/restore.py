"""A checkpoint that is intact, brought into a model and an optimizer: nothing changes unless all of it fits.

Both may be shared out otherwise than those that were saved. Adapters that the model does not have are merged
into the weights that they correct. Without an optimizer, the mean of the weights is taken, if there is one.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from clearhead.training.lora import MergedPart, has_adapters
from clearhead.training.named_tensors import form_in_words, group_names, model_tensors, plain_names
from clearhead.training.sharded import is_shared_out
from clearhead.training.tensor_files import MeanPart, form_of, has_part, open_part

logger = logging.getLogger(__name__)

FORMAT = 1
STATE = "state.json"


def restore(path: Path, model: nn.Module, optimizer: Optimizer | None) -> dict[str, Any]:
    """Fill both from the checkpoint `path`; return its state and step. ValueError: what does not fit."""
    content = read_state(path)
    weights = _weights_for(path, content["tied"], model, mean=optimizer is None)
    if optimizer is not None:
        optimizer.load_state_dict(_state_for(path, content["optimizer"], model, optimizer))
    model.load_state_dict(weights)
    return {**content["state"], "step": content["step"]}


def read_state(path: Path) -> dict[str, Any]:
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
            good = good and all(isinstance(name, str) for names, _ in groups for name in names)
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
    _, model_ties = model_tensors(model)
    there = model.state_dict()
    names = dict(zip(there, plain_names(there), strict=True))
    stored = part.forms
    source = {name: kept for name, kept in tied.items() if kept in stored} | {name: name for name in stored}
    _same_names(complaint, set(source), set(names.values()))
    unlike = [
        f"{name} is {stored[source[name]]} in the file, {form_in_words(there[raw])} in the model"
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
    groups = group_names(model, optimizer)
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


def _same_names(complaint: str, stored: set[str], wanted: set[str]) -> None:
    if stored != wanted:
        missing, left = sorted(wanted - stored), sorted(stored - wanted)
        raise ValueError(f"{complaint}: missing {_some(missing)}; left over {_some(left)}")


def _some(items: list[str], separator: str = ", ") -> str:
    rest = f"{separator}and {len(items) - 8} more" if len(items) > 8 else ""
    return (separator.join(items[:8]) or "none") + rest
