"""Vocabularies that the tests of the text chapter share: learned once per run, on a small mixed text."""

import argparse
from pathlib import Path

import pytest
import regex

from clearhead.text.bpe import train_bpe
from clearhead.text.pretokenize import SPLITTERS
from clearhead.text.tokenizer import Tokenizer

END = "<|endoftext|>"
SPECIALS = [END, "<|user|>", "<|user|><|end|>"]
MIXED_TEXT = """The quick brown fox doesn't jump over the lazy dog; I'LL say: it wasn't 3.14159 or 1,234,567!
Größere Füße, déjà vu, naïve façade — «съешь ещё этих мягких французских булок» и ЁЖИК.
订单成交，订单取消，查询订单，订单过期。東京都に住んでいます。カタカナとひらがな。한국어 텍스트, 조선글.
हिन्दी में नमस्ते, العربية من اليمين, עברית, ไทย, ελληνικά Σίσυφος.  😀😀👍🏽👨‍👩‍👧 ① ² ½ Ⅷ ǅ ʰ
\tdef f(x):\n\t\treturn x**2\r\n\r\n\n   # a comment   \n"""


@pytest.fixture(scope="session")
def trained() -> dict[str, Tokenizer]:
    """Splitter -> a tokenizer of 1,000 tokens learned with it."""
    texts = [MIXED_TEXT, Path(argparse.__file__).read_text(encoding="utf-8"), END, MIXED_TEXT]
    tokenizers = {}
    for name in SPLITTERS:
        vocab, merges = train_bpe(texts, 1000, SPECIALS, name, workers=1)
        tokenizers[name] = Tokenizer(vocab, merges, SPECIALS, name)
    return tokenizers


# What the patterns ask of a character.
CLASSES = [
    r"\p{L}",
    r"\p{N}",
    r"\s",
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]",
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]",
]


@pytest.fixture(scope="session")
def agreed() -> str:
    """All assigned characters that `regex`, tiktoken's and Hugging Face's engine put in the same classes.

    Each engine is asked about each class: `regex` with findall; tiktoken encodes only what its pattern
    matches, so the bytes it gives back are the class; Hugging Face removes what a pattern matches.
    """
    import tiktoken
    from tokenizers import Regex, pre_tokenizers

    everything = "".join(map(chr, range(0x110000)))
    characters = "".join(regex.findall(r"[^\p{Cn}\p{Co}\p{Cs}]", everything))
    all_bytes = {bytes([byte]): byte for byte in range(256)}
    disputed: set[str] = set()
    for pattern in CLASSES:
        ours = set(regex.findall(pattern, characters))
        encoding = tiktoken.Encoding(
            "class", pat_str=pattern + "+", mergeable_ranks=all_bytes, special_tokens={}
        )
        theirs = encoding.decode_bytes(encoding.encode_ordinary(characters)).decode()
        disputed |= ours ^ set(theirs)
        remove = pre_tokenizers.Split(Regex(pattern + "+"), "removed")
        kept: set[str] = set()
        for start in range(0, len(characters), 10_000):
            for piece, _ in remove.pre_tokenize_str(characters[start : start + 10_000]):
                kept.update(piece)
        disputed |= ours ^ (set(characters) - kept)
    return "".join(sorted(set(characters) - disputed))
