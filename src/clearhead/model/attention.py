"""Attention: every query looks at the keys it may see and takes a weighted mean of their values.

    attend(q, k, v) = softmax(q k^T / sqrt(K)) v                    (Vaswani et al. 2017, arXiv:1706.03762)

`attend` has two faces. When nobody listens it calls the fused kernel; when a recorder listens, or the weights
are asked for, it computes scores, weights and mix step by step and names them with `tap`. A test holds the
two equal. Masks are boolean, True = may attend; of the commonest, "causal", the kernel needs to know the name
only. A query that may see no key at all gets 0, with finite gradients.

    MHA: n_kv_heads = n_heads      GQA: fewer key/value heads, each shared by      MQA: n_kv_heads = 1
    q q q q                        n_heads / n_kv_heads neighbours:                q q q q
    | | | |                        q q q q                                         \\ \\ / /
    k k k k                        \\/   \\/                                           k
                                    k    k
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, get_args, overload

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from clearhead.model.cache import LayerCache
from clearhead.model.config import QKNorm, check_heads
from clearhead.model.config_parts import LatentConfig
from clearhead.model.layers import Linear, RMSNorm, widen
from clearhead.model.masks import Causal, spelled_out
from clearhead.model.position import Rotation, rotate
from clearhead.model.products import linear
from clearhead.model.tap import listening, tap


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Causal | None = None, *, scale: float | None = None,
    bias: Tensor | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    dropout: float = 0.0, return_weights: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | Causal | None = None, *, scale: float | None = None,
    bias: Tensor | None = None, softcap: float | None = None, sinks: Tensor | None = None,
    dropout: float = 0.0, return_weights: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attend(
    q: Float[Tensor, "*heads T K"],
    k: Float[Tensor, "*kv_heads S K"],
    v: Float[Tensor, "*kv_heads S K_v"],
    mask: Bool[Tensor, "*#mask #T #S"] | Causal | None = None,
    *,
    scale: float | None = None,
    bias: Float[Tensor, "*#bias #T #S"] | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, " H"] | None = None,
    dropout: float = 0.0,
    return_weights: bool = False,
) -> Float[Tensor, "*heads T K_v"] | tuple[Float[Tensor, "*heads T K_v"], Float[Tensor, "*heads T S"]]:
    """Scaled dot-product attention over any leading dimensions: softmax(q k^T * scale) v.

    With batch and head dimensions before T, q may have more heads than k and v: query head h uses key/value
    head h // (H / G). `mask`: True = may attend, broadcasts to the scores; "causal": the queries are those of
    the last T keys, and see themselves and what came before. `scale`: 1/sqrt(K) if None. `softcap` c squashes
    the scores to c tanh(score / c); `bias` is added after that; `sinks`, one logit per head, join the softmax
    and are dropped; `dropout` is the share of weights set to zero (give 0 outside training).

    Returns the mix, and with `return_weights` also the weights before dropout, which are exactly 0 where
    masked. Raises ValueError when the arguments do not fit together.
    """
    check_fit(q, k, v, mask, bias, sinks)
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
    weights = tap("weights", masked_softmax(scores, spelled_out(mask, q, k), sinks))
    mixed = F.dropout(weights, dropout).to(v.dtype) @ v
    return (mixed, weights) if return_weights else mixed


def masked_softmax(
    scores: Float[Tensor, "*heads T S"],
    mask: Bool[Tensor, "*#mask #T #S"] | None = None,
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
    # The largest term is exp(0), so a sum below 1 is 0: the row that sees nothing.
    return (exps / total.clamp(min=1.0)).to(scores.dtype)


def fused_attention(
    q: Float[Tensor, "*heads T K"],
    k: Float[Tensor, "*kv_heads S K"],
    v: Float[Tensor, "*kv_heads S K_v"],
    mask: Bool[Tensor, "*#mask #T #S"] | Causal | None,
    scale: float,
    bias: Float[Tensor, "*#bias #T #S"] | None,
    dropout: float,
) -> Float[Tensor, "*heads T K_v"]:
    """The same mix from PyTorch's fused kernel, which never holds the T x S weights."""
    causal = False
    if isinstance(mask, str) and bias is None and q.shape[-2] == k.shape[-2]:
        mask, causal = None, True  # torch aligns its own at the top left: the same where T = S
    mask = spelled_out(mask, q, k)
    if bias is not None:
        mask = bias if mask is None else bias.masked_fill(~mask, -torch.inf)
    grouped = k.shape[:-2] != q.shape[:-2]
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=grouped)


def share_heads(x: Float[Tensor, "*kv_heads S K_x"], q: Float[Tensor, "*heads T K"]) -> Float[Tensor, "..."]:
    """Repeat each key or value head for its group of neighbouring query heads: g g g, then the next."""
    if x.shape[:-2] == q.shape[:-2]:
        return x
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], dim=-3)


def check_fit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | str | None, bias: Tensor | None, sinks: Tensor | None
) -> None:
    """Raise ValueError, with all shapes, unless the arguments of `attend` fit together."""
    problem = find_misfit(q, k, v, mask, bias, sinks)
    if problem is not None:
        raise ValueError(f"{problem}: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")


def find_misfit(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | str | None, bias: Tensor | None, sinks: Tensor | None
) -> str | None:
    """What is wrong with these arguments of `attend`, or None."""
    if min(q.dim(), k.dim(), v.dim()) < 2:
        return "queries, keys and values need at least a length and a width"
    if q.shape[-1] != k.shape[-1]:
        return "queries and keys differ in width"
    if k.shape[:-1] != v.shape[:-1]:
        return "keys and values differ in length or leading sizes"
    if 0 in k.shape[-2:]:
        return "there are no keys to look at"
    if q.shape[:-2] != k.shape[:-2]:
        same_batch = q.dim() == k.dim() >= 4 and q.shape[:-3] == k.shape[:-3]
        if not same_batch or k.shape[-3] == 0 or q.shape[-3] % k.shape[-3]:
            return "leading sizes differ, or the query heads are no multiple of the key heads"
    scores = (*q.shape[:-1], k.shape[-2])
    if isinstance(mask, str) and mask not in get_args(Causal):
        return f"the mask {mask!r:.40} is unknown; give 'causal' or a boolean tensor"
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        return f"the mask is {mask.dtype}, not boolean (True = may attend); what is added goes into bias"
    if isinstance(mask, Tensor) and not broadcasts(mask.shape, scores):
        return f"the mask {tuple(mask.shape)} does not broadcast to the scores {scores}"
    if bias is not None and not broadcasts(bias.shape, scores):
        return f"the bias {tuple(bias.shape)} does not broadcast to the scores {scores}"
    if sinks is not None and sinks.shape != q.shape[-3:-2]:
        return f"the sinks {tuple(sinks.shape)} are not one per query head"
    return None


def broadcasts(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a tensor of this shape broadcasts to `target` without making it larger."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size == wanted or size == 1 for size, wanted in pairs)


class Attention(nn.Module):
    """Multi-head attention, self or cross: o(concat over heads of attend(q(x), k(s), v(s))), with s = x or a
    source.

    Sizes: x (B, T, D) -> queries (B, H, T, K), keys and values (B, G, S, K) -> mixed (B, H, T, K) -> (B, T,
    D).

    n_kv_heads, d_head: n_heads and d_model / n_heads if None.
    fused: the three projections are one matrix product; the weights keep their names.
    qk_norm: queries and keys are normalised before the rotation, "head": each head over its K features
        (arXiv:2302.05442), "flat": all heads together; the norm_ options are those of RMSNorm.
    clip: queries, keys and values are then clamped to +- this.
    scale, softcap, sinks, dropout: see `attend`; `sinks` makes the logits, one per head, learned.
    d_source: the width of the source; None: d_model.

    Sizes that do not go together are a ValueError.
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
        qk_norm: QKNorm = "none",
        norm_eps: float = 1e-5,
        norm_offset: float = 0.0,
        norm_wide_gain: bool = False,
        clip: float | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        dropout: float = 0.0,
        d_source: int | None = None,
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        check_heads(d_model, n_heads, n_kv_heads, d_head)
        if qk_norm not in get_args(QKNorm):
            raise ValueError(f"qk_norm={qk_norm!r} is unknown; choose one of {', '.join(get_args(QKNorm))}")
        self.d_head = d_model // n_heads if d_head is None else d_head
        self.scale, self.softcap, self.dropout = scale, softcap, dropout
        d_source = d_model if d_source is None else d_source
        self.q = Linear(d_model, n_heads * self.d_head, qkv_bias)
        self.k = Linear(d_source, n_kv_heads * self.d_head, qkv_bias)
        self.v = Linear(d_source, n_kv_heads * self.d_head, qkv_bias)
        self.o = Linear(n_heads * self.d_head, d_model, out_bias)

        def norm(heads: int) -> nn.Module:
            widths = {"head": self.d_head, "flat": heads * self.d_head}
            if qk_norm not in widths:
                return nn.Identity()
            return RMSNorm(widths[qk_norm], norm_eps, norm_offset, norm_wide_gain)

        self.q_norm, self.k_norm = norm(n_heads), norm(n_kv_heads)
        self.sinks = nn.Parameter(torch.zeros(n_heads)) if sinks else None
        self.limit = unlimited if clip is None else partial(torch.clamp, min=-clip, max=clip)
        self.project = project_fused if fused else project_apart
        self.heads = norm_then_split if qk_norm == "flat" else split_then_norm

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        source: Float[Tensor, "B S D_s"] | None = None,
        remembered: tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S K"]] | None = None,
        rotation: Rotation | None = None,
        mask: Bool[Tensor, "*#mask #T #S_all"] | Causal | None = None,
        bias: Float[Tensor, "*#bias T #S_all"] | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Mix values of `source` (x itself if None) into each position of x; `mask`: see `attend`.

        `remembered`: the source's keys and values, as `remember` made them. A `cache` has room behind the
        queries' own keys, which "causal" does not leave out: its mask is made from places, by `causal_mask`.
        """
        if remembered is None:
            q, k, v = self.project(self, x, x if source is None else source)
            queries, keys = self.heads(q, self.q_norm, self), self.heads(k, self.k_norm, self)
            values = split_heads(self.limit(v), self.d_head)
        else:
            queries, (keys, values) = self.heads(self.q(x), self.q_norm, self), remembered
        if rotation is not None:
            queries, keys = rotate(queries, rotation), rotate(keys, rotation)
        queries, keys, values = tap("queries", queries), tap("keys", keys), tap("values", values)
        if cache is not None:
            keys, values = cache.append(keys, values)
        dropout = self.dropout if self.training else 0.0
        options = {"scale": self.scale, "bias": bias, "softcap": self.softcap, "sinks": self.sinks}
        mixed = attend(queries, keys, values, mask, dropout=dropout, **options)
        return self.o(merge_heads(tap("mixed", mixed)))

    def remember(
        self, source: Float[Tensor, "B S D_s"]
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S K"]]:
        """Keys and values of a source, to be made once and used at every step."""
        keys = self.heads(self.k(source), self.k_norm, self)
        return keys, split_heads(self.limit(self.v(source)), self.d_head)


def project_apart(
    attention: Attention, x: Float[Tensor, "B T D"], source: Float[Tensor, "B S D_s"]
) -> tuple[Float[Tensor, "B T HK"], Float[Tensor, "B S GK"], Float[Tensor, "B S GK"]]:
    """Queries of x, keys and values of the source, by three matrix products."""
    return attention.q(x), attention.k(source), attention.v(source)


def project_fused(
    attention: Attention, x: Float[Tensor, "B T D"], source: Float[Tensor, "B S D_s"]
) -> tuple[Float[Tensor, "B T HK"], Float[Tensor, "B S GK"], Float[Tensor, "B S GK"]]:
    """The same by one matrix product, for self-attention; a source of its own needs them apart."""
    if source is not x:
        return project_apart(attention, x, source)
    parts = (attention.q, attention.k, attention.v)
    weight = torch.cat([part.weight for part in parts])
    biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
    projected = linear(x, weight, torch.cat(biases) if biases else None)
    q, k, v = projected.split([part.weight.shape[0] for part in parts], dim=-1)
    return tap("q", q), tap("k", k), tap("v", v)  # named like the outputs of the three modules


def split_then_norm(
    x: Float[Tensor, "B T HK"], norm: nn.Module, attention: Attention
) -> Float[Tensor, "B H T K"]:
    """Cut into heads and normalise each over its own features (or not at all)."""
    return attention.limit(norm(split_heads(x, attention.d_head)))


def norm_then_split(
    x: Float[Tensor, "B T HK"], norm: nn.Module, attention: Attention
) -> Float[Tensor, "B H T K"]:
    """Normalise over the features of all heads together, then cut into heads."""
    return split_heads(attention.limit(norm(x)), attention.d_head)


def unlimited(x: Tensor) -> Tensor:
    """x, when there is no clip."""
    return x


def split_heads(x: Float[Tensor, "B T HK"], d_head: int) -> Float[Tensor, "B H T K"]:
    """Cut the features of each position into heads."""
    return x.unflatten(-1, (-1, d_head)).transpose(-3, -2)


def merge_heads(x: Float[Tensor, "B H T K"]) -> Float[Tensor, "B T HK"]:
    """Concatenate the heads of each position."""
    return x.transpose(-3, -2).flatten(-2)


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values are made from one narrow latent per position.

        latent  = norm(kv_a(x)[:kv_rank])          what the cache keeps, with one rotary key for all heads
        k, v    = kv_b(latent) per head;  k = [plain | rotary key, the same in every head]
        q       = q_b(norm(q_a(x))) per head, or q(x);  q = [plain | turned]

    It has two faces. `attend_unfolded` makes every head's keys and values, as written above. A single query
    among many cached latents takes `attend_folded`, which moves kv_b to the query's side: q (W l) = (q W) l.
    A test holds the two equal. `bias`: on q_a, kv_a and o, as the published models have it; `scale`: 1 /
    sqrt(d_plain + d_rotary) if None. DeepSeek-AI 2024, arXiv:2405.04434.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        latent: LatentConfig,
        *,
        bias: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.n_heads, self.latent, self.dropout = n_heads, latent, dropout
        self.scale = 1 / math.sqrt(latent.d_key) if scale is None else scale
        if latent.q_rank is None:
            self.q = Linear(d_model, n_heads * latent.d_key)
        else:
            self.q_a = Linear(d_model, latent.q_rank, bias)
            self.q_a_norm = RMSNorm(latent.q_rank, latent.norm_eps)
            self.q_b = Linear(latent.q_rank, n_heads * latent.d_key)
        self.kv_a = Linear(d_model, latent.kv_rank + latent.d_rotary, bias)
        self.kv_a_norm = RMSNorm(latent.kv_rank, latent.norm_eps)
        self.kv_b = Linear(latent.kv_rank, n_heads * (latent.d_plain + latent.d_value))
        self.o = Linear(n_heads * latent.d_value, d_model, bias)
        self.query = direct_query if latent.q_rank is None else latent_query

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        rotation: Rotation | None = None,
        mask: Bool[Tensor, "*#mask #T #S_all"] | Causal | None = None,
        bias: Float[Tensor, "*#bias T #S_all"] | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Attention of x to itself and to what the cache holds; `mask` and `cache`: see `Attention`."""
        sizes = self.latent
        queries = split_heads(self.query(self, x), sizes.d_key)
        plain, turned = queries.split([sizes.d_plain, sizes.d_rotary], dim=-1)
        latent, key = self.kv_a(x).split([sizes.kv_rank, sizes.d_rotary], dim=-1)
        latent, key = self.kv_a_norm(latent)[:, None], key[:, None]  # one "head"
        if rotation is not None:
            turned, key = rotate(turned, rotation), rotate(key, rotation)
        if cache is not None:
            key, latent = cache.append(key, latent)
        options = {"scale": self.scale, "bias": bias, "dropout": self.dropout if self.training else 0.0}
        folded = x.shape[1] == 1 and bias is None and not listening()
        look = attend_folded if folded else attend_unfolded
        mixed = look(self, plain, turned, latent, key, mask, options)
        return self.o(merge_heads(tap("mixed", mixed)))


def attend_unfolded(
    attention: LatentAttention,
    plain: Float[Tensor, "B H T K_p"],
    turned: Float[Tensor, "B H T K_r"],
    latent: Float[Tensor, "B 1 S R"],
    key: Float[Tensor, "B 1 S K_r"],
    mask: Bool[Tensor, "*#mask #T #S"] | Causal | None,
    options: dict[str, Any],
) -> Float[Tensor, "B H T K_v"]:
    """Every head's keys and values from the latents, then attention as ever."""
    sizes = attention.latent
    unfolded = split_heads(attention.kv_b(latent[:, 0]), sizes.d_plain + sizes.d_value)
    plain_keys, values = unfolded.split([sizes.d_plain, sizes.d_value], dim=-1)
    queries = tap("queries", torch.cat([plain, turned], dim=-1))
    keys = tap("keys", torch.cat([plain_keys, key.expand(-1, attention.n_heads, -1, -1)], dim=-1))
    return attend(queries, keys, tap("values", values), mask, **options)


def attend_folded(
    attention: LatentAttention,
    plain: Float[Tensor, "B H 1 K_p"],
    turned: Float[Tensor, "B H 1 K_r"],
    latent: Float[Tensor, "B 1 S R"],
    key: Float[Tensor, "B 1 S K_r"],
    mask: Bool[Tensor, "*#mask 1 #S"] | Causal | None,
    options: dict[str, Any],
) -> Float[Tensor, "B H 1 K_v"]:
    """The same for one query per head, with the latents as keys and values: nothing is made per position.

    All heads look at the same keys, so they stand where other attention has its queries.
    """
    sizes = attention.latent
    mask = None if isinstance(mask, str) else mask  # the last position sees all
    matrices = attention.kv_b.weight.unflatten(0, (attention.n_heads, -1))
    to_keys, to_values = matrices.split([sizes.d_plain, sizes.d_value], dim=1)  # (H, K, R)
    queries = torch.cat([plain @ to_keys, turned], dim=-1).transpose(1, 2)  # (B, 1, H, R + K_r)
    mixed = attend(queries, torch.cat([latent, key], dim=-1), latent, mask, **options)
    return mixed.transpose(1, 2) @ to_values.transpose(-2, -1)


def direct_query(attention: LatentAttention, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T HK"]:
    """Queries by one matrix product."""
    return attention.q(x)


def latent_query(attention: LatentAttention, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T HK"]:
    """Queries through a latent of their own."""
    return attention.q_b(attention.q_a_norm(attention.q_a(x)))
