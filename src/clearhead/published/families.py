"""The families of published models as tables: dense decoders. What the columns mean: mapping.py."""

from clearhead.model.config import ModelConfig
from clearhead.published.mapping import SPLIT_TRANSPOSED, TRANSPOSED, Class, Family, Key, Part, Row, in_layers
from clearhead.published.quirks import ACTIVATIONS, rope_part

# ------------------------------------------------------------------------------------------------ shared rows

LABELS = (Row("score.*", "head.out.*"),)
SPANS = (Row("qa_outputs.*", "head.out.*"),)


def decoder_classes(name: str, causal: str | None = None, spans: str | None = None) -> dict[str, Class]:
    """The classes that most decoders have; `spans`: the prefix in the class for question answering, if any."""
    classes = {
        causal or f"{name}ForCausalLM": Class(
            {"head": "lm"}, (Row("lm_head.weight", "head.weight"),), "model."
        ),
        f"{name}Model": Class({"head": "none"}),
        f"{name}ForSequenceClassification": Class(
            {"head": "sequence", "pool": "last", "head_bias": False}, LABELS, "model."
        ),
        f"{name}ForTokenClassification": Class({"head": "token", "head_bias": True}, LABELS, "model."),
    }
    if spans is not None:
        fields = {"head": "span", "n_labels": 2, "head_bias": True}
        classes[f"{name}ForQuestionAnswering"] = Class(fields, SPANS, spans)
    return classes


LLAMA_KEYS = {
    "vocab_size": Key("vocab_size"),
    "max_len": Key("max_position_embeddings"),
    "d_model": Key("hidden_size"),
    "n_layers": Key("num_hidden_layers"),
    "n_heads": Key("num_attention_heads"),
    "n_kv_heads": Key("num_key_value_heads", None),
    "d_head": Key("head_dim", None),
    "d_ff": Key("intermediate_size"),
    "activation": Key("hidden_act", "silu", ACTIVATIONS),
    "norm_eps": Key("rms_norm_eps", 1e-6),
    "tied": Key("tie_word_embeddings", False),
    "attn_dropout": Key("attention_dropout", 0.0),
}
LLAMA_FIXED = {"shape": "decoder", "norm": "rms", "positions": "rotary", "gated": True}
LLAMA_LAYER = {
    "input_layernorm.*": "attn_norm.*",
    "self_attn.q_proj.*": "attn.q.*",
    "self_attn.k_proj.*": "attn.k.*",
    "self_attn.v_proj.*": "attn.v.*",
    "self_attn.o_proj.*": "attn.o.*",
    "post_attention_layernorm.*": "ff_norm.*",
    "mlp.gate_proj.*": "ff.gate.*",
    "mlp.up_proj.*": "ff.up.*",
    "mlp.down_proj.*": "ff.down.*",
}
LLAMA_OUTSIDE = (Row("embed_tokens.weight", "embed.weight"), Row("norm.*", "decoder.norm.*"))
LLAMA_ROWS = LLAMA_OUTSIDE + in_layers("layers.{i}.", "decoder.blocks.{i}.", LLAMA_LAYER)


def _one_bias_for_all(settings: dict) -> dict:
    bias = settings.get("attention_bias") or False
    return {"qkv_bias": bias, "out_bias": bias}


# Biases on q, k, v and o together.
ATTENTION_BIAS = Part(
    ("attention_bias",), _one_bias_for_all, lambda config: {"attention_bias": config.qkv_bias}
)

LLAMA = Family(
    model_type="llama",
    keys=LLAMA_KEYS | {"ff_bias": Key("mlp_bias", False)},
    parts=(rope_part(), ATTENTION_BIAS),
    fixed=LLAMA_FIXED,
    rows=LLAMA_ROWS,
    classes=decoder_classes("Llama", spans="transformer."),
    ignored=(r".*\.rotary_emb\.inv_freq",),
)

# ------------------------------------------------------------------------------------------------------ GPT-2


def _read_gpt2_scale(settings: dict) -> dict:
    return {
        "attn_scale": 1.0 if settings.get("scale_attn_weights") is False else None,
        "attn_scale_by_layer": settings.get("scale_attn_by_inverse_layer_idx") or False,
    }


def _write_gpt2_scale(config: ModelConfig) -> dict:
    return {
        "scale_attn_weights": config.attn_scale is None,
        "scale_attn_by_inverse_layer_idx": config.attn_scale_by_layer,
    }


GPT2_SCALE = Part(
    ("scale_attn_weights", "scale_attn_by_inverse_layer_idx"), _read_gpt2_scale, _write_gpt2_scale
)
GPT2_WIDTH = Part(
    ("n_inner",),
    lambda settings: {"d_ff": settings.get("n_inner") or 4 * Key("n_embd").read(settings)},
    lambda config: {"n_inner": config.d_ff},
)

GPT2 = Family(
    model_type="gpt2",
    keys={
        "vocab_size": Key("vocab_size"),
        "max_len": Key("n_positions", 1024),
        "d_model": Key("n_embd"),
        "n_layers": Key("n_layer"),
        "n_heads": Key("n_head"),
        "activation": Key("activation_function", "gelu_new", {"gelu_new": "gelu_tanh"} | ACTIVATIONS),
        "norm_eps": Key("layer_norm_epsilon", 1e-5),
        "tied": Key("tie_word_embeddings", True),
        "embed_dropout": Key("embd_pdrop", 0.1),
        "attn_dropout": Key("attn_pdrop", 0.1),
        "residual_dropout": Key("resid_pdrop", 0.1),
    },
    parts=(GPT2_SCALE, GPT2_WIDTH),
    fixed={
        "shape": "decoder",
        "norm": "layer",
        "positions": "learned",
        "gated": False,
        "qkv_bias": True,
        "out_bias": True,
        "ff_bias": True,
    },
    refused={"add_cross_attention": (False,)},
    rows=(
        Row("wte.weight", "embed.weight"),
        Row("wpe.weight", "decoder.positions.weight"),
        *in_layers(
            "h.{i}.",
            "decoder.blocks.{i}.",
            {
                "ln_1.*": "attn_norm.*",
                "attn.c_attn.*": ("attn.q.* attn.k.* attn.v.*", SPLIT_TRANSPOSED),
                "attn.c_proj.*": ("attn.o.*", TRANSPOSED),
                "ln_2.*": "ff_norm.*",
                "mlp.c_fc.*": ("ff.up.*", TRANSPOSED),
                "mlp.c_proj.*": ("ff.down.*", TRANSPOSED),
            },
        ),
        Row("ln_f.*", "decoder.norm.*"),
    ),
    classes={
        "GPT2LMHeadModel": Class({"head": "lm"}, (Row("lm_head.weight", "head.weight"),), "transformer."),
        "GPT2Model": Class({"head": "none"}),
        "GPT2ForSequenceClassification": Class(
            {"head": "sequence", "pool": "last", "head_bias": False}, LABELS, "transformer."
        ),
        "GPT2ForTokenClassification": Class(
            {"head": "token", "head_bias": True}, (Row("classifier.*", "head.out.*"),), "transformer."
        ),
        "GPT2ForQuestionAnswering": Class(
            {"head": "span", "n_labels": 2, "head_bias": True}, SPANS, "transformer."
        ),
    },
    ignored=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
)

FAMILIES = {family.model_type: family for family in (LLAMA, GPT2)}
