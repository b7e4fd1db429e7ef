"""Recipes: TOML in and out without loss, each mistake named, every recipe of ours ready to run."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.model.config import ModelConfig
from clearhead.training import recipe as module
from clearhead.training.recipe import (
    DataConfig,
    Recipe,
    TrainConfig,
    differences,
    find_recipe,
    load_recipe,
    recipe_from_dict,
    save_recipe,
    with_vocabulary,
    write_whole,
)
from tiny_run import tiny_recipe

OURS = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))

train_settings = st.fixed_dictionaries(
    {
        "steps": st.none() | st.integers(1, 10**12),
        "minutes": st.none() | st.floats(1e-3, 1e6),
        "lr": st.floats(1e-9, 1e3),
        "warmup": st.floats(0, 0.999),
        "schedule": st.sampled_from(["cosine", "linear"]),
        "document_mask": st.booleans(),
        "seed": st.integers(0, 2**63 - 1),
        "sample_every": st.integers(1, 10**9),
        "sample_prompt": st.text(),
    }
)


@settings(max_examples=60, deadline=None)
@given(train=train_settings, separator=st.none() | st.text(), window=st.none() | st.integers(1, 99))
def test_a_saved_recipe_comes_back_equal(tmp_path_factory, train, separator, window):
    """Every float to its last bit, every text to its last character, none for none."""
    recipe = Recipe(
        DataConfig(document_separator=separator), ModelConfig(window=window), TrainConfig(**train)
    )
    path = tmp_path_factory.mktemp("recipe") / "recipe.toml"
    save_recipe(recipe, path)
    assert load_recipe(path) == recipe


def test_what_is_left_away_keeps_its_default(tmp_path):
    path = tmp_path / "short.toml"
    path.write_text("[train]\nsteps = 5\nlr = 1\n", encoding="utf-8")  # a whole number will do for a float
    assert load_recipe(path) == Recipe(train=TrainConfig(steps=5, lr=1.0))
    assert recipe_from_dict({}) == Recipe()


def test_a_saved_recipe_holds_every_choice(tmp_path):
    """What is not none is written, so that a later change of a default changes no old run."""
    save_recipe(Recipe(), tmp_path / "recipe.toml")
    written = tomllib.loads((tmp_path / "recipe.toml").read_text(encoding="utf-8"))
    for part in ("data", "model", "train"):
        values = vars(getattr(Recipe(), part))
        assert written[part].keys() == {name for name, value in values.items() if value is not None}


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_our_recipes_are_ready_to_run(path):
    """Each is found by its name, its parts fit, and its head tells the command."""
    assert find_recipe(path.stem).samefile(path)
    load_recipe(path).check()
    assert f"clearhead train {path.stem}" in path.read_text(encoding="utf-8").split("\n\n")[0]


def test_a_file_goes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("demo").write_text("[train]\nsteps = 1\n", encoding="utf-8")
    assert load_recipe(find_recipe("demo")).train.steps == 1


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"train": {"lr": "high"}}, r"\[train\] lr='high' must be a number, not a text"),
        ({"train": {"steps": 1.5}}, r"\[train\] steps=1.5 must be a whole number or none, not a number"),
        (
            {"train": {"steps": True}},
            r"\[train\] steps=True must be a whole number or none, not true or false",
        ),
        ({"train": {"schedule": "cosin"}}, "choose one of cosine, linear, constant"),
        ({"model": {"n_head": 2}}, "unknown model setting 'n_head'; did you mean 'n_heads'?"),
        ({"data": {"splitter": "words"}}, r"\[data\] unknown splitter 'words'; known: gpt2"),
        ({"train": 5}, r"\[train\] must be a table of settings, not 5"),
        ({"tain": {}}, "unknown recipe setting 'tain'; did you mean 'train'?"),
    ],
)
def test_mistakes_in_tables(tables, message, unchecked):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        recipe_from_dict(tables)


@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": float("inf")},
        {"lr": float("nan")},
        {"eps": -1e-8},
        {"weight_decay": float("nan")},
        {"beta2": 1.0},
        {"clip": float("inf")},
        {"minutes": float("inf")},
        {"tokens": 0},
        {"warmup": float("nan")},
        {"seed": 2**63},
        {"max_skips": -1},
        {"sample_every": -1},
        {"sample_tokens": -1},
        {"eval_every": 0},
        {"eval_tokens": 0},
        {"save_every": 0},
        {"accumulation": 0},
        {"context_length": 0},
        {"keep": 1},
    ],
    ids=str,
)
def test_settings_out_of_range_are_named(wrong):
    """The message names the setting and its value."""
    [(name, value)] = wrong.items()
    with pytest.raises(ValueError, match=re.escape(f"{name}={value}")):
        TrainConfig(**wrong)


@pytest.mark.parametrize("how", [{"parallel": "fsdp"}, {"replicate": 2}, {"tensor_parallel": 2}], ids=str)
def test_ranks_that_share_out_a_model_write_no_samples(how):
    """One that drew another token than the others would leave them waiting."""
    with pytest.raises(ValueError, match="sample_every=5 needs the whole model on one rank"):
        TrainConfig(steps=5, sample_every=5, **how)


def test_exactly_one_budget():
    for train in (TrainConfig(), TrainConfig(steps=5, tokens=100)):
        with pytest.raises(ValueError, match=r"exactly one budget of train.steps, .* got (none|steps=5 and)"):
            Recipe(train=train).check()
    Recipe(train=TrainConfig(minutes=0.5)).check()


def test_context_exactly_as_long_as_the_model_allows():
    tiny_recipe("x", model={"max_len": 16}, context_length=16).check()
    with pytest.raises(ValueError, match=r"context_length=17 exceeds model.max_len=16"):
        tiny_recipe("x", model={"max_len": 16}, context_length=17).check()


def test_differences_are_named_with_both_values():
    old = tiny_recipe("x")
    new = replace(old, train=replace(old.train, lr=0.5), data=replace(old.data, strict=True))
    assert differences(old, new) == ["data.strict: False -> True", "train.lr: 0.003 -> 0.5"]
    assert differences(old, old) == []


def test_the_vocabulary_follows_the_tokenizer():
    assert with_vocabulary(tiny_recipe("x"), 999).model.vocab_size == 999


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    """A recipe is never half there: a run whose recipe is torn could not be resumed."""
    path = tmp_path / "recipe.toml"
    write_whole(path, "old")

    def fail(self, target):
        raise OSError("no power")

    monkeypatch.setattr(module.Path, "replace", fail)
    with pytest.raises(OSError, match="no power"):
        write_whole(path, "new")
    assert path.read_text(encoding="utf-8") == "old"
