"""An option that is given and cannot take effect is refused, by name and with what it needs."""

from typing import Any

import pytest

from clearhead.model.config import ModelConfig
from clearhead.model.config_parts import ExpertsConfig, LatentConfig, RotaryScaling

LATENT = LatentConfig(q_rank=None, kv_rank=8, d_plain=6, d_rotary=4, d_value=6)
SMALL: dict[str, Any] = {"d_model": 32, "n_layers": 2}
EXPERTS = ExpertsConfig(n_experts=4, top_k=2, d_ff=8)
LINEAR = RotaryScaling("linear", factor=2.0)

# what is given -> the first word of the message, and what the option would need
IDLE: list[tuple[dict[str, Any], str, str]] = [
    ({"positions": "learned", "rotary_theta": 500.0}, "rotary_theta=500.0", "positions='rotary'"),
    ({"positions": "none", "rotary_layout": "interleaved"}, "rotary_layout=", "positions='rotary'"),
    ({"positions": "relative", "rotary_dim": 8}, "rotary_dim=8", "positions='rotary'"),
    ({"positions": "sinusoidal", "rotary_scaling": LINEAR}, "rotary_scaling=", "positions='rotary'"),
    ({"positions": "none", "rotary_layers": (True, False)}, "rotary_layers=", "positions='rotary'"),
    ({"position_offset": 2}, "position_offset=2", "positions='learned'"),
    ({"windowed_layers": (True, False)}, "windowed_layers=", "a window"),
    ({"window_rotary_theta": 50.0}, "window_rotary_theta=50.0", "a window"),
    ({"expert_layers": (True, False)}, "expert_layers=", "experts"),
    ({"experts": EXPERTS, "ff_bias": True}, "ff_bias=True", "a layer without experts"),
    ({"experts": EXPERTS, "ff_dropout": 0.1}, "ff_dropout=0.1", "a layer without experts"),
    ({"experts": EXPERTS, "gated": False}, "gated=False", "a layer without experts"),
    ({"latent": LATENT, "attn_softcap": 30.0}, "attn_softcap=30.0", "attention without a latent"),
    ({"latent": LATENT, "attn_sinks": True}, "attn_sinks=True", "attention without a latent"),
    ({"latent": LATENT, "qk_norm": "head"}, "qk_norm='head'", "attention without a latent"),
    ({"latent": LATENT, "out_bias": True}, "out_bias=True", "attention without a latent"),
    ({"norm": "layer", "norm_offset": 1.0}, "norm_offset=1.0", "an RMSNorm"),
    ({"norm": "layer", "norm_wide_gain": True}, "norm_wide_gain=True", "an RMSNorm"),
    (
        {"norm_placement": "post", "first_attn_norm": False},
        "first_attn_norm=False",
        "a norm before attention",
    ),
    ({"head_norm": True}, "head_norm=True", "head_activation"),
    ({"n_labels": 3}, "n_labels=3", "head='sequence' or 'token'"),
    ({"head": "span", "n_labels": 3}, "n_labels=3", "head='sequence' or 'token'"),
    ({"unit_length": False}, "unit_length=False", "head='embedding'"),
]


@pytest.mark.parametrize(("fields", "option", "need"), IDLE, ids=[option for _, option, _ in IDLE])
def test_an_option_without_effect_is_refused(fields: dict[str, Any], option: str, need: str) -> None:
    with pytest.raises(ValueError) as error:
        ModelConfig(**SMALL | fields)
    message = str(error.value)
    assert message.startswith(option) and message.endswith(f"has no effect: it needs {need}")


def test_the_same_options_are_taken_where_they_act() -> None:
    """What each message asks for is enough."""
    one: tuple[bool, bool] = (True, False)
    assert ModelConfig(**SMALL, rotary_theta=500.0, rotary_layers=one).turns(0)
    assert ModelConfig(**SMALL, positions="learned", position_offset=2).position_offset == 2
    assert ModelConfig(**SMALL, positions="relative", relative_buckets=8).relative_buckets == 8
    assert ModelConfig(**SMALL, window=3, windowed_layers=one, window_rotary_theta=50.0).has_window(0)
    assert ModelConfig(**SMALL, experts=EXPERTS, expert_layers=one, ff_bias=True, gated=False).ff_bias
    assert ModelConfig(**SMALL, norm="layer", qk_norm="head", norm_offset=1.0).norm_offset == 1.0
    assert ModelConfig(**SMALL, head="embedding", unit_length=False).unit_length is False
    assert ModelConfig(**SMALL, head="span", n_labels=2).n_labels == 2


def test_keys_and_values_of_a_latent_are_not_shared_between_heads() -> None:
    with pytest.raises(ValueError, match=r"n_kv_heads=2: latent attention .* n_heads=4"):
        ModelConfig(latent=LATENT, n_kv_heads=2)
    assert ModelConfig(latent=LATENT, n_kv_heads=4).kv_heads == 4


def test_parts_of_a_config_refuse_alike() -> None:
    with pytest.raises(ValueError, match="beta_fast has no effect on a linear scaling"):
        RotaryScaling("linear", factor=2.0, beta_fast=16.0)
    with pytest.raises(ValueError, match="short_factors has no effect on a yarn scaling"):
        RotaryScaling("yarn", factor=2.0, short_factors=(1.0,))
    with pytest.raises(ValueError, match=r"limit_slope=1\.5 has no effect without a limit"):
        ExpertsConfig(n_experts=4, top_k=2, d_ff=8, limit_slope=1.5)
    assert ExpertsConfig(n_experts=4, top_k=2, d_ff=8, limit=7.0, limit_slope=1.5).limit == 7.0


NONSENSE: list[tuple[dict[str, Any], str]] = [
    ({"attn_softcap": 0.0}, "attn_softcap=0.0 must be a positive number"),
    ({"logit_softcap": -1.0}, "logit_softcap=-1.0 must be a positive number"),
    ({"qkv_clip": 0.0}, "qkv_clip=0.0 must be a positive number"),
    ({"window": 3, "window_rotary_theta": 0.0}, "window_rotary_theta=0.0 must be a positive number"),
    ({"positions": "relative", "relative_buckets": 1}, "relative_buckets=1 gives 0 distances"),
    ({"positions": "relative", "relative_buckets": 3, "shape": "encoder"}, "relative_buckets=3 gives 0"),
    ({"positions": "relative", "relative_max_distance": 16}, "relative_max_distance=16 must be more"),
]


@pytest.mark.parametrize(("fields", "message"), NONSENSE, ids=[message for _, message in NONSENSE])
def test_numbers_that_would_give_nan_or_a_row_that_is_not_there_are_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**fields)


def test_the_ends_of_a_blend_stand_in_order() -> None:
    with pytest.raises(ValueError, match=r"low_freq_factor=4\.0 must be less than high_freq_factor=4\.0"):
        RotaryScaling("llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=4.0)
