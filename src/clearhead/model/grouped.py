"""One matrix product for many small ones: rows sorted by group, each group with a matrix of its own.

    y[m] = W[g(m)] x[m]        rows of group 0 first, then those of group 1, ...; `ends[g]` is where g's stop

PyTorch's grouped kernel does it where it takes the numbers: float32, bfloat16 and float16, in rows of whole
16-byte pieces. Else, and where oneDNN is faster than that kernel, there is one product for each group. All
give equal results. The gradient is written out, because the kernel's own wants gradients laid out in memory
as it likes them; and a compiler sees two operators whose inside it leaves alone, because it knows the kernel
for bfloat16 only.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from clearhead.model.products import linear, onednn_pays


def grouped_product(
    rows: Float[Tensor, "M d_in"], weight: Float[Tensor, "E d_out d_in"], ends: Int[Tensor, " E"]
) -> Float[Tensor, "M d_out"]:
    """Each row times the matrix of its group, as F.linear would; `ends` (int32) must rise to M.

    Autocast makes it narrower, as it does F.linear.

    >>> rows, weight = torch.ones(3, 4), torch.arange(2.0)[:, None, None].expand(2, 1, 4)
    >>> grouped_product(rows, weight, torch.tensor([1, 3], dtype=torch.int32)).T  # row 0, then rows 1 and 2
    tensor([[0., 4., 4.]])
    """
    device = rows.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        rows, weight = rows.to(dtype), weight.to(dtype)
    return _Product.apply(rows, weight, ends)


class _Product(torch.autograd.Function):
    """y = x W^T for each group; with the slope s of y, that of x is s W and that of W is s^T x."""

    @staticmethod
    def forward(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        return multiply(rows, weight.transpose(1, 2), ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, Tensor, None]:
        rows, weight, ends = ctx.saved_tensors
        slope = slopes[0].contiguous()  # that of a sum is one number, repeated without memory of its own
        return multiply(slope, weight, ends), multiply_outer(slope, rows, ends), None


def multiply(
    rows: Float[Tensor, "M d_in"], matrices: Float[Tensor, "E d_in d_out"], ends: Int[Tensor, " E"]
) -> Float[Tensor, "M d_out"]:
    """Each row times the matrix of its group: x W."""
    return (_multiply_opaque if _has_no_values(rows) else _multiply)(rows, matrices, ends)


def multiply_outer(
    left: Float[Tensor, "M d_out"], right: Float[Tensor, "M d_in"], ends: Int[Tensor, " E"]
) -> Float[Tensor, "E d_out d_in"]:
    """The sum over each group's rows of their outer products: left^T right, 0 for a group without rows."""
    return (_outer_opaque if _has_no_values(left) else _outer)(left, right, ends)


def _has_no_values(x: Tensor) -> bool:
    """Whether only shapes are worked out now: by a compiler, or to foresee what a pass will need."""
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor)


def _multiply(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    if onednn_pays(rows, matrices, rows.numel() * matrices.shape[2] // len(ends)):
        return torch.cat([linear(rows[a:b], matrices[group].t()) for group, (a, b) in enumerate(runs(ends))])
    if kernel_takes(rows, matrices):
        return F.grouped_mm(rows, matrices, offs=ends).contiguous()  # it pads rows to 16 bytes
    y = rows.new_empty(rows.shape[0], matrices.shape[2])
    for group, (start, stop) in enumerate(runs(ends)):
        torch.mm(rows[start:stop], matrices[group], out=y[start:stop])
    return y


def _outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    if onednn_pays(left, right, left.numel() * right.shape[1] // len(ends)):
        return torch.stack([linear(left[a:b].t(), right[a:b].t()) for a, b in runs(ends)])
    if kernel_takes(left, right):
        return F.grouped_mm(left.t(), right, offs=ends).contiguous()
    y = left.new_empty(len(ends), left.shape[1], right.shape[1])
    for group, (start, stop) in enumerate(runs(ends)):
        torch.mm(left[start:stop].t(), right[start:stop], out=y[group])
    return y


_multiply_opaque = torch.library.custom_op(
    "clearhead::grouped_multiply",
    _multiply,
    mutates_args=(),
    schema="(Tensor rows, Tensor matrices, Tensor ends) -> Tensor",
)
_outer_opaque = torch.library.custom_op(
    "clearhead::grouped_outer",
    _outer,
    mutates_args=(),
    schema="(Tensor left, Tensor right, Tensor ends) -> Tensor",
)


@_multiply_opaque.register_fake
def _(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], matrices.shape[2])


@_outer_opaque.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def runs(ends: Int[Tensor, " E"]) -> list[tuple[int, int]]:
    """Where each group's rows start and stop. It waits for the device."""
    stops = ends.tolist()
    return list(zip([0, *stops[:-1]], stops, strict=True))


def kernel_takes(*factors: Float[Tensor, "..."]) -> bool:
    """Whether PyTorch's grouped kernel can multiply these."""
    return all(_fits_kernel(factor) for factor in factors)


def _fits_kernel(x: Tensor) -> bool:
    if x.numel() == 0 or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if x.device.type == "cuda":
        if torch.cuda.get_device_capability(x.device) < (8, 0):
            return False
    elif x.device.type != "cpu":
        return False
    long, short = sorted(x.stride()[-2:], reverse=True)
    return short == 1 and long * x.element_size() % 16 == 0 and x.data_ptr() % 16 == 0
