"""Token ids that other programs wrote, read where they lie: nanoGPT, llm.c, Megatron-LM, datatrove.

    nanoGPT       NAME.bin                  ids alone: 2 bytes each, 4 for a vocabulary above 65,536
    llm.c         NAME.bin                  before them 256 int32: a magic number, a version, their count
    Megatron-LM   NAME.bin, NAME.idx        the index (MMIDIDX): type, lengths, ends of documents
    datatrove     NAME.ds, NAME.ds.index    where each document ends, as uint64

These files name no tokenizer, and most of them no type, so both are checked by what can be checked: each is
read once in full, an id outside the vocabulary is a ValueError before anything is learned, and ids of 4 bytes
where 2 are expected show by their zeros. Where documents end, if it is not stored, the end-of-text id tells.

Sources: github.com/karpathy/nanoGPT (data/*/prepare.py), karpathy/llm.c (dev/data/data_common.py),
NVIDIA/Megatron-LM (core/datasets/indexed_dataset.py), huggingface/datatrove (pipeline/tokens/tokenizer.py).
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clearhead.text.foreign import AnyTokenizer
from clearhead.text.frame import end_of_text
from clearhead.text.rows import find_files
from clearhead.text.shards import MAGIC, Shards, id_dtype

SUFFIXES = (".bin", ".ds")
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}  # (magic, version) -> type
_MEGATRON = b"MMIDIDX\0\0"
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_CHUNK = 1 << 24  # ids that are looked at at once


def is_token_file(source: str) -> bool:
    """Whether a source is a file of ids, or a glob of several, by its name."""
    return Path(source).suffix.lower() in SUFFIXES


@dataclass(frozen=True)
class _Ids:
    """The ids of one file, mapped, and where its documents end, if that is stored."""

    path: Path
    ids: np.ndarray
    ends: np.ndarray | None


class TokenFiles(Shards):
    """Tokens [start, stop) of files of ids as one split, with all that `Shards` has; see `open_token_files`.

    count_bytes: find `text_bytes` from the tokens, which takes a while; else it is 0.
    """

    def __init__(
        self,
        files: Sequence[_Ids],
        tokenizer: AnyTokenizer,
        start: int = 0,
        stop: int | None = None,
        count_bytes: bool = False,
    ):
        self.folder = files[0].path
        self.files = [file.path for file in files]
        self.tokenizer_fingerprint = tokenizer.fingerprint
        self.vocab_size = tokenizer.vocab_size
        self.end_of_text = end_of_text(tokenizer)
        bytes_of = _bytes_of(tokenizer) if count_bytes else None
        digest = hashlib.sha256()
        arrays: list[np.ndarray] = []
        self._ends: list[np.ndarray] = []
        self.text_bytes = position = 0
        for file in files:
            first, last = _overlap(position, len(file.ids), start, stop)
            position += len(file.ids)
            if first < last:
                ids = file.ids[first:last]
                found, n_bytes = self._scan(file, ids, first, digest, bytes_of)
                arrays.append(ids)
                self._ends.append(_inside(found if file.ends is None else file.ends - first, len(ids)))
                self.text_bytes += n_bytes
        self._fingerprint = digest.hexdigest()
        self._set(arrays)

    @property
    def fingerprint(self) -> str:
        """Names the very ids: a hash of all of them."""
        return self._fingerprint

    def _scan(
        self, file: _Ids, ids: np.ndarray, first: int, digest, bytes_of: np.ndarray | None
    ) -> tuple[np.ndarray, int]:
        """Check and hash the ids; return where the end of text stands behind a document, and their bytes."""
        ends: list[np.ndarray] = []
        n_bytes = 0
        for begin in range(0, len(ids), _CHUNK):
            chunk = ids[begin : begin + _CHUNK]
            wrong = (chunk < 0) | (chunk >= self.vocab_size)
            if wrong.any():
                at = int(np.argmax(wrong))
                raise ValueError(
                    f"{file.path} holds id {chunk[at]} at {first + begin + at:,}; the tokenizer's are 0 to "
                    f"{self.vocab_size - 1}: it was made with another one, or with ids of another size"
                )
            digest.update(np.ascontiguousarray(chunk, "<u4").data)
            if file.ends is None and self.end_of_text is not None:
                ends.append(np.flatnonzero(chunk == self.end_of_text) + begin + 1)
            if bytes_of is not None:
                n_bytes += int(bytes_of[chunk].sum())
        return np.concatenate(ends) if ends else np.empty(0, np.int64), n_bytes


def open_token_files(
    source: str, tokenizer: AnyTokenizer, validation: str | None = None
) -> tuple[TokenFiles, TokenFiles]:
    """Return what to learn from and what to measure on: files of ids, given by a name or a glob each.

    Without `validation` the last twentieth of the tokens is kept for it, from the end of a document on if
    one ends in the twentieth before. Every file is read and checked: an id outside the vocabulary, a size
    that does not fit, an index that describes something else are a ValueError naming file and place.
    """
    files = [_open(path, tokenizer.vocab_size) for path in find_files(source)]
    if validation is not None:
        held = [_open(path, tokenizer.vocab_size) for path in find_files(validation)]
        return TokenFiles(files, tokenizer), TokenFiles(held, tokenizer, count_bytes=True)
    cut = _place_to_cut(files, end_of_text(tokenizer))
    if cut == 0:
        n = sum(len(file.ids) for file in files)
        raise ValueError(f"{source} holds {n} tokens, too few to keep some for validation")
    return TokenFiles(files, tokenizer, stop=cut), TokenFiles(files, tokenizer, start=cut, count_bytes=True)


def _place_to_cut(files: Sequence[_Ids], end: int | None) -> int:
    """The last end of a document in the 19th twentieth of all tokens; where none is, the end of that."""
    n = sum(len(file.ids) for file in files)
    cut, least, position = n * 95 // 100, n * 90 // 100, 0
    best = cut
    for file in files:
        first, last = _overlap(position, len(file.ids), least, cut)
        if first < last:
            ends = file.ends
            if ends is None:
                ends = np.flatnonzero(file.ids[first:last] == end) + first + 1
            inside = ends[(ends > first) & (ends <= last)]
            best = position + int(inside[-1]) if len(inside) else best
        position += len(file.ids)
    return best


# ------------------------------------------------------------------------------------------------ one file


def _open(path: Path, vocab_size: int) -> _Ids:
    with path.open("rb") as file:
        head = file.read(1024)
    if head.startswith(MAGIC):
        raise ValueError(f"{path} is one shard of a prepared folder; give the folder")
    index = path.with_suffix(".idx")
    if path.suffix == ".bin" and index.is_file():
        return _open_megatron(path, index)
    if len(head) == 1024 and (kind := struct.unpack("<ii", head[:8])) in _LLM_C:
        ids = _map(path, _LLM_C[kind], 1024)
        count = struct.unpack("<i", head[8:12])[0]
        if count % (1 << 32) != len(ids) % (1 << 32):
            raise ValueError(f"{path} says that it holds {count:,} ids, it holds {len(ids):,}; copy it again")
        return _Ids(path, ids, None)
    ends = None
    kind = id_dtype(vocab_size).str
    index = path.with_name(path.name + ".index")
    if index.is_file():
        ends = _map(index, "<u8").astype(np.int64)
        size = path.stat().st_size
        fits = [width for width in (2, 4) if size == width * int(ends[-1])]
        if not fits:
            raise ValueError(f"{index} says that {ends[-1]:,} ids end there, {path} has {size:,} bytes")
        kind = f"<u{fits[0]}"
    ids = _map(path, kind)
    if kind == "<u2" and len(ids) > 16 and len(ids) % 2 == 0 and not ids[1:4096:2].any():
        raise ValueError(f"{path} has ids of 4 bytes (every second 2 are zero); write them as uint16")
    return _Ids(path, ids, ends)


def _open_megatron(path: Path, index: Path) -> _Ids:
    """Ids and ends by Megatron's index: type, lengths of sequences, offsets, first sequence of documents."""
    data = index.read_bytes()
    if data[:9] != _MEGATRON or len(data) < 34:
        raise ValueError(f"{index} is no index of Megatron-LM (it does not begin with MMIDIDX)")
    version, kind, n_sequences, n_documents = struct.unpack("<QBQQ", data[9:34])
    if version != 1 or kind not in _MEGATRON_TYPES:
        raise ValueError(
            f"{index} has version {version} and type {kind}; known: version 1, types of integers"
        )
    if len(data) < 34 + 12 * n_sequences + 8 * n_documents:
        raise ValueError(f"{index} is cut off: {len(data):,} bytes for {n_sequences:,} sequences")
    lengths = np.frombuffer(data, "<i4", n_sequences, 34).astype(np.int64)
    offsets = np.frombuffer(data, "<i8", n_sequences, 34 + 4 * n_sequences)
    firsts = np.frombuffer(data, "<i8", n_documents, 34 + 12 * n_sequences)
    ids = _map(path, _MEGATRON_TYPES[kind])
    ends = np.cumsum(lengths)
    if len(ends) == 0 or int(ends[-1]) != len(ids) or ((ends - lengths) * ids.itemsize != offsets).any():
        raise ValueError(
            f"{index} does not describe {path}: its sequences do not follow each other to the end"
        )
    if len(firsts) == 0 or firsts.min() < 0 or firsts.max() > n_sequences:
        raise ValueError(f"{index} names documents among {n_sequences:,} sequences that are not there")
    last = firsts[firsts > 0] - 1
    return _Ids(path, ids, ends[last])


def _map(path: Path, kind: str, offset: int = 0) -> np.ndarray:
    size, width = path.stat().st_size - offset, np.dtype(kind).itemsize
    if size <= 0 or size % width:
        raise ValueError(f"{path} has {size:,} bytes of ids; that is no number of ids of {width} bytes")
    return np.memmap(path, kind, "r", offset=offset, shape=(size // width,))


def _overlap(position: int, length: int, start: int, stop: int | None) -> tuple[int, int]:
    """Which of a file's `length` ids, the first being number `position` of all, are in [start, stop)."""
    last = length if stop is None else min(length, stop - position)
    return max(0, start - position), max(0, last)


def _inside(ends: np.ndarray, length: int) -> np.ndarray:
    """Ends of documents that lie in (0, length), and `length` itself: the file ends what it holds."""
    inside = ends[(ends > 0) & (ends < length)]
    return np.append(inside, length).astype("<u8")


def _bytes_of(tokenizer: AnyTokenizer) -> np.ndarray:
    """The bytes of text that each id stands for; none for a special token."""
    special = set(tokenizer.special_tokens.values())
    lengths = np.zeros(tokenizer.vocab_size, np.int64)
    for token in range(tokenizer.vocab_size):
        if token not in special:
            try:
                lengths[token] = len(tokenizer.token_bytes(token))
            except ValueError:  # an id that no token has
                continue
    return lengths
