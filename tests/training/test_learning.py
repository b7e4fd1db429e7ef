"""Each objective learns from real examples: its validation loss ends below what counting alone reaches.

Counting knows how often each token, class, tag or place occurs in the training examples, and nothing of the
text at hand: the unigram or majority figure. It is worked out here, from the same rows.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import real_examples
from clearhead.model.config import ModelConfig
from clearhead.text.encode_examples import Encoded
from clearhead.training.data import prepare_data
from clearhead.training.example_data import prepare_examples
from clearhead.training.example_tasks import Translation
from clearhead.training.loop import train
from clearhead.training.recipe import DataConfig, Recipe, TrainConfig
from clearhead.training.report import Watcher
from clearhead.training.run_folder import RunFolder

pytestmark = pytest.mark.usefixtures("unchecked")


class Looks(Watcher):
    """What every evaluation found."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def on_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        self.found.append(metrics)


def run_recipe(
    folder: Path, source: Path | str, model: dict[str, Any] | None = None, **settings: Any
) -> tuple[RunFolder, dict[str, Any]]:
    """Train a tiny model, and return its run and the last evaluation."""
    data = DataConfig(**{"source": str(source), "vocab_size": 320} | settings.pop("data", {}))
    sizes: dict[str, Any] = {"vocab_size": 320, "d_model": 48, "n_layers": 2, "n_heads": 4, "max_len": 40}
    steps: dict[str, Any] = {"steps": 100, "batch_size": 16, "context_length": 40, "lr": 1e-2, "warmup": 0.1}
    steps |= {"eval_every": 1000, "save_every": 1000, "probes": 0}
    recipe = Recipe(data, ModelConfig(**sizes | (model or {})), TrainConfig(**steps | settings))
    looks = Looks()
    run = train(recipe, folder / "run", watchers=[looks])
    return run, looks.found[-1]


def rows_of(run: RunFolder) -> tuple[list[Encoded], list[Encoded]]:
    """The rows that a run learned from, and those it was measured on."""
    data = prepare_examples(run.recipe(), run, lambda text: None)
    return list(data.train.rows), list(data.validation_rows)


def by_counting(train: list[int], validation: list[int], kinds: int) -> float:
    """The loss of the training frequencies (plus one) on validation, in nats."""
    counts = np.bincount(train, minlength=kinds) + 1.0
    return float(-np.log(counts / counts.sum())[validation].mean())


def asked(rows: list[Encoded]) -> list[int]:
    """All targets of rows that count, one after the other."""
    targets: list[Any] = [row.targets if isinstance(row.targets, list) else [row.targets] for row in rows]
    return [target for row in targets for target in row if target != -100]


def counted(run: RunFolder, kinds: int) -> float:
    train, validation = rows_of(run)
    return by_counting(asked(train), asked(validation), kinds)


ENCODER: dict[str, Any] = {"shape": "encoder", "pool": "mean"}


def test_next_token(tmp_path: Path):
    """Python's reference, topic by topic."""
    run, found = run_recipe(tmp_path, "pydoc", objective="next_token")
    data = prepare_data(run.recipe().data, run, lambda text: None)
    tokens = [np.asarray(shards.tokens).tolist() for shards in (data.train, data.validation)]
    assert found["validation_loss"] < 0.95 * by_counting(tokens[0], tokens[1], 320)


def test_masked(tmp_path: Path):
    """The same text from both sides."""
    model, data = ENCODER | {"vocab_size": 270, "n_layers": 1}, {"vocab_size": 270}
    run, found = run_recipe(
        tmp_path, "pydoc", model, objective="masked", data=data, mask_share=0.2, steps=200
    )
    shards = prepare_data(run.recipe().data, run, lambda text: None)
    tokens = [np.asarray(split.tokens).tolist() for split in (shards.train, shards.validation)]
    assert found["validation_loss"] < 0.95 * by_counting(tokens[0], tokens[1], 270)


def test_translation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Names of functions into words."""
    monkeypatch.setattr(Translation, "n_translated", 10)
    source = real_examples.write_names(tmp_path)
    run, found = run_recipe(
        tmp_path, source, {"shape": "encoder-decoder"}, objective="translation", context_length=24
    )
    assert found["validation_loss"] < 0.9 * counted(run, 320)
    assert 0 <= found["exact_match"] <= 1 and found["bleu"] > 0 and found["chrf"] > 0


def test_answers_of_chats(tmp_path: Path):
    """What the documentation of a function begins with; questions are read, answers are learned."""
    source = real_examples.write_chats(tmp_path)
    run, found = run_recipe(tmp_path, source, objective="next_token", data={"form": "chat"}, steps=60)
    assert found["validation_loss"] < 0.9 * counted(run, 320)


def test_classes(tmp_path: Path):
    """Is a line code, a comment or documentation?"""
    source = real_examples.write_kinds(tmp_path)
    run, found = run_recipe(tmp_path, source, ENCODER, objective="classes")
    assert run.labels() == ["code", "comment", "documentation"]
    assert found["validation_loss"] < 0.6 * counted(run, 3)
    assert found["accuracy"] > 0.8 and found["f1"] > 0.5


def test_several_labels(tmp_path: Path):
    """What does a line of code do?"""
    source = real_examples.write_doings(tmp_path)
    run, found = run_recipe(tmp_path, source, ENCODER, objective="several_labels")
    train, validation = (np.array([row.targets for row in rows]) for rows in rows_of(run))
    share = train.mean(0)
    counting = -(validation * np.log(share) + (1 - validation) * np.log(1 - share)).mean()
    assert found["validation_loss"] < 0.6 * counting
    assert found["f1"] > 0.8


def test_regression(tmp_path: Path):
    """How much of a line is neither letter nor digit?"""
    source = real_examples.write_signs(tmp_path)
    run, found = run_recipe(tmp_path, source, ENCODER, objective="regression")
    train, validation = (np.array([row.targets for row in rows]) for rows in rows_of(run))
    assert found["validation_loss"] < 0.5 * ((validation - train.mean()) ** 2).mean()
    assert found["correlation"] > 0.7 and run.labels() is None


def test_token_labels(tmp_path: Path):
    """What Python's tokenizer calls each token of a line."""
    source = real_examples.write_tokens(tmp_path)
    run, found = run_recipe(tmp_path, source, ENCODER, objective="token_labels")
    assert found["validation_loss"] < 0.4 * counted(run, len(run.labels() or []))
    assert found["accuracy"] > 0.85 and "f1" not in found


def test_spans(tmp_path: Path):
    """Where a signature has the function's name, and what it takes."""
    source = real_examples.write_questions(tmp_path)
    run, found = run_recipe(tmp_path, source, ENCODER, objective="span")
    train, validation = (np.array([row.targets for row in rows]) for rows in rows_of(run))
    sides = [by_counting(train[:, side].tolist(), validation[:, side].tolist(), 40) for side in (0, 1)]
    assert found["validation_loss"] < 0.6 * sum(sides) / 2
    assert found["f1"] > 0.3


def test_contrastive(tmp_path: Path):
    """Which documentation belongs to which function? Chance pays the logarithm of the batch's pairs."""
    source = real_examples.write_summaries(tmp_path)
    model, data = ENCODER | {"vocab_size": 1000, "n_layers": 1}, {"vocab_size": 1000}
    run, found = run_recipe(
        tmp_path, source, model, objective="contrastive", data=data, contrastive_both=True
    )
    assert found["validation_loss"] < 0.8 * math.log(16) and found["accuracy"] > 3 / 16
    assert run.config().head == "embedding"
