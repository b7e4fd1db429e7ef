"""Texts that come in chunks: the same pieces at every cut, little held back, text that streams out."""

import doctest
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.text import incremental
from clearhead.text.incremental import PieceFeed, SpecialCutter, TextStream, mended
from clearhead.text.normalise import normalise
from clearhead.text.pretokenize import SPLITTERS, compile_splitter, mend_surrogates
from clearhead.text.tokenizer import Tokenizer

# Specials that begin like each other, hold each other and end like each other's beginnings.
SPECIALS = ["<a>", "<a><b>", "<b>c", "<", "><a", "xé", "é<a>"]
PARTS = [*SPECIALS, *"<a>bc xé1'", "'ll", "\n ", "e\u0301", "\ud83d", "\ude00", "ﬁ", "あB", "\x00", "ㄱㅏ"]
texts = st.lists(st.sampled_from(PARTS), max_size=6).map("".join)


def cuts(text: str) -> Iterator[list[str]]:
    """The text cut in two at every place, and into single characters with empty chunks between them."""
    for at in range(len(text) + 1):
        yield [text[:at], text[at:]]
    yield [chunk for character in text for chunk in (character, "")]


def small(splitter: str, steps: tuple[str, ...] = ()) -> Tokenizer:
    merges = [(b"'", b"l"), (b"a", b">"), (b"'l", b"l"), (b" ", b"x"), (b"\n", b" "), (b"\xc3", b"\xa9")]
    tokens = [bytes([i]) for i in range(256)] + [left + right for left, right in merges]
    return Tokenizer(dict(enumerate(tokens)), merges, SPECIALS, splitter, normalise=steps)


@pytest.mark.parametrize("splitter", SPLITTERS)
@settings(deadline=None, max_examples=50)
@given(text=texts, mode=st.sampled_from(["token", "text"]))
def test_every_cut_gives_the_ids_of_the_whole(splitter: str, text: str, mode: str) -> None:
    """Contractions, special tokens, surrogate pairs and white space may all lie across the cut."""
    tokenizer = small(splitter)
    whole = tokenizer.encode(text, mode)
    for chunks in cuts(text):
        assert list(tokenizer.encode_iterable(chunks, mode)) == whole


@settings(deadline=None, max_examples=60)
@given(
    text=texts,
    splitter=st.sampled_from(["gpt2", "o200k", "none"]),
    steps=st.lists(st.sampled_from(["nfc", "nfkc", "lowercase", "strip_control"]), min_size=1, max_size=3),
)
def test_every_cut_of_a_normalised_text(text: str, splitter: str, steps: list[str]) -> None:
    """An accent after the cut still joins the letter before it."""
    tokenizer = small(splitter, tuple(steps))
    whole = tokenizer.encode(text)
    for chunks in cuts(text):
        assert list(tokenizer.encode_iterable(chunks)) == whole


def test_error_mode_sees_a_special_token_across_chunks() -> None:
    with pytest.raises(ValueError, match="the text holds the special token '<a><b>'"):
        list(small("gpt2").encode_iterable(["one <a", "><b> two"], "error"))
    assert list(small("gpt2").encode_iterable(["on", "e"], "error")) == small("gpt2").encode("one")


def test_modes_are_checked_before_the_first_chunk() -> None:
    with pytest.raises(ValueError, match="specials is 'token', 'text' or 'error', not 'none'"):
        small("gpt2").encode_iterable([], "none")


@pytest.mark.parametrize("splitter", [name for name in SPLITTERS if name != "none"])
@pytest.mark.parametrize(
    "unit",
    ["word ", "汉字，", "あB1", "don't", "x\n \n", "1,", "a<a", "e\u0301!", "ㄱㅏ\n", "X.Y/"],
)
def test_little_text_is_held(splitter: str, unit: str) -> None:
    """However long the text, what is held stays within a few times the longest pre-token."""
    longest = max(map(len, compile_splitter(splitter)(normalise(unit * 300, ["nfkc"]))))
    feed = PieceFeed(splitter, ("nfkc",))
    worst = 0
    for _ in range(300):
        feed.feed(unit)
        worst = max(worst, feed._raw._length + feed._normal._length)
    assert worst <= 6 * longest + 20


def test_a_long_pre_token_in_small_chunks_takes_linear_work() -> None:
    """The held text is looked at again only when it has doubled: few looks, however many chunks."""
    feed = PieceFeed("gpt2")
    looks = 0
    split = feed._split

    def counting(text: str) -> list[str]:
        nonlocal looks
        looks += 1
        return split(text)

    feed._split = counting
    given = [piece for _ in range(20_000) for piece in feed.feed("a")]
    assert given == []
    assert looks < 20
    assert feed.close() == ["a" * 20_000]


def test_ids_come_before_the_text_is_read_to_its_end() -> None:
    """The generator is lazy: an endless text gives ids."""

    def endless() -> Iterator[str]:
        while True:
            yield "one two "

    ids = small("gpt2").encode_iterable(endless())
    assert [next(ids) for _ in range(4)] == list(b"one ")


def test_chunks_share_a_surrogate_pair() -> None:
    assert list(mended(["a\ud83d", "", "\ude00b", "\ud83d"])) == ["a", "", "😀b", "", "\ufffd"]


def test_special_cutter_waits_for_a_longer_match() -> None:
    cutter = SpecialCutter(["<a>", "<a><b>", "<b>c"])
    assert list(cutter.feed("x<a>")) == [("x", None)]
    assert list(cutter.feed("<b")) == [("", None)]
    assert list(cutter.feed(">c<b>")) == [("", "<a><b>"), ("c", None)]
    assert list(cutter.feed("", last=True)) == [("<b>", None)]


@settings(deadline=None, max_examples=150)
@given(data=st.binary(max_size=24), text=st.text(max_size=6).map(mend_surrogates), cut=st.integers(0, 24))
def test_stream_joins_to_decode(data: bytes, text: str, cut: int) -> None:
    """For any bytes, one at a time: broken, truncated and complete characters, a literal U+FFFD too."""
    tokenizer = small("gpt2")
    ids = list(data[:cut] + (text + "\ufffd").encode() + data[cut:])
    stream = tokenizer.stream()
    parts = [stream.feed(token_id) for token_id in ids]
    assert "".join(parts) + stream.flush() == tokenizer.decode(ids)
    assert stream.flush() == ""


def test_stream_holds_only_incomplete_characters() -> None:
    """Nothing for the first three bytes of an emoji, then the emoji; U+FFFD passes at once."""
    stream = TextStream(lambda token_id: bytes([token_id]))
    assert [stream.feed(byte) for byte in "é😀".encode()] == ["", "é", "", "", "", "😀"]
    assert [stream.feed(byte) for byte in "\ufffdx".encode()] == ["", "", "\ufffd", "x"]
    assert (stream.feed(0xF0), stream.flush()) == ("", "\ufffd")
    assert stream.feed(ord("a")) == "a"


def test_examples() -> None:
    assert doctest.testmod(incremental).failed == 0
