"""A corpus and a recipe so small that a run takes a second, for tests of training and the command line."""

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from clearhead.model.config import ModelConfig
from clearhead.training.recipe import DataConfig, Recipe, TrainConfig, save_recipe

WORDS = (
    "cat",
    "dog",
    "bird",
    "house",
    "tree",
    "sees",
    "finds",
    "old",
    "small",
    "green",
    "and",
    "under",
    "the",
)


def write_corpus(folder: Path, documents: int = 60) -> Path:
    """Write text files of made-up sentences, the same on every machine; 2 of 60 are for validation."""
    folder.mkdir(parents=True)
    for number in range(documents):
        digest = b"".join(hashlib.sha256(f"{number} {part}".encode()).digest() for part in range(3))
        text = " ".join(WORDS[byte % len(WORDS)] for byte in digest)
        (folder / f"{number:03}.txt").write_text(f"{text}.\n", encoding="utf-8")
    return folder


def tiny_recipe(
    source: Path | str,
    *,
    data: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **train: Any,
) -> Recipe:
    """Return a recipe of 10 steps; `data`, `model` and the other arguments change settings of its parts."""
    steps = {} if {"tokens", "minutes"} & train.keys() else {"steps": 10}
    settings = {"batch_size": 4, "context_length": 16, "eval_every": 5, "eval_tokens": 100, "save_every": 5}
    return Recipe(
        DataConfig(**{"source": str(source), "vocab_size": 280, **(data or {})}),
        ModelConfig(
            **{"vocab_size": 280, "d_model": 32, "n_layers": 2, "n_heads": 2, "max_len": 32, **(model or {})}
        ),
        replace(TrainConfig(), **{**steps, **settings, **train}),
    )


def write_recipe(path: Path, recipe: Recipe) -> Path:
    """Write a recipe as the TOML file that `clearhead train` reads."""
    save_recipe(recipe, path)
    return path
