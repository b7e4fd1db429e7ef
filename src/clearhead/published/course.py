"""Weights under the names of course CS336, assignment 1.

The course's language model is a decoder with RMSNorm before each sub-layer, SwiGLU, as many key/value heads
as query heads, rotary positions over neighbouring features, and a head of its own. All sizes but the number
of heads can be read from the tensors. Its names and ours differ, the numbers do not:

    token_embeddings                        embed
    layers.0.attn.{q,k,v,output}_proj       decoder.blocks.0.attn.{q,k,v,o}
    layers.0.{ln1,ln2}                      decoder.blocks.0.{attn_norm,ff_norm}
    layers.0.ffn.{w1,w3,w2}                 decoder.blocks.0.ff.{gate,up,down}
    ln_final                                decoder.norm
    lm_head                                 head
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer

_OUTSIDE = {
    "token_embeddings.weight": "embed.weight",
    "ln_final.weight": "decoder.norm.weight",
    "lm_head.weight": "head.weight",
}
_IN_BLOCK = {
    "attn.q_proj.weight": "attn.q.weight",
    "attn.k_proj.weight": "attn.k.weight",
    "attn.v_proj.weight": "attn.v.weight",
    "attn.output_proj.weight": "attn.o.weight",
    "ln1.weight": "attn_norm.weight",
    "ln2.weight": "ff_norm.weight",
    "ffn.w1.weight": "ff.gate.weight",
    "ffn.w3.weight": "ff.up.weight",
    "ffn.w2.weight": "ff.down.weight",
}


def load_course_weights(
    state_dict: Mapping[str, Tensor],
    n_heads: int,
    max_len: int = 1024,
    rotary_theta: float = 10_000.0,
) -> Transformer:
    """A Transformer with copies of these weights, in their types and on their device.

    `n_heads`, `max_len` (the course's context_length) and `rotary_theta` are in no tensor and must be those
    of training. A tensor that is missing, left over or of a wrong shape raises ValueError.
    """
    blocks = [int(match[1]) for name in state_dict if (match := re.match(r"layers\.(\d+)\.", name))]
    n_layers = max(blocks, default=0) + 1
    names = course_names(n_layers)
    missing, left_over = sorted(names.keys() - state_dict), sorted(state_dict.keys() - names)
    if missing or left_over:
        raise ValueError(f"these are not the course's weights; missing: {missing}; left over: {left_over}")

    vocab_size, d_model = state_dict["token_embeddings.weight"].shape
    config = ModelConfig(
        vocab_size=vocab_size,
        max_len=max_len,
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        d_ff=len(state_dict["layers.0.ffn.w1.weight"]),
        norm_eps=1e-5,
        rotary_theta=rotary_theta,
        rotary_layout="interleaved",
        tied=False,
    )
    with torch.device("meta"):
        model = Transformer(config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for name, ours in names.items():
        found, fitting = tuple(state_dict[name].shape), tuple(shapes[ours])
        if found != fitting:
            raise ValueError(f"{name} has shape {found}; the other tensors ask for {fitting}")
    weights = {ours: state_dict[name].detach().clone() for name, ours in names.items()}
    model.load_state_dict(weights, assign=True)
    return model


def course_names(n_layers: int) -> dict[str, str]:
    """The course's name of every tensor -> ours."""
    names = dict(_OUTSIDE)
    for index in range(n_layers):
        for theirs, ours in _IN_BLOCK.items():
            names[f"layers.{index}.{theirs}"] = f"decoder.blocks.{index}.{ours}"
    return names
