"""The families of published models as tables: encoder-decoders. The columns: mapping.py."""

import math

from clearhead.model.config import ModelConfig
from clearhead.published.families_encoders import BARE, POST_NORM, SEQUENCE, SPAN, SPANS
from clearhead.published.mapping import FLAT, Class, Family, Json, Key, Part, Row, in_layers
from clearhead.published.quirks import ACTIVATIONS

LM = {"head": "lm", "head_bias": True}

# ------------------------------------------------------------------------------------------- BART and Marian

SCALED_EMBEDDING = Part(
    ("scale_embedding",),
    lambda settings: {
        "embed_scale": math.sqrt(Key("d_model").read(settings)) if settings.get("scale_embedding") else 1.0
    },
    lambda config: {"scale_embedding": config.embed_scale != 1.0},
)
BART_KEYS = {
    "max_len": Key("max_position_embeddings"),
    "d_model": Key("d_model"),
    "n_layers": Key("decoder_layers"),
    "n_encoder_layers": Key("encoder_layers"),
    "n_heads": Key("decoder_attention_heads"),
    "n_encoder_heads": Key("encoder_attention_heads"),
    "d_ff": Key("decoder_ffn_dim"),
    "encoder_d_ff": Key("encoder_ffn_dim"),
    "activation": Key("activation_function", "gelu", ACTIVATIONS),
    "tied": Key("tie_word_embeddings", True),
    "embed_dropout": Key("dropout", 0.1),
    "residual_dropout": Key("dropout", 0.1),
    "attn_dropout": Key("attention_dropout", 0.0),
    "ff_dropout": Key("activation_dropout", 0.0),
}
BART_LAYER = {
    "self_attn.q_proj.*": "attn.q.*",
    "self_attn.k_proj.*": "attn.k.*",
    "self_attn.v_proj.*": "attn.v.*",
    "self_attn.out_proj.*": "attn.o.*",
    "self_attn_layer_norm.*": "attn_post_norm.*",
    "encoder_attn.q_proj.*": "cross.q.*",
    "encoder_attn.k_proj.*": "cross.k.*",
    "encoder_attn.v_proj.*": "cross.v.*",
    "encoder_attn.out_proj.*": "cross.o.*",
    "encoder_attn_layer_norm.*": "cross_post_norm.*",
    "fc1.*": "ff.up.*",
    "fc2.*": "ff.down.*",
    "final_layer_norm.*": "ff_post_norm.*",
}
BART_LAYERS = (
    *in_layers("encoder.layers.{i}.", "encoder.blocks.{i}.", BART_LAYER),
    *in_layers("decoder.layers.{i}.", "decoder.blocks.{i}.", BART_LAYER),
)
BART_LM = (Row("final_logits_bias", "head.bias", FLAT), Row("lm_head.weight", "head.weight"))
BART_IGNORED = (
    r"(model\.)?(encoder|decoder)\.embed_tokens\.weight",
    r"(model\.)?(encoder|decoder)\.version",
    r"lm_head\.weight",
)
BART = Family(
    model_type="bart",
    keys={"vocab_size": Key("vocab_size")} | BART_KEYS,
    parts=(SCALED_EMBEDDING,),
    fixed={
        "shape": "encoder-decoder",
        "positions": "learned",
        "position_offset": 2,
        "embed_norm": True,
        "norm_eps": 1e-5,
    }
    | POST_NORM,
    rows=(
        Row("shared.weight", "embed.weight"),
        Row("encoder.embed_positions.weight", "encoder.positions.weight"),
        Row("decoder.embed_positions.weight", "decoder.positions.weight"),
        Row("encoder.layernorm_embedding.*", "encoder.embed_norm.*"),
        Row("decoder.layernorm_embedding.*", "decoder.embed_norm.*"),
        *BART_LAYERS,
    ),
    classes={
        "BartForConditionalGeneration": Class(LM, BART_LM, "model."),
        "BartModel": Class(BARE),
        "BartForSequenceClassification": Class(
            SEQUENCE | {"pool": "last"},
            (
                Row("classification_head.dense.*", "head.dense.*"),
                Row("classification_head.out_proj.*", "head.out.*"),
            ),
            "model.",
        ),
        "BartForQuestionAnswering": Class(SPAN, SPANS, "model."),
    },
    ignored=BART_IGNORED,
)


def _read_vocabularies(settings: Json) -> Json:
    """One table of embeddings for source and target, or two."""
    source = Key("vocab_size").read(settings)
    if settings.get("share_encoder_decoder_embeddings") is not False:
        return {"vocab_size": source}
    return {"vocab_size": settings.get("decoder_vocab_size") or source, "source_vocab_size": source}


def _write_vocabularies(config: ModelConfig) -> Json:
    source = config.source_vocab_size
    return {
        "vocab_size": config.vocab_size if source is None else source,
        "decoder_vocab_size": config.vocab_size,
        "share_encoder_decoder_embeddings": source is None,
    }


VOCABULARIES = Part(
    ("vocab_size", "decoder_vocab_size", "share_encoder_decoder_embeddings"),
    _read_vocabularies,
    _write_vocabularies,
)
MARIAN = Family(
    model_type="marian",
    keys=BART_KEYS,
    parts=(VOCABULARIES, SCALED_EMBEDDING),
    fixed={"shape": "encoder-decoder", "positions": "sinusoidal_concat", "norm_eps": 1e-5} | POST_NORM,
    rows=(
        Row("shared.weight", "embed.weight", unless="source_embed.weight"),
        Row("encoder.embed_tokens.weight", "source_embed.weight"),
        Row("decoder.embed_tokens.weight", "embed.weight", given="source_embed.weight"),
        *BART_LAYERS,
    ),
    classes={"MarianMTModel": Class(LM, BART_LM, "model."), "MarianModel": Class(BARE)},
    ignored=(*BART_IGNORED, r"(model\.)?(encoder|decoder)\.embed_positions\.weight"),
)

# --------------------------------------------------------------------------------------------------------- T5


def _read_feed_forward(settings: Json) -> Json:
    """ "relu", "gated-silu" ... but a gated gelu is always the tanh form."""
    spelled = settings.get("feed_forward_proj") or "relu"
    *gated, name = str(spelled).split("-")
    if gated not in ([], ["gated"]) or name not in ACTIVATIONS:
        raise ValueError(f"feed_forward_proj={spelled!r:.80} is unknown")
    tanh = gated and name == "gelu"
    return {"gated": bool(gated), "activation": "gelu_tanh" if tanh else ACTIVATIONS[name]}


def _write_feed_forward(config: ModelConfig) -> Json:
    name = next(theirs for theirs, ours in ACTIVATIONS.items() if ours == config.activation)
    if config.gated and config.activation == "gelu_tanh":
        name = "gelu"
    return {"feed_forward_proj": f"gated-{name}" if config.gated else name}


def _read_output(settings: Json) -> Json:
    """Older files say with `tie_word_embeddings: false` also that the outputs are not scaled."""
    tied = settings.get("tie_word_embeddings") is not False
    scaled = settings.get("scale_decoder_outputs")
    scaled = tied if scaled is None else scaled
    return {"tied": tied, "logit_scale": Key("d_model").read(settings) ** -0.5 if scaled else 1.0}


FEED_FORWARD = Part(
    ("feed_forward_proj", "dense_act_fn", "is_gated_act"), _read_feed_forward, _write_feed_forward
)
OUTPUT = Part(
    ("tie_word_embeddings", "scale_decoder_outputs"),
    _read_output,
    lambda config: {
        "tie_word_embeddings": config.tied,
        "scale_decoder_outputs": config.logit_scale != 1.0,
    },
)
T5_ATTENTION = {f"{name}.weight": f"{name}.weight" for name in "qkvo"}


def t5_feed_forward(theirs: str, ours: str) -> tuple[Row, ...]:
    """One matrix before the activation, or two."""
    gate, up = f"{ours}gate.weight", f"{ours}up.weight"
    return (
        Row(f"{theirs}wi.weight", up, unless=gate),
        Row(f"{theirs}wi_0.weight", gate),
        Row(f"{theirs}wi_1.weight", up, given=gate),
        Row(f"{theirs}wo.weight", f"{ours}down.weight"),
    )


def t5_stack(stack: str, ff: int) -> tuple[Row, ...]:
    """The rows of the encoder or the decoder; `ff`: the number of the feed-forward sub-layer."""
    block, theirs = f"{stack}.blocks.{{i}}.", f"{stack}.block.{{i}}.layer."
    return (
        Row(
            f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
            f"{stack}.relative.weight",
        ),
        *in_layers(f"{theirs}0.SelfAttention.", f"{block}attn.", T5_ATTENTION),
        Row(f"{theirs}0.layer_norm.weight", f"{block}attn_norm.weight"),
        *in_layers(f"{theirs}1.EncDecAttention.", f"{block}cross.", T5_ATTENTION),
        Row(f"{theirs}1.layer_norm.weight", f"{block}cross_norm.weight"),
        *t5_feed_forward(f"{theirs}{ff}.DenseReluDense.", f"{block}ff."),
        Row(f"{theirs}{ff}.layer_norm.weight", f"{block}ff_norm.weight"),
        Row(f"{stack}.final_layer_norm.weight", f"{stack}.norm.weight"),
    )


T5 = Family(
    model_type="t5",
    keys={
        "vocab_size": Key("vocab_size"),
        "max_len": Key("n_positions", 512),  # no limit of the model, only what it was trained with
        "d_model": Key("d_model"),
        "n_layers": Key("num_decoder_layers", older=("num_layers",)),
        "n_encoder_layers": Key("num_layers"),
        "n_heads": Key("num_heads"),
        "d_head": Key("d_kv"),
        "d_ff": Key("d_ff"),
        "norm_eps": Key("layer_norm_epsilon", 1e-6),
        "relative_buckets": Key("relative_attention_num_buckets", 32),
        "relative_max_distance": Key("relative_attention_max_distance", 128),
        **dict.fromkeys(
            ("embed_dropout", "attn_dropout", "residual_dropout", "ff_dropout"), Key("dropout_rate", 0.1)
        ),
    },
    parts=(FEED_FORWARD, OUTPUT),
    fixed={"shape": "encoder-decoder", "norm": "rms", "positions": "relative", "attn_scale": 1.0},
    rows=(Row("shared.weight", "embed.weight"), *t5_stack("encoder", ff=1), *t5_stack("decoder", ff=2)),
    classes={
        "T5ForConditionalGeneration": Class({"head": "lm"}, (Row("lm_head.weight", "head.weight"),)),
        "T5Model": Class({"head": "none"}),
    },
    ignored=(
        r"(encoder|decoder)\.embed_tokens\.weight",
        r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
        r"lm_head\.weight",
    ),
)

FAMILIES: dict[str, Family] = {family.model_type: family for family in (MARIAN, BART, T5)}
