"""AdamW, groups, clipping: equal to torch and to the course's published numbers."""

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.training.optim import AdamW, clip_gradients, parameter_groups
from clearhead.training.schedules import cosine_schedule


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors of a few elements gain nothing from threads, and waiting threads cost seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------- AdamW


def course_weights(make: Any) -> Tensor:
    """The course's setting: 1000 steps of a Linear(3, 2) on random inputs."""
    torch.manual_seed(42)
    model = nn.Linear(3, 2, bias=False)
    optimizer = make(model.parameters(), lr=1e-3, weight_decay=0.01, betas=(0.9, 0.999), eps=1e-8)
    for _ in range(1000):
        optimizer.zero_grad()
        x = torch.rand(model.in_features)
        y_hat = model(x)
        y = torch.tensor([x[0] + x[1], -x[2]])
        ((y - y_hat) ** 2).sum().backward()
        optimizer.step()
    return model.weight.detach()


def test_adamw():
    """The course's test: both styles end where torch.optim.AdamW ends, the course's tolerance is 1e-4."""
    expected = course_weights(torch.optim.AdamW)
    torch.testing.assert_close(course_weights(AdamW), expected, rtol=1e-6, atol=1e-7)
    for style in ("torch", "cs336"):
        actual = course_weights(partial(AdamW, style=style, formula=True))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def algorithm_1(p: Tensor, grads: list[Tensor], lr: float, betas: tuple, eps: float, decay: float) -> Tensor:
    """The dull twin of style "cs336": Algorithm 1, line by line."""
    m = v = torch.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        a = lr * math.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t)
        p = p - a * m / (v.sqrt() + eps)
        p = p - lr * decay * p
    return p


def torch_formula(
    p: Tensor, grads: list[Tensor], lr: float, betas: tuple, eps: float, decay: float
) -> Tensor:
    """The dull twin of style "torch": the formula at the head of optim.py, line by line."""
    m = v = torch.zeros_like(p)
    for t, g in enumerate(grads, start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        m_hat, v_hat = m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)
        p = p - lr * decay * p - lr * m_hat / (v_hat.sqrt() + eps)
    return p


def run(optimizer: torch.optim.Optimizer, p: nn.Parameter, grads: list[Tensor]) -> Tensor:
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    return p.detach()


@pytest.mark.parametrize("formula", [False, True])
@pytest.mark.parametrize(("style", "twin"), [("torch", torch_formula), ("cs336", algorithm_1)])
def test_equals_the_written_out_formula(style, twin, formula):
    """In float64, each style equals its paper formula over 50 steps, whichever way it runs."""
    torch.manual_seed(0)
    start, grads = torch.randn(4, 3).double(), list(torch.randn(50, 4, 3).double())
    setting: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-4}
    p = nn.Parameter(start.clone())
    ours = run(AdamW([p], weight_decay=0.1, style=style, formula=formula, **setting), p, grads)
    torch.testing.assert_close(ours, twin(start, grads, decay=0.1, **setting), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("formula", [False, True])
def test_equals_torch_over_1000_steps(formula):
    """Weights and averages stay equal to torch.optim.AdamW to float32 rounding for 1000 steps of any size."""
    torch.manual_seed(1)
    ours, theirs = (
        [nn.Parameter(t.clone()) for t in torch.randn(3, 5, 7, generator=torch.Generator().manual_seed(0))]
        for _ in range(2)
    )
    setting: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    a, b = AdamW(ours, formula=formula, **setting), torch.optim.AdamW(theirs, **setting)
    for i in range(1000):
        for j, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            skipped = j == 2 and i % 3 == 0  # without a gradient a parameter's own step count stands still
            p.grad = q.grad = None if skipped else torch.randn(5, 7) * 10 ** (-(i % 5))
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-5)
        assert a.state[p]["step"] == b.state[q]["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(a.state[p][name], b.state[q][name], rtol=1e-5, atol=1e-7)


def test_fused_kernel_equals_formula():
    """The default path equals the written-out steps to rounding, on matrices, vectors and scalars."""
    torch.manual_seed(2)
    shapes = [(33, 65), (7,), (), (1, 1, 5)]
    start = [torch.randn(shape) for shape in shapes]
    fused, plain = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    a, b = AdamW(fused, lr=1e-2), AdamW(plain, lr=1e-2, formula=True)
    for _ in range(20):
        for p, q in zip(fused, plain, strict=True):
            p.grad = q.grad = torch.randn(p.shape)
        a.step()
        b.step()
    for p, q in zip(fused, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("transpose", ["gradient", "parameter", "both"])
def test_memory_order_does_not_matter(transpose):
    """A transposed gradient or weight moves as a plain one does (torch's kernel alone mixes them up)."""
    torch.manual_seed(3)
    start, grads = torch.randn(3, 4), list(torch.randn(5, 3, 4))
    plain = nn.Parameter(start.clone())
    expected = run(AdamW([plain], eps=1.0, formula=True), plain, grads)
    turned = nn.Parameter(start.t().contiguous().t() if transpose != "gradient" else start.clone())
    optimizer = AdamW([turned], eps=1.0)
    for g in grads:
        turned.grad = g if transpose == "parameter" else g.t().contiguous().t()
        optimizer.step()
    torch.testing.assert_close(turned.detach(), expected, rtol=1e-6, atol=1e-7)


def test_two_styles_differ_as_published():
    """With gradients of 1e-7 the first step is .909 lr in torch's style and .240 lr in the course's."""
    shares: dict[Any, float] = {"torch": 0.909, "cs336": 0.240}
    for style, share in shares.items():
        p = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        moved = run(AdamW([p], lr=1e-3, style=style), p, [torch.tensor([1e-7], dtype=torch.float64)])
        assert -moved.item() / 1e-3 == pytest.approx(share, abs=5e-4)


def test_groups_have_their_own_rate_and_decay():
    """`lr_scale` multiplies the rate of its group only, as does its own weight decay."""
    torch.manual_seed(4)
    start, grads = torch.randn(4), list(torch.randn(5, 4))
    p, q, r = (nn.Parameter(start.clone()) for _ in range(3))
    optimizer = AdamW([{"params": [p], "lr_scale": 0.5, "weight_decay": 0.3}, {"params": [q]}], lr=0.02)
    for g in grads:
        p.grad = q.grad = g
        optimizer.step()
    torch.testing.assert_close(p.detach(), run(AdamW([r], lr=0.01, weight_decay=0.3), r, grads))
    with torch.no_grad():
        r.copy_(start)
    torch.testing.assert_close(q.detach(), run(AdamW([r], lr=0.02), r, grads))


def test_rate_of_zero_moves_nothing():
    """The warm-up's first step (rate 0) changes no weight, yet the averages start."""
    p = nn.Parameter(torch.ones(3))
    optimizer = AdamW([p], lr=0.0)
    assert torch.equal(run(optimizer, p, [torch.ones(3)]), torch.ones(3))
    assert optimizer.state[p]["step"] == 1


def test_state_moves_between_ours_and_torch():
    """A state dict of torch.optim.AdamW continues in ours, and back, as if nothing had happened."""
    torch.manual_seed(5)
    start, grads = torch.randn(6, 2), list(torch.randn(30, 6, 2))
    straight = nn.Parameter(start.clone())
    expected = run(torch.optim.AdamW([straight], lr=1e-2), straight, grads)
    p = nn.Parameter(start.clone())
    first, second, third = (make([p], lr=1e-2) for make in (torch.optim.AdamW, AdamW, torch.optim.AdamW))
    run(first, p, grads[:10])
    second.load_state_dict(first.state_dict())
    run(second, p, grads[10:20])
    third.load_state_dict(first.state_dict() | {"state": second.state_dict()["state"]})
    torch.testing.assert_close(run(third, p, grads[20:]), expected, rtol=1e-6, atol=1e-7)


def test_closure_and_mixed_precision():
    """`step(closure)` computes the loss anew and returns it; 16-bit and 32-bit weights share a group."""
    weights = [nn.Parameter(torch.ones(2, 2, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
    optimizer = AdamW(weights, lr=0.1, weight_decay=0.0)

    def closure() -> float:
        loss = sum((w.float() ** 2).sum() for w in weights)
        assert isinstance(loss, Tensor)
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 8
    for w in weights:
        torch.testing.assert_close(w.detach().float(), torch.full((2, 2), 0.9), rtol=0, atol=4e-3)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"lr": -1.0}, r"lr=-1.0 must be a finite number"),
        ({"lr": math.nan}, r"lr=nan"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) must be two numbers"),
        ({"betas": (-0.1, 0.9)}, r"betas=\(-0.1, 0.9\)"),
        ({"eps": -1e-8}, r"eps=-1e-08"),
        ({"weight_decay": math.inf}, r"weight_decay=inf"),
        ({"style": "adam"}, r"style='adam' is unknown; choose one of torch, cs336"),
        ({"lr_scale": -2.0}, r"lr_scale=-2.0"),
    ],
)
def test_values_out_of_range_are_named(setting, message):
    """A wrong setting raises ValueError naming it and its value, also in a group of its own."""
    with pytest.raises(ValueError, match=message):
        AdamW([{"params": [nn.Parameter(torch.zeros(2))], **setting}])


def test_integer_parameters_are_refused():
    """A parameter that cannot move is named by shape and dtype."""
    frozen = nn.Parameter(torch.zeros(2, 3, dtype=torch.long), requires_grad=False)
    with pytest.raises(ValueError, match=r"shape \(2, 3\) is torch.int64"):
        AdamW([frozen])


# --------------------------------------------------------------------------------------------- groups


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2))
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.zeros(3, 3), requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def test_vectors_do_not_decay():
    """Matrices and embeddings decay, biases and gains do not; tied weights come once, frozen ones never."""
    model = Small()
    decayed, plain = parameter_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    assert [names[id(p)] for p in decayed["params"]] == [
        "embed.weight",
        "blocks.0.0.weight",
        "blocks.1.0.weight",
    ]
    assert all(p.ndim == 1 for p in plain["params"]) and len(plain["params"]) == 7
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)


def test_parts_have_their_own_rate():
    """`lr_scales` goes by the start of a path, whole words only, the longest first."""
    model = Small()
    groups = parameter_groups(model, 0.1, {"embed": 3.0, "blocks": 0.5, "blocks.1": 0.25})
    scale = {id(p): group["lr_scale"] for group in groups for p in group["params"]}
    assert scale[id(model.embed.weight)] == 3.0
    assert scale[id(model.blocks.get_submodule("0.0").weight)] == 0.5
    assert scale[id(model.blocks.get_submodule("1.1").bias)] == 0.25
    assert scale[id(model.head.bias)] == 1.0
    with pytest.raises(ValueError, match=r"lr_scales names bloc, but the model's parts are .*blocks"):
        parameter_groups(model, 0.1, {"bloc": 2.0})


def test_training_with_groups_lowers_the_loss():
    """Groups, schedule, clipping and AdamW together learn a fixed mapping of five tokens."""
    torch.manual_seed(6)
    model, tokens = Small(), torch.arange(5)
    optimizer = AdamW(parameter_groups(model, 0.01), betas=(0.9, 0.99))
    loss = torch.tensor(math.inf)
    for step in range(300):
        for group in optimizer.param_groups:
            group["lr"] = cosine_schedule(step, 0.05, 0.0, 20, 300)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens), tokens.roll(1))
        loss.backward()
        clip_gradients(model.parameters(), 1.0)
        optimizer.step()
    assert loss.item() < 0.05


# ------------------------------------------------------------------------------------------- clipping


def with_gradients(scale: float) -> list[nn.Parameter]:
    torch.manual_seed(7)
    parameters = [nn.Parameter(torch.randn(5, 5)) for _ in range(6)]
    parameters[-1].requires_grad_(False)
    (scale * torch.stack([*parameters])).sum().backward()
    return parameters


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_gradient_clipping(scale):
    """The course's test: equal to torch.nn.utils.clip_grad_norm_, with a frozen parameter among them."""
    ours, theirs = with_gradients(scale), with_gradients(scale)
    norm = clip_gradients((p for p in ours), 1e-2)
    expected = nn.utils.clip_grad_norm_(theirs, 1e-2)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    assert ours[-1].grad is None
    for p, q in zip(ours[:-1], theirs[:-1], strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=0)


def test_clipping_leaves_small_gradients_alone():
    """Under the limit nothing changes, bit for bit; `inf` only measures; a tied weight counts once."""
    weights = with_gradients(1e-6)
    before = [p.grad.clone() for p in weights if p.grad is not None]
    norm = clip_gradients([*weights, weights[0]], 1.0)
    assert torch.equal(norm, clip_gradients(weights, math.inf))
    assert all(torch.equal(p.grad, g) for p, g in zip(weights, before, strict=False) if p.grad is not None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_clipping_keeps_a_bad_gradient_findable(bad):
    """NaN or infinity shows in the norm and in no other gradient, so that its parameter can be named."""
    broken = with_gradients(1.0)
    broken[2].grad = torch.full((5, 5), bad)
    assert not clip_gradients(broken, 1.0).isfinite()
    finite = [bool(p.grad.isfinite().all()) for p in broken if p.grad is not None]
    assert finite == [True, True, False, True, True]


def test_clipping_corner_cases():
    """No gradients give 0; 16-bit norms keep float32 digits; limits are checked."""
    assert clip_gradients([nn.Parameter(torch.ones(3))], 1.0) == 0
    half = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
    half.grad = torch.full_like(half, 1.0)
    assert clip_gradients([half], 1.0).item() == pytest.approx(math.sqrt(1000), rel=1e-6)
    assert half.grad.dtype == torch.bfloat16
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="max_norm"):
            clip_gradients([half], bad)
