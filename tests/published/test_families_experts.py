"""Mixtures of experts: tiny random models of every family give the numbers of `transformers`, both ways."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from clearhead import load, save
from clearhead.model.config import ModelConfig
from clearhead.model.config_parts import ExpertsConfig, LatentConfig
from clearhead.model.experts import Routing
from clearhead.model.summary import summarise
from clearhead.model.transformer import Transformer
from clearhead.published.mapping import differences, read_config
from clearhead.published.twins import DECODER
from clearhead.published.weights import find_family
from reference.parity import (
    call_theirs,
    check_decoder,
    compare_gradients,
    gap,
    output_of,
    padded_batch,
    tiny,
)

# The checks' padding is 0; widths are multiples of 4, which `transformers`' grouped products need.
SIZES = DECODER | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 3}
LATENT = SIZES | {
    "num_key_value_heads": 6,
    "n_routed_experts": 12,
    "moe_intermediate_size": 20,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 28,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralForCausalLM", SIZES | {"num_local_experts": 7, "sliding_window": 5}),
    "mixtral, sequence": ("MixtralForSequenceClassification", SIZES | {"num_local_experts": 7}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        SIZES
        | {
            "num_experts": 7,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "mlp_only_layers": [1],
        },
    ),
    "qwen2_moe, window, no biases, renormalised": (
        "Qwen2MoeForCausalLM",
        SIZES
        | {
            "num_experts": 7,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 28,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 5,
            "qkv_bias": False,
            "norm_topk_prob": True,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        SIZES
        | {"num_experts": 7, "moe_intermediate_size": 20, "head_dim": 10, "norm_topk_prob": True}
        | {"use_sliding_window": True, "sliding_window": 5, "mlp_only_layers": [0]},
    ),
    "qwen3_moe, biases": (
        "Qwen3MoeForTokenClassification",
        SIZES | {"num_experts": 7, "moe_intermediate_size": 20, "attention_bias": True, "num_labels": 4},
    ),
    "olmoe": ("OlmoeForCausalLM", SIZES | {"num_experts": 7, "clip_qkv": 0.7}),
    "olmoe, biases": (
        "OlmoeForCausalLM",
        SIZES | {"num_experts": 7, "attention_bias": True, "norm_topk_prob": True},
    ),
    "deepseek_v3": ("DeepseekV3ForCausalLM", LATENT),
    "deepseek_v3, yarn, biases": (
        "DeepseekV3ForCausalLM",
        LATENT
        | {"attention_bias": True, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}}
        | {"norm_topk_prob": False, "routed_scaling_factor": 1.7},
    ),
    "deepseek_v3, direct queries, halves": (
        "DeepseekV3Model",
        LATENT | {"q_lora_rank": None, "rope_interleave": False, "n_group": 1, "topk_group": 1},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        SIZES
        | {"num_local_experts": 7, "head_dim": 10, "sliding_window": 5, "swiglu_limit": 0.5}
        | {"rope_parameters": YARN | {"truncate": False}},
    ),
    "gpt_oss, no biases in attention": (
        "GptOssForTokenClassification",
        SIZES
        | {"num_local_experts": 7, "head_dim": 10, "sliding_window": 5, "attention_bias": False}
        | {"swiglu_alpha": 1.3, "num_labels": 3},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_tiny_model_equals_its_twin(name: str, transformers: Any, tmp_path: Path) -> None:
    class_name, settings = MODELS[name]
    check_decoder(tiny(transformers, class_name, **settings), tmp_path)


# ---------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss"])
def test_the_balance_loss_and_its_gradient_are_theirs(name: str, transformers: Any, tmp_path: Path) -> None:
    """Pooled over the layers that have experts, padding left out."""
    class_name, settings = MODELS[name]
    theirs = tiny(transformers, class_name, **settings)
    theirs.save_pretrained(tmp_path)
    ours, _ = load(tmp_path)
    tokens, mask = padded_batch(99, (24, 7, 17), "right")
    expected = call_theirs(theirs, tokens, mask, output_router_logits=True).aux_loss
    routing = Routing()
    ours(tokens, mask=mask, routing=routing)
    found = routing.balance_loss(mask)
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)
    expected.backward()
    found.backward()
    compare_gradients(theirs, ours, tmp_path)
    everything = call_theirs(theirs, tokens, output_router_logits=True).aux_loss
    routing = Routing()
    ours(tokens, routing=routing)
    assert routing.balance_loss().item() == pytest.approx(everything.item(), abs=1e-5)


def test_jitter_is_theirs(transformers: Any, tmp_path: Path) -> None:
    theirs = tiny(transformers, "MixtralForCausalLM", **SIZES, num_local_experts=7, router_jitter_noise=0.3)
    theirs.save_pretrained(tmp_path)
    ours, _ = load(tmp_path)
    tokens, _ = padded_batch(99, (24, 24), "right")
    outputs = []
    for model in (theirs.train(), ours.train()):
        torch.manual_seed(3)
        outputs.append(output_of(model(tokens)) if model is theirs else model(tokens))
    assert gap(outputs[0], outputs[1]) <= 1e-5
    assert gap(outputs[1], ours.eval()(tokens)) > 1e-2


# ------------------------------------------------------------------------------------------ models of our own

OWN = {"vocab_size": 99, "max_len": 48, "d_model": 36, "n_layers": 3, "n_heads": 6, "tied": False}
EXPERTS = {"n_experts": 8, "top_k": 3, "d_ff": 20}
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "renormalised": (
        "mixtral",
        {"n_kv_heads": 2, "experts": ExpertsConfig(**EXPERTS, balance_loss=0.01, z_loss=0.001, jitter=0.1)},
    ),
    "gated shared expert": (
        "qwen2_moe",
        {
            "qkv_bias": True,
            "d_ff": 56,
            "expert_layers": (True, False, True),
            "experts": ExpertsConfig(**EXPERTS, renormalise=False, shared_d_ff=28, shared_gate=True),
        },
    ),
    "normed heads": (
        "qwen3_moe",
        {"d_head": 10, "qk_norm": "head", "experts": ExpertsConfig(**EXPERTS)},
    ),
    "normed queries": (
        "olmoe",
        {"qk_norm": "flat", "qkv_clip": 0.7, "experts": ExpertsConfig(**EXPERTS, renormalise=False)},
    ),
    "latent": (
        "deepseek_v3",
        {
            "rotary_layout": "interleaved",
            "latent": LatentConfig(q_rank=28, kv_rank=24, d_plain=10, d_rotary=8, d_value=14),
            "expert_layers": (False, True, True),
            "d_ff": 56,
            "experts": ExpertsConfig(
                **EXPERTS,
                router="sigmoid",
                correction_bias=True,
                n_groups=4,
                top_groups=2,
                shared_d_ff=40,
                weight_scale=2.0,
            ),
        },
    ),
    "sinks": (
        "gpt_oss",
        {
            "n_kv_heads": 2,
            "attn_sinks": True,
            "norm_wide_gain": True,
            "qkv_bias": True,
            "out_bias": True,
            "window": 5,
            "windowed_layers": (True, False, True),
            "experts": ExpertsConfig(**EXPERTS, bias=True, router_bias=True, limit=7.0),
        },
    ),
}


@pytest.mark.parametrize("name", OURS)
def test_their_library_loads_models_of_our_own(name: str, transformers: Any, tmp_path: Path) -> None:
    model_type, fields = OURS[name]
    ours = Transformer(ModelConfig(**(OWN | fields)), seed=1).eval()
    save(ours, None, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert theirs.config.model_type == model_type
    tokens, mask = padded_batch(99, (24, 7, 17), "left")
    with torch.no_grad():
        assert gap(ours(tokens, mask=mask), output_of(call_theirs(theirs, tokens, mask)), mask) <= 1e-5
    again, _ = load(tmp_path)
    assert not differences(again.config, ours.config)


def test_what_has_no_form_of_theirs_is_listed(tmp_path: Path) -> None:
    experts = ExpertsConfig(**EXPERTS, limit=3.0)
    model = Transformer(ModelConfig(**OWN, experts=experts))
    with pytest.raises(ValueError, match=r"no Hugging Face form .*experts\.limit=3\.0"):
        save(model, None, tmp_path)


# -------------------------------------------------------------------------------------- published config.json

COMMON = {"hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True}
DEEPSEEK_ROPE = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
GPT_OSS_ROPE = {
    "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
    "rope_type": "yarn", "truncate": False,
}  # fmt: skip
PUBLISHED: dict[str, tuple[int, dict[str, Any]]] = {
    "Mixtral-8x7B-v0.1": (
        46_702_792_704,
        {
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 4096,
            "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
            "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
            "num_local_experts": 8, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02, "sliding_window": None, "vocab_size": 32000,
        },
    ),
    "Qwen1.5-MoE-A2.7B": (
        14_315_784_192,
        {
            "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 2048,
            "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
            "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768,
            "use_sliding_window": False, "vocab_size": 151936, "decoder_sparse_step": 1,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4, "num_experts": 60, "norm_topk_prob": False,
        },
    ),
    "Qwen3-30B-A3B": (
        30_532_122_624,
        {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
            "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
            "num_attention_heads": 32, "num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "rope_scaling": None, "sliding_window": None,
            "use_sliding_window": False, "vocab_size": 151936, "decoder_sparse_step": 1,
            "mlp_only_layers": [], "moe_intermediate_size": 768, "num_experts_per_tok": 8,
            "num_experts": 128, "norm_topk_prob": True, "attention_bias": False,
        },
    ),
    "OLMoE-1B-7B-0924": (
        6_919_161_856,
        {
            "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_size": 2048,
            "intermediate_size": 1024, "max_position_embeddings": 4096, "num_attention_heads": 16,
            "num_hidden_layers": 16, "num_key_value_heads": 16, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "rope_scaling": None, "clip_qkv": None, "vocab_size": 50304, "num_experts_per_tok": 8,
            "num_experts": 64, "norm_topk_prob": False, "attention_bias": False,
        },
    ),
    "DeepSeek-V3": (
        671_026_404_352,  # and a correction per expert, which is no parameter
        {
            "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
            "intermediate_size": 18432, "moe_intermediate_size": 2048, "max_position_embeddings": 163840,
            "num_attention_heads": 128, "num_hidden_layers": 61, "num_key_value_heads": 128,
            "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
            "topk_group": 4, "first_k_dense_replace": 3, "moe_layer_freq": 1, "norm_topk_prob": True,
            "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
            "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128, "rms_norm_eps": 1e-06, "rope_theta": 10000, "rope_scaling": DEEPSEEK_ROPE,
            "vocab_size": 129280, "num_nextn_predict_layers": 1, "attention_bias": False,
        },
    ),
    "gpt-oss-20b": (
        20_914_757_184,
        {
            "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
            "intermediate_size": 2880, "max_position_embeddings": 131072, "num_attention_heads": 64,
            "num_hidden_layers": 24, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
            "num_experts_per_tok": 4, "experts_per_token": 4, "rms_norm_eps": 1e-05, "rope_theta": 150000,
            "rope_scaling": GPT_OSS_ROPE, "sliding_window": 128, "swiglu_limit": 7.0, "vocab_size": 201088,
            "layer_types": ["sliding_attention", "full_attention"] * 12, "initial_context_length": 4096,
            "router_aux_loss_coef": 0.9, "attention_bias": True,
        },
    ),
}  # fmt: skip


def read(settings: dict[str, Any]) -> ModelConfig:
    family, class_name = find_family(settings)
    return read_config(family, settings, class_name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_make_models_of_the_published_size(name: str) -> None:
    n_parameters, settings = PUBLISHED[name]
    assert summarise(read(COMMON | settings)).n_parameters == n_parameters


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_experts_has_three_spellings(name: str) -> None:
    _, settings = PUBLISHED[name]
    spellings = ("num_local_experts", "num_experts", "n_routed_experts")
    spelled = next(key for key in spellings if key in settings)
    expected = read(COMMON | settings)
    rest = {key: value for key, value in settings.items() if key != spelled}
    for spelling in spellings:
        assert read(COMMON | rest | {spelling: settings[spelled]}) == expected


@pytest.mark.parametrize("name", ["DeepSeek-V3", "gpt-oss-20b"])
def test_old_and_new_spellings_of_yarn_are_one(name: str) -> None:
    settings = COMMON | PUBLISHED[name][1]
    old = read(settings)
    scaling = settings.pop("rope_scaling")
    theta = settings.pop("rope_theta")
    kind = {"rope_type": scaling.get("rope_type", scaling.get("type")), "rope_theta": theta}
    assert read(settings | {"rope_parameters": scaling | kind}) == old
    assert old.rotary_scaling is not None and old.rotary_scaling.factor in (32.0, 40)
    assert old.rotary_scaling.truncate == (name == "DeepSeek-V3")


def test_scores_of_a_stretched_latent_are_sharper() -> None:
    """mscale^2 on the scale: (0.1 ln 40 + 1)^2 / sqrt(192)."""
    config = read(COMMON | PUBLISHED["DeepSeek-V3"][1])
    assert config.attn_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert config.n_layers == 61 and config.expert_layers == (False,) * 3 + (True,) * 58


# -------------------------------------------------------------------------------------------------- injuries


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt-oss-20b", {"quantization_config": {"quant_method": "mxfp4"}}, "quantised"),
        ("DeepSeek-V3", {"quantization_config": {"quant_method": "fp8"}}, "quantised"),
        ("DeepSeek-V3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
        ("DeepSeek-V3", {"n_group": 7}, "n_experts=256 must be divisible by n_groups=7"),
        ("Mixtral-8x7B-v0.1", {"num_experts_per_tok": 9}, "top_k=9 must be between 1 and n_experts=8"),
        ("Qwen3-30B-A3B", {"rope_scaling": {"rope_type": "spiral"}}, "rope_type='spiral' is unknown"),
        (
            "gpt-oss-20b",
            {"layer_types": ["sliding_attention"]},
            r"has 1 entries \(layer_types\) for n_layers=24",
        ),
    ],
)
def test_settings_of_another_model_are_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(COMMON | PUBLISHED[name][1] | change)


def test_an_expert_that_is_missing_is_named(transformers: Any, tmp_path: Path) -> None:
    class_name, settings = MODELS["mixtral"]
    tiny(transformers, class_name, **settings).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    lost = "model.layers.1.block_sparse_moe.experts.6.w3.weight"
    tensors["model.layers.1.block_sparse_moe.experts.7.w3.weight"] = tensors.pop(lost)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: .*experts\.6\.w3\.weight; left over: .*experts\.7\.w3"):
        load(tmp_path)


def test_layers_that_predict_further_ahead_are_left_out(transformers: Any, tmp_path: Path) -> None:
    """The published model carries one more layer, number 61, which its config does not count."""
    class_name, settings = MODELS["deepseek_v3"]
    tiny(transformers, class_name, **settings).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.61.eh_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, tmp_path / "model.safetensors")
    model, _ = load(tmp_path)
    assert model.config.n_layers == 3
