"""BPE training as dull as it can be: every merge counts every pair of every pre-token again.

What `clearhead.text.bpe` must equal. It shares no code with it; `split` is the only thing passed in.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import regex

GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def naive_train_bpe(
    documents: Sequence[str],
    vocab_size: int,
    special_tokens: Sequence[str] = (),
    split: Callable[[str], list[str]] = GPT2.findall,
    alphabet: str = "bytes",
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    words: Counter[tuple[bytes, ...]] = Counter()
    for document in documents:
        for stretch in cut_at_specials(mend(document), special_tokens):
            for word in split(stretch):
                if alphabet == "bytes":
                    words[tuple(bytes([byte]) for byte in word.encode("utf-8"))] += 1
                else:
                    words[tuple(character.encode("utf-8") for character in word)] += 1
    if alphabet == "bytes":
        tokens = [bytes([byte]) for byte in range(256)]
    else:
        tokens = sorted({symbol for word in words for symbol in word})
    merges = []
    while len(tokens) + len(special_tokens) < vocab_size:
        pairs: Counter[tuple[bytes, bytes]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], pair[0], pair[1]))
        merges.append(best)
        tokens.append(best[0] + best[1])
        merged: Counter[tuple[bytes, ...]] = Counter()
        for word, count in words.items():
            merged[merge_pair(word, best)] += count
        words = merged
    tokens += [mend(special).encode("utf-8") for special in special_tokens]
    return dict(enumerate(tokens)), merges


def merge_pair(word: tuple[bytes, ...], pair: tuple[bytes, bytes]) -> tuple[bytes, ...]:
    """Merge `pair` wherever it stands in `word`, from left to right."""
    out, i = [], 0
    while i < len(word):
        if word[i : i + 2] == pair:
            out.append(pair[0] + pair[1])
            i += 2
        else:
            out.append(word[i])
            i += 1
    return tuple(out)


def cut_at_specials(text: str, special_tokens: Sequence[str]) -> list[str]:
    """The stretches between special tokens: at each place the longest that fits, from left to right."""
    stretches, i, start = [], 0, 0
    while i < len(text):
        fitting = [special for special in special_tokens if text.startswith(mend(special), i)]
        if fitting:
            stretches.append(text[start:i])
            i += max(len(mend(special)) for special in fitting)
            start = i
        else:
            i += 1
    return [*stretches, text[start:]]


def mend(text: str) -> str:
    """Surrogate pairs become their character, lone surrogates U+FFFD."""
    out, i = "", 0
    while i < len(text):
        here, after = ord(text[i]), ord(text[i + 1]) if i + 1 < len(text) else 0
        if 0xD800 <= here < 0xDC00 and 0xDC00 <= after < 0xE000:
            out += chr(0x10000 + (here - 0xD800) * 0x400 + (after - 0xDC00))
            i += 2
        else:
            out += "\ufffd" if 0xD800 <= here < 0xE000 else text[i]
            i += 1
    return out
