"""Every architectural choice of a model, one line each. Inert data: nothing here builds a module.

A config answers "which Transformer is this?" and nothing else. It holds only numbers, names and flags, so it
prints, compares, hashes and travels as JSON or TOML. The constructors in the other files read it; no field
names a published model.
"""

import math
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Literal

from clearhead.model.config_fields import (
    check_field_names,
    check_field_types,
    check_positive,
    freeze_lists,
    given,
)
from clearhead.model.config_parts import ExpertsConfig, LatentConfig, RotaryScaling

Shape = Literal["decoder", "encoder", "encoder-decoder"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]
NormKind = Literal["rms", "layer"]
NormPlacement = Literal["pre", "post", "branch", "sandwich"]
Positions = Literal["rotary", "learned", "sinusoidal", "sinusoidal_concat", "relative", "none"]
RotaryLayout = Literal["half", "interleaved"]
QKNorm = Literal["none", "head", "flat"]
Head = Literal["lm", "masked", "sequence", "token", "span", "embedding", "none"]
HeadActivation = Literal["tanh", "silu", "gelu", "gelu_tanh", "relu"]
Pool = Literal["first", "mean", "last"]
InitialWeights = Literal["course", "gpt2", "zero_out"]


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and choices of one Transformer. Sizes that are `None` follow from the others.

    Cross-attention has self-attention's sizes, biases, scale and dropout, and none of its other options.
    A field that is given and cannot take effect beside the others is a ValueError.

    >>> config = ModelConfig(vocab_size=4096, d_model=256, n_layers=4, n_heads=4)
    >>> config.d_head, config.n_kv_heads, config.d_ff
    (64, 4, 704)
    """

    # sizes
    vocab_size: int = 4096  # V, distinct tokens
    shape: Shape = "decoder"  # decoder-only, encoder-only, or both
    source_vocab_size: int | None = None  # of an encoder-decoder whose source has a table of its own
    max_len: int = 256  # longest sequence the model is meant for; the size of a learned position table
    d_model: int = 256  # D, width of the residual stream
    n_layers: int = 4  # blocks in the stack; of an encoder-decoder, in the decoder
    n_encoder_layers: int | None = None  # of an encoder-decoder; None: n_layers
    n_encoder_heads: int | None = None  # of an encoder-decoder; None: n_heads
    encoder_d_ff: int | None = None  # of an encoder-decoder; None: d_ff
    n_heads: int = 4  # H, query heads
    n_kv_heads: int | None = None  # G, key/value heads; None: as many as query heads (MHA), 1: MQA, else GQA
    d_head: int | None = None  # K, width of a head; None: d_model / n_heads
    d_ff: int | None = None  # F, width of the feed-forward layer; None: see default_d_ff
    # projections
    activation: Activation = "silu"  # the feed-forward's non-linearity
    gated: bool = True  # feed-forward with a gate (SwiGLU with silu) or plain
    qkv_bias: bool = False  # biases on the query, key and value projections
    out_bias: bool = False  # bias on attention's output projection
    ff_bias: bool = False  # biases in the feed-forward layer
    fused_qkv: bool = False  # project q, k and v in one matrix product; the weights keep their names
    # attention
    qk_norm: QKNorm = "none"  # RMSNorm of queries and keys before the rotation: each head, or all together
    qkv_clip: float | None = None  # queries, keys and values are clamped to +- this
    attn_scale: float | None = None  # factor on the scores; None: 1 / sqrt(d_head)
    attn_scale_by_layer: bool = False  # the scores of layer i are divided by i + 1
    attn_softcap: float | None = None  # scores are squashed to c tanh(score / c)
    attn_sinks: bool = False  # a learned logit per head joins the softmax and is dropped
    window: int | None = None  # causal: keys a query may see, itself included; else: to either side
    windowed_layers: tuple[bool, ...] | None = None  # which layers have the window; None: all
    # other kinds of layers
    latent: LatentConfig | None = None  # latent attention: d_head follows, qkv_bias is the output's as well
    experts: ExpertsConfig | None = None  # a mixture of experts instead of the feed-forward layer
    expert_layers: tuple[bool, ...] | None = None  # which layers have experts ([model.experts]); None: all
    # norms
    norm: NormKind = "rms"
    norm_eps: float = 1e-5
    norm_bias: bool = True  # a shift in LayerNorm (RMSNorm has none)
    norm_offset: float = 0.0  # the gain is this plus the weight
    norm_wide_gain: bool = False  # RMSNorm multiplies by the gain before casting back, not after
    norm_placement: NormPlacement = "pre"  # where the norms sit around a sub-layer
    first_attn_norm: bool = True  # False: layer 0 has no norm before attention, the embedding norm serves
    final_norm: bool = True  # a norm after the last block
    embed_norm: bool = False  # a norm on the embeddings
    # embeddings and positions
    embed_scale: float = 1.0  # factor on the token embeddings
    n_token_types: int = 0  # rows of a second embedding, of sentence A or B; 0: none
    positions: Positions = "rotary"
    position_offset: int = 0  # learned: the row of the first position; the table has so many rows more
    rotary_theta: float = 10_000.0  # base of the rotary frequencies
    rotary_layout: RotaryLayout = "half"
    rotary_dim: int | None = None  # features of a head that turn; None: all
    rotary_scaling: RotaryScaling | None = None
    rotary_layers: tuple[bool, ...] | None = None  # which layers turn their queries and keys; None: all
    window_rotary_theta: float | None = None  # layers with a window turn by this base, without scaling
    relative_buckets: int = 32  # relative: rows of the bias table
    relative_max_distance: int = 128  # relative: distances beyond share the last bucket
    # the head
    head: Head = "lm"  # what is predicted; "none": the hidden states
    n_labels: int = 0  # classes of a sequence or token head
    head_activation: HeadActivation | None = None  # a dense layer and this come before the head's output
    head_dense_bias: bool = True  # in that dense layer
    head_norm: bool = False  # and a norm after it
    pool: Pool = "first"  # which position stands for the sequence: "sequence" and "embedding" heads
    unit_length: bool = True  # embedding: the vectors have length 1
    tied: bool = True  # the output head shares the embedding's weight
    head_bias: bool = False
    logit_scale: float = 1.0  # factor on the hidden states before the head
    logit_softcap: float | None = None  # logits are squashed to c tanh(logit / c)
    # dropout and start
    embed_dropout: float = 0.0
    attn_dropout: float = 0.0  # on attention weights
    residual_dropout: float = 0.0  # on the output of every sub-layer
    ff_dropout: float = 0.0  # inside the feed-forward layer, after the activation
    init: InitialWeights = "course"  # a row of the table in initial.py

    def __post_init__(self) -> None:
        freeze_lists(self)
        check_field_types(self)
        for name in ("vocab_size", "max_len", "d_model", "n_layers", "n_heads"):
            check_positive(name, getattr(self, name))
        d_head = self.d_head if self.latent is None else self.latent.d_key
        check_heads(self.d_model, self.n_heads, self.n_kv_heads, d_head)
        for name, value in self._derived().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)  # the dataclass is frozen; this is still construction
        check_positive("d_ff", self.ff_width)
        if self.window is not None:
            check_positive("window", self.window)
        if self.latent is not None and self.d_head != d_head:
            raise ValueError(f"d_head={self.d_head} is not the latent's d_plain + d_rotary = {d_head}")
        for name in ("windowed_layers", "rotary_layers", "expert_layers"):
            choice = getattr(self, name)
            if choice is not None and len(choice) != self.n_layers:
                raise ValueError(f"{name} has {len(choice)} entries for n_layers={self.n_layers}")
        self._check_positions()
        self._check_encoder()
        self._check_effects()
        if self.head in ("sequence", "token") and self.n_labels < 1:
            raise ValueError(f"head={self.head!r} needs n_labels of at least 1, got {self.n_labels}")
        for name in ("embed_dropout", "attn_dropout", "residual_dropout", "ff_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a probability in [0, 1)")
        for name in ("rotary_theta", "window_rotary_theta", "qkv_clip", "attn_softcap", "logit_softcap"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}={value} must be a positive number")
        if not 0 <= self.norm_eps < math.inf:
            raise ValueError(f"norm_eps={self.norm_eps} must be a number of at least 0")

    def _check_positions(self) -> None:
        """Raise ValueError for positions that do not fit the sizes."""
        if self.positions == "rotary" and self.turned_width % 2:
            turned = f"d_head={self.d_head}" if self.rotary_dim is None else f"rotary_dim={self.rotary_dim}"
            turned = turned if self.latent is None else f"d_rotary={self.latent.d_rotary}"
            raise ValueError(
                f"positions='rotary' turns pairs of features and {turned} is odd; make it even "
                f"(d_model={self.d_model}, n_heads={self.n_heads})"
            )
        if self.positions == "rotary" and self.turned_width > self.head_width and self.latent is None:
            raise ValueError(f"rotary_dim={self.rotary_dim} exceeds d_head={self.d_head}")
        if self.rotary_scaling is not None and self.rotary_scaling.kind == "longrope":
            for name in ("short_factors", "long_factors"):
                if len(getattr(self.rotary_scaling, name)) != self.turned_width // 2:
                    raise ValueError(f"{name} must be {self.turned_width // 2} numbers, one per turned pair")
        if self.positions.startswith("sinusoidal") and self.d_model % 2:
            raise ValueError(
                f"d_model={self.d_model} is odd and positions={self.positions!r} fills pairs of features"
            )
        if self.positions == "relative":  # an encoder's rows are for two sides
            for share in {"decoder": (2,), "encoder": (4,), "encoder-decoder": (2, 4)}[self.shape]:
                exact = self.relative_buckets // share
                if not 1 <= exact < self.relative_max_distance:
                    raise ValueError(
                        f"relative_buckets={self.relative_buckets} gives {exact} distances a row of their "
                        f"own: at least 1 is needed, and relative_max_distance={self.relative_max_distance} "
                        "must be more"
                    )

    def _check_encoder(self) -> None:
        """Raise ValueError for what only an encoder-decoder has, or does not have."""
        if self.shape == "encoder-decoder":
            if self.latent or self.window or self.rotary_layers:
                raise ValueError(
                    "an encoder-decoder has no window, no rotary_layers and no latent attention here"
                )
            if self.expert_layers and self.n_encoder_layers not in (None, self.n_layers):
                raise ValueError(
                    f"expert_layers is for both stacks: n_encoder_layers={self.n_encoder_layers} must be "
                    f"n_layers={self.n_layers}, or leave expert_layers out"
                )
            own_width = None if "d_head" in self.following() else self.d_head
            check_heads(self.d_model, self.n_encoder_heads or self.n_heads, None, own_width)
            return
        for name in ("source_vocab_size", "n_encoder_layers", "n_encoder_heads", "encoder_d_ff"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}={getattr(self, name)} needs shape='encoder-decoder'")

    def _check_effects(self) -> None:
        """Raise ValueError for a field that is given and cannot take effect beside the others."""
        dense = self.experts is None or any(self.experts_at(layer) is None for layer in range(self.n_layers))
        normed_first = self.norm_placement in ("pre", "sandwich")
        two = self.head == "span" and self.n_labels == 2  # its start and its end
        turning = ("rotary_theta", "rotary_layout", "rotary_dim", "rotary_scaling", "rotary_layers")
        plain = ("qk_norm", "qkv_clip", "attn_softcap", "attn_sinks", "attn_scale_by_layer", "fused_qkv")
        # what must hold, in words -> whether it does, the fields that need it
        needs: dict[str, tuple[bool, tuple[str, ...]]] = {
            "positions='rotary'": (self.positions == "rotary", (*turning, "window_rotary_theta")),
            "positions='learned'": (self.positions == "learned", ("position_offset",)),
            "positions='relative'": (
                self.positions == "relative",
                ("relative_buckets", "relative_max_distance"),
            ),
            "a window": (self.window is not None, ("windowed_layers", "window_rotary_theta")),
            "experts": (self.experts is not None, ("expert_layers",)),
            "a layer without experts": (dense, ("gated", "ff_bias", "ff_dropout")),
            "attention without a latent": (self.latent is None, (*plain, "out_bias", "rotary_dim")),
            "an RMSNorm": (self.norm == "rms" or self.qk_norm != "none", ("norm_offset", "norm_wide_gain")),
            "a norm before attention": (normed_first, ("first_attn_norm",)),
            "head_activation": (self.head_activation is not None, ("head_norm",)),
            "head='sequence' or 'token'": (self.head in ("sequence", "token") or two, ("n_labels",)),
            "head='embedding'": (self.head == "embedding", ("unit_length",)),
        }
        chosen = given(self)
        for need, (holds, names) in needs.items():
            for name in names:
                if name in chosen and not holds:
                    raise ValueError(f"{name}={getattr(self, name)!r:.80} has no effect: it needs {need}")
        if self.latent is not None and self.kv_heads != self.n_heads:
            raise ValueError(
                f"n_kv_heads={self.n_kv_heads}: latent attention makes keys and values for each of "
                f"n_heads={self.n_heads}"
            )

    def _derived(self) -> dict[str, int]:
        """The sizes that follow from others when they are not given."""
        sizes = {
            "n_kv_heads": self.n_heads,
            "d_head": self.d_model // self.n_heads if self.latent is None else self.latent.d_key,
            "d_ff": default_d_ff(self.d_model, gated=self.gated),
        }
        if self.shape == "encoder-decoder":
            sizes["n_encoder_layers"], sizes["n_encoder_heads"] = self.n_layers, self.n_heads
            sizes["encoder_d_ff"] = sizes["d_ff"] if self.d_ff is None else self.d_ff
        return sizes

    @property
    def kv_heads(self) -> int:
        """`n_kv_heads` as a plain int (never None after construction)."""
        assert self.n_kv_heads is not None
        return self.n_kv_heads

    @property
    def head_width(self) -> int:
        """`d_head` as a plain int (never None after construction)."""
        assert self.d_head is not None
        return self.d_head

    @property
    def turned_width(self) -> int:
        """Features of a query or key head that rotary positions turn."""
        if self.latent is not None:
            return self.latent.d_rotary
        return self.head_width if self.rotary_dim is None else self.rotary_dim

    def encoder_part(self) -> "ModelConfig":
        """The encoder of an encoder-decoder as a config of its own.

        >>> ModelConfig(shape="encoder-decoder", n_layers=2, n_encoder_layers=6).encoder_part().n_layers
        6
        """
        return self.replace(
            shape="encoder",
            n_layers=self.n_encoder_layers or self.n_layers,
            n_heads=self.n_encoder_heads or self.n_heads,
            d_ff=self.encoder_d_ff or self.d_ff,
            source_vocab_size=None,
            n_encoder_layers=None,
            n_encoder_heads=None,
            encoder_d_ff=None,
        )

    def has_window(self, layer: int) -> bool:
        """Whether this layer's queries see only the keys of a window."""
        return self.window is not None and (self.windowed_layers is None or self.windowed_layers[layer])

    def turns(self, layer: int) -> bool:
        """Whether this layer turns its queries and keys by their positions."""
        return self.positions == "rotary" and (self.rotary_layers is None or self.rotary_layers[layer])

    def experts_at(self, layer: int) -> ExpertsConfig | None:
        """The mixture of experts of this layer, or None."""
        return self.experts if self.expert_layers is None or self.expert_layers[layer] else None

    @property
    def ff_width(self) -> int:
        """`d_ff` as a plain int (never None after construction)."""
        assert self.d_ff is not None
        return self.d_ff

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values, ready for JSON or TOML."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """The config with these fields. An unknown name raises ValueError and names the nearest right one."""
        check_field_names(cls, values, what="model")
        parts = {"rotary_scaling": RotaryScaling, "experts": ExpertsConfig, "latent": LatentConfig}
        made = {}
        for name, part in parts.items():
            if isinstance(values.get(name), dict):
                check_field_names(part, values[name], what=f"model.{name}")
                needed = [field.name for field in fields(part) if field.default is MISSING]
                if missing := [field for field in needed if field not in values[name]]:
                    raise ValueError(f"model.{name} must give {' and '.join(missing)}")
                made[name] = part(**values[name])
        return cls(**(values | made))

    def replace(self, **changes: Any) -> "ModelConfig":
        """A copy with some fields changed; a size that followed from others follows the new ones.

        >>> ModelConfig(d_model=256, n_heads=4).replace(d_model=512).d_head
        128
        """
        return replace(self, **(dict.fromkeys(self.following()) | changes))

    def following(self) -> list[str]:
        """The names of the sizes that are what follows from the others."""
        return [name for name, value in self._derived().items() if getattr(self, name) == value]


def default_d_ff(d_model: int, gated: bool = True) -> int:
    """Width of the feed-forward layer, F: 4 D plain; 8/3 D to the nearest multiple of 64 when gated.

    Three matrices of 8/3 D hold as many numbers as two of 4 D: 8 D^2 = 3 D F (Shazeer 2020,
    arXiv:2002.05202).

    >>> default_d_ff(512, gated=False), default_d_ff(512), default_d_ff(16)
    (2048, 1344, 64)
    """
    if not gated:
        return 4 * d_model
    return max(64, 64 * round(8 * d_model / 3 / 64))


def check_heads(d_model: int, n_heads: int, n_kv_heads: int | None, d_head: int | None) -> None:
    """Raise ValueError unless the width splits into the heads, and the query heads into groups."""
    for name, value in (("n_heads", n_heads), ("n_kv_heads", n_kv_heads), ("d_head", d_head)):
        if value is not None:
            check_positive(name, value)
    if d_head is None and d_model % n_heads:
        raise ValueError(
            f"d_model={d_model} is not divisible by n_heads={n_heads}; "
            "choose another number of heads or give d_head"
        )
    if n_kv_heads is not None and n_heads % n_kv_heads:
        raise ValueError(
            f"n_heads={n_heads} is not divisible by n_kv_heads={n_kv_heads}; "
            "each key/value head serves the same number of query heads"
        )
