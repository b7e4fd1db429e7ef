"""record(model): every value of a forward pass, by name.

Ordinary forward hooks give the output of every module under its path (`decoder.blocks.0.attn.q`); taps give
the few values that are no module's output (`decoder.blocks.0.attn.scores`). All of it is attached from
outside and removed on exit; a model that nobody records holds no trace of this file.

    with record(model, names=["*.attn.weights"], layers=[0]) as values:
        model(tokens)
    values["decoder.blocks.0.attn.weights"]  # (B, H, T, S)
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase

import torch
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
    rounding). Raises ValueError for a compiled model, whose inner values do not exist, or when a recording
    already runs.
    """
    if is_compiled(model):
        raise ValueError(
            "a compiled model has no inner values to record; record the model it was compiled from"
        )
    patterns = None if names is None else list(names)
    wanted_layers = None if layers is None else set(layers)
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
        keep(f"{path[-1]}.{name}" if path and path[-1] else name, value)
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
    block = re.search(r"blocks\.(\d+)", name)
    return layers is None or block is None or int(block.group(1)) in layers


def is_compiled(model: nn.Module) -> bool:
    """Whether `torch.compile` wraps this module or one inside it."""
    return any(isinstance(m, torch._dynamo.OptimizedModule) or m._compiled_call_impl for m in model.modules())
