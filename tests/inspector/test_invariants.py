"""What every recorded pass must satisfy, over the zoo: attention, residual stream, norms, experts, output."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from clearhead.inspector.trace import Trace, trace
from clearhead.model.attention import Attention, LatentAttention
from clearhead.model.block import Block
from clearhead.model.experts import Experts
from clearhead.model.layers import FeedForward, LayerNorm, RMSNorm
from clearhead.model.position import Rotary, rotate
from clearhead.model.transformer import Transformer
from reference.zoo import ZOO, animal, inputs

# Many passes: the shapes are checked in the tests of the model.
pytestmark = pytest.mark.usefixtures("unchecked")

every_animal = pytest.mark.parametrize("name", ZOO)
TRACES: dict[tuple[str, bool], Trace] = {}


def recorded(name: str, padded: bool = False) -> Trace:
    if (name, padded) not in TRACES:
        model = animal(name)
        TRACES[name, padded] = trace(model, **inputs(model, padded))
    return TRACES[name, padded]


def parts(t: Trace, *kinds: type) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of these kinds that took part."""
    for path, module in t.model.named_modules():
        if isinstance(module, kinds) and path in t.values:
            yield path, module


def attentions(t: Trace) -> Iterator[tuple[str, torch.nn.Module]]:
    yield from parts(t, Attention, LatentAttention)


@every_animal
def test_invariant_08_rows_sum_to_one_or_show_nothing(name: str) -> None:
    """With a sink the row and the sink's share sum to 1; a row with no allowed key is all zeros."""
    t = recorded(name, padded=True)
    for path, module in attentions(t):
        sums = t.values[f"{path}.weights"].sum(-1)
        if getattr(module, "sinks", None) is not None:
            scores, sinks = t.values[f"{path}.scores"], module.sinks.detach()[:, None, None]
            mask = t.given[path]["mask"]
            top = torch.maximum(scores.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True), sinks)
            exps = (scores.masked_fill(~mask, -torch.inf) - top).exp()
            share = ((sinks - top).exp() / (exps.sum(-1, keepdim=True) + (sinks - top).exp())).squeeze(-1)
            sums = sums + share
        whole = (sums - 1).abs() <= 1e-6
        assert (whole | (sums == 0)).all()
        assert whole.any()


@every_animal
def test_invariant_09_weights_are_zero_exactly_where_masked(name: str) -> None:
    t = recorded(name, padded=True)
    for path, _ in attentions(t):
        weights, mask = t.values[f"{path}.weights"], t.given[path].get("mask")
        if mask is None:
            assert (weights > 0).all()
            continue
        mask = mask.expand_as(weights)
        seen = mask.any(-1, keepdim=True)
        assert (weights[~mask] == 0).all() and (weights[mask & seen] > 0).all()
    if t.model.config.shape != "encoder":
        later = torch.ones(7, 7).triu(1).bool()
        first = t.values["decoder.blocks.0.attn.weights"]
        assert (first[..., later] == 0).all()


@every_animal
def test_invariant_10_mix_and_projection_follow(name: str) -> None:
    """z = A V with V shared by groups of heads (12), and out = z W_O + b, from recorded numbers."""
    t = recorded(name)
    for path, module in attentions(t):
        weights, values = t.values[f"{path}.weights"], t.values[f"{path}.values"]
        shared = values.repeat_interleave(weights.shape[1] // values.shape[1], 1)
        mixed = weights @ shared
        torch.testing.assert_close(t.values[f"{path}.mixed"], mixed, atol=1e-5, rtol=0)
        out = module.o(mixed.transpose(1, 2).flatten(2)).detach()
        torch.testing.assert_close(t.values[path], out, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_invariant_11_rotation(layout: str) -> None:
    """It keeps every pair's length, is nothing at position 0, and only the distance counts."""
    rotary = Rotary(8, layout=layout)
    x, y = torch.randn(2, 8)
    places = torch.tensor([0, 3, 10])
    turned = rotate(x.expand(3, 8), rotary.angles(places))

    def pairs(values: Tensor) -> Tensor:
        two = values.unflatten(-1, (2, 4)) if layout == "half" else values.unflatten(-1, (4, 2)).mT
        return two.square().sum(-2)

    torch.testing.assert_close(pairs(turned), pairs(x.expand(3, 8)))
    assert torch.equal(turned[0], x)
    other = rotate(y.expand(3, 8), rotary.angles(places + 4))
    products = (turned * other).sum(-1)
    torch.testing.assert_close(products, products[:1].expand(3), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["encoder-decoder", "encoder-decoder shared"])
def test_invariant_13_cross_attention(name: str) -> None:
    """Source padding gets 0; the keys of a layer are the same for every target position."""
    t = recorded(name, padded=True)
    assert t.source_mask is not None
    for layer in range(2):
        weights = t.values[f"decoder.blocks.{layer}.cross.weights"]
        assert (weights[1, ..., ~t.source_mask[1]] == 0).all()
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 6, 7))
        assert t.input_of(f"decoder.blocks.{layer}.cross.k") == "encoder"


@every_animal
def test_invariant_14_the_stream_is_a_sum_bitwise(name: str) -> None:
    """mid = pre + attention, post = mid + feed-forward, or the norm of that sum."""
    t = recorded(name)
    values = t.values
    for path, block in parts(t, Block):
        stream = values[t.input_of(path)]
        for part, made in (("attn", "middle"), ("cross", "crossed"), ("ff", "")):
            if f"{path}.{part}" not in values:
                continue
            added = values.get(f"{path}.{part}_out_norm", values[f"{path}.{part}"])
            total = stream + added
            if f"{path}.{part}_post_norm" in values:
                assert torch.equal(values[f"{path}.{part}_post_norm.input"], total)
                total = getattr(block, f"{part}_post_norm")(total).detach()
            stream = values[f"{path}.{made}".removesuffix(".")]
            assert torch.equal(stream, total)


@pytest.mark.parametrize("name", ["mha rotary", "sinusoidal", "sandwich soft-cap", "experts", "latent"])
def test_invariant_15_contributions_sum_to_the_residual_and_to_the_logit(name: str) -> None:
    """Direct logit contributions with the final norm's scale frozen."""
    t = recorded(name)
    model, values = t.model, t.values
    assert isinstance(model, Transformer)
    contributions = [values[t.input_of("decoder.blocks.0")]]
    for path, _ in parts(t, Block):
        contributions += [
            values.get(f"{path}.{part}_out_norm", values[f"{path}.{part}"]) for part in ("attn", "ff")
        ]
    total = values[f"decoder.blocks.{model.config.n_layers - 1}"]
    torch.testing.assert_close(sum(contributions), total, atol=1e-5, rtol=1e-5)
    if model.config.logit_softcap is not None or model.config.norm == "layer":
        return
    scale = values["decoder"] / total  # the norm's gain over the root of the mean square, feature by feature
    direct = sum((part * scale) @ model.head.weight.detach().T for part in contributions)
    torch.testing.assert_close(direct, values["logits"], atol=1e-4, rtol=1e-4)


@every_animal
def test_invariant_16_norms(name: str) -> None:
    t = recorded(name)
    for path, norm in parts(t, RMSNorm, LayerNorm):
        out, gain = t.values[path], norm.weight.detach()
        x = t.values[t.input_of(path)].double()
        if isinstance(norm, RMSNorm):
            normed, size = out / (gain + norm.offset), x.square().mean(-1)
            torch.testing.assert_close(normed.square().mean(-1), (size / (size + norm.eps)).float())
        else:
            normed, size = (
                (out - (0 if norm.bias is None else norm.bias.detach())) / gain,
                x.var(-1, correction=0),
            )
            torch.testing.assert_close(normed.mean(-1), torch.zeros(out.shape[:-1]), atol=1e-5, rtol=0)
            torch.testing.assert_close(
                normed.var(-1, correction=0), (size / (size + norm.eps)).float(), rtol=1e-4, atol=1e-5
            )


@every_animal
def test_invariant_17_feed_forward(name: str) -> None:
    """act(gate) up = hidden, bitwise; down of hidden = the layer."""
    t = recorded(name)
    for path, ff in parts(t, FeedForward):
        up, hidden = t.values[f"{path}.up"], t.values[f"{path}.hidden"]
        gate = t.values.get(f"{path}.gate")
        made = ff.activation(up) if gate is None else ff.activation(gate) * up
        assert torch.equal(made, hidden)
        assert torch.equal(ff.down(hidden).detach(), t.values[path])


@pytest.mark.parametrize("name", ["experts", "experts sigmoid", "experts limited"])
def test_invariant_18_experts(name: str) -> None:
    """Exactly k experts a token, gates by the declared rule, the sum of all, and nobody is dropped."""
    t = recorded(name)
    found = dict(parts(t, Experts))
    assert found
    for path, experts in found.items():
        config, chosen = experts.config, t.values[f"{path}.chosen"]
        weights = t.values[f"{path}.weights"]
        assert chosen.shape == (2, 7, config.top_k)
        assert all(len(set(row)) == config.top_k for row in chosen.flatten(0, 1).tolist())
        if config.renormalise:
            expected = torch.full((2, 7), config.weight_scale)
            torch.testing.assert_close(weights.sum(-1), expected)
        combined = (t.values[f"{path}.outputs"] * weights[..., None]).sum(-2)
        if f"{path}.shared" in t.values:
            shared = t.values[f"{path}.shared"]
            gate = t.values.get(f"{path}.shared_gate")
            combined = combined + (shared if gate is None else gate.sigmoid() * shared)
        torch.testing.assert_close(combined, t.values[path], atol=1e-6, rtol=1e-5)
        counts = chosen.flatten().bincount(minlength=config.n_experts)
        assert counts.sum() == 2 * 7 * config.top_k
