"""The whole decoder: its blocks against formulas, its properties, its mistakes, its compiled form."""

import copy
import functools
import gc
import itertools
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clearhead.model.block import Block
from clearhead.model.config import ModelConfig
from clearhead.model.layers import LayerNorm, RMSNorm
from clearhead.model.masks import causal_mask, mask_of_pass
from clearhead.model.position import Rotary
from clearhead.model.stack import Stack
from clearhead.model.transformer import Transformer
from reference import course_model

TOLERANCE = {"atol": 1e-5, "rtol": 0}


def randomised(module: nn.Module, seed: int = 1) -> nn.Module:
    """Every weight random, gains around 1: a forgotten bias or gain would show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = 0.2 * torch.randn(parameter.shape, generator=generator)  # 1 / sqrt(24)
            parameter.copy_(1 + noise if name.endswith("norm.weight") else noise)
    return module.eval()


def build(**changes) -> Transformer:
    """A small model of unequal sizes."""
    sizes = {"vocab_size": 61, "max_len": 32, "d_model": 24, "n_layers": 2, "n_heads": 6, "d_ff": 40}
    model = Transformer(ModelConfig(**(sizes | changes)))
    randomised(model)
    return model


KINDS = {
    "rotary, grouped": {"n_kv_heads": 2, "d_head": 6, "tied": False},
    "interleaved, qk norm, sandwich": {
        "rotary_layout": "interleaved", "qk_norm": "head", "norm_placement": "sandwich",
    },
    "learned, layer norm, post": {
        "positions": "learned", "norm": "layer", "norm_placement": "post", "final_norm": False,
        "activation": "gelu", "gated": False,
        "qkv_bias": True, "out_bias": True, "ff_bias": True, "head_bias": True,
    },
    "sinusoidal, fused, branch": {"positions": "sinusoidal", "fused_qkv": True, "norm_placement": "branch"},
    "sinusoidal_concat, window": {"positions": "sinusoidal_concat", "window": 3, "n_kv_heads": 1},
    "rotary, window": {"window": 4, "attn_scale": 0.5, "norm_bias": False, "norm": "layer"},
    "no positions": {"positions": "none", "activation": "relu_squared", "gated": False},
}  # fmt: skip


@functools.cache
def ready(kind: str) -> Transformer:
    """A model for tests that leave it as it is."""
    return build(**KINDS[kind])


every_kind = pytest.mark.parametrize("kind", KINDS)


def some_tokens(*shape: int) -> Tensor:
    return torch.randint(61, shape)


# Blocks against their formulas


def norm_by_hand(x: Tensor, norm: nn.Module) -> Tensor:
    assert isinstance(norm, RMSNorm)
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def test_transformer_block() -> None:
    """Pre-norm with rotary positions, against the course's block."""
    names = {
        "attn.q": "attn.q_proj", "attn.k": "attn.k_proj", "attn.v": "attn.v_proj",
        "attn.o": "attn.output_proj", "attn_norm": "ln1", "ff_norm": "ln2",
        "ff.gate": "ffn.w1", "ff.up": "ffn.w3", "ff.down": "ffn.w2",
    }  # fmt: skip
    block = randomised(Block(24, 4, 40))
    state = block.state_dict()
    weights = {f"{course}.weight": state[f"{ours}.weight"] for ours, course in names.items()}
    x, places = torch.randn(2, 9, 24), torch.arange(9)
    rotation = Rotary(6, theta=50.0, layout="interleaved").angles(places)
    out = block(x, rotation=rotation, mask=causal_mask(places, places))
    torch.testing.assert_close(out, course_model.block(x, weights, 4, theta=50.0), **TOLERANCE)


@pytest.mark.parametrize("placement", ["pre", "post", "branch", "sandwich"])
def test_norms_stand_where_the_placement_says(placement) -> None:
    """x + f(n(x)); n(x + f(x)); x + n(f(x)); x + n2(f(n1(x)))."""
    block = randomised(Block(24, 4, 40, norm_placement=placement))
    x = torch.randn(2, 5, 24)
    f, g = block.attn, block.ff
    match placement:
        case "pre":
            x1 = x + f(norm_by_hand(x, block.attn_norm))
            expected = x1 + g(norm_by_hand(x1, block.ff_norm))
        case "post":
            x1 = norm_by_hand(x + f(x), block.attn_post_norm)
            expected = norm_by_hand(x1 + g(x1), block.ff_post_norm)
        case "branch":
            x1 = x + norm_by_hand(f(x), block.attn_out_norm)
            expected = x1 + norm_by_hand(g(x1), block.ff_out_norm)
        case _:
            x1 = x + norm_by_hand(f(norm_by_hand(x, block.attn_norm)), block.attn_out_norm)
            expected = x1 + norm_by_hand(g(norm_by_hand(x1, block.ff_norm)), block.ff_out_norm)
    torch.testing.assert_close(block(x), expected, **TOLERANCE)
    n_norms = sum(isinstance(module, RMSNorm) for module in block.modules())
    assert n_norms == (4 if placement == "sandwich" else 2)


def test_a_block_stands_alone() -> None:
    """Buildable from plain numbers; unknown names and sizes that do not fit are refused."""
    assert Block(12, 3)(torch.randn(2, 4, 12)).shape == (2, 4, 12)
    assert isinstance(Block(12, 3, norm="layer", norm_bias=False).ff_norm, LayerNorm)


@pytest.mark.usefixtures("unchecked")
def test_a_block_names_what_it_does_not_know() -> None:
    for choices, message in (
        ({"norm_placement": "middle"}, "norm_placement='middle' is unknown; choose one of pre, post"),
        ({"norm": "batch"}, "norm='batch' is unknown"),
        ({"activation": "swish"}, "'swish' is unknown"),
        ({"n_heads": 5}, "d_model=12 is not divisible by n_heads=5"),
    ):
        with pytest.raises(ValueError, match=message):
            Block(12, choices.pop("n_heads", 3), **choices)


# The model


def course_twin() -> tuple[Transformer, course_model.CourseModel]:
    from clearhead.published.course import load_course_weights

    weights = course_model.random_course_weights(61, 24, 3, 40, torch.Generator().manual_seed(3))
    ours = load_course_weights(weights, n_heads=4, max_len=32, rotary_theta=500.0)
    return ours, course_model.CourseModel(weights, n_heads=4, theta=500.0)


def test_transformer_lm() -> None:
    """Logits (no softmax) of the course's model."""
    ours, theirs = course_twin()
    tokens = some_tokens(3, 32)
    torch.testing.assert_close(ours(tokens), theirs(tokens), **TOLERANCE)


def test_transformer_lm_truncated_input() -> None:
    """A shorter sequence than max_len gives the same logits as the beginning of the longer one."""
    ours, theirs = course_twin()
    tokens = some_tokens(3, 32)
    torch.testing.assert_close(ours(tokens[:, :16]), theirs(tokens[:, :16]), **TOLERANCE)
    torch.testing.assert_close(ours(tokens[:, :16]), ours(tokens)[:, :16], **TOLERANCE)


@every_kind
def test_logits_are_finite_and_the_third_call_equals_the_first(kind: str) -> None:
    """No state is left behind, by plain calls or by cached and padded ones between them."""
    model, tokens = build(**KINDS[kind]), some_tokens(3, 11)
    first = model(tokens)
    assert first.shape == (3, 11, 61) and first.dtype == torch.float32 and first.isfinite().all()
    with torch.no_grad():
        model(tokens, cache=model.new_cache(3, 20), mask=torch.rand(3, 11) > 0.5)
    assert torch.equal(model(tokens), first)
    assert set(model.state_dict()) == set(build(**KINDS[kind]).state_dict())


@every_kind
@settings(deadline=None, max_examples=5)
@given(data=st.data())
def test_changing_a_token_never_changes_logits_before_it(kind: str, data: st.DataObject) -> None:
    model = ready(kind)
    length = data.draw(st.integers(2, 12))
    j = data.draw(st.integers(1, length - 1))
    tokens = some_tokens(2, length)
    changed = tokens.clone()
    changed[:, j] = (changed[:, j] + data.draw(st.integers(1, 60))) % 61
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :j], after[:, :j], **TOLERANCE)
    assert (before[:, j] - after[:, j]).abs().max() > 1e-3


@every_kind
@settings(deadline=None, max_examples=5)
@given(data=st.data())
def test_padding_changes_no_logit_of_a_real_token(kind: str, data: st.DataObject) -> None:
    """Left, right, or anywhere between: each row gives what it gives alone; padding stays finite."""
    model = ready(kind)
    mask = torch.tensor(
        data.draw(st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=1, max_size=3))
    )
    tokens = some_tokens(len(mask), 9)
    logits = model(tokens, mask=mask)
    assert logits.isfinite().all()
    for row, real, found in zip(tokens, mask, logits, strict=True):
        if real.any():
            torch.testing.assert_close(found[real], model(row[real][None])[0], **TOLERANCE)


@every_kind
@settings(deadline=None, max_examples=5)
@given(cuts=st.lists(st.integers(1, 11), max_size=4, unique=True))
def test_packed_documents_do_not_see_each_other(kind: str, cuts: list[int]) -> None:
    """Each document of a packed window gives what it gives alone."""
    model, tokens = ready(kind), some_tokens(1, 12)
    edges = [0, *sorted(cuts), 12]
    documents = torch.zeros(1, 12, dtype=torch.long)
    for number, (start, end) in enumerate(itertools.pairwise(edges)):
        documents[:, start:end] = number * (-1) ** number  # any numbers, in any order
    logits = model(tokens, documents=documents)
    for start, end in itertools.pairwise(edges):
        torch.testing.assert_close(logits[:, start:end], model(tokens[:, start:end]), **TOLERANCE)


def test_packed_documents_with_padding() -> None:
    """Padding inside and around documents takes no position."""
    model = build(**KINDS["learned, layer norm, post"])
    tokens = some_tokens(1, 10)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1, 1]])
    mask = torch.tensor([[0, 1, 0, 1, 0, 1, 1, 0, 1, 0]]).bool()
    logits = model(tokens, mask=mask, documents=documents)
    for number in (0, 1):
        real = mask[0] & (documents[0] == number)
        torch.testing.assert_close(logits[:, real], model(tokens[:, real]), **TOLERANCE)


@pytest.mark.parametrize("positions", ["rotary", "learned", "sinusoidal", "sinusoidal_concat"])
def test_explicit_positions_replace_the_counted_ones(positions: str) -> None:
    model, tokens = build(positions=positions), some_tokens(2, 5)
    counted = model(tokens)
    torch.testing.assert_close(model(tokens, positions=torch.arange(5)), counted, **TOLERANCE)
    torch.testing.assert_close(model(tokens, positions=torch.arange(5).expand(2, 5)), counted, **TOLERANCE)
    shifted = model(tokens, positions=torch.arange(5) + 9)
    moved = (shifted - counted).abs().max().item()
    assert moved < 1e-4 if positions == "rotary" else moved > 1e-2  # rotary knows distances only


def test_without_positions_the_past_is_a_set() -> None:
    """Permuting all tokens but the last leaves the last logits of a one-layer model alone."""
    model, tokens = build(positions="none", n_layers=1), some_tokens(2, 7)
    order = torch.tensor([3, 5, 0, 4, 2, 1, 6])
    torch.testing.assert_close(model(tokens[:, order])[:, -1], model(tokens)[:, -1], **TOLERANCE)


def test_a_window_reaches_one_window_per_layer() -> None:
    """Two layers of window 3: the last logits depend on the last 5 tokens and on no earlier one."""
    model = build(window=3)
    tokens = some_tokens(1, 12)
    for j in range(12):
        changed = tokens.clone()
        changed[:, j] = (changed[:, j] + 1) % 61
        moved = (model(changed) - model(tokens))[:, -1].abs().max()
        assert (moved > 1e-4) == (j >= 12 - 5), j


def test_tied_weights_are_one_tensor() -> None:
    model = build(tied=True)
    assert model.head.weight is model.embed.weight
    assert len({id(p) for p in model.parameters()}) == len(list(model.parameters()))
    untied = build(tied=False)
    assert untied.head.weight is not untied.embed.weight
    assert set(untied.state_dict()) == set(model.state_dict())


@pytest.mark.parametrize("tied", [False, True])
def test_copies_and_pickles_give_the_same_logits(tied: bool) -> None:
    for kind in KINDS.values():
        model, tokens = build(**(kind | {"tied": tied})), some_tokens(2, 6)
        expected = model(tokens)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(tokens), expected)
            assert (twin.head.weight is twin.embed.weight) == tied
            with torch.no_grad():
                twin.decoder.blocks[0].attn.q.weight.zero_()  # a copy, not a view
            assert torch.equal(model(tokens), expected)


def test_a_model_is_freed_at_once() -> None:
    gc.disable()
    try:
        model = build(fused_qkv=True)
        weights = [weakref.ref(weight) for weight in model.parameters()]
        del model
        assert all(weight() is None for weight in weights)
    finally:
        gc.enable()


@every_kind
def test_a_model_runs_in_float64_and_bfloat16(kind: str) -> None:
    """Everything inside keeps the type of the weights; float64 agrees with float32."""
    model, tokens = build(**KINDS[kind]), some_tokens(2, 9)
    expected = model(tokens)
    wide = copy.deepcopy(model).double()
    assert wide(tokens).dtype == torch.float64
    torch.testing.assert_close(wide(tokens).float(), expected, atol=1e-4, rtol=1e-4)
    narrow = copy.deepcopy(model).bfloat16()
    logits = narrow(tokens)
    assert logits.dtype == torch.bfloat16 and logits.isfinite().all()
    assert torch.nn.functional.cosine_similarity(logits.float(), expected, dim=-1).min() > 0.98


@every_kind
def test_a_model_on_the_meta_device_takes_no_memory(kind: str) -> None:
    with torch.device("meta"):
        model = Transformer(build(**KINDS[kind]).config)
        assert model(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 61)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_autocast_runs_with_and_without_a_cache() -> None:
    model, tokens = build(), some_tokens(2, 9)
    expected = model(tokens)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        for logits in (model(tokens), model(tokens, cache=model.new_cache(2, 12))):
            assert torch.nn.functional.cosine_similarity(logits.float(), expected, dim=-1).min() > 0.98


def test_dropout_everywhere_only_in_training() -> None:
    tokens = some_tokens(2, 9)
    for place in ("embed_dropout", "attn_dropout", "residual_dropout", "ff_dropout"):
        model = build(**{place: 0.5})
        plain = build()
        assert torch.equal(model(tokens), plain(tokens)), place
        model.train()
        assert not torch.equal(model(tokens), model(tokens)), place


@every_kind
def test_every_weight_gets_a_gradient(kind: str) -> None:
    """Also with padding, where nothing is seen by some rows: no NaN anywhere."""
    model = build(**KINDS[kind]).train()
    mask = torch.tensor([[False, False, True, True, True, True], [True, True, True, False, False, False]])
    model(some_tokens(2, 6), mask=mask).square().mean().backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
        assert weight.grad.abs().max() > 0 or name.endswith("attn.k.bias"), name  # it shifts all scores alike


def test_a_stack_that_is_not_causal_sees_both_sides() -> None:
    """The encoder's use of the same Stack: with padding, without it, and with documents."""
    config = build().config
    stack = randomised(Stack(config, causal=False))
    places, x = torch.arange(6), torch.randn(2, 6, 24)
    assert mask_of_pass(False, places, places) is None
    mask = torch.tensor([[True] * 4 + [False] * 2, [True] * 6])
    out = stack(x, mask=mask)
    torch.testing.assert_close(out[:1, :4], stack(x[:1, :4]), **TOLERANCE)
    assert (stack(x)[:, 0] - stack(torch.cat([x[:, :5], x[:, :1]], 1))[:, 0]).abs().max() > 1e-3
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]]).expand(2, 6)
    packed = stack(x, documents=documents)
    torch.testing.assert_close(packed[:, 3:], stack(x[:, 3:]), **TOLERANCE)
    narrow = randomised(Stack(config.replace(window=2, n_layers=1), causal=False))
    moved = (narrow(x) - narrow(torch.cat([x[:, 1:2], x[:, 1:]], 1))).abs().amax((0, 2))
    assert (moved[:3] > 1e-4).all() and (moved[3:] < 1e-6).all()
    near = mask_of_pass(False, places, places, window=2)
    assert isinstance(near, Tensor) and near[3].tolist() == [False, True, True, True, True, True]


# Mistakes


def test_length_exactly_at_the_learned_limit_works_and_one_more_does_not() -> None:
    model = build(positions="learned")
    assert model(some_tokens(1, 32)).shape == (1, 32, 61)
    with pytest.raises(ValueError, match=r"33 tokens exceeds the 32 learned positions \(max_len\)"):
        model(some_tokens(1, 33))
    with pytest.raises(ValueError, match="33 positions exceeds max_len=32"):
        model.new_cache(1, 33)
    assert build(positions="rotary")(some_tokens(1, 40)).shape == (1, 40, 61)  # no table, no limit


def test_a_position_outside_the_learned_table_is_named() -> None:
    with pytest.raises(ValueError, match="from 32 to 33 do not fit a table of 32 rows"):
        build(positions="learned")(some_tokens(1, 2), positions=torch.tensor([32, 33]))


def test_a_token_outside_the_vocabulary_is_named() -> None:
    with pytest.raises(ValueError, match="ids from 3 to 61 do not fit a table of 61 rows"):
        build()(torch.tensor([[3, 61]]))
    with pytest.raises(ValueError, match="ids from -1 to 3"):
        build()(torch.tensor([[3, -1]]))


@pytest.mark.usefixtures("unchecked")
def test_inputs_that_do_not_fit_are_named() -> None:
    model, tokens = build(), some_tokens(2, 9)
    real = torch.ones(2, 9, dtype=torch.bool)
    cache = model.new_cache(2, 20)
    for arguments, message in (
        ({"tokens": tokens[0]}, r"tokens \(9,\) must be \(batch, length\)"),
        ({"mask": real.long()}, "the mask is torch.int64, not boolean"),
        ({"mask": real[:, :7]}, r"mask \(2, 7\) and tokens \(2, 9\) differ"),
        ({"documents": torch.zeros(9, dtype=torch.long)}, r"documents \(9,\) and tokens \(2, 9\) differ"),
        ({"positions": torch.arange(8)}, r"positions \(8,\) are not one per token \(2, 9\)"),
        ({"cache": cache, "documents": torch.zeros(2, 9, dtype=torch.long)}, "do not go together"),
        ({"cache": cache, "tokens": tokens[:1]}, "holds 2 sequences and 1 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            model(**({"tokens": tokens} | arguments))
    assert cache.length == 0


# Compiled


class Graphs:
    """A backend that runs what it is given and keeps the graphs."""

    def __init__(self) -> None:
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list) -> torch.fx.GraphModule:
        self.graphs.append(graph)
        return graph

    def operations(self) -> list[list[str]]:
        return [[str(node.target) for node in g.graph.nodes if node.op != "placeholder"] for g in self.graphs]


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


some_kinds = pytest.mark.parametrize(
    "kind", ["rotary, grouped", "learned, layer norm, post", "sinusoidal_concat, window"]
)


@pytest.mark.compiled
@some_kinds
def test_one_graph_for_every_prompt_length(kind: str, graphs: Graphs) -> None:
    """1 graph, no break (fullgraph), no recompilation over lengths 2..40, the same logits."""
    model = build(**(KINDS[kind] | {"max_len": 40}))
    fast = torch.compile(model, backend=graphs, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in range(2, 41):
            tokens = some_tokens(3, length)
            torch.testing.assert_close(fast(tokens), model(tokens), **TOLERANCE)
    assert len(graphs.graphs) == 1


@pytest.mark.compiled
def test_only_the_length_needs_to_be_dynamic(graphs: Graphs) -> None:
    """The same with `mark_dynamic`, for fused projections, with a padding mask, in training mode."""
    model = build(**KINDS["sinusoidal, fused, branch"]).train()
    fast = torch.compile(model, backend=graphs, fullgraph=True)
    for length in (2, 3, 8, 9, 31):
        tokens, mask = some_tokens(3, length), torch.rand(3, length) > 0.2
        for given_tensor in (tokens, mask):
            torch._dynamo.mark_dynamic(given_tensor, 1)
        torch.testing.assert_close(fast(tokens, mask=mask), model(tokens, mask=mask), **TOLERANCE)
    assert len(graphs.graphs) == 1


@pytest.mark.compiled
@some_kinds
def test_one_graph_for_every_decoding_step(kind: str, graphs: Graphs) -> None:
    """The cache has static shapes: 20 steps, 1 graph, the logits of eager steps."""
    model, tokens = build(**KINDS[kind]), some_tokens(3, 30)
    mask = torch.rand(3, 30) > 0.3
    fast = torch.compile(model, backend=graphs, fullgraph=True)
    with torch.no_grad():
        eager_cache, fast_cache = model.new_cache(3), model.new_cache(3)
        for cache in (eager_cache, fast_cache):
            model(tokens[:, :5], mask=mask[:, :5], cache=cache)
        for t in range(5, 25):
            step = {"tokens": tokens[:, t : t + 1], "mask": mask[:, t : t + 1]}
            expected = model(**step, cache=eager_cache)
            torch.testing.assert_close(fast(**step, cache=fast_cache), expected, **TOLERANCE)
    assert len(graphs.graphs) == 1


@pytest.mark.compiled
def test_taps_leave_no_operation(graphs: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph with taps is the graph of a model whose taps are cut out."""
    from clearhead.model import attention, block, layers

    model, tokens = build(), some_tokens(2, 9)
    torch.compile(model, backend=graphs, fullgraph=True)(tokens)
    torch._dynamo.reset()
    for module in (attention, block, layers):
        monkeypatch.setattr(module, "tap", lambda name, value: value)
    torch.compile(model, backend=graphs, fullgraph=True)(tokens)
    with_taps, without = graphs.operations()
    assert with_taps == without


@pytest.mark.compiled
def test_a_window_that_hides_nothing_is_seen_at_a_fixed_length_only(graphs: Graphs) -> None:
    """A length that may vary is asked nothing; one that is fixed decides, and the kernel knows its mask."""
    model = build(window=6, n_layers=1)

    def causal_by_name(length: int, dynamic: bool) -> bool:
        torch._dynamo.reset()
        graphs.graphs.clear()
        tokens = some_tokens(3, length)
        fast = torch.compile(model, backend=graphs, fullgraph=True, dynamic=dynamic)
        torch.testing.assert_close(fast(tokens), model(tokens), **TOLERANCE)
        fused = torch.nn.functional.scaled_dot_product_attention
        (call,) = (node for graph in graphs.graphs for node in graph.graph.nodes if node.target is fused)
        return call.args[3] is None and call.args[5] is True

    assert [causal_by_name(length, False) for length in (5, 6, 7)] == [True, True, False]
    assert not causal_by_name(5, True)


inductor = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"  # torch's own, at its import
)


@pytest.mark.compiled
@pytest.mark.slow
@inductor
def test_compiled_by_inductor_equals_eager() -> None:
    """The real compiler: the same logits to 1e-5."""
    torch._dynamo.reset()
    model = build(n_layers=1, n_kv_heads=2)
    fast = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for length in (9, 4):
            tokens = some_tokens(2, length)
            torch.testing.assert_close(fast(tokens), model(tokens), **TOLERANCE)


@pytest.mark.compiled
@pytest.mark.long
@inductor
def test_gradients_compiled_by_inductor_equal_eager_ones() -> None:
    torch._dynamo.reset()
    model = build(n_layers=1, n_kv_heads=2)
    fast = torch.compile(model, fullgraph=True, dynamic=True)
    tokens, weight = some_tokens(2, 9), torch.randn(2, 9, 61)
    parameters = list(model.parameters())
    compiled = torch.autograd.grad((fast(tokens) * weight).mean(), parameters)
    eager = torch.autograd.grad((model(tokens) * weight).mean(), parameters)
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)
