"""attend() in both faces against plain loops; Attention against torch and against the course's model."""

import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clearhead.model.attention import Attention, attend, masked_softmax
from clearhead.model.config import ModelConfig
from clearhead.model.config_parts import LatentConfig
from clearhead.model.masks import causal_mask
from clearhead.model.position import Rotary
from clearhead.model.tap import listen
from clearhead.model.transformer import Transformer
from reference import course_model
from reference.naive_attention import naive_attention

TOLERANCE = {"atol": 1e-5, "rtol": 0}


def draw(*shape: int, grad: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype, requires_grad=grad)


@st.composite
def problems(draw_from: st.DrawFn) -> dict:
    """Queries, keys and values of any leading dimensions, with or without groups, mask and bias."""
    lead = draw_from(st.lists(st.integers(1, 3), max_size=3))
    queries, keys = draw_from(st.integers(1, 5)), draw_from(st.integers(1, 6))
    width, value_width = draw_from(st.integers(1, 5)), draw_from(st.integers(1, 5))
    q_lead = list(lead)
    if len(lead) >= 2:
        q_lead[-1] *= draw_from(st.integers(1, 3))
    problem = {
        "q": draw(*q_lead, queries, width),
        "k": draw(*lead, keys, width),
        "v": draw(*lead, keys, value_width),
    }
    scores = (*q_lead, queries, keys)

    def extra() -> tuple[int, ...]:
        """A shape that broadcasts to the scores: some leading sizes left out, some 1."""
        kept = scores[draw_from(st.integers(0, len(scores) - 2)) :]
        return tuple(1 if draw_from(st.booleans()) else size for size in kept)

    if draw_from(st.booleans()):
        problem["mask"] = torch.rand(extra()) > 0.4
    if draw_from(st.booleans()):
        problem["bias"] = draw(*extra())
    if draw_from(st.booleans()):
        problem["scale"] = draw_from(st.sampled_from([0.3, 1.0, 2.0]))
    return problem


@settings(deadline=None, max_examples=60)
@given(problem=problems())
def test_scaled_dot_product_attention(problem: dict) -> None:
    """Fused = explained = plain loops: 2-D to 5-D, groups, d_v != d_k, any mask, bias and scale."""
    fused = attend(**problem)
    explained, weights = attend(**problem, return_weights=True)
    expected, expected_weights = naive_attention(**problem)
    torch.testing.assert_close(fused, explained, **TOLERANCE)
    torch.testing.assert_close(explained, expected.float(), **TOLERANCE)
    torch.testing.assert_close(weights, expected_weights.float(), **TOLERANCE)
    mask = problem.get("mask", torch.ones(()).bool()).expand_as(weights)
    assert (weights[~mask] == 0).all()
    sums = weights.sum(-1)
    torch.testing.assert_close(sums, mask.any(-1).float(), **TOLERANCE)
    assert (fused[~mask.any(-1)] == 0).all() and (explained[~mask.any(-1)] == 0).all()


def test_4d_scaled_dot_product_attention() -> None:
    """(B, H, T, K) with a mask, against torch."""
    q, k, v, mask = draw(2, 3, 5, 8), draw(2, 3, 7, 8), draw(2, 3, 7, 8), torch.rand(2, 3, 5, 7) > 0.3
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(attend(q, k, v, mask), expected)
    torch.testing.assert_close(attend(q, k, v, mask, return_weights=True)[0], expected, **TOLERANCE)


def test_five_dimensions_with_groups() -> None:
    q, k, v = draw(2, 3, 4, 5, 8), draw(2, 3, 2, 6, 8), draw(2, 3, 2, 6, 7)
    expected = attend(q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2))
    assert expected.shape == (2, 3, 4, 5, 7)
    torch.testing.assert_close(attend(q, k, v), expected, **TOLERANCE)
    torch.testing.assert_close(attend(q, k, v, return_weights=True)[0], expected, **TOLERANCE)


def test_query_heads_use_their_group_in_repeat_interleave_order() -> None:
    """Heads 0 and 1 use key/value head 0, heads 2 and 3 head 1: values that name their head show it."""
    v = torch.tensor([10.0, 20.0]).view(1, 2, 1, 1).expand(1, 2, 3, 1)
    q, k = draw(1, 4, 2, 8), draw(1, 2, 3, 8)
    for mixed in (attend(q, k, v), attend(q, k, v, return_weights=True)[0]):
        torch.testing.assert_close(mixed[0, :, 0, 0], torch.tensor([10.0, 10.0, 20.0, 20.0]))


def gradients(inputs: tuple[Tensor, ...], output: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad((output * weight).sum(), inputs)


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_both_faces_have_the_same_gradients(n_kv_heads: int, dtype: torch.dtype) -> None:
    """With a mask, a row that sees nothing, a bias and groups; large upstream gradients stay finite."""
    q = draw(2, 4, 5, 8, grad=True, dtype=dtype)
    k = draw(2, n_kv_heads, 6, 8, grad=True, dtype=dtype)
    v = draw(2, n_kv_heads, 6, 7, grad=True, dtype=dtype)
    bias = draw(4, 5, 6, grad=True, dtype=dtype)
    mask = torch.rand(2, 1, 5, 6) > 0.4
    mask[0, :, 2] = False
    weight = 100 * draw(2, 4, 5, 7, dtype=dtype)
    inputs = (q, k, v, bias)
    fused = gradients(inputs, attend(q, k, v, mask, bias=bias), weight)
    explained = gradients(inputs, attend(q, k, v, mask, bias=bias, return_weights=True)[0], weight)
    for a, b in zip(fused, explained, strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, atol=1e-3, rtol=1e-5)
    assert (fused[0][0, :, 2] == 0).all() and (explained[0][0, :, 2] == 0).all()


def bottom_right(n_queries: int, n_keys: int) -> Tensor:
    """Query t sees the keys 0 .. S - T + t."""
    rows = [[s <= n_keys - n_queries + t for s in range(n_keys)] for t in range(n_queries)]
    return torch.tensor(rows)


@pytest.mark.parametrize("lead", [(), (3,), (2, 4), (2, 3, 4)])
@pytest.mark.parametrize("lengths", [(6, 6), (1, 1), (3, 7), (5, 2)])
@pytest.mark.parametrize("extra", ["nothing", "bias", "scale", "softcap", "sinks"])
def test_causal_by_name_is_the_causal_mask(lead: tuple, lengths: tuple, extra: str) -> None:
    """In both faces, in any dimensions, with groups, whatever comes with it: as plain loops have it."""
    n_queries, n_keys = lengths
    kv_lead = (*lead[:-1], lead[-1] // 2) if len(lead) > 1 else lead
    q, k, v = draw(*lead, n_queries, 5), draw(*kv_lead, n_keys, 5), draw(*kv_lead, n_keys, 3)
    every = {
        "bias": draw(n_queries, n_keys),
        "scale": 0.3,
        "softcap": 2.0,
        "sinks": draw(*(lead or (1,))[-1:]),
    }
    options = {name: value for name, value in every.items() if name == extra and (lead or name != "sinks")}
    fused = attend(q, k, v, "causal", **options)
    explained, weights = attend(q, k, v, "causal", return_weights=True, **options)
    mask = bottom_right(n_queries, n_keys)
    expected, expected_weights = naive_attention(q, k, v, mask, **options)
    torch.testing.assert_close(fused, expected.float(), **TOLERANCE)
    torch.testing.assert_close(explained, expected.float(), **TOLERANCE)
    torch.testing.assert_close(weights, expected_weights.float(), **TOLERANCE)
    assert (weights[..., ~mask] == 0).all()


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
def test_causal_by_name_has_the_gradients_of_the_mask(n_kv_heads: int) -> None:
    """Fused and explained, by name and by tensor: the gradients that differences of plain loops give."""
    q = draw(1, 4, 3, 2, grad=True, dtype=torch.float64)
    k = draw(1, n_kv_heads, 3, 2, grad=True, dtype=torch.float64)
    v = draw(1, n_kv_heads, 3, 3, grad=True, dtype=torch.float64)
    weight, mask = draw(1, 4, 3, 3, dtype=torch.float64), bottom_right(3, 3)

    def by_differences(x: Tensor, step: float = 1e-5) -> Tensor:
        found = torch.zeros_like(x)
        for place in range(x.numel()):
            sides = []
            for sign in (1, -1):
                moved = x.detach().clone()
                moved.view(-1)[place] += sign * step
                inputs = [moved if other is x else other.detach() for other in (q, k, v)]
                sides.append((naive_attention(*inputs, mask)[0] * weight).sum())
            found.view(-1)[place] = (sides[0] - sides[1]) / (2 * step)
        return found

    expected = [by_differences(x) for x in (q, k, v)]
    for given_mask in ("causal", mask):
        for explained in (False, True):
            mixed = attend(q, k, v, given_mask, return_weights=explained)
            mixed = mixed[0] if explained else mixed
            for found, wanted in zip(gradients((q, k, v), mixed, weight), expected, strict=True):
                torch.testing.assert_close(found, wanted, **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causal_by_name_over_many_keys(dtype: torch.dtype) -> None:
    """Long enough for several blocks of the kernel: the values and gradients of the mask."""
    shapes = ((2, 6, 300, 16), (2, 3, 300, 16), (2, 3, 300, 16))
    q, k, v = (draw(*shape, grad=True, dtype=dtype) for shape in shapes)
    weight = draw(2, 6, 300, 16, dtype=dtype)
    tolerance = TOLERANCE if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.02}
    by_mask = attend(q, k, v, bottom_right(300, 300))
    expected = gradients((q, k, v), by_mask, weight)
    for mixed in (attend(q, k, v, "causal"), attend(q, k, v, "causal", return_weights=True)[0]):
        torch.testing.assert_close(mixed, by_mask, **tolerance)
        for found, wanted in zip(gradients((q, k, v), mixed, weight), expected, strict=True):
            torch.testing.assert_close(found, wanted, **tolerance)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the fused kernel is asked for, call by call: "causal", "mask" or "all"."""
    asked: list[str] = []
    fused = F.scaled_dot_product_attention

    def spy(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        asked.append("causal" if is_causal else "all" if attn_mask is None else "mask")
        return fused(q, k, v, attn_mask, dropout_p, is_causal, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return asked


def test_the_kernel_is_told_causal_only_where_it_means_the_same(kernel: list[str]) -> None:
    """It aligns at the top left, where new queries would not see the keys before them."""
    q, k, v = draw(2, 3, 4, 8), draw(2, 3, 6, 8), draw(2, 3, 6, 5)
    top_left = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(top_left, attend(q, k, v, torch.ones(4, 6).tril().bool()), **TOLERANCE)
    assert (top_left - attend(q, k, v, bottom_right(4, 6))).abs().max() > 0.1
    kernel.clear()
    attend(q, k, v, "causal")
    attend(q, k[:, :, :3], v[:, :, :3], "causal")
    attend(q, k[:, :, :4], v[:, :, :4], "causal")
    attend(q, k[:, :, :4], v[:, :, :4], "causal", bias=draw(4, 4))
    attend(q, k[:, :, :4], v[:, :, :4], bottom_right(4, 4))
    attend(q, k, v)
    assert kernel == ["mask", "mask", "causal", "mask", "mask", "all"]
    attend(q, k[:, :, :4], v[:, :, :4], "causal", return_weights=True)
    attend(q, k[:, :, :4], v[:, :, :4], "causal", softcap=2.0)
    attend(q, k[:, :, :4], v[:, :, :4], "causal", sinks=draw(3))
    assert len(kernel) == 6  # step by step


PASSES = {
    "a text": ({}, {}, "causal causal"),
    "grouped heads": ({"n_kv_heads": 1, "qk_norm": "head", "fused_qkv": True}, {}, "causal causal"),
    "a text of one token": ({}, {"tokens": 1}, "causal causal"),
    "explicit positions": ({}, {"positions": torch.arange(3, 10)}, "causal causal"),
    "a window as long as the text": ({"window": 7}, {}, "causal causal"),
    "a longer window": ({"window": 8}, {}, "causal causal"),
    "a shorter window": ({"window": 6}, {}, "mask mask"),
    "a shorter window in one layer": ({"window": 6, "windowed_layers": (False, True)}, {}, "causal mask"),
    "padding": ({}, {"mask": torch.arange(7) > torch.tensor([[2], [0]])}, "mask mask"),
    "a padding mask without padding": ({}, {"mask": torch.ones(2, 7, dtype=torch.bool)}, "mask mask"),
    "documents": ({}, {"documents": torch.tensor([[0, 0, 1, 1, 1, 2, 2]] * 2)}, "mask mask"),
    "relative positions": ({"positions": "relative"}, {}, "mask mask"),
    "a soft-cap": ({"attn_softcap": 3.0}, {}, ""),
    "sinks": ({"attn_sinks": True}, {}, ""),
    "an encoder": ({"shape": "encoder", "head": "masked"}, {}, "all all"),
    "latent attention": (
        {"latent": LatentConfig(q_rank=None, kv_rank=5, d_plain=4, d_rotary=2, d_value=3)}, {},
        "causal causal",
    ),
    "latent attention, one token": (
        {"latent": LatentConfig(q_rank=None, kv_rank=5, d_plain=4, d_rotary=2, d_value=3)},
        {"tokens": 1}, "all all",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PASSES)
def test_which_passes_are_causal_by_name(name: str, kernel: list[str]) -> None:
    """Those without anything else to say; and all give what the masks spelled out give."""
    changes, given_too, expected = PASSES[name]
    sizes = {"vocab_size": 31, "max_len": 16, "d_model": 12, "n_layers": 2, "n_heads": 2, "d_ff": 20}
    model = Transformer(ModelConfig(**(sizes | changes)), seed=1)
    tokens = torch.randint(31, (2, given_too.get("tokens", 7)))
    options = {key: value for key, value in given_too.items() if key != "tokens"}
    found = model(tokens, **options)
    assert kernel == expected.split()
    with listen(lambda name, value: value):  # step by step
        torch.testing.assert_close(found, model(tokens, **options), **TOLERANCE)


def test_a_cache_is_never_causal_by_name(kernel: list[str]) -> None:
    """Neither the first chunk, whose cache has room for more, nor later ones; also when they fill it."""
    sizes = {"vocab_size": 31, "max_len": 16, "d_model": 12, "n_layers": 2, "n_heads": 2, "d_ff": 20}
    model, tokens = Transformer(ModelConfig(**sizes), seed=1), torch.randint(31, (2, 8))
    with torch.no_grad():
        whole = model(tokens)
        kernel.clear()
        cache = model.new_cache(2, 8)
        parts = [model(part, cache=cache) for part in tokens.split([4, 3, 1], 1)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, **TOLERANCE)
        full = model(tokens, cache=model.new_cache(2, 8))
        torch.testing.assert_close(full, whole, **TOLERANCE)
    assert kernel == ["mask"] * 8


def test_the_two_sides_of_an_encoder_decoder(kernel: list[str]) -> None:
    """The encoder sees all, the decoder what came before, and the source whole or without its padding."""
    config = ModelConfig(
        vocab_size=31, max_len=16, d_model=12, n_layers=1, n_heads=2, d_ff=20, shape="encoder-decoder"
    )
    model = Transformer(config, seed=1)
    tokens, source = torch.randint(31, (2, 5)), torch.randint(31, (2, 7))
    model(tokens, source=source)
    model(tokens, source=source, source_mask=torch.arange(7) < torch.tensor([[7], [4]]))
    assert kernel == ["all", "causal", "all", "mask", "causal", "mask"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n_kv_heads", [4, 2])
def test_a_query_that_sees_nothing_gets_0(n_kv_heads: int, dtype: torch.dtype) -> None:
    """In both faces, with finite gradients, even when no query sees anything."""
    for rows in (slice(1, 2), slice(None)):
        q, k, v = (draw(2, h, 3, 8, grad=True, dtype=dtype) for h in (4, n_kv_heads, n_kv_heads))
        mask = torch.ones(3, 3, dtype=torch.bool)
        mask[rows] = False
        explained, weights = attend(q, k, v, mask, return_weights=True)
        assert (weights[..., rows, :] == 0).all()
        for mixed in (attend(q, k, v, mask), explained):
            assert (mixed[..., rows, :] == 0).all() and mixed.isfinite().all()
            for gradient in gradients((q, k, v), mixed, torch.full_like(mixed, 1e4)):
                assert gradient.isfinite().all()


def test_softcap_squashes_before_the_bias() -> None:
    q, k, v, bias, mask = draw(3, 4), draw(5, 4), draw(5, 2), draw(3, 5), torch.rand(3, 5) > 0.3
    mixed = attend(4 * q, k, v, mask, softcap=2.0, bias=bias)
    scores = 2 * torch.tanh(4 * q @ k.T / math.sqrt(4) / 2) + bias
    torch.testing.assert_close(mixed, masked_softmax(scores, mask) @ v, **TOLERANCE)
    expected = naive_attention(4 * q, k, v, mask, softcap=2.0, bias=bias)[0]
    torch.testing.assert_close(mixed, expected.float(), **TOLERANCE)


def test_sinks_take_weight_and_give_nothing() -> None:
    """One more logit per head in the softmax, whose share is dropped; large ones do not overflow."""
    q, k, v, mask = draw(2, 3, 4, 8), draw(2, 3, 5, 8), draw(2, 3, 5, 6), torch.rand(4, 5) > 0.4
    mask[1] = False
    sinks = torch.tensor([-2.0, 0.5, 3.0])
    mixed, weights = attend(q, k, v, mask, sinks=sinks, return_weights=True)
    expected, expected_weights = naive_attention(q, k, v, mask, sinks=sinks)
    torch.testing.assert_close(mixed, expected.float(), **TOLERANCE)
    torch.testing.assert_close(weights, expected_weights.float(), **TOLERANCE)
    assert (weights.sum(-1) < 1).all() and (weights[:, :, 1] == 0).all()
    assert attend(q, k, v, mask, sinks=torch.tensor([1e4, -1e4, 0.0])).isfinite().all()


def test_dropout_only_when_asked() -> None:
    """In both faces: 0 changes nothing; a share p is dropped and the rest grows to keep the mean."""
    q, k, v = draw(1, 1, 400, 8), draw(1, 1, 50, 8), torch.ones(1, 1, 50, 3)
    assert torch.equal(attend(q, k, v), attend(q, k, v, dropout=0.0))
    for mixed in (attend(q, k, v, dropout=0.5), attend(q, k, v, dropout=0.5, return_weights=True)[0]):
        assert mixed.std() > 0.01
        assert mixed.mean().item() == pytest.approx(1, abs=0.05)
    _, weights = attend(q, k, v, dropout=0.5, return_weights=True)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 400))  # what was computed, before dropping


def test_bfloat16_computes_its_softmax_in_float32() -> None:
    """The weights are those of float32, rounded once; the mix is near that of float32."""
    scores = draw(20, 500, dtype=torch.bfloat16)
    assert torch.equal(masked_softmax(scores), masked_softmax(scores.float()).bfloat16())
    q, k, v = draw(2, 2, 6, 8), draw(2, 2, 6, 8), draw(2, 2, 6, 8)
    exact = attend(q, k, v)
    narrow = [x.bfloat16() for x in (q, k, v)]
    for mixed in (attend(*narrow), attend(*narrow, return_weights=True)[0]):
        assert mixed.dtype == torch.bfloat16
        torch.testing.assert_close(mixed.float(), exact, atol=0.03, rtol=0)
    bias = draw(6, 6)  # a bias may be wider than the rest
    assert attend(*narrow, bias=bias).dtype == attend(*narrow, bias=bias, return_weights=True)[0].dtype


def test_listening_gives_the_explained_face() -> None:
    q, k, v = draw(2, 3, 4), draw(2, 3, 4), draw(2, 3, 4)
    heard: dict[str, Tensor] = {}

    def hear(name: str, value: Tensor) -> Tensor:
        heard[name] = value
        return value

    with listen(hear):
        mixed = attend(q, k, v)
    assert list(heard) == ["scores", "weights"]
    torch.testing.assert_close(heard["scores"], q @ k.mT / 2)
    torch.testing.assert_close(heard["weights"] @ v, mixed)
    torch.testing.assert_close(attend(q, k, v), mixed, **TOLERANCE)


MISFITS = {
    "widths": (((3, 4), (5, 3), (5, 4)), {}, "differ in width"),
    "lengths": (((3, 4), (5, 4), (6, 4)), {}, "keys and values differ in length"),
    "batches": (((2, 3, 4), (3, 5, 4), (3, 5, 4)), {}, "leading sizes differ"),
    "batch of groups": (((2, 4, 3, 4), (3, 2, 5, 4), (3, 2, 5, 4)), {}, "leading sizes differ"),
    "heads": (((2, 3, 3, 4), (2, 2, 5, 4), (2, 2, 5, 4)), {}, "no multiple of the key heads"),
    "more key heads": (((2, 2, 3, 4), (2, 4, 5, 4), (2, 4, 5, 4)), {}, "no multiple of the key heads"),
    "key and value heads": (((2, 4, 3, 4), (2, 4, 5, 4), (2, 2, 5, 4)), {}, "leading sizes"),
    "no key heads": (((2, 2, 3, 4), (2, 0, 5, 4), (2, 0, 5, 4)), {}, "no multiple of the key heads"),
    "dimensions": (((2, 3, 4), (5, 4), (5, 4)), {}, "leading sizes differ"),
    "a vector": (((4,), (5, 4), (5, 4)), {}, "at least a length and a width"),
    "no keys": (((3, 4), (0, 4), (0, 4)), {}, "no keys"),
    "mask of queries": (((3, 4), (5, 4), (5, 4)), {"mask": (4, 5)}, r"mask \(4, 5\).*scores \(3, 5\)"),
    "mask of keys": (((3, 4), (5, 4), (5, 4)), {"mask": (3, 4)}, r"mask \(3, 4\).*scores \(3, 5\)"),
    "mask too deep": (((3, 4), (5, 4), (5, 4)), {"mask": (1, 3, 5)}, r"mask \(1, 3, 5\)"),
    "mask of a batch": (((2, 3, 4), (2, 5, 4), (2, 5, 4)), {"mask": (3, 3, 5)}, r"mask \(3, 3, 5\)"),
    "bias": (((3, 4), (5, 4), (5, 4)), {"bias": (3, 6)}, r"bias \(3, 6\).*scores \(3, 5\)"),
    "sinks": (((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)), {"sinks": (3,)}, r"sinks \(3,\)"),
    "sinks without heads": (((3, 4), (5, 4), (5, 4)), {"sinks": (1,)}, r"sinks \(1,\)"),
}


@pytest.mark.parametrize("name", MISFITS)
@pytest.mark.usefixtures("unchecked")
def test_every_misfit_is_a_value_error_with_the_shapes(name: str) -> None:
    shapes, extras, message = MISFITS[name]
    q, k, v = (torch.randn(shape) for shape in shapes)
    given_too = {key: torch.ones(s, dtype=torch.bool if key == "mask" else None) for key, s in extras.items()}
    for explained in (False, True):
        with pytest.raises(ValueError, match=message) as error:
            attend(q, k, v, **given_too, return_weights=explained)
        assert f"q {tuple(q.shape)}" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.usefixtures("unchecked")
def test_a_mask_must_be_boolean() -> None:
    """A float mask would be added, a mask of integers inverted bit by bit."""
    q, k, v = draw(3, 4), draw(5, 4), draw(5, 4)
    for mask in (torch.zeros(3, 5), torch.ones(3, 5, dtype=torch.long)):
        with pytest.raises(ValueError, match="not boolean"):
            attend(q, k, v, mask)
    with pytest.raises(ValueError, match="the mask 'full' is unknown; give 'causal' or a boolean tensor"):
        attend(q, k, v, "full")


# The module


def attention_with_course_weights(weights: dict[str, Tensor], d_model: int, n_heads: int) -> Attention:
    module = Attention(d_model, n_heads)
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "output_proj"}
    module.load_state_dict({f"{ours}.weight": weights[f"{course}.weight"] for ours, course in names.items()})
    return module


def course_attention_weights(d_model: int) -> dict[str, Tensor]:
    names = ("q_proj", "k_proj", "v_proj", "output_proj")
    return {f"{name}.weight": draw(d_model, d_model) / math.sqrt(d_model) for name in names}


def test_multihead_self_attention() -> None:
    """Causal, without positions, against the course's formula."""
    weights, x = course_attention_weights(12), draw(2, 7, 12)
    places = torch.arange(7)
    module, expected = (
        attention_with_course_weights(weights, 12, 3),
        course_model.attention(x, weights, 3, None),
    )
    for mask in (causal_mask(places, places), "causal"):
        torch.testing.assert_close(module(x, mask=mask), expected, **TOLERANCE)


def test_multihead_self_attention_with_rope() -> None:
    """The same with rotary positions in the course's interleaved layout, on queries and keys only."""
    weights, x = course_attention_weights(12), draw(2, 7, 12)
    places = torch.arange(7)
    rotation = Rotary(4, theta=100.0, layout="interleaved").angles(places)
    module = attention_with_course_weights(weights, 12, 3)
    mixed = module(x, mask=causal_mask(places, places), rotation=rotation)
    torch.testing.assert_close(mixed, course_model.attention(x, weights, 3, theta=100.0), **TOLERANCE)


def randomise(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)


@pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("bias", [False, True])
def test_fused_projections_equal_separate_ones(n_kv_heads: int, bias: bool) -> None:
    """One matrix product or three: the same state dict, the same result, the same gradients."""
    options = {"n_kv_heads": n_kv_heads, "d_head": 5, "qkv_bias": bias, "out_bias": bias}
    separate, fused = Attention(12, 4, **options), Attention(12, 4, **options, fused=True)
    randomise(separate)
    fused.load_state_dict(separate.state_dict())
    x = draw(2, 7, 12)
    torch.testing.assert_close(fused(x), separate(x), **TOLERANCE)
    separate(x).sum().backward(), fused(x).sum().backward()
    for one, other in zip(separate.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-4, rtol=1e-5)
    source = draw(2, 3, 12)
    assert torch.equal(fused(x, source=source), separate(x, source=source))


def test_cross_attention_takes_keys_and_values_from_the_source() -> None:
    """Against torch's own module, whose three projections are one matrix."""
    ours, theirs = (
        Attention(8, 2, qkv_bias=True, out_bias=True),
        nn.MultiheadAttention(8, 2, batch_first=True),
    )
    randomise(ours)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([ours.q.weight, ours.k.weight, ours.v.weight]))
        theirs.in_proj_bias.copy_(torch.cat([ours.q.bias, ours.k.bias, ours.v.bias]))
        theirs.out_proj.load_state_dict(ours.o.state_dict())
    x, source, padding = draw(2, 5, 8), draw(2, 6, 8), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    expected, _ = theirs(x, source, source, key_padding_mask=padding)
    mixed = ours(x, source=source, mask=~padding[:, None, None, :])
    torch.testing.assert_close(mixed, expected, **TOLERANCE)


def test_qk_norm_normalises_each_head_before_the_rotation() -> None:
    """Every query has length sqrt(K) times its gain, turned or not."""
    module = Attention(12, 3, qk_norm="head", norm_eps=0.0)
    heard: dict[str, Tensor] = {}

    def hear(name: str, value: Tensor) -> Tensor:
        heard[name] = value
        return value

    with listen(hear):
        module(5 * draw(2, 7, 12), rotation=Rotary(4).angles(torch.arange(7)))
    for name in ("queries", "keys"):
        torch.testing.assert_close(heard[name].norm(dim=-1), torch.full((2, 3, 7), 2.0), **TOLERANCE)


def test_a_scale_replaces_the_root() -> None:
    module, x = Attention(12, 3, scale=1.0), draw(1, 4, 12)
    plain = Attention(12, 3)
    plain.load_state_dict(module.state_dict())
    with torch.no_grad():
        plain.q.weight.mul_(2)  # 1 = 2 / sqrt(4)
    torch.testing.assert_close(module(x), plain(x), **TOLERANCE)


def test_dropout_of_weights_only_in_training() -> None:
    module, x = Attention(12, 3, dropout=0.5), draw(2, 7, 12)
    assert not torch.equal(module(x), module(x))
    module.eval()
    assert torch.equal(module(x), module(x))


@settings(deadline=None, max_examples=20)
@given(order=st.permutations(range(6)))
def test_without_positions_attention_only_sees_a_set(order: list[int]) -> None:
    """Permuting the tokens permutes the results."""
    module, x = Attention(12, 3), draw(2, 6, 12)
    torch.testing.assert_close(module(x[:, order]), module(x)[:, order], **TOLERANCE)


@pytest.mark.usefixtures("unchecked")
def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="d_model=10 is not divisible by n_heads=3"):
        Attention(10, 3)
    with pytest.raises(ValueError, match="n_heads=4 is not divisible by n_kv_heads=3"):
        Attention(12, 4, 3)
    with pytest.raises(ValueError, match="n_heads=0 must be at least 1"):
        Attention(12, 0)
    with pytest.raises(ValueError, match="qk_norm='all' is unknown; choose one of none, head"):
        Attention(12, 4, qk_norm="all")
    assert Attention(10, 3, d_head=4)(draw(1, 2, 10)).shape == (1, 2, 10)


def test_an_attention_layer_is_freed_at_once() -> None:
    gc.disable()
    try:
        module = Attention(8, 2, fused=True)
        weight = weakref.ref(module.q.weight)
        del module
        assert weight() is None
    finally:
        gc.enable()
