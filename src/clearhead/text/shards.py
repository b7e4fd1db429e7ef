"""Token ids on disk: a folder of memory-mapped shards with an index.

    shard-00042.bin   64-byte header, then the ids: uint16 for a vocabulary of up to 65,536, else uint32
    shard-00042.idx   one uint64 per document: where it ends, in tokens from the beginning of the shard
    index.json        what the shards hold together, the tokenizer they were made with, a hash of every file

All numbers are little-endian; nothing is ever unpickled. The header repeats what a reader must not get wrong:

    8 magic | 4 version | 4 bytes per id | 8 token count | 32 sha256 of the tokenizer | 8 vocabulary size

A token stays where it is: position i of `Shards.tokens` is the same id for every run, window and batch size.
"""

import hashlib
import json
import os
import socket
import struct
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np

MAGIC = b"CLEARHD\0"
VERSION = 1
HEADER = struct.Struct("<8sIIQ32sQ")
_DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


def id_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest unsigned type that holds every id below `vocab_size`.

    >>> id_dtype(65_536), id_dtype(65_537)
    (dtype('uint16'), dtype('uint32'))
    """
    return _DTYPES[2 if vocab_size <= 1 << 16 else 4]


# ---------------------------------------------------------------- writing


class ShardWriter:
    """Writes one shard, document by document; under its name it exists only whole."""

    def __init__(self, folder: Path, name: str, vocab_size: int, fingerprint: str):
        self.folder, self.name = folder, name
        self.vocab_size, self.fingerprint = vocab_size, fingerprint
        self.dtype = id_dtype(vocab_size)
        self.tokens = self.text_bytes = 0
        self.largest_id = -1
        self._ends = array("Q")
        folder.mkdir(parents=True, exist_ok=True)
        self._temporary = _temporary(folder / f"{name}.bin")
        self._file = self._temporary.open("wb")
        self._file.write(bytes(HEADER.size))

    def add(self, ids: np.ndarray, end_of_text: int | None, text_bytes: int) -> None:
        """Append one document: its ids, the id that ends it (if any), the UTF-8 bytes of its text."""
        largest = max(int(ids.max()) if len(ids) else -1, -1 if end_of_text is None else end_of_text)
        if largest >= self.vocab_size:
            raise ValueError(f"token id {largest} is outside the vocabulary of {self.vocab_size} tokens")
        self.largest_id = max(self.largest_id, largest)
        self._file.write(np.ascontiguousarray(ids, self.dtype).data)
        self.tokens += len(ids)
        if end_of_text is not None:
            self._file.write(end_of_text.to_bytes(self.dtype.itemsize, "little"))
            self.tokens += 1
        self.text_bytes += text_bytes
        self._ends.append(self.tokens)

    def finish(self) -> dict | None:
        """Put the shard in its place and return its entry for the index; None for a shard without a token."""
        if not self.tokens:
            self.discard()
            return None
        self._file.seek(0)
        fingerprint = bytes.fromhex(self.fingerprint)
        size = self.dtype.itemsize
        self._file.write(HEADER.pack(MAGIC, VERSION, size, self.tokens, fingerprint, self.vocab_size))
        _to_disk(self._file)
        self._file.close()
        ends = _temporary(self.folder / f"{self.name}.idx")
        with ends.open("wb") as file:
            file.write(np.asarray(self._ends, "<u8").data)
            _to_disk(file)
        entry = {
            "file": f"{self.name}.bin",
            "tokens": self.tokens,
            "documents": len(self._ends),
            "text_bytes": self.text_bytes,
            "largest_id": self.largest_id,
            "sha256": file_hash(self._temporary),
            "ends_sha256": file_hash(ends),
        }
        ends.replace(self.folder / f"{self.name}.idx")
        self._temporary.replace(self.folder / f"{self.name}.bin")
        return entry

    def discard(self) -> None:
        """Give up what is not finished."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def write_json(path: Path, content: dict, to_disk: bool = True) -> None:
    """Write `content` to `path`, whole or not at all; with `to_disk` not even a power cut undoes it."""
    temporary = _temporary(path)
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        if to_disk:
            _to_disk(file)
    temporary.replace(path)
    if to_disk:
        _folder_to_disk(path.parent)


def write_index(
    folder: Path, entries: Sequence[dict], vocab_size: int, fingerprint: str, end_of_text
) -> dict:
    """Write the index.json that makes `folder` readable by `Shards`, and return its totals."""
    totals = {name: sum(entry[name] for entry in entries) for name in ("tokens", "documents", "text_bytes")}
    index = {
        "format": "clearhead shards",
        "version": VERSION,
        "tokenizer": fingerprint,
        "vocab_size": vocab_size,
        "dtype": id_dtype(vocab_size).name,
        "end_of_text": end_of_text,
        **totals,
        "shards": list(entries),
    }
    write_json(folder / "index.json", index)
    return totals


def file_hash(path: Path) -> str:
    """Return the sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _temporary(path: Path) -> Path:
    """A name next to `path` that no other process writes to and that a later run knows as a left-over."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp")


def remove_temporary(folder: Path) -> None:
    """Delete the files that a killed run left half written in `folder`."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def _to_disk(file) -> None:
    file.flush()
    os.fsync(file.fileno())


def _folder_to_disk(folder: Path) -> None:
    """A rename is safe from a power cut only once its folder is on the disk; Windows has no such call."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# ---------------------------------------------------------------- reading


class Tokens:
    """The ids of several arrays as one long array: `len`, an index, slices; read only.

    A slice inside one shard is a view of the mapped file, one across shards is a copy.
    """

    ndim = 1

    def __init__(self, arrays: Sequence[np.ndarray]):
        self._arrays = [np.asarray(part) for part in arrays]  # plain views: a memmap slices slowly
        self._starts = [0]
        for part in self._arrays:
            self._starts.append(self._starts[-1] + len(part))
        self.dtype = self._arrays[0].dtype

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def shape(self) -> tuple[int]:
        return (len(self),)

    def __getitem__(self, index):
        if isinstance(index, slice):
            start, stop, step = index.indices(len(self))
            return self._between(start, max(start, stop)) if step == 1 else np.asarray(self)[index]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"index {index} is outside {len(self)} tokens")
        shard = bisect_right(self._starts, position) - 1
        return self._arrays[shard][position - self._starts[shard]]

    def _between(self, start: int, stop: int) -> np.ndarray:
        first = min(bisect_right(self._starts, start) - 1, len(self._arrays) - 1)
        parts = []
        for part, begin in zip(self._arrays[first:], self._starts[first:], strict=False):
            if begin >= stop and parts:
                break
            parts.append(part[max(0, start - begin) : max(0, stop - begin)])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.concatenate(self._arrays).astype(dtype or self.dtype)


class Shards:
    """One split of a prepared corpus, memory-mapped: `Shards("data/train").tokens[1000:1256]`.

    Opening it checks every file against its header and the index: kind, version, size, tokenizer, vocabulary,
    largest id. `verify=True` reads everything and checks the hashes too. `tokenizer_fingerprint`, when given,
    must be that of the shards. What does not fit is a ValueError naming the file; what is missing, a
    FileNotFoundError.
    """

    def __init__(
        self, folder: str | os.PathLike[str], tokenizer_fingerprint: str | None = None, verify: bool = False
    ):
        self.folder = Path(folder)
        index = _Index(self.folder)
        self.tokenizer_fingerprint = index.text("tokenizer")
        self.vocab_size = index.number("vocab_size")
        self.text_bytes = index.number("text_bytes")
        has_end = index.content.get("end_of_text") is not None
        self.end_of_text = index.number("end_of_text") if has_end else None
        if tokenizer_fingerprint not in (None, self.tokenizer_fingerprint):
            made, given = self.tokenizer_fingerprint[:12], str(tokenizer_fingerprint)[:12]
            raise _wrong(f"{self.folder} was made with tokenizer {made}…, not with {given}…")
        self.files: list[Path] = []
        arrays: list[np.ndarray] = []
        self._ends: list[np.ndarray] = []
        for entry in index.entries():
            ids, ends = self._open(entry, verify)
            self.files.append(self.folder / entry.text("file"))
            arrays.append(ids)
            self._ends.append(ends)
        self._set(arrays)
        said = index.number("tokens"), index.number("documents")
        if said != (self.n_tokens, self.n_documents):
            holds = f"the shards hold {self.n_tokens} tokens in {self.n_documents} documents"
            raise _wrong(f"{index.path}: {holds}, the index says {said[0]} in {said[1]}")

    def _set(self, arrays: list[np.ndarray]) -> None:
        """Take the ids of all files, whose documents end at `self._ends`, as one."""
        self.tokens = Tokens(arrays)
        self._starts = np.cumsum([0, *map(len, arrays)])
        self._first_document = np.cumsum([0, *map(len, self._ends)])
        self.n_tokens, self.n_documents = len(self.tokens), int(self._first_document[-1])

    @property
    def fingerprint(self) -> str:
        """Names the very bytes of the tokens: their hashes stand in the index."""
        return hashlib.sha256((self.folder / "index.json").read_bytes()).hexdigest()

    @property
    def document_ends(self) -> np.ndarray:
        """Where each document ends, as positions in `tokens`; uint64, read into memory."""
        parts = [ends + start for ends, start in zip(self._ends, self._starts.astype("<u8"), strict=False)]
        return np.concatenate(parts)

    def documents_between(self, start: int, stop: int) -> np.ndarray:
        """Return the number of the document (from 0) that each token in [start, stop) belongs to."""
        found = []
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop and shard < len(self._ends):
            begin, ends = int(self._starts[shard]), self._ends[shard]
            here = np.arange(start - begin, min(stop, int(self._starts[shard + 1])) - begin, dtype="<u8")
            found.append(self._first_document[shard] + np.searchsorted(ends, here, side="right"))
            start += len(here)
            shard += 1
        return np.concatenate(found) if found else np.empty(0, np.int64)

    def _open(self, entry: "_Index", verify: bool) -> tuple[np.ndarray, np.ndarray]:
        name, n_tokens, n_documents = entry.text("file"), entry.number("tokens"), entry.number("documents")
        path = self.folder / name
        if path.name != name or path.suffix != ".bin":
            raise _wrong(f"{entry.path}: {name!r} is no name of a shard")
        ends_path = path.with_suffix(".idx")
        _check_shard(path, n_tokens, self.tokenizer_fingerprint, self.vocab_size)
        if (largest := entry.number("largest_id")) >= self.vocab_size:
            raise _wrong(f"{path} holds token id {largest}, its vocabulary has {self.vocab_size} tokens")
        if not n_documents or not ends_path.is_file() or ends_path.stat().st_size != 8 * n_documents:
            raise _wrong(f"{ends_path} does not hold the ends of {n_documents} documents")
        ids = np.memmap(path, id_dtype(self.vocab_size), "r", offset=HEADER.size, shape=(n_tokens,))
        ends = np.asarray(np.memmap(ends_path, np.dtype("<u8"), "r", shape=(n_documents,)))
        if int(ends[-1]) != n_tokens:
            raise _wrong(f"{ends_path}: the last document ends at {ends[-1]}, not at {n_tokens}")
        if verify:
            for file, hash_name in ((path, "sha256"), (ends_path, "ends_sha256")):
                if file_hash(file) != entry.text(hash_name):
                    raise _wrong(f"{file} has changed since it was written (its sha256 differs)")
        return ids, ends


def _wrong(message: str) -> ValueError:
    return ValueError(f"{message}; prepare the corpus again")


def _check_shard(path: Path, n_tokens: int, fingerprint: str, vocab_size: int) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; prepare the corpus again")
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or not header.startswith(MAGIC):
        raise _wrong(f"{path} is no shard of token ids (it does not begin with {MAGIC!r})")
    _, version, id_bytes, count, tokenizer, size = HEADER.unpack(header)
    if version != VERSION:
        raise _wrong(f"{path} has format version {version}, this clearhead reads {VERSION}")
    expected = id_dtype(vocab_size).itemsize
    if (id_bytes, size) != (expected, vocab_size):
        says = f"its index says {expected} for {vocab_size}"
        raise _wrong(f"{path} has {id_bytes} bytes per id for a vocabulary of {size}, {says}")
    if tokenizer.hex() != fingerprint:
        says = f"its index says {fingerprint[:12]}…"
        raise _wrong(f"{path} was made with tokenizer {tokenizer.hex()[:12]}…, {says}")
    whole, there = HEADER.size + n_tokens * id_bytes, path.stat().st_size
    if count != n_tokens or there != whole:
        needs = f"{n_tokens} tokens are {whole} bytes"
        raise _wrong(f"{path} has {there} bytes and says {count} tokens, {needs}")


class _Index:
    """index.json, or one entry of it, asked for fields that must be there."""

    def __init__(self, folder: Path, content: dict | None = None):
        self.path = folder / "index.json"
        self.content = self._read(folder) if content is None else content

    def _read(self, folder: Path) -> dict:
        if (folder / "train" / "index.json").is_file():
            raise ValueError(f"{folder} holds two splits; open {folder / 'train'} or {folder / 'validation'}")
        if not self.path.is_file():
            raise FileNotFoundError(
                f"{folder} holds no prepared text (no index.json); run `clearhead prepare`"
            )
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError):
            raise _wrong(f"{self.path} is no JSON") from None
        if not isinstance(content, dict) or content.get("format") != "clearhead shards":
            raise _wrong(f"{self.path} is no index of token shards")
        if (version := content.get("version")) != VERSION:
            raise _wrong(f"{self.path} has format version {version!r}, this clearhead reads {VERSION}")
        return content

    def number(self, name: str) -> int:
        value = self.content.get(name)
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise _wrong(f"{self.path}: {name!r} is {value!r}, not a count")
        return value

    def text(self, name: str) -> str:
        value = self.content.get(name)
        if not isinstance(value, str) or not value:
            raise _wrong(f"{self.path}: {name!r} is {value!r}, not a text")
        return value

    def entries(self) -> list["_Index"]:
        entries = self.content.get("shards")
        if not isinstance(entries, list) or not entries or not all(isinstance(e, dict) for e in entries):
            raise _wrong(f"{self.path} lists no shards")
        return [_Index(self.path.parent, entry) for entry in entries]
