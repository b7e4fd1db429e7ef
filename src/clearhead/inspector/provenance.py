"""How any one number of a pass was made: the operation, the numbers it was made from, and where they stand.

    cell = explain(trace, "decoder.blocks.0.attn.scores", (0, 1, 12, 10))
    cell.terms  # 32 products: query feature times key feature, each a link to explain again
    recompute(cell)  # the same number in float64, from the numbers of the cell alone

Two tables hold all rules: RULES, by the kind of module and for taps by the name they give, and INPUTS, for
what a module is given that has no name of its own. A rule says which cells of which values one cell comes
from; the arithmetic that joins them is one of the few in arithmetic.py, and the page has a twin of each.
"""

from collections.abc import Callable, Sequence

from torch import nn

from clearhead.inspector import rules_attention as attention
from clearhead.inspector import rules_stream as stream
from clearhead.inspector.arithmetic import ARITHMETIC as ARITHMETIC
from clearhead.inspector.arithmetic import recompute as recompute
from clearhead.inspector.cells import Cell as Cell
from clearhead.inspector.cells import Made, Place, tolerance
from clearhead.inspector.cells import Unknown as Unknown
from clearhead.inspector.rules import gather, linear, norm, output_of
from clearhead.inspector.trace import Node, Trace
from clearhead.model.attention import Attention, LatentAttention
from clearhead.model.block import Block
from clearhead.model.experts import Experts, Router
from clearhead.model.heads import Hidden, Pooled, Prepared, TokenLogits
from clearhead.model.layers import Embedding, FeedForward, LayerNorm, Linear, RMSNorm
from clearhead.model.stack import Stack
from clearhead.model.transformer import Transformer


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
            return stream.stack_given
    else:
        last = node.name.removeprefix(f"{node.path}.").split(".")[0] if node.tapped else ""
        for kind in type(module).__mro__:
            if (kind, last) in RULES:
                return RULES[kind, last]
    raise Unknown(f"no rule tells how {node.name} was made: it is the inside of {type(module).__name__}")


# (kind of module, name of the tap or "" for the module's own output) -> the rule
RULES: dict[tuple[type, str], Callable[[Place], Made]] = {
    (Embedding, ""): gather,
    (Linear, ""): linear,
    (Router, ""): linear,
    (LayerNorm, ""): norm,
    (RMSNorm, ""): norm,
    (Attention, ""): output_of("o"),
    (Attention, "q"): attention.projected("q"),
    (Attention, "k"): attention.projected("k"),
    (Attention, "v"): attention.projected("v"),
    (Attention, "queries"): attention.queries,
    (Attention, "keys"): attention.keys,
    (Attention, "values"): attention.values,
    (Attention, "scores"): attention.scores,
    (Attention, "weights"): attention.weights,
    (Attention, "mixed"): attention.mixed,
    (LatentAttention, ""): output_of("o"),
    (LatentAttention, "queries"): attention.latent_queries,
    (LatentAttention, "keys"): attention.latent_keys,
    (LatentAttention, "values"): attention.latent_values,
    (LatentAttention, "scores"): attention.scores,
    (LatentAttention, "weights"): attention.weights,
    (LatentAttention, "mixed"): attention.mixed,
    (FeedForward, ""): output_of("down"),
    (FeedForward, "hidden"): stream.hidden,
    (Experts, ""): stream.combine,
    (Experts, "scores"): stream.expert_scores,
    (Experts, "weights"): stream.expert_weights,
    (Experts, "chosen"): stream.expert_chosen,
    (Experts, "gate"): stream.expert_product("gate"),
    (Experts, "up"): stream.expert_product("up"),
    (Experts, "hidden"): stream.expert_hidden,
    (Experts, "outputs"): stream.expert_product("down"),
    (Block, ""): stream.residual("ff"),
    (Block, "middle"): stream.residual("attn"),
    (Block, "crossed"): stream.residual("cross"),
    (Stack, ""): stream.stack_output,
    (TokenLogits, ""): stream.token_logits,
    (Prepared, ""): stream.head_label,
    (Hidden, ""): stream.nothing_done,
    (Pooled, ""): stream.head_pooled,
    (Transformer, ""): stream.model_output,
    # modules of torch, as foreign models have them
    (nn.Embedding, ""): gather,
    (nn.Linear, ""): linear,
    (nn.LayerNorm, ""): norm,
}

# (kind of the parent, name of the child, * for any) -> the rule of "<child>.input"
INPUTS: dict[tuple[type, str], Callable[[Place], Made]] = {
    (Attention, "o"): attention.merged,
    (Attention, "q_norm"): attention.split_projection("q"),
    (Attention, "k_norm"): attention.split_projection("k"),
    (LatentAttention, "o"): attention.merged,
    (LatentAttention, "kv_a_norm"): attention.latent_part,
    (LatentAttention, "kv_b"): attention.latent_itself,
    (Block, "attn_post_norm"): stream.residual_given("attn"),
    (Block, "cross_post_norm"): stream.residual_given("cross"),
    (Block, "ff_post_norm"): stream.residual_given("ff"),
    (Stack, "embed_norm"): stream.first_stream,
    (nn.ModuleList, "0"): stream.first_stream,
    (Prepared, "*"): stream.head_given,
}
