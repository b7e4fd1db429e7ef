"""One layer of a stack: attention, then a feed-forward layer, each added to the stream that it reads.

    x = x + attention(x)
    x = x + cross(x, memory)        where there is a memory
    x = x + feed_forward(x)

The norms stand where `norm_placement` says: before a sub-layer, on its result, or on the sum.
"""

from collections.abc import Callable
from functools import partial

from jaxtyping import Bool, Float
from torch import Tensor, nn

from clearhead.model.attention import Attention, LatentAttention
from clearhead.model.cache import LayerCache
from clearhead.model.config import Activation, ModelConfig, NormKind, NormPlacement, QKNorm
from clearhead.model.experts import Experts, Routing
from clearhead.model.layers import FeedForward, make_norm
from clearhead.model.masks import Causal
from clearhead.model.position import Rotation
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
    are the identity. Who may see whom is said in the call: `mask="causal"`, or another mask of `attend`.
    `attn`, `ff` and `cross` put modules of your own in the places of attention, of the feed-forward layer,
    and of attention to a memory.
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
        make = partial(make_norm, norm, d_model, norm_eps, norm_bias, norm_offset, norm_wide_gain)
        before, branch, after = norm_makers(norm_placement, make)
        self.attn_norm = before() if first_norm else nn.Identity()
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
        self.attn_out_norm, self.attn_post_norm = branch(), after()
        if cross is not None:
            self.cross_norm, self.cross = before(), cross
            self.cross_out_norm, self.cross_post_norm = branch(), after()
        self.ff_norm = before()
        self.ff = ff or FeedForward(d_model, d_ff, activation, gated, ff_bias, ff_dropout)
        self.ff_out_norm, self.ff_post_norm = branch(), after()
        self.dropout = nn.Dropout(residual_dropout)
        self.look_back = see_nothing if cross is None else see_memory
        self.feed = feed_experts if isinstance(self.ff, Experts) else feed_forward

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        *,
        rotation: Rotation | None = None,
        mask: Bool[Tensor, "*#mask #T #S"] | Causal | None = None,
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


def norm_makers(placement: NormPlacement, make: Callable[[], nn.Module]) -> list[Callable[[], nn.Module]]:
    """What makes the module in each of a sub-layer's three places: a norm, or the identity.

    ValueError for a placement that is unknown.
    """
    if placement not in NORM_PLACES:
        raise ValueError(f"norm_placement={placement!r} is unknown; choose one of {', '.join(NORM_PLACES)}")
    return [make if used else nn.Identity for used in NORM_PLACES[placement]]


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
