"""Blocks on top of each other: what they all share in a pass is made once and handed to each.

    Stack = positions, blocks, a norm
    View  = who may see whom, by what angles queries and keys turn, what is added to the scores

A stack holds weights only; the cache of a running sequence is passed in.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead.model.block import Block, KeysValues, make_block
from clearhead.model.cache import Cache
from clearhead.model.config import ModelConfig
from clearhead.model.experts import Routing
from clearhead.model.layers import Embedding, make_config_norm
from clearhead.model.masks import Causal, mask_of_pass
from clearhead.model.position import Rotary, Rotation, relative_bucket, sinusoidal


class Memory(NamedTuple):
    """What a decoder sees of the encoder's output: each layer's keys and values, and which are no padding."""

    layers: list[KeysValues]
    mask: Tensor | None


class View(NamedTuple):
    """What a stack works out once per pass, for layers without and with a window, and for all."""

    masks: tuple[Tensor | Causal | None, Tensor | Causal | None]
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
        seen = (self.causal, queries, keys, real, documents)
        full = None if all(self.windowed) else mask_of_pass(*seen)
        narrow = mask_of_pass(*seen, self.config.window) if any(self.windowed) else None
        turn = [None if r is None else add_head_dimension(r.angles(positions)) for r in self.rotaries]
        bias = None
        if self.config.positions == "relative":
            sizes = (self.config.relative_buckets, self.config.relative_max_distance)
            buckets = relative_bucket(keys[None, :] - queries[:, None], *sizes, self.causal)
            bias = self.relative(buckets).permute(2, 0, 1)  # (T, S, H) -> (H, T, S)
        return View((full, narrow), (turn[0], turn[1]), bias)

    def remember(self, hidden: Float[Tensor, "B S D"], mask: Bool[Tensor, "B S"] | None) -> Memory:
        """Every layer's keys and values of the encoder's output, made once and used at every step."""
        layers = []
        for block in self.blocks:
            assert isinstance(block, Block)
            layers.append(block.cross.remember(hidden))
        return Memory(layers, mask)


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
