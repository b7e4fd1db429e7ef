"""What the model has before it: the latest tokens of a batch of rows, and their keys and values.

Prompts of different lengths are padded on the left, so that the last column is the last token of every row
and one step appends one column:

    . . 5 6 7 | 8        `.` padding: masked, and not counted in the positions
    1 2 3 4 5 | 6

What an encoder-decoder reads is encoded once; its rows are what the decoder has said so far.

The cache has a fixed size. When it is full, rows that are longer than the model's `max_len` forget their
older half and all are read anew from position 0.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from clearhead.model.transformer import Transformer

CACHE_BLOCK = 128  # cache sizes are multiples of this: a compiled step is traced once per size


class Window:
    """What a batch of rows shows the model: their latest tokens, and the cache of their keys and values.

    A row longer than the model's `max_len` keeps its last half of that. The rows are padded on the left, so
    that the last column is the last token of every row. `sources`: what the encoder of an encoder-decoder
    reads.
    """

    def __init__(
        self,
        model: Transformer,
        rows: list[list[int]],
        max_new_tokens: int,
        pad_id: int,
        sources: list[list[int]] | None = None,
    ) -> None:
        self.model, self.pad_id = model, pad_id
        self.device = model.embed.weight.device
        self.limit = model.config.max_len
        self.rows = [self._latest(row) for row in rows]
        needed = max(map(len, self.rows)) + max_new_tokens
        self.capacity = min(self.limit, -(-needed // CACHE_BLOCK) * CACHE_BLOCK)
        self.filled = 0  # positions of the cache in use, padding included
        self.modules = list(model.modules())
        self.sources, self.memory = sources, {}

    def read(self) -> Float[Tensor, "B V"]:
        """Read all the rows into an empty cache; the logits of the token that follows each."""
        tokens, real = pad_left(self.rows, self.pad_id, self.device)
        if self.sources is not None and not self.memory:
            with evaluating(self.modules):
                sources = pad_left(self.sources, 0, self.device)  # an id of any vocabulary
                self.memory = {"memory": self.model.encode(*sources)}
        self.cache = self.model.new_cache(len(self.rows), self.capacity)
        self.real = torch.ones(len(self.rows), 1, dtype=torch.bool, device=self.device)  # columns to come
        self.filled = 0
        _let_length_vary(tokens, real)
        return self._forward(tokens, real)

    def extend(self, tokens: Int[Tensor, " B"], ended: list[bool]) -> Float[Tensor, "B V"]:
        """Read one more token of every row; the logits of the next.

        In a full window the rows that are too long slide, and all are read anew. Rows that have `ended` only
        need to be there.
        """
        for row, token in zip(self.rows, tokens.tolist(), strict=True):
            row.append(token)
        if self.filled < self.capacity:
            return self._forward(tokens[:, None], self.real)
        self.rows = [
            row[-1:] if over else self._latest(row) for row, over in zip(self.rows, ended, strict=True)
        ]
        return self.read()

    def _latest(self, row: list[int]) -> list[int]:
        return list(row) if len(row) <= self.limit else row[-kept_tokens(self.limit) :]

    def _forward(self, tokens: Int[Tensor, "B T"], real: Bool[Tensor, "B T"]) -> Float[Tensor, "B V"]:
        with evaluating(self.modules):
            logits = self.model(tokens, mask=real, cache=self.cache, **self.memory)
        self.filled += tokens.shape[1]
        return logits[:, -1]


def pad_left(
    rows: list[list[int]], pad_id: int, device: torch.device | str | None = None
) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """The rows as one tensor, padded on the left, and where it holds real tokens.

    >>> pad_left([[5], [6, 7]], pad_id=0)[0]
    tensor([[0, 5],
            [6, 7]])
    """
    width = max(map(len, rows))
    tokens = [[pad_id] * (width - len(row)) + row for row in rows]
    real = [[False] * (width - len(row)) + [True] * len(row) for row in rows]
    return torch.tensor(tokens, device=device), torch.tensor(real, device=device)


def kept_tokens(max_len: int) -> int:
    """How many tokens of a row that is too long stay: half a window, at least one."""
    return max(1, max_len // 2)


@contextmanager
def evaluating(modules: list[nn.Module]) -> Iterator[None]:
    """No dropout inside the block; afterwards every module is back in its own mode."""
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _let_length_vary(*prompts: Tensor) -> None:
    """Tell a compiled model that prompts differ in length, so that one graph reads them all."""
    # whoever compiled the model has loaded this module; loading it takes seconds
    if "torch._dynamo" in sys.modules:
        for prompt in prompts:
            if prompt.shape[1] > 1:  # a prompt of one token is read by the graph of a step
                torch._dynamo.maybe_mark_dynamic(prompt, 1)
