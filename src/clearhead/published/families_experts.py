"""The families of published models as tables: decoders with a mixture of experts.

What the columns mean: mapping.py. In a layer with experts `ff.gate` is one tensor (E, out, in); in a layer
without, `ff.gate.weight` is a matrix. So the rows of both stand beside each other.
"""

from clearhead.model.config import ModelConfig
from clearhead.model.position import yarn_growth
from clearhead.published.families import (
    ATTENTION_BIAS,
    LLAMA_FIXED,
    LLAMA_KEYS,
    LLAMA_LAYER,
    LLAMA_OUTSIDE,
    MOST,
    QK_NORMS,
    decoder_classes,
)
from clearhead.published.mapping import DEINTERLEAVED, STACKED, SWAPPED, Family, Json, Key, Part, in_layers
from clearhead.published.quirks import rope_part, window_part

WITH_SPANS = MOST + " ForQuestionAnswering"
# The width of the dense layers, which these families do not have.
WITHOUT_DENSE = {name: key for name, key in LLAMA_KEYS.items() if name != "d_ff"}


def experts_keys(count: str, width: str, n_experts: int, top_k: int, d_ff: int) -> dict[str, Key]:
    """What all families tell of their experts, and the values that mean nothing is said."""
    counts = ("num_local_experts", "num_experts", "n_routed_experts")
    return {
        "experts.n_experts": Key(count, n_experts, older=tuple(name for name in counts if name != count)),
        "experts.top_k": Key("num_experts_per_tok", top_k),
        "experts.d_ff": Key(width, d_ff),
        "experts.balance_loss": Key("router_aux_loss_coef", 0.001),
    }


NORM_TOP_K = {"experts.renormalise": Key("norm_topk_prob", False)}
EXPERTS = {
    "mlp.gate.weight": "ff.router.weight",
    "mlp.experts.{e}.gate_proj.weight": ("ff.gate", STACKED),
    "mlp.experts.{e}.up_proj.weight": ("ff.up", STACKED),
    "mlp.experts.{e}.down_proj.weight": ("ff.down", STACKED),
}


def in_decoder(*tables: dict) -> tuple:
    """The rows of the whole model from those of a layer."""
    layer = {theirs: ours for table in tables for theirs, ours in table.items()}
    return LLAMA_OUTSIDE + in_layers("layers.{i}.", "decoder.blocks.{i}.", layer)


def some_layers(chosen: list[bool]) -> tuple[bool, ...] | None:
    """Which layers have experts; None: all."""
    return None if all(chosen) else tuple(chosen)


# -------------------------------------------------------------------------------------------------- Mixtral

MIXTRAL = Family(
    model_type="mixtral",
    keys=WITHOUT_DENSE
    | experts_keys("num_local_experts", "intermediate_size", 8, 2, 14336)
    | {
        "norm_eps": Key("rms_norm_eps", 1e-5),
        "experts.jitter": Key("router_jitter_noise", 0.0),
    },
    parts=(rope_part(1_000_000.0), window_part(None)),
    fixed=LLAMA_FIXED | {"experts.renormalise": True},
    rows=in_decoder(
        LLAMA_LAYER,
        {
            "block_sparse_moe.gate.weight": "ff.router.weight",
            "block_sparse_moe.experts.{e}.w1.weight": ("ff.gate", STACKED),
            "block_sparse_moe.experts.{e}.w3.weight": ("ff.up", STACKED),
            "block_sparse_moe.experts.{e}.w2.weight": ("ff.down", STACKED),
        },
    ),
    classes=decoder_classes("Mixtral", WITH_SPANS),
)

# ----------------------------------------------------------------------------------------- Qwen 2 and 3, MoE


def _read_sparse(settings: Json) -> Json:
    dense, step = settings.get("mlp_only_layers") or [], settings.get("decoder_sparse_step") or 1
    layers = range(settings["num_hidden_layers"])
    return {"expert_layers": some_layers([i not in dense and (i + 1) % step == 0 for i in layers])}


def _write_sparse(config: ModelConfig) -> Json:
    dense = [layer for layer in range(config.n_layers) if config.experts_at(layer) is None]
    return {"mlp_only_layers": dense, "decoder_sparse_step": 1}


SPARSE = Part(("mlp_only_layers", "decoder_sparse_step"), _read_sparse, _write_sparse)


def _first_even(settings: Json, n_layers: int) -> list[bool]:
    return [layer % 2 == 0 and layer < settings.get("max_window_layers", 28) for layer in range(n_layers)]


QWEN2_MOE = Family(
    model_type="qwen2_moe",
    keys=LLAMA_KEYS
    | experts_keys("num_experts", "moe_intermediate_size", 60, 4, 1408)
    | NORM_TOP_K
    | {
        "qkv_bias": Key("qkv_bias", True),
        "experts.shared_d_ff": Key("shared_expert_intermediate_size", 5632),
    },
    parts=(
        rope_part(),
        window_part(_first_even, default=4096, switch="use_sliding_window", also=("max_window_layers",)),
        SPARSE,
    ),
    fixed=LLAMA_FIXED | {"experts.shared_gate": True},
    rows=in_decoder(
        LLAMA_LAYER,
        EXPERTS,
        {
            "mlp.shared_expert.gate_proj.*": "ff.shared.gate.*",
            "mlp.shared_expert.up_proj.*": "ff.shared.up.*",
            "mlp.shared_expert.down_proj.*": "ff.shared.down.*",
            "mlp.shared_expert_gate.*": "ff.shared_gate.*",
        },
    ),
    classes=decoder_classes("Qwen2Moe", WITH_SPANS),
)

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    keys=LLAMA_KEYS | experts_keys("num_local_experts", "moe_intermediate_size", 128, 8, 768) | NORM_TOP_K,
    parts=(
        rope_part(),
        ATTENTION_BIAS,
        window_part(None, default=4096, switch="use_sliding_window"),
        SPARSE,
    ),
    fixed=LLAMA_FIXED | {"qk_norm": "head"},
    rows=in_decoder(LLAMA_LAYER, QK_NORMS, EXPERTS),
    classes=decoder_classes("Qwen3Moe", WITH_SPANS, spans="transformer."),
)

# ---------------------------------------------------------------------------------------------------- OLMoE

OLMOE = Family(
    model_type="olmoe",
    keys={name: key for name, key in WITHOUT_DENSE.items() if name != "d_head"}
    | experts_keys("num_experts", "intermediate_size", 64, 8, 2048)
    | NORM_TOP_K
    | {
        "norm_eps": Key("rms_norm_eps", 1e-5),
        "qkv_clip": Key("clip_qkv", None),
        "experts.balance_loss": Key("router_aux_loss_coef", 0.01),
    },
    parts=(rope_part(), ATTENTION_BIAS),
    fixed=LLAMA_FIXED | {"qk_norm": "flat"},
    rows=in_decoder(LLAMA_LAYER, QK_NORMS, EXPERTS),
    classes=decoder_classes("Olmoe", "ForCausalLM Model"),
)

# ----------------------------------------------------------------------------------------------- DeepSeek-V3

LATENT = {
    "latent.q_rank": Key("q_lora_rank", 1536, null=True),
    "latent.kv_rank": Key("kv_lora_rank", 512),
    "latent.d_plain": Key("qk_nope_head_dim", 128),
    "latent.d_rotary": Key("qk_rope_head_dim", 64),
    "latent.d_value": Key("v_head_dim", 128),
}


def _read_first_dense(settings: Json) -> Json:
    dense = settings.get("first_k_dense_replace", 3)
    return {"expert_layers": some_layers([i >= dense for i in range(settings["num_hidden_layers"])])}


def _write_first_dense(config: ModelConfig) -> Json:
    chosen = [config.experts_at(layer) is not None for layer in range(config.n_layers)]
    return {"first_k_dense_replace": chosen.index(True) if any(chosen) else len(chosen)}


def _read_shared(settings: Json) -> Json:
    shared, width = settings.get("n_shared_experts", 1), settings.get("moe_intermediate_size", 2048)
    for count in (shared, width):
        if count is not None and type(count) is not int:  # times a number, a list would grow
            raise ValueError(
                f"{count!r:.60} of n_shared_experts and moe_intermediate_size is no whole number"
            )
    return {"experts.shared_d_ff": (shared or 0) * width}


def _write_shared(config: ModelConfig) -> Json:
    experts = config.experts
    return {"n_shared_experts": 0 if experts is None else experts.shared_d_ff // experts.d_ff}


def _read_layout(settings: Json) -> Json:
    return {"rotary_layout": "half" if settings.get("rope_interleave") is False else "interleaved"}


def _read_latent_scale(settings: Json) -> Json:
    """1 / sqrt(width), and with yarn's `mscale_all_dim` that times the square of what it grows to."""
    scaling = rope_part().read(settings)["rotary_scaling"]
    if scaling is None or not scaling.mscale_all:
        return {"attn_scale": None}
    width = LATENT["latent.d_plain"].read(settings) + LATENT["latent.d_rotary"].read(settings)
    return {"attn_scale": width**-0.5 * yarn_growth(scaling.factor, scaling.mscale_all) ** 2}


DEEPSEEK3 = Family(
    model_type="deepseek_v3",
    keys={name: key for name, key in LLAMA_KEYS.items() if name != "d_head"}
    | experts_keys("n_routed_experts", "moe_intermediate_size", 256, 8, 2048)
    | LATENT
    | {
        "qkv_bias": Key("attention_bias", False),
        "experts.renormalise": Key("norm_topk_prob", True),
        "experts.weight_scale": Key("routed_scaling_factor", 2.5),
        "experts.n_groups": Key("n_group", 8),
        "experts.top_groups": Key("topk_group", 4),
    },
    parts=(
        rope_part(),
        Part((), _read_latent_scale, lambda config: {}),
        Part(
            ("rope_interleave",),
            _read_layout,
            lambda config: {"rope_interleave": config.rotary_layout == "interleaved"},
        ),
        Part(("first_k_dense_replace",), _read_first_dense, _write_first_dense),
        Part(("n_shared_experts",), _read_shared, _write_shared),
    ),
    fixed=LLAMA_FIXED | {"experts.router": "sigmoid", "experts.correction_bias": True},
    refused={"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "moe_layer_freq": (1,)},
    rows=in_decoder(
        {name: ours for name, ours in LLAMA_LAYER.items() if not name.startswith("self_attn")},
        {
            "self_attn.q_proj.*": "attn.q.*",
            "self_attn.q_a_proj.*": "attn.q_a.*",
            "self_attn.q_a_layernorm.*": "attn.q_a_norm.*",
            "self_attn.q_b_proj.*": "attn.q_b.*",
            "self_attn.kv_a_proj_with_mqa.*": "attn.kv_a.*",
            "self_attn.kv_a_layernorm.*": "attn.kv_a_norm.*",
            "self_attn.kv_b_proj.*": "attn.kv_b.*",
            "self_attn.o_proj.*": "attn.o.*",
        },
        EXPERTS,
        {
            "mlp.gate.e_score_correction_bias": "ff.router.correction",
            "mlp.shared_experts.gate_proj.*": "ff.shared.gate.*",
            "mlp.shared_experts.up_proj.*": "ff.shared.up.*",
            "mlp.shared_experts.down_proj.*": "ff.shared.down.*",
        },
    ),
    classes=decoder_classes("DeepseekV3", MOST),
    # the published model's layers that predict more than one token ahead
    ignored=(r"model\.layers\.61\..*", r".*\.rotary_emb\.inv_freq"),
)

# --------------------------------------------------------------------------------------------------- gpt-oss

GPT_OSS_ROPE = rope_part(150_000.0)
GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read_gpt_oss_rope(settings: Json) -> Json:
    said = settings.get("rope_parameters") or settings.get("rope_scaling")
    return GPT_OSS_ROPE.read(settings if said else settings | {"rope_scaling": GPT_OSS_YARN})


GPT_OSS = Family(
    model_type="gpt_oss",
    keys=WITHOUT_DENSE
    | experts_keys("num_local_experts", "intermediate_size", 128, 4, 2880)
    | {
        "d_head": Key("head_dim", 64),
        "norm_eps": Key("rms_norm_eps", 1e-5),
        "experts.limit": Key("swiglu_limit", 7.0),
        "experts.limit_slope": Key("swiglu_alpha", 1.702),
    },
    parts=(
        Part(GPT_OSS_ROPE.names, _read_gpt_oss_rope, GPT_OSS_ROPE.write),
        Part(
            ("attention_bias",),
            lambda settings: ATTENTION_BIAS.read({"attention_bias": True} | settings),
            ATTENTION_BIAS.write,
        ),
        window_part(lambda settings, n: [layer % 2 == 0 for layer in range(n)], default=128),
    ),
    fixed=LLAMA_FIXED
    | {
        "norm_wide_gain": True,
        "attn_sinks": True,
        "experts.renormalise": True,
        "experts.router_bias": True,
        "experts.bias": True,
    },
    rows=in_decoder(
        LLAMA_LAYER,
        {
            "self_attn.sinks": "attn.sinks",
            "mlp.router.weight": "ff.router.weight",
            "mlp.router.bias": "ff.router.bias",
            "mlp.experts.gate_up_proj": ("ff.gate ff.up", DEINTERLEAVED),
            "mlp.experts.gate_up_proj_bias": ("ff.gate_bias ff.up_bias", DEINTERLEAVED),
            "mlp.experts.down_proj": ("ff.down", SWAPPED),
            "mlp.experts.down_proj_bias": "ff.down_bias",
        },
    ),
    classes=decoder_classes("GptOss", MOST),
)

FAMILIES = {
    family.model_type: family for family in (MIXTRAL, QWEN2_MOE, QWEN3_MOE, OLMOE, DEEPSEEK3, GPT_OSS)
}
