"""How good a model is on text it has not seen.

    loss           = total of -log p(token) over the split / number of predicted tokens     (nats per token)
    perplexity     = exp(loss)
    bits per byte  = total of -log2 p(token) / UTF-8 bytes of the text

Bits per byte do not depend on the vocabulary, so they compare models with different tokenizers, and with file
compressors: a text of n bytes costs n * bits_per_byte / 8 bytes to store with the model at hand.
"""

import math
from dataclasses import dataclass

import torch

from clearhead.model.transformer import Transformer
from clearhead.text.batches import evaluation_batches
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
) -> Evaluation:
    """Total loss over total tokens of a split, every token predicted once.

    Windows of `context_length` tokens (the model's max_len if None) start every `stride` tokens (the whole
    window if None): a smaller stride gives each token more context and takes longer. `max_tokens`: only the
    first so many; the bits per byte then assume that the rest has as many bytes per token. The model's
    training mode is kept.
    """
    context_length = model.config.max_len if context_length is None else context_length
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    total, count = 0.0, 0
    try:
        for batch in evaluation_batches(shards, batch_size, context_length, stride=stride):
            loss, n = token_loss(model(batch.inputs.to(device)), batch.targets.to(device))
            total, count = total + loss.item(), count + int(n)
            if max_tokens is not None and count >= max_tokens:
                break
    finally:
        model.train(was_training)
    if count == 0:
        raise ValueError(f"a split of {shards.n_tokens} tokens has nothing to predict; it needs at least 2")
    loss = total / count
    tokens_per_byte = (shards.n_tokens - 1) / max(shards.text_bytes, 1)
    return Evaluation(loss, math.exp(min(loss, 700.0)), loss / math.log(2) * tokens_per_byte, count)
