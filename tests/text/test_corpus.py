"""Text sources: what becomes a document, what broken input does, how text is split, all of it counted."""

import gzip
import hashlib
import json
import os
import sys
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.text import documents as documents_module
from clearhead.text.corpus import (
    is_validation,
    open_corpus,
    split_corpus,
    split_document,
    split_rule,
)
from clearhead.text.documents import CorpusReport, Piece

SEPARATOR = "<|endoftext|>"


def put(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


def lines(*records) -> bytes:
    return b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records)


def read(source, **options) -> tuple[list[str], CorpusReport]:
    corpus = open_corpus(source, **options)
    return list(corpus), corpus.report


# ---------------------------------------------------------------- bytes that are no UTF-8


def bad_bytes_by_hand(data: bytes) -> int:
    """Count the bytes that Python's strict decoder refuses, one run after the other."""
    count = 0
    while True:
        try:
            data.decode("utf-8")
            return count
        except UnicodeDecodeError as error:
            count += error.end - error.start
            data = data[error.end :]


def test_a_bad_byte_at_every_position_loses_nothing_else_and_strict_names_its_place(tmp_path):
    """R10: 2 KB of mixed text, each byte in turn made 0xFF: U+FFFD there, everything else as it was."""
    good = ("Plain words, café, 漢字, 😀 and a line\n" * 60).encode("utf-8")[:2048]
    good = good.decode("utf-8", "ignore").encode("utf-8").ljust(2048, b".")
    path = tmp_path / "bad.txt"
    for position in range(len(good)):
        data = good[:position] + b"\xff" + good[position + 1 :]
        path.write_bytes(data)
        texts, report = read(path)
        assert texts == [data.decode("utf-8", "replace")]
        assert report.bad_bytes == bad_bytes_by_hand(data) and report.documents == 1
        if position % 16 == 0:
            first = len(data) - len(data.decode("utf-8", "replace").split("\ufffd")[0].encode("utf-8"))
            offset = len(data) - first
            line = data[:offset].count(b"\n") + 1
            assert report.first == {"bad UTF-8": f"{path}:{line}"}
            with pytest.raises(
                ValueError, match=rf"bad\.txt:{line}: bad UTF-8, byte 0x.. at offset {offset}$"
            ):
                read(path, strict=True)


@settings(deadline=None)
@given(
    st.lists(
        st.sampled_from([b"a", b"\xc3\xa9", b"\xff", b"\xe6\xbc", b"\xed\xa0\x80", b"\0", b"\xef\xbf\xbd"])
    )
)
def test_any_mixture_of_good_and_bad_bytes_is_counted_byte_by_byte(tmp_path_factory, parts):
    data = b"".join([b"x", *parts])
    path = put(tmp_path_factory.getbasetemp() / "mixture.txt", data)
    texts, report = read(path)
    assert texts == [data.decode("utf-8", "replace")]
    assert report.bad_bytes == bad_bytes_by_hand(data)
    assert report.bytes == len(texts[0].encode("utf-8"))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"one\0two", "one\0two"),
        (b"one\r\ntwo\rthree\n", "one\r\ntwo\rthree\n"),
        (b"\xef\xbb\xbfone", "one"),
        (b"one\xef\xbb\xbftwo", "one\ufefftwo"),
        (b"\xed\xa0\xbd\xed\xb8\x80", "\ufffd" * 6),
    ],
    ids=["NUL is kept", "line ends are kept", "a BOM is dropped", "only at the start", "surrogates in UTF-8"],
)
def test_odd_characters(tmp_path, data, text):
    assert read(put(tmp_path / "odd.txt", data))[0] == [text]


def test_utf_16_is_skipped_and_named_not_read_as_noise(tmp_path):
    put(tmp_path / "a.txt", "Notepad's Unicode".encode("utf-16"))
    put(tmp_path / "b.txt", "fine")
    texts, report = read(tmp_path)
    assert texts == ["fine"] and report.reasons["UTF-16"] == 1
    with pytest.raises(ValueError, match=r"a\.txt:1: UTF-16, save it as UTF-8"):
        read(tmp_path, strict=True)


# ---------------------------------------------------------------- documents in a text file


def test_a_text_file_is_one_document_or_what_stands_between_separators(tmp_path):
    path = put(tmp_path / "stories.txt", f"one\n{SEPARATOR}\ntwo {SEPARATOR}{SEPARATOR} \n{SEPARATOR}three")
    assert read(path)[0] == [path.read_text(encoding="utf-8")]
    texts, report = read(path, document_separator=SEPARATOR)
    assert texts == ["one\n", "\ntwo ", "three"]
    assert report.reasons == {"blank": 2} and report.first == {"blank": f"{path}:3"}
    assert report.skipped_bytes == len(" \n")


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "ab", "é", "\n", "\n\n", "<", "|>", "<|e|>", "\ufffd"])),
    st.sampled_from(["<|e|>", "\n", "\n\n", "aba", "é", "aa"]),
    st.integers(1, 9),
    st.integers(1, 12),
)
def test_blocks_and_pieces_of_any_size_give_the_documents_of_a_plain_split(
    tmp_path_factory, parts, separator, block, piece_bytes
):
    """A separator across the border of two blocks, a piece inside a document, one that overlaps itself."""
    text = "x" + "".join(parts)
    path = put(tmp_path_factory.getbasetemp() / "pieces.txt", text)
    expected = [document for document in text.split(separator) if document.strip()]
    corpus = open_corpus(path, document_separator=separator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents_module, "_BLOCK", block)
        report = corpus.new_report()
        in_pieces = [t for piece in corpus.pieces(piece_bytes) for t in corpus.read(piece, report)]
        if expected:
            assert list(corpus) == expected
            assert corpus.report == report
    assert in_pieces == expected
    n_separators = len(text.split(separator)) - 1
    read_bytes = report.bytes + report.skipped_bytes + n_separators * len(separator.encode())
    assert read_bytes == len(text.encode("utf-8"))


def test_pieces_of_a_jsonl_file_name_the_right_lines(tmp_path):
    path = put(tmp_path / "a.jsonl", lines(*({"text": f"document {i}"} for i in range(50)), b"{broken"))
    corpus = open_corpus(path)
    pieces = corpus.pieces(100)
    assert len(pieces) > 5
    report = corpus.new_report()
    assert [t for p in pieces for t in corpus.read(p, report)] == [f"document {i}" for i in range(50)]
    assert report.first["not JSON"].startswith(f"{path}:51, ")


# ---------------------------------------------------------------- JSON lines


BROKEN_LINES = [
    (b'{"text": "cut o', "not JSON"),
    (b"no json at all", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'{"text": ' + b"1" * 5000 + b"}", "not JSON"),
    (b'["text"]', "not a JSON object"),
    (b'{"body": "b", "id": 3}', "no field 'text'"),
    (b'{"text": 17}', "field 'text' is no string"),
    (b'{"text": null}', "field 'text' is no string"),
]


@pytest.mark.parametrize(("line", "reason"), BROKEN_LINES, ids=[f"{i}" for i in range(len(BROKEN_LINES))])
def test_a_broken_line_is_skipped_counted_and_placed(tmp_path, line, reason):
    """R10: the lines around it are read; strict stops with file:line."""
    path = put(tmp_path / "a.jsonl", lines({"text": "before"}, b"", line, {"text": "after"}, line))
    texts, report = read(path)
    assert texts == ["before", "after"]
    assert report.reasons == {reason: 2} and report.skipped_documents == 2
    assert report.skipped_bytes == 2 * len(line)
    assert report.first[reason].startswith(f"{path}:3, ")
    assert reason in report.summary() and not report.clean
    with pytest.raises(ValueError, match=r"a\.jsonl:3: ") as error:
        read(path, strict=True)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_truncated_file_a_bad_byte_a_bom_and_crlf_lose_one_line_at_most(tmp_path):
    whole = b"\xef\xbb\xbf" + lines({"text": "one"}, b'{"text": "b\xffd"}', {"text": "three"}).replace(
        b"\n", b"\r\n"
    )
    path = put(tmp_path / "a.jsonl", whole[:-6])
    texts, report = read(path)
    assert texts == ["one", "b\ufffdd"]
    assert (report.bad_bytes, report.first["bad UTF-8"]) == (1, f"{path}:2")
    assert report.reasons == {"not JSON": 1}


def test_surrogates_in_json_escapes(tmp_path):
    """A pair is its character; a lone half has no UTF-8 form and becomes U+FFFD, counted."""
    path = put(tmp_path / "a.jsonl", lines(rb'{"text": "\ud83d\ude00"}', rb'{"text": "a\ud83db\ude00"}'))
    texts, report = read(path)
    assert texts == ["😀", "a\ufffdb\ufffd"]
    assert (report.surrogates, report.first["lone surrogate"]) == (2, f"{path}:2")
    with pytest.raises(ValueError, match=r"a\.jsonl:2: lone surrogate"):
        read(path, strict=True)


def test_raw_control_characters_in_a_string_are_kept(tmp_path):
    path = put(tmp_path / "a.jsonl", lines(b'{"text": "a\tb\0c"}', rb'{"text": "a\u0000b"}'))
    assert read(path)[0] == ["a\tb\0c", "a\0b"]


def test_a_wrong_field_says_which_fields_there_are(tmp_path):
    path = put(tmp_path / "a.jsonl", lines({"text": "a", "url": "b"}, {"text": "c", "url": "d"}))
    with pytest.raises(ValueError, match=r"no document.* 2 no field 'content' .*its fields: 'text', 'url'"):
        read(path, field="content")
    assert read(path, field="url")[0] == ["b", "d"]


# ---------------------------------------------------------------- packed files


def packed(kind: str, data: bytes) -> bytes:
    return (
        gzip.compress(data, mtime=0)
        if kind == "gz"
        else zstandard.ZstdCompressor(write_checksum=True).compress(data)
    )


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_packed_text_and_jsonl_read_like_plain_ones(tmp_path, kind):
    """Also when several packed files are joined into one, as gzip and zstd allow."""
    a = put(tmp_path / f"a.txt.{kind}", packed(kind, b"one\xff") + packed(kind, b"two"))
    b = put(
        tmp_path / f"b.jsonl.{kind}",
        packed(kind, lines({"text": "three"})) + packed(kind, lines({"text": "4"})),
    )
    texts, report = read([a, b])
    assert texts == ["one\ufffdtwo", "three", "4"] and report.bad_bytes == 1


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_packed_file_cut_anywhere_gives_what_it_still_holds(tmp_path, kind):
    """R10: broken gzip. The documents are a beginning of the true ones; the damage is counted and placed."""
    texts = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(4000)]
    data = packed(kind, lines(*({"text": text} for text in texts)))
    path = tmp_path / f"a.jsonl.{kind}"
    for cut in range(len(data) // 40, len(data), len(data) // 20):
        put(path, data[:cut])
        report = CorpusReport()
        corpus = open_corpus(path)
        found = list(corpus.read(Piece(corpus.files[0]), report))
        assert found == texts[: len(found)]
        assert (kind == "zst" or len(found) > 4000 * cut / len(data) - 1500) and len(found) < 4000
        assert any(reason.startswith("broken") for reason in report.reasons) and not report.clean
    with pytest.raises(ValueError, match=rf"a\.jsonl\.{kind}:\d+: broken"):
        read(path, strict=True)


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_packed_file_with_other_bytes_in_it_stops_there(tmp_path, kind):
    put(tmp_path / "whole.txt", "fine")
    data = bytearray(packed(kind, os.urandom(300_000).hex().encode()))
    data[len(data) // 2 : len(data) // 2 + 100] = bytes(100)
    put(tmp_path / f"z.txt.{kind}", bytes(data))
    put(tmp_path / f"noise.txt.{kind}", b"this was never packed")
    texts, report = read(tmp_path)
    assert "fine" in texts and not report.clean
    assert sum(n for reason, n in report.reasons.items() if reason.startswith("broken")) == 2


# ---------------------------------------------------------------- parquet


def test_parquet_columns_of_several_kinds(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = ["one", "zwei 😀", None, "", "five"]
    columns = {
        "text": arrow.array(texts),
        "large": arrow.array(texts, arrow.large_string()),
        "coded": arrow.array(texts).dictionary_encode(),
        "number": arrow.array([1, 2, 3, 4, 5]),
    }
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table(columns), path, row_group_size=2)
    for name in ("text", "large", "coded"):
        found, report = read(path, field=name)
        assert found == ["one", "zwei 😀", "five"]
        assert report.reasons == {f"field '{name}' is no string": 1, "blank": 1}
        assert report.first["blank"] == f"{path}:row 4"
    with pytest.raises(ValueError, match=r"a\.parquet:row 3: field 'text' is no string, it is null"):
        read(path, strict=True)
    with pytest.raises(ValueError, match=r"no field 'body'.*its columns: 'text', 'large', 'coded', 'number'"):
        read(path, field="body")
    with pytest.raises(ValueError, match=r"field 'number' is no string.*it is int64"):
        read(path, field="number")


def test_broken_parquet_is_skipped_and_the_next_file_read(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["good"]}), tmp_path / "b.parquet")
    put(tmp_path / "a.parquet", (tmp_path / "b.parquet").read_bytes()[:-20])
    put(tmp_path / "empty.parquet", b"")
    texts, report = read(tmp_path)
    assert texts == ["good"] and report.reasons == {"broken parquet": 2}
    with pytest.raises(ValueError, match=r"a\.parquet:row 1: broken parquet, "):
        read(tmp_path, strict=True)


def test_without_pyarrow_the_message_says_what_to_install(tmp_path, monkeypatch):
    put(tmp_path / "a.parquet", b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"needs pyarrow: pip install 'clearhead\[data\]'"):
        open_corpus(tmp_path)


# ---------------------------------------------------------------- which files


def test_a_folder_is_read_in_the_order_of_its_paths_and_tells_what_it_left_out(tmp_path):
    for name in (
        "b.txt",
        "a/z.md",
        "a/c.jsonl",
        "a.py",
        "d.TXT",
        ".hidden.txt",
        ".git/x.txt",
        "photo.png",
        "README",
    ):
        put(tmp_path / name, lines({"text": name}) if name.endswith("jsonl") else name)
    put(tmp_path / "e.txt.gz", gzip.compress(b"e.txt.gz"))
    put(tmp_path / "f.json", "[]")
    texts, report = read(tmp_path)
    assert texts == ["a/c.jsonl", "a/z.md", "a.py", "b.txt", "d.TXT", "e.txt.gz"]
    assert report.ignored_files == {".png": 1, "without suffix": 1, ".json": 1}
    assert "files not read: 1 .json, 1 .png, 1 without suffix" in report.summary()


def test_linked_folders_are_read_once_and_a_circle_ends(tmp_path):
    put(tmp_path / "data" / "a.txt", "a")
    put(tmp_path / "elsewhere" / "b.txt", "b")
    (tmp_path / "data" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(tmp_path / "data")
    assert read(tmp_path / "data")[0] == ["a", "b"]


def test_lists_and_globs(tmp_path, monkeypatch):
    for name in ("x2.txt", "x10.txt", "y.log", "sub/x3.txt", ".x.txt"):
        put(tmp_path / name, name)
    monkeypatch.chdir(tmp_path)
    assert read("x*.txt")[0] == ["x10.txt", "x2.txt"]
    assert read(str(tmp_path / "**" / "x*.txt"))[0] == ["sub/x3.txt", "x10.txt", "x2.txt"]
    assert read(["y.log", Path("x2.txt"), "sub"])[0] == ["y.log", "x2.txt", "sub/x3.txt"]
    put(tmp_path / "odd[1].txt", "odd")
    assert read("odd[1].txt")[0] == ["odd"]


@pytest.mark.parametrize(
    ("source", "options", "error", "message"),
    [
        (
            "missing.txt",
            {},
            FileNotFoundError,
            "no file or folder 'missing.txt'.*built-in corpora: python, pydoc",
        ),
        ("*.nothing", {}, FileNotFoundError, r"no file matches '\*\.nothing'"),
        ("pictures", {}, ValueError, r"pictures holds no file to read \(it holds 1 \.png\)"),
        ("empty", {}, ValueError, r"empty holds no file to read \(it holds nothing\)"),
        ([], {}, ValueError, "the list of sources is empty"),
        ("a.pdf", {}, ValueError, r"a\.pdf is no plain text by its name \(\.pdf\)"),
        ("a.txt", {"field": "body"}, ValueError, "field 'body' has no use: a.txt holds no .jsonl"),
        ("a.txt", {"document_separator": ""}, ValueError, "document_separator '' has no use: it is empty"),
        ("a.jsonl", {"document_separator": "x"}, ValueError, "has no use: a.jsonl holds no plain text file"),
    ],
)
def test_what_cannot_be_a_corpus_says_why_in_one_line(tmp_path, monkeypatch, source, options, error, message):
    put(tmp_path / "pictures" / "a.png", b"")
    (tmp_path / "empty").mkdir()
    for name in ("a.pdf", "a.txt", "a.jsonl"):
        put(tmp_path / name, "a")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message) as raised:
        open_corpus(source, **options)
    assert "\n" not in str(raised.value)


def test_a_source_that_is_no_path_is_a_type_error(unchecked):
    with pytest.raises(TypeError, match="a source is a path, a glob or one of python, pydoc, not 3"):
        open_corpus([3])


def test_a_corpus_of_empty_files_is_an_error_and_an_empty_file_among_others_is_counted(tmp_path):
    put(tmp_path / "a.txt", "")
    put(tmp_path / "b.jsonl", "\n\n")
    with pytest.raises(
        ValueError, match=r"holds no document: 0 documents, 0 bytes; skipped 1 document .* 1 blank"
    ):
        read(tmp_path)
    put(tmp_path / "c.txt", "something")
    texts, report = read(tmp_path, strict=True)
    assert texts == ["something"] and report.reasons == {"blank": 1} and report.clean


def test_each_reading_of_a_corpus_counts_anew(tmp_path):
    corpus = open_corpus(put(tmp_path / "a.txt", "12345"))
    assert [list(corpus), list(corpus)] == [["12345"], ["12345"]]
    assert (corpus.report.documents, corpus.report.bytes) == (1, 5)


def test_reports_add_up_and_survive_json():
    one = CorpusReport(2, 10, 1, 0, 1, 4, {"blank": 1}, {"blank": "a:1"}, {".png": 1})
    two = CorpusReport(3, 20, 0, 2, 2, 6, {"blank": 1, "not JSON": 1}, {"blank": "b:1", "not JSON": "b:2"})
    one.merge(two)
    assert one == CorpusReport(
        5, 30, 1, 2, 3, 10, {"blank": 2, "not JSON": 1}, {"blank": "a:1", "not JSON": "b:2"}, {".png": 1}
    )
    assert CorpusReport(**json.loads(json.dumps(one.to_dict()))) == one


# ---------------------------------------------------------------- built-in corpora


def test_the_python_corpus_is_the_library_without_its_tests():
    corpus = open_corpus("python")
    texts = list(corpus)
    names = [file.path for file in corpus.files]
    assert 5e6 < corpus.report.bytes < 30e6 and corpus.report.clean
    assert len(texts) + corpus.report.skipped_documents == len(names)
    assert any(name.endswith("argparse.py") for name in names)
    folders = {part for name in names for part in Path(name).parts}
    assert not folders & {"test", "tests", "idlelib", "site-packages", "__pycache__"}
    assert names == [file.path for file in open_corpus("python").files]


def test_the_pydoc_corpus_has_a_document_per_topic():
    from pydoc_data.topics import topics

    assert read("pydoc")[0] == [topics[name] for name in sorted(topics)]


def test_a_folder_called_python_needs_its_dot(tmp_path, monkeypatch):
    put(tmp_path / "python" / "a.txt", "mine")
    monkeypatch.chdir(tmp_path)
    assert read("./python")[0] == ["mine"] == read(Path("python"))[0]


# ---------------------------------------------------------------- the split


def test_the_split_is_the_rule_of_the_hash(tmp_path):
    texts = [f"document {i}" for i in range(400)]
    path = put(tmp_path / "a.jsonl", lines(*({"text": text} for text in texts)))
    held_out = [t for t in texts if int(hashlib.sha256(t.encode("utf-8")).hexdigest()[:8], 16) % 20 == 0]
    split = list(split_corpus(open_corpus(path)))
    assert [text for _, text in split] == texts
    assert [text for name, text in split if name == "validation"] == held_out
    assert 5 < len(held_out) < 40


def test_one_document_gives_its_last_five_percent_cut_at_a_character(tmp_path):
    text = "é漢😀x" * 250
    corpus = open_corpus(put(tmp_path / "a.txt", text))
    assert split_rule(corpus) == "tail"
    assert list(split_corpus(corpus)) == [("train", text[:950]), ("validation", text[950:])]


def test_a_few_documents_on_one_side_of_the_hash_give_their_ends(tmp_path):
    """Three files would leave validation empty six times out of seven; they are cut like one document."""
    texts = ["a" * 100, "b" * 40, "c" * 20]
    assert not any(is_validation(text) for text in texts)
    paths = [put(tmp_path / f"{i}.txt", text) for i, text in enumerate(texts)]
    split = list(split_corpus(open_corpus(paths)))
    assert [text for name, text in split if name == "validation"] == ["a" * 5, "b" * 2, "c"]
    assert "".join(text for _, text in split) == "".join(texts)


@settings(deadline=None)
@given(st.text(min_size=1))
def test_a_cut_document_loses_no_character(text):
    parts = split_document(text, "tail")
    assert "".join(part for _, part in parts) == text
    assert len(dict(parts)["validation"]) == -(-len(text) // 20)


def test_the_hash_of_a_lone_surrogate_is_that_of_its_replacement():
    assert is_validation("a\ud800") == is_validation("a\ufffd")


# ---------------------------------------------------------------- large files


def peak_of_reading(source, **options) -> int:
    tracemalloc.start()
    corpus = open_corpus(source, **options)
    count = sum(1 for _ in corpus)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == corpus.report.documents == 8_000
    return peak


@pytest.mark.parametrize("kind", ["separator", "jsonl", "jsonl.gz", "jsonl.zst", "parquet"])
def test_memory_is_bounded_by_the_longest_document_not_the_file(tmp_path, kind):
    """8 MB in 8,000 documents, read in less than 2 MB."""
    texts = [f"{i} " + "word " * 200 for i in range(8_000)]
    path = tmp_path / f"large.{kind.replace('separator', 'txt')}"
    if kind == "separator":
        put(path, SEPARATOR.join(texts))
        assert peak_of_reading(path, document_separator=SEPARATOR) < 2e6
        return
    if kind == "parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.table({"text": texts}), path, row_group_size=1000)
    else:
        data = lines(*({"text": text} for text in texts))
        put(path, data if kind == "jsonl" else packed(kind.removeprefix("jsonl."), data))
    assert peak_of_reading(path) < 2e6


@pytest.mark.slow
def test_a_line_of_50_megabytes_is_one_document_and_one_broken_one_is_skipped(tmp_path):
    long = "x" * 50_000_000
    path = put(tmp_path / "a.jsonl", lines({"text": long}, b'{"text": "' + long.encode(), {"text": "after"}))
    texts, report = read(path)
    assert list(map(len, texts)) == [50_000_000, 5]
    assert report.reasons == {"not JSON": 1} and report.skipped_bytes == 50_000_010
    plain = put(tmp_path / "a.txt", f"before{SEPARATOR}{long}{SEPARATOR}after")
    assert [len(text) for text in read(plain, document_separator=SEPARATOR)[0]] == [6, 50_000_000, 5]
