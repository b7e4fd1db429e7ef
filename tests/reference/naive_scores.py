"""Dull twins of the scores: label by label, word by word, straight from their definitions."""

import re
import string


def naive_f1(predicted: list[set[str]], wanted: list[set[str]], label: str) -> float:
    """F1 of one label, through precision and recall."""
    both = sum(label in one and label in other for one, other in zip(predicted, wanted, strict=True))
    said = sum(label in one for one in predicted)
    there = sum(label in other for other in wanted)
    precision = both / said if said else 0.0
    recall = both / there if there else 0.0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def naive_macro(predicted: list[set[str]], wanted: list[set[str]]) -> float:
    """The mean over the labels that occur."""
    labels = set().union(*predicted, *wanted)
    return sum(naive_f1(predicted, wanted, label) for label in labels) / len(labels) if labels else 0.0


def naive_micro(predicted: list[set[str]], wanted: list[set[str]]) -> float:
    """F1 of the pairs (example, label)."""
    said = {(n, label) for n, labels in enumerate(predicted) for label in labels}
    there = {(n, label) for n, labels in enumerate(wanted) for label in labels}
    if not said or not there:
        return 0.0
    precision, recall = len(said & there) / len(said), len(said & there) / len(there)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def naive_answer_f1(answer: str, right: str) -> float:
    """F1 of words: each word of the right answer can be hit once."""

    def words(text: str) -> list[str]:
        text = "".join(c for c in text.lower() if c not in string.punctuation)
        return [word for word in re.split(r"\s+", text) if word and word not in ("a", "an", "the")]

    one, other = words(answer), words(right)
    if not one or not other:
        return float(one == other)
    left, hits = list(other), 0
    for word in one:
        if word in left:
            left.remove(word)
            hits += 1
    if not hits:
        return 0.0
    precision, recall = hits / len(one), hits / len(other)
    return 2 * precision * recall / (precision + recall)


def naive_entities(tags: list[str]) -> set[tuple[str, int, int]]:
    """Every stretch (first, last) of which the rules say that an entity begins, goes on and ends there."""

    def begins(n: int) -> bool:
        mark, kind = tags[n][0], tags[n][2:]
        if mark == "O":
            return False
        if n == 0 or mark in "BS" or tags[n - 1][0] in "OES":
            return True
        return tags[n - 1][2:] != kind

    found = set()
    for first in range(len(tags)):
        if not begins(first):
            continue
        last = first
        while last + 1 < len(tags) and tags[last + 1] != "O" and not begins(last + 1):
            last += 1
        found.add((tags[first][2:], first, last))
    return found
