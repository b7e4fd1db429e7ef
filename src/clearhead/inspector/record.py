"""record(model): every value of a forward pass, by name.

Ordinary forward hooks give the output of every module under its path (`decoder.blocks.0.attn.q`); taps give
the few values that are no module's output (`decoder.blocks.0.attn.scores`). All of it is attached from
outside and removed on exit; a model that nobody records holds no trace of this file.

    with record(model, names=["*.attn.weights"], layers=[0]) as values:
        model(tokens)
    values["decoder.blocks.0.attn.weights"]  # (B, H, T, S)
"""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase

from torch import Tensor, nn

from clearhead.model.tap import listen

# The identity in an unused place, and dropout in eval: they show nothing that their input did not.
_SILENT = (nn.Identity, nn.Dropout)


@contextmanager
def record(
    model: nn.Module,
    names: Iterable[str] | None = None,
    layers: Iterable[int] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Collect the values of each forward pass of `model` inside the `with` block, in the order they are made.

    `names`: shell patterns such as `"*.attn.weights"`; all values if None. `layers`: only these blocks
    (values outside the blocks stay). Yields a dict from name to value, detached; a second pass overwrites the
    first. While recording, attention works step by step (its result differs from the fused kernel's by
    rounding). Raises ValueError for a compiled model, whose inner values do not exist, for a layer that does
    not exist, or when a recording already runs.
    """
    if is_compiled(model):
        raise ValueError(
            "a compiled model has no inner values to record; record the model it was compiled from"
        )
    patterns = None if names is None else list(names)
    wanted_layers = None if layers is None else set(layers)
    blocks = {block_index(name) for name, _ in model.named_modules()} - {None}
    for layer in wanted_layers or ():
        if layer not in blocks:
            raise ValueError(f"there is no layer {layer}; the model has {len(blocks)}, counted from 0")
    values: dict[str, Tensor] = {}
    path: list[str] = []

    def keep(name: str, value: Tensor) -> None:
        if wanted(name, patterns, wanted_layers):
            values[name] = value.detach()

    def enter(name: str):
        def hook(module: nn.Module, args: object) -> None:
            path.append(name)

        return hook

    def leave(name: str):
        def hook(module: nn.Module, args: object, output: object) -> None:
            path.pop()
            if isinstance(output, Tensor) and not isinstance(module, _SILENT):
                keep(name or "logits", output)

        return hook

    def hear(name: str, value: Tensor) -> Tensor:
        if path:  # else the tap is not inside this model
            keep(f"{path[-1]}.{name}".removeprefix("."), value)
        return value

    with ExitStack() as hooks:
        hooks.enter_context(listen(hear))
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(enter(name)).remove)
            hooks.callback(module.register_forward_hook(leave(name), always_call=True).remove)
        yield values


def wanted(name: str, patterns: list[str] | None, layers: set[int] | None) -> bool:
    """Whether the filters let this name through."""
    if patterns is not None and not any(fnmatchcase(name, pattern) for pattern in patterns):
        return False
    block = block_index(name)
    return layers is None or block is None or block in layers


def block_index(name: str) -> int | None:
    """The number of the block a value or module belongs to: "decoder.blocks.3.attn.q" -> 3."""
    found = re.search(r"\bblocks\.(\d+)", name)
    return None if found is None else int(found.group(1))


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` wraps this module or one inside it."""
    dynamo = sys.modules.get("torch._dynamo")  # importing it takes a second; without it nothing is compiled
    wrapper = () if dynamo is None else dynamo.OptimizedModule
    return any(isinstance(m, wrapper) or m._compiled_call_impl is not None for m in model.modules())
