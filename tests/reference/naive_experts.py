"""The dull twin of the mixture of experts: one token after the other, one expert after the other."""

import torch
from torch import Tensor

from clearhead.model.experts import Experts


def naive_choice(experts: Experts, token: Tensor) -> list[tuple[int, Tensor]]:
    """The experts of one token and their weights."""
    config, router = experts.config, experts.router
    logits = router.weight @ token
    if router.bias is not None:
        logits = logits + router.bias
    scores = logits.softmax(-1) if config.router == "softmax" else logits.sigmoid()
    preference = [s.item() for s in scores]
    if config.correction_bias:
        preference = [p + c.item() for p, c in zip(preference, router.correction, strict=True)]
    size = config.n_experts // config.n_groups
    groups = range(config.n_groups)
    value = [sum(sorted(preference[g * size : (g + 1) * size])[-2:]) for g in groups]
    kept = sorted(groups, key=lambda g: -value[g])[: config.top_groups]
    allowed = [e for e in range(config.n_experts) if e // size in kept]
    chosen = sorted(allowed, key=lambda e: -preference[e])[: config.top_k]
    total = sum(scores[e] for e in chosen) if config.renormalise else torch.ones(())
    return [(e, config.weight_scale * scores[e] / total) for e in chosen]


def naive_expert(experts: Experts, number: int, token: Tensor) -> Tensor:
    """What one expert makes of one token."""
    config = experts.config

    def linear(name: str, x: Tensor) -> Tensor:
        y = getattr(experts, name)[number] @ x
        return y + getattr(experts, f"{name}_bias")[number] if config.bias else y

    gate, up = linear("gate", token), linear("up", token)
    if config.limit is None:
        return linear("down", experts.activation(gate) * up)
    gate, up = gate.clamp(max=config.limit), up.clamp(-config.limit, config.limit)
    return linear("down", gate * (config.limit_slope * gate).sigmoid() * (up + 1))


def naive_experts(experts: Experts, x: Tensor) -> Tensor:
    """The whole layer for x (B, T, D)."""
    rows = []
    for token in x.flatten(0, 1):
        y = sum(weight * naive_expert(experts, e, token) for e, weight in naive_choice(experts, token))
        if experts.config.shared_d_ff:
            shared = experts.shared(token)
            y = y + (experts.shared_gate(token).sigmoid() * shared if experts.config.shared_gate else shared)
        rows.append(y)
    return torch.stack(rows).view(x.shape)
