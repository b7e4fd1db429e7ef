r"""Splitters: cut a text into pre-tokens, the pieces inside which BPE may merge.

Without a splitter BPE would learn tokens such as ``"dog."`` and ``"dog!"`` and merge across words. A splitter
is one regular expression whose matches, end to end, are the text; training and encoding use the same one, so
a merge that was learned can always be used.

    gpt2    words, numbers, punctuation, each with one space before it; English contractions apart
    cl100k  GPT-4: numbers in groups of three, any one sign before a word, line breaks kept with punctuation
    o200k   GPT-4o: words also cut where lower case turns into upper case; contractions stay with their word
    llama3  like cl100k, but white space at the very end of a text is split like any other
    qwen2   llama3 with every digit on its own
    smollm  gpt2 with every digit on its own
    none    the whole text is one pre-token

``cl100k`` and ``o200k`` split as tiktoken does, the others as the published ``tokenizer.json`` files do.
The patterns are spelled so that ``regex``, Oniguruma (Hugging Face) and fancy-regex (tiktoken) read them
alike; the pieces may differ only where their Unicode tables do, on the newest letters and numbers.
"""

import re
from collections.abc import Callable
from functools import cache

import regex

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPLITTERS: dict[str, str | None] = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s++(?!\S)|\s*[\r\n]|\s+(?!\S)|\s",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "llama3": _LLAMA3,
    "qwen2": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
    "smollm": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+",
    "none": None,
}
"""Name -> pattern of each splitter; None means that the whole text is one piece."""

SAFE_BORDER = regex.compile(r"(?<=[\p{L}\p{N}])(?=[\s\p{P}])(?!')")
"""Where a text may be cut in two without changing the pieces: every splitter but ``none`` cuts between a
letter or number and the white space or punctuation after it (an apostrophe may begin a contraction), and
neither side looks over that border."""

# What the properties mean below 128: the pattern then runs in `re`, twice as fast as `regex`.
_ASCII = {"L": "A-Za-z", "N": "0-9", "Lu": "A-Z", "Ll": "a-z", "Lt": "", "Lm": "", "Lo": "", "M": ""}


def check_splitter(name: str) -> str:
    """Return `name` if it is a known splitter; otherwise raise ValueError listing the known ones."""
    if name not in SPLITTERS:
        raise ValueError(f"unknown splitter {name!r}; known: {', '.join(SPLITTERS)}")
    return name


@cache
def compile_splitter(name: str) -> Callable[[str], list[str]]:
    """Return the function that cuts a text into the pre-tokens of the splitter `name`.

    The pieces joined give the text again. An unknown name is a ValueError that lists the known ones.

    >>> split = compile_splitter("gpt2")
    >>> split("Hello world, it's 2024!")
    ['Hello', ' world', ',', ' it', "'s", ' 2024', '!']
    >>> compile_splitter("qwen2")("in 2024")
    ['in', ' ', '2', '0', '2', '4']
    """
    pattern = SPLITTERS[check_splitter(name)]
    if pattern is None:
        return lambda text: [text] if text else []
    split_any = regex.compile(pattern).findall
    split_ascii = re.compile(_ascii_pattern(pattern), re.ASCII).findall
    return lambda text: split_ascii(text) if text.isascii() else split_any(text)


def _ascii_pattern(pattern: str) -> str:
    r"""The same pattern for ASCII text only: ``\p{L}+`` becomes ``[A-Za-z]+``."""

    def spell(found: re.Match[str]) -> str:
        part = re.sub(r"\\p\{(\w+)\}", lambda name: _ASCII[name[1]], found[0])
        return part if found[0].startswith("[") else f"[{part}]"

    return re.sub(r"\[[^\]]*\]|\\p\{\w+\}", spell, pattern)


# The end of a text may split differently once more text follows. White space: "\n  " is one piece or two. For
# o200k also capital and caseless letters: "あB" is cut in two, "あBc" is not.
_OPEN_END = regex.compile(r"(?r)\s*")
_OPEN_END_O200K = regex.compile(r"(?r)\s+|[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*")
_LOOK_AHEAD = 3  # what a contraction may add after a word: "I'l" becomes "I'll"


def settled_length(name: str, text: str) -> int:
    """Return n such that the pieces of `text` that end at or before n stay the same, whatever text follows.

    No more than the last three pieces and three characters reach past n: a reader that holds back what n does
    not cover holds little.

    >>> compile_splitter("gpt2")("one two thr"), settled_length("gpt2", "one two thr")
    (['one', ' two', ' thr'], 8)
    """
    if SPLITTERS[check_splitter(name)] is None:
        return 0
    open_end = (_OPEN_END_O200K if name == "o200k" else _OPEN_END).search(text)
    assert open_end is not None  # both patterns match the empty string
    return max(0, min(open_end.start(), len(text) - _LOOK_AHEAD))


@cache
def special_pattern(special_tokens: tuple[str, ...]) -> re.Pattern[str]:
    """The pattern that finds special tokens, the longest of those that start at the same place; one at least.

    >>> special_pattern(("<a>", "<a><b>")).split("x<a><b>y<a>")  # ordinary, special, ordinary, ...
    ['x', '<a><b>', 'y', '<a>', '']
    """
    longest_first = sorted(special_tokens, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")


def mend_surrogates(text: str) -> str:
    """Return `text` with surrogate pairs as their character and lone surrogates as U+FFFD.

    Python strings may hold halves of UTF-16 pairs, which have no UTF-8 form: JSON escapes and old file names
    leave them behind. Every way into the toolkit passes here first.

    >>> mend_surrogates("\\ud83d\\ude00 and \\ud83d")
    '😀 and �'
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
