"""Ids that other programs wrote: read as they meant them, and refused where they cannot be meant so."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.text.batches import Batches
from clearhead.text.frame import END_OF_TEXT
from clearhead.text.prepare import prepare
from clearhead.text.token_files import is_token_file, open_token_files
from clearhead.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer({i: bytes([i]) for i in range(256)} | {256: b"ab"}, [(b"a", b"b")], [END_OF_TEXT])
END = 257
IDS = np.array([*b"first document", END, *b"the second", 256, END, *b"x" * 60, END, *b"last one here", END])
ENDS = (np.flatnonzero(IDS == END) + 1).tolist()


def nanogpt(path: Path, ids: np.ndarray = IDS, kind: str = "<u2") -> None:
    ids.astype(kind).tofile(path)


def llm_c(path: Path, ids: np.ndarray = IDS) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(ids)
    path.write_bytes(header.tobytes() + ids.astype("<u2").tobytes())


def megatron(path: Path, ids: np.ndarray = IDS, kind: int = 8, **wrong: Any) -> None:
    """As Megatron writes it: each document one sequence."""
    dtype = {8: "<u2", 4: "<i4", 7: "<f4"}[kind]
    ids.astype(dtype).tofile(path)
    ends = (np.flatnonzero(ids == END) + 1).tolist()
    lengths = np.diff([0, *ends]).astype("<i4")
    offsets = (np.array([0, *ends[:-1]]) * np.dtype(dtype).itemsize).astype("<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", wrong.get("version", 1), kind, len(ends), len(ends) + 1)
    firsts = np.arange(len(ends) + 1, dtype="<i8")
    data = head + lengths.tobytes() + offsets.tobytes() + firsts.tobytes()
    path.with_suffix(".idx").write_bytes(data[: wrong.get("cut")])


def datatrove(path: Path, ids: np.ndarray = IDS, kind: str = "<u2") -> None:
    ids.astype(kind).tofile(path)
    (np.flatnonzero(ids == END) + 1).astype("<u8").tofile(f"{path}.index")


KINDS: list[tuple[Callable[[Path], None], str]] = [
    (nanogpt, "train.bin"),
    (llm_c, "train.bin"),
    (megatron, "corpus.bin"),
    (lambda path: megatron(path, kind=4), "corpus.bin"),
    (datatrove, "00000_tokens.ds"),
    (lambda path: datatrove(path, kind="<u4"), "00000_tokens.ds"),
    (lambda path: nanogpt(path), "without_index.ds"),
]


@pytest.mark.parametrize(("write", "name"), KINDS)
def test_every_format_gives_the_same_tokens_and_documents(write, name, tmp_path):
    """Without a validation file the last twentieth is kept, from the end of a document on."""
    write(tmp_path / name)
    assert is_token_file(str(tmp_path / name))
    train, validation = open_token_files(str(tmp_path / name), TOKENIZER)
    n = len(train.tokens)
    assert train.tokens[:].tolist() + validation.tokens[:].tolist() == IDS.tolist()
    assert n == len(IDS) * 95 // 100 and train.vocab_size == 258
    stored = [end for end in ENDS if end < n]
    assert train.document_ends.tolist() == [*stored, n] and validation.document_ends.tolist() == [
        len(IDS) - n
    ]
    assert train.documents_between(0, n).tolist() == np.searchsorted(stored, np.arange(n), "right").tolist()
    assert validation.text_bytes == len(IDS) - n - 1
    write(tmp_path / f"held_{name}")
    whole, held = open_token_files(str(tmp_path / name), TOKENIZER, str(tmp_path / f"held_{name}"))
    assert whole.n_tokens == held.n_tokens == len(IDS) and whole.n_documents == 4
    assert held.text_bytes == len(IDS) - 4 + 1
    assert whole.fingerprint == held.fingerprint != train.fingerprint
    masked = Batches(whole, 2, 10, document_mask=True).batch(0)
    assert masked.documents is not None and masked.inputs.shape == (2, 10)


def test_the_cut_is_at_the_end_of_a_document_where_one_is_near(tmp_path):
    ids = np.full(1000, 65)
    ids[[100, 920, 930, 960]] = END
    for write, name in ((nanogpt, "a.bin"), (datatrove, "a.ds")):
        write(tmp_path / name, np.append(ids, END))
        train, validation = open_token_files(str(tmp_path / name), TOKENIZER)
        assert (train.n_tokens, validation.n_tokens) == (931, 70)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 257), min_size=1, max_size=30), min_size=1, max_size=4))
def test_several_files_are_one_after_the_other(tmp_path_factory, parts):
    folder = tmp_path_factory.mktemp("parts")
    for number, part in enumerate(parts):
        nanogpt(folder / f"{number}.bin", np.array(part))
    everything = [token for part in parts for token in part]
    if len(everything) < 2:
        with pytest.raises(ValueError, match=r"holds 1 tokens, too few to keep some for validation"):
            open_token_files(str(folder / "*.bin"), TOKENIZER)
        return
    train, validation = open_token_files(str(folder / "*.bin"), TOKENIZER)
    assert train.tokens[:].tolist() + validation.tokens[:].tolist() == everything
    assert 0 < validation.n_tokens <= len(everything) // 10 + 1


WRONG: list[tuple[str, Callable[[Path], Any], str]] = [
    ("a.bin", lambda p: nanogpt(p, np.array([1, 2, 300] * 9)),
     r"a\.bin holds id 300 at 2; the tokenizer's are 0 to 257"),
    ("a.bin", lambda p: nanogpt(p, kind="<u4"),
     r"a\.bin has ids of 4 bytes \(every second 2 are zero\); write them"),
    ("a.bin", lambda p: nanogpt(p, kind="<i8"), "ids of 4 bytes"),
    ("a.bin", lambda p: p.write_bytes(b"abc"),
     r"a\.bin has 3 bytes of ids; that is no number of ids of 2 bytes"),
    ("a.bin", lambda p: p.write_bytes(b""), r"a\.bin has 0 bytes of ids"),
    ("a.bin", lambda p: (llm_c(p), p.write_bytes(p.read_bytes()[:-20])),
     r"says that it holds 102 ids, it holds 92"),
    ("a.bin", lambda p: megatron(p, kind=7),
     r"a\.idx has version 1 and type 7; known: version 1, types of integers"),
    ("a.bin", lambda p: megatron(p, version=2), r"a\.idx has version 2"),
    ("a.bin", lambda p: megatron(p, cut=60), r"a\.idx is cut off: 60 bytes for 4 sequences"),
    ("a.bin", lambda p: megatron(p, cut=5), r"a\.idx is no index of Megatron-LM"),
    ("a.bin", lambda p: (megatron(p), nanogpt(p, IDS[:-1])),
     r"a\.idx does not describe .*a\.bin: its sequences"),
    ("a.bin", lambda p: megatron(p, np.array([-1, 2, 3, END] * 9), kind=4),
     r"holds id -1 at 0; the tokenizer's are"),
    ("a.ds", lambda p: (datatrove(p), nanogpt(p, IDS[:-1])),
     r"a\.ds\.index says that 102 ids end there, .* 202 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "write", "message"), WRONG, ids=range(len(WRONG)))
def test_ids_that_cannot_be_meant_so_are_refused_before_anything_is_learned(name, write, message, tmp_path):
    """R12: another type, another vocabulary, an index of another file, a file cut off: one line."""
    write(tmp_path / name)
    with pytest.raises(ValueError, match=message) as error:
        open_token_files(str(tmp_path / name), TOKENIZER)
    assert "\n" not in str(error.value)


def test_a_shard_of_ours_is_no_such_file(tmp_path):
    (tmp_path / "a.txt").write_text("some text " * 20)
    prepare(tmp_path / "a.txt", TOKENIZER, tmp_path / "out")
    with pytest.raises(
        ValueError, match=r"shard-00000\.bin is one shard of a prepared folder; give the folder"
    ):
        open_token_files(str(tmp_path / "out/train/shard-00000.bin"), TOKENIZER)
    with pytest.raises(FileNotFoundError, match=r"no file 'nothing\.bin'"):
        open_token_files("nothing.bin", TOKENIZER)
