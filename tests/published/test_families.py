"""Dense decoders: tiny random models of every family give the numbers of `transformers`, both ways."""

from pathlib import Path
from typing import Any

import pytest

from clearhead.published.twins import DECODER
from reference.parity import check_decoder, tiny

# The checks' padding is 0.
SIZES = DECODER | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

GPT2_SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "n_embd": 36,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def rope(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **more}}


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", SIZES),
    "llama, biases, free head width, tied": (
        "LlamaForCausalLM",
        SIZES | {"attention_bias": True, "mlp_bias": True, "head_dim": 10, "tie_word_embeddings": True},
    ),
    "llama, linear": ("LlamaForCausalLM", SIZES | rope("linear", factor=3.0)),
    "llama, dynamic": (
        "LlamaForCausalLM",
        SIZES | {"max_position_embeddings": 16} | rope("dynamic", factor=3.0),
    ),
    "llama, yarn": (
        "LlamaForCausalLM",
        SIZES | rope("yarn", factor=4.0, original_max_position_embeddings=16),
    ),
    "llama, llama3": (
        "LlamaForCausalLM",
        SIZES
        | rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "llama, bare": ("LlamaModel", SIZES),
    "llama, sequence": ("LlamaForSequenceClassification", SIZES | {"num_labels": 4}),
    "llama, token": ("LlamaForTokenClassification", SIZES | {"num_labels": 4}),
    "llama, span": ("LlamaForQuestionAnswering", SIZES),
    "mistral, no window": ("MistralForCausalLM", SIZES | {"sliding_window": None}),
    "mistral, window": ("MistralForCausalLM", SIZES | {"sliding_window": 5}),
    "mistral, token": ("MistralForTokenClassification", SIZES | {"sliding_window": 5, "num_labels": 3}),
    "qwen2, no window": ("Qwen2ForCausalLM", SIZES | {"sliding_window": 5, "tie_word_embeddings": True}),
    "qwen2, window": (
        "Qwen2ForCausalLM",
        SIZES | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen2, sequence": ("Qwen2ForSequenceClassification", SIZES | {"num_labels": 5}),
    "qwen3": ("Qwen3ForCausalLM", SIZES | {"head_dim": 10}),
    "qwen3, biases, window": (
        "Qwen3ForCausalLM",
        SIZES
        | {
            "head_dim": 10,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gemma": ("GemmaForCausalLM", SIZES | {"head_dim": 10}),
    "gemma, sequence": ("GemmaForSequenceClassification", SIZES | {"head_dim": 10, "num_labels": 3}),
    "gemma2": (
        "Gemma2ForCausalLM",
        SIZES
        | {
            "head_dim": 10,
            "query_pre_attn_scalar": 7,
            "sliding_window": 5,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 1.5,
        },
    ),
    "gemma2, no soft-caps": (
        "Gemma2ForCausalLM",
        SIZES
        | {
            "head_dim": 10,
            "sliding_window": 5,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        SIZES
        | {
            "head_dim": 10,
            "query_pre_attn_scalar": 7,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
    "gemma3, bare": ("Gemma3TextModel", SIZES | {"head_dim": 10, "sliding_window": 5}),
    "phi3": ("Phi3ForCausalLM", SIZES),
    "phi3, longrope, partial": (
        "Phi3ForCausalLM",
        SIZES
        | {"hidden_size": 48, "original_max_position_embeddings": 16, "sliding_window": 7}
        | rope(
            "longrope", partial_rotary_factor=0.75, short_factor=[1.0, 1.5, 2.0], long_factor=[2.0, 3.0, 5.0]
        ),
    ),
    "olmo2": ("Olmo2ForCausalLM", SIZES),
    "olmo2, biases": ("Olmo2ForSequenceClassification", SIZES | {"attention_bias": True, "num_labels": 3}),
    "olmo3": (
        "Olmo3ForCausalLM",
        SIZES
        | {
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 12,
                    "rope_theta": 500.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            },
        },
    ),
    "smollm3": ("SmolLM3ForCausalLM", SIZES | {"no_rope_layer_interval": 2}),
    "smollm3, window": (
        "SmolLM3ForCausalLM",
        SIZES
        | {
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 5,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "gpt2": ("GPT2LMHeadModel", GPT2_SIZES),
    "gpt2, scales": (
        "GPT2LMHeadModel",
        GPT2_SIZES
        | {
            "scale_attn_by_inverse_layer_idx": True,
            "scale_attn_weights": False,
            "n_inner": 40,
            "tie_word_embeddings": False,
        },
    ),
    "gpt2, bare": ("GPT2Model", GPT2_SIZES),
    "gpt2, sequence": ("GPT2ForSequenceClassification", GPT2_SIZES | {"num_labels": 4}),
    "gpt2, token": ("GPT2ForTokenClassification", GPT2_SIZES | {"num_labels": 4}),
    "gpt2, span": ("GPT2ForQuestionAnswering", GPT2_SIZES),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_tiny_model_equals_its_twin(name: str, transformers: Any, tmp_path: Path) -> None:
    class_name, settings = MODELS[name]
    theirs = tiny(transformers, class_name, **settings)
    exempt = "dynamic" in name or "longrope" in name
    check_decoder(theirs, tmp_path, exempt=exempt)
