"""What a tokenizer is made of, as inert data, and how published files spell it.

GPT-2's and Hugging Face's files spell each byte as one visible character: the printable bytes of Latin-1
stand for themselves, the 68 others for the characters from U+0100 on in order, so that a space is ``Ġ``.

Source: Radford et al. 2019 (GPT-2), ``bytes_to_unicode``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from clearhead.text.pretokenize import mend_surrogates

Alphabet = Literal["bytes", "characters"]

MAX_ID = 2**32 - 1
"""The greatest token id: ids are kept in 32 bits at most."""


@dataclass(frozen=True)
class Definition:
    """The fields of a tokenizer; `Tokenizer` explains them."""

    vocab: Mapping[int, bytes]
    merges: Sequence[tuple[bytes, bytes]]
    special_tokens: Mapping[str, int]
    splitter: str = "gpt2"
    alphabet: Alphabet | None = None
    ignore_merges: bool = False
    normalise: tuple[str, ...] = ()
    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()


def _visible(byte: int) -> bool:
    return 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF


_HIDDEN = [byte for byte in range(256) if not _visible(byte)]
_CHARACTER = {byte: chr(byte) if _visible(byte) else chr(256 + _HIDDEN.index(byte)) for byte in range(256)}
_BYTE = {character: byte for byte, character in _CHARACTER.items()}


def spell(token: bytes) -> str:
    """Spell bytes as published files do.

    >>> spell(b" the"), spell("é".encode())
    ('Ġthe', 'Ã©')
    """
    return "".join(map(_CHARACTER.__getitem__, token))


def unspell(text: str) -> bytes:
    """Read bytes as published files spell them; any other character is a ValueError naming it."""
    try:
        return bytes(map(_BYTE.__getitem__, text))
    except KeyError as error:
        raise ValueError(f"token {text!r:.60} holds {error.args[0]!r}, which stands for no byte") from None


Kind = TypeVar("Kind")


def expect(value: Any, kind: type[Kind], what: str) -> Kind:
    """Return `value` if it is of that type; otherwise raise ValueError saying what should be."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{what} should be of type {kind.__name__}, found {value!r:.60}")
    return value


def expect_id(value: Any, what: str) -> int:
    """Return `value` if it can be a token id; otherwise raise ValueError."""
    if not 0 <= expect(value, int, what) <= MAX_ID:
        raise ValueError(f"{what} should be from 0 to {MAX_ID}, found {value}")
    return value


def check_vocab(vocab: Mapping[int, bytes]) -> dict[int, bytes]:
    """Return a copy of `vocab`; anything but ids mapped to bytes is a ValueError."""
    if not vocab:
        raise ValueError("the vocabulary is empty")
    for token_id, token in vocab.items():
        expect(token, bytes, f"the token of id {expect_id(token_id, 'a key of the vocabulary')}")
    return dict(vocab)


def check_alphabet(alphabet: str | None, vocab: Mapping[int, bytes]) -> Alphabet:
    """Return the alphabet; None becomes "bytes" if the vocabulary has all 256 of them, else "characters"."""
    if alphabet is None:
        alphabet = (
            "bytes" if len({token for token in vocab.values() if len(token) == 1}) == 256 else "characters"
        )
    if alphabet not in ("bytes", "characters"):
        raise ValueError(f"unknown alphabet {alphabet!r}; known: bytes, characters")
    return "bytes" if alphabet == "bytes" else "characters"


def with_ids(special_tokens: Iterable[str] | Mapping[str, int], vocab: Mapping[int, bytes]) -> dict[str, int]:
    """Give each special token its id: the one named, else the last one with its text, else the next free.

    >>> with_ids(["<a>", "<b>"], {0: b"x", 1: b"<b>"})
    {'<a>': 2, '<b>': 1}
    """
    if isinstance(special_tokens, str):
        raise TypeError(f"special_tokens is a list of strings; did you mean [{special_tokens!r}]?")
    if isinstance(special_tokens, Mapping):
        return {mend_surrogates(text): token_id for text, token_id in special_tokens.items()}
    last = {token: token_id for token_id, token in sorted(vocab.items())}
    following = max(vocab, default=-1) + 1
    numbered: dict[str, int] = {}
    for text in map(mend_surrogates, special_tokens):
        if text not in numbered:
            numbered[text] = last.get(text.encode(), following)
            following += numbered[text] == following
    return numbered


def check_specials(
    special_tokens: Iterable[str] | Mapping[str, int] | None, vocab: Mapping[int, bytes]
) -> dict[str, int]:
    """Return text -> id of the special tokens; without its own text and id it is a ValueError."""
    specials = with_ids(special_tokens or (), vocab)
    text_of: dict[int, str] = {}
    for text, token_id in specials.items():
        if not text:
            raise ValueError("a special token is the empty string; it would match everywhere")
        expect_id(token_id, f"the id of the special token {text!r:.60}")
        if token_id in text_of:
            raise ValueError(
                f"id {token_id} belongs to two special tokens, {text_of[token_id]!r} and {text!r}"
            )
        if vocab.get(token_id, text.encode()) != text.encode():
            raise ValueError(
                f"id {token_id} of special token {text!r} belongs to the token {vocab[token_id]!r}"
            )
        text_of[token_id] = text
    return specials
