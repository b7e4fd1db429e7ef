"""How good a model is on text it has not seen.

    loss           = total of -log p(token) over the split / number of predicted tokens     (nats per token)
    perplexity     = exp(loss)
    bits per byte  = loss / ln 2 * tokens of the text / UTF-8 bytes of the text

Bits per byte do not depend on the vocabulary, so they compare models with different tokenizers, and with file
compressors: a text of n bytes costs n * bits_per_byte / 8 bytes to store with the model at hand.

Ranks with different data look at different batches of a split; totals are summed over them, and what is said
of each example is gathered in the order of the examples, so that the result is that of one process.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.model.experts import Routing
from clearhead.model.transformer import Transformer
from clearhead.text.batches import IGNORED, Batch, evaluation_batches
from clearhead.text.shards import Shards
from clearhead.training.objectives import token_loss

T = TypeVar("T")
Forward = Callable[..., Tensor]
"""The model as the loop calls it: compiled or wrapped, with the arithmetic of the recipe."""


def outputs_of(forward: Forward, batch: Batch, routing: Routing | None = None) -> Float[Tensor, "B ..."]:
    """What the model's head says of a batch: logits, numbers or vectors."""
    return forward(
        batch.inputs,
        mask=batch.mask,
        documents=batch.documents,
        types=batch.token_types,
        source=batch.source,
        source_mask=batch.source_mask,
        routing=routing,
    )


class Sharers:
    """Who looks at a split together: `size` of them, of which this is number `rank`. Here: one alone.

    `in_step`: they can only make passes of the model all at once, as each holds a part of its weights.
    """

    rank, size, in_step = 0, 1, False

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, in order."""
        return [value]

    def part(self, things: Iterable[T]) -> Iterator[tuple[T, bool]]:
        """Of each `size` things in a row the one that is this rank's, and True.

        At the end, where there are fewer and all have to keep in step, a rank without one gets the first of
        them, and False: it is to be worked on, but does not count.
        """
        things = iter(things)
        while row := list(islice(things, self.size)):
            if self.rank < len(row):
                yield row[self.rank], True
            elif self.in_step:
                yield row[0], False

    def whole(self, found: list[T]) -> list[T]:
        """What all have found, each of the things of its part, in the order of the things."""
        missing = object()
        rows = zip_longest(*self.gather(found), fillvalue=missing)
        return [one for one in chain.from_iterable(rows) if one is not missing]

    def go_on(self, wanted: bool) -> bool:
        """Whether to make one more pass: as long as this one wants it, or one that it keeps in step with."""
        return any(self.gather(wanted)) if self.in_step else wanted


UNSHARED = Sharers()


@dataclass(frozen=True)
class Evaluation:
    """The result of one look at a split: loss in nats per token, and what it means per byte of text."""

    loss: float
    perplexity: float
    bits_per_byte: float
    n_tokens: int


def evaluate(
    model: Transformer,
    shards: Shards,
    *,
    batch_size: int = 16,
    context_length: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    document_mask: bool = False,
    sharers: Sharers = UNSHARED,
) -> Evaluation:
    """Total loss over total tokens of a split, every token predicted once.

    Windows of `context_length` tokens (the model's max_len if None) start every `stride` tokens (the whole
    window if None): a smaller stride gives each token more context and takes longer. `max_tokens`: only the
    first so many; in bits per byte the others count as much as these, like those that `document_mask` leaves
    out (the first of a document). How many rows go into a batch changes nothing. The model's training mode is
    kept. `sharers` look at their parts of the batches; the result is the whole's, for each of them.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1, or None for all of the split")
    context_length = model.config.max_len if context_length is None else context_length
    device = next(model.parameters()).device
    totals = Totals()
    batches = evaluation_batches(shards, batch_size, context_length, document_mask, stride)
    with evaluating(model):
        for batch, counts in sharers.part(first_targets(batches, max_tokens)):
            batch = batch.to(device)
            found = token_loss(outputs_of(model, batch), batch.targets)
            if counts:
                totals.add(*found)
    total, count = totals.read(sharers)
    if count == 0:
        raise ValueError(f"a split of {shards.n_tokens} tokens has nothing to predict; it needs at least 2")
    loss = total / count
    tokens_per_byte = shards.n_tokens / max(shards.text_bytes, 1)
    return Evaluation(loss, perplexity(loss), loss / math.log(2) * tokens_per_byte, int(count))


class Totals:
    """Sums over batches, in float64 on the device, so that no batch is waited for.

    >>> totals = Totals()
    >>> for loss in (torch.tensor(0.5), torch.tensor(2.0)):
    ...     totals.add(loss, torch.tensor(3))
    >>> totals.read()
    [2.5, 6.0]
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def add(self, *values: Tensor) -> None:
        """Add to each sum the value, a scalar, that belongs to it."""
        new = torch.stack([value.double() for value in values])
        self.sums = new if self.sums is None else self.sums + new

    def read(self, sharers: Sharers = UNSHARED) -> list[float]:
        """The sums over the batches of all, of at least one; this waits for the device."""
        told = sharers.gather([] if self.sums is None else self.sums.tolist())
        columns = zip(*(sums for sums in told if sums), strict=True)
        return [sum(column) for column in columns]


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off and no gradients; afterwards the training mode is as before."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def perplexity(loss: float) -> float:
    """e^loss, and e^700 for what a float does not hold.

    >>> round(perplexity(math.log(50)), 6)
    50.0
    """
    return math.exp(min(loss, 700.0))


def first_targets(batches: Iterable[Batch], n: int | None) -> Iterator[Batch]:
    """Batches up to the one with the `n`-th target, in which no later one counts; None: all."""
    for batch in batches:
        if n is not None:
            keep_first(batch.targets, n)
            n -= int((batch.targets != IGNORED).sum())
        yield batch
        if n == 0:
            return


def first_batches(batches: Iterable[Batch], n: int | None) -> Iterator[Batch]:
    """Batches up to the one with the `n`-th real token; None: all."""
    for batch in batches:
        yield batch
        if n is not None:
            n -= batch.inputs.numel() if batch.mask is None else int(batch.mask.sum())
            if n <= 0:
                return


def keep_first(targets: Int[Tensor, "B T"], n: int) -> None:
    """Let only the first `n` targets of a batch count, in reading order; the others become -100."""
    counted = (targets != IGNORED).flatten().cumsum(0).reshape(targets.shape)
    targets[counted > n] = IGNORED
