"""A tiny model of every architecture, every weight random and all sizes different, for looking inside."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.model.config import ModelConfig
from clearhead.model.config_parts import ExpertsConfig, LatentConfig, RotaryScaling
from clearhead.model.transformer import Transformer

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "max_len": 40,
    "d_model": 24,
    "n_layers": 2,
    "n_heads": 6,
    "d_ff": 40,
}
ENCODER_DECODER = {
    "shape": "encoder-decoder",
    "n_encoder_layers": 3,
    "n_encoder_heads": 3,
    "encoder_d_ff": 56,
}
BIASES = {"qkv_bias": True, "out_bias": True, "ff_bias": True}

ZOO: dict[str, dict[str, Any]] = {
    "mha rotary": {},
    "gqa interleaved": {"n_kv_heads": 2, "rotary_layout": "interleaved", "tied": False},
    "mqa window": {"n_kv_heads": 1, "window": 3, "windowed_layers": (True, False), "fused_qkv": True},
    "partial rotary": {"rotary_dim": 2, "d_head": 6, "rotary_scaling": RotaryScaling("linear", factor=2.0)},
    "learned post-norm": {
        "positions": "learned", "norm": "layer", "norm_placement": "post", "final_norm": False,
        "gated": False, "activation": "gelu_tanh", "head_bias": True, **BIASES,
    },
    "sinusoidal": {"positions": "sinusoidal", "norm": "layer", "embed_scale": 2.0, "activation": "gelu"},
    "relative": {
        "positions": "relative", "relative_buckets": 8, "relative_max_distance": 12, "gated": False,
        "activation": "relu", "attn_scale": 1.0, "logit_scale": 0.5,
    },
    "sandwich soft-cap": {
        "norm_placement": "sandwich", "qk_norm": "head", "attn_softcap": 3.0, "logit_softcap": 4.0,
        "norm_offset": 1.0, "n_kv_heads": 3,
    },
    "branch flat norm clip": {
        "norm_placement": "branch", "qk_norm": "flat", "qkv_clip": 0.8, "n_kv_heads": 2,
    },
    "sinks": {"attn_sinks": True, "window": 4, "windowed_layers": (False, True), **BIASES},
    "experts": {
        "experts": ExpertsConfig(5, 2, 28, shared_d_ff=12, shared_gate=True),
        "expert_layers": (False, True),
    },
    "experts sigmoid": {
        "experts": ExpertsConfig(
            6, 3, 20, router="sigmoid", n_groups=3, top_groups=2, correction_bias=True, weight_scale=2.5,
            shared_d_ff=12,
        ),
    },
    "experts limited": {"experts": ExpertsConfig(4, 2, 20, bias=True, router_bias=True, limit=0.5)},
    "latent": {"latent": LatentConfig(14, 10, 6, 4, 5)},
    "latent plain": {"latent": LatentConfig(None, 10, 6, 4, 5), "rotary_layout": "interleaved"},
    "encoder": {
        "shape": "encoder", "head": "masked", "head_activation": "gelu", "head_norm": True, "head_bias": True,
        "positions": "learned", "n_token_types": 2, "embed_norm": True, "norm": "layer",
        "norm_placement": "post", "final_norm": False, "gated": False, "activation": "gelu",
        "position_offset": 2, **BIASES,
    },
    "encoder window": {"shape": "encoder", "head": "token", "n_labels": 4, "window": 2, "embed_norm": True},
    "classifier": {
        "shape": "encoder", "head": "sequence", "n_labels": 3, "head_activation": "tanh",
        "positions": "learned", "norm": "layer", "head_bias": True,
    },
    "embedding": {"shape": "encoder", "head": "embedding", "pool": "mean"},
    "encoder-decoder": {
        **ENCODER_DECODER, "positions": "sinusoidal_concat", "norm": "layer", "norm_placement": "post",
        "source_vocab_size": 47, "gated": False, "activation": "relu", "embed_scale": 24**0.5, **BIASES,
    },
    "encoder-decoder shared": {**ENCODER_DECODER, "positions": "relative", "n_kv_heads": 3},
}  # fmt: skip


class Foreign(nn.Module):
    """A model that knows nothing of this project."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(61, 20)
        self.mix = nn.GRU(20, 20, batch_first=True)
        self.norm = nn.LayerNorm(20)
        self.out = nn.Linear(20, 61)

    def forward(self, tokens: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        mixed, _ = self.mix(self.table(tokens))
        return self.out(self.norm(mixed))


def animal(name: str) -> nn.Module:
    """A model of the zoo, or "foreign"."""
    if name == "foreign":
        torch.manual_seed(0)
        return Foreign().eval()
    return randomised(Transformer(ModelConfig(**SIZES | ZOO[name])))


def randomised(model: Any, seed: int = 1) -> Any:
    """Every weight and buffer random, of a size that keeps the numbers around 1; gains around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() > 1:
                weight.copy_(noise / weight.shape[-1] ** 0.5)
            else:
                weight.copy_(0.2 * noise + ("norm" in name and name.endswith("weight")))
    return model.eval()


def inputs(model: nn.Module, padded: bool = False) -> dict[str, Any]:
    """Tokens of two sequences, a source where one is read, and masks if `padded`."""
    generator = torch.Generator().manual_seed(2)
    given: dict[str, Any] = {"tokens": torch.randint(3, 47, (2, 7), generator=generator)}
    places = torch.arange(7)
    if padded:
        given["mask"] = torch.stack([places >= 0, places < 5])
    if isinstance(model, Transformer) and model.config.shape == "encoder-decoder":
        given["source"] = torch.randint(3, 47, (2, 9), generator=generator)
        if padded:
            given["source_mask"] = torch.stack([torch.arange(9) >= 0, torch.arange(9) >= 3])
    return given
