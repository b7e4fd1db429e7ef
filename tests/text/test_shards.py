"""Token shards: what is written is what is read, and what does not fit is refused by name."""

import json
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.text.shards import HEADER, MAGIC, Shards, ShardWriter, Tokens, id_dtype, write_index

FINGERPRINT = "ab" * 32
DOCUMENTS = [[[1, 2, 3], [4]], [[5, 6], [], [7, 8, 9]]]
"""Two shards of documents, without an end-of-text token."""


def write(folder: Path, shards=DOCUMENTS, vocab_size: int = 300, end_of_text: int | None = None) -> Path:
    entries = []
    for number, documents in enumerate(shards):
        writer = ShardWriter(folder, f"shard-{number:05d}", vocab_size, FINGERPRINT)
        for ids in documents:
            writer.add(np.array(ids, np.uint32), end_of_text, text_bytes=10)
        entries.append(writer.finish())
    write_index(folder, [entry for entry in entries if entry], vocab_size, FINGERPRINT, end_of_text)
    return folder


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch):
    """What fsync is for, a power cut, happens in no test."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


# ---------------------------------------------------------------- the format


def test_the_files_are_what_the_format_says(tmp_path):
    """Header, ids and ends read by hand; two bytes per id for a small vocabulary."""
    write(tmp_path)
    data = (tmp_path / "shard-00001.bin").read_bytes()
    fields = (b"CLEARHD\0", 1, 2, 5, bytes.fromhex(FINGERPRINT), 300)
    assert HEADER.size == 64 and struct.unpack("<8sIIQ32sQ", data[:64]) == fields
    assert data[64:] == struct.pack("<5H", 5, 6, 7, 8, 9)
    assert (tmp_path / "shard-00001.idx").read_bytes() == struct.pack("<3Q", 2, 2, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "index.json", "shard-00000.bin", "shard-00000.idx", "shard-00001.bin", "shard-00001.idx"
    ]  # fmt: skip


def test_what_is_written_is_read(tmp_path):
    shards = Shards(write(tmp_path, end_of_text=299), FINGERPRINT, verify=True)
    ids = [1, 2, 3, 299, 4, 299, 5, 6, 299, 299, 7, 8, 9, 299]
    assert np.asarray(shards.tokens).tolist() == ids == shards.tokens[:].tolist()
    assert (shards.n_tokens, shards.n_documents, shards.text_bytes) == (14, 5, 50)
    assert (shards.vocab_size, shards.tokenizer_fingerprint, shards.end_of_text) == (300, FINGERPRINT, 299)
    assert shards.document_ends.tolist() == [4, 6, 9, 10, 14]
    assert shards.document_ends.dtype == np.uint64 and shards.tokens.dtype == np.uint16


@pytest.mark.parametrize(("vocab_size", "n_bytes"), [(65_536, 2), (65_537, 4), (1 << 20, 4)])
def test_ids_take_two_bytes_up_to_65536_tokens_and_four_above(tmp_path, vocab_size, n_bytes):
    write(tmp_path, [[[0, vocab_size - 1]]], vocab_size)
    assert id_dtype(vocab_size).itemsize == n_bytes
    assert (tmp_path / "shard-00000.bin").stat().st_size == 64 + 2 * n_bytes
    assert Shards(tmp_path).tokens[:].tolist() == [0, vocab_size - 1]


def test_a_writer_refuses_ids_outside_the_vocabulary_and_leaves_nothing_of_an_empty_shard(tmp_path):
    writer = ShardWriter(tmp_path, "shard-00000", 300, FINGERPRINT)
    with pytest.raises(ValueError, match="token id 300 is outside the vocabulary of 300 tokens"):
        writer.add(np.array([300]), None, 1)
    assert writer.finish() is None and list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- reading


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), min_size=1), min_size=1), st.data())
def test_tokens_index_and_slice_like_one_array(parts, data):
    arrays = [np.array(part, np.uint16) for part in parts]
    whole, tokens = np.concatenate(arrays), Tokens(arrays)
    assert len(tokens) == len(whole) and tokens.shape == whole.shape
    assert np.array_equal(np.asarray(tokens), whole) and list(tokens) == whole.tolist()
    some = data.draw(st.slices(len(whole)))
    assert np.array_equal(tokens[some], whole[some])
    index = data.draw(st.integers(-len(whole), len(whole) - 1))
    assert tokens[index] == whole[index]
    for outside in (len(whole), -len(whole) - 1):
        with pytest.raises(IndexError, match=f"index {outside} is outside {len(whole)} tokens"):
            tokens[outside]


def test_a_slice_inside_one_shard_copies_nothing():
    arrays = [np.arange(10), np.arange(10)]
    assert np.shares_memory(Tokens(arrays)[2:8], arrays[0])
    assert np.shares_memory(Tokens(arrays)[10:20], arrays[1])


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), min_size=1, max_size=4), st.data())
def test_the_documents_of_a_window_are_those_of_a_plain_count(tmp_path_factory, lengths, data):
    """Documents of 0 to 3 tokens in several shards."""
    folder = tmp_path_factory.mktemp("documents")
    shards = [[[7] * length for length in shard] for shard in lengths if sum(shard)]
    if not shards:
        return
    opened = Shards(write(folder, shards))
    documents = [document for shard in shards for document in shard]
    plain = [number for number, document in enumerate(documents) for _ in document]
    start = data.draw(st.integers(0, len(plain)))
    stop = data.draw(st.integers(start, len(plain)))
    assert opened.documents_between(start, stop).tolist() == plain[start:stop]
    assert opened.document_ends.tolist() == np.cumsum([len(d) for d in documents]).tolist()


# ---------------------------------------------------------------- R12: what does not fit


def change(path: Path, at: int, new: bytes) -> None:
    data = bytearray(path.read_bytes())
    data[at : at + len(new)] = new
    path.write_bytes(bytes(data))


def edit(folder: Path, **fields) -> None:
    path = folder / "index.json"
    index = json.loads(path.read_text())
    for name, value in fields.items():
        (index if name in index else index["shards"][0])[name] = value
    path.write_text(json.dumps(index))


INJURIES = [
    (lambda f: change(f / "shard-00000.bin", 0, b"X"), "shard-00000.bin is no shard of token ids"),
    (lambda f: (f / "shard-00000.bin").write_bytes(b"short"), "shard-00000.bin is no shard of token ids"),
    (lambda f: (f / "shard-00000.bin").write_bytes(pickle.dumps([1])), "shard-00000.bin is no shard"),
    (lambda f: change(f / "shard-00000.bin", 8, b"\x02"), "shard-00000.bin has format version 2, .* reads 1"),
    (lambda f: change(f / "shard-00000.bin", 12, b"\x04"), "has 4 bytes per id .*, its index says 2 for 300"),
    (lambda f: change(f / "shard-00000.bin", 16, b"\x05"), "says 5 tokens, 4 tokens are 72 bytes"),
    (lambda f: change(f / "shard-00000.bin", 24, b"\xcd"), "made with tokenizer cdab.*, its index says abab"),
    (lambda f: change(f / "shard-00000.bin", 56, b"\x00"), "vocabulary of 256, its index says 2 for 300"),
    (lambda f: change(f / "shard-00000.bin", 72, b"\0"), "has 73 bytes and says 4 tokens"),
    (lambda f: os.truncate(f / "shard-00000.bin", 71), "has 71 bytes and says 4 tokens"),
    (lambda f: (f / "shard-00000.bin").unlink(), "shard-00000.bin is missing"),
    (lambda f: (f / "shard-00000.idx").unlink(), "shard-00000.idx does not hold the ends of 2 documents"),
    (lambda f: (f / "shard-00000.idx").write_bytes(b"123"), "shard-00000.idx does not hold the ends"),
    (lambda f: change(f / "shard-00000.idx", 8, b"\x03"), "the last document ends at 3, not at 4"),
    (lambda f: edit(f, vocab_size=70_000), "has 2 bytes per id for a vocabulary of 300, its index says 4"),
    (lambda f: edit(f, vocab_size=5), "for a vocabulary of 300, its index says 2 for 5"),
    (lambda f: edit(f, tokenizer="cd" * 32), "was made with tokenizer abab.*, its index says cdcd"),
    (lambda f: edit(f, largest_id=300), "shard-00000.bin holds token id 300, its vocabulary has 300 tokens"),
    (lambda f: edit(f, tokens=17), "the shards hold 9 tokens in 5 documents, the index says 17 in 5"),
    (lambda f: edit(f, file="../shard-00000.bin"), "'../shard-00000.bin' is no name of a shard"),
    (lambda f: edit(f, documents="two"), "'documents' is 'two', not a count"),
    (lambda f: edit(f, tokenizer=None), "'tokenizer' is None, not a text"),
    (lambda f: edit(f, shards=[]), "index.json lists no shards"),
    (lambda f: edit(f, version=9), "index.json has format version 9, this clearhead reads 1"),
    (lambda f: edit(f, format="other"), "index.json is no index of token shards"),
    (lambda f: (f / "index.json").write_text("{"), "index.json is no JSON"),
    (lambda f: (f / "index.json").unlink(), "holds no prepared text .* run `clearhead prepare`"),
]  # fmt: skip


@pytest.mark.parametrize(("injure", "message"), INJURIES, ids=[message[:40] for _, message in INJURIES])
def test_what_does_not_fit_is_refused_when_opened_in_one_line_naming_the_file(tmp_path, injure, message):
    """R12: another dtype, tokenizer, size or vocabulary never gets as far as a batch."""
    injure(write(tmp_path / "train"))
    with pytest.raises((ValueError, FileNotFoundError), match=message) as error:
        Shards(tmp_path / "train")
    assert "train" in str(error.value) and "\n" not in str(error.value)


def test_another_tokenizer_than_the_expected_one_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"was made with tokenizer abab.*, not with cdcd.*prepare the corpus"
    ):
        Shards(write(tmp_path), "cd" * 32)


def test_verify_finds_any_changed_byte(tmp_path):
    write(tmp_path)
    for name, size in (("shard-00001.bin", 74), ("shard-00001.idx", 16)):
        for at in range(64 if name.endswith("bin") else 0, size):
            before = (tmp_path / name).read_bytes()
            change(tmp_path / name, at, bytes([before[at] ^ 1]))
            Shards(tmp_path)
            with pytest.raises(ValueError, match=rf"{name} has changed since it was written"):
                Shards(tmp_path, verify=True)
            (tmp_path / name).write_bytes(before)


def test_the_folder_of_both_splits_names_the_two(tmp_path):
    write(tmp_path / "train")
    with pytest.raises(ValueError, match=r"holds two splits; open .*train or .*validation"):
        Shards(tmp_path)


@settings(deadline=None)
@given(st.sampled_from(["shard-00000.bin", "shard-00000.idx", "index.json"]), st.data())
def test_random_changes_raise_our_errors_or_nothing(tmp_path_factory, name, data):
    """R8: a few bytes of any file replaced, added or taken away."""
    folder = write(tmp_path_factory.mktemp("fuzz"))
    content = (folder / name).read_bytes()
    at = data.draw(st.integers(0, len(content)))
    cut = data.draw(st.integers(0, 4))
    new = data.draw(
        st.binary(max_size=4) | st.sampled_from([b"0", b"-1", b"1e400", b"[", b"}", b'"', b"null"])
    )
    (folder / name).write_bytes(content[:at] + new + content[at + cut :])
    try:
        shards = Shards(folder)
    except (ValueError, FileNotFoundError) as error:
        assert str(folder) in str(error) and "\n" not in str(error)
    else:
        assert len(shards.tokens[:]) == shards.n_tokens == 9


def test_the_magic_is_eight_bytes():
    assert len(MAGIC) == 8
