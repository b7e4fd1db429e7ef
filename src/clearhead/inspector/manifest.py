"""What a page has to know of a model before it draws it: stacks, layers, values, parameters. As JSON values.

The manifest is made from one trace, so it names what a pass really produces; a page that draws it knows no
architecture. Its form is frozen by `VERSION`: fields may be added, never changed.
"""

from typing import Any

import torch
from torch import Tensor, nn

from clearhead.inspector.trace import Node, Trace
from clearhead.model.block import Block
from clearhead.model.config import ModelConfig
from clearhead.model.experts import Experts
from clearhead.model.layers import FeedForward
from clearhead.model.stack import Stack
from clearhead.model.transformer import Transformer
from clearhead.text.foreign import AnyTokenizer

VERSION = 1
Json = dict[str, Any]

LENS_HEADS = ("lm", "masked", "token", "span")  # heads that say something at every position


def manifest(
    model: nn.Module,
    tokenizer: AnyTokenizer | None,
    trace: Trace,
    *,
    name: str = "model",
    operations: dict[str, tuple[str, list[str]]] | None = None,
) -> Json:
    """The manifest of a model, from a trace of any text.

    `operations`: value -> what makes it and of which values, where that is known better than from the pass.
    """
    config = getattr(model, "config", None)
    config = config if isinstance(config, ModelConfig) else None
    weight = next(model.parameters(), torch.zeros(0))
    known = operations or {}
    generates = config is not None and config.shape != "encoder" and config.head == "lm"
    return {
        "version": VERSION,
        "name": name,
        "shape": "module" if config is None else config.shape,
        "head": "none" if config is None else config.head,
        "n_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(weight.dtype).removeprefix("torch."),
        "device": str(weight.device),
        "config": None if config is None else config.to_dict(),
        "vocab_size": None if config is None else config.vocab_size,
        "max_len": None if config is None else config.max_len,
        "stacks": [describe_stack(path, stack, trace) for path, stack in stacks_of(model)],
        "values": [describe_value(node, trace, known) for node in trace.nodes.values()],
        "parameters": [
            {"name": path, "shape": list(parameter.shape)} for path, parameter in model.named_parameters()
        ],
        "tokenizer": describe_tokenizer(tokenizer),
        "capabilities": {
            "lens": config is not None and config.head in LENS_HEADS,
            "generate": generates,
            "edit": True,
        },
    }


def describe_tokenizer(tokenizer: AnyTokenizer | None) -> Json | None:
    """The size of a vocabulary and its special tokens."""
    if tokenizer is None:
        return None
    return {"vocab_size": tokenizer.vocab_size, "special": tokenizer.special_tokens}


def stacks_of(model: nn.Module) -> list[tuple[str, Stack]]:
    """The stacks of a Transformer in the order in which they run; none of a foreign module."""
    if not isinstance(model, Transformer):
        return []
    found = [("encoder", model.encoder)] if model.config.shape != "decoder" else []
    return [*found, ("decoder", model.decoder)] if model.config.shape != "encoder" else found


def start_of(path: str, trace: Trace) -> str:
    """The name of what the first block of a stack is given."""
    given = trace.given.get(f"{path}.blocks.0", {}).get("input")
    return given if isinstance(given, str) else f"{path}.blocks.0.input"


def describe_stack(path: str, stack: Stack, trace: Trace) -> Json:
    """One stack: where it starts, its layers from the first on, and its norm."""
    return {
        "name": path,
        "causal": stack.causal,
        "start": start_of(path, trace),
        "norm": f"{path}.norm" if f"{path}.norm" in trace.nodes else None,
        "layers": [
            describe_layer(f"{path}.blocks.{number}", block, stack, number)
            for number, block in enumerate(stack.blocks)
            if isinstance(block, Block)
        ],
    }


def describe_layer(path: str, block: Block, stack: Stack, number: int) -> Json:
    """One layer: the rows of the map it gives, its attentions, its feed-forward layer."""
    crosses = hasattr(block, "cross")
    rows = [{"name": f"{path}.middle", "label": "attention", "added": f"{path}.attn"}]
    window = stack.config.window if stack.windowed[number] else None
    attention = [describe_attention(f"{path}.attn", "self", stack.config, window)]
    if crosses:
        rows.append({"name": f"{path}.crossed", "label": "cross", "added": f"{path}.cross"})
        attention.append(describe_attention(f"{path}.cross", "cross", stack.config, None))
    rows.append({"name": path, "label": "feed-forward", "added": f"{path}.ff"})
    ff: Json = {"path": f"{path}.ff", "kind": "module"}
    if isinstance(block.ff, Experts):
        experts = block.ff.config
        ff |= {"kind": "experts", "n_experts": experts.n_experts, "top_k": experts.top_k}
    elif isinstance(block.ff, FeedForward):
        ff["kind"] = "gated" if "gate" in dict(block.ff.named_children()) else "plain"
    return {"name": path, "rows": rows, "attention": attention, "feed_forward": ff}


def describe_attention(path: str, kind: str, config: ModelConfig, window: int | None) -> Json:
    """One attention: its heads, and the values it names, in the order of the formula."""
    return {
        "path": path,
        "kind": kind,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_heads if config.latent is not None else config.kv_heads,
        "window": window,
        "values": ["queries", "keys", "values", "scores", "weights", "mixed"],
    }


def describe_value(node: Node, trace: Trace, known: dict[str, tuple[str, list[str]]]) -> Json:
    """One value: what makes it, of what, its axes and its shape with letters where the text decides."""
    fallback = ("tap" if node.tapped else "module", [node.source] if node.source else [])
    op, of = known.get(node.name, fallback)
    value = trace.values.get(node.name)
    return {
        "name": node.name,
        "op": op,
        "of": of,
        "axes": list(node.axes),
        "shape": [] if value is None else shape_of(node, value),
        "module": node.path,
        "source": {"key": node.key, "line": node.line},
    }


def shape_of(node: Node, value: Tensor) -> list[int | str]:
    """The sizes of a value; the letters T and S stand where the length of the text decides."""
    axes = node.axes if len(node.axes) == value.dim() else ("",) * value.dim()
    return [axis if axis in ("T", "S") else size for axis, size in zip(axes, value.shape, strict=True)]


def map_rows(stack: Json) -> list[str]:
    """The rows of a stack's map, from the top: its start, then what each layer gives."""
    return [stack["start"], *(row["name"] for layer in stack["layers"] for row in layer["rows"])]
