"""Every initial weight of a model, in one table.

| scheme   | linear layers          | o and down (they write to the stream) | embeddings | head              |
|----------|------------------------|---------------------------------------|------------|-------------------|
| course   | sqrt(2 / (in + out))   | the same                              | 1          | sqrt(2/(in+out))  |
| gpt2     | 0.02                   | 0.02 / sqrt(2 n_layers)               | 0.02       | 0.02              |
| zero_out | 1 / sqrt(in)           | 0                                     | 1          | 0                 |

The numbers are standard deviations of a normal distribution cut at 3 of them ("gpt2": uncut). Gains start at
1, biases and shifts at 0. A tied head has no weight of its own: it is the embedding, which then starts like a
linear layer of the head's shape under "course" and "zero_out", or the first logits would be sqrt(d_model)
times too large. Sources: Stanford CS336 assignment 1; Radford et al. 2019; zeroed outputs as in Zhang et al.
2019, arXiv:1901.09321.
"""

import math

import torch
from torch import Tensor, nn

from clearhead.model.config import ModelConfig


@torch.no_grad()
def initialise(model: nn.Module, config: ModelConfig, seed: int | None = None) -> None:
    """Give every weight its initial value by the scheme `config.init`.

    `seed`: random numbers of its own, the same weights on every device; None: torch's global ones.
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        part, kind = name.split(".")[-2:]
        part = kind if kind in ("gate", "up", "down") else part  # the experts' matrices, (E, out, in)
        if kind.endswith("bias") or kind == "sinks":
            parameter.zero_()
        elif part.endswith("norm"):
            parameter.fill_(1.0 - config.norm_offset)
        else:
            std = standard_deviation(config, part, parameter)
            cut = math.inf if config.init == "gpt2" else 3 * std
            draw(parameter, std, cut, generator)


def standard_deviation(config: ModelConfig, part: str, weight: Tensor) -> float:
    """The table above: the spread of the weight called `part` ("q", "down", "embed", ...)."""
    d_out, d_in = weight.shape[-2:]
    xavier = math.sqrt(2 / (d_in + d_out))
    embedding = part in ("embed", "source_embed", "positions", "types", "relative")
    writes = part in ("o", "down")
    match config.init:
        case "gpt2":
            return 0.02 / math.sqrt(2 * config.n_layers) if writes else 0.02
        case "course":
            return 1.0 if embedding and not (part == "embed" and config.tied) else xavier
        case "zero_out":
            if writes or part == "head":
                return 0.0
            if embedding:
                return xavier if part == "embed" and config.tied else 1.0
            return 1 / math.sqrt(d_in)
        case other:
            raise ValueError(f"init={other!r} is unknown; choose course, gpt2 or zero_out")


def draw(weight: Tensor, std: float, cut: float, generator: torch.Generator | None) -> None:
    """Fill `weight` with N(0, std) cut at +-`cut`."""
    fresh = weight if generator is None else torch.empty_like(weight, device=generator.device)
    if std == 0:
        fresh.zero_()
    elif math.isinf(cut):
        fresh.normal_(0.0, std, generator=generator)
    else:
        nn.init.trunc_normal_(fresh, 0.0, std, -cut, cut, generator=generator)
    weight.copy_(fresh)
