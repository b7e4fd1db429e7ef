"""Adapters: the model as it was at step 0, the hand-written gradients, merging that changes no output."""

from copy import deepcopy
from pathlib import Path

import pytest
import torch

from clearhead.model.attention import Attention
from clearhead.model.config import ModelConfig
from clearhead.model.config_parts import LatentConfig
from clearhead.model.layers import Linear
from clearhead.model.transformer import Transformer
from clearhead.training.checkpoint import load_checkpoint, write_checkpoint
from clearhead.training.lora import Adapted, Lora, add_adapters, has_adapters, merge, merged

LORA = Lora(rank=4, alpha=8.0, on=("q", "v", "down"))


def small(**options: object) -> Transformer:
    sizes = {"vocab_size": 50, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_len": 16}
    return Transformer(ModelConfig.from_dict(sizes | options), seed=0).eval()


def moved(model: Transformer) -> Transformer:
    """The model after adapters have learned something."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_b" in name:
                parameter.normal_(0, 0.5, generator=generator)
    return model


def projections(model: Transformer) -> list[object]:
    return [module.project for module in model.modules() if isinstance(module, Attention)]


def tokens() -> torch.Tensor:
    return torch.randint(50, (2, 9), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("options", [{}, {"fused_qkv": True, "qkv_bias": True}], ids=["apart", "fused"])
def test_a_model_with_new_adapters_is_the_model(options: dict[str, object]) -> None:
    model = small(**options)
    before = model(tokens())
    paths = add_adapters(model, LORA)
    assert paths == [
        f"decoder.blocks.{i}.{layer}" for i in (0, 1) for layer in ("attn.q", "attn.v", "ff.down")
    ]
    assert (model(tokens()) - before).abs().max() <= 1e-6
    assert (moved(model)(tokens()) - before).abs().max() > 0.01


@pytest.mark.parametrize("options", [{}, {"fused_qkv": True, "qkv_bias": True}], ids=["apart", "fused"])
def test_merged_weights_give_the_adapters_output(options: dict[str, object]) -> None:
    model = small(**options)
    add_adapters(model, LORA)
    expected = moved(model)(tokens())
    copy = merged(model)
    assert has_adapters(model) and not has_adapters(copy)
    assert (copy(tokens()) - expected).abs().max() <= 1e-6 * expected.abs().max().clamp(min=1)
    merge(model)
    assert torch.equal(model(tokens()), copy(tokens()))
    assert list(model.state_dict()) == list(small(**options).state_dict())
    assert merged(copy) is copy
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert projections(model) == projections(small(**options))


def test_gradients_are_those_of_the_formula() -> None:
    layer = Linear(6, 5, bias=True)
    adapted = Adapted(layer, Lora(3, 2.0, ("q",)), torch.Generator().manual_seed(0)).double()
    with torch.no_grad():
        adapted.lora_b.normal_(generator=torch.Generator().manual_seed(1))
    x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    grad = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (adapted(x) * grad).sum().backward()
    scale, a, b = 2.0 / 3, adapted.lora_a.detach(), adapted.lora_b.detach()
    assert adapted.lora_a.grad is not None and adapted.lora_b.grad is not None
    torch.testing.assert_close(adapted.lora_b.grad, scale * grad.T @ (x @ a.T))
    torch.testing.assert_close(adapted.lora_a.grad, scale * (grad @ b).T @ x)


def test_only_adapters_and_a_new_head_learn() -> None:
    model = small(head="sequence", n_labels=3, head_bias=True, head_activation="tanh", pool="last")
    add_adapters(model, Lora(2, 4.0, ("q",)))
    learning = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    adapters = {f"decoder.blocks.{i}.attn.q.lora_{side}" for i in (0, 1) for side in "ab"}
    head = {f"head.{layer}.{kind}" for layer in ("dense", "out") for kind in ("weight", "bias")}
    assert learning == adapters | head
    model = small(tied=False)
    add_adapters(model, Lora(2, 4.0, ("q",)))
    assert not model.head.weight.requires_grad


def test_layers_are_chosen_by_their_name_or_by_a_pattern() -> None:
    assert add_adapters(small(), Lora(2, 4.0, ("*.blocks.1.attn.*",))) == [
        f"decoder.blocks.1.attn.{layer}" for layer in "qkvo"
    ]
    first, second = small(), small()
    add_adapters(first, LORA, seed=3)
    add_adapters(second, LORA, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    shape = {"shape": "encoder-decoder"}
    both = add_adapters(small(**shape), Lora(2, 4.0, ("k",)))
    assert "decoder.blocks.0.cross.k" in both and "encoder.blocks.1.attn.k" in both


def test_a_checkpoint_with_adapters_is_read_into_a_plain_model_and_resumed_with_them(tmp_path: Path) -> None:
    model = small()
    add_adapters(model, LORA)
    write_checkpoint(tmp_path / "step", 3, moved(model))
    plain = small()
    assert load_checkpoint(tmp_path / "step", plain)["step"] == 3
    output = model(tokens())
    assert (plain(tokens()) - output).abs().max() <= 1e-6 * output.abs().max()
    expected = merge(deepcopy(model)).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in plain.state_dict().items())
    again = small()
    add_adapters(again, LORA, seed=9)
    load_checkpoint(tmp_path / "step", again)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))
    more = small()
    add_adapters(more, Lora(4, 8.0, ("q",)))
    with pytest.raises(ValueError, match=r"left over decoder.blocks.0.attn.v.lora_a"):
        load_checkpoint(tmp_path / "step", more)


def test_adapters_that_cannot_be_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"lora_on='query' fits no layer of this model; its layers are q, k"):
        add_adapters(small(), Lora(2, 4.0, ("q", "query")))
    with pytest.raises(ValueError, match=r"lora_rank=33 exceeds the 32 x 32 matrix"):
        add_adapters(small(), Lora(33, 4.0, ("q",)))
    latent = LatentConfig(q_rank=8, kv_rank=8, d_plain=4, d_rotary=4, d_value=8)
    model = Transformer(ModelConfig(vocab_size=50, d_model=32, n_layers=1, n_heads=4, latent=latent))
    with pytest.raises(ValueError, match=r"kv_b can have no adapter"):
        add_adapters(model, Lora(2, 4.0, ("kv_b",)))
    with pytest.raises(ValueError, match=r"lora_rank=0 must be at least 1"):
        Lora(0, 4.0, ("q",))
    with pytest.raises(ValueError, match=r"lora_alpha=nan must be a number above 0"):
        Lora(2, float("nan"), ("q",))
    with pytest.raises(ValueError, match=r"lora_on is empty"):
        Lora(2, 4.0, ())
