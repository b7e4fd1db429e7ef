"""How good a model is on text it has not seen.

    loss           = total of -log p(token) over the split / number of predicted tokens     (nats per token)
    perplexity     = exp(loss)
    bits per byte  = loss / ln 2 * tokens of the text / UTF-8 bytes of the text

Bits per byte do not depend on the vocabulary, so they compare models with different tokenizers, and with file
compressors: a text of n bytes costs n * bits_per_byte / 8 bytes to store with the model at hand.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from clearhead.model.transformer import Transformer
from clearhead.text.batches import IGNORED, evaluation_batches
from clearhead.text.shards import Shards
from clearhead.training.objectives import token_loss


@dataclass(frozen=True)
class Evaluation:
    """The result of one look at a split: loss in nats per token, and what it means per byte of text."""

    loss: float
    perplexity: float
    bits_per_byte: float
    n_tokens: int


@torch.no_grad()
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
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    try:
        for batch in evaluation_batches(shards, batch_size, context_length, document_mask, stride):
            if max_tokens is not None:
                keep_first(batch.targets, max_tokens - count)
            documents = None if batch.documents is None else batch.documents.to(device)
            logits = model(batch.inputs.to(device), documents=documents)
            loss, n = token_loss(logits, batch.targets.to(device))
            total, count = total + loss.item(), count + int(n)
            if max_tokens is not None and count >= max_tokens:
                break
    finally:
        model.train(was_training)
    if count == 0:
        raise ValueError(f"a split of {shards.n_tokens} tokens has nothing to predict; it needs at least 2")
    loss = total / count
    tokens_per_byte = shards.n_tokens / max(shards.text_bytes, 1)
    return Evaluation(loss, math.exp(min(loss, 700.0)), loss / math.log(2) * tokens_per_byte, count)


def keep_first(targets: Int[Tensor, "B T"], n: int) -> None:
    """Let only the first `n` targets of a batch count, in reading order; the others become -100."""
    counted = (targets != IGNORED).flatten().cumsum(0).reshape(targets.shape)
    targets[counted > n] = IGNORED
