"""The families of published models as tables: dense decoders. What the columns mean: mapping.py.

Each family is one value in capitals, under a heading of its own; most differ from LLAMA in a few entries.

    here                      LLAMA  MISTRAL  QWEN2  QWEN3  SMOLLM3  GEMMA  GEMMA2  GEMMA3  PHI3  OLMO2
                              OLMO3  GPT2
    families_experts.py       MIXTRAL  QWEN2_MOE  QWEN3_MOE  OLMOE  DEEPSEEK3  GPT_OSS
    families_encoders.py      BERT  ROBERTA  DISTILBERT  MODERNBERT
    families_encoder_decoders.py  BART  MARIAN  T5
    original.py, course.py    weights without a config.json

How a key is read that one entry does not tell (rotary positions, windows) stands in quirks.py.
"""

import math

from clearhead.model.config import ModelConfig
from clearhead.published.mapping import (
    SPLIT,
    SPLIT_TRANSPOSED,
    TRANSPOSED,
    Class,
    Family,
    Json,
    Key,
    Part,
    Row,
    in_layers,
)
from clearhead.published.quirks import (
    ACTIVATIONS,
    layered_rope_part,
    partial_rope_part,
    rope_part,
    window_part,
)

# ---------------------------------------------------------------------------------------- classes and heads

LM_HEAD = (Row("lm_head.weight", "head.weight"),)
SCORES = (Row("score.*", "head.out.*"),)
SPANS = (Row("qa_outputs.*", "head.out.*"),)


def decoder_classes(name: str, kinds: str, spans: str = "model.") -> dict[str, Class]:
    """The classes that most decoders have; `spans`: the prefix in the class for question answering."""
    table = {
        "ForCausalLM": Class({"head": "lm"}, LM_HEAD, "model."),
        "Model": Class({"head": "none"}),
        "ForSequenceClassification": Class(
            {"head": "sequence", "pool": "last", "head_bias": False}, SCORES, "model."
        ),
        "ForTokenClassification": Class({"head": "token", "head_bias": True}, SCORES, "model."),
        "ForQuestionAnswering": Class({"head": "span", "n_labels": 2, "head_bias": True}, SPANS, spans),
    }
    return {name + kind: table[kind] for kind in kinds.split()}


MOST = "ForCausalLM Model ForSequenceClassification ForTokenClassification"

# --------------------------------------------------------------------------------------- Llama and its like

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

# Llama 1 to 3, and what is published as such: TinyLlama, SmolLM 1 and 2, Yi, Vicuna.
LLAMA = Family(
    model_type="llama",
    keys=LLAMA_KEYS | {"ff_bias": Key("mlp_bias", False)},
    parts=(rope_part(), ATTENTION_BIAS),
    fixed=LLAMA_FIXED,
    rows=LLAMA_ROWS,
    classes=decoder_classes("Llama", MOST + " ForQuestionAnswering", spans="transformer."),
    ignored=(r".*\.rotary_emb\.inv_freq",),
)

# ---------------------------------------------------------------------------------------- Mistral, Qwen 2, 3

MISTRAL = Family(
    model_type="mistral",
    keys=LLAMA_KEYS,
    parts=(rope_part(), window_part(None, default=4096)),
    fixed=LLAMA_FIXED,
    rows=LLAMA_ROWS,
    classes=decoder_classes("Mistral", MOST + " ForQuestionAnswering"),
)


def _from_layer(settings: Json, n_layers: int) -> list[bool]:
    first = settings.get("max_window_layers", 28)
    return [layer >= first for layer in range(n_layers)]


QWEN_WINDOW = window_part(_from_layer, default=4096, switch="use_sliding_window", also=("max_window_layers",))

QWEN2 = Family(
    model_type="qwen2",
    keys=LLAMA_KEYS,
    parts=(rope_part(), QWEN_WINDOW),
    fixed=LLAMA_FIXED | {"qkv_bias": True},
    rows=LLAMA_ROWS,
    classes=decoder_classes("Qwen2", MOST + " ForQuestionAnswering", spans="transformer."),
)

QK_NORMS = {"self_attn.q_norm.*": "attn.q_norm.*", "self_attn.k_norm.*": "attn.k_norm.*"}
QWEN3_ROWS = LLAMA_OUTSIDE + in_layers("layers.{i}.", "decoder.blocks.{i}.", LLAMA_LAYER | QK_NORMS)

QWEN3 = Family(
    model_type="qwen3",
    keys=LLAMA_KEYS | {"d_head": Key("head_dim", 128)},
    parts=(rope_part(), QWEN_WINDOW, ATTENTION_BIAS),
    fixed=LLAMA_FIXED | {"qk_norm": "head"},
    rows=QWEN3_ROWS,
    classes=decoder_classes("Qwen3", MOST + " ForQuestionAnswering", spans="transformer."),
)

# ------------------------------------------------------------------------------------------------- SmolLM 3


def _turning_layers(settings: Json) -> list[bool]:
    n_layers = settings["num_hidden_layers"]
    listed = settings.get("no_rope_layers")  # 1: this layer has rotary positions
    if listed is None:
        interval = settings.get("no_rope_layer_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(n_layers)]
    return [bool(turns) for turns in listed[:n_layers]]


def _read_turning(settings: Json) -> Json:
    turns = _turning_layers(settings)
    return {"rotary_layers": None if all(turns) else tuple(turns)}


def _window_without_rope(settings: Json, n_layers: int) -> list[bool]:
    used = bool(settings.get("use_sliding_window"))
    return [used and not turns for turns in _turning_layers(settings)]


SMOLLM3 = Family(
    model_type="smollm3",
    keys=LLAMA_KEYS | {"ff_bias": Key("mlp_bias", False), "tied": Key("tie_word_embeddings", True)},
    parts=(
        rope_part(2_000_000.0),
        ATTENTION_BIAS,
        Part(
            ("no_rope_layers", "no_rope_layer_interval"),
            _read_turning,
            lambda config: {"no_rope_layers": [int(config.turns(i)) for i in range(config.n_layers)]},
        ),
        window_part(_window_without_rope),
        Part(
            ("use_sliding_window",),
            lambda settings: {},
            lambda config: {"use_sliding_window": config.window is not None},
        ),
    ),
    fixed=LLAMA_FIXED,
    rows=LLAMA_ROWS,
    classes=decoder_classes("SmolLM3", MOST + " ForQuestionAnswering", spans="transformer."),
)

# ---------------------------------------------------------------------------------------------------- Gemma

# Embeddings are multiplied by sqrt(d_model); no key says so.
ROOT_OF_WIDTH = Part(
    (), lambda settings: {"embed_scale": math.sqrt(settings["hidden_size"])}, lambda config: {}
)


def _read_query_scale(settings: Json) -> Json:
    divisor = settings.get("query_pre_attn_scalar", 256)
    return {"attn_scale": None if divisor == settings.get("head_dim") else divisor**-0.5}


def _write_query_scale(config: ModelConfig) -> Json:
    divisor = config.head_width if config.attn_scale is None else config.attn_scale**-2
    whole = round(divisor)
    exact = config.attn_scale is None or whole**-0.5 == config.attn_scale
    return {"query_pre_attn_scalar": whole if exact else divisor}


QUERY_SCALE = Part(("query_pre_attn_scalar",), _read_query_scale, _write_query_scale)

GEMMA_KEYS = LLAMA_KEYS | {
    "d_head": Key("head_dim", 256),
    "tied": Key("tie_word_embeddings", True),
}
GEMMA_FIXED = LLAMA_FIXED | {"norm_offset": 1.0}
ONE_WAY = {"use_bidirectional_attention": (False,)}

GEMMA = Family(
    model_type="gemma",
    keys=GEMMA_KEYS
    | {
        "activation": Key(  # "gelu" in older files means its tanh form
            "hidden_act", "gelu_pytorch_tanh", ACTIVATIONS | {"gelu": "gelu_tanh"}
        )
    },
    parts=(rope_part(), ATTENTION_BIAS, ROOT_OF_WIDTH),
    fixed=GEMMA_FIXED,
    refused=ONE_WAY,
    rows=LLAMA_ROWS,
    classes=decoder_classes("Gemma", MOST),
)

SANDWICH = {
    "post_attention_layernorm.*": "attn_out_norm.*",
    "pre_feedforward_layernorm.*": "ff_norm.*",
    "post_feedforward_layernorm.*": "ff_out_norm.*",
}
GEMMA2_KEYS = GEMMA_KEYS | {
    "activation": Key("hidden_activation", "gelu_pytorch_tanh", ACTIVATIONS),
    "attn_softcap": Key("attn_logit_softcapping", 50.0, null=True),
    "logit_softcap": Key("final_logit_softcapping", 30.0, null=True),
}

GEMMA2 = Family(
    model_type="gemma2",
    keys=GEMMA2_KEYS,
    parts=(
        rope_part(),
        ATTENTION_BIAS,
        ROOT_OF_WIDTH,
        QUERY_SCALE,
        window_part(lambda settings, n: [layer % 2 == 0 for layer in range(n)], default=4096),
    ),
    fixed=GEMMA_FIXED | {"norm_placement": "sandwich"},
    refused=ONE_WAY,
    rows=LLAMA_OUTSIDE + in_layers("layers.{i}.", "decoder.blocks.{i}.", LLAMA_LAYER | SANDWICH),
    classes=decoder_classes("Gemma2", MOST),
)


def _five_of_six(settings: Json, n_layers: int) -> list[bool]:
    pattern = settings.get("sliding_window_pattern", settings.get("_sliding_window_pattern", 6))
    return [(layer + 1) % pattern != 0 for layer in range(n_layers)]


GEMMA3_OWN = {  # the larger models' files leave out what is as in the smallest
    "vocab_size": Key("vocab_size", 262_208),
    "max_len": Key("max_position_embeddings", 131_072),
    "n_heads": Key("num_attention_heads", 8),
    "n_kv_heads": Key("num_key_value_heads", 4),
    "logit_softcap": Key("final_logit_softcapping", None),
}

GEMMA3 = Family(
    model_type="gemma3_text",
    # attn_logit_softcapping is in the files and not used
    keys={name: key for name, key in GEMMA2_KEYS.items() if name != "attn_softcap"} | GEMMA3_OWN,
    parts=(
        layered_rope_part(1_000_000.0, 10_000.0, older="rope_local_base_freq"),
        ATTENTION_BIAS,
        ROOT_OF_WIDTH,
        QUERY_SCALE,
        window_part(_five_of_six, default=4096, also=("sliding_window_pattern", "_sliding_window_pattern")),
    ),
    fixed=GEMMA_FIXED | {"norm_placement": "sandwich", "qk_norm": "head"},
    refused=ONE_WAY,
    rows=LLAMA_OUTSIDE + in_layers("layers.{i}.", "decoder.blocks.{i}.", LLAMA_LAYER | SANDWICH | QK_NORMS),
    classes=decoder_classes("Gemma3", "ForCausalLM")
    | decoder_classes("Gemma3Text", "Model ForSequenceClassification"),
)

# ---------------------------------------------------------------------------------------------------- Phi-3

PHI3_LAYER = {name: ours for name, ours in LLAMA_LAYER.items() if "_proj" not in name} | {
    "self_attn.qkv_proj.*": ("attn.q.* attn.k.* attn.v.*", SPLIT),
    "self_attn.o_proj.*": "attn.o.*",
    "mlp.gate_up_proj.*": ("ff.gate.* ff.up.*", SPLIT),
    "mlp.down_proj.*": "ff.down.*",
}

PHI3 = Family(
    model_type="phi3",
    keys=LLAMA_KEYS
    | {
        "norm_eps": Key("rms_norm_eps", 1e-5),
        "residual_dropout": Key("resid_pdrop", 0.0),
    },
    parts=(partial_rope_part(), window_part(None)),
    fixed=LLAMA_FIXED,
    rows=LLAMA_OUTSIDE + in_layers("layers.{i}.", "decoder.blocks.{i}.", PHI3_LAYER),
    classes=decoder_classes("Phi3", MOST),
)

# ----------------------------------------------------------------------------------------------- OLMo 2, 3

OLMO2_LAYER = {name: ours for name, ours in LLAMA_LAYER.items() if "layernorm" not in name} | {
    "post_attention_layernorm.*": "attn_out_norm.*",
    "post_feedforward_layernorm.*": "ff_out_norm.*",
}
OLMO2_ROWS = LLAMA_OUTSIDE + in_layers("layers.{i}.", "decoder.blocks.{i}.", OLMO2_LAYER | QK_NORMS)
OLMO2_KEYS = {name: key for name, key in LLAMA_KEYS.items() if name != "d_head"} | {
    "norm_eps": Key("rms_norm_eps", 1e-5)
}
OLMO2_FIXED = LLAMA_FIXED | {"norm_placement": "branch", "norm_wide_gain": True, "qk_norm": "flat"}

OLMO2 = Family(
    model_type="olmo2",
    keys=OLMO2_KEYS,
    parts=(rope_part(), ATTENTION_BIAS),
    fixed=OLMO2_FIXED,
    rows=OLMO2_ROWS,
    classes=decoder_classes("Olmo2", "ForCausalLM Model ForSequenceClassification"),
)

OLMO3 = Family(
    model_type="olmo3",
    keys=OLMO2_KEYS,
    parts=(
        layered_rope_part(500_000.0, 500_000.0),
        ATTENTION_BIAS,
        window_part(lambda settings, n: [(layer + 1) % 4 != 0 for layer in range(n)], default=4096),
    ),
    fixed=OLMO2_FIXED,
    rows=OLMO2_ROWS,
    classes=decoder_classes("Olmo3", "ForCausalLM Model ForSequenceClassification"),
)

# ------------------------------------------------------------------------------------------------------ GPT-2


def _read_gpt2_scale(settings: Json) -> Json:
    return {
        "attn_scale": 1.0 if settings.get("scale_attn_weights") is False else None,
        "attn_scale_by_layer": settings.get("scale_attn_by_inverse_layer_idx") or False,
    }


def _write_gpt2_scale(config: ModelConfig) -> Json:
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
        "GPT2LMHeadModel": Class({"head": "lm"}, LM_HEAD, "transformer."),
        "GPT2Model": Class({"head": "none"}),
        "GPT2ForSequenceClassification": Class(
            {"head": "sequence", "pool": "last", "head_bias": False}, SCORES, "transformer."
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

# ------------------------------------------------------------------------------------------------------ all

# In the order in which a model of our own looks for a family that can hold it.
FAMILIES = {
    family.model_type: family
    for family in (
        LLAMA,
        QWEN2,
        QWEN3,
        MISTRAL,
        GPT2,
        SMOLLM3,
        OLMO2,
        OLMO3,
        PHI3,
        GEMMA,
        GEMMA2,
        GEMMA3,
    )
}
