"""The loss: equal to torch and to its formula, exact under any cut of a batch, finite where torch is not."""

import doctest
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clearhead.training import objectives
from clearhead.training.objectives import cross_entropy, token_loss


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
    seed=st.integers(0, 99),
)
def test_value_and_gradient_equal_torch_for_any_leading_dimensions(lead, vocab, scale, ignored, seed):
    """Sums, single losses and gradients equal torch's kernel, whatever the shape, scale and share ignored."""
    source = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(*lead, vocab, generator=source)).requires_grad_()
    targets = torch.randint(vocab, lead, generator=source)
    targets = targets.masked_fill(torch.rand(lead, generator=source) < ignored, -100)
    flat = logits.reshape(-1, vocab), targets.reshape(-1)
    for reduction in ("sum", "none"):
        ours = cross_entropy(logits, targets, reduction=reduction)
        theirs = F.cross_entropy(*flat, reduction=reduction)
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


def test_gradient_is_softmax_minus_onehot():
    """The hand-written gradient equals finite differences in float64, and so does the second derivative."""
    torch.manual_seed(2)
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([5, -100, 0, 3])

    def losses(o: Tensor) -> Tensor:
        return cross_entropy(o, targets, reduction="none")

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
