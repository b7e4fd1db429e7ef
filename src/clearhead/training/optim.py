"""How weights move: AdamW, its parameter groups, and the clipping of gradients.

AdamW keeps two running averages per weight, m of its gradient g and v of g squared, and steps by their ratio,
so that a weight moves about `lr` per step however large its gradients are. Weight decay shrinks the weight
directly instead of entering the gradient. At its step t, counted from 1, a weight p becomes

    m = b1 m + (1 - b1) g        m^ = m / (1 - b1^t)
    v = b2 v + (1 - b2) g^2      v^ = v / (1 - b2^t)
    p = p - lr wd p - lr m^ / (sqrt(v^) + eps)

Sources: Adam, https://arxiv.org/abs/1412.6980; AdamW, https://arxiv.org/abs/1711.05101; clipping by the norm,
https://arxiv.org/abs/1211.5063.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer, ParamsT

Style = Literal["torch", "cs336"]


class AdamW(Optimizer):
    """p = p - lr wd p - lr m^ / (sqrt(v^) + eps); the averages m and v are torch's exp_avg and exp_avg_sq.

    `style="torch"` is this formula, equal to torch.optim.AdamW. `style="cs336"` is Algorithm 1 of Stanford's
    course: the decay comes after the step, and eps is added to sqrt(v), whose correction moves into the rate:

        a = lr sqrt(1 - b2^t) / (1 - b1^t);    p = p - a m / (sqrt(v) + eps);    p = p - lr wd p

    A parameter group may set any of these itself, and `lr_scale`, a factor on `lr` for that group alone, so
    that one schedule drives all groups. Where it can, style "torch" runs as torch's fused kernel, one pass
    over the memory instead of nine; `formula=True` always takes the written-out steps, equal to rounding.

    ValueError: a value outside its range, an unknown style, a parameter that is not of floating point.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        style: Style = "torch",
        *,
        formula: bool = False,
    ) -> None:
        defaults = {"lr": lr, "lr_scale": 1.0, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "style": style, "formula": formula})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own settings; what the group does not set comes from the constructor."""
        super().add_param_group(param_group)
        _check_group(self.param_groups[-1])

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # a state saved by torch.optim.AdamW lacks what is ours alone
            for name, value in self.defaults.items():
                if name != "differentiable":  # torch's own, which a saved group of ours does not name
                    group.setdefault(name, value)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Move every parameter that has a gradient; `closure`, if given, computes the loss anew first."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._move(group)
        return loss

    def _move(self, group: dict[str, Any]) -> None:
        """One step of a group's parameters."""
        lr, (b1, b2), eps, wd = (group[name] for name in ("lr", "betas", "eps", "weight_decay"))
        lr = lr * group["lr_scale"]
        may_fuse = group["style"] == "torch" and not group["formula"]
        together: list[tuple[Tensor, ...]] = []
        for p in group["params"]:
            if (g := p.grad) is None:
                continue
            # The kernel walks memory in order whatever the strides say; it wants `step` beside the data.
            in_order = p.is_contiguous() and g.is_contiguous()
            fuse = may_fuse and in_order and p.device.type in ("cpu", "cuda")
            m, v, t = self._averages(p, p.device if fuse else _CPU)
            if fuse:
                together.append((p, g, m, v, t))
            else:
                t += 1
                _FORMULAS[group["style"]](p, g, m, v, t.item(), lr, b1, b2, eps, wd)
        if together:
            params, grads, means, squares, steps = map(list, zip(*together, strict=True))
            one_pass = {"fused": True, "amsgrad": False, "maximize": False}
            settings = {"lr": lr, "beta1": b1, "beta2": b2, "eps": eps, "weight_decay": wd}
            adamw(params, grads, means, squares, [], steps, **one_pass, **settings)

    def _averages(self, p: Tensor, step_device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        state = self.state[p]
        if "exp_avg" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=step_device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        elif state["step"].device != step_device:
            state["step"] = state["step"].to(step_device)
        return state["exp_avg"], state["exp_avg_sq"], state["step"]


def _torch_style(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    t: float,
    lr: float,
    b1: float,
    b2: float,
    eps: float,
    wd: float,
) -> None:
    p.mul_(1 - lr * wd)
    m.lerp_(g, 1 - b1)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)
    below = v.sqrt().div_(math.sqrt(1 - b2**t)).add_(eps)
    p.addcdiv_(m, below, value=-lr / (1 - b1**t))


def _cs336_style(
    p: Tensor,
    g: Tensor,
    m: Tensor,
    v: Tensor,
    t: float,
    lr: float,
    b1: float,
    b2: float,
    eps: float,
    wd: float,
) -> None:
    m.lerp_(g, 1 - b1)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)
    a = lr * math.sqrt(1 - b2**t) / (1 - b1**t)
    p.addcdiv_(m, v.sqrt().add_(eps), value=-a)
    p.mul_(1 - lr * wd)


_CPU = torch.device("cpu")
_FORMULAS: dict[str, Callable[..., None]] = {"torch": _torch_style, "cs336": _cs336_style}


def _check_group(group: dict[str, Any]) -> None:
    for name in ("lr", "lr_scale", "eps", "weight_decay"):
        if not 0 <= group[name] < math.inf:
            raise ValueError(f"{name}={group[name]} must be a finite number, 0 or more")
    if len(group["betas"]) != 2 or not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"betas={group['betas']} must be two numbers, each at least 0 and below 1")
    if group["style"] not in _FORMULAS:
        raise ValueError(f"style={group['style']!r} is unknown; choose one of {', '.join(_FORMULAS)}")
    for p in group["params"]:
        if not p.is_floating_point():
            raise ValueError(
                f"a parameter of shape {tuple(p.shape)} is {p.dtype}; AdamW moves floating point only"
            )


def parameter_groups(
    model: nn.Module, weight_decay: float, lr_scales: Mapping[str, float] | None = None
) -> list[dict[str, Any]]:
    """Split a model's trainable parameters into groups for an optimizer: matrices decay, vectors do not.

    Every tensor of two or more dimensions decays, embeddings and the head among them (as in GPT-2's and
    nanoGPT's recipes); biases, norm gains and other vectors and scalars do not: shrinking them to 0 would
    switch a channel off rather than keep it small. `lr_scales` gives parts of the model, named by the start
    of their path, their own factor on the learning rate: `{"embed": 3.0, "decoder.blocks.0": 0.5}`; the
    longest start wins. ValueError: one that starts no parameter's path.
    """
    scales = dict(lr_scales or {})
    unused = set(scales)
    groups: dict[tuple[bool, float], list[Tensor]] = {}
    for name, p in model.named_parameters():
        starts = [start for start in scales if name == start or name.startswith(start + ".")]
        unused.difference_update(starts)
        if not p.requires_grad:
            continue
        scale = scales[max(starts, key=len)] if starts else 1.0
        decays = p.ndim >= 2 and not name.endswith("bias")  # experts' biases are a table
        groups.setdefault((decays, scale), []).append(p)
    if unused:
        parts = ", ".join(dict.fromkeys(name.split(".")[0] for name, _ in model.named_parameters()))
        raise ValueError(f"lr_scales names {', '.join(sorted(unused))}, but the model's parts are {parts}")
    return [
        {"params": params, "weight_decay": weight_decay if decays else 0.0, "lr_scale": scale}
        for (decays, scale), params in groups.items()
    ]


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Float[Tensor, ""]:
    """Scale all gradients in place so that their common L2 norm is at most `max_norm`; return the old norm.

    The factor is min(1, max_norm / (norm + 1e-6)). Parameters without a gradient are left out. Nothing waits
    for the device: read the returned tensor when it suits. A gradient that is not finite makes the norm so;
    then the gradients stay as they are, so that the bad one can be named. `max_norm=math.inf` only measures.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm} must be above 0 (math.inf measures without clipping)")
    grads = [p.grad for p in {id(p): p for p in parameters}.values() if p.grad is not None]
    if not grads:
        return torch.zeros(())
    # A norm in bfloat16 would have two digits, hence float32 or wider.
    wide = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    norms = [torch.linalg.vector_norm(g, dtype=wide).to(grads[0].device) for g in grads]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    scale_gradients(grads, norm, max_norm)
    return norm


@torch.no_grad()
def scale_gradients(grads: Iterable[Tensor], norm: Float[Tensor, ""], max_norm: float) -> None:
    """Multiply gradients by min(1, max_norm / (norm + 1e-6)); a norm that is not finite leaves them."""
    if max_norm < math.inf:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0).where(norm.isfinite(), 1.0)
        for g in grads:
            g.mul_(factor.to(g.device))
