"""`linear` is F.linear, whichever library multiplies."""

import os
import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from clearhead.model import products
from clearhead.model.grouped import grouped_product
from clearhead.model.layers import FeedForward
from clearhead.model.products import fits, linear, onednn_is_faster, processor_maker

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN"
)


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """oneDNN is asked for every product, however small, on any machine; the shapes it was asked for."""
    asked: list[tuple[int, ...]] = []
    multiply = products._multiply

    def watched(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        asked.append((*x.shape[:-1], *weight.shape))
        return multiply(x, weight, bias)

    monkeypatch.setattr(products, "WORTH_IT", 1)
    monkeypatch.setattr(products, "onednn_is_faster", lambda maker: True)
    monkeypatch.setattr(products, "_multiply", watched)
    yield asked


def make(*batch: int, d_in: int = 24, d_out: int = 40, bias: bool = True) -> list[Tensor]:
    parts = [torch.randn(*batch, d_in), torch.randn(d_out, d_in), torch.randn(d_out)]
    return [part.requires_grad_() for part in parts[: 3 if bias else 2]]


def value_and_gradients(product: Callable[..., Tensor], parts: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    y = product(*parts)
    return [y, *torch.autograd.grad(y, parts, torch.randn_like(y))]


@needs_onednn
@given(
    batch=st.lists(st.integers(1, 5), max_size=3),
    d_in=st.integers(1, 70),
    d_out=st.integers(1, 70),
    bias=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_values_and_gradients_are_those_of_f_linear(
    batch: list[int], d_in: int, d_out: int, bias: bool
) -> None:
    parts = make(*batch, d_in=d_in, d_out=d_out, bias=bias)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "WORTH_IT", 1)
        patch.setattr(products, "onednn_is_faster", lambda maker: True)
        ours = value_and_gradients(linear, parts)
    for ours_part, theirs in zip(ours, value_and_gradients(F.linear, parts), strict=True):
        torch.testing.assert_close(ours_part, theirs, rtol=1e-5, atol=1e-5)


@needs_onednn
def test_strides_do_not_matter(everywhere: list[tuple[int, ...]]) -> None:
    x = torch.randn(24, 7, 3).permute(2, 1, 0).requires_grad_()
    weight = torch.randn(24, 40).t().requires_grad_()
    parts = [x, weight]
    for ours, theirs in zip(
        value_and_gradients(linear, parts), value_and_gradients(F.linear, parts), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert (3, 7, 40, 24) in everywhere


@needs_onednn
def test_only_what_is_asked_for_is_computed(everywhere: list[tuple[int, ...]]) -> None:
    x, weight, bias = make(6)
    linear(x.detach(), weight.detach(), bias).sum().backward()
    assert len(everywhere) == 1 and bias.grad is not None
    everywhere.clear()
    linear(x, weight.detach(), bias.detach()).sum().backward()
    assert everywhere == [(6, 40, 24), (6, 24, 40)] and weight.grad is None


@needs_onednn
def test_a_second_derivative(everywhere: list[tuple[int, ...]]) -> None:
    def penalty(product: Callable[..., Tensor], parts: list[Tensor]) -> list[Tensor]:
        (slope,) = torch.autograd.grad(product(*parts).tanh().sum(), parts[0], create_graph=True)
        return list(torch.autograd.grad(slope.square().sum(), parts))

    parts = make(6)
    for ours, theirs in zip(penalty(linear, parts), penalty(F.linear, parts), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@needs_onednn
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # PyTorch's own forward mode
def test_transformed_and_narrow_products_stay_with_f_linear(
    everywhere: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = make(6)

    def loss(w: Tensor) -> Tensor:
        return linear(x.detach(), w, bias.detach()).square().sum()

    expected = torch.autograd.grad(F.linear(x, weight, bias).square().sum(), weight)[0]
    torch.testing.assert_close(torch.func.grad(loss)(weight.detach()), expected)
    jvp = torch.func.jvp(lambda w: linear(x.detach(), w), (weight.detach(),), (weight.detach(),))[1]
    torch.testing.assert_close(jvp, F.linear(x, weight))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x.detach(), x.detach())
        tangent = torch.autograd.forward_ad.unpack_dual(linear(dual, weight.detach())).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent, F.linear(x, weight))
    mapped = torch.func.vmap(linear, in_dims=(0, None))(x.detach(), weight.detach())
    torch.testing.assert_close(mapped, F.linear(x, weight))
    assert linear(x.double(), weight.double()).dtype == torch.float64
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    assert linear(x.to("meta"), weight.to("meta")).shape == (6, 40)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    linear(x, weight, bias)
    assert everywhere == []


@needs_onednn
def test_a_value_that_is_not_finite_stays_so(everywhere: list[tuple[int, ...]]) -> None:
    x, weight, bias = (part.detach() for part in make(3))
    x[0, 3], x[1, 2] = torch.nan, torch.inf
    y = linear(x, weight, bias)
    assert y[0].isnan().all() and not y[1].isfinite().any() and y[2].isfinite().all() and everywhere


@needs_onednn
def test_what_onednn_is_given_has_no_gaps(everywhere: list[tuple[int, ...]]) -> None:
    """A matrix with gaps, or one number seen everywhere, goes to a loop a thousand times as slow."""
    seen: list[Tensor] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.mkldnn._linear_pointwise.default:
                seen.append(args[1])
            return func(*args, **(kwargs or {}))

    x, weight = torch.randn(7, 30)[:, 3:27].requires_grad_(), torch.randn(40, 30)[:, 3:27].requires_grad_()
    with Watch():
        ours = torch.autograd.grad(linear(x, weight).sum(), (x, weight))
    assert len(seen) == 3 and all(part.is_contiguous() or part.t().is_contiguous() for part in seen)
    for ours_part, theirs in zip(
        ours, torch.autograd.grad(F.linear(x, weight).sum(), (x, weight)), strict=True
    ):
        torch.testing.assert_close(ours_part, theirs, rtol=1e-5, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize("learned", ["x", "weight"])
def test_only_what_a_gradient_is_made_from_is_kept(everywhere: list[tuple[int, ...]], learned: str) -> None:
    x, weight, bias = (part.detach() for part in make(6))
    (x if learned == "x" else weight).requires_grad_()
    kept: list[tuple[int, ...]] = []
    with saved_tensors_hooks(lambda part: kept.append(tuple(part.shape)), lambda part: part):
        linear(x, weight, bias)
    assert kept == [(40, 24) if learned == "x" else (6, 24)] and everywhere


def test_what_does_not_fit_is_left_to_f_linear_which_says_why() -> None:
    x, weight, bias = make(6)
    assert fits(x, weight, bias) and fits(x, weight, None)
    assert not fits(x[:, 1:], weight, bias) and not fits(x, weight[None], bias)
    assert not fits(x, weight, bias[1:]) and not fits(x, weight, bias.double())
    assert not fits(x, weight.to("meta"), bias)


@needs_onednn
def test_a_width_that_is_wrong_is_said_by_f_linear(everywhere: list[tuple[int, ...]]) -> None:
    x, weight, bias = make(6)  # or, where they are checked, by the shapes in the signature
    with pytest.raises((RuntimeError, TypeError), match=r"6x23 and 24x40|Type-check error"):
        linear(x[:, 1:], weight, bias)
    assert everywhere == []


class Other(Tensor):
    """A tensor with rules of its own."""


@needs_onednn
def test_tensors_of_other_kinds_stay_with_f_linear(everywhere: list[tuple[int, ...]]) -> None:
    x, weight, bias = (part.detach() for part in make(6))
    for parts in ((x.as_subclass(Other), weight), (x, weight.as_subclass(Other))):
        torch.testing.assert_close(linear(*parts, bias).as_subclass(Tensor), F.linear(x, weight, bias))
    assert everywhere == []


@needs_onednn
@pytest.mark.parametrize(("d_in", "d_out"), [(24, 40), (40, 24)])
def test_the_narrower_of_two_is_what_gets_copied(
    d_in: int, d_out: int, everywhere: list[tuple[int, ...]]
) -> None:
    x, weight, bias = make(6, d_in=d_in, d_out=d_out)
    linear(x.detach(), weight, bias).sum().backward()
    assert everywhere == [(6, d_out, d_in), (24, 40, 6)]  # rows of the first operand, then the second


@needs_onednn
def test_few_programs_are_kept_unless_the_user_says_how_many(
    everywhere: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LRU_CACHE_CAPACITY", "7")
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "")
    monkeypatch.delenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    products._keep_few_programs.cache_clear()
    linear(*make(6))
    assert os.environ["LRU_CACHE_CAPACITY"] == "7" and os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "128"


@needs_onednn
@pytest.mark.compiled
def test_compiled_in_one_graph(everywhere: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    layer = FeedForward(24, 40, "gelu", gated=False, bias=True)
    x = torch.randn(3, 7, 24, requires_grad=True)
    parts = [x, *layer.parameters()]
    compiled = torch.compile(layer, fullgraph=True)
    ours = value_and_gradients(lambda *_: compiled(x), parts)
    assert len(everywhere) == 6  # two products, and two more for the gradients of each
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    theirs = value_and_gradients(lambda *_: layer(x), parts)
    for ours_part, theirs_part in zip(ours, theirs, strict=True):
        torch.testing.assert_close(ours_part, theirs_part, rtol=1e-5, atol=1e-5)


@pytest.mark.compiled
@pytest.mark.parametrize("faster", [True, False])
def test_one_graph_for_all_lengths(monkeypatch: pytest.MonkeyPatch, faster: bool) -> None:
    """Whether a product is large enough for oneDNN is no reason to compile once more."""
    monkeypatch.setattr(products, "onednn_is_faster", lambda maker: faster)
    torch._dynamo.reset()
    layer, graphs = FeedForward(64, 100), CompileCounter()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    limit = products.WORTH_IT // 6400
    for length in (limit // 4, limit // 2, limit - 1, limit + 2, 2 * limit):
        x = torch.randn(1, length, 64)
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-5)
    assert graphs.frame_count == 2  # the first length alone, then any


def test_which_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert onednn_is_faster("AuthenticAMD") and not onednn_is_faster("GenuineIntel")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not onednn_is_faster("AuthenticAMD")


def test_who_made_the_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Linux tells in a file, Windows at the end of a line."""
    told = tmp_path / "cpuinfo"
    monkeypatch.setattr(products, "Path", lambda name: told)
    monkeypatch.setattr(platform, "processor", lambda: "AMD64 Family 25 Model 97 Stepping 2, AuthenticAMD")
    assert processor_maker.__wrapped__() == "AuthenticAMD"
    told.write_text("processor\t: 0\nvendor_id\t: HygonGenuine\nmodel name\t: C86\n", encoding="utf-8")
    assert processor_maker.__wrapped__() == "HygonGenuine"
    told.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n", encoding="utf-8")
    assert processor_maker.__wrapped__() == ""


@needs_onednn
def test_products_of_groups(everywhere: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = torch.randn(11, 24, requires_grad=True), torch.randn(4, 40, 24, requires_grad=True)
    ends = torch.tensor([3, 3, 10, 11], dtype=torch.int32)  # a group is empty

    def product(rows: Tensor, weight: Tensor) -> Tensor:
        return grouped_product(rows, weight, ends)

    monkeypatch.setattr(products, "WORTH_IT", 5000)  # more than in a group of the usual size
    value_and_gradients(product, [rows, weight])
    assert everywhere == []
    monkeypatch.setattr(products, "WORTH_IT", 1)
    ours = value_and_gradients(product, [rows, weight])
    assert (7, 40, 24) in everywhere
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    for ours_part, theirs in zip(ours, value_and_gradients(product, [rows, weight]), strict=True):
        torch.testing.assert_close(ours_part, theirs, rtol=1e-5, atol=1e-5)
