"""Weights of the 2017 original in PyTorch's form: `torch.nn.Transformer` between embeddings and an output.

The names are those of PyTorch's translation tutorial, the usual frame around that module: an embedding times
sqrt(d_model) plus sinusoids on either side, and a linear layer of its own to the target's vocabulary. All
sizes but the number of heads can be read from the tensors, and also where the norms stand: final norms are
there or not. (Vaswani et al. 2017, arXiv:1706.03762.)
"""

import re
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer
from clearhead.published.mapping import SPLIT, Class, Family, Row, in_layers, pair_names

_ATTENTION = {
    "in_proj_weight": ("q.weight k.weight v.weight", SPLIT),
    "in_proj_bias": ("q.bias k.bias v.bias", SPLIT),
    "out_proj.*": "o.*",
}


def _layers(stack: str, sublayers: tuple[str, ...]) -> tuple[Row, ...]:
    """The rows of a stack whose layers have these sub-layers; norms stand after them, or before."""
    theirs, ours = f"transformer.{stack}.layers.{{i}}.", f"{stack}.blocks.{{i}}."
    norms = [
        Row(f"{theirs}norm{number}.*", f"{ours}{name}_{place}.*")
        for number, name in enumerate(sublayers, 1)
        for place in ("norm", "post_norm")
    ]
    return (
        *in_layers(f"{theirs}self_attn.", f"{ours}attn.", _ATTENTION),
        *in_layers(f"{theirs}multihead_attn.", f"{ours}cross.", _ATTENTION),
        Row(f"{theirs}linear1.*", f"{ours}ff.up.*"),
        Row(f"{theirs}linear2.*", f"{ours}ff.down.*"),
        *norms,
        Row(f"transformer.{stack}.norm.*", f"{stack}.norm.*"),
    )


ORIGINAL = Family(
    model_type="transformer",
    keys={},  # there is no config.json
    rows=(
        Row("src_tok_emb.embedding.weight", "source_embed.weight"),
        Row("tgt_tok_emb.embedding.weight", "embed.weight"),
        *_layers("encoder", ("attn", "ff")),
        *_layers("decoder", ("attn", "cross", "ff")),
        Row("generator.*", "head.*"),
    ),
    classes={"Seq2SeqTransformer": Class({})},
    ignored=(r"positional_encoding\.pos_embedding",),
)


def load_original_weights(
    state_dict: Mapping[str, Tensor],
    n_heads: int,
    *,
    max_len: int = 512,
    activation: Literal["relu", "gelu"] = "relu",
    norm_first: bool = False,
    norm_eps: float = 1e-5,
) -> Transformer:
    """A Transformer with copies of these weights, in their types and on their device.

    What is asked for here is in no tensor and must be that of training: `n_heads`, `activation`, `norm_first`
    (norms before the sub-layers, not after them) and `norm_eps`. `max_len` bounds generation only. A tensor
    that is missing, left over or of a wrong shape raises ValueError.
    """
    state = {name: tensor for name, tensor in state_dict.items() if not _is_ignored(name)}
    try:
        vocab_size, d_model = state["tgt_tok_emb.embedding.weight"].shape
        source_vocab_size = len(state["src_tok_emb.embedding.weight"])
        widths = [
            len(state[f"transformer.{stack}.layers.0.linear1.weight"]) for stack in ("encoder", "decoder")
        ]
    except KeyError as error:
        raise ValueError(f"these are not the original's weights; missing: {error}") from None
    config = ModelConfig(
        shape="encoder-decoder",
        vocab_size=vocab_size,
        source_vocab_size=source_vocab_size,
        max_len=max_len,
        d_model=d_model,
        n_layers=_count_layers(state, "decoder"),
        n_encoder_layers=_count_layers(state, "encoder"),
        n_heads=n_heads,
        d_ff=widths[1],
        encoder_d_ff=widths[0],
        activation=activation,
        gated=False,
        qkv_bias=True,
        out_bias=True,
        ff_bias=True,
        norm="layer",
        norm_eps=norm_eps,
        norm_placement="pre" if norm_first else "post",
        final_norm="transformer.decoder.norm.weight" in state,
        embed_scale=d_model**0.5,
        positions="sinusoidal",
        tied=False,
        head_bias=True,
    )
    with torch.device("meta"):
        model = Transformer(config)
    ours = dict(model.named_parameters())
    pairs = pair_names(ORIGINAL, "Seq2SeqTransformer", ours)
    names = {name for pair in pairs for name in pair.theirs}
    missing, left_over = sorted(names - state.keys()), sorted(state.keys() - names)
    if missing or left_over:
        raise ValueError(f"these are not the original's weights; missing: {missing}; left over: {left_over}")
    weights: dict[str, Tensor] = {}
    for pair in pairs:
        (fitting,) = pair.op.write([ours[name] for name in pair.ours])
        found = state[pair.theirs[0]]
        if found.shape != fitting.shape:
            raise ValueError(
                f"{pair.theirs[0]} has shape {tuple(found.shape)}; the others ask for {tuple(fitting.shape)}"
            )
        parts = pair.op.read([found.detach()], [tuple(ours[name].shape) for name in pair.ours])
        weights |= zip(pair.ours, (part.clone() for part in parts), strict=True)
    model.load_state_dict(weights, assign=True)
    return model


def _is_ignored(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in ORIGINAL.ignored)


def _count_layers(state: Mapping[str, Tensor], stack: str) -> int:
    numbers = (re.match(rf"transformer\.{stack}\.layers\.(\d+)\.", name) for name in state)
    return max(int(match[1]) for match in numbers if match) + 1
