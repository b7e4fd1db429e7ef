"""A tiny model of every family, as its config.json: what the self-check builds with random weights.

All sizes differ, the number of heads and their width too, so that swapped ones crash; windows are shorter
than the sequences and rotary scalings begin within them, so that both are felt.
"""

from typing import Any

Json = dict[str, Any]

SPECIAL = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
DECODER: Json = SPECIAL | {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 60,
}
WIDE_HEADS: Json = DECODER | {"head_dim": 10}
WINDOW: Json = {"use_sliding_window": True, "sliding_window": 5}
ALTERNATING: Json = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
# multiples of 8, which the grouped products of `transformers` need in bf16
EXPERTS: Json = DECODER | {
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
YARN: Json = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3: Json = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
TWO_ROTARIES: Json = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 3000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}
ENCODER: Json = {
    "vocab_size": 59,
    "hidden_size": 24,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
}
BOTH: Json = SPECIAL | {
    "vocab_size": 59,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 44,
    "max_position_embeddings": 30,
    "decoder_start_token_id": 3,
}
T5: Json = {
    "vocab_size": 59,
    "d_model": 24,
    "d_kv": 5,
    "d_ff": 40,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 10,
    "relative_attention_max_distance": 16,
    "pad_token_id": 1,
    "eos_token_id": 3,
    "decoder_start_token_id": 1,
}

# name in the table -> class, settings
TWINS: dict[str, tuple[str, Json]] = {
    "gpt2": (
        "GPT2LMHeadModel",
        SPECIAL
        | {"vocab_size": 99, "n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 60, "n_inner": 40},
    ),
    "llama": ("LlamaForCausalLM", WIDE_HEADS | {"rope_parameters": LLAMA3, "attention_bias": True}),
    "mistral": ("MistralForCausalLM", DECODER | {"sliding_window": 5}),
    "qwen2": ("Qwen2ForCausalLM", DECODER | WINDOW | {"max_window_layers": 1, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", WIDE_HEADS | WINDOW | ALTERNATING),
    "gemma": ("GemmaForCausalLM", WIDE_HEADS),
    "gemma2": (
        "Gemma2ForCausalLM",
        WIDE_HEADS
        | {"query_pre_attn_scalar": 7, "sliding_window": 5}
        | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.5},
    ),
    "gemma3_text": (
        "Gemma3ForCausalLM",
        WIDE_HEADS
        | ALTERNATING
        | {"query_pre_attn_scalar": 7, "sliding_window": 5, "rope_parameters": TWO_ROTARIES},
    ),
    "phi3": ("Phi3ForCausalLM", DECODER | {"sliding_window": 7}),
    "olmo2": ("Olmo2ForCausalLM", DECODER | {"attention_bias": True}),
    "olmo3": (
        "Olmo3ForCausalLM",
        DECODER
        | ALTERNATING
        | {"sliding_window": 5, "rope_parameters": TWO_ROTARIES | {"full_attention": YARN}},
    ),
    "smollm3": ("SmolLM3ForCausalLM", DECODER | WINDOW | {"no_rope_layers": [0, 1, 0], "mlp_bias": True}),
    "mixtral": ("MixtralForCausalLM", EXPERTS | {"num_local_experts": 7, "sliding_window": 5}),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        EXPERTS | {"num_experts": 7, "shared_expert_intermediate_size": 32, "mlp_only_layers": [1]},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        EXPERTS | WINDOW | {"num_experts": 7, "head_dim": 10, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "olmoe": ("OlmoeForCausalLM", EXPERTS | {"num_experts": 7, "clip_qkv": 0.7}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        EXPERTS
        | {"num_key_value_heads": 6, "n_routed_experts": 12, "n_shared_experts": 2, "n_group": 4}
        | {"topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 28, "kv_lora_rank": 24}
        | {"qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 14}
        | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        EXPERTS
        | {"num_local_experts": 7, "head_dim": 10, "sliding_window": 5, "swiglu_limit": 0.5}
        | {"rope_parameters": YARN | {"truncate": False}},
    ),
    "bert": ("BertForMaskedLM", ENCODER),
    "roberta": (
        "RobertaForMaskedLM",
        ENCODER | {"layer_norm_eps": 1e-5, "type_vocab_size": 1, "max_position_embeddings": 26},
    ),
    "distilbert": (
        "DistilBertForMaskedLM",
        {"vocab_size": 59, "dim": 24, "n_layers": 2, "n_heads": 4, "hidden_dim": 56, "pad_token_id": 1}
        | {"max_position_embeddings": 40},
    ),
    "modernbert": (
        "ModernBertForMaskedLM",
        ENCODER
        | SPECIAL
        | {"num_hidden_layers": 5, "local_attention": 10, "cls_token_id": 2, "sep_token_id": 3},
    ),
    "marian": (
        "MarianMTModel",
        BOTH
        | {"decoder_start_token_id": 1, "forced_eos_token_id": 3}
        | {"scale_embedding": True, "activation_function": "swish"},
    ),
    "bart": ("BartForConditionalGeneration", BOTH),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5 v1.1": (
        "T5ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
}


def model_type(name: str) -> str:
    """The family of a row of the table."""
    return name.split()[0]
