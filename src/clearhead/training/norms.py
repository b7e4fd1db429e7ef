"""What happens inside a model while it learns: how large its parts are, how far they move, what lies idle.

    weight_norm/decoder.blocks.3.ff      |w|, the root of the sum of squares of all weights of that part
    gradient_norm/...                    |g|, after clipping
    update_norm/...                      |w after the step - w before|; of healthy parts about 0.001 |w|
    idle_units/...                       share of a feed-forward layer's hidden units that nothing woke
    expert_load/...                      tokens of the busiest expert over the mean: 1 is even
    idle_experts/...                     experts that no token chose

A unit is idle when no token of a batch brings it above a thousandth of its layer's root mean square. Idle
units and experts are found in one more pass over a micro-batch, without dropout. All figures come to the host
at once.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.model.experts import Router, Routing
from clearhead.model.layers import FeedForward
from clearhead.model.transformer import Transformer
from clearhead.training.sharded import whole

IDLE = 1e-3  # of the layer's root mean square


class Norms:
    """The norms of a model's parts around one step of its optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.parts: dict[str, list[nn.Parameter]] = {}
        for name, p in model.named_parameters():
            if p.requires_grad:
                self.parts.setdefault(part_of(name), []).append(p)

    @torch.no_grad()
    def around(self, move: Callable[[], None]) -> dict[str, Tensor]:
        """Call `move`, which takes the step; return the norms, each a scalar on its device."""
        before = {p: p.detach().clone() for ps in self.parts.values() for p in ps}
        found: dict[str, Tensor] = {}
        for part, ps in self.parts.items():
            found[f"weight_norm/{part}"] = norm_of([p.detach() for p in ps])
            found[f"gradient_norm/{part}"] = norm_of([p.grad for p in ps if p.grad is not None])
        move()
        for part, ps in self.parts.items():
            found[f"update_norm/{part}"] = norm_of([p.detach() - before[p] for p in ps])
        return found


def part_of(name: str) -> str:
    """The part of the model that a parameter belongs to: a sub-layer of a block, or what stands beside them.

    >>> part_of("decoder.blocks.3.attn.q.weight"), part_of("decoder.blocks.3.ff_norm.gain")
    ('decoder.blocks.3.attn', 'decoder.blocks.3.norms')
    >>> part_of("embed.weight"), part_of("decoder.norm.gain")
    ('embed', 'decoder.norm')
    """
    if inside := re.match(r"(.*blocks\.\d+)\.(\w+)", name):
        return f"{inside[1]}.norms" if inside[2].endswith("norm") else inside[0]
    parts = name.split(".")
    return ".".join(parts[:2] if parts[0] in ("encoder", "decoder") else parts[:1])


def norm_of(tensors: list[Tensor]) -> Float[Tensor, ""]:
    """The L2 norm of all of them together, in float32, also where ranks hold parts of each."""
    norms = [torch.linalg.vector_norm(t, dtype=torch.float32) for t in tensors]
    return torch.linalg.vector_norm(torch.stack([whole(n) for n in norms])) if norms else torch.zeros(())


@torch.no_grad()
def find_idle(model: Transformer, run: Callable[[Routing | None], Any]) -> dict[str, Tensor]:
    """Which shares of the model a batch leaves idle; `run` makes one pass of the model over it."""
    found: dict[str, Tensor] = {}
    hooks = []

    def watch(part: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            hidden = whole(inputs[0].detach()).float().flatten(0, -2)
            most = hidden.abs().amax(0)
            found[f"idle_units/{part}"] = (most <= IDLE * hidden.square().mean().sqrt()).float().mean()

        return look

    routers = []
    for name, module in model.named_modules():
        if isinstance(module, FeedForward):
            hooks.append(module.down.register_forward_pre_hook(watch(name)))
        elif isinstance(module, Router):
            routers.append(name.removesuffix(".router"))
    training = model.training
    try:
        routing = Routing() if routers else None
        model.eval()
        run(routing)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    if routing is not None and routing.layers:
        loads = [load for stack, _ in routing.stacks() for load in stack.load()]
        for part, load in zip(routers, loads, strict=True):
            found[f"expert_load/{part}"] = load.max() / load.mean()
            found[f"idle_experts/{part}"] = (load == 0).float().sum()
    return found


def to_host(figures: dict[str, Tensor]) -> dict[str, float]:
    """All of them as numbers, in one transfer."""
    if not figures:
        return {}
    device = next(iter(figures.values())).device
    values = torch.stack([value.to(device, torch.float32) for value in figures.values()]).tolist()
    return dict(zip(figures, values, strict=True))
