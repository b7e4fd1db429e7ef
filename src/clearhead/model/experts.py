"""A mixture of experts: many feed-forward layers, of which each token passes the few its router chooses.

    scores  = softmax or sigmoid of router(x)                      one per expert
    chosen  = the top k of them, their weights renormalised or not
    y       = sum over the chosen of weight * expert(x)  (+ the shared expert of x)

Nothing is dropped: every token gets all its experts, whatever its neighbours chose. The (token, expert) pairs
are sorted by expert, and the runs of all experts are multiplied by their matrices in one grouped kernel call;
there is no loop over tokens or experts.
Sources: Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021, arXiv:2101.03961; DeepSeek-AI 2024,
arXiv:2412.19437 (sigmoid scores, groups, correction bias).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.model.config import Activation, ExpertsConfig
from clearhead.model.layers import FeedForward, Linear, find_activation, widen
from clearhead.model.tap import tap


class Router(nn.Module):
    """Which experts a token is sent to, and with which weights.

    scores = softmax(W x) or sigmoid(W x), in float32 or wider. The top k are chosen by score, plus
    `correction` if there is one; with groups, from the best groups only. The weights are the scores of the
    chosen.
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

    def forward(self, x: Float[Tensor, "N D"]) -> Float[Tensor, "N E"]:
        """The router's logits."""
        return F.linear(x, self.weight, self.bias)

    def choose(self, logits: Float[Tensor, "N E"]) -> tuple[Float[Tensor, "N k"], Int[Tensor, "N k"]]:
        """Weights and numbers of the experts that each token is sent to."""
        config = self.config
        scores = self.score(widen(logits))
        preference = scores + self.correction if config.correction_bias else scores
        if config.n_groups > 1:
            preference = keep_best_groups(preference, config.n_groups, config.top_groups)
        chosen = preference.topk(config.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if config.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * config.weight_scale, chosen


def softmax_scores(logits: Float[Tensor, "N E"]) -> Float[Tensor, "N E"]:
    """Probabilities over the experts."""
    return torch.softmax(logits, dim=-1)


def keep_best_groups(
    preference: Float[Tensor, "N E"], n_groups: int, top_groups: int
) -> Float[Tensor, "N E"]:
    """-inf outside the `top_groups` groups of experts whose two best members sum highest."""
    groups = preference.unflatten(-1, (n_groups, -1))
    best = groups.topk(2, dim=-1).values.sum(-1).topk(top_groups, dim=-1).indices
    kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
    return groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)


class Experts(nn.Module):
    """E gated feed-forward layers behind a router; called as a FeedForward is."""

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
        self.add_shared = {
            (False, False): add_none,
            (True, False): add_shared,
            (True, True): add_gated_shared,
        }[bool(config.shared_d_ff), config.shared_gate]

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        tokens = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router.choose(self.router(tokens))
        tap("weights", weights)
        tap("chosen", chosen)
        y = self.mix(tokens, weights.to(x.dtype), chosen)
        return self.add_shared(self, tokens, y).reshape(x.shape)

    def mix(
        self, tokens: Float[Tensor, "N D"], weights: Float[Tensor, "N k"], chosen: Int[Tensor, "N k"]
    ) -> Float[Tensor, "N D"]:
        """Each token through its experts: pairs sorted by expert, one grouped product per matrix."""
        expert, order = chosen.flatten().sort(stable=True)
        token = order // chosen.shape[1]
        ends = torch.bincount(expert, minlength=self.config.n_experts).cumsum(0).to(torch.int32)
        rows = tokens[token]
        gate = grouped(rows, self.gate, self.gate_bias, expert, ends)
        up = grouped(rows, self.up, self.up_bias, expert, ends)
        down = grouped(self.join(self, gate, up), self.down, self.down_bias, expert, ends)
        return torch.zeros_like(tokens).index_add(0, token, down * weights.flatten()[order, None])


def grouped(
    rows: Float[Tensor, "M d_in"],
    weight: Float[Tensor, "E d_out d_in"],
    bias: Float[Tensor, "E d_out"] | None,
    expert: Int[Tensor, " M"],
    ends: Int[Tensor, " E"],
) -> Float[Tensor, "M d_out"]:
    """Each row times the matrix of its expert; rows are sorted by expert, whose runs stop at `ends`."""
    y = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    return y if bias is None else y + bias[expert]


def join_gated(
    experts: Experts, gate: Float[Tensor, "M F"], up: Float[Tensor, "M F"]
) -> Float[Tensor, "M F"]:
    """act(gate) * up."""
    return experts.activation(gate) * up


def join_limited(
    experts: Experts, gate: Float[Tensor, "M F"], up: Float[Tensor, "M F"]
) -> Float[Tensor, "M F"]:
    """gate sigmoid(1.702 gate) (up + 1), with gate at most and up within +- the limit (gpt-oss)."""
    limit = experts.config.limit
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit) if limit is not None else up
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def add_none(experts: Experts, tokens: Float[Tensor, "N D"], y: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
    """y: there is no shared expert."""
    return y


def add_shared(
    experts: Experts, tokens: Float[Tensor, "N D"], y: Float[Tensor, "N D"]
) -> Float[Tensor, "N D"]:
    """y plus what the shared expert makes of every token."""
    return y + experts.shared(tokens)


def add_gated_shared(
    experts: Experts, tokens: Float[Tensor, "N D"], y: Float[Tensor, "N D"]
) -> Float[Tensor, "N D"]:
    """y plus that, times a gate of its own."""
    return y + torch.sigmoid(experts.shared_gate(tokens)) * experts.shared(tokens)


def balance_loss(
    logits: list[Float[Tensor, "N E"]], top_k: int, real: Float[Tensor, " N"] | None = None
) -> Float[Tensor, ""]:
    """E x sum over experts of (share of the k choices) x (mean probability), pooled over layers: k when
    balanced.

    `real`: 1 for tokens that count, 0 for padding (Fedus et al. 2021; pooled as `transformers` does).
    """
    probabilities = torch.softmax(widen(torch.cat(logits)), dim=-1)
    chosen = probabilities.topk(top_k, dim=-1).indices
    counted = torch.ones_like(probabilities[:, 0]) if real is None else real.repeat(len(logits))
    total = counted.sum()
    picked = torch.zeros_like(probabilities).scatter_(-1, chosen, 1.0)
    load = (picked * counted[:, None]).sum(0) / total
    mean = (probabilities * counted[:, None]).sum(0) / total
    return probabilities.shape[-1] * (load * mean).sum()


def z_loss(logits: Float[Tensor, "N E"]) -> Float[Tensor, ""]:
    """Mean of logsumexp(logits)^2, which keeps the router's logits small (Zoph et al. 2022,
    arXiv:2202.08906).
    """
    return widen(logits).logsumexp(-1).square().mean()
