"""Rules for what every layer is built from: the same number elsewhere, a row of a table, a product with a
matrix, a norm, a sum. A rule takes the place of a number and says which others it was made from.
"""

from collections.abc import Callable

from clearhead.inspector.cells import Index, Made, Place
from clearhead.model.layers import RMSNorm


def same(name: str, index: Index, op: str = "view", at: Place | None = None, scale: float = 1.0) -> Made:
    """The cell is another cell."""
    assert at is not None
    return Made(op, "same", ((at.factor(name, *index),),), scale)


def gather(at: Place) -> Made:
    """A row of a table."""
    row = int(at.trace.ids_of(at.node.name)[at.index[:-1]])
    return Made("gather", "same", ((at.weight("weight", row, at.index[-1]),),), params={"row": row})


def linear(at: Place) -> Made:
    """One output feature: all input features times a row of the matrix, plus a bias."""
    source = at.trace.input_of(at.node.name)
    return product(at, source, at.index[:-1], "weight", "bias", at.index[-1])


def product(at: Place, source: str, place: Index, weight: str, bias: str, row: int) -> Made:
    """x times one row of a matrix of this module, plus a bias if it has one."""
    width = at.trace.parameters[at.below(weight)].shape[-1]
    terms = tuple((at.factor(source, *place, i), at.weight(weight, row, i)) for i in range(width))
    there = at.below(bias) in at.trace.parameters
    return Made("contract", "sum", terms, bias=at.weight(bias, row) if there else None)


def norm(at: Place) -> Made:
    """One feature of a normalised row."""
    module, source, feature = at.module, at.trace.input_of(at.node.name), at.index[-1]
    width = at.trace.values[source].shape[-1]
    gain = at.weight("weight", feature).value
    shift = 0.0
    if isinstance(module, RMSNorm):
        gain += module.offset
    elif module.bias is not None:
        shift = at.weight("bias", feature).value
    params = {
        "kind": "rms" if isinstance(module, RMSNorm) else "layer",
        "eps": module.eps,
        "at": feature,
        "gain": gain,
        "shift": shift,
    }
    terms = tuple((at.factor(source, *at.index[:-1], i),) for i in range(width))
    return Made("norm", "norm", terms, params=params)


def add(at: Place, *names: str) -> Made:
    """A sum of the same cell of several values."""
    return Made("add", "sum", tuple((at.factor(name, *at.index),) for name in names))


def output_of(child: str) -> Callable[[Place], Made]:
    """A module's output is that of its last child."""

    def rule(at: Place) -> Made:
        return same(at.below(child), at.index, at=at)

    return rule
