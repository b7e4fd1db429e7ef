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

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead.model.cache import Cache
from clearhead.model.config import ModelConfig
from clearhead.model.experts import Routing
from clearhead.model.heads import make_head
from clearhead.model.initial import initialise
from clearhead.model.layers import Embedding
from clearhead.model.stack import Memory, Stack


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
