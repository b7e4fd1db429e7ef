"""How fast a mixture of experts is, beside a loop over the experts and beside Hugging Face `transformers`.

    python benchmarks/experts.py            64 experts, 8 for each token, width 64; 21 rounds
    python benchmarks/experts.py --quick    5 rounds
    python benchmarks/experts.py --record   also appends the result to RESULTS.md

All arms hold the same weights, and their outputs are compared before they are timed. The arms of a round run
one after the other in one process, in turned order from round to round; a ratio is the median of the rounds'
ratios. `train` is a forward and a backward pass.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.model.config_parts import ExpertsConfig
from clearhead.model.experts import Experts
from machine import describe_machine, record

N_EXPERTS, TOP_K, WIDTH = 64, 8, 64
N_TOKENS = (1, 16, 64, 256, 1024)
GOAL = 3.0

Layer = Callable[[Tensor], Tensor]


# The arms: each is a function from the tokens (1, N, D) to the output, over the same weights


class Loop(nn.Module):
    """The plain way: expert by expert, look up its tokens, multiply, add to their places."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        experts, tokens = self.experts, x[0]
        weights, chosen = experts.router.choose(experts.router.score(experts.router(tokens)))
        y = torch.zeros_like(tokens)
        for number in range(N_EXPERTS):
            row, place = torch.where(chosen == number)
            if len(row) == 0:
                continue
            mine = tokens[row]
            hidden = F.silu(F.linear(mine, experts.gate[number])) * F.linear(mine, experts.up[number])
            y = y.index_add(0, row, F.linear(hidden, experts.down[number]) * weights[row, place, None])
        return y[None]


def make_transformers(experts: Experts, implementation: str) -> nn.Module:
    """OLMoE's layer, which has the same router, with these weights."""
    from transformers import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    config = OlmoeConfig(
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_experts=N_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        experts_implementation=implementation,
    )
    block = OlmoeSparseMoeBlock(config)
    weights: dict[str, Any] = {
        "gate.weight": experts.router.weight,
        "experts.gate_up_proj": torch.cat([experts.gate, experts.up], dim=1),
        "experts.down_proj": experts.down,
    }
    block.load_state_dict({name: weight.detach().clone() for name, weight in weights.items()})
    return block


def make_arms() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    experts = Experts(WIDTH, ExpertsConfig(n_experts=N_EXPERTS, top_k=TOP_K, d_ff=WIDTH))
    return {
        "clearhead": experts,
        "loop over experts": Loop(experts),
        "transformers, grouped_mm": make_transformers(experts, "grouped_mm"),
        "transformers, eager": make_transformers(experts, "eager"),
    }


# Timing


def forward(layer: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        layer(x)


def train(layer: nn.Module, x: Tensor) -> None:
    layer.zero_grad()
    layer(x).sum().backward()


def seconds_of(call: Callable[[], None], least: float = 0.02) -> float:
    """Wall time of one call, from as many as take `least` seconds together."""
    n_calls, begun = 0, time.perf_counter()
    while n_calls == 0 or time.perf_counter() - begun < least:
        call()
        n_calls += 1
    return (time.perf_counter() - begun) / n_calls


def measure(arms: dict[str, nn.Module], n_rounds: int) -> list[str]:
    """A table row for each kind of pass and number of tokens."""
    rows = []
    for name, run in (("forward", forward), ("train", train)):
        for n_tokens in N_TOKENS:
            x = torch.randn(1, n_tokens, WIDTH)
            found: dict[str, list[float]] = {arm: [] for arm in arms}
            for number in range(n_rounds + 1):
                for arm in list(arms) if number % 2 == 0 else list(arms)[::-1]:
                    found[arm].append(seconds_of(partial(run, arms[arm], x)))
            times = {arm: seconds[1:] for arm, seconds in found.items()}  # the first round warms up
            rows.append(row(name, n_tokens, times))
            print(rows[-1], flush=True)
    return rows


def row(name: str, n_tokens: int, times: dict[str, list[float]]) -> str:
    ours = times["clearhead"]
    cells = [name, f"{n_tokens:,}", f"{statistics.median(ours) * 1e3:.2f} ms"]
    for arm, seconds in times.items():
        if arm != "clearhead":
            ratio = statistics.median(b / a for a, b in zip(ours, seconds, strict=True))
            cells.append(f"{statistics.median(seconds) * 1e3:.2f} ms ({ratio:.2f}x)")
    return f"| {' | '.join(cells)} |"


def check_equal(arms: dict[str, nn.Module]) -> float:
    """The largest difference between the arms' outputs."""
    x = torch.randn(1, 256, WIDTH)
    with torch.no_grad():
        outputs = [layer(x) for layer in arms.values()]
    return max((output - outputs[0]).abs().max().item() for output in outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default 21)")
    parser.add_argument("--quick", action="store_true", help="5 rounds")
    parser.add_argument("--threads", type=int, help="threads of torch (default: its own choice)")
    parser.add_argument("--record", action="store_true", help="append the result to RESULTS.md")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    n_rounds = options.rounds or (5 if options.quick else 21)
    before = describe_machine("torch", "transformers", threads=torch.get_num_threads())
    arms = make_arms()
    gap = check_equal(arms)
    titles = ["pass", "tokens", *arms]
    lines = [
        f"## Mixture of experts, {date.today()}",
        "",
        f"{before}.",
        "",
        f"{N_EXPERTS} experts, {TOP_K} for each token, width {WIDTH}, float32; {n_rounds} turned rounds.",
        f"Outputs of all arms differ by at most {gap:.1e}. In brackets: time beside clearhead's",
        f"(goal beside the loop: >= {GOAL:.0f}x).",
        "",
        f"| {' | '.join(titles)} |",
        "|" + "---|" * len(titles),
    ]
    print("\n".join(lines), flush=True)
    report = "\n".join([*lines, *measure(arms, n_rounds)]) + "\n"
    if options.record:
        record(report)


if __name__ == "__main__":
    main()
