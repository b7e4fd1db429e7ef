"""From pre-tokens to packed ids: what a vocabulary makes of a piece, worked out once and remembered.

A text repeats its words, so the ids of each pre-token are kept, packed as the bytes of an integer array.
Encoding a text is then one look-up per word and one join of bytes; `numpy` reads the result as ids.
"""

from collections.abc import Callable, Iterable

import numpy as np

from clearhead.text.definition import Definition
from clearhead.text.merging import merge

_REMEMBERED = 1 << 16  # pre-tokens kept; about 15 MB
_LONGEST_REMEMBERED = 64  # characters of a pre-token that is worth keeping


class PieceEncoder:
    """Encodes pre-tokens by the rules of a `Definition`."""

    def __init__(self, definition: Definition):
        special_ids = set(definition.special_tokens.values())
        by_id = sorted(definition.vocab.items(), reverse=True)  # of two equal tokens the lower id counts
        self._whole = {token: token_id for token_id, token in by_id if token_id not in special_ids}
        self._whole_first = definition.ignore_merges
        self._bytes = definition.alphabet == "bytes"
        id_of = {token: token_id for token_id, token in by_id} | self._whole
        self._base = _single_bytes(id_of) if self._bytes else _single_characters(self._whole)
        self._ranks: dict[tuple[int, int], int] = {}
        self._made: list[int] = []
        for rank, (left, right) in enumerate(definition.merges):
            for token in (left, right, left + right):
                if token not in id_of:
                    raise ValueError(f"merge {rank}, {left!r} and {right!r}: the vocabulary lacks {token!r}")
            self._ranks[id_of[left], id_of[right]] = rank
            self._made.append(id_of[left + right])
        self.dtype = np.uint16 if max(definition.vocab) < 1 << 16 else np.uint32
        self._remembered = _Remembered(self._encode)

    def pack(self, pieces: Iterable[str]) -> bytes:
        """Return the ids of all pieces as the bytes of an array of `self.dtype`."""
        return b"".join(map(self._remembered.__getitem__, pieces))

    def pack_ids(self, ids: list[int]) -> bytes:
        """Return these ids as the bytes of an array of `self.dtype`."""
        return np.array(ids, self.dtype).tobytes()

    def _encode(self, piece: str) -> bytes:
        token = piece.encode()
        if self._whole_first and token in self._whole:
            return self.pack_ids([self._whole[token]])
        try:
            symbols = [self._base[symbol] for symbol in (token if self._bytes else piece)]
        except KeyError as error:
            raise _not_in_alphabet(error.args[0], len(self._base)) from None
        return self.pack_ids(merge(symbols, self._ranks, self._made))


class _Remembered(dict[str, bytes]):
    """Pre-token -> packed ids, filled when asked; emptied when full, since common words are soon back."""

    def __init__(self, encode: Callable[[str], bytes]):
        super().__init__()
        self._encode = encode

    def __missing__(self, piece: str) -> bytes:
        packed = self._encode(piece)
        if len(piece) <= _LONGEST_REMEMBERED:
            if len(self) >= _REMEMBERED:
                self.clear()
            self[piece] = packed
        return packed


def _single_bytes(id_of: dict[bytes, int]) -> dict[int | str, int]:
    return {token[0]: token_id for token, token_id in id_of.items() if len(token) == 1}


def _single_characters(id_of: dict[bytes, int]) -> dict[int | str, int]:
    decoded = ((token.decode("utf-8", "replace"), token_id) for token, token_id in id_of.items())
    return {text: token_id for text, token_id in decoded if len(text) == 1}


def _not_in_alphabet(symbol: int | str, size: int) -> ValueError:
    if isinstance(symbol, int):
        return ValueError(f"byte 0x{symbol:02X} is not in the vocabulary, which has {size} of the 256 bytes")
    code = f"U+{ord(symbol):04X}"
    return ValueError(
        f"character {symbol!r} ({code}) is not in this tokenizer's alphabet of {size} characters"
    )
