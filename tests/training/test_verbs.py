"""What a run has learned by heart, its verb says: from the recipe to the command line, every objective."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clearhead.cli import main
from clearhead.model.config import ModelConfig
from clearhead.training.loop import train
from clearhead.training.recipe import DataConfig, Recipe, TrainConfig

pytestmark = pytest.mark.slow

Learn = Callable[..., Path]

TABLE = "the cat sees\tKatze\nthe dog sees\tHund\nthe bird sees\tVogel\nthe house is old\tHaus\n"


@pytest.fixture(scope="module")
def learn(tmp_path_factory: pytest.TempPathFactory) -> Learn:
    """Let a small model learn a file by heart, and return the folder of its run."""

    def made(objective: Any, name: str, text: str, data: dict[str, Any], **model: Any) -> Path:
        home = tmp_path_factory.mktemp(objective)
        file = home / name
        file.write_text(text, encoding="utf-8")
        sizes: dict[str, Any] = {"d_model": 48, "n_layers": 2, "n_heads": 4, "max_len": 48}
        settings: dict[str, Any] = {"steps": 90, "batch_size": 4, "context_length": 48, "lr": 4e-3}
        often = {"eval_every": 90, "save_every": 90, "probes": 0, "device": "cpu"}
        recipe = Recipe(
            DataConfig(source=str(file), validation=str(file), vocab_size=300, **data),
            ModelConfig(**(sizes | model)),
            TrainConfig(objective=objective, **settings, **often),
        )
        train(recipe, home / "run")
        return home / "run"

    return made


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What a verb prints as JSON."""

    def run(*words: str | Path) -> Any:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
        capsys.readouterr()
        main([*map(str, words), "--device", "cpu", "--json"])
        return json.loads(capsys.readouterr().out)

    return run


def test_translate(learn: Learn, said: Any) -> None:
    """It begins and ends where the training pairs did."""
    run = learn("translation", "pairs.tsv", TABLE, {}, shape="encoder-decoder")
    found = said("translate", run, "the cat sees", "the bird sees", "the house is old")["texts"]
    assert [row["translation"] for row in found] == ["Katze", "Vogel", "Haus"]


@pytest.mark.parametrize("shape", ["encoder", "decoder"])
def test_classify(learn: Learn, said: Any, shape: str) -> None:
    options = {"pool": "last"} if shape == "decoder" else {"positions": "learned"}
    data = {"field": "1", "label_field": "2"}
    found = said("classify", learn("classes", "x.tsv", TABLE, data, shape=shape, **options), "the dog sees")
    assert found["kind"] == "class" and found["texts"][0]["labels"]["Hund"] > 0.8


def test_classify_with_several_labels_and_with_numbers(learn: Learn, said: Any) -> None:
    lines = ["the cat sees", "the dog sees", "the bird sees", "the house is old"]
    labels = [["animal", "cat"], ["animal"], ["animal"], []]
    rows = [json.dumps({"text": text, "label": label}) for text, label in zip(lines, labels, strict=True)]
    shape: dict[str, Any] = {"shape": "encoder", "pool": "mean"}
    found = said("classify", learn("several_labels", "x.jsonl", "\n".join(rows), {}, **shape), *lines)
    assert found["kind"] == "labels"
    names = [{name for name, sure in row["labels"].items() if sure > 0.5} for row in found["texts"]]
    assert names == [set(label) for label in labels]
    rows = [json.dumps({"text": text, "label": float(n)}) for n, text in enumerate(lines)]
    found = said("classify", learn("regression", "y.jsonl", "\n".join(rows), {}, **shape), *lines)
    assert found["kind"] == "number"
    assert [row["labels"]["value"] for row in found["texts"]] == pytest.approx([0, 1, 2, 3], abs=0.3)


def test_label(learn: Learn, said: Any) -> None:
    text = "Ann B-PER\nsees O\nParis B-LOC\n\nBob B-PER\nSmith I-PER\nis O\nold O\n"
    run = learn("token_labels", "words.conll", text, {}, shape="encoder")
    row = said("label", run, "Bob Smith is old")["texts"][0]
    assert [word["tag"] for word in row["words"]] == ["B-PER", "I-PER", "O", "O"]
    assert row["entities"] == [{"kind": "PER", "words": "Bob Smith"}]


def test_answer(learn: Learn, said: Any) -> None:
    context = "Ann lives in Paris and Bob has a dog."
    asked = [("Where does Ann live?", "Paris"), ("What does Bob have?", "a dog"), ("Who has it?", "Bob")]
    rows = [
        json.dumps(
            {"context": context, "question": q, "answers": {"text": [a], "answer_start": [context.index(a)]}}
        )
        for q, a in asked
    ]
    run = learn("span", "q.jsonl", "\n".join(rows), {}, shape="encoder")
    found = said("answer", run, *(q for q, _ in asked), "--context", context)["answers"]
    assert [row["text"].strip() for row in found] == [a for _, a in asked]
