"""How good a model is on text it has not seen.

    loss           = total of -log p(token) over the split / number of predicted tokens     (nats per token)
    perplexity     = exp(loss)
    bits per byte  = loss / ln 2 * tokens of the text / UTF-8 bytes of the text

Bits per byte do not depend on the vocabulary, so they compare models with different tokenizers, and with file
compressors: a text of n bytes costs n * bits_per_byte / 8 bytes to store with the model at hand.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.model.experts import Routing
from clearhead.model.transformer import Transformer
from clearhead.text.batches import IGNORED, Batch, evaluation_batches
from clearhead.text.shards import Shards
from clearhead.training.objectives import token_loss

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
) -> Evaluation:
    """Total loss over total tokens of a split, every token predicted once.

    Windows of `context_length` tokens (the model's max_len if None) start every `stride` tokens (the whole
    window if None): a smaller stride gives each token more context and takes longer. `max_tokens`: only the
    first so many; in bits per byte the others count as much as these, like those that `document_mask` leaves
    out (the first of a document). How many rows go into a batch changes nothing. The model's training mode is
    kept.
    """
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens={max_tokens} must be at least 1, or None for all of the split")
    context_length = model.config.max_len if context_length is None else context_length
    device = next(model.parameters()).device
    totals, count = Totals(), 0
    with evaluating(model):
        for batch in evaluation_batches(shards, batch_size, context_length, document_mask, stride):
            if max_tokens is not None:
                keep_first(batch.targets, max_tokens - count)
            count += int((batch.targets != IGNORED).sum())
            batch = batch.to(device)
            totals.add(token_loss(outputs_of(model, batch), batch.targets)[0])
            if max_tokens is not None and count >= max_tokens:
                break
    if count == 0:
        raise ValueError(f"a split of {shards.n_tokens} tokens has nothing to predict; it needs at least 2")
    loss = totals.read()[0] / count
    tokens_per_byte = shards.n_tokens / max(shards.text_bytes, 1)
    return Evaluation(loss, perplexity(loss), loss / math.log(2) * tokens_per_byte, count)


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

    def read(self) -> list[float]:
        """The sums, of at least one batch; this waits for the device."""
        assert self.sums is not None, "a split has at least one batch"
        return self.sums.tolist()


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


def keep_first(targets: Int[Tensor, "B T"], n: int) -> None:
    """Let only the first `n` targets of a batch count, in reading order; the others become -100."""
    counted = (targets != IGNORED).flatten().cumsum(0).reshape(targets.shape)
    targets[counted > n] = IGNORED
