"""How right predictions are: accuracy, F1, exact match, entities, BLEU and chrF.

    precision = hits / predicted      recall = hits / wanted      F1 = 2 hits / (predicted + wanted)

    macro F1   the mean of F1 over the labels that occur, each label counting alike
    micro F1   F1 of hits, predicted and wanted summed over the labels

F1 of nothing predicted and nothing wanted is 0. Answers are compared as in SQuAD (Rajpurkar et al. 2016,
arXiv:1606.05250): lower case, without punctuation and articles. Entities follow CoNLL's evaluation (Tjong Kim
Sang and De Meulder 2003): one counts only when its kind and both ends are right. BLEU and chrF are
sacrebleu's (Post 2018, arXiv:1804.08771), so that they can be compared with published ones.
"""

import re
import string
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from types import ModuleType
from typing import Literal, NamedTuple

Label = str | int
Labels = Label | Collection[Label]  # one, or all that fit
Entity = tuple[str, int, int]  # kind, first word, last word

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


class Hits(NamedTuple):
    """What was found, what was said to be there, what is there.

    >>> round(Hits(2, 3, 4).f1, 4)
    0.5714
    """

    hits: int
    predicted: int
    wanted: int

    @property
    def precision(self) -> float:
        """The share of what was said that is right; 0 if nothing was said."""
        return self.hits / self.predicted if self.predicted else 0.0

    @property
    def recall(self) -> float:
        """The share of what is there that was found; 0 if nothing is there."""
        return self.hits / self.wanted if self.wanted else 0.0

    @property
    def f1(self) -> float:
        """The harmonic mean of both."""
        both = self.predicted + self.wanted
        return 2 * self.hits / both if both else 0.0


# -------------------------------------------------------------------------------------------------- labels


def accuracy(predicted: Sequence[Labels], wanted: Sequence[Labels]) -> float:
    """The share of examples whose label is right, or whose labels are exactly the right ones.

    >>> accuracy(["cat", "dog", "cat"], ["cat", "cat", "cat"])
    0.6666666666666666
    """
    _check_lengths(predicted, wanted)
    right = sum(_as_set(one) == _as_set(other) for one, other in zip(predicted, wanted, strict=True))
    return right / len(wanted)


def f1(
    predicted: Sequence[Labels], wanted: Sequence[Labels], average: Literal["macro", "micro"] = "macro"
) -> float:
    """F1 over the labels that occur; an example has one label, or a set of them.

    With one label per example the micro F1 is the accuracy.

    >>> f1(["cat", "dog", "cat"], ["cat", "cat", "cat"], "macro")
    0.4
    """
    if average not in ("macro", "micro"):
        raise ValueError(f"average={average!r} is unknown; choose macro or micro")
    counts = count_labels(predicted, wanted).values()
    if average == "micro":
        return Hits(*(sum(column) for column in zip(*counts, strict=True))).f1 if counts else 0.0
    return sum(count.f1 for count in counts) / max(len(counts), 1)


def count_labels(predicted: Sequence[Labels], wanted: Sequence[Labels]) -> dict[Label, Hits]:
    """Hits, predictions and examples of every label that was predicted or wanted."""
    _check_lengths(predicted, wanted)
    hits: Counter[Label] = Counter()
    said: Counter[Label] = Counter()
    there: Counter[Label] = Counter()
    for one, other in zip(map(_as_set, predicted), map(_as_set, wanted), strict=True):
        said.update(one)
        there.update(other)
        hits.update(one & other)
    return {label: Hits(hits[label], said[label], there[label]) for label in {**there, **said}}


def _as_set(labels: Labels) -> set[Label]:
    return {labels} if isinstance(labels, str | int) else set(labels)


# ------------------------------------------------------------------------------------------------- answers


def plain_answer(text: str) -> str:
    """A text as answers are compared: lower case, no punctuation, no articles, single blanks.

    >>> plain_answer("The  Eiffel Tower, (Paris)!")
    'eiffel tower paris'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def exact_match(answer: str, right: Sequence[str]) -> float:
    """1 if the answer is one of the right ones, else 0. No right ones: the right answer is "" (none)."""
    return float(any(plain_answer(answer) == plain_answer(text) for text in right or [""]))


def token_f1(answer: str, right: Sequence[str]) -> float:
    """F1 of the answer's words against the right answer that it is nearest to.

    >>> token_f1("in the old Eiffel Tower", ["the Eiffel Tower", "Paris"])
    0.6666666666666666
    """
    return max(_word_f1(plain_answer(answer).split(), plain_answer(text).split()) for text in right or [""])


def _word_f1(one: list[str], other: list[str]) -> float:
    if not one or not other:
        return float(one == other)
    return Hits((Counter(one) & Counter(other)).total(), len(one), len(other)).f1


# ------------------------------------------------------------------------------------------------ entities


def entities(tags: Sequence[str]) -> list[Entity]:
    """The entities that a sentence's tags name: kind, first and last word, in order.

    Tags are "O", or a kind behind B- (begins), I- (inside), E- (ends) or S- (a single word). One also begins
    where I- or E- stands without a beginning of its kind, as in CoNLL's own evaluation.

    >>> entities(["B-PER", "I-PER", "O", "I-LOC", "B-LOC"])
    [('PER', 0, 1), ('LOC', 3, 3), ('LOC', 4, 4)]
    """
    found: list[Entity] = []
    kind, begun = "", 0  # of the entity that is open; "": none
    for place, tag in enumerate([*tags, "O"]):
        mark, _, named = tag.partition("-")
        if mark not in ("O", "B", "I", "E", "S") or (mark == "O") != (not named):
            raise ValueError(f"{tag!r:.60} is no tag; tags are O, or B-, I-, E- or S- and a kind")
        if kind and (mark in "OBS" or named != kind):
            found.append((kind, begun, place - 1))
            kind = ""
        if mark != "O" and not kind:
            kind, begun = named, place
        if mark in "ES":
            found.append((kind, begun, place))
            kind = ""
    return found


def entity_hits(predicted: Iterable[Sequence[str]], wanted: Iterable[Sequence[str]]) -> Hits:
    """Entities found, said and there, over sentences of tags. Sentences that differ in length: ValueError."""
    total = Hits(0, 0, 0)
    for number, (one, other) in enumerate(zip(predicted, wanted, strict=True)):
        if len(one) != len(other):
            raise ValueError(f"sentence {number}: {len(one)} tags predicted for {len(other)} words")
        said, there = set(entities(one)), set(entities(other))
        total = Hits(total.hits + len(said & there), total.predicted + len(said), total.wanted + len(there))
    return total


def entity_f1(predicted: Iterable[Sequence[str]], wanted: Iterable[Sequence[str]]) -> float:
    """F1 over the entities of all sentences together."""
    return entity_hits(predicted, wanted).f1


# --------------------------------------------------------------------------------------------- translations


def bleu(
    translations: Sequence[str],
    references: Sequence[str | Sequence[str]],
    tokenize: Literal["13a", "intl", "zh", "char", "none"] = "13a",
) -> float:
    """BLEU of a whole test set, 0 to 100, as sacrebleu computes it (with exponential smoothing).

    `references`: one text for each translation, or as many for each. `tokenize`: how a text is cut into
    words; zh or char for writing without blanks.
    """
    streams = _streams(translations, references)
    return _sacrebleu().corpus_bleu(list(translations), streams, force=True, tokenize=tokenize).score


def chrf(translations: Sequence[str], references: Sequence[str | Sequence[str]]) -> float:
    """chrF of a whole test set, 0 to 100: F2 of character 1- to 6-grams (Popović 2015), sacrebleu's chrF2."""
    return _sacrebleu().corpus_chrf(list(translations), _streams(translations, references)).score


def _streams(translations: Sequence[str], references: Sequence[str | Sequence[str]]) -> list[list[str]]:
    """References as sacrebleu takes them: all the first ones, all the second ones, ..."""
    _check_lengths(translations, references)
    each = [[texts] if isinstance(texts, str) else list(texts) for texts in references]
    if min(map(len, each)) < 1 or max(map(len, each)) != min(map(len, each)):
        raise ValueError(
            f"translations have between {min(map(len, each))} and {max(map(len, each))} references; "
            "give each the same number, at least one"
        )
    return [list(stream) for stream in zip(*each, strict=True)]


def _sacrebleu() -> ModuleType:
    try:
        import sacrebleu
    except ImportError:
        raise ValueError("BLEU and chrF need sacrebleu: pip install 'clearhead[scores]'") from None
    return sacrebleu


def _check_lengths(predicted: Sequence[object], wanted: Sequence[object]) -> None:
    if len(predicted) != len(wanted) or not predicted:
        raise ValueError(
            f"{len(predicted)} predictions and {len(wanted)} right answers: give as many, at least one"
        )
