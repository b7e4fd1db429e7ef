"""Weights of the 2017 original in PyTorch: encoder and decoder between embeddings and an output layer.

They come under two sets of names, each a table here:

    transformer.encoder.layers.0.linear1.weight            PyTorch's translation tutorial, the usual frame
                                                           around `torch.nn.Transformer`; sinusoids
    encoder.layers.0.positionwise_feedforward.fc_1.weight  the much copied lessons of bentrevett's
                                                           pytorch-seq2seq; a learned table of positions

In both the embeddings are multiplied by sqrt(d_model), and a linear layer of its own leads to the target's
vocabulary. All sizes but the number of heads can be read from the tensors, and also where the norms stand:
final norms are there or not. (Vaswani et al. 2017, arXiv:1706.03762.)
"""

import re
from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Shaped
from torch import Tensor

from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer
from clearhead.published.mapping import SPLIT, Class, Family, Json, Op, Row, in_layers, pair_names

MAX_LEN = 512  # of a model with sinusoids, if not said


def layer_rows(
    layer: str, rows: Mapping[str, str | tuple[str, Op]], norms: Mapping[str, Mapping[str, str]]
) -> tuple[Row, ...]:
    """The rows of both stacks: `rows` in every layer, and its norms, which stand after a sub-layer or before.

    layer: how the names of a layer begin. norms: stack -> name of a norm -> our sub-layer.
    """
    made: list[Row] = []
    for stack, places in norms.items():
        theirs, ours = layer.replace("{stack}", stack), f"{stack}.blocks.{{i}}."
        made += in_layers(theirs, ours, rows)
        for kind in ("norm", "post_norm"):
            made += in_layers(theirs, ours, {f"{name}.*": f"{sub}_{kind}.*" for name, sub in places.items()})
    return tuple(made)


TUTORIAL = Family(
    model_type="PyTorch's tutorial",
    keys={},  # there is no config.json
    rows=(
        Row("src_tok_emb.embedding.weight", "source_embed.weight"),
        Row("tgt_tok_emb.embedding.weight", "embed.weight"),
        *layer_rows(
            "transformer.{stack}.layers.{i}.",
            {
                "self_attn.in_proj_weight": ("attn.q.weight attn.k.weight attn.v.weight", SPLIT),
                "self_attn.in_proj_bias": ("attn.q.bias attn.k.bias attn.v.bias", SPLIT),
                "self_attn.out_proj.*": "attn.o.*",
                "multihead_attn.in_proj_weight": ("cross.q.weight cross.k.weight cross.v.weight", SPLIT),
                "multihead_attn.in_proj_bias": ("cross.q.bias cross.k.bias cross.v.bias", SPLIT),
                "multihead_attn.out_proj.*": "cross.o.*",
                "linear1.*": "ff.up.*",
                "linear2.*": "ff.down.*",
            },
            norms={
                "encoder": {"norm1": "attn", "norm2": "ff"},
                "decoder": {"norm1": "attn", "norm2": "cross", "norm3": "ff"},
            },
        ),
        Row("transformer.encoder.norm.*", "encoder.norm.*"),
        Row("transformer.decoder.norm.*", "decoder.norm.*"),
        Row("generator.*", "head.*"),
    ),
    classes={"Seq2SeqTransformer": Class({})},
    ignored=(r"positional_encoding\.pos_embedding",),
)

LESSONS = Family(
    model_type="bentrevett's lessons",
    keys={},
    rows=(
        Row("encoder.tok_embedding.weight", "source_embed.weight"),
        Row("encoder.pos_embedding.weight", "encoder.positions.weight"),
        Row("decoder.tok_embedding.weight", "embed.weight"),
        Row("decoder.pos_embedding.weight", "decoder.positions.weight"),
        *layer_rows(
            "{stack}.layers.{i}.",
            {
                "self_attention.fc_q.*": "attn.q.*",
                "self_attention.fc_k.*": "attn.k.*",
                "self_attention.fc_v.*": "attn.v.*",
                "self_attention.fc_o.*": "attn.o.*",
                "encoder_attention.fc_q.*": "cross.q.*",
                "encoder_attention.fc_k.*": "cross.k.*",
                "encoder_attention.fc_v.*": "cross.v.*",
                "encoder_attention.fc_o.*": "cross.o.*",
                "positionwise_feedforward.fc_1.*": "ff.up.*",
                "positionwise_feedforward.fc_2.*": "ff.down.*",
            },
            norms={
                "encoder": {"self_attn_layer_norm": "attn", "ff_layer_norm": "ff"},
                "decoder": {
                    "self_attn_layer_norm": "attn",
                    "enc_attn_layer_norm": "cross",
                    "ff_layer_norm": "ff",
                },
            },
        ),
        Row("decoder.fc_out.*", "head.*"),
    ),
    classes={"Seq2Seq": Class({})},
)


def load_original_weights(
    state_dict: Mapping[str, Tensor],
    n_heads: int,
    *,
    max_len: int | None = None,
    activation: Literal["relu", "gelu"] = "relu",
    norm_first: bool = False,
    norm_eps: float = 1e-5,
) -> Transformer:
    """A Transformer with copies of these weights, in their types and on their device, in eval mode.

    What is asked for here is in no tensor and must be that of training: `n_heads`, `activation`, `norm_first`
    (norms before the sub-layers, not after them) and `norm_eps`. `max_len` bounds generation only (512 if
    None); a table of positions has its own. A tensor that is missing, left over or of a wrong shape raises
    ValueError.

        state = torch.load("model.pt", map_location="cpu", weights_only=True)
        model = load_original_weights(state, n_heads=8)
        reply = generate(model, source_ids, start_id=2, eos_id=3)
    """
    family, class_name = find_naming(state_dict)
    state = {name: tensor for name, tensor in state_dict.items() if not _is_ignored(family, name)}
    config = ModelConfig(
        shape="encoder-decoder",
        **read_sizes(family, state, max_len),
        n_heads=n_heads,
        activation=activation,
        gated=False,
        qkv_bias=True,
        out_bias=True,
        ff_bias=True,
        norm="layer",
        norm_eps=norm_eps,
        norm_placement="pre" if norm_first else "post",
        tied=False,
        head_bias=True,
    )
    with torch.device("meta"):
        model = Transformer(config)
    ours = dict(model.named_parameters())
    pairs = pair_names(family, class_name, ours)
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
    return model.eval()


def find_naming(state: Mapping[str, Shaped[Tensor, "..."]]) -> tuple[Family, str]:
    """The table of names that fits, by the target's embedding, and its class."""
    for family in (TUTORIAL, LESSONS):
        if _theirs(family)["embed.weight"] in state:
            return family, next(iter(family.classes))
    known = " nor ".join(_theirs(family)["embed.weight"] for family in (TUTORIAL, LESSONS))
    raise ValueError(f"these are not the original's weights: there is neither {known}")


def read_sizes(family: Family, state: Mapping[str, Shaped[Tensor, "..."]], max_len: int | None) -> Json:
    """The fields of the config that the tensors tell."""
    theirs = _theirs(family)
    layers: dict[str, list[Tensor]] = {}
    for stack in ("encoder", "decoder"):
        up = theirs[f"{stack}.blocks.{{i}}.ff.up.*"].replace("*", "weight")
        pattern = re.escape(up).replace(r"\{i\}", r"\d+")
        layers[stack] = [tensor for name, tensor in state.items() if re.fullmatch(pattern, name)]
        if not layers[stack]:
            raise ValueError(f"these are not the original's weights; missing: {up.replace('{i}', '0')}")
    source = theirs["source_embed.weight"]
    if source not in state:
        raise ValueError(f"these are not the original's weights; missing: {source}")
    vocab_size, d_model = state[theirs["embed.weight"]].shape
    sizes: Json = {
        "vocab_size": vocab_size,
        "source_vocab_size": len(state[source]),
        "max_len": MAX_LEN if max_len is None else max_len,
        "d_model": d_model,
        "n_layers": len(layers["decoder"]),
        "n_encoder_layers": len(layers["encoder"]),
        "d_ff": len(layers["decoder"][0]),
        "encoder_d_ff": len(layers["encoder"][0]),
        "final_norm": theirs.get("decoder.norm.*", "").replace("*", "weight") in state,
        "embed_scale": d_model**0.5,
        "positions": "sinusoidal",
    }
    if "decoder.positions.weight" not in theirs:
        return sizes
    table = state.get(theirs["decoder.positions.weight"])
    if table is None:
        raise ValueError(
            f"these are not the original's weights; missing: {theirs['decoder.positions.weight']}"
        )
    if max_len not in (None, len(table)):
        raise ValueError(f"max_len={max_len}, but these weights have a table of {len(table)} positions")
    return sizes | {"positions": "learned", "max_len": len(table)}


def _theirs(family: Family) -> dict[str, str]:
    """Our names, with their templates, -> the family's."""
    return {row.ours: row.theirs for row in family.rows}


def _is_ignored(family: Family, name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in family.ignored)
