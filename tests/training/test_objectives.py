"""The loss: equal to torch and to its formula, exact under any cut of a batch, finite where torch is not."""

import doctest
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clearhead.training import objectives
from clearhead.training.objectives import (
    contrastive_loss,
    cross_entropy,
    label_loss,
    shift_right,
    span_loss,
    squared_error,
    token_loss,
)


def by_formula(logits: Tensor, targets: Tensor) -> Tensor:
    """The dull twin: shift by the maximum, exponentiate, sum, take the logarithm; one row at a time."""
    losses = []
    for row, target in zip(logits.flatten(0, -2).double(), targets.flatten().tolist(), strict=True):
        shifted = row - row.max()
        losses.append(shifted.exp().sum().log() - shifted[target])
    return torch.stack(losses).view(targets.shape)


def gradient_of(loss: Tensor, leaf: Tensor) -> Tensor:
    (gradient,) = torch.autograd.grad(loss, leaf)
    return gradient


def test_cross_entropy():
    """The course's test: equal to torch on (8, 5) logits, and on 1000 times those without overflow."""
    torch.manual_seed(0)
    logits, targets = torch.rand(8, 5), torch.tensor([1, 0, 2, 2, 4, 1, 4, 0])
    for scale in (1, 1000):
        ours, theirs = cross_entropy(logits * scale, targets), F.cross_entropy(logits * scale, targets)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(
    lead=st.lists(st.integers(0, 4), min_size=0, max_size=3),
    vocab=st.integers(1, 40),
    scale=st.sampled_from([0.1, 1.0, 30.0, 1000.0]),
    ignored=st.sampled_from([0.0, 0.4, 1.0]),
    smoothing=st.sampled_from([0.0, 0.1, 1.0]),
    seed=st.integers(0, 99),
)
def test_value_and_gradient_equal_torch_for_any_leading_dimensions(
    lead, vocab, scale, ignored, smoothing, seed
):
    """Sums, single losses and gradients equal torch's kernel, whatever the shape, scale and share ignored."""
    source = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(*lead, vocab, generator=source)).requires_grad_()
    targets = torch.randint(vocab, lead, generator=source)
    targets = targets.masked_fill(torch.rand(lead, generator=source) < ignored, -100)
    flat = logits.reshape(-1, vocab), targets.reshape(-1)
    for reduction in ("sum", "none"):
        ours = cross_entropy(logits, targets, reduction=reduction, label_smoothing=smoothing)
        theirs = F.cross_entropy(*flat, reduction=reduction, label_smoothing=smoothing)
        torch.testing.assert_close(ours.reshape(theirs.shape), theirs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            gradient_of(ours.sum(), logits), gradient_of(theirs.sum(), logits), rtol=1e-4, atol=1e-5
        )


def test_equals_the_formula_written_out():
    """Row by row in float64: logsumexp(o) - o[target]."""
    torch.manual_seed(1)
    logits, targets = 5 * torch.randn(3, 4, 17), torch.randint(17, (3, 4))
    ours = cross_entropy(logits.double(), targets, reduction="none")
    torch.testing.assert_close(ours, by_formula(logits, targets), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradient_is_softmax_minus_onehot(smoothing):
    """The hand-written gradient equals finite differences in float64, and so does the second derivative."""
    torch.manual_seed(2)
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([5, -100, 0, 3])

    def losses(o: Tensor) -> Tensor:
        return cross_entropy(o, targets, reduction="none", label_smoothing=smoothing)

    assert torch.autograd.gradcheck(losses, logits)
    assert torch.autograd.gradgradcheck(losses, logits)


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary():
    """A model that knows nothing pays ln V nats per token."""
    loss = cross_entropy(torch.zeros(2, 3, 4096), torch.full((2, 3), 7))
    assert loss.item() == pytest.approx(8.317766, abs=1e-6)


def test_mean_leaves_ignored_targets_out():
    """The mean divides by the targets that count, with any `ignore_index`."""
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 9.0], [1.0, 3.0, 0.0]])
    kept = cross_entropy(logits[[0, 2]], torch.tensor([0, 1]))
    assert torch.equal(cross_entropy(logits, torch.tensor([0, -100, 1])), kept)
    assert torch.equal(cross_entropy(logits, torch.tensor([0, 2, 1]), ignore_index=2), kept)


@pytest.mark.parametrize("rows", [0, 3])
def test_all_ignored_is_a_connected_zero(rows):
    """Where torch's mean is NaN, ours is 0 with gradients 0, so an empty micro-batch does no harm."""
    logits = torch.randn(rows, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.full((rows,), -100))
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None and torch.equal(logits.grad, torch.zeros(rows, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype):
    """16-bit logits give the float32 loss of their values, and a 16-bit gradient."""
    torch.manual_seed(3)
    logits = torch.randn(6, 300).to(dtype).requires_grad_()
    targets = torch.randint(300, (6,))
    loss = cross_entropy(logits, targets)
    loss.backward()
    torch.testing.assert_close(loss, F.cross_entropy(logits.detach().float(), targets))
    assert loss.dtype == torch.float32
    assert logits.grad is not None and logits.grad.dtype == dtype


def test_cutting_a_batch_changes_nothing():
    """Sum and count over uneven pieces add up to the whole, where a mean of means would not."""
    torch.manual_seed(4)
    logits = torch.randn(7, 9, 13, dtype=torch.float64)
    targets = torch.randint(13, (7, 9)).masked_fill(torch.rand(7, 9) < 0.3, -100)
    targets[3] = -100
    whole, count = token_loss(logits, targets)
    pieces = [
        token_loss(o, t) for o, t in zip(logits.split([1, 2, 1, 3]), targets.split([1, 2, 1, 3]), strict=True)
    ]
    torch.testing.assert_close(sum(s for s, _ in pieces), whole, rtol=1e-14, atol=0)
    assert sum(int(c) for _, c in pieces) == int(count) == int((targets != -100).sum())
    torch.testing.assert_close(whole / count, cross_entropy(logits, targets))


@pytest.mark.parametrize("bad", [-1, 5, -99, 2**40])
def test_target_outside_the_vocabulary_is_named(bad):
    """torch answers with an index error or reads foreign memory; we name the id and the vocabulary."""
    with pytest.raises(ValueError, match=rf"target {bad} is outside the vocabulary 0\.\.4 \(1 of 3"):
        cross_entropy(torch.zeros(3, 5), torch.tensor([0, bad, 4]))


def test_mistakes_are_refused():
    """Shapes that do not fit and an unknown reduction are refused."""
    with pytest.raises((ValueError, TypeError)):
        cross_entropy(torch.zeros(2, 3, 5), torch.zeros(3, 2, dtype=torch.long))
    unknown: Any = "average"
    with pytest.raises((ValueError, TypeError)):
        cross_entropy(torch.zeros(2, 5), torch.zeros(2, dtype=torch.long), reduction=unknown)
    with pytest.raises(ValueError, match=r"label_smoothing=1\.5 must be between 0 and 1"):
        cross_entropy(torch.zeros(2, 5), torch.zeros(2, dtype=torch.long), label_smoothing=1.5)
    with pytest.raises(ValueError, match=r"outputs \(2, 3\) need as many targets, not \(2,\)"):
        squared_error(torch.zeros(2, 3), torch.zeros(2))
    with pytest.raises(ValueError, match="each of 3 rows needs its own among 2"):
        contrastive_loss(torch.ones(3, 4), torch.ones(2, 4))


def test_smoothing_worked_out():
    """Logits (0, ln 4) and target 0, e = 0.2: 0.9 of -ln 1/5 and 0.1 of -ln 4/5."""
    logits = torch.tensor([[1.0, 4.0]]).log()
    loss, count = token_loss(logits, torch.tensor([0]), label_smoothing=0.2)
    assert loss.item() == pytest.approx(0.9 * math.log(5) + 0.1 * math.log(5 / 4)) and count == 1


# ------------------------------------------------------------------------------------- labels, numbers, spans


def test_several_labels_are_decided_one_by_one():
    """-log sigmoid(o) where a label holds and -log sigmoid(-o) where not; finite at logits of 1000."""
    logits = torch.tensor([[0.0, 2.0, -1.0], [1000.0, -1000.0, 1000.0]], requires_grad=True)
    targets = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    loss, count = label_loss(logits, targets)
    by_hand = math.log(2) + math.log1p(math.exp(-2)) + math.log1p(math.exp(-1)) + 1000
    assert loss.item() == pytest.approx(by_hand) and count == 6
    torch.testing.assert_close(gradient_of(loss, logits), logits.detach().sigmoid() - targets)


def test_squared_error_of_one_number_and_of_several():
    """The mean is torch's, for a column of outputs with flat targets too."""
    torch.manual_seed(6)
    one, several = torch.randn(5, 1), torch.randn(5, 3)
    for outputs, targets in [(one, torch.randn(5)), (one, torch.randn(5, 1)), (several, torch.randn(5, 3))]:
        loss, count = squared_error(outputs, targets)
        torch.testing.assert_close(loss / count, F.mse_loss(outputs, targets.view(outputs.shape)))


def by_rows(logits: Tensor, spans: Tensor, mask: Tensor) -> tuple[float, int]:
    """The dull twin of `span_loss`: each row alone, cut to its real tokens."""
    total, count = 0.0, 0
    for row, span, real in zip(logits.double(), spans.tolist(), mask, strict=True):
        places = [place for place in range(len(real)) if real[place]]
        for side, target in enumerate(span):
            if target in places:
                scores = [row[place, side] for place in places]
                total -= torch.stack(scores).log_softmax(0)[places.index(target)].item()
                count += 1
    return total, count


@settings(deadline=None, max_examples=30)
@given(rows=st.integers(1, 4), length=st.integers(1, 7), seed=st.integers(0, 99))
def test_a_span_is_found_among_the_real_tokens(rows, length, seed):
    """Equal to every row alone; a place in the padding, beyond the row, or -100 asks for nothing."""
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, length, 2, generator=source).requires_grad_()
    lengths = torch.randint(0, length + 1, (rows, 1), generator=source)
    mask = torch.arange(length) < lengths
    spans = torch.randint(0, length + 2, (rows, 2), generator=source)
    spans = spans.masked_fill(torch.rand(rows, 2, generator=source) < 0.2, -100)
    loss, count = span_loss(logits, spans, mask)
    wanted, n = by_rows(logits.detach(), spans, mask)
    assert count == n and loss.item() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    gradient = gradient_of(loss, logits)
    assert torch.isfinite(gradient).all() and gradient[~mask].eq(0).all()
    torch.testing.assert_close(span_loss(logits, spans), span_loss(logits, spans, torch.ones_like(mask)))


# ---------------------------------------------------------------------------------- contrastive, and shifting


def one_at_a_time(one: Tensor, other: Tensor, scale: float) -> float:
    """The dull twin: for each row the softmax over all its cosines, by scalars."""
    total = 0.0
    for number, row in enumerate(one.tolist()):
        cosines = [
            sum(a * b for a, b in zip(row, candidate, strict=True))
            / (math.hypot(*row) * math.hypot(*candidate))
            for candidate in other.tolist()
        ]
        total += math.log(sum(math.exp(scale * c) for c in cosines)) - scale * cosines[number]
    return total


@pytest.mark.parametrize(("scale", "more"), [(20.0, 0), (1.0, 0), (20.0, 3)])
def test_contrastive_equals_its_dull_twin(scale, more):
    """One way and both ways, with and without more negatives; the mean is the published ranking loss.

    MultipleNegativesRankingLoss of sentence-transformers is F.cross_entropy(scale cos(a, b), arange(B)).
    """
    torch.manual_seed(7)
    one, other = torch.randn(6, 4, dtype=torch.float64), torch.randn(6 + more, 4, dtype=torch.float64)
    loss, count = contrastive_loss(one, other, scale)
    assert count == 6 and loss.item() == pytest.approx(one_at_a_time(one, other, scale), rel=1e-12)
    scores = scale * F.cosine_similarity(one[:, None], other[None], dim=-1)
    torch.testing.assert_close(loss / count, F.cross_entropy(scores, torch.arange(6)))
    both, _ = contrastive_loss(one, other, scale, symmetric=True)
    back = one_at_a_time(other[:6], one, scale)
    assert both.item() == pytest.approx((loss.item() + back) / 2, rel=1e-12)


def test_a_batch_of_one_pair_has_nothing_to_tell_apart():
    loss, count = contrastive_loss(torch.ones(1, 3), torch.ones(1, 3))
    assert loss == 0 and count == 1


def test_a_decoder_reads_what_it_is_to_say_one_later():
    """The start token comes first, the last label is never read, -100 is padding."""
    labels = torch.tensor([[5, 6, 7, 2], [8, 2, -100, -100]])
    assert shift_right(labels, 9, 1).tolist() == [[9, 5, 6, 7], [9, 8, 2, 1]]
    assert labels[1, 2] == -100


@pytest.mark.compiled
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)  # torch's own
def test_compiled_equals_eager():
    """One graph without breaks gives the eager loss and gradient."""
    torch.manual_seed(5)
    logits, targets = torch.randn(4, 6, 65, requires_grad=True), torch.randint(65, (4, 6))
    targets[0, 2] = -100

    def loss(o, t):
        return cross_entropy(2 * o, t)

    compiled = torch.compile(loss, fullgraph=True)
    torch.testing.assert_close(compiled(logits, targets), loss(logits, targets))
    torch.testing.assert_close(
        gradient_of(compiled(logits, targets), logits), gradient_of(loss(logits, targets), logits)
    )


def test_examples_in_the_docstrings():
    """The worked examples run."""
    assert doctest.testmod(objectives).failed == 0
