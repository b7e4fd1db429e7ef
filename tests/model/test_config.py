"""ModelConfig: what follows from what, and a clear message for each mistake."""

import json

import pytest

from clearhead.model.config import ModelConfig


def test_sizes_that_are_not_given_follow_from_the_others() -> None:
    config = ModelConfig(d_model=512, n_heads=8)
    assert (config.d_head, config.n_kv_heads, config.d_ff) == (64, 8, 1344)
    assert ModelConfig(d_model=512, n_heads=8, gated=False).d_ff == 2048
    free = ModelConfig(d_model=30, n_heads=4, d_head=10, n_kv_heads=2, d_ff=17)
    assert (free.d_head, free.n_kv_heads, free.d_ff) == (10, 2, 17)


def test_replace_lets_them_follow_again() -> None:
    """Doubling the width doubles the heads' width; what was chosen stays chosen."""
    config = ModelConfig(d_model=256, n_heads=4)
    assert config.replace(d_model=512) == ModelConfig(d_model=512, n_heads=4)
    assert config.replace(n_heads=8) == ModelConfig(d_model=256, n_heads=8)
    assert config.replace(gated=False).d_ff == 1024
    chosen = ModelConfig(d_model=256, n_heads=4, n_kv_heads=2, d_head=32, d_ff=100).replace(d_model=512)
    assert (chosen.n_kv_heads, chosen.d_head, chosen.d_ff) == (2, 32, 100)


def test_a_config_is_inert_data() -> None:
    """It compares, hashes, and travels as JSON unchanged."""
    config = ModelConfig(positions="learned", norm="layer", window=7, attn_scale=0.5)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert len({config, config.replace(), ModelConfig()}) == 2
    with pytest.raises(AttributeError):
        config.d_model = 1


# settings that cannot work, and what the message must name: the fields, the numbers, what would work
MISTAKES = {
    "heads": ({"d_model": 10, "n_heads": 3}, ["d_model=10", "n_heads=3", "d_head"]),
    "groups": ({"n_heads": 6, "d_model": 24, "n_kv_heads": 4}, ["n_heads=6", "n_kv_heads=4"]),
    "more groups than heads": ({"n_kv_heads": 8, "n_heads": 4}, ["n_heads=4", "n_kv_heads=8"]),
    "odd rotary": ({"d_model": 12, "n_heads": 4}, ["d_head=3", "rotary", "d_model=12", "n_heads=4"]),
    "odd free head": ({"d_head": 7}, ["d_head=7", "rotary"]),
    "odd sinusoid": ({"d_model": 9, "n_heads": 3, "positions": "sinusoidal"}, ["d_model=9", "sinusoidal"]),
    "no vocabulary": ({"vocab_size": 0}, ["vocab_size=0", "at least 1"]),
    "no layers": ({"n_layers": 0}, ["n_layers=0"]),
    "no heads": ({"n_heads": 0}, ["n_heads=0"]),
    "no groups": ({"n_kv_heads": 0}, ["n_kv_heads=0"]),
    "no head width": ({"d_head": 0}, ["d_head=0"]),
    "no feed-forward": ({"d_ff": 0}, ["d_ff=0"]),
    "negative width": ({"d_model": -4}, ["d_model=-4"]),
    "no length": ({"max_len": 0}, ["max_len=0"]),
    "no window": ({"window": 0}, ["window=0"]),
    "dropout above 1": ({"ff_dropout": 1.5}, ["ff_dropout=1.5", "[0, 1)"]),
    "dropout nan": ({"embed_dropout": float("nan")}, ["embed_dropout=nan"]),
    "negative eps": ({"norm_eps": -1e-5}, ["norm_eps=-1e-05"]),
    "nan eps": ({"norm_eps": float("nan")}, ["norm_eps=nan"]),
    "zero theta": ({"rotary_theta": 0}, ["rotary_theta=0", "positive"]),
    "activation": ({"activation": "swish"}, ["activation='swish'", "silu, gelu"]),
    "norm": ({"norm": "batch"}, ["norm='batch'", "rms, layer"]),
    "placement": ({"norm_placement": "middle"}, ["'middle'", "pre, post, branch, sandwich"]),
    "positions": ({"positions": "rope"}, ["positions='rope'", "rotary, learned"]),
    "layout": ({"rotary_layout": "quarter"}, ["rotary_layout='quarter'", "half, interleaved"]),
    "init": ({"init": "xavier"}, ["init='xavier'", "course, gpt2, zero_out"]),
    "a string for a number": ({"d_model": "256"}, ["d_model='256'", "a whole number", "a text"]),
    "a float for a whole number": ({"n_layers": 4.0}, ["n_layers=4.0", "a whole number", "a number"]),
    "a bool for a number": ({"n_heads": True}, ["n_heads=True", "a whole number", "true or false"]),
    "a bool for a fraction": ({"norm_eps": True}, ["norm_eps=True", "a number", "true or false"]),
    "a number for a bool": ({"tied": 1}, ["tied=1", "true or false", "a whole number"]),
    "a number for a name": ({"norm": 1}, ["norm=1", "rms, layer"]),
    "a list": ({"window": [3]}, ["window=[3]", "a whole number or none", "a list"]),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.usefixtures("unchecked")
def test_a_mistake_is_named_with_its_numbers(name: str) -> None:
    settings, words = MISTAKES[name]
    with pytest.raises(ValueError) as error:
        ModelConfig.from_dict(settings)
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown model setting 'n_head'; did you mean 'n_heads'"):
        ModelConfig.from_dict({"n_head": 4})
    with pytest.raises(ValueError, match="unknown model setting 'zzz'; known: vocab_size, shape, "):
        ModelConfig.from_dict({"zzz": 4})


@pytest.mark.usefixtures("unchecked")
def test_a_whole_number_may_stand_for_a_fraction() -> None:
    """TOML writes 10000 as readily as 10000.0."""
    assert ModelConfig.from_dict({"rotary_theta": 10000, "ff_dropout": 0}) == ModelConfig()


def test_limits_that_work() -> None:
    assert ModelConfig(d_model=9, n_heads=3, positions="none").d_head == 3
    assert ModelConfig(n_heads=4, n_kv_heads=4).kv_heads == 4
    assert ModelConfig(n_heads=4, n_kv_heads=1).kv_heads == 1
    assert ModelConfig(window=1, norm_eps=0.0, vocab_size=1).window == 1
