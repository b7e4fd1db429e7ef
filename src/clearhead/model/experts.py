"""A mixture of experts: many feed-forward layers, of which each token passes the few its router chooses.

    scores  = softmax or sigmoid of router(x)                      one per expert
    chosen  = the top k of them, their weights renormalised or not
    y       = sum over the chosen of weight * expert(x)  (+ the shared expert of x)

Nothing is dropped: every token gets all its experts, whatever its neighbours chose. The (token, expert) pairs
are sorted by expert, and the runs of all experts are multiplied by their matrices in one grouped product;
there is no loop over tokens.

What the routers decided is seen by a `Routing`, which travels through a pass like a cache:

    routing = Routing()
    logits = model(tokens, routing=routing)
    loss = cross_entropy(logits, targets) + routing.loss(config.experts)

Sources: Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021, arXiv:2101.03961; DeepSeek-AI 2024,
arXiv:2412.19437 (sigmoid scores, groups, correction bias).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead.model.config import Activation
from clearhead.model.config_parts import ExpertsConfig
from clearhead.model.grouped import grouped_product
from clearhead.model.layers import FeedForward, Linear, find_activation, widen
from clearhead.model.tap import listening, tap


class Routed(NamedTuple):
    """What one router made of the tokens of a pass."""

    logits: Tensor  # (B, T, E)
    scores: Tensor  # (B, T, E), softmax or sigmoid of them
    chosen: Tensor  # (B, T, k), numbers of experts


class Routing:
    """What the routers of a pass decided, layer by layer; give `model(tokens, routing=...)` an empty one.

    In every method `real` (B, T) is False for padding, which then does not count; None: all count. Of an
    encoder-decoder it sees the decoder's pass, and `source` the encoder's, which is another Routing.
    """

    def __init__(self) -> None:
        self.layers: list[Routed] = []
        self.source: Routing | None = None

    def stacks(
        self, real: Bool[Tensor, "B T"] | None = None, source_real: Bool[Tensor, "B S"] | None = None
    ) -> list[tuple["Routing", Tensor | None]]:
        """What each stack of the model decided, and which of its tokens are real; an encoder comes first."""
        read = [] if self.source is None else [(self.source, source_real)]
        return [*read, (self, real)]

    def balance_loss(self, real: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, ""]:
        """E x sum over experts of (choices per token) x (mean share of the score): k if all are used alike.

        Pooled over layers, as `transformers` does (Fedus et al. 2021, equations 4 to 6, for k = 1).
        """
        weight = self._weight(real)
        rows = len(self.layers) * weight.sum()
        chosen = self.load(real).sum(0) / rows
        shares = [routed.scores / routed.scores.sum(-1, keepdim=True) for routed in self.layers]
        share = (torch.stack(shares) * weight[..., None]).sum((0, 1, 2)) / rows
        return len(chosen) * (chosen * share).sum()

    def z_loss(self, real: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, ""]:
        """Mean of logsumexp(logits)^2, which keeps the routers' logits small (Zoph et al. 2022,
        arXiv:2202.08906).
        """
        weight = self._weight(real)
        squares = [widen(routed.logits).logsumexp(-1).square() for routed in self.layers]
        return (torch.stack(squares) * weight).sum() / (len(squares) * weight.sum())

    def loss(self, config: ExpertsConfig, real: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, ""]:
        """Both losses times their coefficients in the config: what is added to the loss of a batch."""
        balance = config.balance_loss * self.balance_loss(real) if config.balance_loss else 0.0
        return balance + (config.z_loss * self.z_loss(real) if config.z_loss else torch.zeros(()))

    def load(self, real: Bool[Tensor, "B T"] | None = None) -> Float[Tensor, "layers E"]:
        """How many tokens chose each expert, in each layer that has experts: a row sums to k times the
        tokens.
        """
        weight = self._weight(real)
        counts = []
        for routed in self.layers:
            none = torch.zeros(routed.scores.shape[-1], device=weight.device)
            each = weight[..., None].expand(routed.chosen.shape)
            counts.append(none.scatter_add(0, routed.chosen.flatten(), each.flatten()))
        return torch.stack(counts)

    def _weight(self, real: Bool[Tensor, "B T"] | None) -> Float[Tensor, "B T"]:
        """1 for the tokens that count, 0 for padding."""
        if not self.layers:
            raise ValueError("no router was asked: give this Routing to a pass of a model that has experts")
        if real is not None:
            return real.float()
        return torch.ones(self.layers[0].chosen.shape[:2], device=self.layers[0].chosen.device)


class Router(nn.Module):
    """Which experts a token is sent to, and with which weights.

    scores = softmax(W x) or sigmoid(W x), in float32 or wider. The top k are chosen by score, plus
    `correction` if there is one; with groups, from the best groups only. The weights are the scores of the
    chosen, shared out to a sum of 1 with `renormalise`, times `weight_scale`.
    """

    correction: Tensor

    def __init__(self, d_model: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.config = config
        weight = torch.empty(config.n_experts, d_model)
        nn.init.normal_(weight, std=(2 / (d_model + config.n_experts)) ** 0.5)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(config.n_experts)) if config.router_bias else None
        if config.correction_bias:
            self.register_buffer("correction", torch.zeros(config.n_experts))
        self.score = softmax_scores if config.router == "softmax" else torch.sigmoid
        self.prefer = prefer_corrected if config.correction_bias else prefer_scores
        self.restrict = keep_best_groups if config.top_groups < config.n_groups else keep_all_groups
        self.weigh = share_out if config.renormalise else weigh_as_scored

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch E"]:
        """The router's logits, in float32 or wider also under autocast."""
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else widen(self.bias)
            return F.linear(widen(x), widen(self.weight), bias)

    def choose(
        self, scores: Float[Tensor, "*batch E"]
    ) -> tuple[Float[Tensor, "*batch k"], Int[Tensor, "*batch k"]]:
        """Weights and numbers of the experts that each token is sent to."""
        config = self.config
        preference = self.restrict(self.prefer(self, scores), config.n_groups, config.top_groups)
        chosen = preference.topk(config.top_k, dim=-1).indices
        return self.weigh(scores.gather(-1, chosen)) * config.weight_scale, chosen


def softmax_scores(logits: Float[Tensor, "*batch E"]) -> Float[Tensor, "*batch E"]:
    """Probabilities over the experts."""
    return torch.softmax(logits, dim=-1)


def prefer_scores(router: Router, scores: Float[Tensor, "*batch E"]) -> Float[Tensor, "*batch E"]:
    """The scores themselves."""
    return scores


def prefer_corrected(router: Router, scores: Float[Tensor, "*batch E"]) -> Float[Tensor, "*batch E"]:
    """The scores plus each expert's correction."""
    return scores + router.correction


def keep_all_groups(
    preference: Float[Tensor, "*batch E"], n_groups: int, top_groups: int
) -> Float[Tensor, "*batch E"]:
    """All experts may be chosen."""
    return preference


def keep_best_groups(
    preference: Float[Tensor, "*batch E"], n_groups: int, top_groups: int
) -> Float[Tensor, "*batch E"]:
    """-inf outside the `top_groups` groups of neighbouring experts whose two best members sum highest."""
    groups = preference.unflatten(-1, (n_groups, -1))
    best = groups.topk(2, dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
    kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
    return groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)


def share_out(scores: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch k"]:
    """The chosen scores over their sum; 0 where all of them are, as sigmoids may be."""
    return scores / (scores.sum(-1, keepdim=True) + 1e-20)


def weigh_as_scored(scores: Float[Tensor, "*batch k"]) -> Float[Tensor, "*batch k"]:
    """The chosen scores themselves."""
    return scores


class Experts(nn.Module):
    """E gated feed-forward layers behind a router, in the place of one feed-forward layer.

    y = sum over the chosen e of weight_e down_e(act(gate_e(x)) * up_e(x)), matrices stored (E, out, in).
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None

    def __init__(self, d_model: int, config: ExpertsConfig, activation: Activation = "silu") -> None:
        super().__init__()
        self.config = config
        self.router = Router(d_model, config)
        sizes = {"gate": (config.d_ff, d_model), "up": (config.d_ff, d_model), "down": (d_model, config.d_ff)}
        for name, (d_out, d_in) in sizes.items():
            weight = torch.empty(config.n_experts, d_out, d_in)
            nn.init.normal_(weight, std=(2 / (d_in + d_out)) ** 0.5)
            self.register_parameter(name, nn.Parameter(weight))
            bias = nn.Parameter(torch.zeros(config.n_experts, d_out)) if config.bias else None
            self.register_parameter(f"{name}_bias", bias)
        if config.shared_d_ff:
            self.shared = FeedForward(d_model, config.shared_d_ff, activation)
        if config.shared_gate:
            self.shared_gate = Linear(d_model, 1)
        self.activation = find_activation(activation)
        self.join = join_gated if config.limit is None else join_limited
        self.shake = shake if config.jitter else leave
        self.add_shared = SHARED[bool(config.shared_d_ff), config.shared_gate]

    def forward(self, x: Float[Tensor, "B T D"], routing: Routing | None = None) -> Float[Tensor, "B T D"]:
        x = self.shake(self, x)
        logits = self.router(x)
        scores = tap("scores", self.router.score(logits))
        weights, chosen = self.router.choose(scores)
        weights, chosen = tap("weights", weights), tap("chosen", chosen)
        if routing is not None:
            routing.layers.append(Routed(logits, scores, chosen))
        y = self.mix(x, weights, chosen)
        return self.add_shared(self, x, y.to(x.dtype))

    def mix(
        self, x: Float[Tensor, "B T D"], weights: Float[Tensor, "B T k"], chosen: Int[Tensor, "B T k"]
    ) -> Float[Tensor, "B T D"]:
        """Each token through its experts: pairs sorted by expert, a grouped product per matrix, and back."""
        expert, order = chosen.flatten().sort(stable=True)
        back = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
        numbers = torch.arange(1, len(self.gate) + 1, device=expert.device)
        ends = torch.searchsorted(expert, numbers, out_int32=True)
        # Repeated first, then permuted: so that no two gradients are added to the same place in parallel.
        rows = x.flatten(0, 1).repeat_interleave(chosen.shape[-1], 0).index_select(0, order)

        def each(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            y = grouped_product(rows, weight, ends)
            return y if bias is None else y + bias.to(y.dtype).index_select(0, expert)

        def unsorted(rows: Tensor) -> Tensor:
            return rows.index_select(0, back).view(*chosen.shape, -1)

        def shown(name: str, rows: Tensor) -> Tensor:
            """The rows, tapped where their tokens stand."""
            return tap(name, unsorted(rows)).flatten(0, 2).index_select(0, order) if listening() else rows

        gate = shown("gate", each(rows, self.gate, self.gate_bias))
        up = shown("up", each(rows, self.up, self.up_bias))
        hidden = shown("hidden", self.join(self, gate, up))
        outputs = tap("outputs", unsorted(each(hidden, self.down, self.down_bias)))
        return (outputs * weights[..., None]).sum(-2)


def join_gated(
    experts: Experts, gate: Float[Tensor, "M F"], up: Float[Tensor, "M F"]
) -> Float[Tensor, "M F"]:
    """act(gate) * up."""
    return experts.activation(gate) * up


def join_limited(
    experts: Experts, gate: Float[Tensor, "M F"], up: Float[Tensor, "M F"]
) -> Float[Tensor, "M F"]:
    """gate sigmoid(slope gate) (up + 1), with gate at most the limit and up within +- the limit."""
    limit, slope = experts.config.limit, experts.config.limit_slope
    assert limit is not None
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(slope * gate) * (up + 1)


def shake(experts: Experts, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
    """x times random numbers near 1, in training: choices that are near ties fall both ways."""
    if not experts.training:
        return x
    jitter = experts.config.jitter
    return x * torch.empty_like(x).uniform_(1 - jitter, 1 + jitter)


def leave(experts: Experts, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
    """x as it is."""
    return x


def add_none(
    experts: Experts, x: Float[Tensor, "B T D"], y: Float[Tensor, "B T D"]
) -> Float[Tensor, "B T D"]:
    """y: there is no shared expert."""
    return y


def add_shared(
    experts: Experts, x: Float[Tensor, "B T D"], y: Float[Tensor, "B T D"]
) -> Float[Tensor, "B T D"]:
    """y plus what the shared expert makes of every token."""
    return y + experts.shared(x)


def add_gated_shared(
    experts: Experts, x: Float[Tensor, "B T D"], y: Float[Tensor, "B T D"]
) -> Float[Tensor, "B T D"]:
    """y plus that, times a gate of its own."""
    return y + torch.sigmoid(experts.shared_gate(x)) * experts.shared(x)


SHARED = {(False, False): add_none, (True, False): add_shared, (True, True): add_gated_shared}


@torch.no_grad()
def correct_balance(model: nn.Module, load: Float[Tensor, "layers E"], rate: float = 1e-3) -> None:
    """Move each expert's correction by `rate`, up where fewer tokens than the mean chose it, else down.

    It balances the load without a loss that disturbs learning (Wang et al. 2024, arXiv:2408.15664). Call it
    after an optimizer step with `Routing.load()`, summed over the step's passes; of an encoder-decoder with
    that of both `Routing.stacks()`. A load that is not one row per router is a ValueError.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    if len(routers) != len(load):
        raise ValueError(f"the load of {len(load)} layers was given for {len(routers)} routers")
    for router, counts in zip(routers, load, strict=True):
        if router.config.correction_bias:
            router.correction += rate * torch.sign(counts.mean() - counts)
