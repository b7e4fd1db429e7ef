"""Muon, line by line, with a decomposition where the library has a polynomial."""

import torch
from jaxtyping import Float
from torch import Tensor


def naive_muon(
    weight: Float[Tensor, "rows columns"],
    gradients: list[Float[Tensor, "rows columns"]],
    lr: float,
    decay: float,
    momentum: float,
    scale: str,
) -> Float[Tensor, "rows columns"]:
    """The weight after one step along U V^T per gradient."""
    rows, columns = weight.shape
    mean = torch.zeros_like(weight)
    for gradient in gradients:
        mean = momentum * mean + (1 - momentum) * gradient
        ahead = momentum * mean + (1 - momentum) * gradient
        u, _, vt = torch.linalg.svd(ahead, full_matrices=False)
        size = max(1.0, rows / columns) ** 0.5 if scale == "shape" else 0.2 * max(rows, columns) ** 0.5
        weight = weight - lr * decay * weight - lr * size * (u @ vt)
    return weight
