"""The rows of a file: lines of text, JSON objects, columns, each with its place as file:line.

    .jsonl   an object on each line
    .csv     columns divided by commas, in quotes where a field holds a comma, a quote or a line break
    .tsv     columns divided by tabs; quotes are text
    others   lines

Any of them may be packed as .gz. Reading is strict: what is not UTF-8, not JSON, has another number of
columns than the first line, or lacks a field, is a ValueError that says where, what, and what would be right.
"""

import csv
import glob
import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from clearhead.text.documents import Damaged, TextFile, unpacked

_BOM = b"\xef\xbb\xbf"


def read_rows(
    path: Path, names: Sequence[str], exactly: int | None = None
) -> Iterator[tuple[str, list[Any]]]:
    """Yield the place and the named values of each row of a .csv, .tsv or .jsonl file.

    names: fields, or columns by what the first line calls them; if all are numbers, columns counted from 1
        in a file that has no such line. exactly: how many columns there have to be.
    """
    if kind_of(path) == "jsonl":
        for place, record in read_records(path):
            yield place, [field_of(record, name, place) for name in names]
        return
    if kind_of(path) not in ("csv", "tsv"):
        raise ValueError(
            f"{path} is neither .csv nor .tsv nor .jsonl by its name, as this objective needs it"
        )
    rows = _csv(path) if kind_of(path) == "csv" else _tsv(path)
    (place, first), *others = rows
    if exactly not in (None, len(first)):
        raise ValueError(
            f"{place}: {count_columns(len(first))} where {exactly} are needed; name those to read"
        )
    numbered = all(name.isdecimal() for name in names)
    columns = [_column(first, name, place, numbered) for name in names]
    for place, row in rows if numbered else others:
        if len(row) != len(first):
            raise ValueError(f"{place}: {count_columns(len(row))}, where the first line has {len(first)}")
        yield place, [row[column] for column in columns]


def _column(first: list[str], name: str, place: str, numbered: bool) -> int:
    if numbered:
        if not 1 <= int(name) <= len(first):
            raise ValueError(f"{place}: {count_columns(len(first))}, there is no column {name}")
        return int(name) - 1
    if (times := first.count(name)) != 1:
        there = ", ".join(f"{column!r:.40}" for column in first[:8])
        found = f"{times} columns" if times else "no column"
        raise ValueError(
            f"{place}: {found} {name!r}, the first line has {there}; say which as data.field and "
            "data.label_field (data.target_field of pairs), or by numbers from 1 where no line names columns"
        )
    return first.index(name)


def count_columns(number: int) -> str:
    """Return "1 column", "2 columns"."""
    return "1 column" if number == 1 else f"{number} columns"


def _tsv(path: Path) -> list[tuple[str, list[str]]]:
    lines = enumerate(read_lines(path), 1)
    return [(f"{path}:{number}", line.split("\t")) for number, line in lines if line.strip()]


def _csv(path: Path) -> list[tuple[str, list[str]]]:
    rows: list[tuple[str, list[str]]] = []
    reader = csv.reader(io.StringIO(read_whole(path), newline=""), strict=True)
    limit, line = csv.field_size_limit(sys.maxsize), 0  # the module's own limit is 128 KB
    try:
        for row in reader:
            if row:
                rows.append((f"{path}:{line + 1}", row))
            line = reader.line_num
    except csv.Error as error:
        raise ValueError(
            f"{path}:{line + 1}: {error}; a field with a comma, a quote or a line break stands in quotes, "
            'a quote in it is doubled ("")'
        ) from None
    finally:
        csv.field_size_limit(limit)
    if not rows:
        raise ValueError(f"{path} is empty")
    return rows


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place and the JSON object of each line that is not blank."""
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{place}: not JSON, {error.msg} in column {error.colno}") from None
        except (ValueError, RecursionError) as error:  # a number of too many digits, too deep a nesting
            raise ValueError(f"{place}: not JSON, {' '.join(str(error).split())}") from None
        if not isinstance(record, dict):
            raise ValueError(f"{place}: {what_is(record)}, not a JSON object")
        yield place, record


def field_of(record: dict[str, Any], name: str, place: str) -> Any:
    """Return a field of a record; one that is not there is a ValueError naming those there are."""
    if name not in record:
        there = ", ".join(map(repr, list(record)[:8])) or "none"
        raise ValueError(f"{place}: no field {name!r}; its fields: {there}")
    return record[name]


# ------------------------------------------------------------------------------------------------------ files


def find_files(source: str) -> list[Path]:
    """Return the file `source`, or the files that it names as a glob, sorted."""
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        raise ValueError(f"{source} is a folder; name a file, or several as in {Path(source) / '*.jsonl'}")
    pattern = str(path)
    names = glob.glob(pattern, recursive=True) if glob.has_magic(pattern) else ()  # noqa: PTH207 (a full path)
    files = [one for one in map(Path, sorted(names)) if one.is_file()]
    if not files:
        raise FileNotFoundError(f"no file {source!r} (looked in {Path.cwd()})")
    return files


def kind_of(path: Path) -> str:
    """Return what a file's name says it holds: "jsonl", "csv", "tsv", ..., also when it is packed."""
    name = path.name.lower().removesuffix(".gz")
    kind = name.rpartition(".")[2]
    return "jsonl" if kind == "ndjson" else kind


def read_lines(path: Path) -> list[str]:
    """Return the lines of a text file, without their ends."""
    return [line.removesuffix("\r") for line in read_whole(path).removesuffix("\n").split("\n")]


def read_whole(path: Path) -> str:
    """Return the whole file as text; not UTF-8, broken or empty is a ValueError that says where."""
    try:
        packing = "gzip" if path.suffix.lower() == ".gz" else ""
        data = b"".join(unpacked(TextFile(str(path), "text", packing), 0)).removeprefix(_BOM)
    except Damaged as damage:
        raise ValueError(f"{path}: the file is broken, {damage}") from None
    if data[:2] in (b"\xff\xfe", b"\xfe\xff") and b"\0" in data[:100]:
        raise ValueError(f"{path}:1: UTF-16; save the file as UTF-8")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line, byte = data.count(b"\n", 0, error.start) + 1, data[error.start]
        raise ValueError(
            f"{path}:{line}: byte 0x{byte:02x} at offset {error.start} is no UTF-8; save the file as UTF-8"
        ) from None
    if not text.strip():
        raise ValueError(f"{path} is empty")
    return text


def what_is(value: Any) -> str:
    """Return what a JSON value is, in a few words for a message."""
    kind = {list: "a list", dict: "an object", bool: "true or false", type(None): "null"}.get(type(value))
    return kind or f"{value!r:.40}"
