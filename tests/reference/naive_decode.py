"""The dull twin of generation: no cache, no batch, no tensors where a loop over the vocabulary will do.

Every step shows the model the whole sequence and looks at each token of the vocabulary on its own.
"""

import math

import torch


def naive_generate(
    model,
    prompt: list[int],
    max_new_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int | None = None,
    eos_id: int | None = None,
    slide: bool = False,
) -> list[int]:
    """The new ids, the end id included."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    limit = model.config.max_len
    sequence, window, new = list(prompt), list(prompt), []
    while len(new) < max_new_tokens and (not new or new[-1] != eos_id):
        if slide and len(window) > limit:
            window = window[-(limit // 2) :]
        with torch.no_grad():
            logits = model(torch.tensor([window]))[0, -1].tolist()
        logits = naive_penalty(logits, set(sequence), repetition_penalty)
        if temperature == 0:
            token = logits.index(max(logits))
        else:
            logits = [logit / temperature for logit in logits]
            logits = naive_filters(logits, top_k, top_p, min_p)
            weights = torch.tensor(naive_softmax(logits))
            token = int(torch.multinomial(weights, 1, generator=generator))
        for tokens in (sequence, window, new):
            tokens.append(token)
    return new


def naive_softmax(logits: list[float]) -> list[float]:
    """exp(s) / sum of exp(s), after taking the largest away."""
    exps = [math.exp(logit - max(logits)) for logit in logits]
    return [x / sum(exps) for x in exps]


def naive_penalty(logits: list[float], seen: set[int], penalty: float) -> list[float]:
    """Each token that occurred: divided when positive, multiplied when negative."""
    return [
        logit if token not in seen else logit * penalty if logit < 0 else logit / penalty
        for token, logit in enumerate(logits)
    ]


def naive_filters(logits: list[float], top_k: int, top_p: float, min_p: float) -> list[float]:
    """Top-k, then top-p on what is left, then min-p on what is left of that."""
    if top_k:
        logits = [logit if sum(other > logit for other in logits) < top_k else -math.inf for logit in logits]
    if top_p < 1:
        # a token stays when the likelier ones do not reach top_p without it
        probabilities = naive_softmax(logits)
        order = sorted(range(len(logits)), key=lambda token: probabilities[token], reverse=True)
        reached, kept = 0.0, set()
        for token in order:
            if reached >= top_p and kept:
                break
            kept.add(token)
            reached += probabilities[token]
        logits = [logit if token in kept else -math.inf for token, logit in enumerate(logits)]
    if min_p:
        probabilities = naive_softmax(logits)
        logits = [
            logit if probability >= min_p * max(probabilities) else -math.inf
            for logit, probability in zip(logits, probabilities, strict=True)
        ]
    return logits


def naive_cut(text: str, stops: list[str]) -> str:
    """The text before the earliest stop string in it."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]
