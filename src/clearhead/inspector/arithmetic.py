"""The few ways in which the numbers of a cell make its value, in float64.

    sum       scale Σ terms + bias         softmax   e^(s - max) / Σ e^(s - max)
    norm      (x - mean) / sqrt(var + eps) gain + shift, or x / sqrt(mean(x^2) + eps) gain

The page has a twin of each in ops.js; both are held against the recorded values.
"""

import math
from collections.abc import Callable
from typing import Any

from clearhead.inspector.cells import Cell, Made
from clearhead.model.heads import HEAD_ACTIVATIONS


def recompute(cell: Cell) -> float:
    """The number again in float64, from what the cell holds alone."""
    return ARITHMETIC[cell.made.compute](cell.made)


def _products(made: Made) -> list[float]:
    return [math.prod(factor.value for factor in term) for term in made.terms]


def _squashed(x: float, cap: float | None) -> float:
    return x if cap is None else cap * math.tanh(x / cap)


def _same(made: Made) -> float:
    return _products(made)[0] * made.scale


def sum_of(made: Made) -> float:
    """Scale times the terms, plus the bias, squashed if there is a cap."""
    total = math.fsum(_products(made)) * made.scale + (0.0 if made.bias is None else made.bias.value)
    return _squashed(total, made.params.get("softcap"))


def _softmax(made: Made) -> float:
    """e^(s - max) / (sum of all e^(s - max) + e^(sink - max)); 0 where nothing may be seen."""
    params = made.params
    biases, allowed = params.get("bias"), params.get("allowed")
    row = [_squashed(x, params.get("softcap")) for x in _products(made)]
    row = [x + (0.0 if biases is None else biases[j]) for j, x in enumerate(row)]
    row = [x if allowed is None or allowed[j] else -math.inf for j, x in enumerate(row)]
    sink = params.get("sink")
    top = max(row) if sink is None else max(*row, sink)
    if row[params["at"]] == -math.inf:
        return 0.0
    total = math.fsum(math.exp(x - top) for x in row) + (0.0 if sink is None else math.exp(sink - top))
    return math.exp(row[params["at"]] - top) / total


def _sigmoid(made: Made) -> float:
    return 1 / (1 + math.exp(-sum_of(made)))


def _norm(made: Made) -> float:
    """(x - mean) / sqrt(var + eps) gain + shift, or x / sqrt(mean(x^2) + eps) gain."""
    row, params = _products(made), made.params
    mean = math.fsum(row) / len(row) if params["kind"] == "layer" else 0.0
    spread = math.fsum((x - mean) ** 2 for x in row) / len(row)
    return (row[params["at"]] - mean) / math.sqrt(spread + params["eps"]) * params["gain"] + params["shift"]


def _unit(made: Made) -> float:
    row = _products(made)
    return row[made.params["at"]] / max(math.sqrt(math.fsum(x * x for x in row)), 1e-12)


def _act(made: Made) -> float:
    return FUNCTIONS[made.params["function"]](_products(made)[0])


def _gate(made: Made) -> float:
    """act(gate) up; with a limit gate sigmoid(slope gate) (up + 1), both clamped."""
    (gate, up), params = (factor.value for factor in made.terms[0]), made.params
    if params.get("limit") is None:
        return FUNCTIONS[params["function"]](gate) * up
    gate, up = min(gate, params["limit"]), min(max(up, -params["limit"]), params["limit"])
    return gate / (1 + math.exp(-params["slope"] * gate)) * (up + 1)


def _route(made: Made) -> float:
    """The chosen expert's score, over the sum of all chosen ones' if they are renormalised."""
    scores, params = _products(made), made.params
    total = math.fsum(scores) + 1e-20 if params["renormalise"] else 1.0
    return scores[params["at"]] / total * made.scale


def _topk(made: Made) -> float:
    """The number of the expert at this rank, by score plus correction, among those that may be chosen."""
    corrections, allowed = made.params.get("correction"), made.params.get("allowed")
    scores = [x + (0.0 if corrections is None else corrections[e]) for e, x in enumerate(_products(made))]
    kept = [e for e in range(len(scores)) if allowed is None or allowed[e]]
    return float(sorted(kept, key=lambda e: -scores[e])[made.params["rank"]])


def _clip(made: Made) -> float:
    limit = made.params["limit"]
    return min(max(_same(made), -limit), limit)


ARITHMETIC: dict[str, Callable[[Made], float]] = {
    "same": _same,
    "sum": sum_of,
    "softmax": _softmax,
    "sigmoid": _sigmoid,
    "norm": _norm,
    "unit": _unit,
    "act": _act,
    "gate": _gate,
    "route": _route,
    "topk": _topk,
    "clip": _clip,
}

FUNCTIONS: dict[str, Callable[[float], float]] = {
    "silu": lambda x: x / (1 + math.exp(-x)) if x > -700 else 0.0,
    "gelu": lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: max(x, 0.0),
    "relu_squared": lambda x: max(x, 0.0) ** 2,
    "tanh": math.tanh,
}


def name_of(function: Callable[..., Any]) -> str:
    """The name of an activation function."""
    names = [name for name, known in HEAD_ACTIVATIONS.items() if known is function]
    return names[0]
