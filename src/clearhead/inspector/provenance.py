"""How any one number of a pass was made: the operation, the numbers it was made from, and where they stand.

    cell = explain(trace, "decoder.blocks.0.attn.scores", (0, 1, 12, 10))
    cell.terms  # 32 products: query feature times key feature, each a link to explain again
    recompute(cell)  # the same number in float64, from the numbers of the cell alone

Two tables hold all rules: RULES, by the kind of module and for taps by the name they give, and INPUTS, for
what a module is given that has no name of its own. A rule says which cells of which values one cell comes
from; the arithmetic that joins them is one of the few in ARITHMETIC, and the page has a twin of each.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.inspector.trace import Node, Trace
from clearhead.model.attention import Attention, LatentAttention
from clearhead.model.experts import Experts, Router, join_gated, keep_best_groups
from clearhead.model.heads import HEAD_ACTIVATIONS, Hidden, Pooled, Prepared, SequenceLabel, TokenLogits
from clearhead.model.layers import Embedding, FeedForward, LayerNorm, Linear, RMSNorm
from clearhead.model.position import Rotation, sinusoidal
from clearhead.model.transformer import Block, Stack, Transformer

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


def explain(trace: Trace, name: str, index: Sequence[int]) -> Cell:
    """The cell of a value at an index, with everything it was made from.

    Raises ValueError for a value or a place that is not there, and its kind `Unknown` for a value that no
    rule tells about, such as the inside of a foreign module.
    """
    if name not in trace.nodes or name not in trace.values:
        raise ValueError(f"{name!r:.80} is no value of this trace")
    node, values, index = trace.nodes[name], trace.values[name], tuple(index)
    inside = all(0 <= i < size for i, size in zip(index, values.shape, strict=False))
    if len(index) != values.dim() or not inside:
        raise ValueError(f"{name} has shape {tuple(values.shape)}; there is no cell {list(index)}")
    edits = [edit for edit in trace.edits if edit.name == name]
    if edits:
        raise Unknown(f"{name} was edited ({', '.join(edit.kind for edit in edits)}): it was not computed")
    made = find_rule(trace, node)(Place(trace, node, index))
    return Cell(name, index, float(values[index]), node, made, tolerance(made, values.dtype))


def find_rule(trace: Trace, node: Node) -> Callable[[Place], Made]:
    """The rule of a value; `Unknown` if there is none."""
    module = trace.modules[node.path]
    if node.name.endswith(".input"):
        parent, _, child = node.path.rpartition(".")
        for kind in type(trace.modules[parent]).__mro__:
            for known in (child, "*"):
                if (kind, known) in INPUTS:
                    return INPUTS[kind, known]
        if isinstance(module, Stack):
            return stack_given
    else:
        last = node.name.removeprefix(f"{node.path}.").split(".")[0] if node.tapped else ""
        for kind in type(module).__mro__:
            if (kind, last) in RULES:
                return RULES[kind, last]
    raise Unknown(f"no rule tells how {node.name} was made: it is the inside of {type(module).__name__}")


def tolerance(made: Made, dtype: torch.dtype) -> float:
    """8 eps sqrt(n) max|term| of n terms: how far sums in different orders may be apart."""
    largest = max((abs(math.prod(factor.value for factor in term)) for term in made.terms), default=1.0)
    eps = torch.finfo(dtype).eps if dtype.is_floating_point else 0.0
    return 8 * eps * math.sqrt(max(len(made.terms), 1)) * max(largest * abs(made.scale), 1e-30)


# ------------------------------------------------------------------------------------------------- arithmetic


def recompute(cell: Cell) -> float:
    """The number again in float64, from what the cell holds alone."""
    return ARITHMETIC[cell.made.compute](cell.made)


def _products(made: Made) -> list[float]:
    return [math.prod(factor.value for factor in term) for term in made.terms]


def _squashed(x: float, cap: float | None) -> float:
    return x if cap is None else cap * math.tanh(x / cap)


def _same(made: Made) -> float:
    return _products(made)[0] * made.scale


def _sum(made: Made) -> float:
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
    return 1 / (1 + math.exp(-_sum(made)))


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
    "sum": _sum,
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


# ------------------------------------------------------------------------------------------------------ rules


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


def head_of(at: Place, part: str, heads: str, width: int) -> tuple[str, Index]:
    """Where the feature (b, h, t, k) of cut heads stands: in the normed heads, or in the projection."""
    b, h, t, k = at.index
    normed = at.below(heads)
    if normed in at.trace.nodes and at.trace.values[normed].dim() == 4:
        return normed, at.index
    return (normed if normed in at.trace.nodes else at.below(part)), (b, t, h * width + k)


def turned(at: Place, part: str, heads: str) -> Made:
    """A feature of a query or key: clipped, and turned with its partner by the angle of its position."""
    module, rotation = at.module, at.given.get("rotation")
    place = head_of(at, part, heads, module.d_head)
    if rotation is None:
        return clipped(at, *place)
    return turn(at, rotation, place, limit=limit_of(module))


def turn(
    at: Place, rotation: Rotation, place: tuple[str, Index], first: int = 0, limit: float | None = None
) -> Made:
    """x cos - y sin, or y cos + x sin of the pair that the feature belongs to; `first`: where pairs begin."""
    (name, index), (b, _, t, k), pairs = place, at.index, rotation.cos.shape[-1]
    k -= first
    if k >= 2 * pairs:  # this feature stands still
        return clipped(at, name, index)
    half = rotation.layout == "half"
    pair, second = (k % pairs, k >= pairs) if half else (k // 2, bool(k % 2))
    other = index[-1] + (pairs if half else 1) * (-1 if second else 1)
    cos, sin = angle_at(rotation.cos, b, t, pair), angle_at(rotation.sin, b, t, pair)
    own, across = at.factor(name, *index), at.factor(name, *index[:-1], other)
    if limit is not None:
        own, across = (
            Factor(min(max(x.value, -limit), limit), x.name, x.index, "clipped") for x in (own, across)
        )
    terms = (
        (own, Factor(cos, label=f"cos of pair {pair}'s angle at position {t}")),
        (across, Factor(sin if second else -sin, label=f"{'' if second else '-'}sin of the same angle")),
    )
    return Made("rotate", "sum", terms, params={"pair": pair, "angle": math.atan2(sin, cos), "place": t})


def angle_at(values: Tensor, b: int, t: int, pair: int) -> float:
    """A cosine or sine of (..., T, pairs), whose leading sizes may be 1 or missing."""
    values = values[(None,) * (4 - values.dim())]
    return float(values[within((b, 0, t, pair), values)])


def limit_of(module: Attention) -> float | None:
    """The clip of queries, keys and values, if there is one."""
    return getattr(module.limit, "keywords", {}).get("max")


def clipped(at: Place, name: str, index: Index, limit: float | None = None) -> Made:
    """The same cell, clipped if the module clips."""
    limit = limit_of(at.module) if limit is None and isinstance(at.module, Attention) else limit
    if limit is None:
        return same(name, index, at=at)
    return Made("clip", "clip", ((at.factor(name, *index),),), params={"limit": limit})


def queries(at: Place) -> Made:
    """Queries of an attention."""
    return turned(at, "q", "q_norm")


def keys(at: Place) -> Made:
    """Keys of an attention."""
    return turned(at, "k", "k_norm")


def values(at: Place) -> Made:
    """Values: a head's share of the projection."""
    b, g, t, k = at.index
    return clipped(at, at.below("v"), (b, t, g * at.module.d_head + k))


def shared(at: Place, name: str, head: int) -> int:
    """The key/value head that serves a query head."""
    heads = at.trace.values[at.below("queries")].shape[1]
    return head // (heads // at.trace.values[at.below(name)].shape[1])


def scores(at: Place) -> Made:
    """query . key, scaled."""
    b, h, t, s = at.index
    width = at.trace.values[at.below("queries")].shape[-1]
    g, scale = shared(at, "keys", h), at.module.scale
    terms = tuple(
        (at.factor(at.below("queries"), b, h, t, k), at.factor(at.below("keys"), b, g, s, k))
        for k in range(width)
    )
    scale = 1 / math.sqrt(width) if scale is None else scale
    params = {"head": h, "shared_head": g}
    return Made("contract", "sum", terms, scale, params=params, code={"q": "queries", "k": "keys"})


def weights(at: Place) -> Made:
    """Softmax over the keys that may be seen."""
    b, h, t, s = at.index
    row = at.trace.values[at.below("scores")].shape[-1]
    terms = tuple((at.factor(at.below("scores"), b, h, t, j),) for j in range(row))
    allowed = cut(at.given.get("mask"), at.index, row)
    bias = cut(at.given.get("bias"), at.index, row)
    sinks = getattr(at.module, "sinks", None)
    params: dict[str, Any] = {"at": s, "allowed": allowed, "bias": bias}
    params["sink"] = None if sinks is None else at.weight("sinks", h).value
    params["softcap"] = getattr(at.module, "softcap", None)
    note = "" if allowed is None or allowed[s] else why_hidden(at, t, s)
    return Made("softmax", "softmax", terms, params=params, note=note, code={"scores": "scores"})


def cut(values: Tensor | None, index: Index, row: int) -> list[Any] | None:
    """The row of a mask or bias that belongs to a row of the scores (b, h, t)."""
    if values is None:
        return None
    place = [min(i, size - 1) for i, size in zip(index[-values.dim() : -1], values.shape[:-1], strict=True)]
    return values[tuple(place)].expand(row).tolist()


def why_hidden(at: Place, t: int, s: int) -> str:
    """Why a query may not see a key."""
    cross = at.given.get("remembered") is not None
    real = at.trace.source_mask if cross else at.trace.mask
    if real is not None and not bool(real[at.index[0], s]):
        return "masked: the key is padding"
    if s > t:
        return "masked: the key comes after the query (causal)"
    return "masked: the key is outside the window"


def mixed(at: Place) -> Made:
    """The mean of the values by the weights."""
    b, h, t, k = at.index
    g, row = shared(at, "values", h), at.trace.values[at.below("weights")].shape[-1]
    terms = tuple(
        (at.factor(at.below("weights"), b, h, t, s), at.factor(at.below("values"), b, g, s, k))
        for s in range(row)
    )
    code = {"weights": "weights", "v": "values"}
    return Made("contract", "sum", terms, params={"head": h, "shared_head": g}, code=code)


def projected(part: str) -> Callable[[Place], Made]:
    """Queries, keys or values when one product makes all three."""

    def rule(at: Place) -> Made:
        b, t, feature = at.index
        source = at.trace.input_of(at.node.path)
        return product(at, source, (b, t), f"{part}.weight", f"{part}.bias", feature)

    return rule


def output_of(child: str) -> Callable[[Place], Made]:
    """A module's output is that of its last child."""

    def rule(at: Place) -> Made:
        return same(at.below(child), at.index, at=at)

    return rule


def merged(at: Place) -> Made:
    """Features of all heads side by side, made from the mix of each."""
    path = at.node.path.rpartition(".")[0]
    b, t, feature = at.index
    width = at.trace.values[f"{path}.mixed"].shape[-1]
    return same(f"{path}.mixed", (b, feature // width, t, feature % width), at=at)


def split_projection(part: str) -> Callable[[Place], Made]:
    """Heads cut out of a projection, in front of their norm."""

    def rule(at: Place) -> Made:
        path = at.node.path.rpartition(".")[0]
        b, h, t, k = at.index
        return same(f"{path}.{part}", (b, t, h * at.trace.modules[path].d_head + k), at=at)

    return rule


# latent attention: queries and keys are [plain | turned]


def latent_queries(at: Place) -> Made:
    """The plain features of a query, or the turned ones."""
    b, h, t, k = at.index
    sizes = at.module.latent
    source = at.below("q" if sizes.q_rank is None else "q_b")
    place = source, (b, t, h * sizes.d_key + k)
    if k < sizes.d_plain or at.given.get("rotation") is None:
        return same(*place, at=at)
    return turn(at, at.given["rotation"], place, first=sizes.d_plain)


def latent_keys(at: Place) -> Made:
    """The plain features of a key come from the latent, the turned ones are the same in every head."""
    b, h, t, k = at.index
    sizes = at.module.latent
    if k < sizes.d_plain:
        return same(at.below("kv_b"), (b, t, h * (sizes.d_plain + sizes.d_value) + k), at=at)
    place = at.below("kv_a"), (b, t, sizes.kv_rank + k - sizes.d_plain)
    if at.given.get("rotation") is None:
        return same(*place, at=at)
    return turn(at, at.given["rotation"], place, first=sizes.d_plain)


def latent_values(at: Place) -> Made:
    """Values come from the latent."""
    b, h, t, k = at.index
    sizes = at.module.latent
    return same(at.below("kv_b"), (b, t, h * (sizes.d_plain + sizes.d_value) + sizes.d_plain + k), at=at)


def latent_part(at: Place) -> Made:
    """The latent in front of its norm is the first part of kv_a."""
    return same(f"{at.node.path.rpartition('.')[0]}.kv_a", at.index, at=at)


def latent_itself(at: Place) -> Made:
    """What kv_b reads is the normed latent."""
    path = at.node.path.rpartition(".")[0]
    b, t, r = at.index
    four = at.trace.values[f"{path}.kv_a_norm"].dim() == 4
    return same(f"{path}.kv_a_norm", (b, 0, t, r) if four else at.index, at=at)


# feed-forward and experts


def hidden(at: Place) -> Made:
    """act(gate) up, or act(up)."""
    function = {"function": name_of(at.module.activation)}
    up = at.factor(at.below("up"), *at.index)
    if at.has("gate"):
        terms = ((at.factor(at.below("gate"), *at.index), up),)
        return Made("gate", "gate", terms, params=function, code={"gate": "gate", "up": "up"})
    return Made("act", "act", ((up,),), params=function, code={"up": "up"})


def expert_scores(at: Place) -> Made:
    """What the router's logits say of each expert."""
    row = at.trace.values[at.below("router")].shape[-1]
    if at.module.config.router == "sigmoid":
        return Made("sigmoid", "sigmoid", ((at.factor(at.below("router"), *at.index),),))
    terms = tuple((at.factor(at.below("router"), *at.index[:-1], e),) for e in range(row))
    return Made("softmax", "softmax", terms, params={"at": at.index[-1]})


def expert_weights(at: Place) -> Made:
    """The score of a chosen expert, renormalised or not, scaled."""
    config, place = at.module.config, at.index[:-1]
    chosen = at.trace.values[at.below("chosen")][place].tolist()
    terms = tuple((at.factor(at.below("scores"), *place, e),) for e in chosen)
    params = {"at": at.index[-1], "renormalise": config.renormalise, "chosen": chosen}
    return Made("route", "route", terms, config.weight_scale, params=params)


def expert_chosen(at: Place) -> Made:
    """The expert at this rank."""
    config, place = at.module.config, at.index[:-1]
    terms = tuple((at.factor(at.below("scores"), *place, e),) for e in range(config.n_experts))
    params: dict[str, Any] = {"rank": at.index[-1]}
    if config.correction_bias:
        params["correction"] = at.trace.parameters[at.below("router.correction")].tolist()
    if config.top_groups < config.n_groups:
        row = at.trace.values[at.below("scores")][place] + torch.tensor(params.get("correction", 0.0))
        params["allowed"] = keep_best_groups(row, config.n_groups, config.top_groups).isfinite().tolist()
    return Made("topk", "topk", terms, params=params)


def expert_product(part: str) -> Callable[[Place], Made]:
    """A feature of one chosen expert: what it reads times a row of its own matrix."""

    def rule(at: Place) -> Made:
        b, t, k, row = at.index
        expert = int(at.trace.values[at.below("chosen")][b, t, k])
        source, place = at.trace.input_of(at.node.path), (b, t)
        if part == "down":
            source, place = at.below("hidden"), (b, t, k)
        width = at.trace.parameters[at.below(part)].shape[-1]
        terms = tuple((at.factor(source, *place, i), at.weight(part, expert, row, i)) for i in range(width))
        there = at.below(f"{part}_bias") in at.trace.parameters
        bias = at.weight(f"{part}_bias", expert, row) if there else None
        return Made("contract", "sum", terms, bias=bias, params={"expert": expert})

    return rule


def expert_hidden(at: Place) -> Made:
    """act(gate) up inside an expert."""
    config, module = at.module.config, at.module
    terms = ((at.factor(at.below("gate"), *at.index), at.factor(at.below("up"), *at.index)),)
    params = {"function": name_of(module.activation)}
    if module.join is not join_gated:
        params |= {"limit": config.limit, "slope": config.limit_slope}
    return Made("gate", "gate", terms, params=params, code={"gate": "gate", "up": "up"})


def combine(at: Place) -> Made:
    """The chosen experts' outputs by their weights, and the shared expert's."""
    b, t, d = at.index
    terms: list[tuple[Factor, ...]] = [
        (at.factor(at.below("weights"), b, t, k), at.factor(at.below("outputs"), b, t, k, d))
        for k in range(at.module.config.top_k)
    ]
    if at.has("shared_gate"):
        gate = at.factor(at.below("shared_gate"), b, t, 0)
        share = Factor(1 / (1 + math.exp(-gate.value)), gate.name, gate.index, "sigmoid of the shared gate")
        terms.append((share, at.factor(at.below("shared"), b, t, d)))
    elif at.has("shared"):
        terms.append((at.factor(at.below("shared"), b, t, d),))
    return Made("combine", "sum", tuple(terms))


# blocks, stacks and the model


def add(at: Place, *names: str) -> Made:
    """A sum of the same cell of several values."""
    return Made("add", "sum", tuple((at.factor(name, *at.index),) for name in names))


def branch(at: Place, path: str, part: str) -> str:
    """What a sub-layer adds to the stream: its output, or that output normed."""
    normed = f"{path}.{part}_out_norm"
    return normed if normed in at.trace.nodes else f"{path}.{part}"


def before(at: Place, path: str, part: str) -> str:
    """The stream that a sub-layer of a block is added to."""
    stream = {"attn": at.trace.input_of(path), "cross": f"{path}.middle"}
    crossed = f"{path}.crossed"
    return stream.get(part) or (crossed if crossed in at.trace.nodes else f"{path}.middle")


def residual(part: str) -> Callable[[Place], Made]:
    """The stream plus a sub-layer, or the norm of that sum."""

    def rule(at: Place) -> Made:
        path = at.node.path
        normed = f"{path}.{part}_post_norm"
        if normed in at.trace.nodes:
            return same(normed, at.index, at=at)
        return add(at, before(at, path, part), branch(at, path, part))

    return rule


def residual_given(part: str) -> Callable[[Place], Made]:
    """The sum in front of a norm after the addition."""

    def rule(at: Place) -> Made:
        path = at.node.path.rpartition(".")[0]
        return add(at, before(at, path, part), branch(at, path, part))

    return rule


def first_stream(at: Place) -> Made:
    """What the first block, or the norm in front of it, reads: embeddings and what is added to them."""
    path = at.node.path.split(".")[0]
    stack, (_, t, d) = at.trace.modules[path], at.index
    terms = [(at.factor(at.trace.input_of(path), *at.index),)]
    positions = at.trace.values.get(f"{path}.positions")
    if positions is not None:
        place = at.index if positions.dim() == 3 else (t, d)
        terms.append((at.factor(f"{path}.positions", *place),))
    kind = stack.config.positions
    if kind.startswith("sinusoidal"):
        placed = placed_at(at, t)
        wave = sinusoidal(torch.tensor([placed]), stack.config.d_model, kind == "sinusoidal_concat")
        terms.append((Factor(float(wave[0, d]), label=f"sinusoid of position {placed}"),))
    if f"{path}.types" in at.trace.values:
        terms.append((at.factor(f"{path}.types", *at.index),))
    return Made("add", "sum", tuple(terms))


def placed_at(at: Place, t: int) -> int:
    """The position of token t: how many real tokens stand before it."""
    reads_source = at.node.path.startswith("encoder") and at.trace.source_tokens is not None
    real = at.trace.source_mask if reads_source else at.trace.mask
    return t if real is None else max(int(real[at.index[0], : t + 1].sum()) - 1, 0)


def stack_given(at: Place) -> Made:
    """Token embeddings times the model's factor."""
    reads_source = at.node.path == "encoder" and at.trace.source_tokens is not None
    name = "embed"
    if reads_source and "source_embed" in at.trace.nodes:
        name = "source_embed"
    elif not reads_source and "embed.2" in at.trace.nodes:
        name = "embed.2"
    config = at.trace.modules[at.node.path].config
    return same(name, at.index, "scale", at, config.embed_scale)


def stack_output(at: Place) -> Made:
    """The final norm, or the last block."""
    last = f"{at.node.path}.norm"
    if last not in at.trace.nodes:
        last = f"{at.node.path}.blocks.{len(at.module.blocks) - 1}"
    return same(last, at.index, at=at)


def token_logits(at: Place) -> Made:
    """The last hidden state times a row of the embedding or head, plus a bias, squashed."""
    head = at.module
    source = prepared_of(at, at.trace.input_of(at.node.name))
    made = product(at, source, at.index[:-1], "weight", "bias", at.index[-1])
    params = {} if head.softcap is None else {"softcap": head.softcap}
    return Made(made.op, made.compute, made.terms, head.scale, made.bias, params)


def prepared_of(at: Place, source: str) -> str:
    """What a head's output reads: the hidden states, or what its own layers make of them."""
    if at.has("norm"):
        return at.below("norm")
    return source if at.module.prepare.__name__ == "keep" else at.below("prepared")


def head_label(at: Place) -> Made:
    """A classifier's logits."""
    return same(at.below("out"), at.index, at=at)


def head_pooled(at: Place) -> Made:
    """A pooled vector, of length 1 if the head says so."""
    pooled = pooled_row(at, at.trace.input_of(at.node.name))
    if isinstance(at.module.finish, nn.Identity):
        return pooled(at.index[-1])
    row = [_sum(pooled(i)) for i in range(at.trace.values[at.node.name].shape[-1])]
    terms = tuple((Factor(x, label=f"feature {i} of the pooled vector"),) for i, x in enumerate(row))
    return Made("unit", "unit", terms, params={"at": at.index[-1]})


def pooled_row(at: Place, source: str) -> Callable[[int], Made]:
    """One feature of the position, or the mean of the positions, that stands for a sequence."""
    path = at.node.path
    while getattr(at.trace.modules[path], "pool", None) is None:
        path = path.rpartition(".")[0]
    pool = at.trace.modules[path].pool
    b, length = at.index[0], at.trace.values[source].shape[1]
    real = [True] * length if at.trace.mask is None else at.trace.mask[b].tolist()
    places = [t for t in range(length) if real[t]]
    chosen = {"pool_first": places[:1], "pool_last": places[-1:]}.get(pool.__name__, places)

    def feature(i: int) -> Made:
        terms = tuple((at.factor(source, b, t, i),) for t in chosen)
        return Made("mean" if len(chosen) > 1 else "view", "sum", terms, 1 / len(chosen))

    return feature


def head_given(at: Place) -> Made:
    """What the layers of a head read: hidden states, pooled in a head for sequences, or activated."""
    path, _, child = at.node.path.rpartition(".")
    head = at.trace.modules[path]
    if child != "dense" and f"{path}.dense" in at.trace.nodes:
        terms = ((at.factor(f"{path}.dense", *at.index),),)
        return Made("act", "act", terms, params={"function": name_of(head.activation)})
    source = at.trace.input_of(path)
    if isinstance(head, SequenceLabel):
        return pooled_row(at, source)(at.index[-1])
    return same(source, at.index, at=at)


def nothing_done(at: Place) -> Made:
    """The output is the input."""
    return same(at.trace.input_of(at.node.name), at.index, at=at)


def model_output(at: Place) -> Made:
    """The head's output."""
    return same("head", at.index, at=at)


# (kind of module, name of the tap or "" for the module's own output) -> the rule
RULES: dict[tuple[type, str], Callable[[Place], Made]] = {
    (Embedding, ""): gather,
    (Linear, ""): linear,
    (Router, ""): linear,
    (LayerNorm, ""): norm,
    (RMSNorm, ""): norm,
    (Attention, ""): output_of("o"),
    (Attention, "q"): projected("q"),
    (Attention, "k"): projected("k"),
    (Attention, "v"): projected("v"),
    (Attention, "queries"): queries,
    (Attention, "keys"): keys,
    (Attention, "values"): values,
    (Attention, "scores"): scores,
    (Attention, "weights"): weights,
    (Attention, "mixed"): mixed,
    (LatentAttention, ""): output_of("o"),
    (LatentAttention, "queries"): latent_queries,
    (LatentAttention, "keys"): latent_keys,
    (LatentAttention, "values"): latent_values,
    (LatentAttention, "scores"): scores,
    (LatentAttention, "weights"): weights,
    (LatentAttention, "mixed"): mixed,
    (FeedForward, ""): output_of("down"),
    (FeedForward, "hidden"): hidden,
    (Experts, ""): combine,
    (Experts, "scores"): expert_scores,
    (Experts, "weights"): expert_weights,
    (Experts, "chosen"): expert_chosen,
    (Experts, "gate"): expert_product("gate"),
    (Experts, "up"): expert_product("up"),
    (Experts, "hidden"): expert_hidden,
    (Experts, "outputs"): expert_product("down"),
    (Block, ""): residual("ff"),
    (Block, "middle"): residual("attn"),
    (Block, "crossed"): residual("cross"),
    (Stack, ""): stack_output,
    (TokenLogits, ""): token_logits,
    (Prepared, ""): head_label,
    (Hidden, ""): nothing_done,
    (Pooled, ""): head_pooled,
    (Transformer, ""): model_output,
    # modules of torch, as foreign models have them
    (nn.Embedding, ""): gather,
    (nn.Linear, ""): linear,
    (nn.LayerNorm, ""): norm,
}

# (kind of the parent, name of the child, * for any) -> the rule of "<child>.input"
INPUTS: dict[tuple[type, str], Callable[[Place], Made]] = {
    (Attention, "o"): merged,
    (Attention, "q_norm"): split_projection("q"),
    (Attention, "k_norm"): split_projection("k"),
    (LatentAttention, "o"): merged,
    (LatentAttention, "kv_a_norm"): latent_part,
    (LatentAttention, "kv_b"): latent_itself,
    (Block, "attn_post_norm"): residual_given("attn"),
    (Block, "cross_post_norm"): residual_given("cross"),
    (Block, "ff_post_norm"): residual_given("ff"),
    (Stack, "embed_norm"): first_stream,
    (nn.ModuleList, "0"): first_stream,
    (Prepared, "*"): head_given,
}


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
