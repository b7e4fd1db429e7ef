"""The whole model, in its three shapes, from one stack of blocks used once or twice.

    decoder-only       tokens -> embedding -> Stack(causal) -> head -> logits of the next token
    encoder-only       tokens -> embedding -> Stack -> head -> logits or labels of these tokens
    encoder-decoder    source -> embedding -> Stack -> memory
                       tokens -> embedding -> Stack(causal, cross) -> head -> logits of the next token

    Stack = positions, blocks, a norm
    Block = x + attention(x), then x + cross(x, memory), then x + feed_forward(x), with norms where
            `norm_placement` says

The module tree holds weights only. Positions, masks and the cache of a running sequence are passed in, and
made once per pass. A path through the tree reads as a phrase: decoder.blocks.3.attn.q.weight.
"""

from functools import reduce
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead.model.attention import Attention, LatentAttention, causal_mask
from clearhead.model.cache import Cache, LayerCache
from clearhead.model.config import Activation, ModelConfig, NormKind, NormPlacement, QKNorm
from clearhead.model.experts import Experts, Routing
from clearhead.model.heads import make_head
from clearhead.model.initial import initialise
from clearhead.model.layers import Embedding, FeedForward, make_config_norm, make_norm
from clearhead.model.position import Rotary, Rotation, relative_bucket, sinusoidal
from clearhead.model.tap import tap

KeysValues = tuple[Tensor, Tensor]

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
    are the identity. A causal or padding `mask` is given in the call. `attn`, `ff` and `cross` put modules of
    your own in the places of attention, of the feed-forward layer, and of attention to a memory.
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
        norm_offset: float = 0.0,
        norm_wide_gain: bool = False,
        norm_placement: NormPlacement = "pre",
        first_norm: bool = True,
        attn_dropout: float = 0.0,
        residual_dropout: float = 0.0,
        ff_dropout: float = 0.0,
        attn: nn.Module | None = None,
        ff: nn.Module | None = None,
        cross: Attention | None = None,
    ) -> None:
        super().__init__()
        if norm_placement not in NORM_PLACES:
            raise ValueError(
                f"norm_placement={norm_placement!r} is unknown; choose one of {', '.join(NORM_PLACES)}"
            )

        def place(used: bool) -> nn.Module:
            if not used:
                return nn.Identity()
            return make_norm(norm, d_model, norm_eps, norm_bias, norm_offset, norm_wide_gain)

        before, branch, after = NORM_PLACES[norm_placement]
        self.attn_norm = place(before and first_norm)
        self.attn = attn or Attention(
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
        if cross is not None:
            self.cross_norm = place(before)
            self.cross = cross
            self.cross_out_norm = place(branch)
            self.cross_post_norm = place(after)
        self.ff_norm = place(before)
        self.ff = ff or FeedForward(d_model, d_ff, activation, gated, ff_bias, ff_dropout)
        self.ff_out_norm = place(branch)
        self.ff_post_norm = place(after)
        self.dropout = nn.Dropout(residual_dropout)
        self.look_back = see_nothing if cross is None else see_memory
        self.feed = feed_experts if isinstance(self.ff, Experts) else feed_forward

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        rotation: Rotation | None = None,
        mask: Bool[Tensor, "*#mask #T #S"] | None = None,
        bias: Float[Tensor, "*#bias T #S"] | None = None,
        memory: KeysValues | None = None,
        memory_mask: Bool[Tensor, "*#memory_mask #T #S_m"] | None = None,
        cache: LayerCache | None = None,
        routing: Routing | None = None,
    ) -> Float[Tensor, "B T D"]:
        attended = self.attn(self.attn_norm(x), rotation=rotation, mask=mask, bias=bias, cache=cache)
        x = self.attn_post_norm(x + self.dropout(self.attn_out_norm(attended)))
        x = self.look_back(self, tap("middle", x), memory, memory_mask)
        fed = self.feed(self, self.ff_norm(x), routing)
        return self.ff_post_norm(x + self.dropout(self.ff_out_norm(fed)))


def see_memory(
    block: Block, x: Float[Tensor, "B T D"], memory: KeysValues | None, mask: Bool[Tensor, "..."] | None
) -> Float[Tensor, "B T D"]:
    """The sub-layer between the two others: attention to the keys and values of the encoder's output."""
    if memory is None:
        raise ValueError("this block attends to a memory; give the keys and values that `remember` made")
    seen = block.cross(block.cross_norm(x), remembered=memory, mask=mask)
    return tap("crossed", block.cross_post_norm(x + block.dropout(block.cross_out_norm(seen))))


def see_nothing(
    block: Block, x: Float[Tensor, "B T D"], memory: KeysValues | None, mask: Bool[Tensor, "..."] | None
) -> Float[Tensor, "B T D"]:
    """x: there is no memory."""
    return x


def feed_forward(block: Block, x: Float[Tensor, "B T D"], routing: Routing | None) -> Float[Tensor, "B T D"]:
    """The feed-forward layer of x."""
    return block.ff(x)


def feed_experts(block: Block, x: Float[Tensor, "B T D"], routing: Routing | None) -> Float[Tensor, "B T D"]:
    """The experts of x; `routing` sees who chose whom."""
    return block.ff(x, routing)


class Memory(NamedTuple):
    """What a decoder sees of the encoder's output: each layer's keys and values, and which are no padding."""

    layers: list[KeysValues]
    mask: Tensor | None


class View(NamedTuple):
    """What a stack works out once per pass, for layers without and with a window, and for all."""

    masks: tuple[Tensor | None, Tensor | None]
    rotations: tuple[Rotation | None, Rotation | None]
    bias: Tensor | None


class Stack(nn.Module):
    """Positions, `n_layers` blocks and a final norm.

    `causal`: a position sees itself and what came before; else everything. `cross`: each block also attends
    to a memory.
    """

    def __init__(self, config: ModelConfig, causal: bool, cross: bool = False) -> None:
        super().__init__()
        self.config, self.causal = config, causal
        if config.positions == "learned":
            self.positions = Embedding(config.max_len + config.position_offset, config.d_model)
        if config.positions == "relative":
            self.relative = Embedding(config.relative_buckets, config.n_heads)
        if config.n_token_types:
            self.types = Embedding(config.n_token_types, config.d_model)
        self.embed_norm = make_config_norm(config) if config.embed_norm else nn.Identity()
        self.dropout = nn.Dropout(config.embed_dropout)
        self.blocks = nn.ModuleList(make_block(config, layer, cross) for layer in range(config.n_layers))
        self.norm = make_config_norm(config) if config.final_norm else nn.Identity()
        self.place = PLACES[config.positions]
        self.add_types = add_token_types if config.n_token_types else add_no_types
        self.rotaries = make_rotaries(config)
        self.windowed = [config.has_window(layer) for layer in range(config.n_layers)]
        self.turned = [config.turns(layer) for layer in range(config.n_layers)]

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        positions: Int[Tensor, "*#B T"] | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        documents: Int[Tensor, "B T"] | None = None,
        types: Int[Tensor, "B T"] | None = None,
        memory: Memory | None = None,
        cache: Cache | None = None,
        routing: Routing | None = None,
    ) -> Float[Tensor, "B T D"]:
        """Hidden states from token embeddings. The arguments are those of `Transformer`."""
        real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        if cache is None:
            queries = keys = torch.arange(x.shape[1], device=x.device)
            placed, visible = count_positions(mask, documents, queries), mask
        else:
            queries, placed = cache.open(real)
            keys, visible = torch.arange(cache.capacity, device=x.device), cache.real
        placed = placed if positions is None else positions
        view = self.view(placed, queries, keys, visible, documents)

        x = self.add_types(self, self.place(self, x, placed), types)
        x = self.dropout(self.embed_norm(x))
        memory_mask = None if memory is None or memory.mask is None else memory.mask[:, None, None, :]
        for layer, block in enumerate(self.blocks):
            window = self.windowed[layer]
            x = block(
                x,
                rotation=view.rotations[window] if self.turned[layer] else None,
                mask=view.masks[window],
                bias=view.bias,
                memory=None if memory is None else memory.layers[layer],
                memory_mask=memory_mask,
                cache=None if cache is None else cache.layers[layer],
                routing=routing,
            )
        if cache is not None:
            cache.advance(real)
        return self.norm(x)

    def view(
        self,
        positions: Int[Tensor, "*B T"],
        queries: Int[Tensor, " T"],
        keys: Int[Tensor, " S"],
        real: Bool[Tensor, "B S"] | None,
        documents: Int[Tensor, "B S"] | None,
    ) -> View:
        """Masks, rotations and bias of this pass; what no layer uses is not made."""
        full = None if all(self.windowed) else self.mask(queries, keys, real, documents)
        narrow = None
        if any(self.windowed):
            narrow = self.mask(queries, keys, real, documents, self.config.window)
        turn = [None if r is None else add_head_dimension(r.angles(positions)) for r in self.rotaries]
        bias = None
        if self.config.positions == "relative":
            sizes = (self.config.relative_buckets, self.config.relative_max_distance)
            buckets = relative_bucket(keys[None, :] - queries[:, None], *sizes, self.causal)
            bias = self.relative(buckets).permute(2, 0, 1)  # (T, S, H) -> (H, T, S)
        return View((full, narrow), (turn[0], turn[1]), bias)

    def mask(
        self,
        queries: Int[Tensor, " T"],
        keys: Int[Tensor, " S"],
        real: Bool[Tensor, "B S"] | None = None,
        documents: Int[Tensor, "B S"] | None = None,
        window: int | None = None,
    ) -> Bool[Tensor, "*B_1 #T S"] | None:
        """Who may see whom, made once per pass: causality, window, no padding, only the own document.

        `queries` and `keys` are their places in the sequence. The mask is (T, S), or (B, 1, T, S) when the
        sequences differ, with T = 1 when all queries see the same; None when everything may be seen.
        """
        parts: list[Tensor] = []
        if window is not None and real is not None:
            counts = real.cumsum(1)  # a window holds real tokens, wherever the padding stands
            parts.append(self.reach(counts[:, queries], counts, window)[:, None])
        elif self.causal or window is not None:
            parts.append(self.reach(queries, keys, window))
        if self.causal and window is not None and real is not None:
            parts.append(causal_mask(queries, keys))  # padding counts like the token before it
        if real is not None:
            parts.append(real[:, None, None, :])
        if documents is not None:
            parts.append((documents[:, :, None] == documents[:, None, :])[:, None])
        return reduce(torch.logical_and, parts) if parts else None

    def reach(
        self, queries: Int[Tensor, "*B_1 T"], keys: Int[Tensor, "*B_1 S"], window: int | None
    ) -> Bool[Tensor, "*B_1 T S"]:
        """Causal: the `window` keys up to the query. Else: the keys at most `window` to either side."""
        if self.causal:
            return causal_mask(queries, keys, window)
        return (queries[..., :, None] - keys[..., None, :]).abs() <= (window or 0)

    def remember(self, hidden: Float[Tensor, "B S D"], mask: Bool[Tensor, "B S"] | None) -> Memory:
        """Every layer's keys and values of the encoder's output, made once and used at every step."""
        layers = []
        for block in self.blocks:
            assert isinstance(block, Block)
            layers.append(block.cross.remember(hidden))
        return Memory(layers, mask)


class Transformer(nn.Module):
    """A model of one of the three shapes: logits at every position, or what its head predicts.

    >>> model = Transformer(ModelConfig(vocab_size=50, d_model=32, n_layers=2, n_heads=4))
    >>> model(torch.tensor([[3, 1, 4]])).shape
    torch.Size([1, 3, 50])
    """

    origin: Any = None  # of a published model: where it came from, so that it is saved alike

    def __init__(self, config: ModelConfig, seed: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.embed = Embedding(config.vocab_size, config.d_model)
        if config.source_vocab_size is not None:
            self.source_embed = Embedding(config.source_vocab_size, config.d_model)
        if config.shape != "decoder":
            part = config if config.shape == "encoder" else config.encoder_part()
            self.encoder = Stack(part, causal=False)
        if config.shape != "encoder":
            self.decoder = Stack(config, causal=True, cross=config.shape == "encoder-decoder")
        self.head = make_head(config)
        if config.tied and config.head in ("lm", "masked"):
            self.head.weight = self.embed.weight
        initialise(self, config, seed)

    @property
    def stack(self) -> Stack:
        """The stack that `tokens` pass: the decoder, or the encoder where there is no decoder."""
        return self.encoder if self.config.shape == "encoder" else self.decoder

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        *,
        source: Int[Tensor, "B S"] | None = None,
        source_mask: Bool[Tensor, "B S"] | None = None,
        memory: Memory | None = None,
        positions: Int[Tensor, "*#B T"] | None = None,
        mask: Bool[Tensor, "B T"] | None = None,
        documents: Int[Tensor, "B T"] | None = None,
        types: Int[Tensor, "B T"] | None = None,
        cache: Cache | None = None,
        routing: Routing | None = None,
    ) -> Float[Tensor, "..."]:
        """Logits (not probabilities) at each position; of the token after it in a decoder.

        `mask`: False for padding, left or right. `documents`: a number per document in packed windows; a
        token sees its own document only and positions restart in each. `types`: sentence A or B of each
        token. `positions`: where each token stands, worked out from the others if None. `cache`: T tokens
        continue the sequences in it, and it is advanced. `source`: what an encoder-decoder reads, or
        `memory`, what `encode` made of it. `routing`: an empty Routing, in which the routers of a mixture of
        experts note what they decide. Logits at padding are meaningless but finite.
        """
        check_inputs(tokens, positions, mask, documents, cache)
        check_source(self.config, tokens, source, memory)
        if source is not None:
            if routing is not None:
                routing.source = Routing()
            memory = self.encode(source, source_mask, None if routing is None else routing.source)
        hidden = self.stack(
            self.embed(tokens) * self.config.embed_scale,
            positions=positions,
            mask=mask,
            documents=documents,
            types=types,
            memory=memory,
            cache=cache,
            routing=routing,
        )
        return self.head(hidden, mask)

    def encode(
        self,
        source: Int[Tensor, "B S"],
        mask: Bool[Tensor, "B S"] | None = None,
        routing: Routing | None = None,
    ) -> Memory:
        """Read the source of an encoder-decoder once, for any number of decoding steps."""
        check_inputs(source, None, mask, None, None)
        embed = self.embed if self.config.source_vocab_size is None else self.source_embed
        hidden = self.encoder(embed(source) * self.config.embed_scale, mask=mask, routing=routing)
        return self.decoder.remember(hidden, mask)

    def new_cache(self, batch_size: int, capacity: int | None = None) -> Cache:
        """An empty cache for `batch_size` sequences of at most `capacity` (max_len if None) positions."""
        config, weight = self.config, self.embed.weight
        capacity = config.max_len if capacity is None else capacity
        if config.shape == "encoder":
            raise ValueError("an encoder sees all its tokens at once and has no use for a cache")
        if config.positions == "learned" and capacity > config.max_len:
            raise ValueError(
                f"a cache of {capacity} positions exceeds max_len={config.max_len} learned positions"
            )
        heads, widths = config.kv_heads, (config.head_width, config.head_width)
        if config.latent is not None:
            heads, widths = 1, (config.latent.d_rotary, config.latent.kv_rank)
        return Cache(config.n_layers, batch_size, heads, capacity, widths, weight.device, weight.dtype)


def add_learned(
    stack: Stack, x: Float[Tensor, "B T D"], positions: Int[Tensor, "*#B T"]
) -> Float[Tensor, "B T D"]:
    """x plus the learned vector of each position."""
    if positions.shape[-1] > stack.config.max_len:
        raise ValueError(
            f"a sequence of {positions.shape[-1]} tokens exceeds the "
            f"{stack.config.max_len} learned positions (max_len)"
        )
    return x + stack.positions(positions + stack.config.position_offset)


def add_sinusoidal(
    stack: Stack, x: Float[Tensor, "B T D"], positions: Int[Tensor, "*#B T"]
) -> Float[Tensor, "B T D"]:
    """x plus the sinusoidal vector of each position."""
    concatenated = stack.config.positions == "sinusoidal_concat"
    return x + sinusoidal(positions, stack.config.d_model, concatenated).to(x.dtype)


def add_nothing(
    stack: Stack, x: Float[Tensor, "B T D"], positions: Int[Tensor, "*#B T"]
) -> Float[Tensor, "B T D"]:
    """x: rotary and relative positions enter in attention, and without positions nothing does."""
    return x


PLACES = {
    "learned": add_learned,
    "sinusoidal": add_sinusoidal,
    "sinusoidal_concat": add_sinusoidal,
    "rotary": add_nothing,
    "relative": add_nothing,
    "none": add_nothing,
}


def add_token_types(
    stack: Stack, x: Float[Tensor, "B T D"], types: Int[Tensor, "B T"] | None
) -> Float[Tensor, "B T D"]:
    """x plus the vector of each token's type; all are of type 0 if not said."""
    if types is None:
        types = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
    return x + stack.types(types)


def add_no_types(
    stack: Stack, x: Float[Tensor, "B T D"], types: Int[Tensor, "B T"] | None
) -> Float[Tensor, "B T D"]:
    """x: the model knows no token types."""
    if types is not None:
        raise ValueError("token types were given, but n_token_types=0: this model has none")
    return x


def make_rotaries(config: ModelConfig) -> tuple[Rotary | None, Rotary | None]:
    """What turns the layers without a window, and those with one."""
    if config.positions != "rotary":
        return None, None
    width, layout = config.turned_width, config.rotary_layout
    full = Rotary(width, config.rotary_theta, layout, config.rotary_scaling, config.max_len)
    if config.window_rotary_theta is None:
        return full, full
    return full, Rotary(width, config.window_rotary_theta, layout)


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


def check_source(config: ModelConfig, tokens: Tensor, source: Tensor | None, memory: Memory | None) -> None:
    """Raise ValueError unless an encoder-decoder, and no other model, has something to read."""
    if config.shape != "encoder-decoder":
        if source is not None or memory is not None:
            raise ValueError(f"a source goes with shape='encoder-decoder'; this model is {config.shape!r}")
        return
    read = source if memory is None else memory.layers[0][0]
    if read is None or (source is not None and memory is not None):
        raise ValueError("an encoder-decoder reads first: give the source, or the memory encode() made of it")
    if len(read) != len(tokens):
        raise ValueError(f"{len(read)} sources were read and {len(tokens)} rows of tokens are given")


def make_attention(config: ModelConfig, layer: int) -> nn.Module:
    """The self-attention of one layer."""
    scale = config.attn_scale
    if config.latent is not None:
        return LatentAttention(
            config.d_model,
            config.n_heads,
            config.latent,
            bias=config.qkv_bias,
            scale=scale,
            dropout=config.attn_dropout,
        )
    if config.attn_scale_by_layer:
        scale = (config.head_width**-0.5 if scale is None else scale) / (layer + 1)
    return Attention(
        config.d_model,
        config.n_heads,
        config.n_kv_heads,
        config.d_head,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        fused=config.fused_qkv,
        qk_norm=config.qk_norm,
        norm_eps=config.norm_eps,
        norm_offset=config.norm_offset,
        norm_wide_gain=config.norm_wide_gain,
        clip=config.qkv_clip,
        scale=scale,
        softcap=config.attn_softcap,
        sinks=config.attn_sinks,
        dropout=config.attn_dropout,
    )


def make_cross_attention(config: ModelConfig) -> Attention:
    """The attention of a decoder's block to the encoder's output."""
    return Attention(
        config.d_model,
        config.n_heads,
        config.n_kv_heads,
        config.d_head,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        scale=config.attn_scale,
        dropout=config.attn_dropout,
    )


def make_block(config: ModelConfig, layer: int, cross: bool) -> Block:
    """One block of the stack this config describes."""
    experts = config.experts_at(layer)
    return Block(
        config.d_model,
        config.n_heads,
        config.d_ff,
        activation=config.activation,
        gated=config.gated,
        ff_bias=config.ff_bias,
        norm=config.norm,
        norm_eps=config.norm_eps,
        norm_bias=config.norm_bias,
        norm_offset=config.norm_offset,
        norm_wide_gain=config.norm_wide_gain,
        norm_placement=config.norm_placement,
        first_norm=config.first_attn_norm or layer > 0,
        residual_dropout=config.residual_dropout,
        ff_dropout=config.ff_dropout,
        attn=make_attention(config, layer),
        ff=None if experts is None else Experts(config.d_model, experts, config.activation),
        cross=make_cross_attention(config) if cross else None,
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
