"""Scores equal their dull twins and sacrebleu; what cannot be compared is refused in one line."""

import builtins
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.training.scores import (
    accuracy,
    bleu,
    chrf,
    count_labels,
    entities,
    entity_f1,
    entity_hits,
    exact_match,
    f1,
    token_f1,
)
from reference.naive_scores import (
    naive_answer_f1,
    naive_entities,
    naive_f1,
    naive_macro,
    naive_micro,
)

LABELS = st.sets(st.sampled_from(["cat", "dog", "bird", "tree"]))
EXAMPLES = st.lists(st.tuples(LABELS, LABELS), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(EXAMPLES)
def test_f1_of_sets_of_labels_equals_the_twins(examples: list[tuple[set[str], set[str]]]) -> None:
    predicted, wanted = [one for one, _ in examples], [other for _, other in examples]
    assert f1(predicted, wanted, "macro") == pytest.approx(naive_macro(predicted, wanted))
    assert f1(predicted, wanted, "micro") == pytest.approx(naive_micro(predicted, wanted))
    for label, hits in count_labels(predicted, wanted).items():
        assert hits.f1 == pytest.approx(naive_f1(predicted, wanted, str(label)))
    assert accuracy(predicted, wanted) == sum(a == b for a, b in examples) / len(examples)


def test_scores_of_one_label_each_are_those_that_scikit_learn_prints() -> None:
    """The example of its manual, of `f1_score`: 0.26.. macro and 0.33.. micro."""
    wanted, predicted = [0, 1, 2, 0, 1, 2], [0, 2, 1, 0, 0, 1]
    assert f1(predicted, wanted, "macro") == pytest.approx(0.26666667)
    assert f1(predicted, wanted, "micro") == pytest.approx(accuracy(predicted, wanted)) == 1 / 3


WORDS = st.lists(st.sampled_from(["the", "a", "Tower", "tower,", "old", "Paris!", "(in)"]), max_size=6)


@settings(max_examples=60, deadline=None)
@given(WORDS, st.lists(WORDS, max_size=3))
def test_answers_equal_the_twins(answer: list[str], right: list[list[str]]) -> None:
    said, texts = " ".join(answer), [" ".join(words) for words in right]
    best = max(naive_answer_f1(said, text) for text in texts or [""])
    assert token_f1(said, texts) == pytest.approx(best)
    assert exact_match(said, texts) <= token_f1(said, texts) + 1e-12


def test_an_answer_is_right_whatever_its_case_articles_and_punctuation() -> None:
    assert exact_match("The Eiffel Tower.", ["Paris", "eiffel tower"]) == 1
    assert exact_match("Eiffel", ["Eiffel Tower"]) == 0
    assert token_f1("Eiffel", ["Eiffel Tower"]) == pytest.approx(2 / 3)
    assert (exact_match("", []), exact_match("Paris", []), token_f1("Paris", [])) == (1, 0, 0)


def test_entities_equal_the_twins() -> None:
    generator = random.Random(0)
    tags = ["O", "B-A", "I-A", "E-A", "S-A", "B-B", "I-B", "E-B"]
    for _ in range(400):
        sentence = generator.choices(tags, k=generator.randrange(9))
        assert set(entities(sentence)) == naive_entities(sentence), sentence


def test_entities_count_as_in_the_conll_evaluation() -> None:
    """A wrong end or a wrong kind is no hit; I- after another kind begins a new one."""
    wanted = [["B-PER", "I-PER", "O", "B-LOC"], ["B-ORG", "I-ORG"]]
    predicted = [["I-PER", "I-PER", "O", "B-ORG"], ["B-ORG", "O"]]
    hits = entity_hits(predicted, wanted)
    assert (hits.hits, hits.predicted, hits.wanted) == (1, 3, 3)
    assert hits.precision == hits.recall == hits.f1 == entity_f1(predicted, wanted) == 1 / 3
    with pytest.raises(ValueError, match=r"sentence 1: 1 tags predicted for 2 words"):
        entity_hits([["O"], ["O"]], [["O"], ["O", "O"]])
    with pytest.raises(ValueError, match=r"'PER' is no tag; tags are O, or B-"):
        entities(["PER"])


SAID = ["The cat sat on the mat.", "A dog barks loudly."]
RIGHT = ["The cat is on the mat.", "A dog is barking loudly."]


def test_bleu_and_chrf_are_those_of_sacrebleu() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    assert bleu(SAID, RIGHT) == sacrebleu.corpus_bleu(SAID, [RIGHT]).score
    assert chrf(SAID, RIGHT) == sacrebleu.corpus_chrf(SAID, [RIGHT]).score
    assert bleu(["订单成交了"], ["订单成交了吗"], tokenize="zh") > bleu(["订单成交了"], ["订单成交了吗"])
    several = [[one, other] for one, other in zip(RIGHT, SAID, strict=True)]
    assert bleu(SAID, several) == pytest.approx(100) == chrf(SAID, several)
    assert bleu(SAID, several) == sacrebleu.corpus_bleu(SAID, [RIGHT, SAID]).score


def test_what_cannot_be_compared_is_refused() -> None:
    for score in (accuracy, f1, bleu, chrf):
        with pytest.raises(ValueError, match=r"^2 predictions and 1 right answers"):
            score(SAID, RIGHT[:1])
        with pytest.raises(ValueError, match=r"at least one$"):
            score([], [])
    with pytest.raises(ValueError, match=r"between 1 and 2 references"):
        bleu(SAID, [RIGHT, "one"])


def test_an_average_that_is_unknown_is_refused(unchecked: None) -> None:
    options: dict[str, Any] = {"average": "weighted"}
    with pytest.raises(ValueError, match=r"average='weighted' is unknown; choose macro or micro"):
        f1(SAID, RIGHT, **options)


def test_without_sacrebleu_the_message_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "sacrebleu":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match=r"pip install 'clearhead\[scores\]'"):
        bleu(SAID, RIGHT)
