"""The elementary layers against torch, and their edges."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from clearhead.model.layers import (
    ACTIVATIONS,
    BatchNorm,
    Embedding,
    FeedForward,
    LayerNorm,
    Linear,
    RMSNorm,
    make_norm,
    silu,
    softmax,
)

shapes = st.lists(st.integers(1, 4), min_size=0, max_size=4)


@settings(deadline=None, max_examples=30)
@given(lead=shapes, bias=st.booleans())
def test_linear(lead: list[int], bias: bool) -> None:
    """y = x W^T + b for any leading dimensions, with W stored (out, in)."""
    layer, x = Linear(5, 3, bias), torch.randn(*lead, 5)
    assert layer.weight.shape == (3, 5)
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


def test_linear_takes_a_device_and_a_type() -> None:
    layer = Linear(4, 2, bias=True, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}


@settings(deadline=None, max_examples=30)
@given(lead=shapes)
def test_embedding(lead: list[int]) -> None:
    """Row i for id i, for ids of any shape."""
    table, ids = Embedding(10, 4), torch.randint(10, tuple(lead))
    assert torch.equal(table(ids), table.weight[ids])


def test_embedding_names_ids_outside_the_table() -> None:
    for ids in ([3, 10], [-1, 2]):
        with pytest.raises(ValueError, match=rf"ids from {min(ids)} to {max(ids)} .* 10 rows"):
            Embedding(10, 4)(torch.tensor(ids))
    assert Embedding(10, 4)(torch.tensor([9])).shape == (1, 4)


def test_embedding_starts_normal_and_cut_at_three() -> None:
    weight = Embedding(1000, 200).weight
    assert weight.abs().max() <= 3
    assert weight.std().item() == pytest.approx(0.988, abs=0.01)


@settings(deadline=None, max_examples=30)
@given(lead=shapes, bias=st.booleans())
def test_layernorm(lead: list[int], bias: bool) -> None:
    norm, x = LayerNorm(6, bias=bias), torch.randn(*lead, 6)
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (6,), norm.weight, norm.bias, 1e-5))


@settings(deadline=None, max_examples=30)
@given(lead=shapes)
def test_rmsnorm(lead: list[int]) -> None:
    norm, x = RMSNorm(6, eps=1e-3), torch.randn(*lead, 6)
    nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(x), F.rms_norm(x, (6,), norm.weight, 1e-3))


def test_rmsnorm_does_not_see_the_length_of_its_input() -> None:
    """RMS(10 x) = 10 RMS(x), so the result is the same, exactly when eps is 0."""
    x = torch.randn(5, 8, dtype=torch.float64)
    norm = RMSNorm(8, eps=0.0).double()
    torch.testing.assert_close(norm(10 * x), norm(x))


def test_rmsnorm_computes_in_float32() -> None:
    """In bfloat16 the squares of a long vector would lose their sum; in float16 they would overflow."""
    x = torch.full((4096,), 300.0, dtype=torch.float16)
    assert torch.equal(RMSNorm(4096).half()(x), torch.ones(4096, dtype=torch.float16))
    y = torch.randn(64, 512, dtype=torch.bfloat16)
    exact = F.rms_norm(y.float(), (512,), eps=1e-5).bfloat16()
    assert torch.equal(RMSNorm(512).bfloat16()(y), exact)


def test_batchnorm_trains_like_torch() -> None:
    """Batch statistics and running averages over several steps, then the running ones in eval."""
    ours, theirs = BatchNorm(5), nn.BatchNorm1d(5)
    for parameter, twin in zip(ours.parameters(), theirs.parameters(), strict=True):
        nn.init.normal_(parameter)
        twin.data.copy_(parameter.data)
    for _ in range(4):
        x = 3 * torch.randn(6, 7, 5) + 1  # (B, T, D); torch wants (B, D, T)
        torch.testing.assert_close(ours(x), theirs(x.transpose(1, 2)).transpose(1, 2))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    ours.eval(), theirs.eval()
    one = torch.randn(1, 5)
    torch.testing.assert_close(ours(one), theirs(one))


def test_batchnorm_has_the_gradients_of_torch() -> None:
    ours, theirs = BatchNorm(3), nn.BatchNorm1d(3)
    x = torch.randn(8, 3, requires_grad=True)
    weight = torch.randn(8, 3)
    (mine,) = torch.autograd.grad((ours(x) * weight).sum(), x)
    (reference,) = torch.autograd.grad((theirs(x) * weight).sum(), x)
    torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-4)


def test_batchnorm_needs_two_rows_to_train() -> None:
    with pytest.raises(ValueError, match=r"at least 2 rows.*got 1"):
        BatchNorm(3)(torch.randn(1, 3))


@settings(deadline=None, max_examples=50)
@given(lead=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_softmax(lead: list[int], data: st.DataObject) -> None:
    """Along any dimension as torch; never in place; unchanged by a shift."""
    dim = data.draw(st.integers(-len(lead), len(lead) - 1))
    x = 20 * torch.randn(*lead)
    before = x.clone()
    torch.testing.assert_close(softmax(x, dim), F.softmax(x, dim))
    torch.testing.assert_close(softmax(x + 100, dim), F.softmax(x, dim), atol=1e-5, rtol=1e-3)
    assert torch.equal(x, before)


def test_softmax_is_float32_inside() -> None:
    x = torch.randn(3, 1000, dtype=torch.bfloat16)
    assert torch.equal(softmax(x, -1), F.softmax(x.float(), -1).bfloat16())


def test_silu_matches_pytorch() -> None:
    x = torch.randn(4, 5)
    torch.testing.assert_close(silu(x), F.silu(x))
    torch.testing.assert_close(silu(x), x * torch.sigmoid(x))


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("silu", lambda x: x / (1 + torch.exp(-x))),
        ("gelu", lambda x: x / 2 * (1 + torch.erf(x / 2**0.5))),
        ("gelu_tanh", lambda x: x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))),
        ("relu", lambda x: x.clamp(min=0)),
        ("relu_squared", lambda x: x.clamp(min=0) ** 2),
    ],
)
def test_activations_are_their_formulas(name, formula) -> None:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    torch.testing.assert_close(ACTIVATIONS[name](x), formula(x))


def test_swiglu() -> None:
    """down(silu(gate x) * up x), with the width that was asked for."""
    ff, x = FeedForward(8, d_ff=20), torch.randn(2, 3, 8)
    gate, up, down = ff.gate.weight, ff.up.weight, ff.down.weight
    assert gate.shape == up.shape == (20, 8) and down.shape == (8, 20)
    torch.testing.assert_close(ff(x), (F.silu(x @ gate.T) * (x @ up.T)) @ down.T)


def test_feed_forward_drops_only_in_training() -> None:
    ff, x = FeedForward(8, dropout=0.5), torch.randn(50, 8)
    assert not torch.equal(ff(x), ff(x))
    ff.eval()
    assert torch.equal(ff(x), ff(x))


@pytest.mark.usefixtures("unchecked")
def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'swish' is unknown; choose one of silu, gelu"):
        FeedForward(4, activation="swish")
    with pytest.raises(ValueError, match="norm='batch' is unknown; choose one of rms, layer"):
        make_norm("batch", 4, 1e-5)


@pytest.mark.parametrize("make", [lambda: Linear(4, 4, True), lambda: FeedForward(4), lambda: BatchNorm(4)])
def test_layers_copy_and_pickle(make) -> None:
    layer, x = make(), torch.randn(6, 4)
    expected = layer.eval()(x)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x), expected)


def test_a_feed_forward_layer_is_freed_at_once() -> None:
    """A layer that held itself would keep its weights until the garbage collector comes by."""
    gc.disable()
    try:
        layer = FeedForward(4)
        weight = weakref.ref(layer.up.weight)
        del layer
        assert weight() is None
    finally:
        gc.enable()
