"""trace(model, tokens): one pass with all its values, and how each hangs together with the others.

A trace is a recording that also knows, for every value, which module or tap made it, from which values it was
made, what its axes mean, and in which line of which file. `provenance.py` takes it from there.

    t = trace(model, tokens)
    t.values["decoder.blocks.0.attn.scores"]  # (B, H, T, S)
    t.nodes["decoder.blocks.0.attn.scores"].line  # where the model's code names it

What a module is given and no value yet has a name for, such as the sum in front of a norm, is recorded as
`<module>.input`.
"""

import functools
import inspect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

import clearhead
from clearhead.inspector.record import SILENT, Edit, Recorder, checked_layers, hear, wanted
from clearhead.model.transformer import Transformer

PACKAGE = Path(clearhead.__file__).parent
# What stands between a tap and the line that calls it: tap itself, and checkers of shapes.
_BETWEEN = ("tap.py", "_decorator.py", "<@beartype")

# Axes of values by the last part of their name and the number of dimensions; CONVENTIONS 9.
AXES = {
    ("queries", 4): "B H T K",
    ("keys", 4): "B G S K",
    ("values", 4): "B G S K",
    ("scores", 4): "B H T S",
    ("weights", 4): "B H T S",
    ("mixed", 4): "B H T K",
    ("q_norm", 4): "B H T K",
    ("k_norm", 4): "B G S K",
    ("router", 3): "B T E",
    ("scores", 3): "B T E",
    ("weights", 3): "B T k",
    ("chosen", 3): "B T k",
    ("gate", 4): "B T k F",
    ("up", 4): "B T k F",
    ("hidden", 4): "B T k F",
    ("outputs", 4): "B T k D",
    ("relative", 3): "T S H",
    ("hidden", 3): "B T F",
    ("gate", 3): "B T F",
    ("up", 3): "B T F",
    ("head", 3): "B T V",
    ("logits", 3): "B T V",
}


@dataclass(frozen=True)
class Node:
    """Where one value comes from."""

    name: str
    path: str  # of the module that made it, or in whose forward the tap stands
    tapped: bool
    source: str | None  # of a module's output: the name of its first input
    axes: tuple[str, ...]
    key: str  # the file, from the package's folder on, or the name of a foreign file
    line: int


@dataclass
class Trace:
    """The values of one pass, in the order they were made, and their nodes.

    `given`: what modules were called with that is no recorded value: masks, rotations, biases, ids, by the
    name of the argument (positional ones as "0", "1", ...).
    """

    model: nn.Module
    tokens: Int[Tensor, "B T"]
    source_tokens: Int[Tensor, "B S"] | None
    mask: Bool[Tensor, "B T"] | None
    source_mask: Bool[Tensor, "B S"] | None
    edits: tuple[Edit, ...]
    values: dict[str, Tensor] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    given: dict[str, dict[str, Any]] = field(default_factory=dict)

    def input_of(self, path: str) -> str:
        """The name of the value that the module at `path` was given."""
        return self.given[path]["input"]

    def ids_of(self, path: str) -> Int[Tensor, "..."]:
        """The rows that the embedding at `path` was asked for."""
        return self.given[path]["0"]

    @functools.cached_property
    def modules(self) -> dict[str, Any]:
        """Every module by its path."""
        return dict(self.model.named_modules())

    @functools.cached_property
    def parameters(self) -> dict[str, Tensor]:
        """Every parameter and buffer by its name, those that are tied under each of their names."""
        named = [*self.model.named_parameters(remove_duplicate=False), *self.model.named_buffers()]
        return {name: tensor.detach() for name, tensor in named}


class Tracer(Recorder):
    """A recorder that also remembers where each value comes from."""

    def __init__(self, trace: Trace, patterns: list[str] | None, layers: set[int] | None) -> None:
        super().__init__(patterns, layers, trace.edits)
        self.trace, self.values = trace, trace.values
        self.latest: dict[int, str] = {}  # the newest name of each living tensor
        self.alive: list[Tensor] = []  # so that no number of `latest` is used twice

    def on_enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = {str(i): value for i, value in enumerate(args)} | kwargs
        first = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(first, Tensor) and first.is_floating_point():
            if id(first) not in self.latest and not isinstance(module, SILENT):
                given_name = f"{name}.input"
                self.note(first, Node(given_name, name, False, None, axes_of(name, first), *made_at(module)))
                if wanted(given_name, self.patterns, self.layers):
                    self.values[given_name] = first.detach()
            given["input"] = self.latest.get(id(first))
        self.trace.given[name] = given

    def on_value(self, name: str, value: Tensor, module_path: str, tapped: bool) -> Tensor:
        value = super().on_value(name, value, module_path, tapped)
        place = called_from() if tapped else made_at(self.trace.modules[module_path])
        source = None if tapped else self.trace.given[name].get("input")
        self.note(value, Node(name, module_path, tapped, source, axes_of(name, value), *place))
        return value

    def note(self, value: Tensor, node: Node) -> None:
        """Remember where a value comes from."""
        self.latest[id(value)] = node.name
        self.alive.append(value)
        self.trace.nodes[node.name] = node


def trace(
    model: nn.Module,
    tokens: Int[Tensor, "B T"],
    *,
    source: Int[Tensor, "B S"] | None = None,
    mask: Bool[Tensor, "B T"] | None = None,
    source_mask: Bool[Tensor, "B S"] | None = None,
    edits: Sequence[Edit] = (),
    names: Iterable[str] | None = None,
    layers: Iterable[int] | None = None,
) -> Trace:
    """Run the model once, without gradients, and return what happened.

    `source`: what an encoder-decoder reads. `names`, `layers`: which values are kept (all if None); the nodes
    of all are. `edits`: changes on the way. A foreign module is called with the tokens alone. Raises
    ValueError as `record` does.
    """
    made = Trace(model, tokens, source, mask, source_mask, tuple(edits))
    tracer = Tracer(made, None if names is None else list(names), checked_layers(model, layers))
    options: dict[str, Any] = {"mask": mask}
    if source is not None:
        options |= {"source": source, "source_mask": source_mask}
    with torch.no_grad(), hear(model, tracer):
        if isinstance(model, Transformer):
            model(tokens, **options)
        else:
            model(tokens)
    tracer.check_edits()
    return made


def axes_of(name: str, value: Tensor) -> tuple[str, ...]:
    """What each axis of a value means, in the letters of the project's legend; "" where nobody knows."""
    last = [part for part in name.split(".") if not part.isdecimal()][-1]
    known = AXES.get((last, value.dim()))
    if known is None and value.dim() == 3:
        known = "B T D"
    return tuple(known.split()) if known else ("",) * value.dim()


def called_from() -> tuple[str, int]:
    """File and line of the code that called `tap`."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (
        "clearhead/inspector" in frame.f_code.co_filename
        or frame.f_code.co_filename.endswith(_BETWEEN[:2])
        or frame.f_code.co_filename.startswith(_BETWEEN[2])
    ):
        frame = frame.f_back
    return key_of(frame.f_code.co_filename), frame.f_lineno


def made_at(module: nn.Module) -> tuple[str, int]:
    """File and line where a module's forward returns its output."""
    return _made_at(type(module))


@functools.cache
def _made_at(kind: type[nn.Module]) -> tuple[str, int]:
    forward = inspect.unwrap(kind.forward)
    try:
        lines, first = inspect.getsourcelines(forward)
        file = inspect.getsourcefile(forward) or ""
    except (OSError, TypeError):
        return "", 0
    returns = [number for number, line in enumerate(lines) if line.strip().startswith("return ")]
    return key_of(file), first + (returns[-1] if returns else 0)


def key_of(file: str) -> str:
    """A file of the package from its folder on; of another file the name."""
    path = Path(file)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else path.name


def source_text(key: str, module: nn.Module) -> str:
    """The text of a file that a node names; ValueError for a key that no module of this model has."""
    for child in module.modules():
        file = inspect.getsourcefile(type(child))
        if file is not None and key_of(file) == key:
            return Path(file).read_text(encoding="utf-8")
    path = PACKAGE / key
    if key in {file.relative_to(PACKAGE).as_posix() for file in (PACKAGE / "model").glob("*.py")}:
        return path.read_text(encoding="utf-8")
    raise ValueError(f"{key!r:.80} is no file that a value of this model comes from")
