r"""What happens around BPE: named steps that normalise a text before it, rows of one width after it.

Both are off unless asked for, because both lose something: normalised text decodes to the normalised form,
and the end of a truncated sentence is gone. The steps, applied in the order they are named:

    nfc            composed Unicode form: e + combining acute -> é
    nfkc           nfc, and compatibility forms become plain ones: ﬁ -> fi, ² -> 2, full width -> half width
    lowercase      every character on its own, as Hugging Face does: Σ -> σ, also at the end of a word
    strip_control  drop control characters (category Cc) other than tab, line feed and carriage return

Source: Unicode Standard Annex 15 (normalisation forms).
"""

import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import numpy as np
import regex
from jaxtyping import Bool, Int64

CONTROL = r"(?![\t\n\r])\p{Cc}"
"""The pattern of what ``strip_control`` removes, as `regex` and Oniguruma read it."""


def _lowercase(text: str) -> str:
    return text.replace("Σ", "σ").lower()  # str.lower alone makes a final Σ depend on its neighbours


STEPS: dict[str, Callable[[str], str]] = {
    "nfc": lambda text: unicodedata.normalize("NFC", text),
    "nfkc": lambda text: unicodedata.normalize("NFKC", text),
    "lowercase": _lowercase,
    "strip_control": lambda text: regex.sub(CONTROL, "", text),
}
"""Name -> function of each step."""


def check_steps(steps: Iterable[str]) -> tuple[str, ...]:
    """Return `steps` as a tuple; an unknown name is a ValueError that lists the known ones."""
    steps = tuple(steps)
    for step in steps:
        if step not in STEPS:
            raise ValueError(f"unknown normalisation step {step!r}; known: {', '.join(STEPS)}")
    return steps


def normalise(text: str, steps: Iterable[str]) -> str:
    """Return `text` after the named steps, in that order.

    >>> normalise("ﬁne CAFE\u0301", ["nfkc", "lowercase"])
    'fine café'
    """
    for step in check_steps(steps):
        text = STEPS[step](text)
    return text


def settled_prefix(text: str) -> int:
    """Return the largest n found such that ``text[:n]`` normalises the same way whatever text follows.

    A text may be cut before a character that never joins the one before it: not a combining mark, not the
    later part of a Hangul syllable (which NFKC also makes from compatibility letters), not a character
    that a step removes.

    >>> settled_prefix("cafe"), settled_prefix("cafe\u0301")
    (3, 3)
    """
    for n in range(len(text) - 1, -1, -1):
        first = unicodedata.normalize("NFKD", text[n])[0]
        joins = unicodedata.category(first)[0] == "M" or "\u1160" <= first <= "\u11ff"
        removed = unicodedata.category(text[n]) == "Cc" and text[n] not in "\t\n\r"
        if not joins and not removed:
            return n
    return 0


def pad_batch(
    rows: Sequence[Sequence[int]],
    pad_id: int,
    side: Literal["left", "right"] = "right",
    width: int | None = None,
) -> tuple[Int64[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """Return token ids as one array, short rows filled with `pad_id` at one side, and the real tokens' mask.

    T is the longest row, or `width` if that is given; a row longer than `width` is a ValueError.

    >>> ids, mask = pad_batch([[5, 6, 7], [8]], pad_id=0, side="left")
    >>> ids.tolist(), mask.tolist()
    ([[5, 6, 7], [0, 0, 8]], [[True, True, True], [False, False, True]])
    """
    if side not in ("left", "right"):
        raise ValueError(f"side is 'left' or 'right', not {side!r}")
    longest = max(map(len, rows), default=0)
    if width is not None and width < longest:
        raise ValueError(f"a row of {longest} tokens does not fit the width {width}; truncate it first")
    ids = np.full((len(rows), longest if width is None else width), pad_id, dtype=np.int64)
    mask = np.zeros(ids.shape, dtype=bool)
    for i, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(ids.shape[1] - len(row), None)
        ids[i, place] = row
        mask[i, place] = True
    return ids, mask


def frame(
    ids: Sequence[int],
    before: Sequence[int],
    after: Sequence[int],
    truncate: int | None = None,
    keep: Literal["start", "end"] = "start",
) -> list[int]:
    """Return ids between `before` and `after`, cut to `truncate` in all; `keep` tells what stays.

    >>> frame([5, 6, 7], [1], [2], truncate=4), frame([5, 6, 7], [1], [2], truncate=4, keep="end")
    ([1, 5, 6, 2], [1, 6, 7, 2])
    """
    if keep not in ("start", "end"):
        raise ValueError(f"keep is 'start' or 'end', not {keep!r}")
    if truncate is not None:
        room = truncate - len(before) - len(after)
        if room < 0:
            raise ValueError(f"truncate={truncate} is less than the {truncate - room} begin and end tokens")
        ids = ids[:room] if keep == "start" else ids[max(0, len(ids) - room) :]
    return [*before, *ids, *after]


def pad_sentences(
    rows: Sequence[Sequence[int]],
    before: Sequence[int],
    after: Sequence[int],
    pad_id: int,
    side: Literal["left", "right"] = "right",
    truncate: int | None = None,
    keep: Literal["start", "end"] = "start",
    width: int | None = None,
) -> tuple[Int64[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """Return `pad_batch` of the rows, cut to `truncate` tokens in all, between the ids `before` and `after`.

    >>> pad_sentences([[5, 6, 7], [8]], [1], [2], pad_id=0, truncate=4)[0].tolist()
    [[1, 5, 6, 2], [1, 8, 2, 0]]
    """
    framed = [frame(row, before, after, truncate, keep) for row in rows]
    return pad_batch(framed, pad_id, side, width)
