"""How alike two texts or two words are: sentence vectors, distances, search, neighbours and analogies.

    cosine     a . b / (|a| |b|)     1 for the same direction, whatever the lengths
    dot        a . b
    euclidean  sqrt(sum (a - b)^2)   the straight way
    manhattan  sum |a - b|           along the axes
    chebyshev  max |a - b|           the largest of them

In three lines:

    model, tokenizer = clearhead.load("all-MiniLM-L6-v2")
    vectors = embed(model, tokenizer, ["A man eats.", "Someone is eating.", "The sky is blue."])
    similarity(vectors, vectors)

Source of sentence vectors: Reimers and Gurevych 2019 (arXiv:1908.10084); of analogies: Mikolov et al. 2013
(arXiv:1301.3781).
"""

import re
from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.model.heads import POOLS
from clearhead.model.transformer import Transformer
from clearhead.text.foreign import AnyTokenizer
from clearhead.text.usage import Pool

Kind = Literal["cosine", "dot", "euclidean", "manhattan", "chebyshev"]


class Measure(NamedTuple):
    """A function of (N, D) and (M, D) to (N, M), and whether nearer means larger."""

    between: Callable[[Tensor, Tensor], Tensor]
    larger_is_nearer: bool


def _distance(order: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda one, other: torch.cdist(one, other, p=order, compute_mode="donot_use_mm_for_euclid_dist")


MEASURES: dict[str, Measure] = {
    "cosine": Measure(lambda one, other: F.normalize(one, dim=-1) @ F.normalize(other, dim=-1).T, True),
    "dot": Measure(lambda one, other: one @ other.T, True),
    "euclidean": Measure(_distance(2.0), False),
    "manhattan": Measure(_distance(1.0), False),
    "chebyshev": Measure(_distance(float("inf")), False),
}


def similarity(
    one: Float[Tensor, "N D"], other: Float[Tensor, "M D"], kind: str = "cosine"
) -> Float[Tensor, "N M"]:
    """The measure `kind` between every row of `one` and every row of `other`, in float32.

    For cosine and dot the larger is the nearer, for the three distances the smaller. An unknown measure is a
    ValueError that lists the known ones.

    >>> a, b = torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 0.0], [3.0, 0.0]])
    >>> [similarity(a, b, kind).tolist() for kind in ("euclidean", "manhattan", "chebyshev")]
    [[[5.0, 4.0]], [[7.0, 4.0]], [[4.0, 4.0]]]
    """
    return find_measure(kind).between(one.float(), other.float())


def find_measure(kind: str) -> Measure:
    """The measure of this name; an unknown one is a ValueError that lists the known ones."""
    if kind not in MEASURES:
        raise ValueError(f"unknown measure {kind!r:.60}; known: {', '.join(MEASURES)}")
    return MEASURES[kind]


# -------------------------------------------------------------------------------------------------- sentences


def embed(
    model: Transformer,
    tokenizer: AnyTokenizer,
    texts: Sequence[str],
    *,
    pool: Pool | None = None,
    normalise: bool | None = None,
    max_len: int | None = None,
    batch_size: int = 32,
) -> Float[Tensor, "N D"]:
    """The vector of each text, from a model's last hidden states.

    pool: which positions stand for a text: their mean, the first, or the last. normalise: give the vectors
        length 1. None: what the model's folder says; if it says nothing, the mean, and no.
    max_len: longer texts are cut; None: what the folder says, else the model's own limit.

    What a text gets does not depend on the texts beside it. A text without tokens is a ValueError.
    """
    if isinstance(texts, str):
        raise TypeError(f"texts is a list of texts; did you mean [{texts!r:.60}]?")
    named = tokenizer.usage.pooling() or ("mean", False)
    pool, normalise = pool or named[0], named[1] if normalise is None else normalise
    if pool not in POOLS:
        raise ValueError(f"unknown pool {pool!r:.60}; known: {', '.join(POOLS)}")
    limit = min(max_len or tokenizer.usage.longest_sentence() or model.config.max_len, model.config.max_len)
    rows = [tokenizer.encode_sentence(text, specials="text", truncate=limit) for text in texts]
    for number, row in enumerate(rows):
        if not row or not texts[number].strip():
            raise ValueError(f"text {number + 1} is empty: there is nothing to make a vector of")
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]))  # little padding in a batch
    device = model.embed.weight.device
    found = torch.empty(len(rows), model.config.d_model)
    for start in range(0, len(rows), batch_size):
        chosen = order[start : start + batch_size]
        tokens, mask = pad_right([rows[index] for index in chosen], device)
        with torch.inference_mode():
            vectors = POOLS[pool](hidden_states(model, tokens, mask), mask)
        found[chosen] = vectors.float().cpu()
    return F.normalize(found, dim=-1) if normalise else found


def hidden_states(
    model: Transformer, tokens: Int[Tensor, "B T"], mask: Bool[Tensor, "B T"]
) -> Float[Tensor, "B T D"]:
    """The last hidden states of a model without its head; of an encoder-decoder, the encoder's."""
    stack = model.decoder if model.config.shape == "decoder" else model.encoder
    table = model.embed if model.config.source_vocab_size is None else model.source_embed
    return stack(table(tokens) * model.config.embed_scale, mask=mask)


def pad_right(rows: list[list[int]], device: torch.device) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Rows of ids as one tensor, short ones filled up with 0, and where the real tokens are."""
    width = max(map(len, rows))
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
        mask[number, : len(row)] = True
    return tokens.to(device), mask.to(device)


def nearest(
    query: Float[Tensor, " D"],
    vectors: Float[Tensor, "N D"],
    *,
    kind: str = "cosine",
    top_k: int = 10,
    without: Collection[int] = (),
) -> list[tuple[int, float]]:
    """The rows of `vectors` nearest to `query`, nearest first, each with its measure; `without` these rows.

    >>> nearest(torch.tensor([1.0, 0.0]), torch.tensor([[0.0, 2.0], [2.0, 0.0]]), top_k=1)
    [(1, 1.0)]
    """
    if top_k < 1:
        raise ValueError(f"top_k={top_k} must be at least 1")
    measure = find_measure(kind)
    values = measure.between(query.float()[None], vectors.float())[0]
    order = values.argsort(descending=measure.larger_is_nearer, stable=True).tolist()
    kept = [row for row in order if row not in without][:top_k]
    return [(row, values[row].item()) for row in kept]


# ------------------------------------------------------------------------------------------------------ words


def neighbours(
    model: Transformer,
    tokenizer: AnyTokenizer,
    expression: str,
    *,
    kind: str = "cosine",
    top_k: int = 10,
) -> list[tuple[str, float]]:
    """The tokens whose rows of the embedding are nearest to a word, or to a sum such as "king - man + woman".

    The words of the expression are left out of the answer. Each must be a token of its own; one that is cut
    is a ValueError that shows its pieces.
    """
    terms = read_expression(expression)
    ids = [word_id(tokenizer, word) for _, word in terms]
    table = model.embed.weight.detach()
    for (_, word), token in zip(terms, ids, strict=True):
        if token >= len(table):
            raise ValueError(f"{word!r} is token {token}; the embedding has {len(table)} rows")
    point = sum(
        (sign * table[token].float() for (sign, _), token in zip(terms, ids, strict=True)),
        torch.zeros(table.shape[1], device=table.device),
    )
    # rows that no token uses fill up a table
    unused = {row for row in range(len(table)) if not has_token(tokenizer, row)}
    found = nearest(point, table, kind=kind, top_k=top_k, without=unused | set(ids))
    return [(tokenizer.decode([token]), value) for token, value in found]


def read_expression(expression: str) -> list[tuple[int, str]]:
    """The words of a sum with their signs.

    >>> read_expression("king - man + woman")
    [(1, 'king'), (-1, 'man'), (1, 'woman')]
    """
    parts = re.split(r"\s+([+-])\s+", f" + {expression.strip()}")
    terms = [(1 if sign == "+" else -1, word) for sign, word in zip(parts[1::2], parts[2::2], strict=True)]
    if not expression.strip() or any(not word for _, word in terms):
        raise ValueError(f"{expression!r:.60} is no word and no sum of words such as 'king - man + woman'")
    return terms


def word_id(tokenizer: AnyTokenizer, word: str) -> int:
    """The id of a word that is one token, best as it stands inside a text, after a space."""
    for text in (f" {word}", word):
        ids = tokenizer.encode(text, specials="token")
        if len(ids) == 1:
            return ids[0]
    pieces = " ".join(repr(tokenizer.decode([token])) for token in tokenizer.encode(word))
    spaces = "; put a space on both sides of + and -" if re.search(r"\s[+-]|[+-]\s", f" {word} ") else ""
    raise ValueError(f"{word!r:.60} is no single token here, but {pieces:.200}{spaces}")


def has_token(tokenizer: AnyTokenizer, token_id: int) -> bool:
    """Whether an id stands for a token."""
    try:
        tokenizer.token_bytes(token_id)
    except ValueError:
        return False
    return True
