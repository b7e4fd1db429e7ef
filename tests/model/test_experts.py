"""The mixture of experts: equal to a loop over tokens with every router; and the losses that balance it."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from clearhead.inspector.record import record
from clearhead.model.config import ModelConfig
from clearhead.model.config_parts import ExpertsConfig
from clearhead.model.experts import Experts, Router, Routing, correct_balance, keep_best_groups
from clearhead.model.grouped import grouped_product, kernel_takes
from clearhead.model.transformer import Transformer
from reference.naive_experts import naive_choice, naive_experts

SMALL = ExpertsConfig(n_experts=6, top_k=2, d_ff=20)
KINDS = {
    "softmax": SMALL,
    "softmax, not renormalised, scaled": replace(SMALL, renormalise=False, weight_scale=1.7),
    "all experts": replace(SMALL, top_k=6),
    "one expert": replace(SMALL, top_k=1),
    "sigmoid, groups, correction, shared": ExpertsConfig(
        n_experts=12,
        top_k=3,
        d_ff=10,
        router="sigmoid",
        weight_scale=2.5,
        n_groups=4,
        top_groups=2,
        correction_bias=True,
        shared_d_ff=14,
    ),
    "gated shared expert": replace(SMALL, shared_d_ff=14, shared_gate=True),
    "biases, clamped": replace(SMALL, bias=True, router_bias=True, limit=0.5, limit_slope=1.3),
}


def make(config: ExpertsConfig, d_model: int = 12, dtype: torch.dtype = torch.float64) -> Experts:
    """Experts with a random number in every tensor."""
    experts = Experts(d_model, config)
    with torch.no_grad():
        for tensor in experts.state_dict(keep_vars=True).values():
            tensor.copy_(torch.randn(tensor.shape) * (0.3 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5))
    return experts.to(dtype)


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype)


# -------------------------------------------------------------------------------------------- the whole layer


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_equal_a_loop_over_tokens(kind: str) -> None:
    experts = make(KINDS[kind])
    x = tokens(2, 5, 12).requires_grad_()
    inputs = [x, *experts.parameters()]
    direction = tokens(2, 5, 12)
    one, other = experts(x), naive_experts(experts, x)
    torch.testing.assert_close(one, other, atol=1e-13, rtol=1e-13)
    one_slopes = torch.autograd.grad(one, inputs, direction, materialize_grads=True)
    other_slopes = torch.autograd.grad(other, inputs, direction, materialize_grads=True)
    for one_slope, other_slope in zip(one_slopes, other_slopes, strict=True):
        torch.testing.assert_close(one_slope, other_slope, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.1)])
def test_narrower_types_agree_with_float64(kind: str, dtype: torch.dtype, atol: float) -> None:
    experts, x = make(KINDS[kind], d_model=16).to(dtype), tokens(3, 7, 16).to(dtype)
    found = experts(x)
    assert found.dtype == dtype
    exact = make(KINDS[kind], d_model=16)
    exact.load_state_dict(experts.state_dict())
    wrong = (experts.router.choose(experts.router.score(experts.router(x)))[1] != exact_choice(exact, x)).any(
        -1
    )
    assert wrong.float().mean() < 0.1  # a near tie may fall the other way
    torch.testing.assert_close(found.double()[~wrong], exact(x.double())[~wrong], atol=atol, rtol=0)


def exact_choice(experts: Experts, x: Tensor) -> Tensor:
    return experts.router.choose(experts.router.score(experts.router(x.double())))[1]


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    """Alone, in any order, among copies of itself: the same result; nobody is dropped from a full expert."""
    experts = make(KINDS["sigmoid, groups, correction, shared"])
    x = tokens(1, 40, 12)
    together = experts(x)
    order = torch.randperm(40)
    torch.testing.assert_close(experts(x[:, order]), together[:, order], atol=1e-13, rtol=0)
    for place in (0, 17, 39):
        torch.testing.assert_close(
            experts(x[:, place : place + 1])[0, 0], together[0, place], atol=1e-13, rtol=0
        )
    crowd = experts(x[:, :1].expand(1, 300, 12))
    torch.testing.assert_close(crowd, together[:, :1].expand(1, 300, 12), atol=1e-13, rtol=0)


def test_experts_nobody_chose_have_a_gradient_of_zero() -> None:
    experts = make(SMALL)
    x = tokens(1, 1, 12)
    experts(x).sum().backward()
    chosen = {number for number, _ in naive_choice(experts, x[0, 0])}
    for number in range(6):
        assert (experts.down.grad[number].abs().max() > 0) == (number in chosen)


# --------------------------------------------------------------------------------------------------- choosing


def test_the_best_groups_are_those_whose_two_best_sum_highest() -> None:
    scores = torch.tensor([[0.9, 0.0, 0.0, 0.5, 0.5, 0.0]])  # two groups: 0.9 + 0.0 and 0.5 + 0.5
    kept = keep_best_groups(scores, n_groups=2, top_groups=1)
    assert kept.tolist() == [[-torch.inf, -torch.inf, -torch.inf, 0.5, 0.5, 0.0]]


def test_the_correction_counts_in_choosing_only() -> None:
    experts = make(KINDS["sigmoid, groups, correction, shared"])
    router = experts.router
    scores = torch.rand(5, 12, dtype=torch.float64)
    router.correction.zero_()[7] = 100.0
    weights, chosen = router.choose(scores)
    assert (chosen == 7).any(-1).all()
    raw = scores.gather(-1, chosen)
    torch.testing.assert_close(weights, 2.5 * raw / raw.sum(-1, keepdim=True))
    assert "correction" not in dict(router.named_parameters())


def test_a_router_computes_in_float32_under_autocast() -> None:
    router = Router(16, SMALL)
    x = torch.randn(3, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found = router(x)
    assert torch.equal(found, router(x)) and found.dtype == torch.float32


def test_jitter_acts_in_training_only() -> None:
    experts = make(replace(SMALL, jitter=0.2))
    still = make(SMALL)
    still.load_state_dict(experts.state_dict())
    x = tokens(2, 5, 12)
    assert torch.equal(experts.eval()(x), still(x))
    experts.train()
    torch.manual_seed(1)
    one = experts(x)
    torch.manual_seed(1)
    assert torch.equal(experts(x), one)
    torch.manual_seed(1)
    shaken = x * torch.empty_like(x).uniform_(0.8, 1.2)
    assert torch.equal(one, still(shaken)) and not torch.equal(one, still(x))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 7}, "top_k=7 must be between 1 and n_experts=6"),
        ({"n_groups": 4}, "n_experts=6 must be divisible by n_groups=4"),
        ({"n_groups": 6, "top_groups": 2}, "a group needs 2 experts"),
        ({"n_groups": 3, "top_groups": 1, "top_k": 3}, "the kept groups top_k=3"),
        ({"shared_gate": True}, "give shared_d_ff"),
    ],
)
def test_experts_that_cannot_be_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


# ------------------------------------------------------------------------------------------- grouped products


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    d_in=st.integers(1, 17),
    d_out=st.integers(1, 17),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    slope=st.sampled_from(["random", "constant", "turned"]),
)
@settings(max_examples=60, deadline=None)
def test_a_grouped_product_equals_one_product_per_group(
    counts: list[int], d_in: int, d_out: int, dtype: torch.dtype, slope: str
) -> None:
    """For any widths (the kernel takes only some), empty groups, and gradients of any layout in memory."""
    n_rows = sum(counts)
    rows = torch.randn(n_rows, d_in, dtype=dtype, requires_grad=True)
    weight = torch.randn(len(counts), d_out, d_in, dtype=dtype, requires_grad=True)
    ends = torch.tensor(counts).cumsum(0).int()
    slopes = {
        "random": torch.randn(n_rows, d_out, dtype=dtype),
        "constant": torch.ones((), dtype=dtype).expand(n_rows, d_out),
        "turned": torch.randn(d_out, n_rows, dtype=dtype).t(),
    }
    one = grouped_product(rows, weight, ends)
    other = torch.cat([part @ w.t() for part, w in zip(rows.split(counts), weight, strict=True)])
    tolerance = {"atol": 1e-4, "rtol": 1e-4} if dtype != torch.bfloat16 else {"atol": 0.1, "rtol": 0.05}
    torch.testing.assert_close(one, other, **tolerance)
    for found, wanted in zip(
        torch.autograd.grad(one, (rows, weight), slopes[slope]),
        torch.autograd.grad(other, (rows, weight), slopes[slope]),
        strict=True,
    ):
        assert found.is_contiguous()
        torch.testing.assert_close(found, wanted, **tolerance)


def test_the_kernel_is_used_where_it_can_be() -> None:
    aligned, odd = torch.randn(4, 8), torch.randn(4, 7)
    assert kernel_takes(aligned) and kernel_takes(aligned.bfloat16())
    assert not kernel_takes(odd) and not kernel_takes(aligned.double()) and not kernel_takes(aligned[:0])


def test_autocast_makes_a_grouped_product_narrower() -> None:
    rows, weight, ends = torch.randn(4, 8), torch.randn(2, 8, 8), torch.tensor([1, 4], dtype=torch.int32)
    with torch.autocast("cpu", torch.bfloat16):
        assert grouped_product(rows, weight, ends).dtype == torch.bfloat16
    assert grouped_product(rows, weight, ends).dtype == torch.float32


# ----------------------------------------------------------------------------------------------- whole models


def model_with(experts: ExpertsConfig, **fields: object) -> Transformer:
    config = {"vocab_size": 50, "d_model": 24, "n_layers": 3, "n_heads": 4, "experts": experts} | fields
    return Transformer(ModelConfig(**config), seed=1)


def test_a_router_without_preference_has_a_balance_loss_of_k() -> None:
    model = model_with(replace(SMALL, top_k=3))
    for module in model.modules():
        if isinstance(module, Router):
            nn.init.zeros_(module.weight)
    routing = Routing()
    model(torch.randint(0, 50, (2, 9)), routing=routing)
    assert routing.balance_loss().item() == pytest.approx(3.0, abs=1e-6)
    assert routing.z_loss().item() == pytest.approx(torch.tensor(6.0).log().square().item(), abs=1e-6)


def test_the_losses_follow_their_formulas_over_all_layers_and_real_tokens() -> None:
    model = model_with(replace(SMALL, balance_loss=0.3, z_loss=0.02), expert_layers=(True, False, True))
    ids, real = torch.randint(0, 50, (2, 7)), torch.ones(2, 7, dtype=torch.bool)
    real[0, 4:] = False
    routing = Routing()
    model(ids, mask=real, routing=routing)
    assert len(routing.layers) == 2
    logits = torch.cat([routed.logits[real] for routed in routing.layers])
    probabilities = logits.softmax(-1)
    picked = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(2).indices, 1.0)
    balance = 6 * (picked.mean(0) * probabilities.mean(0)).sum()
    torch.testing.assert_close(routing.balance_loss(real), balance)
    torch.testing.assert_close(routing.z_loss(real), logits.logsumexp(-1).square().mean())
    torch.testing.assert_close(
        routing.loss(model.config.experts, real), 0.3 * balance + 0.02 * routing.z_loss(real)
    )
    counts = [torch.bincount(routed.chosen[real].flatten(), minlength=6) for routed in routing.layers]
    assert torch.equal(routing.load(real), torch.stack(counts).float())
    assert routing.load(real).sum(1).tolist() == [2.0 * 11] * 2  # k = 2 of 11 real tokens


def test_the_balance_loss_teaches_the_routers() -> None:
    """An expert that everybody chooses is chosen less after some steps on that loss alone."""
    model = model_with(replace(SMALL, balance_loss=1.0, router_bias=True))
    routers = [module for module in model.modules() if isinstance(module, Router)]
    weights = [weight for router in routers for weight in router.parameters()]
    ids = torch.randint(0, 50, (2, 32))
    for router in routers:
        nn.init.constant_(router.bias[:1].detach(), 3.0)
    loads = []
    for _ in range(15):
        routing = Routing()
        model(ids, routing=routing)
        loads.append(routing.load().max().item())
        slopes = torch.autograd.grad(routing.loss(model.config.experts), weights)
        with torch.no_grad():
            for weight, slope in zip(weights, slopes, strict=True):
                weight -= 5 * slope
    assert loads[0] == ids.numel() and min(loads) < 0.8 * loads[0]
    assert routing.loss(SMALL).item() == 0  # without coefficients nothing is added


def test_corrections_even_out_the_load_without_a_loss() -> None:
    model = model_with(replace(KINDS["sigmoid, groups, correction, shared"], n_groups=1, top_groups=1))
    ids = torch.randint(0, 50, (4, 32))
    loads = []
    for _ in range(60):
        routing = Routing()
        with torch.no_grad():
            model(ids, routing=routing)
        loads.append(routing.load().max().item())
        correct_balance(model, routing.load(), rate=0.02)
    assert min(loads[-5:]) < 0.7 * loads[0]
    with pytest.raises(ValueError, match="the load of 2 layers was given for 3 routers"):
        correct_balance(model, routing.load()[:2])


def test_weights_of_scores_that_are_all_0_are_no_nan() -> None:
    router = Router(12, replace(SMALL, router="sigmoid"))
    weights, _ = router.choose(torch.zeros(3, 6))
    assert weights.tolist() == [[0.0, 0.0]] * 3


def test_the_shapes_of_the_field_take_experts() -> None:
    ids, mask = torch.randint(0, 50, (2, 7)), torch.ones(2, 7, dtype=torch.bool)
    mask[1, 5:] = False
    encoder = model_with(SMALL, shape="encoder", head="none")
    assert encoder(ids, mask=mask).shape == (2, 7, 24)
    both = model_with(SMALL, shape="encoder-decoder", n_encoder_layers=2)
    read, written = Routing(), Routing()
    memory = both.encode(ids, mask, routing=read)
    logits = both(ids[:, :4], memory=memory, routing=written)
    assert [len(read.layers), len(written.layers)] == [2, 3]
    seen = Routing()
    assert torch.equal(logits, both(ids[:, :4], source=ids, source_mask=mask, routing=seen))
    (encoded, real), (decoded, _) = seen.stacks(None, mask)
    assert torch.equal(encoded.load(real), read.load(mask)) and torch.equal(decoded.load(), written.load())
    correct_balance(both, torch.cat([encoded.load(real), decoded.load()]))
    with pytest.raises(ValueError, match="n_encoder_layers=2 must be n_layers=3"):
        both.config.replace(expert_layers=(True, False, True))


def test_a_routing_that_saw_nothing_says_so() -> None:
    dense = Transformer(ModelConfig(vocab_size=50, d_model=24, n_layers=2, n_heads=4))
    routing = Routing()
    dense(torch.zeros(1, 3, dtype=torch.long), routing=routing)
    with pytest.raises(ValueError, match="a model that has experts"):
        routing.balance_loss()


def test_a_recorder_sees_who_chose_whom() -> None:
    model = model_with(KINDS["sigmoid, groups, correction, shared"])
    with record(model, names=["*.ff.*"], layers=[1]) as values:
        model(torch.randint(0, 50, (2, 7)))
    shapes = {name.removeprefix("decoder.blocks.1.ff."): tuple(value.shape) for name, value in values.items()}
    assert shapes["router"] == shapes["scores"] == (2, 7, 12)
    assert shapes["weights"] == shapes["chosen"] == (2, 7, 3)
    assert shapes["shared"] == (2, 7, 24)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it itself
def test_a_compiled_model_routes_alike() -> None:
    """One graph with its losses and gradients; a second pass traces nothing again."""
    model = model_with(replace(SMALL, balance_loss=0.1, z_loss=0.1))
    compiled = torch.compile(model, fullgraph=True)
    results = []
    for call in (model, compiled):
        for ids in (torch.arange(14).view(2, 7), torch.arange(20, 34).view(2, 7)):
            model.zero_grad()
            routing = Routing()
            stance = "fail_on_recompile" if len(results) == 3 else "default"
            with torch.compiler.set_stance(stance):
                logits = call(ids, routing=routing)
            loss = logits.square().mean() + routing.loss(model.config.experts)
            with torch.compiler.set_stance(
                "fail_on_recompile" if call is compiled and results[3:] else "default"
            ):
                loss.backward()
            results.append([logits, loss, routing.load(), *(p.grad for p in model.parameters())])
    for one, other in zip(results[:2], results[2:], strict=True):
        for found, wanted in zip(one, other, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
