"""The documents of one file, whatever is broken in it.

A text file is cut at a separator (or is one document), a JSON-lines file gives one field of each line, a
parquet file one column; text and JSON lines may be packed (.gz, .zst). Files are read in blocks: memory is
bounded by the longest document.

Real text is broken here and there. Nothing stops for it and nothing is lost silently: bytes that are no UTF-8
become U+FFFD, a line that is no JSON is skipped, a truncated .gz gives what it still holds, and every case is
counted in a `CorpusReport` with the place of its first occurrence. A strict reading stops there instead.
"""

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Literal

from clearhead.text.pretokenize import mend_surrogates

_BLOCK = 1 << 16
_BOM = b"\xef\xbb\xbf"


@dataclass
class CorpusReport:
    """What a reading of a corpus found: everything that was read, changed or left out, counted."""

    documents: int = 0
    bytes: int = 0
    """UTF-8 bytes of the documents: what bits per byte divide by."""
    bad_bytes: int = 0
    """Bytes that are no UTF-8; each run of them is one U+FFFD in the document."""
    surrogates: int = 0
    """Lone surrogates (from JSON escapes) that became U+FFFD."""
    skipped_documents: int = 0
    skipped_bytes: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """Reason -> number of documents skipped for it; a damaged packed file counts as one."""
    first: dict[str, str] = field(default_factory=dict)
    """Reason -> file:line of its first occurrence."""
    ignored_files: dict[str, int] = field(default_factory=dict)
    """Suffix -> files of a folder that were not read because they are no text by their name."""

    @property
    def clean(self) -> bool:
        """Whether a strict reading would have passed: nothing replaced, only blank documents skipped."""
        return not self.bad_bytes and not self.surrogates and set(self.reasons) <= {"blank"}

    def skip(self, reason: str, place: Callable[[], str], n_bytes: int, documents: int = 1) -> None:
        """Count `documents` skipped documents of together `n_bytes`; `place` is asked the first time only."""
        self.skipped_documents += documents
        self.skipped_bytes += n_bytes
        self.reasons[reason] = self.reasons.get(reason, 0) + documents
        self.note(reason, place)

    def note(self, reason: str, place: Callable[[], str]) -> None:
        """Remember the place of the first occurrence of `reason`."""
        if reason not in self.first:
            self.first[reason] = place()

    def merge(self, other: "CorpusReport") -> None:
        """Add the counts of a later part of the same corpus."""
        for name in ("documents", "bytes", "bad_bytes", "surrogates", "skipped_documents", "skipped_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for mine, theirs in ((self.reasons, other.reasons), (self.ignored_files, other.ignored_files)):
            for key, count in theirs.items():
                mine[key] = mine.get(key, 0) + count
        self.first = other.first | self.first

    def to_dict(self) -> dict:
        """Return the counts as a dict for JSON; `CorpusReport(**counts)` gives them back."""
        return asdict(self)

    def summary(self) -> str:
        """Return the report in one line.

        >>> CorpusReport(documents=2, bytes=1200, bad_bytes=1, first={"bad UTF-8": "a.txt:7"}).summary()
        '2 documents, 1,200 bytes; replaced 1 byte that is no UTF-8 (first a.txt:7)'
        """
        first = {reason: f" (first {place})" for reason, place in self.first.items()}
        parts = [f"{_count(self.documents, 'document')}, {_count(self.bytes, 'byte')}"]
        if self.bad_bytes:
            verb = "is" if self.bad_bytes == 1 else "are"
            parts.append(
                f"replaced {_count(self.bad_bytes, 'byte')} that {verb} no UTF-8{first.get('bad UTF-8', '')}"
            )
        if self.surrogates:
            where = first.get("lone surrogate", "")
            parts.append(f"replaced {_count(self.surrogates, 'lone surrogate')}{where}")
        if self.reasons:
            each = ", ".join(f"{n:,} {reason}{first.get(reason, '')}" for reason, n in self.reasons.items())
            total = f"{_count(self.skipped_documents, 'document')} of {_count(self.skipped_bytes, 'byte')}"
            parts.append(f"skipped {total}: {each}")
        if self.ignored_files:
            each = ", ".join(f"{n:,} {suffix}" for suffix, n in sorted(self.ignored_files.items()))
            parts.append(f"files not read: {each}")
        return "; ".join(parts)


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}" if number == 1 else f"{number:,} {thing}s"


@dataclass(frozen=True)
class TextFile:
    """One input file: its path, what it holds, and how it is packed."""

    path: str
    kind: Literal["text", "jsonl", "parquet", "pydoc"] = "text"
    packing: Literal["", "gzip", "zstd"] = ""

    def size(self) -> int:
        """Return the bytes of the file as it is stored."""
        if self.kind == "pydoc":
            return sum(len(text.encode("utf-8")) for text in pydoc_topics().values())
        return Path(self.path).stat().st_size

    def separator(self, document_separator: str | None) -> bytes | None:
        """Return the bytes between two records, None when the whole file is one or records are not bytes."""
        if self.kind == "jsonl":
            return b"\n"
        return document_separator.encode("utf-8") if document_separator and self.kind == "text" else None


@dataclass(frozen=True)
class Piece:
    """The documents of a file that begin in bytes [start, stop); stop None means the end of the file."""

    file: TextFile
    start: int = 0
    stop: int | None = None

    def size(self) -> int:
        """Return the bytes from `start` to `stop`."""
        return (self.file.size() if self.stop is None else self.stop) - self.start


def read_piece(
    piece: Piece,
    report: CorpusReport,
    *,
    field: str = "text",
    document_separator: str | None = None,
    strict: bool = False,
) -> Iterator[str]:
    """Yield the documents of `piece`, counting into `report`.

    A blank document (empty or white space alone) is skipped. With `strict` the first thing that would be
    replaced or skipped for damage is a ValueError naming file and line.
    """
    reader = _Reader(piece, report, field, piece.file.separator(document_separator), strict)
    for offset, text in reader.records():
        mended = mend_surrogates(text)
        if mended is not text:
            reader.replaced("lone surrogate", offset, "it has no UTF-8 form")
            report.surrogates += mended.count("\ufffd") - text.count("\ufffd")
        n_bytes = len(mended.encode("utf-8"))
        if not mended or mended.isspace():
            report.skip("blank", lambda offset=offset: reader.place(offset), n_bytes)
            continue
        report.documents += 1
        report.bytes += n_bytes
        yield mended


class _Reader:
    """The records of one piece, each with its offset in the unpacked file (in parquet: its row)."""

    def __init__(self, piece: Piece, report: CorpusReport, field: str, separator: bytes | None, strict: bool):
        self.piece, self.file, self.report = piece, piece.file, report
        self.field, self.separator, self.strict = field, separator, strict

    def records(self) -> Iterator[tuple[int, str]]:
        if self.file.kind == "pydoc":
            return enumerate(text for _, text in sorted(pydoc_topics().items()))
        if self.file.kind == "parquet":
            return self._parquet()
        return self._jsonl() if self.file.kind == "jsonl" else self._text()

    # ---- damage

    def place(self, offset: int) -> str:
        """Return "file:line" of an offset; the lines are counted only now, when somebody asks."""
        if self.file.kind in ("parquet", "pydoc"):
            return f"{self.file.path}:row {offset + 1}"
        line, seen = 1, 0
        with suppress(Damaged):
            for block in unpacked(self.file, 0):
                line += block.count(b"\n", 0, offset - seen)
                seen += len(block)
                if seen >= offset:
                    break
        return f"{self.file.path}:{line}"

    def replaced(self, reason: str, offset: int, detail: str) -> None:
        if self.strict:
            raise ValueError(f"{self.place(offset)}: {reason}, {detail}")
        self.report.note(reason, lambda: self.place(offset))

    def skipped(self, reason: str, offset: int, n_bytes: int, detail: str, documents: int = 1) -> None:
        if self.strict:
            raise ValueError(f"{self.place(offset)}: {reason}, {detail}")
        self.report.skip(reason, lambda: f"{self.place(offset)}, {detail}", n_bytes, documents)

    def decode(self, data: bytes, offset: int) -> str:
        """Return the text of a record that begins at `offset`, without the mark that Windows puts first."""
        if offset == 0 and data.startswith(_BOM):
            data, offset = data[len(_BOM) :], len(_BOM)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            bad, byte = offset + error.start, data[error.start]
        row = self.file.kind == "parquet"
        self.replaced("bad UTF-8", offset if row else bad, f"byte 0x{byte:02x} at offset {bad}")
        text = data.decode("utf-8", "replace")
        # U+FFFD has three bytes; what is missing from the length besides them are the bad bytes.
        n_replaced = text.count("\ufffd") - data.count("\ufffd".encode())
        self.report.bad_bytes += len(data) - len(text.encode("utf-8")) + 3 * n_replaced
        return text

    # ---- the kinds of files

    def _text(self) -> Iterator[tuple[int, str]]:
        if self.separator is None:
            yield 0, self.decode(b"".join(self._blocks(0)), 0)
            return
        for offset, data in self._cut(self.separator):
            yield offset, self.decode(data, offset)

    def _jsonl(self) -> Iterator[tuple[int, str]]:
        for offset, line in self._cut(b"\n"):
            if not line.strip():
                continue
            decoded = self.decode(line, offset)
            try:
                # strict=False admits raw tabs and NULs inside strings: damage that loses nothing.
                record = json.loads(decoded, strict=False)
            except (ValueError, RecursionError) as error:
                syntax = isinstance(error, json.JSONDecodeError)
                detail = f"{error.msg} in column {error.colno}" if syntax else _one_line(error)
                self.skipped("not JSON", offset, len(line), detail)
                continue
            text = self._field_of(record, offset, len(line))
            if text is not None:
                yield offset, text

    def _field_of(self, record, offset: int, n_bytes: int) -> str | None:
        if not isinstance(record, dict):
            self.skipped("not a JSON object", offset, n_bytes, f"it is {type(record).__name__}")
        elif self.field not in record:
            keys = ", ".join(map(repr, list(record)[:8])) or "none"
            self.skipped(f"no field {self.field!r}", offset, n_bytes, f"its fields: {keys}")
        elif not isinstance(record[self.field], str):
            kind = type(record[self.field]).__name__
            self.skipped(f"field {self.field!r} is no string", offset, n_bytes, f"it is {kind}")
        else:
            return record[self.field]
        return None

    def _parquet(self) -> Iterator[tuple[int, str]]:
        arrow, parquet = pyarrow()
        row, n_rows = 0, 1
        with Path(self.file.path).open("rb") as raw:
            try:
                table = parquet.ParquetFile(raw, pre_buffer=False)
                n_rows = table.metadata.num_rows
                for text in self._column(arrow, table, n_rows):
                    if text is None:
                        self.skipped(f"field {self.field!r} is no string", row, 0, "it is null")
                    else:
                        yield row, self.decode(text, row)
                    row += 1
            except (arrow.ArrowException, OSError) as error:
                lost = max(1, n_rows - row)
                self.skipped("broken parquet", row, 0, _one_line(error), documents=lost)

    def _column(self, arrow, table, n_rows: int) -> Iterator[bytes | None]:
        schema, types = table.schema_arrow, arrow.types
        if self.field not in schema.names:
            columns = ", ".join(map(repr, schema.names[:8]))
            self.skipped(f"no field {self.field!r}", 0, 0, f"its columns: {columns}", documents=n_rows)
            return
        kind = schema.field(self.field).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        if not (types.is_string(kind) or types.is_large_string(kind)):
            self.skipped(f"field {self.field!r} is no string", 0, 0, f"it is {kind}", documents=n_rows)
            return
        for batch in table.iter_batches(batch_size=256, columns=[self.field], use_threads=False):
            yield from batch.column(0).cast(arrow.large_string()).cast(arrow.large_binary()).to_pylist()

    # ---- bytes

    def _cut(self, separator: bytes) -> Iterator[tuple[int, bytes]]:
        """The records that begin in the piece, in memory bounded by the longest of them."""
        start, stop = self.piece.start, self.piece.stop
        # One separator back: the record that begins exactly at `start` is ours. What comes before it is not.
        position = max(0, start - len(separator))
        ours = not start
        held: list[bytes] = []  # of the record that begins at `position`
        tail = b""
        for block in self._blocks(position):
            *ended, last = (tail + block).split(separator)
            for part in ended:
                record = b"".join([*held, part])
                if ours:
                    yield position, record
                position += len(record) + len(separator)
                held, ours = [], True
                if stop is not None and position >= stop:
                    return
            # The last bytes may be the first ones of a separator that lies across two blocks.
            keep = min(len(separator) - 1, len(last))
            held.append(last[: len(last) - keep])
            tail = last[len(last) - keep :]
            if not ours:
                position += len(held.pop())
                if stop is not None and position >= stop:
                    return
        if ours:
            yield position, b"".join([*held, tail])

    def _blocks(self, start: int) -> Iterator[bytes]:
        """The unpacked bytes from `start`; damage ends them and is counted."""
        seen = start
        try:
            for block in unpacked(self.file, start):
                if seen == 0 and block[:2] in (b"\xff\xfe", b"\xfe\xff") and b"\0" in block[:100]:
                    self.skipped("UTF-16", 0, self.file.size(), "save it as UTF-8")
                    return
                yield block
                seen += len(block)
        except Damaged as damage:
            self.skipped(f"broken {self.file.packing}", seen, damage.unread, str(damage))


class Damaged(Exception):
    """A packed file breaks before its end: what was read is good, `unread` bytes of the file are lost."""

    def __init__(self, why: str, unread: int):
        super().__init__(why)
        self.unread = unread


def unpacked(file: TextFile, start: int) -> Iterator[bytes]:
    """Yield the bytes of a file, unpacked, in blocks; Damaged where they break."""
    with Path(file.path).open("rb") as raw:
        if not file.packing:
            raw.seek(start)
            while block := raw.read(_BLOCK):
                yield block
            return
        from zstandard import ZstdError

        try:
            yield from _unpack_gzip(raw) if file.packing == "gzip" else _unpack_zstd(raw)
        except (EOFError, zlib.error, gzip.BadGzipFile, ZstdError) as error:
            raise Damaged(_one_line(error), os.fstat(raw.fileno()).st_size - raw.tell()) from None


def _unpack_gzip(raw) -> Iterator[bytes]:
    reader = gzip.GzipFile(fileobj=raw)
    while block := reader.read1(_BLOCK):  # read1, not read: what is good before the damage comes out
        yield block


def _unpack_zstd(raw) -> Iterator[bytes]:
    from zstandard import ZstdDecompressor

    new_frame = ZstdDecompressor(max_window_size=1 << 31).decompressobj
    frame, inside = new_frame(), False
    while data := raw.read(1 << 12):
        while data:
            # In small bites, for a few packed bytes can hold megabytes.
            yield frame.decompress(data[:512])
            inside = not frame.eof
            data = data[512:] if inside else frame.unused_data + data[512:]
            if not inside:
                frame = new_frame()
    if inside:
        raise EOFError("Compressed file ended before the end of a frame")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def pydoc_topics() -> dict[str, str]:
    """Return the topics of Python's reference by name; FileNotFoundError if this Python comes without."""
    try:
        return import_module("pydoc_data.topics").topics
    except ImportError:
        raise FileNotFoundError("this Python comes without its topics (pydoc_data.topics)") from None


def pyarrow():
    """Return the modules (pyarrow, pyarrow.parquet); ValueError telling how to install them."""
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise ValueError("reading parquet needs pyarrow: pip install 'clearhead[data]'") from None
