"""SentencePiece vocabularies: pieces with scores, as .model files and GGUF hold them, made a tokenizer.json.

    Unigram   a text is cut so that the product of the pieces' probabilities is greatest; score = log p
    BPE       of all neighbours the pair is merged whose joined piece has the greatest score

A space is spelled ▁. BPE pieces may name a byte (<0x0A>), for characters outside the vocabulary. The
tokenizer.json that comes out is what Hugging Face publishes for the same model.

Source: Kudo 2018 (arXiv:1804.10959), Kudo and Richardson 2018 (arXiv:1808.06226).
"""

import base64
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from clearhead.text.pieces import SPACE

Json = dict[str, Any]

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
"""Kinds of pieces, as the files number them."""


@dataclass(frozen=True)
class PieceTable:
    """A SentencePiece vocabulary: the i-th piece has the id i."""

    pieces: list[str]
    scores: list[float]
    kinds: list[int]
    model: Literal["unigram", "bpe"] = "unigram"
    add_space: bool = True  # a space is put before a text
    one_space: bool = False  # several spaces become one, and those at the ends go
    charsmap: bytes = b""  # the compiled table of characters that are replaced before all else

    def __post_init__(self) -> None:
        if not len(self.pieces) == len(self.scores) == len(self.kinds):
            raise ValueError(
                f"{len(self.pieces)} pieces, {len(self.scores)} scores and {len(self.kinds)} kinds: "
                "each piece has one of each"
            )
        if not self.pieces:
            raise ValueError("the vocabulary is empty")
        for piece, score in zip(self.pieces, self.scores, strict=True):
            if not isinstance(score, int | float) or not math.isfinite(score):
                raise ValueError(f"the piece {piece!r:.60} has the score {score!r:.60}, no number")
        if len(set(self.pieces)) < len(self.pieces):
            twice = next(piece for number, piece in enumerate(self.pieces) if piece in self.pieces[:number])
            raise ValueError(f"the piece {twice!r:.60} stands twice in the vocabulary")

    def numbers(self, *kinds: int) -> list[int]:
        """The ids of these kinds of pieces."""
        return [number for number, kind in enumerate(self.kinds) if kind in kinds]


def read_model(data: bytes) -> PieceTable:
    """The vocabulary in a SentencePiece .model file, which is a protocol buffer; ValueError if it is none."""
    pieces, scores, kinds = [], [], []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(_bytes(value)))
            pieces.append(_bytes(piece.get(1, b"")).decode("utf-8"))
            scores.append(_float(piece.get(2, b"\0\0\0\0")))
            kinds.append(piece.get(3, NORMAL))
        elif number == 2:
            trainer = dict(_fields(_bytes(value)))
        elif number == 3:
            normalizer = dict(_fields(_bytes(value)))
    model = trainer.get(3, 1)
    if model not in (1, 2):
        raise ValueError(f"model_type {model} is not supported; what is: 1 (Unigram), 2 (BPE)")
    return PieceTable(
        pieces,
        scores,
        kinds,
        "unigram" if model == 1 else "bpe",
        add_space=bool(normalizer.get(3, 1)),
        one_space=bool(normalizer.get(4, 1)),
        charsmap=_bytes(normalizer.get(2, b"")),
    )


def tokenizer_json(table: PieceTable, begin: list[str] | None = None, end: list[str] | None = None) -> Json:
    """The tokenizer.json of a vocabulary; `begin` and `end` go around a sentence."""
    unknown = table.numbers(UNKNOWN)
    if len(unknown) > 1 or (table.model == "unigram" and not unknown):
        raise ValueError(f"the vocabulary has {len(unknown)} unknown pieces; it takes one")
    ids = {piece: number for number, piece in enumerate(table.pieces)}
    missing = [text for text in [*(begin or []), *(end or [])] if text not in ids]
    if missing:
        raise ValueError(f"the vocabulary lacks {missing[0]!r:.60}, which goes around a sentence")
    around = template(begin or [], end or [], ids) if begin or end else None
    specials = table.numbers(CONTROL, USER, UNKNOWN)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            added_token(table.pieces[number], number, special=table.kinds[number] != USER)
            for number in specials
        ],
        "post_processor": around,
        **(_unigram(table, unknown[0]) if table.model == "unigram" else _bpe(table, ids, unknown)),
    }


def added_token(text: str, number: int, special: bool = True) -> Json:
    """An entry of `added_tokens`: matched as it is, before anything else."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": special}


def template(begin: list[str], end: list[str], ids: dict[str, int]) -> Json:
    """A post-processor that puts special tokens around a sentence."""

    def special(text: str, type_id: int) -> Json:
        return {"SpecialToken": {"id": text, "type_id": type_id}}

    def sentence(name: str, type_id: int, first: bool) -> list[Json]:
        before = [special(text, type_id) for text in begin] if first else []
        middle = {"Sequence": {"id": name, "type_id": type_id}}
        return [*before, middle, *(special(text, type_id) for text in end)]

    return {
        "type": "TemplateProcessing",
        "single": sentence("A", 0, True),
        "pair": sentence("A", 0, True) + sentence("B", 1, False),
        "special_tokens": {
            text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in dict.fromkeys([*begin, *end])
        },
    }


def _normalizers(table: PieceTable) -> list[Json]:
    """What happens to a text before its spaces are spelled."""
    steps: list[Json] = []
    if table.charsmap:
        charsmap = base64.b64encode(table.charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    if table.one_space:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    return steps


def _unigram(table: PieceTable, unknown: int) -> Json:
    steps = _normalizers(table)
    scheme = "always" if table.add_space else "never"
    spaces = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": True}
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": spaces,
        "decoder": spaces,
        "model": {
            "type": "Unigram",
            "unk_id": unknown,
            "vocab": [list(entry) for entry in zip(table.pieces, table.scores, strict=True)],
            "byte_fallback": bool(table.numbers(BYTE)),
        },
    }


def _bpe(table: PieceTable, ids: dict[str, int], unknown: list[int]) -> Json:
    spelled = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    before = [*_normalizers(table), *([{"type": "Prepend", "prepend": SPACE}] if table.add_space else [])]
    after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if table.add_space else []
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*before, spelled]},
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *after,
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": table.pieces[unknown[0]] if unknown else None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": bool(table.numbers(BYTE)),
            "ignore_merges": False,
            "vocab": ids,
            "merges": merges_from_scores(table),
        },
    }


def merges_from_scores(table: PieceTable) -> list[list[str]]:
    """Every way to make a piece of two, the piece of the greatest score first.

    >>> table = PieceTable(["a", "b", "ab", "aba"], [-3.0, -3.0, -1.0, -2.0], [1, 1, 1, 1], "bpe")
    >>> merges_from_scores(table)
    [['a', 'b'], ['ab', 'a']]
    """
    mergeable = {table.pieces[number]: number for number in table.numbers(NORMAL, USER, UNUSED)}
    found = []
    for piece, number in mergeable.items():
        for cut in range(1, len(piece)):
            left, right = mergeable.get(piece[:cut]), mergeable.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-table.scores[number], number, left, right))
    return [[table.pieces[left], table.pieces[right]] for _, _, left, right in sorted(found)]


# ------------------------------------------------------------------------------------------- protocol buffers


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and value of each field: an int, or the bytes of a float, a text or a message."""
    place = 0
    while place < len(data):
        key, place = _varint(data, place)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, place = _varint(data, place)
            yield number, value
            continue
        if wire == 2:
            length, place = _varint(data, place)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"no SentencePiece model: wire type {wire} at byte {place}")
        if length > len(data) - place:
            raise ValueError(f"no complete SentencePiece model: it ends inside field {number}")
        yield number, data[place : place + length]
        place += length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if place >= len(data):
            raise ValueError("no complete SentencePiece model: it ends inside a number")
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError(f"no SentencePiece model: a number without end at byte {place}")


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("no SentencePiece model: a number where a text belongs")
    return value


def _float(value: Any) -> float:
    if not isinstance(value, bytes) or len(value) != 4:
        raise ValueError("no SentencePiece model: a score that is no float")
    return struct.unpack("<f", value)[0]
