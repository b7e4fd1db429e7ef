"""What a model is shown besides running text: one dataclass per form of example, and how they are split.

    Pair        a text and its counterpart         translation, sentence vectors
    Labelled    a text (or two) and its label      classes, several labels, a number
    Tagged      words, each with a tag             names of people, parts of speech
    Question    a question about a text            the answer is a piece of the text
    Chat        a conversation                     the answers in it are learned

`place` says where an example came from, as file:line, for messages; it is no part of the example's value.

As with documents, which examples are kept for validation is a function of their content alone: one in twenty,
by its hash. Questions about the same text stay together.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from clearhead.text.corpus import is_validation

Label = str | float | tuple[str, ...]
"""A class, a number, or the names of all labels that apply."""


@dataclass(frozen=True)
class Pair:
    """A text and its counterpart: its translation, or another text that means the same."""

    source: str
    target: str
    place: str = field(default="", compare=False)


@dataclass(frozen=True)
class Labelled:
    """A text, or two, with a label; None where it is asked for."""

    text: str
    label: Label | None = None
    second: str | None = None
    place: str = field(default="", compare=False)


@dataclass(frozen=True)
class Tagged:
    """Words, each with its tag; no tags where they are asked for."""

    words: tuple[str, ...]
    tags: tuple[str, ...] | None = None
    place: str = field(default="", compare=False)


@dataclass(frozen=True)
class Question:
    """A question about `context`; each answer is a piece of it: (where it starts, its text). None: no answer
    is there.
    """

    context: str
    question: str
    answers: tuple[tuple[int, str], ...] = ()
    id: str = ""
    place: str = field(default="", compare=False)


@dataclass(frozen=True)
class Chat:
    """A conversation: messages with a "role" and a "content"."""

    messages: tuple[Mapping[str, Any], ...]
    place: str = field(default="", compare=False)


Example = Pair | Labelled | Tagged | Question | Chat
SomeExample = TypeVar("SomeExample", Pair, Labelled, Tagged, Question, Chat)


def content(example: Example) -> str:
    """Return the text by which an example goes to training or validation: what the model is given.

    >>> content(Labelled("good", "yes")), content(Pair("gut", "good"))
    ('good', 'gut')
    """
    if isinstance(example, Pair):
        return example.source
    if isinstance(example, Labelled):
        return example.text if example.second is None else f"{example.text}\t{example.second}"
    if isinstance(example, Tagged):
        return " ".join(example.words)
    if isinstance(example, Question):
        return example.context
    return json.dumps(list(example.messages), ensure_ascii=False, sort_keys=True)


def split_examples(examples: Sequence[SomeExample]) -> tuple[list[SomeExample], list[SomeExample]]:
    """Return the examples for training and those for validation; ValueError if one of the two is empty."""
    train, validation = [], []
    for example in examples:
        (validation if is_validation(content(example)) else train).append(example)
    if not train or not validation:
        side = "validation" if train else "training"
        raise ValueError(
            f"{len(examples)} example{'s are' if len(examples) > 1 else ' is'} too few, or too often the "
            f"same: the hash of their content, which sends one in twenty to validation, leaves none for "
            f"{side}; give a validation file of its own as data.validation"
        )
    return train, validation


def label_names(examples: Sequence[Labelled | Tagged]) -> list[str]:
    """Return the labels or tags of `examples`, each once, in order; whole numbers in theirs.

    >>> label_names([Labelled("a", "10"), Labelled("b", "9")])
    ['9', '10']

    Numbers among them, labels mixed with lists of labels, or fewer than two of them are a ValueError.
    """
    found: set[str] = set()
    kinds: dict[str, str] = {}  # kind -> place of the first
    for example in examples:
        names, kind = _names(example)
        kinds.setdefault(kind, example.place)
        found.update(names)
    if len(kinds) > 1:
        both = " and ".join(f"{kind} ({place})" for kind, place in kinds.items())
        raise ValueError(f"the labels are of two kinds, {both}; give all examples the same")
    if "a number" in kinds:
        raise ValueError(f"{kinds['a number']}: the label is a number, not the name of a class")
    if len(found) < 2:
        only = repr(next(iter(found))) if found else "nothing"
        raise ValueError(f"the {len(examples)} examples have one label, {only}; learning needs two")
    return sorted(found, key=_order)


def _names(example: Labelled | Tagged) -> tuple[Sequence[str], str]:
    label = example.label if isinstance(example, Labelled) else example.tags
    if label is None:
        return (), "no label"
    if isinstance(label, tuple):
        return label, "a list"
    return ((label,), "a word") if isinstance(label, str) else ((), "a number")


def _order(name: str) -> tuple[float, str]:
    whole = name.isascii() and name.removeprefix("-").isdecimal() and len(name) < 16
    return (float(name), name) if whole else (math.inf, name)


def check_labels(examples: Sequence[Labelled | Tagged], names: Sequence[str]) -> None:
    """Raise ValueError for the first label that is not among `names`, saying where it stands."""
    known = set(names)
    for example in examples:
        for name in _names(example)[0]:
            if name not in known:
                listed = ", ".join(map(repr, names[:8])) + (", ..." if len(names) > 8 else "")
                raise ValueError(
                    f"{example.place}: label {name!r} is none of the {len(names)} of the training examples: "
                    f"{listed}"
                )


def majority(examples: Sequence[Labelled | Tagged]) -> tuple[str, float]:
    """Return the most frequent label and its share of all: what guessing reaches.

    >>> majority([Tagged(("a", "b", "c"), ("X", "Y", "X"))])
    ('X', 0.6666666666666666)
    """
    counts = Counter(name for example in examples for name in _names(example)[0])
    if not counts:
        raise ValueError("the examples have no labels with names")
    best = max(counts, key=lambda name: (counts[name], name))
    return best, counts[best] / counts.total()
