"""config.json of every family: older spellings mean the same as newer ones, and what is written is read."""

import copy
import json
from typing import Any

import pytest

from clearhead import ModelConfig
from clearhead.published.mapping import read_config, write_config
from clearhead.published.twins import TWINS, model_type
from clearhead.published.weights import FAMILIES, find_family
from reference.parity import their_config

# What the rows below say themselves.
CHOICES = (
    "rope_parameters", "layer_types", "sliding_window", "use_sliding_window", "max_window_layers",
    "no_rope_layers", "mlp_only_layers", "local_attention", "tie_word_embeddings",
)  # fmt: skip
BASES = {
    model_type(name): {key: value for key, value in settings.items() if key not in CHOICES}
    for name, (_, settings) in TWINS.items()
}


def base(family: str) -> dict[str, Any]:
    """The sizes of a family's tiny model, as config.json, without a choice of positions or windows."""
    return {"model_type": family} | BASES[family]


def read(settings: dict[str, Any]) -> ModelConfig:
    family, class_name = find_family(settings)
    return read_config(family, settings, class_name)


OLD_ROPE = {"rope_theta": 777.0}
LINEAR = OLD_ROPE | {"rope_scaling": {"type": "linear", "factor": 2.0}}
DYNAMIC = OLD_ROPE | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
YARN = OLD_ROPE | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
LLAMA3 = OLD_ROPE | {
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
}
LONGROPE = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 5.0, 6.0]}
WINDOW = {"use_sliding_window": True, "sliding_window": 5}

# All that have one rotary for all layers spell it alike.
ONE_ROTARY = (
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "olmo2", "smollm3",
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss",
)  # fmt: skip
ROPES = {"theta": OLD_ROPE, "linear": LINEAR, "dynamic": DYNAMIC, "yarn": YARN, "llama3": LLAMA3}

# What else older files say, beside the sizes.
OLD: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    *((family, rope) for family in ONE_ROTARY for rope in ROPES.values()),
    ("llama", {"rope_scaling": None, "torch_dtype": "float32"}),
    ("llama", {"partial_rotary_factor": 0.5}),  # means nothing there without a scaling
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 5}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 2}),
    ("qwen2", WINDOW | {"max_window_layers": 2}),
    ("qwen2", WINDOW | {"max_window_layers": 3}),
    ("qwen3", WINDOW | {"max_window_layers": 2}),
    ("gemma", {"hidden_act": "gelu", "hidden_activation": None}),
    ("gemma2", {"sliding_window": 5, "attn_logit_softcapping": None}),
    ("gemma3_text", {"sliding_window": 5, "sliding_window_pattern": 2}),
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
    (
        "olmo3",
        {"rope_theta": 500000, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "sliding_window": 5},
    ),
    ("smollm3", {"no_rope_layer_interval": 2}),
    ("smollm3", WINDOW | {"num_hidden_layers": 5, "no_rope_layers": [1, 0, 1, 0, 0]}),
    ("mixtral", {"sliding_window": None}),
    ("qwen2_moe", {"use_sliding_window": False, "sliding_window": 0}),  # 0: off
    ("qwen2_moe", WINDOW | {"max_window_layers": 1}),
    ("qwen2_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True}),
    ("qwen3_moe", WINDOW | {"max_window_layers": 2, "num_experts": 5}),
    ("qwen3_moe", {"mlp_only_layers": [0, 2]}),
    ("deepseek_v3", {"rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    ("deepseek_v3", {"rope_interleave": False, "q_lora_rank": None}),
    ("gpt_oss", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "truncate": False}}),
    ("modernbert", {"global_attn_every_n_layers": 2, "local_attention": 6}),
    ("modernbert", {"global_rope_theta": 300.0, "local_rope_theta": 50.0}),
    ("t5", {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu_new", "is_gated_act": True}),
    ("t5", {"num_decoder_layers": None}),
    ("marian", {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 61}),
    ("gpt2", {"n_inner": None, "scale_attn_by_inverse_layer_idx": True}),
]


@pytest.mark.parametrize(("family", "settings"), OLD, ids=[name for name, _ in OLD])
def test_old_spellings_mean_what_transformers_makes_of_them(
    family: str, settings: dict[str, Any], transformers: Any
) -> None:
    old = base(family) | settings
    assert read(old) == read(their_config(transformers, old))


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ONE_ROTARY)
def test_an_old_rotary_is_felt(family: str, rope: str) -> None:
    """So that the test above compares more than two defaults."""
    config = read(base(family) | ROPES[rope])
    assert config.rotary_theta == 777.0
    kind = None if config.rotary_scaling is None else config.rotary_scaling.kind
    default = "yarn" if family == "gpt_oss" else None  # scaled even where a file says nothing
    assert kind == (default if rope == "theta" else rope)


def test_old_spellings_that_transformers_does_not_read() -> None:
    """`su` was longrope's first name; older OLMo 3 files give one base to all layers."""
    longrope = {"original_max_position_embeddings": 16, "rope_scaling": {"type": "su", **LONGROPE}}
    scaling = read(base("phi3") | longrope).rotary_scaling
    assert scaling is not None and scaling.kind == "longrope"
    olmo = read(base("olmo3") | OLD_ROPE | {"sliding_window": 5})
    assert (olmo.rotary_theta, olmo.window_rotary_theta) == (777.0, None)


def test_untied_and_unscaled_are_one_in_older_t5_files() -> None:
    """`tie_word_embeddings: false` also meant that outputs are not scaled; newer files say that by itself."""
    scaled = 24**-0.5
    said: list[tuple[dict[str, Any], bool, float]] = [
        ({}, True, scaled),
        ({"tie_word_embeddings": True}, True, scaled),
        ({"tie_word_embeddings": False}, False, 1.0),
        ({"tie_word_embeddings": True, "scale_decoder_outputs": False}, True, 1.0),
        ({"tie_word_embeddings": False, "scale_decoder_outputs": True}, False, scaled),
    ]
    for keys, tied, scale in said:
        config = read(base("t5") | keys)
        assert (config.tied, config.logit_scale) == (tied, scale), keys


def test_a_gated_gelu_of_t5_is_always_the_tanh_form() -> None:
    config = read(base("t5") | {"feed_forward_proj": "gated-gelu"})
    assert (config.gated, config.activation) == (True, "gelu_tanh")
    assert read(base("t5") | {"feed_forward_proj": "gelu"}).activation == "gelu"


def test_an_eps_is_the_files_except_where_it_is_fixed() -> None:
    """Those of RoBERTa and OLMo 2 are not their classes' defaults; those of some others are in no key."""
    assert read(base("roberta") | {"layer_norm_eps": 1e-5}).norm_eps == 1e-5
    assert read(base("olmo2") | {"rms_norm_eps": 1e-6}).norm_eps == 1e-6
    fixed = {"distilbert": 1e-12, "bart": 1e-5, "marian": 1e-5}
    for family, eps in fixed.items():
        assert read(base(family) | {"layer_norm_eps": 0.5, "norm_eps": 0.5}).norm_eps == eps
    latent = read(base("deepseek_v3") | {"rms_norm_eps": 0.5})
    assert latent.norm_eps == 0.5 and latent.latent is not None and latent.latent.norm_eps == 1e-6


def test_a_table_of_positions_is_longer_than_the_longest_sequence() -> None:
    """RoBERTa's first two rows are for padding's count, BART's two beyond what config.json says."""
    roberta = read(base("roberta") | {"max_position_embeddings": 514})
    assert (roberta.max_len, roberta.position_offset) == (512, 2)
    bart = read(base("bart") | {"max_position_embeddings": 1024})
    assert (bart.max_len, bart.position_offset) == (1024, 2)


def test_labels_are_counted_by_their_names() -> None:
    """`architectures` decides the head; without it the family's first class is meant."""
    settings = base("bert") | {"architectures": ["BertForTokenClassification"]}
    assert read(settings).n_labels == 2
    assert read(settings | {"num_labels": 3}).n_labels == 3
    config = read(settings | {"id2label": {"0": "a", "1": "b", "2": "c", "3": "d"}, "num_labels": 3})
    assert (config.head, config.n_labels) == ("token", 4)
    assert read(base("bert")).head == "none" and read(base("llama")).head == "lm"


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_family_writes_it_reads(family: str) -> None:
    """Each class alone: config.json of our config is read to that config."""
    table, labels = FAMILIES[family], {"id2label": {"0": "a", "1": "b", "2": "c"}}
    for class_name in table.classes:
        config = read_config(table, copy.deepcopy(base(family) | labels), class_name)
        assert config.n_labels == {"sequence": 3, "token": 3, "span": 2}.get(config.head, 0)
        written = json.loads(json.dumps(write_config(table, config, class_name)))
        assert read_config(table, written, class_name) == config
