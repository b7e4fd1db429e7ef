"""Tokens as a reader sees them: which bytes of the text each one is, and the merges that built it.

    "hugs" -> hug s        hug: 68 75 67, built by u+g, then h+ug

Positions are byte positions in the UTF-8 text, because a token may cut a character. Bytes of a cut character
are spelled as such: "你" in two tokens reads ⟨e4 bd⟩ ⟨a0⟩.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from clearhead.text.foreign import AnyTokenizer, ForeignTokenizer
from clearhead.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """One token of a text. `start`, `end`: its bytes in the text; `bytes` in hexadecimal."""

    id: int
    text: str
    bytes: str
    start: int
    end: int
    special: bool


class Speller:
    """Spells tokens of one vocabulary; without a tokenizer a token is its number."""

    def __init__(self, tokenizer: AnyTokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._special = set() if tokenizer is None else set(tokenizer.special_tokens.values())
        self._words: dict[int, str] = {}
        self._ranks: dict[tuple[bytes, bytes], int] | None = None

    def bytes_of(self, token_id: int, first: bool = False) -> bytes:
        """The bytes of a token inside a text, or at its beginning; none for an id that no token has."""
        if self.tokenizer is None:
            return b""
        try:
            if first and isinstance(self.tokenizer, ForeignTokenizer):
                return self.tokenizer.first_bytes(token_id)
            return self.tokenizer.token_bytes(token_id)
        except ValueError:  # embeddings often have more rows than the vocabulary has tokens
            return b""

    def word(self, token_id: int) -> str:
        """The text of a token; its number in brackets where it has none."""
        known = self._words.get(token_id)
        if known is None:
            known = spell(self.bytes_of(token_id)) or f"[{token_id}]"
            self._words[token_id] = known
        return known

    def words(self, ids: Sequence[int]) -> dict[int, str]:
        """Id -> text of these tokens."""
        return {token_id: self.word(token_id) for token_id in dict.fromkeys(ids)}

    def vocabulary(self, size: int) -> list[str]:
        """The text of every id from 0 on."""
        return [self.word(token_id) for token_id in range(size)]

    def pieces(self, ids: Sequence[int], before: int = 0, after: int = 0) -> list[Piece]:
        """The tokens of a text, in order. The first `before` and last `after` ones stand around the text."""
        made, place = [], 0
        for number, token_id in enumerate(ids):
            raw = self.bytes_of(token_id, first=number <= before)
            text = spell(raw) or f"[{token_id}]"
            end = place + (len(raw) if before <= number < len(ids) - after else 0)
            made.append(Piece(token_id, text, raw.hex(), place, end, token_id in self._special))
            place = end
        return made

    def merges(self, token_id: int) -> list[str]:
        """The merges that build a token from single bytes, in order, each as "left right" in hexadecimal.

        None for special tokens, and where the vocabulary is not made by merging.
        """
        if not isinstance(self.tokenizer, Tokenizer) or token_id in self._special:
            return []
        if self._ranks is None:
            self._ranks = {pair: rank for rank, pair in enumerate(self.tokenizer.merges)}
        ranks, symbols = self._ranks, _symbols(self.bytes_of(token_id), self.tokenizer.alphabet)
        steps = []
        while len(symbols) > 1:
            best = min(itertools.pairwise(symbols), key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break  # a token that merging does not lead to
            steps.append(f"{best[0].hex()} {best[1].hex()}")
            symbols = _merged(symbols, best)
        return steps


def spell(raw: bytes) -> str:
    """Bytes as text; those that belong to no whole character in hexadecimal.

    >>> spell(" 你".encode()[:-1])
    ' ⟨e4 bd⟩'
    """
    text = raw.decode("utf-8", "surrogateescape")
    return re.sub(
        "[\udc80-\udcff]+", lambda cut: f"⟨{cut[0].encode('utf-8', 'surrogateescape').hex(' ')}⟩", text
    )


def _symbols(token: bytes, alphabet: str) -> list[bytes]:
    if alphabet == "characters":
        return [character.encode() for character in token.decode("utf-8", "replace")]
    return [bytes([byte]) for byte in token]


def _merged(symbols: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    """The symbols with this pair joined wherever it stands, from the left."""
    joined, place = [], 0
    while place < len(symbols):
        if tuple(symbols[place : place + 2]) == pair:
            joined.append(pair[0] + pair[1])
            place += 2
        else:
            joined.append(symbols[place])
            place += 1
    return joined


def piece_dicts(pieces: Sequence[Piece]) -> list[dict[str, object]]:
    """Pieces as JSON values."""
    return [asdict(piece) for piece in pieces]
