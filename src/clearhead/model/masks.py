"""Who may see whom: boolean masks, True = may attend, made once per pass.

    causal      a query sees the keys up to its own place
    window      and of those the nearest only
    padding     never what only fills up a row
    documents   only the own text of several in one row

Most passes of a decoder want the first and nothing else. Then the mask is the word "causal": the fused kernel
knows that one itself and skips the half that nobody sees. `spelled_out` makes a tensor of it for who looks.
"""

from functools import reduce
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Causal = Literal["causal"]  # S keys, of which the last T are the queries' own


def causal_mask(
    queries: Int[Tensor, "*B_1 T"], keys: Int[Tensor, "*B_1 S"], window: int | None = None
) -> Bool[Tensor, "*B_1 T S"]:
    """Which keys a query may see, from their places in the sequence: its own and earlier ones, `window` at
    most.

    >>> causal_mask(torch.tensor([2, 3]), torch.arange(4)).int()  # two new tokens after two cached ones
    tensor([[1, 1, 1, 0],
            [1, 1, 1, 1]], dtype=torch.int32)
    """
    distance = queries[..., :, None] - keys[..., None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def spelled_out(
    mask: Bool[Tensor, "*#mask #T #S"] | Causal | None,
    q: Float[Tensor, "*heads T K"],
    k: Float[Tensor, "*kv_heads S K"],
) -> Bool[Tensor, "*#mask #T #S"] | None:
    """The mask of these queries and keys as a tensor; "causal" is aligned at the bottom right."""
    if not isinstance(mask, str):
        return mask
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=q.device).tril(n_keys - n_queries)


def mask_of_pass(
    causal: bool,
    queries: Int[Tensor, " T"],
    keys: Int[Tensor, " S"],
    real: Bool[Tensor, "B S"] | None = None,
    documents: Int[Tensor, "B S"] | None = None,
    window: int | None = None,
) -> Bool[Tensor, "*B_1 #T S"] | Causal | None:
    """Causality, window, no padding, only the own document, in one mask.

    `queries` and `keys` are their places in the sequence, in order; the same tensor when the keys are the
    queries' own. The mask is (T, S), or (B, 1, T, S) when the sequences differ, with T = 1 when all queries
    see the same; "causal" when it says no more than that; None when everything may be seen.
    """
    alone = real is None and documents is None
    if causal and alone and keys is queries and not shorter(window, queries.shape[0]):
        return "causal"
    parts: list[Tensor] = []
    if window is not None and real is not None:
        counts = real.cumsum(1)  # a window holds real tokens, wherever the padding stands
        parts.append(reach(causal, counts[:, queries], counts, window)[:, None])
    elif causal or window is not None:
        parts.append(reach(causal, queries, keys, window))
    if real is not None:
        parts.append(real[:, None, None, :])
    if documents is not None:
        parts.append((documents[:, :, None] == documents[:, None, :])[:, None])
    return reduce(torch.logical_and, parts) if parts else None


def reach(
    causal: bool, queries: Int[Tensor, "*B_1 T"], keys: Int[Tensor, "*B_1 S"], window: int | None
) -> Bool[Tensor, "*B_1 T S"]:
    """Causal: the `window` keys up to the query. Else: the keys at most `window` to either side."""
    if causal:
        return causal_mask(queries, keys, window)
    return (queries[..., :, None] - keys[..., None, :]).abs() <= (window or 0)


def shorter(window: int | None, length: int) -> bool:
    """Whether some query of a sequence of this length does not reach its beginning."""
    if window is None:
        return False
    if torch.compiler.is_compiling():  # a length that varies is asked nothing: one graph serves them all
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        return not statically_known_true(length <= window)
    return length > window
