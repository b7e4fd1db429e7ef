"""The bytes behind the pieces of published vocabularies, so that ids become text in one way for all.

A vocabulary spells its tokens as text; a file's decoder says how to read the spelling:

    ByteLevel     every character is a byte: Ġthe                 (GPT-2, RoBERTa)
    WordPiece     ##ing continues a word, anything else begins one (BERT)
    Metaspace     ▁ is a space                                     (T5, Marian)
    ▁, <0x0A>     ▁ is a space, other bytes by number              (Llama 2, Gemma)

Each is a pair of functions from spelling to bytes: for a piece that follows others, and for the first piece
of a text, which may lose the space before it. Joined, the bytes are read as UTF-8. The texts are those of
Hugging Face's decoders, except that valid characters survive beside broken ones.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from clearhead.text.definition import expect, unspell

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # ▁, how SentencePiece spells a space

# What WordPiece's clean-up joins to the word before it.
_JOINED = [" .", " ?", " !", " ,", " ' ", " n't", " 'm", " do not", " 's", " 've", " 're"]
_INSTEAD = {" ' ": "'", " do not": " don't"}


class Reading(NamedTuple):
    """How the pieces of a vocabulary are read: `next` after others, `first` at the beginning of a text."""

    next: Callable[[str], bytes]
    first: Callable[[str], bytes]


def read_decoder(stage: Any) -> Reading:
    """The reading that a tokenizer.json's decoder asks for; ValueError names one that is not known."""
    steps = _flat(stage)
    kinds = [step.get("type") for step in steps]
    if not steps:
        return Reading(lambda piece: b" " + piece.encode(), str.encode)
    if kinds == ["ByteLevel"]:
        return Reading(_byte_level, _byte_level)
    if kinds == ["WordPiece"]:
        return _word_piece(steps[0])
    if kinds == ["Metaspace"]:
        return _metaspace(steps[0])
    if all(kind in ("Replace", "ByteFallback", "Fuse", "Strip") for kind in kinds):
        return _step_by_step(steps)
    known = "ByteLevel, WordPiece, Metaspace, or Replace, ByteFallback, Fuse and Strip"
    raise ValueError(f"decoder {', '.join(map(str, kinds))} is not supported; what is: {known}")


def _flat(stage: Any) -> list[dict[str, Any]]:
    """The steps of a decoder: none, one, or those of a (nested) Sequence."""
    if stage is None:
        return []
    stage = expect(stage, dict, "decoder")
    if stage.get("type") != "Sequence":
        return [stage]
    return [step for part in expect(stage.get("decoders"), list, "decoder.decoders") for step in _flat(part)]


def _byte_level(piece: str) -> bytes:
    try:
        return unspell(piece)
    except ValueError:  # an added token is not spelled
        return piece.encode()


def _word_piece(step: dict[str, Any]) -> Reading:
    prefix = expect(step.get("prefix", "##"), str, "decoder.prefix")
    clean = _clean if step.get("cleanup", True) else str

    def following(piece: str) -> bytes:
        return clean(piece.replace(prefix, "", 1) if piece.startswith(prefix) else f" {piece}").encode()

    return Reading(following, lambda piece: clean(piece).encode())


def _clean(text: str) -> str:
    for joined in _JOINED:
        text = text.replace(joined, _INSTEAD.get(joined, joined[1:]))
    return text


def _metaspace(step: dict[str, Any]) -> Reading:
    space = expect(step.get("replacement", SPACE), str, "decoder.replacement")
    scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
    gone = "" if scheme != "never" else " "
    return Reading(
        lambda piece: piece.replace(space, " ").encode(),
        lambda piece: piece.replace(space, gone).encode(),
    )


def _step_by_step(steps: list[dict[str, Any]]) -> Reading:
    replaced: list[tuple[str, str]] = []
    by_number, stripped = False, 0
    for step in steps:
        kind = step["type"]
        if kind == "Replace":
            pattern = expect(step.get("pattern"), dict, "decoder.pattern").get("String")
            if not isinstance(pattern, str) or not pattern:
                raise ValueError("decoder Replace is supported with a plain string only")
            replaced.append((pattern, expect(step.get("content"), str, "decoder.content")))
        elif kind == "ByteFallback":
            by_number = True
        elif kind == "Strip":
            if step.get("content") != " " or step.get("stop", 0) != 0:
                raise ValueError("decoder Strip is supported for spaces at the beginning only")
            stripped = expect(step.get("start"), int, "decoder.start")

    def following(piece: str) -> bytes:
        if by_number and (found := re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)):
            return bytes([int(found[1], 16)])
        for pattern, content in replaced:
            piece = piece.replace(pattern, content)
        return piece.encode()

    def first(piece: str) -> bytes:
        text = following(piece)
        return text[min(stripped, len(text) - len(text.lstrip(b" "))) :]

    return Reading(following, first)
