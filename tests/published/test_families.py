"""Dense decoders: tiny random models of every family give the numbers of `transformers`, both ways."""

from pathlib import Path
from typing import Any

import pytest

from reference.parity import check_decoder, tiny

# All sizes differ, so that swapped ones crash; 5 query heads of 8 are not d_model either.
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
}


@pytest.mark.parametrize("name", MODELS)
def test_a_tiny_model_equals_its_twin(name: str, transformers: Any, tmp_path: Path) -> None:
    class_name, settings = MODELS[name]
    theirs = tiny(transformers, class_name, **settings)
    exempt = "dynamic" in name or "longrope" in name
    check_decoder(theirs, tmp_path, exempt=exempt)
