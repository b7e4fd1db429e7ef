"""The parts of a model's config that are configs of their own: scaled rotary positions, experts, a latent."""

import math
from dataclasses import dataclass
from typing import Literal

from clearhead.model.config_fields import check_field_types, check_positive, freeze_lists, given

Scaling = Literal["linear", "dynamic", "yarn", "longrope", "llama3"]
Router = Literal["softmax", "sigmoid"]

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
    short_factors: tuple[float, ...] = ()  # longrope: a divisor per pair, up to original_max_len
    long_factors: tuple[float, ...] = ()  # and beyond it

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
            check_positive(name, getattr(self, name))
        if self.q_rank is not None:
            check_positive("q_rank", self.q_rank)

    @property
    def d_key(self) -> int:
        """Width of a query or key head."""
        return self.d_plain + self.d_rotary
