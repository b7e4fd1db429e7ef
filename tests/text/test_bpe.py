"""BPE training: the worked examples, and equality with the naive twin."""

import doctest
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.text import bpe, counting
from clearhead.text.bpe import train_bpe
from clearhead.text.pretokenize import SPLITTERS, compile_splitter
from reference.naive_bpe import naive_train_bpe

ORDERS = ["订单成交", "订单取消", "查询订单", "订单过期"]


def learned(merges: list[tuple[bytes, bytes]]) -> list[str]:
    return [(left + right).decode() for left, right in merges]


@pytest.mark.parametrize("text", ["bbbaaaddddcccc", "aaabbbccccdddd"])
def test_ties_go_to_the_greatest_pair(text: str) -> None:
    """dd and cc are there 3 times, bb and aa twice: the greater letter wins, whatever comes first."""
    _, merges = train_bpe([text], 256 + 4, splitter="none")
    assert learned(merges) == ["dd", "cc", "bb", "aa"]


def test_ties_compare_the_left_part_first() -> None:
    """(e, r) beats (space, t), and (ab, c) beats (a, bc) though both spell abc."""
    _, merges = train_bpe(["er", " t"], 257)
    assert merges == [(b"e", b"r")]
    least_first = [(b"a", b"bc"), (b"ab", b"c"), (b"ab", b"ca"), (b"abc", b""), (b"b", b"")]
    keys = [tuple(map(bpe._greatest_first, pair)) for pair in least_first]
    assert least_first == sorted(least_first)
    assert keys == sorted(keys, reverse=True)


@given(st.lists(st.binary(max_size=3)))
def test_heap_order_is_the_order_of_bytes(tokens: list[bytes]) -> None:
    """The heap's key turns the order of byte strings round exactly, prefixes and zero bytes included."""
    assert sorted(tokens, key=bpe._greatest_first) == sorted(tokens, reverse=True)


def test_characters_or_bytes() -> None:
    """订单 is the first merge of characters; from bytes it takes five merges to get there."""
    vocab, merges = train_bpe(ORDERS, 10 + 1, alphabet="characters")
    assert learned(merges) == ["订单"]
    assert [vocab[i].decode() for i in range(10)] == sorted(set("".join(ORDERS)))
    _, merges = train_bpe(ORDERS, 256 + 5)
    assert [left + right for left, right in merges].index("订单".encode()) == 4


def test_ids_are_bytes_then_merges_then_specials() -> None:
    vocab, merges = train_bpe(["low low lower"], 256 + 2 + 2, special_tokens=["<|b|>", "<|a|>"])
    assert list(vocab) == list(range(260))
    assert [vocab[i] for i in range(256)] == [bytes([i]) for i in range(256)]
    assert [vocab[256], vocab[257]] == [left + right for left, right in merges] == [b"ow", b"low"]
    assert [vocab[258], vocab[259]] == [b"<|b|>", b"<|a|>"]


def test_nothing_merges_across_specials_or_documents() -> None:
    """ab stands three times in the text, but only once between the cuts."""
    _, merges = train_bpe(["a<|e|>b", "a", "b", "cdcdab"], 258, special_tokens=["<|e|>"])
    assert merges == [(b"c", b"d")]


def test_special_tokens_match_the_longest_first() -> None:
    """With <|e|> and <|e|>x listed shorter first, the text <|e|>x is still one special token."""
    _, merges = train_bpe(["<|e|>xy " * 5], 256 + 3, special_tokens=["<|e|>", "<|e|>x"])
    assert merges == [(b"y", b" ")] or (b"x", b"y") not in merges


def random_corpus(seed: int) -> tuple[list[str], int, list[str]]:
    """A few documents of two or three letters (sometimes with spaces), a size, sometimes a special token."""
    draw = random.Random(seed)
    letters = draw.choice(["ab", "abc", "ab ", "abc \n"])
    documents = ["".join(draw.choices(letters, k=draw.randint(0, 60))) for _ in range(draw.randint(1, 4))]
    special_tokens = draw.choice([[], [], ["ba"], ["c", "cab"]])
    return documents, 256 + len(special_tokens) + draw.randint(0, 25), special_tokens


@pytest.mark.slow
def test_equals_the_naive_twin_on_1000_random_corpora() -> None:
    """Two or three letters make ties, runs (aaaa) and exhausted corpora common; no token is made twice."""
    for seed in range(1000):
        documents, size, special_tokens = random_corpus(seed)
        splitter = ["none", "gpt2"][seed % 2]
        split = compile_splitter(splitter)
        vocab, merges = train_bpe(documents, size, special_tokens, splitter)
        assert (vocab, merges) == naive_train_bpe(documents, size, special_tokens, split), seed
        learned_tokens = [vocab[id] for id in range(256 + len(merges))]
        assert len(set(learned_tokens)) == len(learned_tokens), seed


POOLS = """
import json, sys
from contextlib import nullcontext
from clearhead.text import bpe, counting
counting.PIECE, counting.PART = 4, 1
answers = []
Workers = counting.Workers
for workers in (2, 7):
    with Workers(workers, counting._worker) as pool:
        counting.Workers = lambda *_: nullcontext(pool)  # twenty corpora share the processes
        for documents, size, special_tokens in json.load(open(sys.argv[1], encoding="utf-8")):
            vocab, merges = bpe.train_bpe(documents, size, special_tokens, workers=workers)
            answers.append([workers, len(pool.processes), [token.hex() for token in vocab.values()]])
print(json.dumps(answers))
"""


@pytest.mark.slow
def test_equals_the_naive_twin_with_pools_and_hash_seeds(tmp_path: Path) -> None:
    """Twenty corpora, cut into crumbs, counted by 2 and by 7 real processes under three hash seeds."""
    corpora = []
    for seed in range(20):
        documents, size, special_tokens = random_corpus(seed)
        corpora.append(([*documents, "ab ba " * 40, "cab\n" * 10], size, special_tokens))
    naive = [[token.hex() for token in naive_train_bpe(*corpus)[0].values()] for corpus in corpora]
    given = tmp_path / "corpora.json"
    given.write_text(json.dumps(corpora), encoding="utf-8")
    for hash_seed in ("0", "1", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", POOLS, str(given)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            timeout=120,
            check=True,
        )
        answers = json.loads(done.stdout)
        assert [tokens for *_, tokens in answers] == naive * 2
        assert [counts for *counts, _ in answers] == [[2, 2]] * 20 + [[7, 7]] * 20


UNICODE = "ab'lsé订单😀😃\u0301 \n\r1.<|e>\ud83d\ude00\ufffd\0"


@settings(deadline=None, max_examples=300)
@given(
    documents=st.lists(st.text(st.sampled_from(UNICODE), max_size=40) | st.text(max_size=15), max_size=4),
    special_tokens=st.lists(
        st.sampled_from(["<|e|>", "<|e", "订单", " ", "😀", "\ud83d\ude03", "\ud83d"]),
        max_size=3,
        unique=True,
    ),
    n_merges=st.integers(0, 40),
    splitter=st.sampled_from(list(SPLITTERS)),
    alphabet=st.sampled_from(bpe.ALPHABETS),
)
def test_equals_the_naive_twin_on_unicode(
    documents: list[str], special_tokens: list[str], n_merges: int, splitter: str, alphabet: str
) -> None:
    """Any text, special tokens, halves of surrogate pairs, every splitter, both alphabets, tiny pieces."""
    split = compile_splitter(splitter)
    least = 256
    if alphabet == "characters":
        least = len(naive_train_bpe(documents, 0, special_tokens, split, alphabet)[0]) - len(special_tokens)
    size = least + len(special_tokens) + n_merges
    naive = naive_train_bpe(documents, size, special_tokens, split, alphabet)
    with mock.patch.multiple(counting, PIECE=3, PART=5):
        assert train_bpe(documents, size, special_tokens, splitter, alphabet) == naive


def test_counts_are_64_bit() -> None:
    """Counts beyond 2^32 and 2^53 are told apart exactly."""
    counts = {"ab": 2**53, "cd": 2**53 + 1, "ef": 2**40, "efg": 2**40, "xy": 2**33}
    with mock.patch.object(bpe, "count_pretokens", return_value=counts):
        _, merges = train_bpe([], 256 + 5)
    assert learned(merges) == ["cd", "ab", "ef", "efg", "xy"]


def test_a_long_run_is_merged_from_the_left() -> None:
    """A million equal letters: aa, aaaa, ...; the odd ones stay at the right end."""
    _, merges = train_bpe(["a" * 1_000_001], 256 + 30, splitter="none")
    doubled = [b"a" * 2**n for n in range(1, 20)]
    assert [left + right for left, right in merges][:19] == doubled
    assert merges[-1][1].endswith(b"a")
    assert sum(map(len, merges[-1])) == 1_000_001


def test_every_other() -> None:
    """Runs end where the distance is another one."""
    where = np.array([2, 4, 6, 9, 11, 15])
    assert bpe._every_other(where, 2).tolist() == [2, 6, 9, 15]
    assert bpe._every_other(where[:0], 2).tolist() == []


def test_fewer_merges_than_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """What there is is returned, the ids stay without a gap, and the log says so in one line."""
    vocab, merges = train_bpe(["low"], 300, special_tokens=["<|e|>"])
    assert learned(merges) == ["ow", "low"]
    assert list(vocab) == list(range(259))
    assert [record.getMessage() for record in caplog.records] == [
        "2 of 43 merges learned: the corpus has no more pairs to merge"
    ]


def test_enough_merges_say_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert len(train_bpe(["low"], 258)[1]) == 2
    assert not caplog.records


@pytest.mark.parametrize("alphabet", bpe.ALPHABETS)
def test_an_empty_corpus_has_no_merges(alphabet: str) -> None:
    """The vocabulary is the base symbols and the specials."""
    vocab, merges = train_bpe([], 300, special_tokens=["<|e|>"], alphabet=alphabet)
    assert merges == []
    assert list(vocab.values())[-1] == b"<|e|>"
    assert len(vocab) == (257 if alphabet == "bytes" else 1)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"vocab_size": 255}, ValueError, r"255 is too small; the minimum is 256 \(256 bytes \+ 0 special"),
        ({"vocab_size": 257, "special_tokens": ["a", "b"]}, ValueError, "the minimum is 258"),
        ({"vocab_size": 2, "alphabet": "characters"}, ValueError, r"minimum is 3 \(3 characters \+ 0"),
        ({"alphabet": "letters"}, ValueError, "unknown alphabet 'letters'; known: bytes, characters"),
        ({"splitter": "gpt5"}, ValueError, "unknown splitter 'gpt5'; known: gpt2"),
        ({"special_tokens": "<|e|>"}, TypeError, r"did you mean \['<\|e\|>'\]"),
        ({"special_tokens": ["<|e|>", ""]}, ValueError, "empty string"),
        ({"special_tokens": ["<|e|>", "x", "<|e|>"]}, ValueError, r"'<\|e\|>' is listed 2 times"),
        ({"workers": 0}, ValueError, "workers is 0"),
    ],
)
def test_wrong_arguments(arguments: dict, error: type[Exception], message: str) -> None:
    """A mistake is an error of one line that names what was given and what would work."""
    with pytest.raises(error, match=message) as caught:
        train_bpe(["low"], **{"vocab_size": 300, **arguments})
    assert "\n" not in str(caught.value)


def test_paths_and_texts_give_the_same(tmp_path: Path) -> None:
    """One file per document, or the documents themselves."""
    for number, text in enumerate(ORDERS):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    assert train_bpe(sorted(tmp_path.iterdir()), 270) == train_bpe(iter(ORDERS), 270)
    assert train_bpe(str(tmp_path / "0.txt"), 260) == train_bpe(ORDERS[:1], 260)


def test_progress_counts_then_merges() -> None:
    calls = []
    train_bpe(["low low"], 258, progress=lambda *call: calls.append(call))
    assert calls == [("count", 7, None), ("merge", 1, 2), ("merge", 2, 2)]


def test_examples() -> None:
    """The examples in the docstrings."""
    assert doctest.testmod(bpe).failed == 0
