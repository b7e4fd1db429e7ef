"""Every architectural choice of a model, one line each. Inert data: nothing here builds a module.

A config answers "which Transformer is this?" and nothing else. It holds only numbers, names and flags, so it
prints, compares, hashes and travels as JSON or TOML. The constructors in the other files read it; no field
names a published model.
"""

import math
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared"]
NormKind = Literal["rms", "layer"]
NormPlacement = Literal["pre", "post", "branch", "sandwich"]
Positions = Literal["rotary", "learned", "sinusoidal", "sinusoidal_concat", "none"]
RotaryLayout = Literal["half", "interleaved"]
QKNorm = Literal["none", "head"]
InitialWeights = Literal["course", "gpt2", "zero_out"]


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and choices of one Transformer. Sizes that are `None` follow from the others.

    >>> config = ModelConfig(vocab_size=4096, d_model=256, n_layers=4, n_heads=4)
    >>> config.d_head, config.n_kv_heads, config.d_ff
    (64, 4, 704)
    """

    vocab_size: int = 4096  # V, distinct tokens
    max_len: int = 256  # longest sequence the model is meant for; the size of a learned position table
    d_model: int = 256  # D, width of the residual stream
    n_layers: int = 4  # blocks in the stack
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
    qk_norm: QKNorm = "none"  # "head": RMSNorm of every query and key head before the rotation
    attn_scale: float | None = None  # factor on the scores; None: 1 / sqrt(d_head)
    window: int | None = None  # keys a query may see, itself included; None: all
    norm: NormKind = "rms"
    norm_eps: float = 1e-5
    norm_bias: bool = True  # a shift in LayerNorm (RMSNorm has none)
    norm_placement: NormPlacement = "pre"  # where the norms sit around a sub-layer
    final_norm: bool = True  # a norm after the last block
    positions: Positions = "rotary"
    rotary_theta: float = 10_000.0  # base of the rotary frequencies
    rotary_layout: RotaryLayout = "half"
    tied: bool = True  # the output head shares the embedding's weight
    head_bias: bool = False
    embed_dropout: float = 0.0
    attn_dropout: float = 0.0  # on attention weights
    residual_dropout: float = 0.0  # on the output of every sub-layer
    ff_dropout: float = 0.0  # inside the feed-forward layer, after the activation
    init: InitialWeights = "course"  # a row of the table in initial.py

    def __post_init__(self) -> None:
        check_field_types(self)
        for name in ("vocab_size", "max_len", "d_model", "n_layers", "n_heads"):
            _check_positive(name, getattr(self, name))
        check_heads(self.d_model, self.n_heads, self.n_kv_heads, self.d_head)
        for name, value in self._derived().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)  # the dataclass is frozen; this is still construction
        _check_positive("d_ff", self.ff_width)
        if self.window is not None:
            _check_positive("window", self.window)
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(
                f"d_head={self.d_head} is odd and positions='rotary' turns pairs of features; "
                f"use an even d_head (d_model={self.d_model}, n_heads={self.n_heads})"
            )
        for name in ("embed_dropout", "attn_dropout", "residual_dropout", "ff_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not a probability in [0, 1)")
        if self.positions.startswith("sinusoidal") and self.d_model % 2:
            raise ValueError(
                f"d_model={self.d_model} is odd and positions={self.positions!r} fills pairs of features"
            )
        if not 0 < self.rotary_theta < math.inf:
            raise ValueError(f"rotary_theta={self.rotary_theta} must be a positive number")
        if not 0 <= self.norm_eps < math.inf:
            raise ValueError(f"norm_eps={self.norm_eps} must be a number of at least 0")

    def _derived(self) -> dict[str, int]:
        """The sizes that follow from others when they are not given."""
        return {
            "n_kv_heads": self.n_heads,
            "d_head": self.d_model // self.n_heads,
            "d_ff": default_d_ff(self.d_model, gated=self.gated),
        }

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
        return cls(**values)

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
    """Raise ValueError for a field of a dataclass of scalars that holds another type, as TOML or JSON may
    give.
    """
    for field in fields(config):
        _check_type(field.name, getattr(config, field.name), field.type)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")


def _check_type(name: str, value: Any, kind: Any) -> None:
    options = get_args(kind)
    if options and all(isinstance(option, str) for option in options):  # a Literal of names
        if value not in options:
            raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(options)}")
        return
    allowed = options or (kind,)
    if type(value) in allowed or (float in allowed and type(value) is int):
        return
    wanted = " or ".join("none" if option is type(None) else option.__name__ for option in allowed)
    raise ValueError(f"{name}={value!r} must be {wanted}, not {type(value).__name__}")
