"""Normalisation steps, where a text may be cut for them, and rows of one width."""

import doctest
import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.text import normalise as module
from clearhead.text.normalise import STEPS, normalise, pad_batch, settled_prefix
from clearhead.text.pretokenize import mend_surrogates

JOINING = "aeK\u0301\u0327\u0344가ᄀ\u1161\u11a8ㄱㅏｶﾞ\x00\x1b\t\nΣσﬁ²ÅA\u09c7\u09be\u0958İ"
texts = st.text(st.sampled_from(JOINING), max_size=8) | st.text(max_size=8).map(mend_surrogates)


def test_worked_examples() -> None:
    assert normalise("e\u0301", ["nfc"]) == "é"
    assert normalise("ﬁ²Ａ", ["nfkc"]) == "fi2A"
    assert normalise("ΟΔΟΣ ÉCOLE", ["lowercase"]) == "οδοσ école"
    assert normalise("a\x00b\x1b[0m\tc\n\x7f\x85", ["strip_control"]) == "ab[0m\tc\n"
    assert normalise("A\x00\u030a", ["strip_control", "lowercase", "nfc"]) == "å"
    assert normalise("\u00c5", []) == "\u00c5"


def test_unknown_step_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown normalisation step 'nfd'; known: nfc, nfkc, lowercase"):
        normalise("a", ["nfd"])


@settings(deadline=None, max_examples=200)
@given(text=texts, steps=st.lists(st.sampled_from(list(STEPS)), max_size=3))
def test_settled_prefix_normalises_on_its_own(text: str, steps: list[str]) -> None:
    """For every cut: the settled part of the prefix and the rest normalise apart as they do together."""
    for cut in range(len(text) + 1):
        n = settled_prefix(text[:cut])
        assert normalise(text[:n], steps) + normalise(text[n:], steps) == normalise(text, steps)


def test_starters_that_compose_are_marks_or_jamo() -> None:
    """The second character of every primary composite is one that `settled_prefix` passes over."""
    for code in range(0x110000):
        parts = unicodedata.decomposition(chr(code)).split()
        if len(parts) == 2 and not parts[0].startswith("<"):
            second = chr(int(parts[1], 16))
            if unicodedata.normalize("NFC", chr(code)) == chr(code):
                assert settled_prefix("x" + second) == 0


def test_prefix_is_held_briefly() -> None:
    assert settled_prefix("x" * 100) == 99
    assert settled_prefix("汉字" * 50) == 99
    assert settled_prefix("") == 0


def test_pad_batch_fills_the_side_asked_for() -> None:
    ids, mask = pad_batch([[1, 2, 3], [], [4]], pad_id=9, width=4)
    assert ids.tolist() == [[1, 2, 3, 9], [9, 9, 9, 9], [4, 9, 9, 9]]
    assert mask.tolist() == [[True, True, True, False], [False] * 4, [True, False, False, False]]
    assert (ids.dtype, mask.dtype) == (np.int64, np.bool_)
    left, _ = pad_batch([[1, 2], [4]], pad_id=9, side="left")
    assert left.tolist() == [[1, 2], [9, 4]]
    empty, _ = pad_batch([], pad_id=0)
    assert empty.shape == (0, 0)


def test_pad_batch_refuses_a_row_that_does_not_fit(unchecked: None) -> None:
    with pytest.raises(ValueError, match="a row of 3 tokens does not fit the width 2"):
        pad_batch([[1, 2, 3]], pad_id=0, width=2)
    side: str = "middle"
    with pytest.raises(ValueError, match="side is 'left' or 'right', not 'middle'"):
        pad_batch([[1]], pad_id=0, side=side)


def test_examples() -> None:
    assert doctest.testmod(module).failed == 0
