"""Where text comes from: files, folders, globs and two built-in corpora, as documents in a fixed order.

A corpus is a list of files; iterating over it gives one document (a str) after the other, in memory bounded
by the longest. What makes a document:

    text        the whole file; with a separator, what stands between two separators, exactly as it stands
    jsonl       one field of one line                     (text and jsonl also as .gz and .zst)
    parquet     one row of one column
    "python"    one source file of the running interpreter's standard library, tests left out
    "pydoc"     one topic of Python's language reference

The validation split is a function of the text alone, so that it survives reordering and new files:

    validation = [d for d in documents if int(sha256(d).hexdigest()[:8], 16) % 20 == 0]
"""

import glob
import hashlib
import itertools
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal

from clearhead.text.documents import CorpusReport, Piece, TextFile, pyarrow, pydoc_topics, read_piece
from clearhead.text.pretokenize import mend_surrogates

Source = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""What `open_corpus` reads: a path, a glob, "python", "pydoc", or several of these."""

Split = Literal["train", "validation"]
SplitRule = Literal["hash", "tail", "train", "validation"]
"""How documents are split: by hash, each at its end, or all to one side."""

_TEXT = """
    .txt .text .md .rst .tex .org .html .htm .css .js .ts .py .pyi .c .h .cc .cpp .hpp .rs .go .java .kt
    .swift .scala .rb .php .pl .lua .r .jl .hs .ml .sh .sql .toml .yaml .yml
"""
_NOT_TEXT = """
    .json .csv .arrow .pdf .doc .docx .epub .zip .tar .tgz .7z .rar .bz2 .xz .npy .npz .bin .pt .pth .pickle
    .pkl .safetensors .gguf .png .jpg .jpeg .gif .mp3 .mp4 .wav .exe .so .dll .pyc
"""
TEXT_SUFFIXES = frozenset(_TEXT.split())
"""What a folder gives as plain text. A file named by itself is text whatever its suffix, except these:"""
NOT_TEXT_SUFFIXES = frozenset(_NOT_TEXT.split())
_READS = "clearhead reads plain text, .jsonl (both also as .gz or .zst) and .parquet"
_NOT_THE_LIBRARY = frozenset({"test", "tests", "idle_test", "idlelib", "site-packages", "dist-packages"})


class Corpus:
    """Documents from a list of files, in order; each iteration reads them and fills `report` anew.

    Made by `open_corpus`. A corpus without a single document is a ValueError at the end of the iteration,
    which says why everything was skipped.
    """

    def __init__(
        self,
        files: Iterable[TextFile],
        *,
        name: str = "corpus",
        field: str = "text",
        document_separator: str | None = None,
        strict: bool = False,
        ignored_files: dict[str, int] | None = None,
    ):
        self.files = tuple(files)
        self.name = name
        self.field = field
        self.document_separator = document_separator
        self.strict = strict
        self.ignored_files = dict(ignored_files or {})
        self.report = self.new_report()

    def new_report(self) -> CorpusReport:
        """Return a report of nothing read yet, with the files that a folder holds besides text."""
        return CorpusReport(ignored_files=dict(self.ignored_files))

    def __iter__(self) -> Iterator[str]:
        self.report = self.new_report()
        return self.documents(self.report)

    def documents(self, report: CorpusReport) -> Iterator[str]:
        """Yield every document, counting into `report`; none at all is a ValueError."""
        for file in self.files:
            yield from self.read(Piece(file), report)
        if not report.documents:
            raise ValueError(f"{self.name} holds no document: {report.summary()}")

    def read(self, piece: Piece, report: CorpusReport) -> Iterator[str]:
        """Yield the documents of one piece, counting into `report`."""
        return read_piece(
            piece,
            report,
            field=self.field,
            document_separator=self.document_separator,
            strict=self.strict,
        )

    def pieces(self, piece_bytes: int) -> list[Piece]:
        """Cut the files into pieces of at least `piece_bytes`, where documents can be found by seeking.

        That is in plain .jsonl and in plain text with a separator; every other file is one piece. The pieces
        read one after the other give the same documents as the files.
        """
        cut: list[Piece] = []
        for file in self.files:
            n = max(1, file.size() // piece_bytes) if self._can_seek(file) else 1
            borders = [*(i * file.size() // n for i in range(1, n)), None]
            starts = itertools.chain([0], borders)
            cut += [Piece(file, start or 0, stop) for start, stop in zip(starts, borders, strict=False)]
        return cut

    def _can_seek(self, file: TextFile) -> bool:
        separator = file.separator(self.document_separator)
        if separator is None or file.packing:
            return False
        # "\n\n" could be found at two places in "\n\n\n"; the right one depends on all that stands before.
        return not any(separator.startswith(separator[i:]) for i in range(1, len(separator)))


def open_corpus(
    source: Source, *, field: str = "text", document_separator: str | None = None, strict: bool = False
) -> Corpus:
    """Return the corpus at `source`: a file, a folder, a glob, "python", "pydoc", or a list of these.

    A folder gives the files below it whose suffix says text, jsonl or parquet, sorted by path, hidden ones
    left out; what it holds besides is counted in the report. A file named by itself is read as text whatever
    its suffix. `"python"` and `"pydoc"` are the built-in corpora; `"./python"` is a folder of that name.

    field               the key (jsonl) or column (parquet) that holds the text
    document_separator  cuts plain text files into documents, for example "<|endoftext|>"
    strict              the first byte that is no UTF-8 and the first broken record raise ValueError

    Raises FileNotFoundError for a path or glob that matches nothing, ValueError for a source without any file
    to read and for an option that no file of the source can use.
    """
    given = [source] if isinstance(source, str | os.PathLike) else list(source)
    files: list[TextFile] = []
    ignored: Counter[str] = Counter()
    for one in given:
        if not isinstance(one, str | os.PathLike):
            raise TypeError(f"a source is a path, a glob or one of {', '.join(BUILT_IN)}, not {one!r}")
        files += _files_of(one, ignored)
    name = ", ".join(str(Path(one)) for one in given[:3]) + (
        f" and {len(given) - 3} more" if given[3:] else ""
    )
    if not given:
        raise ValueError("the list of sources is empty")
    if not files:
        left = ", ".join(f"{n} {suffix}" for suffix, n in sorted(ignored.items())) or "nothing"
        raise ValueError(f"{name} holds no file to read (it holds {left}); {_READS}")

    kinds = {file.kind for file in files}
    if document_separator is not None and (not document_separator or "text" not in kinds):
        why = f"{name} holds no plain text file" if document_separator else "it is empty"
        raise ValueError(f"document_separator {document_separator!r} has no use: {why}")
    if field != "text" and not kinds & {"jsonl", "parquet"}:
        raise ValueError(f"field {field!r} has no use: {name} holds no .jsonl and no .parquet file")
    if "parquet" in kinds:
        pyarrow()
    return Corpus(
        files,
        name=name,
        field=field,
        document_separator=document_separator,
        strict=strict,
        ignored_files=dict(ignored),
    )


def _files_of(source: str | os.PathLike[str], ignored: Counter[str]) -> list[TextFile]:
    if isinstance(source, str) and source in BUILT_IN:
        return BUILT_IN[source]()
    path = Path(source).expanduser()
    if path.is_dir():
        return _folder(path, ignored)
    if path.exists():
        return [_named_file(path)]
    if glob.has_magic(str(path)):
        found = glob.glob(str(path), recursive=True)  # noqa: PTH207 (Path.glob matches hidden files)
        if not found:
            raise FileNotFoundError(f"no file matches {str(source)!r} (looked in {Path.cwd()})")
        return [file for one in _sorted(map(Path, set(found))) for file in _files_of(one, ignored)]
    raise FileNotFoundError(
        f"no file or folder {str(source)!r} (looked in {Path.cwd()}); built-in corpora: {', '.join(BUILT_IN)}"
    )


def _folder(
    folder: Path, ignored: Counter[str], leave_out: frozenset[str] = frozenset({"__pycache__"})
) -> list[TextFile]:
    def stop(error: OSError):
        raise error

    found: list[Path] = []
    seen = set()  # links to folders are followed, each folder once
    for root, folders, names in os.walk(folder, onerror=stop, followlinks=True):
        if (real := os.path.realpath(root)) in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in leave_out)
        found += [Path(root, name) for name in names if not name.startswith(".")]
    files = []
    for path in _sorted(found):
        file = _by_suffix(path)
        if file.kind == "text" and _suffixes(path)[0] not in TEXT_SUFFIXES:
            ignored[path.suffix.lower() or "without suffix"] += 1
        else:
            files.append(file)
    return files


def _sorted(paths: Iterable[Path]) -> list[Path]:
    """In the order of the paths' parts, the same on every system."""
    return sorted(paths, key=lambda path: path.parts)


def _suffixes(path: Path) -> tuple[str, str]:
    """The suffix that tells the content, and the one that tells the packing: ('.jsonl', '.gz')."""
    last = path.suffix.lower()
    return (Path(path.stem).suffix.lower(), last) if last in (".gz", ".zst") else (last, "")


def _by_suffix(path: Path) -> TextFile:
    content, packed = _suffixes(path)
    if content == ".parquet" and not packed:
        return TextFile(str(path), "parquet")
    kind = "jsonl" if content in (".jsonl", ".ndjson") else "text"
    return TextFile(str(path), kind, "gzip" if packed == ".gz" else "zstd" if packed else "")


def _named_file(path: Path) -> TextFile:
    if not path.is_file():
        raise ValueError(f"{path} is no regular file; a corpus is read more than once")
    content, packed = _suffixes(path)
    if content in NOT_TEXT_SUFFIXES or (content == ".parquet" and packed):
        raise ValueError(f"{path} is no plain text by its name ({content}{packed}); {_READS}")
    return _by_suffix(path)


def _python_library() -> list[TextFile]:
    folder = Path(sysconfig.get_paths()["stdlib"])
    if not (folder / "os.py").is_file():
        raise FileNotFoundError(f"this Python keeps no source files of its standard library in {folder}")
    files = _folder(folder, Counter(), _NOT_THE_LIBRARY | {"__pycache__"})
    return [file for file in files if file.path.endswith(".py")]


def _pydoc() -> list[TextFile]:
    pydoc_topics()
    return [TextFile(f"pydoc of Python {sys.version.split()[0]}", "pydoc")]


BUILT_IN: dict[str, Callable[[], list[TextFile]]] = {"python": _python_library, "pydoc": _pydoc}
"""The corpora that are always there."""


# ---------------------------------------------------------------- training and validation text


def is_validation(text: str) -> bool:
    """Return whether a document belongs to the validation text: one in twenty, by the hash of its UTF-8.

    >>> [n for n in range(100) if is_validation(f"document {n}")]
    [6, 10, 39, 77, 98]
    """
    digest = hashlib.sha256(mend_surrogates(text).encode("utf-8")).hexdigest()
    return int(digest[:8], 16) % 20 == 0


def split_rule(corpus: Corpus) -> SplitRule:
    """Return how `corpus` is split: "hash" where that gives both kinds of documents, else "tail".

    "tail" is for a corpus of one document, or of a few that the hash sends to one side: each document then
    gives its last 5 % to validation. Reads no further than the first document of the second kind.
    """
    kinds = set()
    for text in corpus.documents(corpus.new_report()):
        kinds.add(is_validation(text))
        if len(kinds) == 2:
            return "hash"
    return "tail"


def split_document(text: str, rule: SplitRule) -> list[tuple[Split, str]]:
    """Return where a document goes: whole to one side, or ("tail") cut after 95 % of its characters.

    >>> split_document("x" * 40, "tail")[1]
    ('validation', 'xx')
    """
    if rule == "hash":
        return [("validation" if is_validation(text) else "train", text)]
    if rule != "tail":
        return [(rule, text)]
    cut = len(text) * 95 // 100
    parts: list[tuple[Split, str]] = [("train", text[:cut]), ("validation", text[cut:])]
    return [(split, part) for split, part in parts if part]


def split_corpus(corpus: Corpus) -> Iterator[tuple[Split, str]]:
    """Yield ("train" or "validation", text) for every document of `corpus`, in order; fills its report."""
    rule = split_rule(corpus)
    for text in corpus:
        yield from split_document(text, rule)
