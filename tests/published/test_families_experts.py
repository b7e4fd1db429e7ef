"""Mixtures of experts: tiny random models of every family give the numbers of `transformers`, both ways."""

from pathlib import Path
from typing import Any

import pytest

from reference.parity import check_decoder, tiny

# All sizes differ; widths are multiples of 4, which `transformers`' grouped products need.
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 36,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 3,
}
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
