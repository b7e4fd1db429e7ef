"""The sizes of published models, from their config.json alone: dense decoders, encoders, encoder-decoders.

Those of mixtures of experts stand in test_families_experts.py. The numbers are what `transformers` counts,
and a head of its own where the published file has one. Nothing is allocated.
"""

from typing import Any

import pytest

from clearhead.model.summary import summarise
from clearhead.published.mapping import read_config
from clearhead.published.weights import find_family

# number of parameters, class, what config.json says of sizes
PUBLISHED: dict[str, tuple[int, str, dict[str, Any]]] = {
    "gpt2": (
        124_439_808,
        "GPT2LMHeadModel",
        {
            "model_type": "gpt2", "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12,
            "n_positions": 1024, "n_ctx": 1024,
        },
    ),
    "gpt2-xl": (
        1_557_611_200,
        "GPT2LMHeadModel",
        {
            "model_type": "gpt2", "vocab_size": 50257, "n_embd": 1600, "n_layer": 48, "n_head": 25,
            "n_positions": 1024,
        },
    ),
    "Llama-2-7b": (
        6_738_415_616,
        "LlamaForCausalLM",
        {
            "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
        },
    ),
    "Llama-3.1-8B": (
        8_030_261_248,
        "LlamaForCausalLM",
        {
            "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
        },
    ),
    "Llama-3.2-1B": (
        1_235_814_400,
        "LlamaForCausalLM",
        {
            "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
            "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
            "max_position_embeddings": 131072, "tie_word_embeddings": True,
        },
    ),
    "SmolLM2-135M": (
        134_515_008,
        "LlamaForCausalLM",
        {
            "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
            "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
            "max_position_embeddings": 8192, "tie_word_embeddings": True,
        },
    ),
    "TinyLlama-1.1B": (
        1_100_048_384,
        "LlamaForCausalLM",
        {
            "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
            "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
            "max_position_embeddings": 2048,
        },
    ),
    "Mistral-7B-v0.1": (
        7_241_732_096,
        "MistralForCausalLM",
        {
            "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
            "max_position_embeddings": 32768, "sliding_window": 4096,
        },
    ),
    "Qwen2-7B": (
        7_615_616_512,
        "Qwen2ForCausalLM",
        {
            "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
            "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
            "max_position_embeddings": 131072,
        },
    ),
    "Qwen3-8B": (
        8_190_735_360,
        "Qwen3ForCausalLM",
        {
            "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
            "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
            "max_position_embeddings": 40960,
        },
    ),
    "gemma-2b": (
        2_506_172_416,
        "GemmaForCausalLM",
        {
            "model_type": "gemma", "vocab_size": 256000, "hidden_size": 2048, "intermediate_size": 16384,
            "num_hidden_layers": 18, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256,
            "max_position_embeddings": 8192,
        },
    ),
    "gemma-2-9b": (
        9_241_705_984,
        "Gemma2ForCausalLM",
        {
            "model_type": "gemma2", "vocab_size": 256000, "hidden_size": 3584, "intermediate_size": 14336,
            "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
            "max_position_embeddings": 8192,
        },
    ),
    "gemma-3-1b": (
        999_885_952,
        "Gemma3ForCausalLM",
        {
            "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152,
            "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32768,
        },
    ),
    "Phi-3-mini": (
        3_821_079_552,
        "Phi3ForCausalLM",
        {
            "model_type": "phi3", "vocab_size": 32064, "hidden_size": 3072, "intermediate_size": 8192,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
        },
    ),
    "OLMo-2-7B": (
        7_298_617_344,
        "Olmo2ForCausalLM",
        {
            "model_type": "olmo2", "vocab_size": 100352, "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
        },
    ),
    "Olmo-3-7B": (
        7_298_011_136,
        "Olmo3ForCausalLM",
        {
            "model_type": "olmo3", "vocab_size": 100278, "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32,
            "max_position_embeddings": 65536,
        },
    ),
    "SmolLM3-3B": (
        3_075_098_624,
        "SmolLM3ForCausalLM",
        {
            "model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 11008,
            "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4,
            "max_position_embeddings": 65536,
        },
    ),
    "bert-base-uncased": (
        109_514_298,
        "BertForMaskedLM",
        {
            "model_type": "bert", "vocab_size": 30522, "hidden_size": 768, "intermediate_size": 3072,
            "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 512,
            "type_vocab_size": 2,
        },
    ),
    "MiniLM-L6": (
        22_713_216,
        "BertModel",
        {
            "model_type": "bert", "vocab_size": 30522, "hidden_size": 384, "intermediate_size": 1536,
            "num_hidden_layers": 6, "num_attention_heads": 12, "max_position_embeddings": 512,
            "type_vocab_size": 2,
        },
    ),
    "roberta-base": (
        124_697_433,
        "RobertaForMaskedLM",
        {
            "model_type": "roberta", "vocab_size": 50265, "hidden_size": 768, "intermediate_size": 3072,
            "num_hidden_layers": 12, "num_attention_heads": 12, "max_position_embeddings": 514,
            "type_vocab_size": 1, "layer_norm_eps": 1e-05,
        },
    ),
    "distilbert-base": (
        66_985_530,
        "DistilBertForMaskedLM",
        {
            "model_type": "distilbert", "vocab_size": 30522, "dim": 768, "hidden_dim": 3072, "n_layers": 6,
            "n_heads": 12, "max_position_embeddings": 512,
        },
    ),
    "ModernBERT-base": (
        149_655_232,
        "ModernBertForMaskedLM",
        {
            "model_type": "modernbert", "vocab_size": 50368, "hidden_size": 768, "intermediate_size": 1152,
            "num_hidden_layers": 22, "num_attention_heads": 12, "max_position_embeddings": 8192,
        },
    ),
    "opus-mt-en-de": (
        73_944_309,  # sinusoids are not counted, the bias of the logits is
        "MarianMTModel",
        {
            "model_type": "marian", "vocab_size": 58101, "decoder_vocab_size": 58101, "d_model": 512,
            "encoder_layers": 6, "decoder_layers": 6, "encoder_attention_heads": 8,
            "decoder_attention_heads": 8, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048,
            "max_position_embeddings": 512, "scale_embedding": True, "pad_token_id": 58100,
            "eos_token_id": 0, "decoder_start_token_id": 58100,
        },
    ),
    "bart-large": (
        406_291_456,
        "BartModel",
        {
            "model_type": "bart", "vocab_size": 50265, "d_model": 1024, "encoder_layers": 12,
            "decoder_layers": 12, "encoder_attention_heads": 16, "decoder_attention_heads": 16,
            "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096, "max_position_embeddings": 1024,
        },
    ),
    "t5-small": (
        60_506_624,
        "T5ForConditionalGeneration",
        {
            "model_type": "t5", "vocab_size": 32128, "d_model": 512, "d_kv": 64, "d_ff": 2048,
            "num_layers": 6, "num_decoder_layers": 6, "num_heads": 8,
        },
    ),
    "flan-t5-base": (
        247_577_856,
        "T5ForConditionalGeneration",
        {
            "model_type": "t5", "vocab_size": 32128, "d_model": 768, "d_kv": 64, "d_ff": 2048,
            "num_layers": 12, "num_decoder_layers": 12, "num_heads": 12, "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings_make_models_of_the_published_size(name: str) -> None:
    n_parameters, class_name, settings = PUBLISHED[name]
    family, class_name = find_family(settings | {"architectures": [class_name]})
    assert summarise(read_config(family, settings, class_name)).n_parameters == n_parameters
