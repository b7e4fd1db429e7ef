"""What a model weighs: parameters by part, bytes, arithmetic per token. From a config alone, nothing is
allocated.

    FLOPs per token (forward) = 2 x weights in matrix products + 4 x n_layers x n_heads x d_head x keys seen
    training                  = 3 x that (the backward pass costs twice the forward pass)

The first term is one multiplication and one addition per weight; the second is the scores and the mix of
attention.
"""

import re
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import nn

from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer

TABLES = ("embed", "source_embed", "positions", "types", "relative")  # rows are looked up, not multiplied


@dataclass(frozen=True)
class Part:
    """One part of a model: its path, the shape of its weight and how many numbers it holds."""

    name: str
    shape: tuple[int, ...]
    n_parameters: int
    shared_with: str | None = None


@dataclass(frozen=True)
class Summary:
    """The sizes of one model. Bytes are for float32 weights; FLOPs are for a full context of `max_len`."""

    parts: tuple[Part, ...]
    n_parameters: int
    weight_bytes: int
    training_bytes: int
    cache_bytes_per_token: int
    flops_per_token: int


def summarise(config: ModelConfig) -> Summary:
    """The sizes of the model this config describes, found without allocating it."""
    with torch.device("meta"):
        model = Transformer(config)
    parts: list[Part] = []
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared = first.setdefault(parameter, name)
        if shared == name:
            parts.append(Part(name, tuple(parameter.shape), parameter.numel()))
        else:
            parts.append(Part(name, tuple(parameter.shape), 0, shared))
    n_parameters = sum(part.n_parameters for part in parts)
    return Summary(
        parts=tuple(parts),
        n_parameters=n_parameters,
        weight_bytes=4 * n_parameters,
        training_bytes=16 * n_parameters,  # weights, gradients and AdamW's two moments, before activations
        cache_bytes_per_token=4 * config.n_layers * cached_numbers(config),
        flops_per_token=forward_flops(config, model),
    )


def cached_numbers(config: ModelConfig) -> int:
    """How many numbers one layer's cache keeps of a token."""
    if config.latent is not None:
        return config.latent.kv_rank + config.latent.d_rotary
    return 2 * config.kv_heads * config.head_width


def forward_flops(config: ModelConfig, model: nn.Module) -> int:
    """Floating-point operations of one token's forward pass when it sees `max_len` (or `window`) keys.

    Of a mixture of experts only those count that a token passes.
    """
    products = 0
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.dim() == 2 and name.split(".")[-2] not in TABLES:
            products += parameter.numel()
        elif parameter.dim() == 3 and config.experts is not None:
            products += parameter[0].numel() * config.experts.top_k
    keys = min(config.max_len, config.window or config.max_len)
    return 2 * products + 4 * config.n_layers * config.n_heads * config.head_width * keys


def table(summary: Summary) -> Table:
    """Every weight with its shape and its count, blocks folded: equal shapes of all blocks stand in one
    row.
    """
    rows = Table(box=None, header_style="bold")
    rows.add_column("part")
    for title in ("shape", "each", "times", "parameters"):
        rows.add_column(title, justify="right")
    folded: dict[tuple[str, tuple[int, ...], str | None], list[int]] = {}
    for part in summary.parts:
        name = re.sub(r"blocks\.\d+\.", "blocks.*.", part.name)
        folded.setdefault((name, part.shape, part.shared_with), []).append(part.n_parameters)
    for (name, shape, shared), counts in folded.items():
        size = " x ".join(map(str, shape))
        total = f"is {shared}" if shared else f"{sum(counts):,}"
        rows.add_row(name, size, f"{counts[0]:,}", str(len(counts)), total)
    return rows


def size_lines(summary: Summary) -> list[str]:
    """The sums, one line each."""
    mega = 1 / 2**20
    return [
        f"parameters            {summary.n_parameters:,}",
        f"weights (float32)     {summary.weight_bytes * mega:,.1f} MiB",
        f"training with AdamW   {summary.training_bytes * mega:,.1f} MiB and the activations",
        f"cache per token       {summary.cache_bytes_per_token / 1024:,.1f} KiB",
        f"FLOPs per token       {summary.flops_per_token / 1e6:,.1f} M forward, "
        f"{3 * summary.flops_per_token / 1e6:,.1f} M in training",
    ]
