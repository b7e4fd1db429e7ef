"""One file, one shard: by anyone, in any order, any number of times; and the examples in docs/cluster.md."""

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from clearhead.text.frame import END_OF_TEXT
from clearhead.text.prepare import prepare
from clearhead.text.shards import Shards
from clearhead.text.spread import join_shards, tokenize_shard
from clearhead.text.tokenizer import Tokenizer

DOCS = Path(__file__).parents[2] / "docs" / "cluster.md"
TOKENIZER = Tokenizer({i: bytes([i]) for i in range(256)}, [], [END_OF_TEXT])


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with text/ and tokenizer.json, where the test runs."""
    (tmp_path / "text").mkdir()
    for i in range(5):
        records = [json.dumps({"text": f"line {i} {n}"}) for n in range(40)]
        (tmp_path / "text" / f"{i}.jsonl").write_text("\n".join(records), encoding="utf-8")
    TOKENIZER.save(tmp_path / "tokenizer.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def documents(folder: Path, split: str) -> set[str]:
    shards = Shards(folder / split, TOKENIZER.fingerprint, verify=True)
    return set(TOKENIZER.decode(shards.tokens[:].tolist()).split(END_OF_TEXT))


def test_any_order_and_any_repetition_give_the_same_folder_with_the_documents_of_prepare(place):
    paths = sorted(Path("text").iterdir())
    for out, order in (("one", paths), ("two", [*reversed(paths), paths[2], paths[0].absolute()])):
        for path in order:
            tokenize_shard(path, out, TOKENIZER)
        join_shards(out, TOKENIZER, files=5)
    assert files(place / "one") == files(place / "two")
    prepare("text", TOKENIZER, "whole")
    for split in ("train", "validation"):
        assert documents(place / "one", split) == documents(place / "whole", split)
    assert Tokenizer.load("one").fingerprint == TOKENIZER.fingerprint


def test_what_is_there_and_right_is_left_and_what_is_not_is_made_again(place):
    receipt = tokenize_shard("text/0.jsonl", "out", TOKENIZER)
    shard = place / "out" / "train" / receipt["train"]["file"]
    whole, before = files(place / "out"), shard.stat()
    assert tokenize_shard("text/0.jsonl", "out", TOKENIZER) == receipt
    assert shard.stat().st_mtime_ns == before.st_mtime_ns
    for injure in (shard.unlink, lambda: shard.write_bytes(b"x"), lambda: shard.with_suffix(".idx").unlink()):
        injure()
        assert tokenize_shard("text/0.jsonl", "out", TOKENIZER) == receipt
        assert files(place / "out") == whole
    (place / "text/0.jsonl").write_text('{"text": "another"}', encoding="utf-8")
    assert tokenize_shard("text/0.jsonl", "out", TOKENIZER)["inputs"] != receipt["inputs"]


def test_splits_names_and_what_does_not_fit(place):
    held = tokenize_shard("text/0.jsonl", "out", TOKENIZER, name="held", split="validation")
    assert held["train"] is None and held["validation"]["file"] == "shard-held.bin"
    with pytest.raises(ValueError, match="1 files has no text for the train split"):
        join_shards("out", TOKENIZER)
    tokenize_shard("text/1.jsonl", "out", TOKENIZER, name="b", split="train")
    assert join_shards("out", TOKENIZER)["settings"]["split"] == "train and validation"
    with pytest.raises(
        ValueError, match=r"part-held\.json is the shard of .*0\.jsonl, not of .*2\.jsonl; give an"
    ):
        tokenize_shard("text/2.jsonl", "out", TOKENIZER, name="held")
    with pytest.raises(ValueError, match=r"name='\.\./x' becomes a file name: letters"):
        tokenize_shard("text/2.jsonl", "out", TOKENIZER, name="../x")
    with pytest.raises(ValueError, match="text is 5 files; tokenize_shard takes one at a time"):
        tokenize_shard("text", "out", TOKENIZER)
    with pytest.raises(ValueError, match="out holds the shards of 2 files, not of 5; run the rest"):
        join_shards("out", TOKENIZER, files=5)
    other = Tokenizer({i: bytes([i]) for i in range(256)}, [], ["<|end|>"])
    with pytest.raises(ValueError, match=r"the shard of .*1\.jsonl was made with tokenizer '.*', not '"):
        join_shards("out", other)
    with pytest.raises(FileNotFoundError, match="nothing holds no shard that tokenize_shard has finished"):
        join_shards("nothing", TOKENIZER)


# ----------------------------------------------------------------------------------- the examples of the docs


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)


class Executor:
    """A stand-in for datatrove's: every task in turn, what it depends on first."""

    def __init__(self, pipeline: list[Any], tasks: int, depends: "Executor | None" = None, **_: Any) -> None:
        self.pipeline, self.tasks, self.depends = pipeline, tasks, depends

    def run(self) -> None:
        if self.depends is not None:
            self.depends.run()
        for rank in range(self.tasks):
            for step in self.pipeline:
                step(None, rank, self.tasks)


class Items:
    """A stand-in for a Ray dataset: an actor maps row by row."""

    def __init__(self, rows: list[dict]) -> None:
        self.rows = rows

    def map(self, actor: type, **_: Any) -> "Items":
        return Items(list(map(actor(), self.rows)))

    def iter_rows(self) -> list[dict]:
        return self.rows


@pytest.mark.parametrize("example", [0, 1], ids=["datatrove", "Ray Data"])
def test_the_python_examples_of_the_docs_tokenise_everything(example, place, monkeypatch, capsys):
    """The libraries are not installed: stand-ins run our part of the examples."""
    datatrove = types.ModuleType("datatrove.executor")
    vars(datatrove)["SlurmPipelineExecutor"] = Executor
    ray = types.ModuleType("ray")
    vars(ray)["data"] = types.SimpleNamespace(from_items=Items)
    for name, module in {
        "datatrove": types.ModuleType("datatrove"),
        "datatrove.executor": datatrove,
        "ray": ray,
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    exec(compile(blocks("python")[example], str(DOCS), "exec"), {"__name__": "example"})
    capsys.readouterr()
    prepare("text", TOKENIZER, "whole")
    for split in ("train", "validation"):
        assert documents(place / "tokens", split) == documents(place / "whole", split)


@pytest.mark.slow
def test_the_slurm_example_of_the_docs_tokenises_everything(place):
    array, join = blocks("bash")
    environment = os.environ | {
        "SLURM_ARRAY_TASK_COUNT": "2",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    for task, script in (("1", array), ("0", array), ("", join)):
        subprocess.run(
            ["bash", "-c", script],
            env=environment | {"SLURM_ARRAY_TASK_ID": task},
            check=True,
            timeout=120,
            capture_output=True,
        )
    assert len(list(Path("tokens/train").glob("*.bin"))) == 5
    assert Shards(place / "tokens" / "train").n_documents > 150
