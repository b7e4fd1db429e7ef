"""The dull twin of `Tokenizer.encode`: one step at a time, nothing remembered, quadratic everywhere."""

from itertools import pairwise

import regex

from clearhead.text.pretokenize import SPLITTERS


def naive_merge(parts: list[bytes], merges: list[tuple[bytes, bytes]]) -> list[bytes]:
    """Merge the pair that was learned first, the leftmost of equals; again, until there is none."""
    while True:
        found = [(merges.index(pair), place) for place, pair in enumerate(pairwise(parts)) if pair in merges]
        if not found:
            return parts
        _, place = min(found)
        parts = [*parts[:place], parts[place] + parts[place + 1], *parts[place + 2 :]]


def naive_pieces(text: str, special_tokens: list[str], splitter: str) -> list[tuple[str, bool]]:
    """Cut a text into pre-tokens and special tokens (marked True): leftmost first, the longest there."""
    for start in range(len(text)):
        there = [special for special in special_tokens if text.startswith(special, start)]
        if there:
            longest = max(there, key=len)
            rest = naive_pieces(text[start + len(longest) :], special_tokens, splitter)
            return [*naive_pieces(text[:start], [], splitter), (longest, True), *rest]
    pattern = SPLITTERS[splitter]
    pieces = regex.findall(pattern, text) if pattern is not None else [text] if text else []
    return [(piece, False) for piece in pieces]


def naive_encode(
    text: str,
    vocab: dict[int, bytes],
    merges: list[tuple[bytes, bytes]],
    special_tokens: dict[str, int],
    splitter: str,
) -> list[int]:
    """Return the ids of `text` by the definition of byte-level BPE."""
    id_of = {token: token_id for token_id, token in vocab.items()}
    ids: list[int] = []
    for piece, special in naive_pieces(text, list(special_tokens), splitter):
        if special:
            ids.append(special_tokens[piece])
        else:
            data = piece.encode()
            ids += [id_of[part] for part in naive_merge([data[i : i + 1] for i in range(len(data))], merges)]
    return ids
