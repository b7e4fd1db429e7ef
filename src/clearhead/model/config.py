"""Every architectural choice of a model, one line each. Inert data: nothing here builds a module.

A config answers "which Transformer is this?" and nothing else. It holds only numbers, names and flags, so it
prints, compares, hashes and travels as JSON or TOML. The constructors in the other files read it; no field
names a published model.
"""

import math
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

Shape = Literal["decoder", "encoder", "encoder-decoder"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]
NormKind = Literal["rms", "layer"]
NormPlacement = Literal["pre", "post", "branch", "sandwich"]
Positions = Literal["rotary", "learned", "sinusoidal", "sinusoidal_concat", "relative", "none"]
RotaryLayout = Literal["half", "interleaved"]
Scaling = Literal["linear", "dynamic", "yarn", "longrope", "llama3"]
QKNorm = Literal["none", "head", "flat"]
Router = Literal["softmax", "sigmoid"]
Head = Literal["lm", "masked", "sequence", "token", "span", "embedding", "none"]
HeadActivation = Literal["tanh", "silu", "gelu", "gelu_tanh", "relu"]
Pool = Literal["first", "mean", "last"]
InitialWeights = Literal["course", "gpt2", "zero_out"]


# The fields that each kind of scaling looks at.
SCALING_FIELDS: dict[Scaling, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor",
        "original_max_len",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all",
        "truncate",
    ),
    "longrope": ("factor", "original_max_len", "attention_factor", "short_factors", "long_factors"),
    "llama3": ("factor", "original_max_len", "low_freq_factor", "high_freq_factor"),
}


@dataclass(frozen=True)
class RotaryScaling:
    """How the rotary frequencies are changed so that more positions fit than in training; see position.py."""

    kind: Scaling
    factor: float = 1.0  # how many times longer
    original_max_len: int = 0  # positions in training, before scaling; 0: the model's max_len
    attention_factor: float | None = None  # on cos and sin; None: the kind's own rule
    beta_fast: float = 32.0  # yarn: turns within the original length above which a pair keeps its frequency
    beta_slow: float = 1.0  # yarn: turns below which it is fully stretched
    mscale: float = 0.0  # yarn: two weights of the attention factor; 0: not given
    mscale_all: float = 0.0
    truncate: bool = True  # yarn: the ramp's ends are whole pairs
    low_freq_factor: float = 1.0  # llama3: where the blend begins and ends, in original_max_len / wavelength
    high_freq_factor: float = 4.0
    short_factors: tuple[
        float, ...
    ] = ()  # longrope: a divisor per pair, up to original_max_len and beyond it
    long_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        freeze_lists(self)
        check_field_types(self)
        for name in ("factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)} must be a positive number")
        for name in ("short_factors", "long_factors"):
            if not all(0 < factor < math.inf for factor in getattr(self, name)):
                raise ValueError(f"{name} must be positive numbers")
        if self.original_max_len < 0:
            raise ValueError(f"original_max_len={self.original_max_len} must be at least 0")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} must be less than "
                f"high_freq_factor={self.high_freq_factor}"
            )
        for name in given(self):
            if name not in ("kind", *SCALING_FIELDS[self.kind]):
                raise ValueError(f"{name} has no effect on a {self.kind} scaling; leave it out")


@dataclass(frozen=True)
class ExpertsConfig:
    """A mixture of experts in place of the feed-forward layer; see experts.py."""

    n_experts: int  # E
    top_k: int  # experts that each token is sent to
    d_ff: int  # width of one expert
    router: Router = "softmax"
    renormalise: bool = True  # the chosen experts' weights sum to 1
    weight_scale: float = 1.0  # factor on the chosen experts' weights
    n_groups: int = 1  # experts are chosen from the best `top_groups` of `n_groups` groups
    top_groups: int = 1
    correction_bias: bool = False  # a bias per expert that counts in choosing only
    shared_d_ff: int = 0  # width of an expert that every token passes; 0: none
    shared_gate: bool = False  # that expert's output times sigmoid(linear(x))
    router_bias: bool = False
    bias: bool = False  # biases in the experts
    limit: float | None = None  # gate and up are clamped to it, and joined as in experts.join_limited
    limit_slope: float = 1.702  # with a limit: the gate is x sigmoid(slope x)
    jitter: float = 0.0  # training: inputs are multiplied by random numbers within 1 +- this
    balance_loss: float = 0.0  # coefficient of the load-balancing loss
    z_loss: float = 0.0  # coefficient of the squared log of the router's partition sum

    def __post_init__(self) -> None:
        check_field_types(self)
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"top_k={self.top_k} must be between 1 and n_experts={self.n_experts}")
        if self.n_experts % self.n_groups or not 1 <= self.top_groups <= self.n_groups:
            raise ValueError(
                f"n_experts={self.n_experts} must be divisible by n_groups={self.n_groups}, "
                f"and top_groups={self.top_groups} between 1 and n_groups"
            )
        size = self.n_experts // self.n_groups
        if self.top_groups < self.n_groups and (size < 2 or self.top_groups * size < self.top_k):
            raise ValueError(
                f"top_groups={self.top_groups} of n_groups={self.n_groups} groups of {size} experts are too "
                f"few: a group needs 2 experts and the kept groups top_k={self.top_k}"
            )
        if self.shared_gate and not self.shared_d_ff:
            raise ValueError("shared_gate=True needs a shared expert: give shared_d_ff")
        if self.limit is None and "limit_slope" in given(self):
            raise ValueError(f"limit_slope={self.limit_slope} has no effect without a limit")


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention: keys and values through a narrow latent; see LatentAttention."""

    q_rank: int | None  # width of the queries' latent; None: projected directly
    kv_rank: int  # width of the keys' and values' latent, which is what the cache keeps
    d_plain: int  # features of a query or key head that carry no position
    d_rotary: int  # features that turn; one such key head is shared by all
    d_value: int  # width of a value head
    norm_eps: float = 1e-6  # of the two inner norms

    def __post_init__(self) -> None:
        check_field_types(self)
        for name in ("kv_rank", "d_plain", "d_rotary", "d_value"):
            _check_positive(name, getattr(self, name))
        if self.q_rank is not None:
            _check_positive("q_rank", self.q_rank)

    @property
    def d_key(self) -> int:
        """Width of a query or key head."""
        return self.d_plain + self.d_rotary


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and choices of one Transformer. Sizes that are `None` follow from the others.

    Cross-attention has self-attention's sizes, biases, scale and dropout, and none of its other options.
    A field that is given and cannot take effect beside the others is a ValueError.

    >>> config = ModelConfig(vocab_size=4096, d_model=256, n_layers=4, n_heads=4)
    >>> config.d_head, config.n_kv_heads, config.d_ff
    (64, 4, 704)
    """

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
    activation: Activation = "silu"  # the feed-forward's non-linearity
    gated: bool = True  # feed-forward with a gate (SwiGLU with silu) or plain
    qkv_bias: bool = False  # biases on the query, key and value projections
    out_bias: bool = False  # bias on attention's output projection
    ff_bias: bool = False  # biases in the feed-forward layer
    fused_qkv: bool = False  # project q, k and v in one matrix product; the weights keep their names
    qk_norm: QKNorm = "none"  # RMSNorm of queries and keys before the rotation: each head, or all together
    qkv_clip: float | None = None  # queries, keys and values are clamped to +- this
    attn_scale: float | None = None  # factor on the scores; None: 1 / sqrt(d_head)
    attn_scale_by_layer: bool = False  # the scores of layer i are divided by i + 1
    attn_softcap: float | None = None  # scores are squashed to c tanh(score / c)
    attn_sinks: bool = False  # a learned logit per head joins the softmax and is dropped
    window: int | None = None  # causal: keys a query may see, itself included; else: to either side
    windowed_layers: tuple[bool, ...] | None = None  # which layers have the window; None: all
    latent: LatentConfig | None = None  # latent attention: d_head follows, qkv_bias is the output's as well
    experts: ExpertsConfig | None = None  # a mixture of experts instead of the feed-forward layer
    expert_layers: tuple[bool, ...] | None = None  # which layers have experts ([model.experts]); None: all
    norm: NormKind = "rms"
    norm_eps: float = 1e-5
    norm_bias: bool = True  # a shift in LayerNorm (RMSNorm has none)
    norm_offset: float = 0.0  # the gain is this plus the weight
    norm_wide_gain: bool = False  # RMSNorm multiplies by the gain before casting back, not after
    norm_placement: NormPlacement = "pre"  # where the norms sit around a sub-layer
    first_attn_norm: bool = True  # False: layer 0 has no norm before attention, the embedding norm serves
    final_norm: bool = True  # a norm after the last block
    embed_norm: bool = False  # a norm on the embeddings
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
    embed_dropout: float = 0.0
    attn_dropout: float = 0.0  # on attention weights
    residual_dropout: float = 0.0  # on the output of every sub-layer
    ff_dropout: float = 0.0  # inside the feed-forward layer, after the activation
    init: InitialWeights = "course"  # a row of the table in initial.py

    def __post_init__(self) -> None:
        freeze_lists(self)
        check_field_types(self)
        for name in ("vocab_size", "max_len", "d_model", "n_layers", "n_heads"):
            _check_positive(name, getattr(self, name))
        d_head = self.d_head if self.latent is None else self.latent.d_key
        check_heads(self.d_model, self.n_heads, self.n_kv_heads, d_head)
        for name, value in self._derived().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)  # the dataclass is frozen; this is still construction
        _check_positive("d_ff", self.ff_width)
        if self.window is not None:
            _check_positive("window", self.window)
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
            _check_positive(name, value)
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


def check_field_names(cls: type, values: dict[str, Any], what: str) -> None:
    """Raise ValueError for a key of `values` that is no field of the dataclass `cls`, naming the nearest
    field.
    """
    known = [field.name for field in fields(cls)]
    for name in values:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"unknown {what} setting {name!r}; {hint}")


def check_field_types(config: Any) -> None:
    """Raise ValueError for a field of a dataclass that holds another type, as TOML or JSON may give."""
    for field in fields(config):
        _check_type(field.name, getattr(config, field.name), field.type)


def freeze_lists(config: Any) -> None:
    """Make tuples of the lists that TOML and JSON give for tuples, so that the config stays a value."""
    for field in fields(config):
        value = getattr(config, field.name)
        kinds = (field.type, *get_args(field.type))
        if isinstance(value, list) and any(get_origin(kind) is tuple for kind in kinds):
            object.__setattr__(config, field.name, tuple(value))


def given(config: Any) -> list[str]:
    """The names of the fields that are not at their defaults."""
    return [field.name for field in fields(config) if getattr(config, field.name) != field.default]


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")


def _check_type(name: str, value: Any, kind: Any) -> None:
    options = get_args(kind)
    if get_origin(kind) is Literal:
        if value not in options:
            raise ValueError(f"{name}={value!r:.120} is unknown; choose one of {', '.join(options)}")
        return
    allowed = options if get_origin(kind) in (UnionType, Union) else (kind,)
    if any(_is_a(value, option) for option in allowed):
        return
    wanted = " or ".join(_in_words(option) for option in allowed)
    shown = list(value) if isinstance(value, tuple) else value
    raise ValueError(f"{name}={shown!r:.120} must be {wanted}, not {_in_words(type(value))}")


def _in_words(kind: Any) -> str:
    """A type in the words of who writes a file.

    >>> _in_words(int), _in_words(tuple[str, ...])
    ('a whole number', 'a list of texts')
    """
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        inside = _in_words(get_args(kind)[0])
        return f"a list of {inside.removeprefix('a ')}{'s' if inside.startswith('a ') else ''}"
    if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, dict)):
        return "a table of settings"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return (words | {type(None): "none", tuple: "a list", list: "a list"}).get(kind, str(kind))


def _is_a(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:  # tuple[bool, ...]
        return type(value) is tuple and all(_is_a(item, get_args(kind)[0]) for item in value)
    return type(value) is kind or (kind is float and type(value) is int)
