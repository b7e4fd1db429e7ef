"""Byte-pair encoding, training: learn from a corpus which neighbours to merge into one token.

Start from the base symbols (the 256 bytes). Then, again and again, merge the most frequent pair of
neighbours into a new token. Merges stay inside pre-tokens, so only the distinct ones and their counts matter:

    low 5, lower 2, newest 6         l o w   l o w e r   n e w e s t
    1. (w, e) is there 2 + 6 times   l o w   l o we r    n e we s t
    2. (l, o) is there 5 + 2 times   lo w    lo we r     n e we s t
    3. (we, s), (s, t), (n, e), (e, we) are there 6 times each: on a tie the greatest pair wins, compared as
       bytes, left part first; here (we, s)

The cost of counting all pairs anew for each merge would be merges x corpus. Two facts avoid it:

* A token comes into being in one merge, at all its places; later merges only use them up. So every pair is
  born with its greatest count, in the merge that makes the younger of its two tokens, and is counted there.
* From then on it only becomes rarer: the counts in the heap are upper bounds. The pair on top is counted
  again when it is taken; if it is still as frequent as the heap says, no other pair can beat it.

Source: Sennrich et al. 2016, arXiv:1508.07909; on bytes: Radford et al. 2019 (GPT-2).
"""

import logging
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np
from jaxtyping import Int

from clearhead.text.counting import Progress, Source, count_pretokens
from clearhead.text.pretokenize import check_splitter, mend_surrogates

ALPHABETS = ("bytes", "characters")

_log = logging.getLogger(__name__)


def train_bpe(
    source: Source,
    vocab_size: int,
    special_tokens: Sequence[str] = (),
    splitter: str = "gpt2",
    alphabet: str = "bytes",
    workers: int | None = None,
    progress: Progress | None = None,
) -> tuple[dict[int, bytes], list[tuple[bytes, bytes]]]:
    """Learn a vocabulary of `vocab_size` tokens: return (id -> bytes, merges in the order learned).

    source: a path, a list of paths, or an iterable of texts; each file or text is one document. It is read
        once, as a stream; memory follows the number of distinct pre-tokens.
    vocab_size: base symbols + merges + special tokens. Ids come in that order.
    special_tokens: texts that cut the corpus and are never merged across; one id each.
    splitter: what cuts the rest into pre-tokens; a name of `pretokenize.SPLITTERS`.
    alphabet: "bytes" starts from the 256 bytes, "characters" from the corpus's characters, ordered by
        their bytes.
    workers: processes that count pre-tokens; None takes one per core (at most 8) from 8 MB of text on.
        The result is the same for any number.
    progress: called as (stage, done, total): ("count", characters, None), then ("merge", merges, wanted).

    When the corpus has no pair left, the result has fewer merges, and one line of the log says so.
    An unknown splitter or alphabet, a special token that is empty or there twice, and a vocab_size below
    base symbols + special tokens are ValueErrors.

    >>> vocab, merges = train_bpe(["low low low low low lower lower", "newest " * 6], 256 + 3)
    >>> merges
    [(b'w', b'e'), (b'l', b'o'), (b'we', b's')]
    >>> vocab[256 + 2]
    b'wes'
    >>> train_bpe(["订单成交", "订单取消", "查询订单", "订单过期"], 11, alphabet="characters")[1][0]
    (b'\\xe8\\xae\\xa2', b'\\xe5\\x8d\\x95')
    """
    check_splitter(splitter)
    if alphabet not in ALPHABETS:
        raise ValueError(f"unknown alphabet {alphabet!r}; known: {', '.join(ALPHABETS)}")
    specials = _check_specials(special_tokens)
    if alphabet == "bytes":
        _check_size(vocab_size, 256, "bytes", len(specials))
    counts = count_pretokens(source, specials, splitter, workers, progress)
    symbols, base = _byte_symbols(counts) if alphabet == "bytes" else _character_symbols(counts)
    _check_size(vocab_size, len(base), alphabet, len(specials))
    wanted = vocab_size - len(base) - len(specials)
    strip = Strip(symbols, np.fromiter(counts.values(), np.int64, len(counts)), base, wanted)
    del counts, symbols
    merges = _learn(strip, wanted, progress)
    if len(merges) < wanted:
        _log.warning("%d of %d merges learned: the corpus has no more pairs to merge", len(merges), wanted)
    tokens = strip.tokens + [special.encode("utf-8") for special in specials]
    return dict(enumerate(tokens)), merges


def _check_specials(special_tokens: Sequence[str]) -> tuple[str, ...]:
    if isinstance(special_tokens, str):
        raise TypeError(f"special_tokens is a list of strings; did you mean [{special_tokens!r}]?")
    for special in special_tokens:
        if not isinstance(special, str):
            raise TypeError(f"special token {special!r} is of type {type(special).__name__}, not str")
    specials = tuple(map(mend_surrogates, special_tokens))
    if "" in specials:
        raise ValueError("a special token is the empty string; it would match everywhere")
    for special in specials:
        if specials.count(special) > 1:
            raise ValueError(f"special token {special!r} is listed {specials.count(special)} times")
    return specials


def _check_size(vocab_size: int, n_base: int, alphabet: str, n_specials: int) -> None:
    if vocab_size < n_base + n_specials:
        least = f"{n_base + n_specials} ({n_base} {alphabet} + {n_specials} special tokens)"
        raise ValueError(f"vocab_size {vocab_size} is too small; the minimum is {least}")


def _learn(strip: "Strip", wanted: int, progress: Progress | None) -> list[tuple[bytes, bytes]]:
    merges = []
    while len(merges) < wanted:
        best = strip.most_frequent_pair()
        if best is None:
            break
        left, right, where = best
        merges.append((strip.tokens[left], strip.tokens[right]))
        strip.merge(left, right, where)
        if progress is not None:
            progress("merge", len(merges), wanted)
    return merges


# The pre-tokens as arrays: base symbol ids, with -1 before, between and after the pre-tokens


def _byte_symbols(pretokens: dict[str, int]) -> tuple[Int[np.ndarray, " slots"], list[bytes]]:
    wall = b"\xff"  # a byte that UTF-8 never has
    joined = wall + b"".join(pretoken.encode("utf-8") + wall for pretoken in pretokens)
    symbols = np.frombuffer(joined, np.uint8).astype(_id_type(len(joined)))
    symbols[symbols == wall[0]] = -1
    return symbols, [bytes([byte]) for byte in range(256)]


def _character_symbols(pretokens: dict[str, int]) -> tuple[Int[np.ndarray, " slots"], list[bytes]]:
    wall = "\ud800"  # half of a pair: mended texts have none
    joined = wall + "".join(pretoken + wall for pretoken in pretokens)
    codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
    is_wall = codes == ord(wall)
    alphabet = np.unique(codes[~is_wall])  # by code point, which is also the order of their UTF-8 bytes
    symbols = np.searchsorted(alphabet, codes).astype(_id_type(len(codes)))
    symbols[is_wall] = -1
    return symbols, [chr(code).encode("utf-8") for code in alphabet]


def _id_type(n_slots: int) -> type[np.signedinteger]:
    return np.int32 if n_slots < 2**31 else np.int64


class Strip:
    """All distinct pre-tokens on one strip, one slot per base symbol, and a heap of the pairs on it.

    `first[i]` is the token that begins at slot i and `last[i]` the token that ends there; -1 is none, or a
    wall between pre-tokens. A token covers as many slots as it has base symbols, so its neighbours are found
    without pointers: the token at slot i is followed by `first[i + length]` and preceded by `last[i - 1]`.

        slot     0   1    2   3    4   5   6   7     two words that occur 5 and 2 times, after (l, o):
        text     |   l    o   w    |   l   o   |
        first   -1   lo  -1   w   -1   lo -1  -1     where no token begins any more there is -1
        last    -1   l    lo  w   -1   l   lo -1     where no token ends any more nobody looks
        weight   5   5    5   5    2   2   2
    """

    def __init__(
        self,
        symbols: Int[np.ndarray, " slots"],
        counts: Int[np.ndarray, " words"],
        base: list[bytes],
        wanted: int,
    ):
        self.first, self.last = symbols, symbols.copy()
        walls = np.flatnonzero(symbols < 0)
        self.weight = np.repeat(counts, np.diff(walls))  # of each slot: how often its pre-token occurs
        self.tokens = list(base)
        self.length = np.ones(len(base) + min(wanted, len(symbols)), symbols.dtype)  # in slots
        self.order = [_greatest_first(token) for token in base]
        self.heap: list[tuple] = []
        self.floor = 0

    def most_frequent_pair(self) -> tuple[int, int, Int[np.ndarray, " places"]] | None:
        """Take the pair to merge next off the heap: its two tokens and the slots where it begins.

        None when no two tokens are neighbours any more.
        """
        while True:
            if not self.heap:
                self._refill()
            if not self.heap:
                return None
            negative_count, *_, left, right, where = heappop(self.heap)
            where = where[self.first[where] == left]
            where = where[self.first[where + self.length[left]] == right]
            count = int(self.weight[where].sum())
            if count == -negative_count:
                return left, right, where
            self._push(count, left, right, where)

    def merge(self, left: int, right: int, where: Int[np.ndarray, " places"]) -> None:
        """Make one token of every `left` that begins in `where` and the `right` after it."""
        new = len(self.tokens)
        if left == right:
            where = _every_other(where, int(self.length[left]))
        middle = where + self.length[left]
        end = middle + self.length[right]
        self.first[where], self.first[middle], self.last[end - 1] = new, -1, new
        self.tokens.append(self.tokens[left] + self.tokens[right])
        self.order.append(_greatest_first(self.tokens[new]))
        self.length[new] = self.length[left] + self.length[right]

        before, after = self.last[where - 1], self.first[end]
        has_before = before >= 0
        has_after = (after >= 0) & (after != new)  # of two new ones side by side the second counts the pair
        before, after = before[has_before], after[has_after]
        self._push_all(
            np.concatenate([before, np.full_like(after, new)]),
            np.concatenate([np.full_like(before, new), after]),
            np.concatenate([where[has_before] - self.length[before], where[has_after]]),
        )

    def _refill(self) -> None:
        """Count all pairs; the heap gets those with at least 1/16 of the greatest count.

        Rarer ones, by far the most, cost neither time nor memory until the heap is empty and they are due.
        """
        where = np.flatnonzero(self.first >= 0).astype(self.first.dtype)
        left = self.first[where]
        right = self.first[where + self.length[left]]
        is_pair = right >= 0
        self.floor = 0
        self._push_all(left[is_pair], right[is_pair], where[is_pair])

    def _push_all(
        self,
        left: Int[np.ndarray, " places"],
        right: Int[np.ndarray, " places"],
        where: Int[np.ndarray, " places"],
    ) -> None:
        """Group `where`, the slots at which the pairs (left, right) begin, by pair; push each pair once."""
        if not len(where):
            return
        pair = left.astype(np.int64) * len(self.tokens) + right
        by_pair = np.argsort(pair, kind="stable")  # stable: the slots of a pair stay in their order
        pair, where = pair[by_pair], where[by_pair]
        starts = np.flatnonzero(np.concatenate([[True], pair[1:] != pair[:-1]]))
        counts = np.add.reduceat(self.weight[where], starts)
        ends = np.append(starts[1:], len(where))
        if not self.floor:
            self.floor = max(1, int(counts.max()) // 16)
        for group in np.flatnonzero(counts >= self.floor).tolist():
            start = starts[group]
            left_id, right_id = divmod(int(pair[start]), len(self.tokens))
            self._push(int(counts[group]), left_id, right_id, where[start : ends[group]])

    def _push(self, count: int, left: int, right: int, where: Int[np.ndarray, " places"]) -> None:
        if count >= self.floor:
            heappush(self.heap, (-count, self.order[left], self.order[right], left, right, where))


def _greatest_first(token: bytes) -> str:
    """Return a key that sorts tokens from the greatest to the least: bytes turned over, and an end above all.

    >>> sorted([b"a", b"b", b"ba", b"ab"], key=_greatest_first)
    [b'ba', b'b', b'ab', b'a']
    """
    return "".join(chr(255 - byte) for byte in token) + chr(256)


def _every_other(where: Int[np.ndarray, " places"], step: int) -> Int[np.ndarray, " kept"]:
    """Of pairs that overlap (aaa has two of aa) keep those that merging from left to right takes.

    >>> _every_other(np.array([1, 2, 3, 7, 8]), step=1)
    array([1, 3, 7])
    """
    number = np.arange(len(where))
    begins_run = np.ones(len(where), bool)
    begins_run[1:] = np.diff(where) != step
    run_start = np.maximum.accumulate(np.where(begins_run, number, 0))
    return where[(number - run_start) % 2 == 0]
