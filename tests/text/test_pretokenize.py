"""The splitters: published patterns, complete pieces, and what of a prefix is settled."""

import random

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.text import pretokenize
from clearhead.text.pretokenize import (
    SAFE_BORDER,
    SPLITTERS,
    compile_splitter,
    mend_surrogates,
    settled_length,
)

PATTERNS = [name for name in SPLITTERS if name != "none"]
# Every kind of character that some pattern treats in its own way, and the contractions' letters.
NASTY = "aB'lLvesrdtmZ  \n\r\t/.!12\xa0あé\u0301Ⅷ²ǅʰſ😀\x1c\x85"
texts = st.text(st.sampled_from(NASTY), max_size=14) | st.text(max_size=14).map(mend_surrogates)


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("gpt2", ["I", "'ll", " pay", " $", "12345", ".", "  ", " OKé", "'", "LL", "\n  "]),
        ("cl100k", ["I", "'ll", " pay", " $", "123", "45", ".", "  ", " OKé", "'LL", "\n  "]),
        ("o200k", ["I'll", " pay", " $", "123", "45", ".", "  ", " OKé'LL", "\n", "  "]),
        ("llama3", ["I", "'ll", " pay", " $", "123", "45", ".", "  ", " OKé", "'LL", "\n", "  "]),
        ("qwen2", ["I", "'ll", " pay", " $", "1", "2", "3", "4", "5", ".", "  ", " OKé", "'LL", "\n", "  "]),
        ("smollm", ["I", "'ll", " pay", " $", "1", "2", "3", "4", "5", ".", "  ", " OKé", "'", "LL", "\n  "]),
        ("none", ["I'll pay $12345.   OKé'LL\n  "]),
    ],
)
def test_worked_example(name: str, pieces: list[str]) -> None:
    """One sentence shows how the splitters differ."""
    assert compile_splitter(name)("I'll pay $12345.   OKé'LL\n  ") == pieces


def test_unknown_splitter_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown splitter 'gpt5'; known: gpt2, cl100k, .*none"):
        compile_splitter("gpt5")


@pytest.mark.parametrize("name", SPLITTERS)
def test_empty_text_has_no_pieces(name: str) -> None:
    assert compile_splitter(name)("") == []


@pytest.mark.parametrize("name", PATTERNS)
@settings(deadline=None, max_examples=100)
@given(text=texts)
def test_pieces_are_the_matches_and_join_to_the_text(name: str, text: str) -> None:
    """Nothing is lost between pieces, and the faster form for ASCII finds the same ones."""
    pattern = SPLITTERS[name]
    assert pattern is not None
    pieces = compile_splitter(name)(text)
    assert pieces == regex.findall(pattern, text)
    assert "".join(pieces) == text


@pytest.mark.parametrize("name", PATTERNS)
@settings(deadline=None, max_examples=100)
@given(text=st.text(st.sampled_from([c for c in NASTY if c.isascii()]), max_size=20))
def test_ascii_form_equals_the_full_pattern(name: str, text: str) -> None:
    assert compile_splitter(name)(text) == regex.findall(SPLITTERS[name] or "", text)


@pytest.mark.parametrize("name", PATTERNS)
@settings(deadline=None, max_examples=100)
@given(text=texts)
def test_settled_pieces_survive_every_continuation(name: str, text: str) -> None:
    """For every cut, the pieces that end inside `settled_length` of the prefix are pieces of the whole."""
    split = compile_splitter(name)
    whole = split(text)
    for cut in range(len(text) + 1):
        settled, end = settled_length(name, text[:cut]), 0
        for i, piece in enumerate(split(text[:cut])):
            end += len(piece)
            if end > settled:
                break
            assert piece == whole[i]


@pytest.mark.parametrize("name", PATTERNS)
def test_little_is_left_unsettled(name: str) -> None:
    """The part held back stays short however long the text is: two long pieces and a few short ones."""
    rng = random.Random(0)
    split = compile_splitter(name)
    for _ in range(200):
        text = "".join(rng.choice(NASTY) for _ in range(400))
        pieces, longest = split(text), max(map(len, split(text)))
        assert len(text) - settled_length(name, text) <= 3 * longest + 3
        assert len("".join(pieces)) == 400
    assert settled_length(name, "x " * 1000) == 1997


def test_none_settles_nothing() -> None:
    assert settled_length("none", "one two three") == 0


@pytest.mark.parametrize("name", PATTERNS)
@settings(deadline=None, max_examples=100)
@given(text=texts)
def test_safe_borders_cut_independently(name: str, text: str) -> None:
    split = compile_splitter(name)
    for border in SAFE_BORDER.finditer(text):
        assert split(text[: border.start()]) + split(text[border.start() :]) == split(text)


def test_surrogates_are_mended() -> None:
    """A pair is its character; every half alone is one U+FFFD; anything else is returned as it is."""
    assert mend_surrogates("\ud83d\ude00") == "😀"
    assert mend_surrogates("a\ud83db\ude00\ud83d\ud83d\ude00") == "a\ufffdb\ufffd\ufffd😀"
    assert mend_surrogates("\ufeffé\ufffd") == "\ufeffé\ufffd"


def test_ascii_pattern_covers_every_property() -> None:
    """Every Unicode property that a pattern names has its meaning below 128."""
    for pattern in SPLITTERS.values():
        assert r"\p" not in pretokenize._ascii_pattern(pattern or "")
