"""The one product that a Transformer spends its time on, from the library that is fastest on this machine.

    y = x W^T + b;     dx = dy W,   dW = dy^T x,   db = the sum of dy

PyTorch takes its float32 products on a CPU from MKL, and on processors by others than Intel MKL leaves the
512-bit units unused. oneDNN, which PyTorch carries too, uses them: on a Zen 5 core it multiplies 2.2 times
as fast. So `linear` is F.linear, which it equals to rounding, but on such machines asks oneDNN for what is
large enough. `torch.backends.mkldnn.enabled = False` turns that off.
"""

import functools
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd import forward_ad

WORTH_IT = 1 << 20  # multiplications; fewer are done before a call from Python has reached oneDNN
PLAIN = (Tensor, nn.Parameter)  # what is shared out over ranks or only pretends has its rules for F.linear

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def linear(
    x: Float[Tensor, "*batch d_in"],
    weight: Float[Tensor, "d_out d_in"],
    bias: Float[Tensor, " d_out"] | None = None,
) -> Float[Tensor, "*batch d_out"]:
    """x W^T (+ b), over the last dimension of x."""
    if not (onednn_pays(x, weight, x.numel() * weight.shape[0]) and fits(x, weight, bias)):
        return F.linear(x, weight, bias)
    if torch.compiler.is_compiling():
        return torch.ops.clearhead.linear(x, weight, bias)
    learns = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if learns and torch.is_grad_enabled():
        return _Product.apply(x, weight, bias)
    return _multiply(x, weight, bias)


def onednn_pays(x: Float[Tensor, "..."], weight: Float[Tensor, "..."], n_multiplications: int) -> bool:
    """Whether a product should go to oneDNN: a large one of plain float32 tensors, on such a machine."""
    return (
        is_large(n_multiplications)
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == "cpu"
        and type(x) in PLAIN
        and type(weight) in PLAIN
        and not torch.is_autocast_enabled("cpu")
        and _allowed()
    )


def is_large(n_multiplications: int) -> bool:
    """Whether a product is worth the way to oneDNN; while a graph is compiled, unless it surely is not."""
    if not torch.compiler.is_compiling():
        return n_multiplications >= WORTH_IT
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return not statically_known_true(n_multiplications < WORTH_IT)  # asks nothing: one graph for all lengths


def fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether these can be multiplied; of what cannot, F.linear says why and oneDNN does not."""
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1] or x.device != weight.device:
        return False
    return bias is None or (bias.shape == weight.shape[:1] and bias.dtype == weight.dtype)


def onednn_is_faster(maker: str) -> bool:
    """Whether this machine, its processor made by `maker`, has 512-bit units that MKL does not use."""
    both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return both and torch.backends.cpu.get_cpu_capability() == "AVX512" and maker != "GenuineIntel"


@functools.cache
def processor_maker() -> str:
    """Who made the processor, by its own word, as GenuineIntel or AuthenticAMD; "" if it cannot be asked."""
    asked = Path("/proc/cpuinfo")
    if not asked.exists():
        return platform.processor().rpartition(" ")[2]
    lines = asked.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


@torch.compiler.assume_constant_result
def _allowed() -> bool:
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return torch.backends.mkldnn.enabled and not transformed and onednn_is_faster(processor_maker())


class _Product(torch.autograd.Function):
    """y = x W^T + b with the gradients of the module's formula."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        keep(ctx, (x, weight, bias))
        return _multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Gradients:
        return gradients(ctx, upstream[0], linear)


def keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor | None = None) -> None:
    """What the gradients that are wanted are made from."""
    x, weight, _ = inputs
    of_x, of_weight = ctx.needs_input_grad[:2]
    ctx.save_for_backward(x if of_weight else None, weight if of_x else None)


def gradients(ctx: Any, dy: Tensor, product: Callable[..., Tensor]) -> Gradients:
    """Those of x, W and b, where they are wanted; `product(x, weight)` multiplies."""
    x, weight = ctx.saved_tensors
    of_x, of_weight, of_bias = ctx.needs_input_grad
    dx = product(dy, weight.t()) if of_x else None
    dy = dy.reshape(-1, dy.shape[-1])
    dweight = None
    if of_weight:  # oneDNN copies a transposed first operand: let it be the narrower one
        x = x.reshape(-1, x.shape[-1])
        narrow = dy.shape[1] <= x.shape[1]
        dweight = product(dy.t(), x.t()) if narrow else product(x.t(), dy.t()).t()
    return dx, dweight, dy.sum(0) if of_bias else None


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T (+ b) by oneDNN."""
    _keep_few_programs()
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()  # with gaps between its numbers it would take a thousand times as long
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@functools.cache
def _keep_few_programs() -> None:
    """oneDNN writes a program of 0.6 MB for each size of product, and would keep 1,024, twice."""
    for library in ("LRU", "ONEDNN_PRIMITIVE"):  # what PyTorch keeps, and what oneDNN does
        os.environ.setdefault(f"{library}_CACHE_CAPACITY", "128")


# A name of our own: torch.compile's rule for oneDNN's operator wants a weight that never changes.
_operators = torch.library.Library("clearhead", "DEF")
_operators.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_operators.impl("linear", lambda *operands: _multiply(*operands), "CPU")


def _gradients_compiled(ctx: Any, dy: Tensor) -> Gradients:
    return gradients(ctx, dy, functools.partial(torch.ops.clearhead.linear, bias=None))


torch.library.register_autograd("clearhead::linear", _gradients_compiled, setup_context=keep, lib=_operators)


@torch.library.register_fake("clearhead::linear", lib=_operators)
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))
