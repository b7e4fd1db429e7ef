"""Dense decoders: tiny random models of every family give the numbers of `transformers`, both ways."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from clearhead import ModelConfig
from clearhead.published.families import FAMILIES
from clearhead.published.mapping import read_config, write_config
from clearhead.published.weights import find_family
from reference.parity import check_decoder, tiny

# All sizes differ, so that swapped ones crash.
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
}

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


SHORT, LONG = [1.0, 1.5, 2.0], [2.0, 3.0, 5.0]

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


# ----------------------------------------------------------------------------------- spellings of config.json

OLD_ROPE = {"rope_theta": 777.0}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"short_factor": SHORT, "long_factor": LONG}

# What older files say, beside the sizes.
OLD: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"rope_scaling": None}),
    ("llama", OLD_ROPE | {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "torch_dtype": "float32"}),
    ("llama", OLD_ROPE | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}),
    ("llama", OLD_ROPE | {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
    ("llama", {"partial_rotary_factor": 0.5}),  # means nothing there without a scaling
    ("mistral", {}),
    ("mistral", OLD_ROPE | {"sliding_window": None}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 2}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3}),
    ("qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    ("gemma", OLD_ROPE | {"hidden_act": "gelu", "hidden_activation": None}),
    ("gemma2", {"sliding_window": 5, "attn_logit_softcapping": None}),
    ("gemma3_text", {}),
    (
        "gemma3_text",
        {"sliding_window": 5, "sliding_window_pattern": 2, "rope_theta": 500.0, "rope_local_base_freq": 30.0}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    ("phi3", OLD_ROPE | {"partial_rotary_factor": 0.5, "num_attention_heads": 3, "num_key_value_heads": 3}),
    (
        "phi3",
        OLD_ROPE | {"original_max_position_embeddings": 16, "rope_scaling": {"type": "longrope", **LONGROPE}},
    ),
    ("olmo2", OLD_ROPE),
    (
        "olmo3",
        {"rope_theta": 500000, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "sliding_window": 5},
    ),
    ("smollm3", {"no_rope_layer_interval": 2}),
    ("smollm3", {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [1, 0, 1, 0, 0]}),
]


def read(settings: dict[str, Any]) -> ModelConfig:
    family, class_name = find_family(settings)
    return read_config(family, settings, class_name)


@pytest.mark.parametrize(("model_type", "settings"), OLD, ids=[name for name, _ in OLD])
def test_old_spellings_mean_what_transformers_makes_of_them(
    model_type: str, settings: dict[str, Any], transformers: Any
) -> None:
    old = SIZES | {"model_type": model_type} | settings
    new = transformers.AutoConfig.for_model(**copy.deepcopy(old)).to_json_string(use_diff=False)
    assert read(old) == read(json.loads(new))


def test_old_spellings_that_transformers_does_not_read() -> None:
    """`su` was longrope's first name; older OLMo 3 files give one base to all layers."""
    longrope = {"original_max_position_embeddings": 16, "rope_scaling": {"type": "su", **LONGROPE}}
    scaling = read(SIZES | {"model_type": "phi3"} | longrope).rotary_scaling
    assert scaling is not None and scaling.kind == "longrope"
    olmo = read(SIZES | OLD_ROPE | {"model_type": "olmo3", "sliding_window": 5})
    assert (olmo.rotary_theta, olmo.window_rotary_theta) == (777.0, None)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_what_a_family_writes_it_reads(model_type: str) -> None:
    """Each class alone: config.json of our config is read to that config."""
    family = FAMILIES[model_type]
    own = {"n_embd": 36, "n_layer": 3, "n_head": 6, "n_inner": 56, "n_positions": 48}
    for class_name in family.classes:
        config = read_config(family, SIZES | own | {"id2label": {"0": "a", "1": "b", "2": "c"}}, class_name)
        assert config.n_labels == {"sequence": 3, "token": 3, "span": 2}.get(config.head, 0)
        written = json.loads(json.dumps(write_config(family, config, class_name)))
        assert read(written) == config
