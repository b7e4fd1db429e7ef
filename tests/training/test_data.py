"""A recipe's [data]: what was prepared before, or by another program, is checked first."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead.text.frame import END_OF_TEXT
from clearhead.text.prepare import prepare
from clearhead.text.tokenizer import Tokenizer
from clearhead.training import data as module
from clearhead.training.data import prepare_data
from clearhead.training.recipe import DataConfig
from clearhead.training.run_folder import RunFolder
from clearhead.training.tasks import make_task
from tiny_run import tiny_recipe, write_corpus

TOKENIZER = Tokenizer({i: bytes([i]) for i in range(256)}, [], [END_OF_TEXT])


def config(folder: Path, **changes: Any) -> DataConfig:
    settings: dict[str, Any] = {
        "source": str(folder / "train.bin"),
        "tokenizer": str(folder / "tokenizer.json"),
    }
    return DataConfig(**(settings | changes))


def test_a_file_of_ids_is_a_source_like_any_other(tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    for name, n in (("train.bin", 1000), ("val.bin", 50)):
        (np.arange(n) % 257).astype(np.uint16).tofile(tmp_path / name)
    notes: list[str] = []
    data = prepare_data(
        config(tmp_path, validation=str(tmp_path / "val.bin")), RunFolder(tmp_path / "run"), notes.append
    )
    assert (data.train.n_tokens, data.validation.n_tokens) == (1000, 50)
    assert data.tokenizer.fingerprint == TOKENIZER.fingerprint and len(data.fingerprint) == 64
    assert notes == ["1,000 tokens to learn from, 50 to validate"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokenizer": None},
            r"train\.bin holds ids; data\.tokenizer has to name the vocabulary that made them",
        ),
        ({"strict": True}, r"data\.strict=True has no effect, .*train\.bin is prepared already"),
        ({"vocab_size": 300}, r"data\.vocab_size=300 has no effect with the tokenizer .*json, whose"),
        ({}, r"train\.bin holds id 257 at 9; the tokenizer's are 0 to 256: it was made with another one"),
    ],
)
def test_what_does_not_fit_a_file_of_ids_is_said_before_any_work(change, message, tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    np.array([*range(1, 10), 257, *range(50)]).astype(np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(ValueError, match=message):
        prepare_data(config(tmp_path, **change), RunFolder(tmp_path / "run"), lambda _: None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"validation": "no/such/texts"}}, "no/such/texts"),
        (
            {"model": {"vocab_size": 999}},
            r"vocab_size=999, but .* data\.vocab_size=280 is to be learned",
        ),
    ],
)
def test_what_is_known_before_a_vocabulary_is_learned_is_said_before(change, message, tmp_path):
    corpus, notes = write_corpus(tmp_path / "corpus", documents=7), []
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        make_task(tiny_recipe(corpus, **change), RunFolder(tmp_path / "run"), notes.append)
    assert notes == [] and not (tmp_path / "run").exists()


def test_a_folder_for_a_run(tmp_path):
    """What a killed start left behind is no obstacle, logs and hidden files are none; anything else is."""
    run = RunFolder(tmp_path / "texts" / "run")
    run.check_free("python", None, "no/such/folder")
    run.path.mkdir(parents=True)
    (run.path / "slurm-7.out").touch()
    run.check_free()
    run.data.mkdir()
    with pytest.raises(ValueError, match=r"run is a folder with something in it that no run wrote \(data\)"):
        run.check_free()
    (run.path / ".lock").touch()
    run.write_labels(["a"])
    run.check_free(str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"lies in .*texts, which is read as text"):
        run.check_free("pydoc", str(tmp_path / "texts"))
    (run.path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"notes\.txt"):
        run.check_free()


@pytest.fixture
def prepared(tmp_path) -> Path:
    (tmp_path / "a.txt").write_text("some text to learn from, " * 40)
    prepare(tmp_path / "a.txt", TOKENIZER, tmp_path / "tokens")
    return tmp_path / "tokens"


def test_a_changed_byte_of_a_prepared_folder_is_refused_before_the_first_step(prepared, tmp_path):
    """R12; also another tokenizer."""
    notes: list[str] = []
    settings = DataConfig(source=str(prepared))
    data = prepare_data(settings, RunFolder(tmp_path / "run"), notes.append)
    assert data.train.n_tokens == 951 and notes == []
    Tokenizer({i: bytes([i]) for i in range(256)}, [], ["<|end|>"]).save(tmp_path / "other.json")
    with pytest.raises(ValueError, match=r"tokens/train was made with tokenizer .*…, not with .*…; prepare"):
        other = DataConfig(source=str(prepared), tokenizer=str(tmp_path / "other.json"))
        prepare_data(other, RunFolder(tmp_path / "run"), notes.append)
    shard = prepared / "train" / "shard-00000.bin"
    injured = bytearray(shard.read_bytes())
    injured[-100] ^= 1
    shard.write_bytes(injured)
    with pytest.raises(ValueError, match=r"shard-00000\.bin has changed since it was written"):
        prepare_data(settings, RunFolder(tmp_path / "run"), notes.append)


def test_a_prepared_folder_keeps_its_own_vocabulary(prepared, tmp_path):
    """What the recipe says of a vocabulary to learn must be what the folder was made with."""
    run = RunFolder(tmp_path / "run")
    cases: list[tuple[str, Any]] = [("vocab_size", 300), ("splitter", "cl100k")]
    for name, other in cases:
        message = (
            f"data.{name}={other!r} has no effect with the tokenizer .*tokens/tokenizer.json, whose {name}"
        )
        with pytest.raises(ValueError, match=message):
            prepare_data(DataConfig(str(prepared), **{name: other}), run, lambda _: None)
    prepare_data(DataConfig(str(prepared), vocab_size=TOKENIZER.vocab_size), run, lambda _: None)


def test_a_folder_too_large_to_be_read_at_every_start_says_so(prepared, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHECKED_BYTES", 100)
    notes: list[str] = []
    prepare_data(DataConfig(source=str(prepared)), RunFolder(tmp_path / "run"), notes.append)
    assert notes == [f"{prepared} holds 0 GB: sizes and headers are checked, not every byte"]


def test_another_process_takes_what_the_first_prepared_and_mends_nothing(tmp_path):
    """A second rank that cannot read the prepared text says so; it does not write in the same folder."""
    (tmp_path / "text.txt").write_text("one two three.\n" * 400, encoding="utf-8")
    run = RunFolder(tmp_path / "run")
    TOKENIZER.save(tmp_path / "tokenizer.json")
    data = config(tmp_path, source=str(tmp_path / "text.txt"), document_separator="\n")
    made = prepare_data(data, run, lambda _: None)
    made.tokenizer.save(run.tokenizer_file)
    other = RunFolder(run.path)
    other.begun = True
    assert prepare_data(data, other, lambda _: None).fingerprint == made.fingerprint
    index = run.data / "train" / "index.json"
    index.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"index\.json is no JSON"):
        prepare_data(data, other, lambda _: None)
    assert index.read_text(encoding="utf-8") == "{"
