"""The language model of course CS336, assignment 1, as a learner writes it: plain torch, nothing of ours.

Its state dict has the course's names. Rotation is written with complex numbers, so that it shares no line of
thought with ours.
"""

import math

import torch
from torch import Tensor, nn


def rms_norm(x: Tensor, gain: Tensor, eps: float = 1e-5) -> Tensor:
    return x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + eps) * gain


def swiglu(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    gate = x @ w1.T
    return (gate / (1 + torch.exp(-gate)) * (x @ w3.T)) @ w2.T


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Each pair of neighbouring features is a complex number, multiplied by exp(i * position * frequency)."""
    width = x.shape[-1]
    frequencies = torch.tensor([theta ** (-2 * i / width) for i in range(width // 2)])
    angles = positions[..., None] * frequencies
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], width // 2, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def attention(x: Tensor, weights: dict[str, Tensor], n_heads: int, theta: float | None) -> Tensor:
    """Causal multi-head self-attention of x (B, T, D); `theta=None`: without rotation."""
    batch, length, d_model = x.shape
    width = d_model // n_heads
    q, k, v = (
        (x @ weights[f"{name}_proj.weight"].T).view(batch, length, n_heads, width).permute(0, 2, 1, 3)
        for name in "qkv"
    )
    if theta is not None:
        positions = torch.arange(length)
        q, k = rope(q, positions, theta), rope(k, positions, theta)
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) / math.sqrt(width)
    future = torch.triu(torch.ones(length, length, dtype=torch.bool), diagonal=1)
    probabilities = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
    mixed = torch.einsum("bhqk,bhkd->bhqd", probabilities, v)
    return mixed.permute(0, 2, 1, 3).reshape(batch, length, d_model) @ weights["output_proj.weight"].T


def block(x: Tensor, weights: dict[str, Tensor], n_heads: int, theta: float | None) -> Tensor:
    """One pre-norm block; `weights` under the course's names within a layer."""
    x = x + attention(rms_norm(x, weights["ln1.weight"]), part(weights, "attn."), n_heads, theta)
    ffn = part(weights, "ffn.")
    normed = rms_norm(x, weights["ln2.weight"])
    return x + swiglu(normed, ffn["w1.weight"], ffn["w2.weight"], ffn["w3.weight"])


def part(weights: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The weights below `prefix`, without it."""
    return {name[len(prefix) :]: value for name, value in weights.items() if name.startswith(prefix)}


def random_course_weights(
    vocab_size: int, d_model: int, n_layers: int, d_ff: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """A state dict with the course's names, every tensor random."""

    def draw(*shape: int) -> Tensor:
        return 0.2 * torch.randn(*shape, generator=generator)

    weights = {"token_embeddings.weight": draw(vocab_size, d_model)}
    for i in range(n_layers):
        for name in ("q", "k", "v", "output"):
            weights[f"layers.{i}.attn.{name}_proj.weight"] = draw(d_model, d_model)
        weights[f"layers.{i}.ln1.weight"] = 1 + draw(d_model)
        weights[f"layers.{i}.ln2.weight"] = 1 + draw(d_model)
        weights[f"layers.{i}.ffn.w1.weight"] = draw(d_ff, d_model)
        weights[f"layers.{i}.ffn.w2.weight"] = draw(d_model, d_ff)
        weights[f"layers.{i}.ffn.w3.weight"] = draw(d_ff, d_model)
    weights["ln_final.weight"] = 1 + draw(d_model)
    weights["lm_head.weight"] = draw(vocab_size, d_model)
    return weights


class CourseModel(nn.Module):
    """The whole model over such a state dict."""

    def __init__(self, weights: dict[str, Tensor], n_heads: int, theta: float = 10_000.0) -> None:
        super().__init__()
        self.weights, self.n_heads, self.theta = weights, n_heads, theta
        self.n_layers = len({name.split(".")[1] for name in weights if name.startswith("layers.")})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.weights["token_embeddings.weight"][tokens]
        for i in range(self.n_layers):
            x = block(x, part(self.weights, f"layers.{i}."), self.n_heads, self.theta)
        return rms_norm(x, self.weights["ln_final.weight"]) @ self.weights["lm_head.weight"].T
