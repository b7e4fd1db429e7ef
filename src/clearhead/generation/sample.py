"""Logits to token: pure functions, each a formula, in the order in which they apply.

    repetition penalty                                       greedy and sampling
    temperature -> top-k -> top-p -> min-p -> draw           sampling only (temperature > 0)

Each takes the logits of the next token, one row per sequence, and returns new ones in which a token that is
out has -inf. Order and arithmetic are those of `transformers`, so that a seed gives the same tokens there.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Generators = torch.Generator | Sequence[torch.Generator] | None

# Dividing by less than this can overflow float32; the draw would be the likeliest token anyway.
SMALLEST_TEMPERATURE = 1e-6


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. The default is greedy: always the likeliest.

    >>> Sampling(temperature=0.8, top_p=0.95, seed=1).greedy
    False
    >>> Sampling(temperature=-1.0)
    Traceback (most recent call last):
    ValueError: temperature=-1.0 must be a number of at least 0 (0: always the likeliest)
    """

    temperature: float = 0.0  # 0: greedy; below 1 the likely get likelier; 1: as the model says
    top_k: int = 0  # keep the k likeliest tokens; 0: all
    top_p: float = 1.0  # keep the likeliest tokens that together reach this probability; 1: all
    min_p: float = 0.0  # keep tokens at least this fraction as likely as the likeliest; 0: all
    repetition_penalty: float = 1.0  # above 1 makes tokens that occurred less likely; 1: off
    seed: int | None = None  # of the draws; None: torch's global generator

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:  # NaN fails every comparison, so it ends here too
            raise ValueError(
                f"temperature={self.temperature} must be a number of at least 0 (0: always the likeliest)"
            )
        if 0 < self.temperature < SMALLEST_TEMPERATURE:
            raise ValueError(
                f"temperature={self.temperature} is too small to divide by; use 0 for the likeliest token, "
                f"or at least {SMALLEST_TEMPERATURE}"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be at least 0 (0: keep all tokens)")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be a probability between 0 and 1 (1: keep all tokens)")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p} must be a fraction between 0 and 1 (0: keep all tokens)")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty} must be a number above 0 (1: no penalty)"
            )
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed={self.seed} must be between 0 and {2**63 - 1}")
        self._check_effect()

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken and nothing is drawn."""
        return self.temperature == 0

    def generator(self, device: torch.device | str = "cpu") -> torch.Generator | None:
        """A fresh generator with this seed; None, which means torch's global one, without a seed."""
        return None if self.seed is None else torch.Generator(device).manual_seed(self.seed)

    def _check_effect(self) -> None:
        """An option that cannot take effect is a mistake: a filter never removes the likeliest token."""
        given = {"top_k": self.top_k != 0, "top_p": self.top_p != 1, "min_p": self.min_p != 0}
        for name in given:
            if self.greedy and given[name]:
                raise ValueError(
                    f"{name}={getattr(self, name)} has no effect at temperature=0, which always takes the "
                    f"likeliest token; give a temperature above 0 to sample, or leave {name} out"
                )


def choose(
    logits: Float[Tensor, "B V"],
    sampling: Sampling,
    seen: Bool[Tensor, "B V"] | None = None,
    generators: Generators = None,
) -> Int[Tensor, " B"]:
    """The next token of every row. `seen` marks the tokens that occurred, for the repetition penalty.

    `generators`: one for the whole batch, one per row, or None for torch's global one.
    """
    logits = logits.float()
    if seen is not None:
        logits = penalise_repetition(logits, seen, sampling.repetition_penalty)
    if sampling.greedy:
        return take_likeliest(logits)
    logits = apply_temperature(logits, sampling.temperature)
    logits = keep_top_k(logits, sampling.top_k)
    logits = keep_top_p(logits, sampling.top_p)
    logits = keep_min_p(logits, sampling.min_p)
    return draw(logits.softmax(-1), generators)


def check_finite(logits: Float[Tensor, "B V"], step: int) -> None:
    """Raise ValueError, naming the step, the row and the token, when a logit is infinite or NaN."""
    # one sum is the cheap look at all of them: it is finite only if they all are
    if math.isfinite(float(logits.sum())) or bool(logits.isfinite().all()):
        return
    row, token = (~logits.isfinite()).nonzero()[0].tolist()
    raise ValueError(
        f"the logits of step {step} are not finite: {float(logits[row, token])} for token {token} in row "
        f"{row}; the model's weights are broken or its dtype is too narrow"
    )


def seen_tokens(
    tokens: Int[Tensor, "B T"], real: Bool[Tensor, "B T"], vocab_size: int
) -> Bool[Tensor, "B V"]:
    """Which tokens of the vocabulary occur in each row; padding, where `real` is False, does not count.

    >>> seen_tokens(torch.tensor([[0, 2, 2]]), torch.tensor([[False, True, True]]), 4)
    tensor([[False, False,  True, False]])
    """
    seen = torch.zeros(tokens.shape[0], vocab_size + 1, dtype=torch.bool, device=tokens.device)
    seen.scatter_(1, tokens.masked_fill(~real, vocab_size), True)  # padding marks the extra column
    return seen[:, :vocab_size].contiguous()


def penalise_repetition(
    logits: Float[Tensor, "B V"], seen: Bool[Tensor, "B V"], penalty: float
) -> Float[Tensor, "B V"]:
    """Make tokens that occurred less likely: s / penalty where s >= 0, s * penalty where s < 0.

    Once per token, however often it occurred (Keskar et al. 2019, arXiv:1909.05858, 4.1).

    >>> penalise_repetition(torch.tensor([[3.0, -1.0, 2.0]]), torch.tensor([[True, True, False]]), 2.0)
    tensor([[ 1.5000, -2.0000,  2.0000]])
    """
    penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, penalised, logits)


def take_likeliest(logits: Float[Tensor, "B V"]) -> Int[Tensor, " B"]:
    """Greedy: the token with the largest logit; of equal ones the first."""
    return logits.argmax(-1)


def apply_temperature(logits: Float[Tensor, "B V"], temperature: float) -> Float[Tensor, "B V"]:
    """s / temperature: softmax then gives p^(1 / temperature), normalised. Not for 0, which is greedy."""
    return logits if temperature == 1 else logits / temperature


def keep_top_k(logits: Float[Tensor, "B V"], k: int) -> Float[Tensor, "B V"]:
    """Keep the k largest logits (Fan et al. 2018, arXiv:1805.04833); ties with the k-th stay.

    0, or k >= V: all stay.

    >>> keep_top_k(torch.tensor([[1.0, 4.0, 2.0, 2.0]]), 2)
    tensor([[-inf, 4., 2., 2.]])
    """
    if k == 0 or k >= logits.shape[-1]:
        return logits
    threshold = logits.topk(k).values[:, -1:]
    return logits.masked_fill(logits < threshold, -torch.inf)


def keep_top_p(logits: Float[Tensor, "B V"], p: float) -> Float[Tensor, "B V"]:
    """Keep the likeliest tokens up to the one with which their probabilities reach p, at least one.

    "Nucleus sampling" (Holtzman et al. 2020, arXiv:1904.09751). Seen from the other end: in ascending order,
    drop tokens while the sum of their probabilities is at most 1 - p.

    >>> keep_top_p(torch.tensor([[0.5, 0.2, 0.3]]).log(), 0.6).exp()
    tensor([[0.5000, 0.0000, 0.3000]])
    """
    if p == 1:
        return logits
    ascending, order = logits.sort(descending=False)
    dropped = ascending.softmax(-1).cumsum(-1) <= 1 - p
    dropped[:, -1] = False
    return logits.masked_fill(dropped.scatter(1, order, dropped), -torch.inf)


def keep_min_p(logits: Float[Tensor, "B V"], fraction: float) -> Float[Tensor, "B V"]:
    """Keep tokens whose probability is at least `fraction` of the largest (Nguyen et al. 2024, 2407.01082).

    >>> keep_min_p(torch.tensor([[0.6, 0.3, 0.1]]).log(), 0.4).exp()
    tensor([[0.6000, 0.3000, 0.0000]])
    """
    if fraction == 0:
        return logits
    probabilities = logits.softmax(-1)
    threshold = fraction * probabilities.amax(-1, keepdim=True)
    return logits.masked_fill(probabilities < threshold, -torch.inf)


def draw(probabilities: Float[Tensor, "B V"], generators: Generators = None) -> Int[Tensor, " B"]:
    """One token per row, each with its probability, drawn as `torch.multinomial` draws.

    With one generator all rows share its stream; with a list, row i uses the i-th alone, so that a row's
    tokens do not depend on its neighbours.
    """
    if generators is None or isinstance(generators, torch.Generator):
        return torch.multinomial(probabilities, 1, generator=generators).squeeze(1)
    rows = zip(probabilities.split(1), generators, strict=True)
    return torch.cat([torch.multinomial(row, 1, generator=own) for row, own in rows]).squeeze(1)
