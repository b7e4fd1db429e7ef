"""record(model): every value once, under its name, and nothing left behind."""

import math

import pytest
import torch
from torch import Tensor, nn

from clearhead.inspector.record import record
from clearhead.model.attention import attend, masked_softmax, merge_heads, share_heads, split_heads
from clearhead.model.config import ModelConfig
from clearhead.model.position import Rotary, rotate, sinusoidal
from clearhead.model.tap import listening, tap
from clearhead.model.transformer import Transformer

TOLERANCE = {"atol": 1e-5, "rtol": 0}

ROTARY = ModelConfig(vocab_size=61, d_model=24, n_layers=2, n_heads=6, n_kv_heads=2, d_ff=40, tied=False)
LEARNED = ModelConfig(
    vocab_size=61, max_len=20, d_model=24, n_layers=1, n_heads=6, d_ff=40, positions="learned", norm="layer",
    norm_placement="post", final_norm=False, gated=False, activation="gelu_tanh", fused_qkv=True,
    qkv_bias=True, out_bias=True, ff_bias=True, embed_dropout=0.1,
)  # fmt: skip
SANDWICH = ModelConfig(
    vocab_size=61, d_model=24, n_layers=1, n_heads=6, d_ff=40, positions="sinusoidal", qk_norm="head",
    norm_placement="sandwich", n_kv_heads=1, window=4,
)  # fmt: skip

ROTARY_BLOCK = """attn_norm attn.q attn.k attn.v attn.queries attn.keys attn.values attn.scores attn.weights
    attn.mixed attn.o attn middle ff_norm ff.gate ff.up ff.hidden ff.down ff"""
LEARNED_BLOCK = """attn.q attn.k attn.v attn.queries attn.keys attn.values attn.scores attn.weights attn.mixed
    attn.o attn attn_post_norm middle ff.up ff.hidden ff.down ff ff_post_norm"""
SANDWICH_BLOCK = """attn_norm attn.q attn.k attn.v attn.q_norm attn.k_norm attn.queries attn.keys attn.values
    attn.scores attn.weights attn.mixed attn.o attn attn_out_norm middle
    ff_norm ff.gate ff.up ff.hidden ff.down ff ff_out_norm"""


def names_of_block(index: int, names: str) -> list[str]:
    """One block's values in the order they are made, the block's own output last."""
    return [f"decoder.blocks.{index}.{name}" for name in names.split()] + [f"decoder.blocks.{index}"]


CASES = {
    "rotary": (
        ROTARY,
        [
            "embed",
            *names_of_block(0, ROTARY_BLOCK),
            *names_of_block(1, ROTARY_BLOCK),
            "decoder.norm",
            "decoder",
            "head",
            "logits",
        ],
    ),
    "learned": (
        LEARNED,
        ["embed", "decoder.positions", *names_of_block(0, LEARNED_BLOCK), "decoder", "head", "logits"],
    ),
    "sandwich": (
        SANDWICH,
        ["embed", *names_of_block(0, SANDWICH_BLOCK), "decoder.norm", "decoder", "head", "logits"],
    ),
}
every_case = pytest.mark.parametrize("case", CASES)


def build(config: ModelConfig) -> Transformer:
    model = Transformer(config, seed=1).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model


def take(model: nn.Module, *args, **filters) -> dict[str, Tensor]:
    with torch.no_grad(), record(model, **filters) as values:
        model(*args)
    return values


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@every_case
def test_the_names_of_a_pass_are_the_list_written_by_hand(case: str) -> None:
    """In the order the values are made; each name once."""
    config, names = CASES[case]
    values = take(build(config), torch.randint(61, (2, 7)))
    assert list(values) == names
    assert len(set(names)) == len(names)


@every_case
def test_no_name_is_recorded_twice_in_a_pass(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dict would hide a second value under the same name, so the writes are counted."""
    config, names = CASES[case]
    written: list[str] = []

    def wanted(name: str, *filters: object) -> bool:
        written.append(name)
        return True

    monkeypatch.setattr("clearhead.inspector.record.wanted", wanted)
    take(build(config), torch.randint(61, (2, 7)))
    assert written == names


@every_case
def test_recorded_shapes(case: str) -> None:
    """Attention by head, everything else by position."""
    config, _ = CASES[case]
    values = take(build(config), torch.randint(61, (2, 7)))
    attn, groups = "decoder.blocks.0.attn", config.kv_heads
    assert values[f"{attn}.queries"].shape == values[f"{attn}.mixed"].shape == (2, 6, 7, 4)
    assert values[f"{attn}.keys"].shape == values[f"{attn}.values"].shape == (2, groups, 7, 4)
    assert values[f"{attn}.scores"].shape == values[f"{attn}.weights"].shape == (2, 6, 7, 7)
    assert values["decoder.blocks.0.ff.hidden"].shape == (2, 7, 40)
    assert values["logits"].shape == (2, 7, 61)
    assert all(not value.requires_grad for value in values.values())


@every_case
def test_every_value_follows_from_the_recorded_ones_before_it(case: str) -> None:
    """The whole pass by hand, link by link, from the embedding to the logits."""
    config, _ = CASES[case]
    model, tokens = build(config), torch.randint(61, (2, 7))
    values = take(model, tokens)
    state, places = model.state_dict(), torch.arange(7)

    def equal(name: str, expected: Tensor) -> None:
        torch.testing.assert_close(values[name], expected, **TOLERANCE)

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ state[f"{name}.weight"].T + state.get(f"{name}.bias", torch.zeros(()))

    def norm(name: str, x: Tensor) -> Tensor:
        """What the norm of this name makes of x; x itself where the placement has none."""
        if f"{name}.weight" not in state:
            return x
        gain = state[f"{name}.weight"]
        if config.norm == "rms" or name.endswith(("q_norm", "k_norm")):
            expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain
        else:
            centred = x - x.mean(-1, keepdim=True)
            expected = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain
            expected = expected + state[f"{name}.bias"]
        equal(name, expected)
        return expected

    equal("embed", state["embed.weight"][tokens])
    x = values["embed"]
    if config.positions == "learned":
        x = x + values["decoder.positions"]
    if config.positions == "sinusoidal":
        x = x + sinusoidal(places, 24)
    for i in range(config.n_layers):
        block = f"decoder.blocks.{i}"
        attn, ff = f"{block}.attn", f"{block}.ff"
        read = norm(f"{block}.attn_norm", x)
        for part in "qkv":
            equal(f"{attn}.{part}", linear(f"{attn}.{part}", read))
        queries, keys, heads = (split_heads(values[f"{attn}.{part}"], 4) for part in "qkv")
        queries, keys = norm(f"{attn}.q_norm", queries), norm(f"{attn}.k_norm", keys)
        if config.positions == "rotary":
            angles = Rotary(4).angles(places)
            queries, keys = rotate(queries, angles), rotate(keys, angles)
        equal(f"{attn}.queries", queries)
        equal(f"{attn}.keys", keys)
        equal(f"{attn}.values", heads)
        equal(f"{attn}.scores", queries @ share_heads(keys, queries).mT / math.sqrt(4))
        distance = places[:, None] - places[None]
        mask = (distance >= 0) & (distance < (config.window or 99))
        equal(f"{attn}.weights", masked_softmax(values[f"{attn}.scores"], mask))
        assert (values[f"{attn}.weights"][..., ~mask] == 0).all()
        equal(f"{attn}.mixed", values[f"{attn}.weights"] @ share_heads(heads, queries))
        equal(f"{attn}.o", linear(f"{attn}.o", merge_heads(values[f"{attn}.mixed"])))
        equal(attn, values[f"{attn}.o"])
        middle = norm(f"{block}.attn_post_norm", x + norm(f"{block}.attn_out_norm", values[attn]))
        equal(f"{block}.middle", middle)
        read = norm(f"{block}.ff_norm", middle)
        equal(f"{ff}.up", linear(f"{ff}.up", read))
        if config.gated:
            equal(f"{ff}.gate", linear(f"{ff}.gate", read))
            hidden = nn.functional.silu(values[f"{ff}.gate"]) * values[f"{ff}.up"]
        else:
            hidden = nn.functional.gelu(values[f"{ff}.up"], approximate="tanh")
        equal(f"{ff}.hidden", hidden)
        equal(f"{ff}.down", linear(f"{ff}.down", values[f"{ff}.hidden"]))
        equal(ff, values[f"{ff}.down"])
        x = norm(f"{block}.ff_post_norm", middle + norm(f"{block}.ff_out_norm", values[ff]))
        equal(block, x)
    equal("decoder", norm("decoder.norm", x))
    equal("head", linear("head", values["decoder"]))
    with torch.no_grad():
        equal("logits", model(tokens))


@every_case
def test_recording_changes_the_logits_by_rounding_only(case: str) -> None:
    """<= 1e-4 against the fused path, with padding and with a cache too."""
    config, _ = CASES[case]
    model, tokens = build(config), torch.randint(61, (2, 7))
    mask = torch.tensor([[False] * 3 + [True] * 4, [True] * 7])
    with torch.no_grad():
        for options in ({}, {"mask": mask}):
            expected = model(tokens, **options)
            with record(model) as values:
                logits = model(tokens, **options)
            assert torch.equal(values["logits"], logits)
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        cache = model.new_cache(2, 9)
        with record(model) as values:
            logits = torch.cat([model(tokens[:, :4], cache=cache), model(tokens[:, 4:], cache=cache)], 1)
        torch.testing.assert_close(logits, model(tokens), atol=1e-4, rtol=0)
        assert values["decoder.blocks.0.attn.weights"].shape == (2, 6, 3, 9)  # 3 new tokens, 9 places
        assert values["decoder.blocks.0.attn.keys"].shape[-2] == 3


def test_padding_and_unseen_keys_weigh_exactly_nothing() -> None:
    model = build(ROTARY)
    mask = torch.tensor([[False] * 3 + [True] * 4, [True] * 7])
    with torch.no_grad(), record(model, names=["*.weights"]) as values:
        model(torch.randint(61, (2, 7)), mask=mask)
    for weights in values.values():
        assert (weights[0, :, :, :3] == 0).all()
        assert (weights.triu(1) == 0).all()
        torch.testing.assert_close(weights[0, :, 3:].sum(-1), torch.ones(6, 4), **TOLERANCE)


def test_names_and_layers_filter() -> None:
    model, tokens = build(ROTARY), torch.randint(61, (2, 7))
    everything = take(model, tokens)
    weights = [f"decoder.blocks.{i}.attn.weights" for i in range(2)]
    assert list(take(model, tokens, names=["*.attn.weights"])) == weights
    assert list(take(model, tokens, names=["*.attn.weights"], layers=[1])) == weights[1:]
    assert list(take(model, tokens, names=["embed", "logits"])) == ["embed", "logits"]
    assert list(take(model, tokens, names=[])) == []
    one = take(model, tokens, layers=[1])
    assert list(one) == [name for name in everything if "blocks.0" not in name]
    assert all(torch.equal(one[name], everything[name]) for name in one)


def test_a_layer_that_does_not_exist_is_refused() -> None:
    message = "no layer 2; the model has 2, counted from 0"
    with pytest.raises(ValueError, match=message), record(build(ROTARY), layers=[2]):
        pass


def test_no_hook_is_left_behind() -> None:
    """Also after an exception in the block, and after one inside the model; recording works again."""
    model, tokens = build(ROTARY), torch.randint(61, (2, 7))
    before = hooks_of(model)
    names = list(take(model, tokens))
    assert (hooks_of(model), listening()) == (before, False)
    with pytest.raises(KeyError), record(model):
        raise KeyError("from the block")
    assert (hooks_of(model), listening()) == (before, False)
    with pytest.raises(ValueError, match="do not fit a table"), record(model):
        model(torch.tensor([[99]]))
    assert (hooks_of(model), listening()) == (before, False)
    assert list(take(model, tokens)) == names


def test_a_pass_that_fails_does_not_spoil_the_names_of_the_next() -> None:
    """The path is popped even where a forward raised."""
    model, tokens = build(ROTARY), torch.randint(61, (2, 7))
    names = list(take(model, tokens))
    with torch.no_grad(), record(model) as values:
        with pytest.raises(ValueError, match="do not fit a table"):
            model(torch.tensor([[99]]))
        values.clear()
        attend(torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4))  # stands outside the model again
        model(tokens)
    assert list(values) == names


def test_a_hook_of_the_user_stays() -> None:
    model = build(ROTARY)
    calls: list[int] = []
    model.head.register_forward_hook(lambda *_: calls.append(1))
    take(model, torch.randint(61, (1, 3)))
    model(torch.randint(61, (1, 3)))
    assert calls == [1, 1]


def test_nested_recording_is_refused() -> None:
    """The inner one says so; the outer one goes on."""
    model, tokens = build(ROTARY), torch.randint(61, (2, 7))
    with torch.no_grad(), record(model) as values:
        with pytest.raises(ValueError, match="a recording is already running"), record(model):
            pass
        model(tokens)
    assert "logits" in values


def test_another_model_and_a_bare_attend_stay_out() -> None:
    """Only what happens inside the recorded model is recorded."""
    model, other = build(ROTARY), build(SANDWICH)
    with torch.no_grad(), record(model) as values:
        other(torch.randint(61, (2, 7)))
        attend(torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 4))
        assert not values
        model(torch.randint(61, (2, 7)))
    assert list(values) == CASES["rotary"][1]


def test_a_part_of_a_model_can_be_recorded() -> None:
    """Names are then relative to the part."""
    values = take(build(ROTARY).decoder.blocks[0].attn, torch.randn(2, 5, 24))
    assert list(values)[:7] == ["q", "k", "v", "queries", "keys", "values", "scores"]


def test_gradients_flow_through_a_recorded_pass() -> None:
    """Values are detached; the model's own result is not."""
    model, tokens = build(ROTARY), torch.randint(61, (2, 7))
    with record(model) as values:
        loss = model(tokens).square().mean()
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(not value.requires_grad for value in values.values())


def test_a_tap_without_a_listener_returns_the_very_same_object() -> None:
    value = torch.randn(3)
    assert tap("anything", value) is value


def test_a_compiled_model_is_refused() -> None:
    """Wrapped whole, wrapped in a part, or compiled in place."""
    model, in_place = build(ROTARY), build(ROTARY)
    in_place.compile(backend="eager")
    with_part = nn.Sequential(nn.Identity(), torch.compile(build(SANDWICH), backend="eager"))
    message = "a compiled model has no inner values to record; record the model it was compiled from"
    for refused in (torch.compile(model, backend="eager"), with_part, in_place):
        with pytest.raises(ValueError, match=message), record(refused):
            pass
    assert "logits" in take(model, torch.randint(61, (1, 3)))  # the original is as good as before


@pytest.mark.compiled
def test_a_compiled_model_is_as_before_after_its_original_was_recorded() -> None:
    """Recording leaves no trace: no recompilation, the same logits."""
    torch._dynamo.reset()
    model, tokens = build(ROTARY), torch.randint(61, (2, 7))
    count = 0

    def backend(graph: torch.fx.GraphModule, inputs: list):
        nonlocal count
        count += 1
        return graph

    fast = torch.compile(model, backend=backend, fullgraph=True)
    with torch.no_grad():
        before = fast(tokens)
        take(model, tokens)
        assert torch.equal(fast(tokens), before)
    assert count == 1
