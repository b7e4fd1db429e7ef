"""Counting pre-tokens: the same counts however a corpus comes, is cut, and is shared among processes."""

import doctest
import logging
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.text import counting
from clearhead.text.counting import count_pretokens
from clearhead.text.pretokenize import SPLITTERS, compile_splitter
from reference.naive_bpe import cut_at_specials, mend

# Letters, marks, numbers, white space and punctuation of every kind that a splitter treats in its own way,
# with pieces of the special tokens and both halves of a surrogate pair.
NASTY = "aB'lsrevdmtZ  \n\r\t/.!12\xa0あ。\u0301Ⅷ²ǅ😀\x1c\x85<|e>\ud83d\ude00"
SPECIALS = ["<|e|>", "<|e", "e", "a b", ".\n", "12", "😀"]
texts = st.text(st.sampled_from(NASTY), max_size=30) | st.text(max_size=10)
specials = st.lists(st.sampled_from(SPECIALS), max_size=3, unique=True)


def naive_counts(documents: list[str], special_tokens: list[str], splitter: str) -> Counter[str]:
    split = compile_splitter(splitter)
    stretches = [s for text in documents for s in cut_at_specials(mend(text), special_tokens)]
    return Counter(pretoken for stretch in stretches for pretoken in split(stretch))


def tiny_cuts(piece: int = 2, part: int = 1):
    """Cut even a short text into many pieces and parts."""
    return mock.patch.multiple(counting, PIECE=piece, PART=part)


@settings(deadline=None, max_examples=400)
@given(st.lists(texts, max_size=3), specials, st.sampled_from(list(SPLITTERS)), st.integers(1, 6))
def test_counts_are_those_of_the_whole_text(
    documents: list[str], special_tokens: list[str], splitter: str, piece: int
) -> None:
    """However small the pieces, the counts are those of whole documents; special tokens are never cut."""
    with tiny_cuts(piece):
        counted = count_pretokens(iter(documents), special_tokens, splitter)
    assert counted == naive_counts(documents, special_tokens, splitter)


@settings(deadline=None)
@given(texts, specials, st.integers(1, 6))
def test_pieces_are_the_text(text: str, special_tokens: list[str], piece: int) -> None:
    """Nothing is lost or repeated at a cut."""
    text = mend(text)
    with tiny_cuts(piece):
        pieces = list(counting._pieces(counting._chunks(text), tuple(special_tokens), "gpt2"))
    assert "".join(pieces) == text
    assert all(pieces)


def test_ordinary_text_is_cut_often() -> None:
    """English, Chinese and numbers have a safe border every few characters, so no piece grows large."""
    for text in ("the cat sat on the mat. " * 50, "订单已成交，请查收。\n" * 50, "1.5,2.5,3.25\n" * 50):
        with tiny_cuts(16):
            pieces = list(counting._pieces(counting._chunks(text), (), "cl100k"))
        assert max(map(len, pieces)) < 64


@settings(deadline=None)
@given(st.lists(st.binary(max_size=4) | texts.map(lambda text: mend(text).encode()), max_size=6))
def test_files_are_read_as_utf8_with_bad_bytes_replaced(tmp_path_factory, blobs: list[bytes]) -> None:
    """A file read in tiny blocks gives the text of decoding it at once, and counts what it replaced."""
    data = b"".join(blobs)
    path = tmp_path_factory.mktemp("bytes") / "file.txt"
    path.write_bytes(data)
    bad: Counter[str] = Counter()
    with tiny_cuts():
        text = "".join(counting._read(path, bad))
    assert text == data.decode("utf-8", "replace")
    assert bad.total() == text.count("\ufffd") - data.count("\ufffd".encode())


def test_bad_bytes_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line of the log says how many places were no UTF-8 and where most of them are."""
    (tmp_path / "good.txt").write_bytes("é \ufffd".encode())
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9 caf\xe9")
    (tmp_path / "worse.txt").write_bytes(b"\xff\xff\xff")
    counts = count_pretokens(sorted(tmp_path.iterdir()))
    assert counts["\ufffd" * 3] == 1
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("5 places in 2 files are not UTF-8 and were read as U+FFFD")
    assert line.endswith("worse.txt")


def test_good_files_say_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is cleaned and nothing is said: CR, LF, NUL and a byte order mark count as what they are."""
    path = tmp_path / "text.txt"
    path.write_bytes("\ufeffa\r\nb\0\n".encode())
    assert count_pretokens(path) == {"\ufeff": 1, "a": 1, "\r": 1, "\n": 2, "b": 1, "\0": 1}
    assert not caplog.records


def test_a_source_is_a_path_paths_or_texts(tmp_path: Path) -> None:
    """Path or str alone: a file. In a list: Paths are files and strs are texts, unless all name files."""
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("low", encoding="utf-8")
    two.write_text("low high", encoding="utf-8")
    both = {"low": 2, " high": 1}
    assert count_pretokens(one) == count_pretokens(str(one)) == {"low": 1}
    assert count_pretokens([one, two]) == count_pretokens([str(one), str(two)]) == both
    assert count_pretokens([one, "low high"]) == both
    assert count_pretokens(text for text in ("low", "low high")) == both
    assert count_pretokens([]) == count_pretokens([""]) == {}


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("low low low", FileNotFoundError, r"no file 'low low low'.*\[text\]"),
        ("long " * 2000, FileNotFoundError, r"no file 'long long .*\.\.\.'"),
        ("nul\0", FileNotFoundError, "no file"),
        (Path("missing.txt"), FileNotFoundError, "missing.txt"),
        (["text", Path("missing.txt")], FileNotFoundError, "missing.txt"),
        (Path("/"), IsADirectoryError, "directory"),
        (iter(["low", 7]), TypeError, "document 1 of the source is of type int"),
        (iter(b"low"), TypeError, "document 0 of the source is of type int"),
    ],
)
def test_wrong_sources(source, error: type[Exception], message: str) -> None:
    """A source that is none is an error of one line that names it."""
    with pytest.raises(error, match=message) as caught:
        count_pretokens(source)
    assert "\n" not in str(caught.value)


def test_workers_must_be_positive() -> None:
    with pytest.raises(ValueError, match="workers is 0; it is at least 1"):
        count_pretokens(["low"], workers=0)


def test_processes_give_the_same_counts(tmp_path: Path) -> None:
    """Three real processes, asked for or chosen by size, count what this process counts."""
    documents = [
        f"{word} low, lower<|e|>lowest {number}\n" for number, word in enumerate(["a", "é", "订单"] * 9)
    ]
    alone = count_pretokens(documents, ["<|e|>"], workers=1)
    assert alone == naive_counts(documents, ["<|e|>"], "gpt2")
    with tiny_cuts(), mock.patch.multiple(counting, SMALL=4, cores=lambda: 3):
        assert count_pretokens(iter(documents), ["<|e|>"]) == alone
        assert count_pretokens(documents, ["<|e|>"], workers=3) == alone


def test_a_worker_imports_neither_torch_nor_numpy() -> None:
    """What a worker imports is light."""
    check = "import sys, clearhead.text.counting; print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_memory_follows_distinct_pretokens() -> None:
    """Three megabytes of the same few words, as one document or as many, never lie in memory at once."""
    line = "the quick brown fox jumps over the lazy dog " * 100
    with mock.patch.multiple(counting, PIECE=1 << 14, PART=1 << 15):
        tracemalloc.start()
        try:
            counts = count_pretokens(line for _ in range(700))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert counts[" fox"] == 70_000
    assert peak < 1_500_000


def test_progress_tells_the_characters_counted() -> None:
    calls = []
    with tiny_cuts(part=4):
        count_pretokens(["low low", "low"], progress=lambda *call: calls.append(call))
    assert calls == [("count", 7, None), ("count", 10, None)]


def test_the_choice_of_processes_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        count_pretokens(["low"])
    assert [record.getMessage() for record in caplog.records] == [
        "counting pre-tokens in 1 process(es): one per core from 8 MB on"
    ]


def test_examples() -> None:
    """The examples in the docstrings."""
    assert doctest.testmod(counting).failed == 0
