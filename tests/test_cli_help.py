"""The help of `clearhead train`: short, or whole; each flag once, under its concern, as it is written."""

import shlex
from dataclasses import dataclass, fields

import pytest

from clearhead.cli import main
from clearhead.cli_help import USUAL, comments_of, groups_of
from clearhead.cli_train import TrainCommand, read_train
from clearhead.training.recipe import Recipe

CONCERNS = ["the run", "what is learned", "data", "model", "time, batches, machine", "the optimizer"]
CONCERNS += ["watching", "saving", "several processes"]


@dataclass
class Small:
    """Fields of every kind of comment."""

    # first things
    one: int = 1  # a number
    two: tuple[float, ...] = ()  # some numbers
    # second things
    three: str | None = None

    def method(self) -> None:
        # a comment in code is no heading
        return


def told(words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 0
    return capsys.readouterr().out.splitlines()


def test_comments_become_texts_and_headings():
    texts, headings = comments_of(Small)
    assert texts == {"one": "a number", "two": "some numbers"}
    assert headings == {"one": "first things", "three": "second things"}


def test_every_setting_is_in_one_group():
    """In the order of its dataclass, each with a text or with its choices."""
    for prefix, table in vars(Recipe()).items():
        groups = groups_of(table, f"{prefix}.", prefix)
        assert len(groups) == {"data": 1, "model": 8, "train": 6}[prefix]
        flags = [flag for group in groups.values() for flag in group]
        names = [flag.name.strip("[]") for flag in flags]
        assert names == [f"{prefix}.{field.name}" for field in fields(table)]
    assert not [
        flag.name for group in groups_of(Recipe().train, "", "").values() for flag in group if not flag.text
    ]


def test_the_usual_flags_exist():
    own = {field.name for field in fields(TrainCommand)}
    tables = {f"{part}.{field.name}" for part, table in vars(Recipe()).items() for field in fields(table)}
    assert set(USUAL) <= own | tables


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_help_is_short_and_in_order(columns, capsys, monkeypatch):
    """The usual flags in the order of concerns; what a recipe sets is told, too; no line is too wide."""
    monkeypatch.setenv("COLUMNS", str(columns))
    short, whole = told("train --help", capsys), told("train --help-all", capsys)
    assert len(short) <= (70 if columns == 80 else 56)
    assert all(len(line) <= max(columns, 98) for line in [*short, *whole])
    assert [line for line in short if line in CONCERNS] == CONCERNS
    shown = [line.partition(":")[0] for line in whole if line.partition(":")[0] in CONCERNS]
    assert list(dict.fromkeys(shown)) == CONCERNS
    assert any("--help-all" in line for line in short)
    assert not any("embed-lr-scale" in line for line in short)
    assert any("--train.embed-lr-scale 20.0" in line for line in told("train demo --help", capsys))


def test_flags_can_be_given_as_they_are_shown():
    """All flags that are shown with a value, given with that value, change nothing."""
    given: list[str] = []
    start = read_train(["demo"])
    for prefix, table in vars(start.settings).items():
        for flag in (flag for group in groups_of(table, f"{prefix}.", prefix).values() for flag in group):
            words = shlex.split(flag.written)
            if not words[-1].isupper() and "[" not in flag.written and "..." not in words:
                given += words
    assert len(given) > 100
    assert read_train(["demo", *given]).settings == start.settings


def test_settings_of_a_table_in_the_recipe(tmp_path, capsys):
    """Experts are flags where the recipe has some, and a pointer to the recipe elsewhere."""
    recipe = tmp_path / "experts.toml"
    recipe.write_text(
        "[model.experts]\nn_experts = 6\ntop_k = 2\nd_ff = 48\n[train]\nsteps = 3\n", encoding="utf-8"
    )
    lines = told(f"train {recipe} --help", capsys)
    assert any(line.startswith("  --model.experts.n-experts 6 ") for line in lines)
    assert any(line.startswith("  [model.experts] ") for line in told("train --help-all", capsys))


def test_several_processes_tell_help_once(capsys):
    """By the one that starts them."""
    assert told("launch --processes 2 train demo --help", capsys) == told("train demo --help", capsys)
