"""Masked language modelling: hide some tokens, ask for them from both sides (Devlin et al. 2018,
arXiv:1810.04805).

    chosen    each token with probability `share`, never a special one
    of those  8 in 10 become the mask token, 1 in 10 any token, 1 in 10 stay
    asked for the chosen ones, also those that stay; -100 elsewhere

What is hidden in sample number g of a run is a function of (seed, g) alone, so that a batch cut differently,
a resumed run and any number of processes hide the same. The next time a text comes round, it has another
number and loses other tokens.
"""

import hashlib

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from clearhead.training.objectives import IGNORE

MASKED, RANDOM = 0.8, 0.5  # shares of the chosen, and of those that are then left


def mask_tokens(
    ids: Int[Tensor, "*batch T"],
    special: Bool[Tensor, "*batch T"],
    mask_id: int,
    vocab_size: int,
    share: float = 0.15,
    generator: torch.Generator | None = None,
) -> tuple[Int[Tensor, "*batch T"], Int[Tensor, "*batch T"]]:
    """Return (inputs, targets): `ids` with some hidden, and what was there, -100 where nothing is asked.

    `special`: True at tokens that are never chosen (padding, [CLS], [SEP], ...). The random numbers are drawn
    in the order of `transformers`, so that one generator gives its batches. ValueError: a share outside 0..1,
    a mask token outside the vocabulary.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share={share} of tokens to hide must be between 0 and 1")
    if not 0 <= mask_id < vocab_size:
        raise ValueError(f"the mask token {mask_id} is outside the vocabulary 0..{vocab_size - 1}")
    chance = torch.full(ids.shape, share).masked_fill(special.cpu(), 0.0)
    chosen = torch.bernoulli(chance, generator=generator).bool()
    hidden = torch.bernoulli(torch.full(ids.shape, MASKED), generator=generator).bool() & chosen
    swapped = torch.bernoulli(torch.full(ids.shape, RANDOM), generator=generator).bool() & chosen & ~hidden
    others = torch.randint(vocab_size, ids.shape, generator=generator)
    chosen, hidden, swapped, others = (x.to(ids.device) for x in (chosen, hidden, swapped, others))
    return ids.masked_fill(hidden, mask_id).where(~swapped, others), ids.masked_fill(~chosen, IGNORE)


def mask_samples(
    ids: Int[Tensor, "B T"],
    special: Bool[Tensor, "B T"],
    mask_id: int,
    vocab_size: int,
    share: float,
    seed: int,
    first_sample: int,
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """`mask_tokens` of samples first_sample, first_sample + 1, ... of a run, each by its own number.

    Special tokens at the end of a row draw nothing, so that the amount of padding changes nothing.
    """
    inputs, targets = ids.clone(), torch.full_like(ids, IGNORE)
    for row in range(len(ids)):
        ordinary = (~special[row]).nonzero()
        stop = int(ordinary[-1]) + 1 if len(ordinary) else 0
        generator = torch.Generator().manual_seed(sample_seed(seed, first_sample + row))
        inputs[row, :stop], targets[row, :stop] = mask_tokens(
            ids[row, :stop], special[row, :stop], mask_id, vocab_size, share, generator
        )
    return inputs, targets


def sample_seed(seed: int, sample: int) -> int:
    """The seed of the masks of sample number `sample` of a run, a number below 2^63."""
    digest = hashlib.sha256(f"mask/{seed}/{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
