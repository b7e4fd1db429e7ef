"""A recipe's [data]: ids that another program wrote are read where they lie."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clearhead.text.frame import END_OF_TEXT
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.data import prepare_data
from clearhead.training.recipe import DataConfig
from clearhead.training.run_folder import RunFolder

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
        ({"vocab_size": 300}, r"data\.vocab_size=300 has no effect with data\.tokenizer="),
        ({}, r"train\.bin holds id 257 at 9; the tokenizer's are 0 to 256: it was made with another one"),
    ],
)
def test_what_does_not_fit_a_file_of_ids_is_said_before_any_work(change, message, tmp_path):
    TOKENIZER.save(tmp_path / "tokenizer.json")
    np.array([*range(1, 10), 257, *range(50)]).astype(np.uint16).tofile(tmp_path / "train.bin")
    with pytest.raises(ValueError, match=message):
        prepare_data(config(tmp_path, **change), RunFolder(tmp_path / "run"), lambda _: None)
