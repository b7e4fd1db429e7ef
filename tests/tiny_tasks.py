"""A small file of examples and a recipe for every objective, for tests of training."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clearhead.model.config import ModelConfig
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.recipe import DataConfig, Recipe, TrainConfig
from clearhead.training.tasks import MASK

END = "<|endoftext|>"
WORDS = ["red", "green", "old", "small", "cat", "dog", "bird", "house"]


def texts(count: int = 80) -> list[str]:
    """Texts of one to four words, all different."""
    found = []
    for n in range(count):
        words = [WORDS[(n * 7 + i * (n // 8 + 1)) % 8] for i in range(1 + n % 4)]
        found.append(" ".join(words) + f" {n}")
    return found


def write_bytes_tokenizer(folder: Path) -> Path:
    """A token for each byte, one that ends a text, one that hides another."""
    vocab = {i: bytes([i]) for i in range(256)} | {256: END.encode(), 257: MASK.encode()}
    return Tokenizer(vocab, [], (END, MASK)).save(folder / "bytes.json")


def jsonl(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def labelled(label: Callable[[int, str], Any]) -> str:
    return jsonl([{"text": text, "label": label(n, text)} for n, text in enumerate(texts())])


def question(text: str) -> dict[str, Any]:
    word = text.split()[0]
    return {"context": text, "question": "first?", "answers": [{"text": word, "answer_start": 0}]}


ENCODER, DECODER = {"shape": "encoder"}, {"shape": "decoder", "pool": "last"}
PAIRS = "".join(f"{text}\t{text.upper()}\n" for text in texts())
# objective -> model, name and content of the file, other settings of [data]
CASES: dict[str, tuple[dict[str, Any], str, str, dict[str, Any]]] = {
    "next_token": ({}, "a.txt", "\n\n".join(texts()), {"document_separator": "\n\n"}),
    "masked": (ENCODER, "a.txt", "\n\n".join(texts()), {"document_separator": "\n\n"}),
    "translation": (
        {"shape": "encoder-decoder"},
        "a.tsv",
        PAIRS,
        {},
    ),
    "classes": (ENCODER, "a.jsonl", labelled(lambda n, text: text.split()[0]), {}),
    "several_labels": (DECODER, "a.jsonl", labelled(lambda n, text: text.split()[:-1]), {}),
    "regression": (ENCODER, "a.jsonl", labelled(lambda n, text: n / 10), {}),
    "token_labels": (
        ENCODER,
        "a.conll",
        "\n\n".join("\n".join(f"{w} {'B-NUM' if w.isdigit() else 'O'}" for w in t.split()) for t in texts()),
        {},
    ),
    "span": (ENCODER, "a.jsonl", jsonl([question(text) for text in texts()]), {}),
    "contrastive": (ENCODER, "a.tsv", PAIRS, {}),
    "chat": (
        {},
        "a.jsonl",
        jsonl(
            [
                {"messages": [{"role": "user", "content": t}, {"role": "assistant", "content": t.upper()}]}
                for t in texts()
            ]
        ),
        {"form": "chat"},
    ),
}


def make_recipe(folder: Path, case: str, **changes: Any) -> Recipe:
    """A recipe whose file is written; `model` and `data` among the changes are settings of these parts."""
    model, name, content, data = CASES[case]
    (folder / name).write_text(content, encoding="utf-8")
    sizes: dict[str, Any] = {"vocab_size": 258, "d_model": 16, "n_layers": 1, "n_heads": 2, "max_len": 32}
    settings: dict[str, Any] = {
        "objective": "next_token" if case == "chat" else case,
        "steps": 4,
        "batch_size": 8,
    }
    ends: dict[str, Any] = {"context_length": 32, "eval_every": 2, "save_every": 10, "probes": 0}
    paths: dict[str, Any] = {"source": str(folder / name), "tokenizer": str(write_bytes_tokenizer(folder))}
    return Recipe(
        DataConfig(**paths | data | changes.pop("data", {})),
        ModelConfig(**sizes | model | changes.pop("model", {})),
        TrainConfig(**settings | ends | changes),
    )
