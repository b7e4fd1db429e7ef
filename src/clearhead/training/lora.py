"""Low-rank adaptation: a trained model stays as it is, and each chosen layer learns a small correction.

    y = x W^T + b + (alpha / rank) (x A^T) B^T      W, b: as they were; A (rank, in), B (out, rank): learned

B starts at 0, so that the first step starts from the very model. With G = dL/dy the gradients are

    dL/dB = (alpha / rank) G^T (x A^T)        dL/dA = (alpha / rank) (G B)^T x

Adapters are put on from outside and stand beside the weight they correct: `decoder.blocks.0.attn.q.lora_a`.
Merged, W + (alpha / rank) B A, the model is a plain one again. Source: Hu et al. 2021, arXiv:2106.09685.
"""

import math
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.model.attention import Attention, project_apart, project_fused
from clearhead.model.layers import Linear
from clearhead.model.products import linear
from clearhead.model.transformer import Transformer
from clearhead.training.tensor_files import MeanPart, Shards, WholeFiles

A, B, SCALE = ".lora_a", ".lora_b", ".lora_scale"
READ_AS_MATRIX = "kv_b"  # of latent attention, whose decoding multiplies by parts of the weight itself


@dataclass(frozen=True)
class Lora:
    """How adapters are made: their rank, the factor alpha / rank on what they add, and where they stand."""

    rank: int
    alpha: float
    on: tuple[str, ...]  # the end of a layer's path ("q", "down"), or a pattern of it ("*.blocks.3.attn.*")

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora_rank={self.rank} must be at least 1")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lora_alpha={self.alpha} must be a number above 0")
        if not self.on:
            raise ValueError("lora_on is empty; name layers, as in q v, or give a pattern of their paths")


class Adapted(nn.Module):
    """A linear layer with an adapter: y = x W^T (+ b) + scale (x A^T) B^T.

    A starts uniform within 1 / sqrt(in), B at 0.
    """

    lora_scale: Tensor

    def __init__(self, layer: Linear, lora: Lora, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        d_out, d_in = layer.weight.shape
        self.scale = lora.alpha / lora.rank
        first = torch.empty(lora.rank, d_in).uniform_(-1, 1, generator=generator) / math.sqrt(d_in)
        self.lora_a = nn.Parameter(first.to(layer.weight))
        self.lora_b = nn.Parameter(layer.weight.new_zeros(d_out, lora.rank))
        self.register_buffer("lora_scale", torch.tensor(self.scale))  # so that a file tells how to merge

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch d_out"]:
        learned = linear(linear(x, self.lora_a), self.lora_b)
        return linear(x, self.weight, self.bias) + self.scale * learned


def find_layers(model: Transformer, lora: Lora) -> dict[str, Linear]:
    """The layers that adapters are put on, by their paths, in order.

    ValueError: a pattern that no layer fits, with the layers there are; a matrix smaller than the rank.
    """
    layers = {name: module for name, module in model.named_modules() if type(module) is Linear}
    layers = {name: module for name, module in layers.items() if not name.startswith("head.")}
    chosen = [name for name in layers if any(_fits(name, pattern) for pattern in lora.on)]
    for pattern in lora.on:
        if not any(_fits(name, pattern) for name in layers):
            there = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in layers))
            raise ValueError(f"lora_on={pattern!r:.60} fits no layer of this model; its layers are {there}")
    if any(name.endswith(f".{READ_AS_MATRIX}") for name in chosen):
        raise ValueError(f"lora_on: {READ_AS_MATRIX} can have no adapter; name other layers of the attention")
    for name in chosen:
        d_out, d_in = layers[name].weight.shape
        if lora.rank > min(d_in, d_out):
            raise ValueError(
                f"lora_rank={lora.rank} exceeds the {d_out} x {d_in} matrix of {name} that it corrects"
            )
    return {name: layers[name] for name in chosen}


def add_adapters(model: Transformer, lora: Lora, seed: int = 0) -> list[str]:
    """Put adapters on a model's layers and freeze the rest; the paths of these layers, in order.

    The layers of a head that predicts something else than tokens stay trainable, for such a head is new as a
    rule. ValueError: what `find_layers` says.
    """
    chosen = find_layers(model, lora)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.match(r"head\.\w+\.", name) is not None)
    for name, layer in chosen.items():
        model.set_submodule(name, Adapted(layer, lora, generator))
    for module in model.modules():
        if isinstance(module, Attention) and module.project is project_fused:
            module.project = project_apart  # one product of the bare weights would pass adapters by
    return list(chosen)


def describe(model: nn.Module, chosen: Sequence[str]) -> str:
    """How much of a model learns, in one line."""
    learned = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    n_all = sum(parameter.numel() for parameter in model.parameters())
    return f"LoRA: adapters on {len(chosen)} layers; {learned:,} of {n_all:,} parameters learn"


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has adapters."""
    return any(isinstance(module, Adapted) for module in model.modules())


def merge(model: Transformer) -> Transformer:
    """The model itself, each adapter added to its layer's weight and gone; all of it can be trained again."""
    for name, module in list(model.named_modules()):
        if not isinstance(module, Adapted):
            continue
        layer = Linear(*reversed(module.weight.shape), bias=module.bias is not None, device="meta")
        with torch.no_grad():
            weight = module.weight + module.scale * (module.lora_b @ module.lora_a)
        layer.weight, layer.bias = nn.Parameter(weight), module.bias
        model.set_submodule(name, layer)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    for name, module in model.named_modules():
        if isinstance(module, Attention) and model.config.fused_qkv and name.endswith(".attn"):
            module.project = project_fused
    return model


def merged(model: nn.Module) -> nn.Module:
    """The model itself if it has no adapters, else a copy in which they are merged."""
    return merge(deepcopy(model)) if has_adapters(model) and isinstance(model, Transformer) else model


class MergedPart:
    """The tensors of a checkpoint as a plain model has them: adapters are merged as they are read."""

    def __init__(self, part: WholeFiles | Shards | MeanPart) -> None:
        self.part, self.path = part, part.path
        self.adapted = {name.removesuffix(A) for name in part.forms if name.endswith(A)}
        self.forms = {name: form for name, form in part.forms.items() if not name.endswith((A, B, SCALE))}

    def read(self, like: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """The tensors of these names."""
        found = self.part.read(like)
        for layer in self.adapted:
            name = f"{layer}.weight"
            if name in found:
                adapter = self.part.read(dict.fromkeys((layer + A, layer + B, layer + SCALE)))
                correction = adapter[layer + B] @ adapter[layer + A]
                found[name] = found[name] + adapter[layer + SCALE].item() * correction
        return found


def _fits(name: str, pattern: str) -> bool:
    return name.rpartition(".")[2] == pattern or fnmatch(name, pattern)
