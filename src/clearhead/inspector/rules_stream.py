"""Where the numbers around an attention come from: feed-forward and experts, the residual stream, the heads.

    hidden = act(gate) up      stream = stream + what a sub-layer adds      logits = stream · rows of the head

Each function is a rule: it takes the place of a number and says which others it was made from.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from clearhead.inspector.arithmetic import name_of, sum_of
from clearhead.inspector.cells import Factor, Made, Place
from clearhead.inspector.rules import add, product, same
from clearhead.model.experts import join_gated, keep_best_groups
from clearhead.model.heads import SequenceLabel
from clearhead.model.position import sinusoidal

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
    row = [sum_of(pooled(i)) for i in range(at.trace.values[at.node.name].shape[-1])]
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
