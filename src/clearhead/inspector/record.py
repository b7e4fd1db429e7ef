"""record(model): every value of a forward pass, by name, and changes to them on the way.

Ordinary forward hooks give the output of every module under its path (`decoder.blocks.0.attn.q`); taps give
the few values that are no module's output (`decoder.blocks.0.attn.scores`). All of it is attached from
outside and removed on exit; a model that nobody records holds no trace of this file.

    with record(model, names=["*.attn.weights"], layers=[0]) as values:
        model(tokens)
    values["decoder.blocks.0.attn.weights"]  # (B, H, T, S)

    with record(model, edits=[Edit("decoder.blocks.0.attn.weights", "zero", (None, 2))]) as values:
        model(tokens)  # as if head 2 of layer 0 looked at nothing

A module that is called twice in one pass, such as an embedding of source and target, gives its second output
as `embed.2`.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from jaxtyping import Shaped
from torch import Tensor, nn

from clearhead.model.tap import listen

# The identity in an unused place, and dropout in eval: they show nothing that their input did not.
SILENT = (nn.Identity, nn.Dropout)

EditKind = Literal["zero", "scale", "replace", "mean", "patch"]


@dataclass(frozen=True)
class Edit:
    """A change to one value of a pass, before anything else sees it.

    `at` says where: a number per axis, None for all along it, the rest whole: (None, 2) is head 2 of (B, H,
    T, S). kind:  zero;  scale (times `value`);  replace (by the number or tensor `value`);  mean (over the
    positions, the axis before the last);  patch (by the same place of `value`, the whole value of another
    pass).
    """

    name: str
    kind: EditKind
    at: tuple[int | None, ...] = ()
    value: float | Tensor | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(EditKind):
            raise ValueError(
                f"an edit of kind {self.kind!r} is unknown; known: {', '.join(get_args(EditKind))}"
            )
        if (self.value is None) != (self.kind in ("zero", "mean")):
            raise ValueError(
                f"an edit of kind {self.kind!r} {'takes no' if self.value is not None else 'needs a'} value"
            )
        if self.kind == "scale" and isinstance(self.value, Tensor):
            raise ValueError("an edit of kind 'scale' takes a number")
        if self.kind == "patch" and not isinstance(self.value, Tensor):
            raise ValueError(
                f"an edit of kind 'patch' takes the values of another pass, not {self.value!r:.40}"
            )

    def apply(self, value: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
        """The changed copy; ValueError if the place or the new value does not fit."""
        place = tuple(slice(None) if index is None else index for index in self.at)
        try:
            here = value[place]
            new = self._new(value, here, place)
            changed = value.clone()
            changed[place] = new.to(value.dtype) if isinstance(new, Tensor) else new
        except (IndexError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"the edit of {self.name} at {self.at} does not fit its shape {tuple(value.shape)}: {reason}"
            ) from None
        return changed

    def _new(self, whole: Tensor, here: Tensor, place: tuple[Any, ...]) -> Tensor | float:
        match self.kind:
            case "zero":
                return 0.0
            case "mean":
                if whole.dim() < 2 or not whole.is_floating_point():
                    raise IndexError("it has no positions to take a mean over")
                return whole.mean(-2, keepdim=True).expand_as(whole)[place]
            case "scale":
                assert isinstance(self.value, float | int)
                return here * self.value
            case "patch":
                assert isinstance(self.value, Tensor)
                if self.value.shape != whole.shape:
                    raise IndexError(f"the other value has shape {tuple(self.value.shape)}")
                return self.value[place]
        assert self.value is not None
        return self.value


class Hearer:
    """What listens to a pass; a subclass may look at more than the names and the values."""

    def on_enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A module begins whose output will have this name."""

    def on_value(self, name: str, value: Tensor, module_path: str, tapped: bool) -> Tensor:
        """A value has been made; the answer takes its place."""
        return value


@contextmanager
def hear(model: nn.Module, hearer: Hearer) -> Iterator[None]:
    """Let `hearer` follow every pass of `model` inside the `with` block.

    Raises ValueError for a compiled model, which has no inner values, and when a recording already runs.
    """
    if is_compiled(model):
        raise ValueError(
            "a compiled model has no inner values to record; record the model it was compiled from"
        )
    path: list[str] = []
    calls: Counter[str] = Counter()

    def numbered(name: str, call: int) -> str:
        return name if call == 1 else f"{name}.{call}"

    def count(name: str) -> str:
        calls[name] += 1
        return numbered(name, calls[name])

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not path and not name:
                calls.clear()  # a new pass
            path.append(name)
            name_of_output = name or "logits"
            hearer.on_enter(numbered(name_of_output, calls[name_of_output] + 1), module, args, kwargs)

        return hook

    def leave(name: str) -> Callable[..., Tensor | None]:
        def hook(module: nn.Module, args: object, output: object) -> Tensor | None:
            path.pop()
            if isinstance(output, Tensor) and not isinstance(module, SILENT):
                return hearer.on_value(count(name or "logits"), output, name, tapped=False)
            return None

        return hook

    def listener(name: str, value: Tensor) -> Tensor:
        if not path:  # the tap is not inside this model
            return value
        return hearer.on_value(count(f"{path[-1]}.{name}".removeprefix(".")), value, path[-1], tapped=True)

    with ExitStack() as hooks:
        hooks.enter_context(listen(listener))
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_pre_hook(enter(name), with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave(name), always_call=True).remove)
        yield


class Recorder(Hearer):
    """Keeps the wanted values and applies the edits."""

    def __init__(
        self, patterns: list[str] | None, layers: set[int] | None, edits: Sequence[Edit] = ()
    ) -> None:
        self.patterns, self.layers, self.edits = patterns, layers, edits
        self.values: dict[str, Tensor] = {}
        self.heard: set[str] = set()

    def on_value(self, name: str, value: Tensor, module_path: str, tapped: bool) -> Tensor:
        self.heard.add(name)
        for edit in self.edits:
            if edit.name == name:
                value = edit.apply(value)
        if wanted(name, self.patterns, self.layers):
            self.values[name] = value.detach()
        return value

    def check_edits(self) -> None:
        """Raise ValueError if an edit named a value that no pass made."""
        for edit in self.edits:
            if self.heard and edit.name not in self.heard:
                near = get_close_matches(edit.name, self.heard, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"an edit names {edit.name!r}, which is no value of this pass{hint}")


@contextmanager
def record(
    model: nn.Module,
    names: Iterable[str] | None = None,
    layers: Iterable[int] | None = None,
    edits: Sequence[Edit] = (),
) -> Iterator[dict[str, Tensor]]:
    """Collect the values of each forward pass of `model` inside the `with` block, in the order they are made.

    `names`: shell patterns such as `"*.attn.weights"`; all values if None. `layers`: only these blocks
    (values outside the blocks stay). `edits`: changes to values, in this order; what is recorded is changed.
    Yields a dict from name to value, detached; a second pass overwrites the first. While recording, attention
    works step by step (its result differs from the fused kernel's by rounding). Raises ValueError for a
    compiled model, whose inner values do not exist, for a layer that does not exist, for an edit that does
    not fit, or when a recording already runs.
    """
    recorder = Recorder(None if names is None else list(names), checked_layers(model, layers), edits)
    with hear(model, recorder):
        yield recorder.values
    recorder.check_edits()


def checked_layers(model: nn.Module, layers: Iterable[int] | None) -> set[int] | None:
    """The layers that are asked for; ValueError for one that the model does not have."""
    if layers is None:
        return None
    there, asked = {block_index(name) for name, _ in model.named_modules()} - {None}, set(layers)
    for layer in asked:
        if layer not in there:
            raise ValueError(f"there is no layer {layer}; the model has {len(there)}, counted from 0")
    return asked


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
