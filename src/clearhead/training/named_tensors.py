"""The tensors of a model and of its optimizer under plain names, as a checkpoint holds them.

    decoder.blocks.0.attn.q.weight             of the model: each tensor once, and which names are tied to it
    decoder.blocks.0.attn.q.weight.exp_avg     of the optimizer: <parameter>.<what it keeps of it>

Names are the model's own, whatever torch.compile or DDP wraps around it.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from clearhead.training.sharded import is_shared_out


def model_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict under plain names, each tensor once; and {second name: first name} of those tied."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[Any, ...], str] = {}
    raw = model.state_dict()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for path, name, value in zip(raw, plain_names(raw), raw.values(), strict=True):
        if not isinstance(value, Tensor) or value.is_meta:
            raise ValueError(f"{name} has no values to save or to fill: it is {form_in_words(value)}")
        if is_shared_out(value):  # what of it is here may be empty
            place: tuple[Any, ...] = (id(parameters[path]),)
        else:
            place = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and place in first:
            tied[name] = first[place]
        else:
            first[place], tensors[name] = name, value
    return tensors, tied


def optimizer_tensors(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's tensors as <parameter>.<key>; and the rest of it in JSON values."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    groups = []
    for group, names in zip(optimizer.param_groups, group_names(model, optimizer), strict=True):
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        groups.append({"params": names, "settings": settings})
        for name, p in zip(names, group["params"], strict=True):
            for key, value in optimizer.state.get(p, {}).items():
                (tensors if isinstance(value, Tensor) else values)[f"{name}.{key}"] = value
    return tensors, {"kind": type(optimizer).__name__, "groups": groups, "values": values}


def group_names(model: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """The names of the parameters in each of the optimizer's groups, in order."""
    parameters = dict(model.named_parameters())
    names = {id(p): name for name, p in zip(plain_names(parameters), parameters.values(), strict=True)}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        if id(p) not in names:
            raise ValueError(f"the optimizer holds a parameter {form_in_words(p)} that is not the model's")
    return [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def plain_names(names: Iterable[str]) -> list[str]:
    """Names without what torch.compile (`_orig_mod.`, anywhere) and DDP (`module.`, before all) add."""
    plain = [name.replace("_orig_mod.", "") for name in names]
    while plain and all(name.startswith("module.") for name in plain):
        plain = [name.removeprefix("module.") for name in plain]
    return plain


def form_in_words(value: Any) -> str:
    """Shape and type of a tensor in words, or the kind of what is none."""
    if not isinstance(value, Tensor):
        return type(value).__name__
    where = " on the meta device" if value.is_meta else ""
    return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}{where}"
