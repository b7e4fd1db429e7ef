"""Logits to token: every filter against its dull twin and against `transformers`, and the mistakes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.generation.sample import (
    Sampling,
    check_finite,
    choose,
    draw,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_repetition,
    seen_tokens,
    take_likeliest,
)
from reference.naive_decode import naive_filters, naive_penalty

# Distinct steps of 1/4, so that no sum of probabilities falls on a threshold; ties come up often.
logit_rows = st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=12)
quick = settings(max_examples=150, deadline=None)


def kept(logits: torch.Tensor) -> list[bool]:
    return logits.isfinite()[0].tolist()


@quick
@given(logit_rows, st.integers(0, 15))
def test_top_k_equals_its_twin(row: list[float], k: int) -> None:
    """A token stays when fewer than k are larger: ties with the k-th stay, k >= V and 0 keep all."""
    assert keep_top_k(torch.tensor([row]), k).tolist() == [naive_filters(row, k, 1.0, 0.0)]


@quick
@given(st.permutations([n / 4 for n in range(12)]), st.floats(0.01, 0.99))
def test_top_p_equals_its_twin(row: list[float], p: float) -> None:
    """Ascending sums and descending sums keep the same tokens (no ties here: either may stay then)."""
    assert kept(keep_top_p(torch.tensor([row]), p)) == [math.isfinite(s) for s in naive_filters(row, 0, p, 0)]


@quick
@given(logit_rows, st.sampled_from([0.0, 0.03, 0.2, 0.55, 0.97, 1.0]))
def test_min_p_equals_its_twin(row: list[float], fraction: float) -> None:
    expected = [math.isfinite(s) for s in naive_filters(row, 0, 1.0, fraction)]
    assert kept(keep_min_p(torch.tensor([row]), fraction)) == expected


@quick
@given(logit_rows, st.lists(st.integers(0, 11), max_size=30), st.sampled_from([0.5, 1.0, 1.3, 4.0]))
def test_repetition_penalty_equals_its_twin(row: list[float], tokens: list[int], penalty: float) -> None:
    """Once per token however often it occurred; divided when positive, multiplied when negative."""
    tokens = [token for token in tokens if token < len(row)]
    given = torch.tensor([tokens], dtype=torch.long)
    seen = seen_tokens(given, torch.ones_like(given, dtype=torch.bool), len(row))
    expected = torch.tensor([naive_penalty(row, set(tokens), penalty)])
    assert penalise_repetition(torch.tensor([row]), seen, penalty).allclose(expected)


def test_padding_is_not_seen() -> None:
    tokens = torch.tensor([[0, 0, 3, 1], [2, 0, 2, 1]])
    real = torch.tensor([[False, False, True, True], [True, True, True, True]])
    assert seen_tokens(tokens, real, 4).int().tolist() == [[0, 1, 0, 1], [1, 1, 1, 0]]


def test_ties_at_the_threshold_stay() -> None:
    logits = torch.tensor([[5.0, 1.0, 3.0, 3.0, 3.0]])
    assert kept(keep_top_k(logits, 2)) == [True, False, True, True, True]


@pytest.mark.parametrize("k", [0, 5, 6, 1000])
def test_top_k_of_the_whole_vocabulary_is_off(k: int) -> None:
    logits = torch.randn(2, 5)
    assert keep_top_k(logits, k).equal(logits)


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1])
def test_top_p_keeps_at_least_one_token(p: float) -> None:
    assert kept(keep_top_p(torch.tensor([[0.0, 1.0, 0.5]]), p)) == [False, True, False]


def test_filters_of_everything_change_nothing() -> None:
    logits = torch.randn(3, 7)
    assert keep_top_p(logits, 1.0).equal(logits)
    assert keep_min_p(logits, 0.0).equal(logits)
    assert penalise_repetition(logits, torch.ones(3, 7, dtype=torch.bool), 1.0).equal(logits)


def test_each_filter_equals_transformers() -> None:
    """Bit for bit on 50 random batches, ties included."""
    from transformers.generation import logits_process as theirs

    generator = torch.Generator().manual_seed(0)
    for case in range(50):
        logits = (torch.randn(4, 61, generator=generator) * 8).round() / 2
        tokens = torch.randint(0, 61, (4, 9), generator=generator)
        pads = torch.tensor([0, 3, 8, 1])
        real = torch.arange(9)[None, :] >= pads[:, None]
        k, p, m, penalty = 1 + case, (case + 1) / 52, case / 50, 0.8 + case / 25
        assert keep_top_k(logits, k).equal(theirs.TopKLogitsWarper(k)(tokens, logits))
        assert keep_top_p(logits, p).equal(theirs.TopPLogitsWarper(p)(tokens, logits))
        assert keep_min_p(logits, m).equal(theirs.MinPLogitsWarper(m)(tokens, logits))
        penalise = theirs.RepetitionPenaltyLogitsProcessor(penalty, prompt_ignore_length=pads)
        ours = penalise_repetition(logits, seen_tokens(tokens, real, 61), penalty)
        assert ours.equal(penalise(tokens, logits))


def test_the_order_is_temperature_then_top_k_then_top_p_then_min_p() -> None:
    """Each row below comes out differently in any other order of the two filters it names."""
    probabilities = torch.tensor([[0.4, 0.3, 0.2, 0.1]])

    def survivors(**options: float) -> set[int]:
        options = {"temperature": 1.0, **options}
        chosen = [
            choose(probabilities.log(), Sampling(**options), None, torch.Generator().manual_seed(s))
            for s in range(200)
        ]
        return {int(token) for token in chosen}

    # renormalised over the two that top-k leaves, 0.4 / 0.7 alone reaches 0.55
    assert survivors(top_k=2, top_p=0.55) == {0}
    assert survivors(top_p=0.55) == {0, 1}
    # hot: 0.4 and 0.3 no longer reach 0.68 together (0.325 + 0.282)
    assert survivors(top_p=0.68) == {0, 1}
    assert survivors(top_p=0.68, temperature=2.0) == {0, 1, 2}
    # min-p looks at the temperature's probabilities too: cold, 0.2 / 0.4 squares to 1/4
    assert survivors(min_p=0.45) == {0, 1, 2}
    assert survivors(min_p=0.45, temperature=0.5) == {0, 1}


def test_draws_are_multinomials_draws() -> None:
    """The same seed gives the tokens that torch.multinomial gives for the whole batch."""
    probabilities = torch.rand(5, 40).softmax(-1)
    ours = draw(probabilities, torch.Generator().manual_seed(3))
    theirs = torch.multinomial(probabilities, 1, generator=torch.Generator().manual_seed(3))
    assert ours.equal(theirs[:, 0])
    torch.manual_seed(3)
    assert draw(probabilities).equal(theirs[:, 0])


def test_a_rows_own_generator_makes_it_independent_of_its_neighbours() -> None:
    probabilities = torch.rand(6, 50).softmax(-1)
    together = draw(probabilities, [torch.Generator().manual_seed(i) for i in range(6)])
    alone = [draw(probabilities[i : i + 1], torch.Generator().manual_seed(i)) for i in range(6)]
    assert together.equal(torch.cat(alone))


def test_draws_follow_the_probabilities() -> None:
    """20,000 draws: each frequency within 5 standard deviations, and a token at 0 never comes."""
    probabilities = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05])
    drawn = draw(probabilities.expand(20_000, 5).contiguous(), torch.Generator().manual_seed(0))
    frequencies = drawn.bincount(minlength=5) / 20_000
    deviation = (probabilities * (1 - probabilities) / 20_000).sqrt()
    assert ((frequencies - probabilities).abs() <= 5 * deviation).all()


def test_greedy_takes_the_first_of_the_likeliest() -> None:
    assert take_likeliest(torch.tensor([[1.0, 3.0, 3.0], [-2.0, -5.0, -3.0]])).tolist() == [1, 0]
    assert choose(torch.tensor([[1.0, 3.0, 2.0]]), Sampling()).tolist() == [1]


def test_a_low_temperature_approaches_greedy() -> None:
    logits = torch.randn(8, 30, generator=torch.Generator().manual_seed(1))
    chosen = choose(logits, Sampling(temperature=1e-6), None, torch.Generator().manual_seed(0))
    assert chosen.equal(take_likeliest(logits))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_name_step_row_and_token(bad: float) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 4] = bad
    with pytest.raises(ValueError, match=f"logits of step 7 are not finite: {bad} for token 4 in row 1"):
        check_finite(logits, 7)


def test_large_finite_logits_are_fine() -> None:
    """Their sum overflows float32; they themselves do not."""
    logits = torch.full((2, 4), 3e38)
    check_finite(logits, 1)
    assert not logits.sum().isfinite()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be a number of at least 0"),
        ({"temperature": math.nan}, "temperature=nan must be a number of at least 0"),
        ({"temperature": math.inf}, "temperature=inf must be a number of at least 0"),
        ({"temperature": 1e-9}, "temperature=1e-09 is too small to divide by; use 0"),
        ({"temperature": 1.0, "top_k": -1}, "top_k=-1 must be at least 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p=1.5 must be a probability between 0 and 1"),
        ({"temperature": 1.0, "top_p": math.nan}, "top_p=nan must be a probability"),
        ({"temperature": 1.0, "min_p": -0.5}, "min_p=-0.5 must be a fraction between 0 and 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be a number above 0"),
        ({"repetition_penalty": math.nan}, "repetition_penalty=nan must be a number above 0"),
        ({"seed": -1}, "seed=-1 must be between 0 and"),
        ({"top_k": 5}, "top_k=5 has no effect at temperature=0"),
        ({"top_p": 0.5}, "top_p=0.5 has no effect at temperature=0"),
        ({"min_p": 0.5}, "min_p=0.5 has no effect at temperature=0"),
    ],
)
def test_mistakes_are_named_in_one_line(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Sampling(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
