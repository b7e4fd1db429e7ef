"""One number of a pass and the numbers it was made from; which those are, the rules say.

    value = compute(terms, scale, bias, params)    each term a product of factors, each factor a cell again

The arithmetic that joins them is one of the few in arithmetic.py.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from clearhead.inspector.trace import Node, Trace

Index = tuple[int, ...]


@dataclass(frozen=True)
class Factor:
    """One number that another was made from. `name`: a value, "param:" and a weight, or None: a constant."""

    value: float
    name: str | None = None
    index: Index = ()
    label: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The factor as JSON values."""
        return {"name": self.name, "index": list(self.index), "value": self.value, "label": self.label}


@dataclass(frozen=True)
class Made:
    """What a rule says of one cell. The number is `compute` of the terms; see ARITHMETIC."""

    op: str  # what a reader would call it
    compute: str  # the arithmetic
    terms: tuple[tuple[Factor, ...], ...]  # each a product
    scale: float = 1.0
    bias: Factor | None = None
    params: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    code: dict[str, str] = field(default_factory=dict)  # names in the source line -> what they hold


@dataclass(frozen=True)
class Cell:
    """One number with everything it was made from."""

    name: str
    index: Index
    value: float
    node: Node
    made: Made
    tolerance: float  # how far a sum in another order may be from the recorded value

    def to_dict(self) -> dict[str, Any]:
        """The cell as JSON values."""
        made, node = self.made, self.node
        return {
            "name": self.name,
            "index": list(self.index),
            "axes": list(node.axes),
            "value": self.value,
            "op": made.op,
            "compute": made.compute,
            "terms": [{"factors": [factor.to_dict() for factor in term]} for term in made.terms],
            "scale": made.scale,
            "bias": None if made.bias is None else made.bias.to_dict(),
            "params": made.params,
            "tolerance": self.tolerance,
            "formula": formula(self),
            "note": made.note,
            "source": {"key": node.key, "line": node.line, "code": made.code},
        }


class Unknown(ValueError):
    """No rule tells how this value was made."""


@dataclass(frozen=True)
class Place:
    """A cell that is asked for: what the rules look at."""

    trace: Trace
    node: Node
    index: Index

    @property
    def module(self) -> Any:
        """The module that made the value, or in whose forward the tap stands."""
        return self.trace.modules[self.node.path]

    @property
    def given(self) -> dict[str, Any]:
        """What the module was called with."""
        return self.trace.given[self.node.name if not self.node.tapped else self.node.path or "logits"]

    def below(self, name: str) -> str:
        """The name of a value of this module."""
        return f"{self.node.path}.{name}" if self.node.path else name

    def has(self, name: str) -> bool:
        """Whether the pass made this value of the module."""
        return self.below(name) in self.trace.nodes

    def factor(self, name: str, *index: int, label: str = "") -> Factor:
        """A cell of another value, or of a weight ("param:...")."""
        if name.startswith("param:"):
            values = self.trace.parameters[name.removeprefix("param:")]
        elif name in self.trace.values:
            values = self.trace.values[name]
        else:
            raise Unknown(f"{name} was not kept in this trace")
        index = within(index, values)
        return Factor(float(values[index]), name, index, label)

    def weight(self, name: str, *index: int) -> Factor:
        """A cell of one of the module's own weights."""
        return self.factor(f"param:{self.below(name)}", *index)


def within(index: Index, values: Tensor) -> Index:
    """The index in a value whose axes of size 1 stand for all places."""
    return tuple(0 if size == 1 else i for i, size in zip(index, values.shape, strict=True))


def tolerance(made: Made, dtype: torch.dtype) -> float:
    """8 eps sqrt(n) max|term| of n terms: how far sums in different orders may be apart."""
    largest = max((abs(math.prod(factor.value for factor in term)) for term in made.terms), default=1.0)
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    return 8 * eps * math.sqrt(max(len(made.terms), 1)) * max(largest * abs(made.scale), 1e-30)


def formula(cell: Cell) -> str:
    """The cell's arithmetic as one line of text, with the actual indices."""
    made, here = cell.made, f"{short(cell.name)}{list(cell.index)}"
    first = " · ".join(f"{short(f.name)}{list(f.index)}" if f.name else f.label for f in made.terms[0])
    scale = "" if made.scale == 1 else f" × {made.scale:.6g}"
    bias = "" if made.bias is None else f" + {short(made.bias.name)}{list(made.bias.index)}"
    match made.compute:
        case "same":
            return f"{here} = {first}{scale}"
        case "sum" if len(made.terms) <= 3:
            parts = [
                " · ".join(f"{short(f.name)}{list(f.index)}" if f.name else f.label for f in term)
                for term in made.terms
            ]
            return f"{here} = {' + '.join(parts)}{scale}{bias}"
        case "sum":
            return f"{here} = Σ over {len(made.terms)} of {first} ...{scale}{bias}"
        case _:
            return f"{here} = {made.compute}({first}{' ...' if len(made.terms) > 1 else ''}){scale}"


def short(name: str | None) -> str:
    """The end of a name, which is enough beside the whole one."""
    parts = (name or "").removeprefix("param:").split(".")
    vague = parts[-1] in ("weight", "bias", "input") or parts[-1].isdecimal()
    return ".".join(parts[-2:]) if vague else parts[-1]
