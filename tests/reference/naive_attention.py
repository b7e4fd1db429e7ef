"""Attention in plain loops over Python floats: one query, one key, one feature at a time."""

import math
from itertools import product

import torch
from torch import Tensor


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The mix and the weights of every query, in float64."""
    n_queries, n_keys, width = q.shape[-2], k.shape[-2], q.shape[-1]
    scale = 1 / math.sqrt(width) if scale is None else scale
    shape = (*q.shape[:-1], n_keys)
    mask = torch.ones(shape, dtype=torch.bool) if mask is None else mask.expand(shape)
    bias = torch.zeros(shape) if bias is None else bias.expand(shape)
    mixed = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=torch.float64)
    weights = torch.zeros(shape, dtype=torch.float64)
    for lead in product(*map(range, q.shape[:-2])):
        source = lead
        if q.shape[:-2] != k.shape[:-2]:  # query heads 0, 1, 2 share key head 0, then 3, 4, 5 key head 1 ...
            source = (*lead[:-1], lead[-1] // (q.shape[-3] // k.shape[-3]))
        for t in range(n_queries):
            exps = {}
            for s in range(n_keys):
                if mask[(*lead, t, s)]:
                    score = scale * sum(
                        q[(*lead, t, i)].item() * k[(*source, s, i)].item() for i in range(width)
                    )
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    exps[s] = math.exp(score + bias[(*lead, t, s)].item())
            total = sum(exps.values())
            if sinks is not None:
                total += math.exp(sinks[lead[-1]].item())
            for s, exp in exps.items():
                weights[(*lead, t, s)] = exp / total
                for i in range(v.shape[-1]):
                    mixed[(*lead, t, i)] += exp / total * v[(*source, s, i)].item()
    return mixed, weights
