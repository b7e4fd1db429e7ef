"""The heart of BPE encoding: merge the symbols of one pre-token, the lowest rank first.

Training learned an ordered list of merges. Encoding replays it: of all neighbouring pairs, the one that was
learned first is merged, the leftmost of equals, until no pair is left that was learned. With the merges
u+g (rank 0), p+ug (rank 1), h+ug (rank 2):

    h u g s      the only learned pair is u+g
    h ug s       now h+ug is one
    hug s        nothing more: two tokens

Looking through all pairs for each merge takes time n^2, which is quickest for a word and hopeless for a
megabyte of one letter. A long pre-token keeps its symbols in a linked list, so that a merge touches only two
neighbours, and the places of each learned pair in a list of their own, the ranks in a heap: linear time.

Source: Sennrich et al. 2016, arXiv:1508.07909.
"""

from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import pairwise

_NEVER = 1 << 62  # the rank of a pair that was never learned
_SHORT = 50  # symbols up to which looking through all pairs is the faster way


def merge(symbols: list[int], ranks: Mapping[tuple[int, int], int], made: Sequence[int]) -> list[int]:
    """Merge `symbols` as far as the learned pairs allow.

    `ranks[left, right]` is the place of a pair in the list of merges, `made[rank]` the symbol it becomes.

    >>> h, u, g, s, p, ug, pug, hug = range(8)
    >>> merge([h, u, g, s], {(u, g): 0, (p, ug): 1, (h, ug): 2}, [ug, pug, hug]) == [hug, s]
    True
    """
    return (merge_short if len(symbols) <= _SHORT else merge_long)(symbols, ranks, made)


def merge_short(symbols: list[int], ranks: Mapping[tuple[int, int], int], made: Sequence[int]) -> list[int]:
    """`merge` by looking through all pairs each time."""
    symbols, rank_of = list(symbols), ranks.get
    waiting = [rank_of(pair, _NEVER) for pair in pairwise(symbols)]  # waiting[i]: symbols i and i + 1
    while waiting and (rank := min(waiting)) != _NEVER:
        i = waiting.index(rank)
        symbols[i : i + 2] = [made[rank]]
        del waiting[i]
        if i > 0:
            waiting[i - 1] = rank_of((symbols[i - 1], symbols[i]), _NEVER)
        if i < len(waiting):
            waiting[i] = rank_of((symbols[i], symbols[i + 1]), _NEVER)
    return symbols


def merge_long(symbols: list[int], ranks: Mapping[tuple[int, int], int], made: Sequence[int]) -> list[int]:
    """`merge` with a linked list of symbols, the places of each learned pair, and a heap of their ranks."""
    symbols, rank_of, n = list(symbols), ranks.get, len(symbols)
    before, after = list(range(-1, n - 1)), list(range(1, n + 1))
    places: dict[int, list[int]] = {}  # rank -> where the pair's left symbol stood when it was seen
    for i, pair in enumerate(pairwise(symbols)):
        if (rank := rank_of(pair)) is not None:
            places.setdefault(rank, []).append(i)
    heap, unsorted = list(places), set(places)
    heapify(heap)
    while heap:
        rank = heap[0]
        todo = places[rank]
        if rank in unsorted:
            todo.sort(reverse=True)  # the leftmost last, to be taken first; costs little when nearly in order
            unsorted.remove(rank)
        while todo and heap[0] == rank:  # a merge may make a pair of a lower rank: that goes first
            i = todo.pop()
            j = after[i]
            if j == n or rank_of((symbols[i], symbols[j])) != rank:
                continue  # one of the two symbols has been merged since
            symbols[i], symbols[j] = made[rank], -1  # -1 pairs with nothing
            after[i] = k = after[j]
            if k < n:
                before[k] = i
            for left, right in ((before[i], i), (i, k)):
                if left < 0 or right == n or (new := rank_of((symbols[left], symbols[right]))) is None:
                    continue
                if new not in places:
                    places[new] = []
                    heappush(heap, new)
                places[new].append(left)
                unsorted.add(new)
        if not todo and heap[0] == rank:
            del places[heappop(heap)]
    return [symbol for symbol in symbols if symbol >= 0]
