"""Merging by rank: both ways of doing it equal the definition, and the long way is linear."""

import doctest
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.text import merging
from clearhead.text.merging import merge, merge_long, merge_short
from reference.naive_encode import naive_merge

# Merges over the letters a, b, c: each joins two tokens that exist by then. Shuffled, a merge may come before
# those that make its parts: no training lists them so, but a file can.
recipes = st.lists(st.tuples(st.integers(0, 999), st.integers(0, 999)), max_size=12)
words = st.lists(st.integers(0, 2), max_size=40)


def build(recipe: Iterable[tuple[int, int]], seed: int | None) -> list[tuple[bytes, bytes]]:
    tokens, merges = [b"a", b"b", b"c"], []
    for left, right in recipe:
        pair = tokens[left % len(tokens)], tokens[right % len(tokens)]
        if pair[0] + pair[1] not in tokens:
            merges.append(pair)
            tokens.append(pair[0] + pair[1])
    if seed is not None:
        random.Random(seed).shuffle(merges)
    return merges


@settings(deadline=None, max_examples=400)
@given(recipe=recipes, word=words, seed=st.none() | st.integers(0, 99))
def test_short_and_long_equal_the_definition(
    recipe: list[tuple[int, int]], word: list[int], seed: int | None
) -> None:
    """Also when ranks are out of order, so that a merge makes a pair of a lower rank than its own."""
    merges = build(recipe, seed)
    tokens = [b"a", b"b", b"c", *(left + right for left, right in merges)]
    number = {token: i for i, token in enumerate(tokens)}
    ranks = {(number[left], number[right]): rank for rank, (left, right) in enumerate(merges)}
    made = list(range(3, len(tokens)))
    expected = [number[part] for part in naive_merge([tokens[i] for i in word], merges)]
    before = list(word)
    assert merge_short(word, ranks, made) == expected
    assert merge_long(word, ranks, made) == expected
    assert merge(word, ranks, made) == expected
    assert word == before


def test_equal_letters_merge_from_the_left() -> None:
    """aaaaa with a+a, aa+aa: the odd one is the last."""
    for way in (merge_short, merge_long):
        assert way([0] * 5, {(0, 0): 0, (1, 1): 1}, [1, 2]) == [2, 0]
        assert way([0] * 7, {(0, 0): 0, (1, 1): 1}, [1, 2]) == [2, 1, 0]


class CountingRanks(dict[tuple[int, int], int]):
    """Counts how often a pair is looked up: the work of merging."""

    looked_up = 0

    def get(self, key, default=None):
        self.looked_up += 1
        return super().get(key, default)


@pytest.mark.slow
def test_a_million_equal_letters_take_linear_work() -> None:
    """Doubling the text doubles the number of pairs looked at: 12 levels of a+a, aa+aa, ..."""
    work = []
    for n in (500_000, 1_000_000):
        ranks = CountingRanks({(level, level): level for level in range(12)})
        merged = merge([0] * n, ranks, range(1, 13))
        assert merged[: n // 4096] == [12] * (n // 4096)
        work.append(ranks.looked_up)
    assert work[1] / work[0] < 2.01
    assert work[1] < 6 * 1_000_000


def test_examples() -> None:
    assert doctest.testmod(merging).failed == 0
