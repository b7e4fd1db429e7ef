"""The two layouts of rotary positions: features that turn together are neighbours, or lie in two halves.

    interleaved   x0 y0 x1 y1 ...          half   x0 x1 ... y0 y1 ...

Scores are products of queries and keys, so a model computes the same when the rows of both are put into the
other order. Published families of the Llama type have halves.
"""

import re

import torch
from jaxtyping import Shaped
from torch import Tensor

from clearhead.model.transformer import Transformer

_TURNED = r".*\.attn\.(q|k)(_norm)?\.(weight|bias)"


def into_halves(
    rows: Shaped[Tensor, "rows ..."], n_heads: int, turned: int | None = None
) -> Shaped[Tensor, "rows ..."]:
    """Rows of each head from neighbours to halves; `turned`: of its first so many rows, None: of all.

    >>> into_halves(torch.arange(8), n_heads=2).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7]
    """
    turned = rows.shape[0] // max(n_heads, 1) if turned is None else turned
    if n_heads < 1 or rows.shape[0] % n_heads or turned % 2:
        raise ValueError(f"{rows.shape[0]} rows of q or k do not make {n_heads} heads of pairs")
    heads = rows.reshape(n_heads, -1, *rows.shape[1:])
    order = torch.arange(turned).reshape(-1, 2).t().flatten()
    order = torch.cat([order, torch.arange(turned, heads.shape[1])])
    return heads[:, order].reshape(rows.shape)


def with_halves(model: Transformer) -> Transformer:
    """A model that computes the same with the layout "half"; the tensors that may stay are shared."""
    config = model.config
    with torch.device("meta"):
        other = Transformer(config.replace(rotary_layout="half"))
    state = {}
    for name, tensor in model.state_dict().items():
        moved = re.fullmatch(_TURNED, name) is not None
        n_heads = tensor.shape[0] // config.head_width
        state[name] = into_halves(tensor, n_heads, config.turned_width) if moved else tensor
    other.load_state_dict(state, assign=True)
    if config.tied and config.head in ("lm", "masked"):
        other.head.weight = other.embed.weight
    return other
