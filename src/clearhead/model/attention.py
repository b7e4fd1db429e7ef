"""Attention: every query looks at the keys it may see and takes a weighted mean of their values.

    attend(q, k, v) = softmax(q k^T / sqrt(K)) v                    (Vaswani et al. 2017, arXiv:1706.03762)

`attend` has two faces. When nobody listens it calls the fused kernel; when a recorder listens, or the weights
are asked for, it computes scores, weights and mix step by step and names them with `tap`. A test holds the
two equal. Masks are boolean, True = may attend. A query that may see no key at all gets 0, with finite
gradients.

    MHA: n_kv_heads = n_heads      GQA: fewer key/value heads, each shared by      MQA: n_kv_heads = 1
    q q q q                        n_heads / n_kv_heads neighbours:                q q q q
    | | | |                        q q q q                                         \\ \\ / /
    k k k k                        \\/   \\/                                           k
                                    k    k
"""

import math
from typing import Literal, overload

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead.model.cache import LayerCache
from clearhead.model.layers import Linear, RMSNorm, widen
from clearhead.model.position import Rotation, rotate
from clearhead.model.tap import listening, tap


def causal_mask(
    queries: Int[Tensor, " T"], keys: Int[Tensor, " S"], window: int | None = None
) -> Bool[Tensor, "T S"]:
    """Which keys a query may see, from their places in the sequence: its own and earlier ones, `window` at
    most.

    >>> causal_mask(torch.tensor([2, 3]), torch.arange(4)).int()  # two new tokens after two cached ones
    tensor([[1, 1, 1, 0],
            [1, 1, 1, 1]], dtype=torch.int32)
    """
    distance = queries[:, None] - keys[None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float | None = None,
    bias: Tensor | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    dropout: float = 0.0, return_weights: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, scale: float | None = None,
    bias: Tensor | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    dropout: float = 0.0, return_weights: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attend(
    q: Float[Tensor, "*heads T K"],
    k: Float[Tensor, "*kv_heads S K"],
    v: Float[Tensor, "*kv_heads S K_v"],
    mask: Bool[Tensor, "*#mask T S"] | None = None,
    *,
    scale: float | None = None,
    bias: Float[Tensor, "*#bias T S"] | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    dropout: float = 0.0,
    return_weights: bool = False,
) -> Float[Tensor, "*heads T K_v"] | tuple[Float[Tensor, "*heads T K_v"], Float[Tensor, "*heads T S"]]:
    """Scaled dot-product attention over any leading dimensions: softmax(q k^T * scale) v.

    With a head dimension before T, q may have more heads than k and v: query head h uses key/value head h //
    (H / G). `mask`: True = may attend, broadcasts over the leading dimensions. `scale`: 1/sqrt(K) if None.
    `bias` is added to the scores; `softcap` c squashes them to c tanh(score / c); `sinks`, one logit per
    head, join the softmax and are dropped; `dropout` is the share of weights set to zero (give 0 outside
    training). Returns the mix, and with `return_weights` also the weights, which are exactly 0 where masked.
    Raises ValueError when the shapes do not fit.
    """
    check_shapes(q, k, v)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    explained = return_weights or listening() or softcap is not None or sinks is not None
    if not explained:
        return fused_attention(q, k, v, mask, scale, bias, dropout)

    k, v = share_heads(k, q), share_heads(v, q)
    scores = tap("scores", q @ k.transpose(-2, -1) * scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias
    weights = tap("weights", masked_softmax(scores, mask, sinks))
    mixed = F.dropout(weights, dropout) @ v
    return (mixed, weights) if return_weights else mixed


def masked_softmax(
    scores: Float[Tensor, "*heads T S"],
    mask: Bool[Tensor, "*#mask T S"] | None = None,
    sinks: Float[Tensor, " H"] | None = None,
) -> Float[Tensor, "*heads T S"]:
    """Softmax over the keys that may be seen, in float32 or wider; a row that sees none is all 0, not NaN."""
    wide = widen(scores)
    if mask is not None:
        wide = wide.masked_fill(~mask, -torch.inf)
    top = wide.amax(-1, keepdim=True)
    if sinks is not None:
        sinks = widen(sinks)[:, None, None]
        top = torch.maximum(top, sinks)
    top = top.clamp(min=torch.finfo(wide.dtype).min).detach()  # finite, so that -inf - top stays -inf
    exps = torch.exp(wide - top)
    total = exps.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks - top)
    return (exps / total.clamp(min=torch.finfo(wide.dtype).tiny)).to(scores.dtype)


def fused_attention(
    q: Float[Tensor, "*heads T K"],
    k: Float[Tensor, "*kv_heads S K"],
    v: Float[Tensor, "*kv_heads S K_v"],
    mask: Bool[Tensor, "*#mask T S"] | None,
    scale: float,
    bias: Float[Tensor, "*#bias T S"] | None,
    dropout: float,
) -> Float[Tensor, "*heads T K_v"]:
    """The same mix from PyTorch's fused kernel, which never holds the T x S weights."""
    if bias is not None:
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    grouped = k.shape[:-2] != q.shape[:-2]
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale, enable_gqa=grouped)


def share_heads(x: Float[Tensor, "*kv_heads S K"], q: Float[Tensor, "*heads T K"]) -> Float[Tensor, "..."]:
    """Repeat each key or value head for its group of neighbouring query heads: g g g, then the next."""
    if x.shape[:-2] == q.shape[:-2]:
        return x
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3)


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q, k, v can attend: same width of q and k, same length and heads of k and v."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"queries and keys differ in width: {shapes}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"keys and values differ in length or leading sizes: {shapes}")
    if q.shape[:-2] == k.shape[:-2]:
        return
    same_batch = q.dim() == k.dim() >= 4 and q.shape[:-3] == k.shape[:-3]
    if not same_batch or q.shape[-3] % k.shape[-3]:
        raise ValueError(
            f"leading sizes differ, or the query heads are no multiple of the key heads: {shapes}"
        )


class Attention(nn.Module):
    """Multi-head attention, self or cross: o(concat over heads of attend(q(x), k(s), v(s))), with s = x or a
    source.

    Sizes: x (B, T, D) -> queries (B, H, T, K), keys and values (B, G, S, K) -> mixed (B, H, T, K) -> (B, T,
    D). `fused` makes the three projections one matrix product; the weights keep their names. `qk_norm="head"`
    normalises each head of queries and keys over its K features before the rotation (arXiv:2302.05442).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        d_head: int | None = None,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        fused: bool = False,
        qk_norm: Literal["none", "head"] = "none",
        norm_eps: float = 1e-5,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        if d_head is None and d_model % n_heads:
            raise ValueError(
                f"d_model={d_model} is not divisible by n_heads={n_heads}; give d_head to free them"
            )
        if n_heads % n_kv_heads:
            raise ValueError(f"n_heads={n_heads} is not divisible by n_kv_heads={n_kv_heads}")
        self.d_head = d_model // n_heads if d_head is None else d_head
        self.scale, self.dropout = scale, dropout
        self.q = Linear(d_model, n_heads * self.d_head, qkv_bias)
        self.k = Linear(d_model, n_kv_heads * self.d_head, qkv_bias)
        self.v = Linear(d_model, n_kv_heads * self.d_head, qkv_bias)
        self.o = Linear(n_heads * self.d_head, d_model, out_bias)
        self.q_norm = RMSNorm(self.d_head, norm_eps) if qk_norm == "head" else nn.Identity()
        self.k_norm = RMSNorm(self.d_head, norm_eps) if qk_norm == "head" else nn.Identity()
        self.project = self._project_fused if fused else self._project

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        source: Float[Tensor, "B S D_s"] | None = None,
        rotation: Rotation | None = None,
        mask: Bool[Tensor, "*#mask T S_all"] | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Mix values of `source` (x itself if None) into each position of x; `mask` True = may attend."""
        queries, keys, values = self.project(x, x if source is None else source)
        queries, keys = self.q_norm(queries), self.k_norm(keys)
        if rotation is not None:
            queries, keys = rotate(queries, rotation), rotate(keys, rotation)
        queries, keys, values = tap("queries", queries), tap("keys", keys), tap("values", values)
        if cache is not None:
            keys, values = cache.append(keys, values)
        dropout = self.dropout if self.training else 0.0
        mixed = attend(queries, keys, values, mask, scale=self.scale, dropout=dropout)
        return self.o(merge_heads(tap("mixed", mixed)))

    def _project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x, keys and values of the source, split into heads: (B, H or G, T, K)."""
        return self._split(self.q(x)), self._split(self.k(source)), self._split(self.v(source))

    def _project_fused(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same in one matrix product, for self-attention."""
        if source is not x:
            return self._project(x, source)
        parts = (self.q, self.k, self.v)
        weight = torch.cat([part.weight for part in parts])
        bias = (
            None if self.q.bias is None else torch.cat([part.bias for part in parts if part.bias is not None])
        )
        q, k, v = F.linear(x, weight, bias).split([part.weight.shape[0] for part in parts], dim=-1)
        return self._split(tap("q", q)), self._split(tap("k", k)), self._split(tap("v", v))

    def _split(self, x: Float[Tensor, "B T HK"]) -> Float[Tensor, "B H T K"]:
        return x.unflatten(-1, (-1, self.d_head)).transpose(-3, -2)


def merge_heads(x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B T HK"]:
    """Concatenate the heads of each position."""
    return x.transpose(-3, -2).flatten(-2)
