"""Muon for the matrices inside a model, AdamW for all else, in one optimizer.

A matrix's gradient is dominated by few directions. Muon keeps a running mean M of it and steps along the
nearest matrix whose singular values are all 1, so that every direction moves alike:

    M = mu M + (1 - mu) G        N = mu M + (1 - mu) G          (Nesterov: one step ahead)
    N = U S V^T                  W = W - lr wd W - lr scale U V^T

U V^T is found without a decomposition: an odd polynomial of a matrix acts on its singular values alone,

    X = N / |N|;   again and again   X = a X + b (X X^T) X + c (X X^T)^2 X   -> U V^T

and five steps with well-chosen a, b, c bring the singular values near 1. `scale` fits the step to the shape:

    shape    sqrt(max(1, rows / columns))       Muon's own; rates near 0.02
    rms      0.2 sqrt(max(rows, columns))       entries move as far as AdamW's: its rates and decay serve

Directions are those of a whole matrix; where ranks share the weights out, only a few are whole at a time.

Embeddings, the head, gains, biases and other vectors are not maps between hidden states and stay with AdamW.

Sources: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; Polar Express, Amsel et al. 2025,
arXiv:2505.16932; scale "rms", Liu et al. 2025, arXiv:2502.16982.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, ParamsT

from clearhead.training.optim import AdamW, parameter_groups
from clearhead.training.sharded import cut_like, is_shared_out, whole

Scale = Literal["shape", "rms"]
Polynomials = tuple[tuple[float, float, float], ...]

# Algorithm 1 of the paper, before its factor 1.01: what is above 0.01 of the norm comes to 0.87 to 1.13.
_POLAR_EXPRESS: Polynomials = (
    (8.287212018, -23.595886519, 17.300387313),
    (4.107059112, -2.947849917, 0.544843108),
    (3.948690853, -2.908902116, 0.551819139),
    (3.318419657, -2.488488024, 0.510049010),
    (2.300652020, -1.668903985, 0.418807312),
)
POLAR_EXPRESS: Polynomials = tuple((a / 1.01, b / 1.01**3, c / 1.01**5) for a, b, c in _POLAR_EXPRESS)
NEWTON_SCHULZ: Polynomials = (
    (3.4445, -4.7750, 2.0315),
) * 5  # of the first Muon: singular values of 0.7 to 1.2
POLYNOMIALS = {"polar_express": POLAR_EXPRESS, "newton_schulz": NEWTON_SCHULZ}
AT_ONCE = 1 << 24  # entries of whole matrices at a time, where ranks share them out: 64 MB in float32
OUTSIDE = {
    "embed",
    "source_embed",
    "positions",
    "types",
    "relative",
    "head",
}  # parts whose matrices AdamW moves


def orthogonalise(
    matrices: Float[Tensor, "N rows columns"], polynomials: Polynomials = POLAR_EXPRESS
) -> Float[Tensor, "N rows columns"]:
    """U V^T of each matrix U S V^T, nearly; a matrix of zeros stays one. In the dtype of `matrices`.

    >>> orthogonalise(torch.tensor([[[3.0, 0.0], [0.0, 0.5]]])).round(decimals=1)
    tensor([[[1., 0.],
             [0., 1.]]])
    """
    tall = matrices.shape[-2] > matrices.shape[-1]  # the smaller of X X^T and X^T X costs less
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for a, b, c in polynomials:
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(AdamW):
    """W = W - lr wd W - lr scale U V^T for groups with `muon=True`; for the others it is AdamW.

    The last two dimensions of a parameter are its matrix, those before count matrices (experts). `momentum`
    is mu. `dtype`, float32 or bfloat16, is that of the orthogonalisation; the second is for GPUs. A group may
    set any of these itself, and `lr_scale` as in AdamW, so that one schedule drives both kinds.

    ValueError: a value outside its range, a vector in a group with `muon=True`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        momentum: float = 0.95,
        scale: Scale = "shape",
        dtype: Literal["float32", "bfloat16"] = "float32",
        polynomials: Literal["polar_express", "newton_schulz"] = "polar_express",
    ) -> None:
        adamw = {"lr": lr, "lr_scale": 1.0, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        adamw |= {"style": "torch", "formula": False}
        ours = {"momentum": momentum, "scale": scale, "dtype": dtype, "polynomials": polynomials}
        Optimizer.__init__(self, params, {**adamw, "muon": False, **ours})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings; what the group does not set comes from the constructor."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        choices = {"scale": _SCALES, "dtype": _DTYPES, "polynomials": POLYNOMIALS}
        for name, known in choices.items():
            if group[name] not in known:
                raise ValueError(f"{name}={group[name]!r} is unknown; choose one of {', '.join(known)}")
        if not 0 <= group["momentum"] < 1:
            raise ValueError(f"momentum={group['momentum']} must be at least 0 and below 1")
        for p in group["params"] if group["muon"] else ():
            if p.ndim < 2:
                raise ValueError(f"a parameter of shape {tuple(p.shape)} is no matrix; leave it to AdamW")

    def _move(self, group: dict[str, Any]) -> None:
        if not group["muon"]:
            super()._move(group)
            return
        alike: dict[tuple[int, int], list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if "momentum" not in state:
                state["momentum"] = torch.zeros_like(p)
            state["momentum"].lerp_(p.grad, 1 - group["momentum"])
            alike.setdefault((p.shape[-2], p.shape[-1]), []).append(p)
        for (rows, columns), params in alike.items():
            for some in few_at_once(params):
                self._move_alike(group, rows, columns, some)

    def _move_alike(self, group: dict[str, Any], rows: int, columns: int, params: list[Tensor]) -> None:
        """Step along the directions of matrices of one shape, found in one batched product each."""
        ahead = (
            p.grad.lerp(self.state[p]["momentum"], group["momentum"]) for p in params if p.grad is not None
        )
        stacked = torch.cat([whole(each).reshape(-1, rows, columns) for each in ahead])
        directions = orthogonalise(stacked.to(_DTYPES[group["dtype"]]), POLYNOMIALS[group["polynomials"]])
        lr = group["lr"] * group["lr_scale"]
        step = lr * _SCALES[group["scale"]](rows, columns)
        counts = [p.numel() // (rows * columns) for p in params]
        for p, direction in zip(params, directions.split(counts), strict=True):
            p.mul_(1 - lr * group["weight_decay"])
            p.add_(cut_like(direction.reshape(p.shape).to(p.dtype), p), alpha=-step)


def few_at_once(params: list[Tensor]) -> Iterator[list[Tensor]]:
    """Groups of `AT_ONCE` entries at most, or of one tensor; all together where no rank shares them out."""
    some: list[Tensor] = []
    for p in params:
        if is_shared_out(p) and some and sum(one.numel() for one in some) + p.numel() > AT_ONCE:
            yield some
            some = []
        some.append(p)
    if some:
        yield some


_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_SCALES = {
    "shape": lambda rows, columns: max(1, rows / columns) ** 0.5,
    "rms": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
}


def muon_groups(
    model: nn.Module,
    weight_decay: float,
    lr_scales: Mapping[str, float] | None = None,
    muon_lr_scale: float = 1.0,
) -> list[dict[str, Any]]:
    """`parameter_groups` with the matrices inside the model in groups of their own, marked for Muon.

    `muon_lr_scale` multiplies their rate, on top of what `lr_scales` says. The errors are those of
    `parameter_groups`.
    """
    names = {p: name for name, p in model.named_parameters()}
    groups = []
    for group in parameter_groups(model, weight_decay, lr_scales):
        matrices = [p for p in group["params"] if is_inner_matrix(names[p], p)]
        others = [p for p in group["params"] if not is_inner_matrix(names[p], p)]
        if matrices:
            scale = group["lr_scale"] * muon_lr_scale
            groups.append({**group, "params": matrices, "lr_scale": scale, "muon": True})
        if others:
            groups.append({**group, "params": others})
    return groups


def is_inner_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter of this path is a map between hidden states, or a batch of them (experts)."""
    if parameter.ndim < 2 or min(parameter.shape[-2:]) == 1 or name.endswith("bias"):
        return False
    return not OUTSIDE & set(name.split("."))
