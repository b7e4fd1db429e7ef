"""The whole model: tokens -> embedding -> a stack of blocks -> final norm -> head -> logits.

    Transformer = Embedding + Stack(causal) + head            (decoder-only; the other shapes use Stack again)
    Stack       = Block x n_layers, then a norm
    Block       = x + attention(x), then x + feed_forward(x), with norms where `norm_placement` says

The module tree holds weights only. Positions, masks and the cache of a running sequence are passed in, and
made once per pass. A path through the tree reads as a phrase: decoder.blocks.3.attn.q.weight.
"""

from functools import reduce

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead.model.attention import Attention, causal_mask
from clearhead.model.cache import Cache, LayerCache
from clearhead.model.config import Activation, ModelConfig, NormKind, NormPlacement, QKNorm
from clearhead.model.initial import initialise
from clearhead.model.layers import Embedding, FeedForward, Linear, make_norm
from clearhead.model.position import Rotary, Rotation, sinusoidal
from clearhead.model.tap import tap

# Which of a sub-layer's three places hold a norm:   after(x + branch(f(before(x))))
NORM_PLACES: dict[NormPlacement, tuple[bool, bool, bool]] = {
    "pre": (True, False, False),  # GPT-2, Llama
    "post": (False, False, True),  # the original Transformer, BERT
    "branch": (False, True, False),  # OLMo 2
    "sandwich": (True, True, False),  # Gemma 2
}


class Block(nn.Module):
    """One layer: attention, then a feed-forward layer, each added to the stream it reads.

    x = after(x + branch(attention(before(x)))), the same with the feed-forward layer; places without a norm
    are the identity. A causal or padding `mask` is given in the call.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_ff: int | None = None,
        *,
        n_kv_heads: int | None = None,
        d_head: int | None = None,
        activation: Activation = "silu",
        gated: bool = True,
        qkv_bias: bool = False,
        out_bias: bool = False,
        ff_bias: bool = False,
        fused_qkv: bool = False,
        qk_norm: QKNorm = "none",
        attn_scale: float | None = None,
        norm: NormKind = "rms",
        norm_eps: float = 1e-5,
        norm_bias: bool = True,
        norm_placement: NormPlacement = "pre",
        attn_dropout: float = 0.0,
        residual_dropout: float = 0.0,
        ff_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if norm_placement not in NORM_PLACES:
            raise ValueError(
                f"norm_placement={norm_placement!r} is unknown; choose one of {', '.join(NORM_PLACES)}"
            )

        def place(used: bool) -> nn.Module:
            return make_norm(norm, d_model, norm_eps, norm_bias) if used else nn.Identity()

        before, branch, after = NORM_PLACES[norm_placement]
        self.attn_norm = place(before)
        self.attn = Attention(
            d_model,
            n_heads,
            n_kv_heads,
            d_head,
            qkv_bias=qkv_bias,
            out_bias=out_bias,
            fused=fused_qkv,
            qk_norm=qk_norm,
            norm_eps=norm_eps,
            scale=attn_scale,
            dropout=attn_dropout,
        )
        self.attn_out_norm = place(branch)
        self.attn_post_norm = place(after)
        self.ff_norm = place(before)
        self.ff = FeedForward(d_model, d_ff, activation, gated, ff_bias, ff_dropout)
        self.ff_out_norm = place(branch)
        self.ff_post_norm = place(after)
        self.dropout = nn.Dropout(residual_dropout)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        rotation: Rotation | None = None,
        mask: Bool[Tensor, "*#mask #T #S"] | None = None,
        cache: LayerCache | None = None,
    ) -> Float[Tensor, "B T D"]:
        attended = self.attn(self.attn_norm(x), rotation=rotation, mask=mask, cache=cache)
        x = self.attn_post_norm(x + self.dropout(self.attn_out_norm(attended)))
        x = tap("middle", x)
        return self.ff_post_norm(x + self.dropout(self.ff_out_norm(self.ff(self.ff_norm(x)))))


class Stack(nn.Module):
    """`n_layers` blocks and a final norm. `causal`: a position sees itself and what came before; else
    everything.
    """

    def __init__(self, config: ModelConfig, causal: bool) -> None:
        super().__init__()
        if config.window is not None and not causal:
            raise ValueError(f"window={config.window} counts earlier keys and needs a causal stack")
        self.causal, self.window = causal, config.window
        self.blocks = nn.ModuleList(make_block(config) for _ in range(config.n_layers))
        self.norm = (
            make_norm(config.norm, config.d_model, config.norm_eps, config.norm_bias)
            if config.final_norm
            else nn.Identity()
        )

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        rotation: Rotation | None = None,
        mask: Bool[Tensor, "*#mask #T #S"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B T D"]:
        for index, block in enumerate(self.blocks):
            x = block(x, rotation=rotation, mask=mask, cache=None if cache is None else cache.layers[index])
        return self.norm(x)

    def mask(
        self,
        queries: Int[Tensor, " T"],
        keys: Int[Tensor, " S"],
        real: Bool[Tensor, "B S"] | None = None,
        documents: Int[Tensor, "B S"] | None = None,
    ) -> Bool[Tensor, "*B_1 #T S"] | None:
        """Who may see whom, made once per pass: causality, window, no padding, only the own document.

        `queries` and `keys` are their places in the sequence. The mask is (T, S), or (B, 1, T, S) when the
        sequences differ, with T = 1 when all queries see the same; None when everything may be seen.
        """
        parts: list[Tensor] = []
        if self.causal and self.window is not None and real is not None:
            counts = real.cumsum(1)  # a window holds real tokens, wherever the padding stands
            parts.append(causal_mask(counts[:, queries], counts, self.window)[:, None])
        elif self.causal:
            parts.append(causal_mask(queries, keys, self.window))
        if real is not None:
            parts.append(real[:, None, None, :])
        if documents is not None:
            parts.append((documents[:, :, None] == documents[:, None, :])[:, None])
        return reduce(torch.logical_and, parts) if parts else None


class Transformer(nn.Module):
    """A decoder-only language model: logits of the next token at every position.

    >>> model = Transformer(ModelConfig(vocab_size=50, d_model=32, n_layers=2, n_heads=4))
    >>> model(torch.tensor([[3, 1, 4]])).shape
    torch.Size([1, 3, 50])
    """

    def __init__(self, config: ModelConfig, seed: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.d_model)
        if config.positions == "learned":
            self.positions = Embedding(config.max_len, config.d_model)
        self.rotary = (
            Rotary(config.head_width, config.rotary_theta, config.rotary_layout)
            if config.positions == "rotary"
            else None
        )
        self.dropout = nn.Dropout(config.embed_dropout)
        self.decoder = Stack(config, causal=True)
        self.head = Linear(config.d_model, config.vocab_size, config.head_bias)
        if config.tied:
            self.head.weight = self.embed.weight
        self.place = {
            "learned": add_learned,
            "sinusoidal": add_sinusoidal,
            "sinusoidal_concat": add_sinusoidal,
        }.get(config.positions, add_nothing)
        initialise(self, config, seed)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        *,
        positions: Int[Tensor, "*#B T"] | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        documents: Int[Tensor, "B T"] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "B T V"]:
        """Logits (not probabilities) of the token after each position.

        `mask`: False for padding, left or right. `documents`: a number per document in packed windows; a
        token sees its own document only and positions restart in each. `positions`: where each token stands,
        worked out from the others if None. `cache`: T tokens continue the sequences in it, and it is
        advanced. Logits at padding are meaningless but finite.
        """
        check_inputs(tokens, positions, mask, documents, cache)
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask
        if cache is None:
            slots = torch.arange(tokens.shape[1], device=tokens.device)
            placed = count_positions(mask, documents, slots)
            visible = self.decoder.mask(slots, slots, mask, documents)
        else:
            slots, placed = cache.open(real)
            visible = self.decoder.mask(slots, torch.arange(cache.capacity, device=tokens.device), cache.real)
        placed = placed if positions is None else positions

        x = self.dropout(self.place(self, self.embed(tokens), placed))
        rotation = None if self.rotary is None else add_head_dimension(self.rotary.angles(placed))
        hidden = self.decoder(x, rotation=rotation, mask=visible, cache=cache)
        if cache is not None:
            cache.advance(real)
        return self.head(hidden)

    def new_cache(self, batch_size: int, capacity: int | None = None) -> Cache:
        """An empty cache for `batch_size` sequences of at most `capacity` (max_len if None) positions."""
        config, weight = self.config, self.embed.weight
        capacity = config.max_len if capacity is None else capacity
        if config.positions == "learned" and capacity > config.max_len:
            raise ValueError(
                f"a cache of {capacity} positions exceeds max_len={config.max_len} learned positions"
            )
        return Cache(
            config.n_layers,
            batch_size,
            config.kv_heads,
            capacity,
            config.head_width,
            weight.device,
            weight.dtype,
        )


def add_learned(
    model: Transformer, x: Float[Tensor, "B T D"], positions: Int[Tensor, "*#B T"]
) -> Float[Tensor, "B T D"]:
    """x plus the learned vector of each position."""
    if positions.shape[-1] > model.config.max_len:
        raise ValueError(
            f"a sequence of {positions.shape[-1]} tokens exceeds the "
            f"{model.config.max_len} learned positions (max_len)"
        )
    return x + model.positions(positions)


def add_sinusoidal(
    model: Transformer, x: Float[Tensor, "B T D"], positions: Int[Tensor, "*#B T"]
) -> Float[Tensor, "B T D"]:
    """x plus the sinusoidal vector of each position."""
    concatenated = model.config.positions == "sinusoidal_concat"
    return x + sinusoidal(positions, model.config.d_model, concatenated).to(x.dtype)


def add_nothing(
    model: Transformer, x: Float[Tensor, "B T D"], positions: Int[Tensor, "*#B T"]
) -> Float[Tensor, "B T D"]:
    """x: rotary positions enter at the queries and keys, and without positions nothing does."""
    return x


def check_inputs(
    tokens: Tensor,
    positions: Tensor | None,
    mask: Tensor | None,
    documents: Tensor | None,
    cache: Cache | None,
) -> None:
    """Raise ValueError unless the arguments of a forward pass fit together."""
    if tokens.dim() != 2:
        raise ValueError(
            f"tokens {tuple(tokens.shape)} must be (batch, length); give tokens[None] for one row"
        )
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"the mask is {mask.dtype}, not boolean (True = a real token)")
    for name, other in (("mask", mask), ("documents", documents)):
        if other is not None and other.shape != tokens.shape:
            raise ValueError(
                f"{name} {tuple(other.shape)} and tokens {tuple(tokens.shape)} differ in shape; "
                f"{name} is about the tokens given, not about those in the cache"
            )
    if positions is not None and positions.shape[-1] != tokens.shape[1]:
        raise ValueError(f"positions {tuple(positions.shape)} are not one per token {tuple(tokens.shape)}")
    if cache is not None and documents is not None:
        raise ValueError("packed documents and a cache do not go together: give one of them")
    if cache is not None and len(cache.real) != len(tokens):
        raise ValueError(
            f"the cache holds {len(cache.real)} sequences and {len(tokens)} rows of tokens are given"
        )


def make_block(config: ModelConfig) -> Block:
    """The block this config describes."""
    return Block(
        config.d_model,
        config.n_heads,
        config.d_ff,
        n_kv_heads=config.n_kv_heads,
        d_head=config.d_head,
        activation=config.activation,
        gated=config.gated,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        ff_bias=config.ff_bias,
        fused_qkv=config.fused_qkv,
        qk_norm=config.qk_norm,
        attn_scale=config.attn_scale,
        norm=config.norm,
        norm_eps=config.norm_eps,
        norm_bias=config.norm_bias,
        norm_placement=config.norm_placement,
        attn_dropout=config.attn_dropout,
        residual_dropout=config.residual_dropout,
        ff_dropout=config.ff_dropout,
    )


def count_positions(
    mask: Bool[Tensor, "B T"] | None, documents: Int[Tensor, "B T"] | None, slots: Int[Tensor, " T"]
) -> Int[Tensor, "*B T"]:
    """Where each token stands: its place among the real tokens of its document. (T), or (B, T) when rows
    differ.
    """
    if documents is None:
        return slots if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    real = torch.ones_like(documents, dtype=torch.bool) if mask is None else mask
    starts = torch.ones_like(real)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    counts = real.cumsum(1)
    before = torch.where(starts, counts - real.long(), 0).cummax(1).values  # real tokens of earlier documents
    return (counts - before - 1).clamp(min=0)


def add_head_dimension(rotation: Rotation) -> Rotation:
    """(B, T, K/2) -> (B, 1, T, K/2), so that every head turns by the same angles; (T, K/2) broadcasts as it
    is.
    """
    if rotation.cos.dim() == 2:
        return rotation
    return rotation._replace(cos=rotation.cos[:, None], sin=rotation.sin[:, None])
