"""What a model with a head says of texts that are new to it: classes, tags, answers, translations.

    sequence head    softmax of the logits: one class;  sigmoid: whether each label applies;  or a number
    token head       softmax at the first token of each word: its tag
    span head        the piece of a text whose start and end score best, over all windows of it
    lm, two stacks   the likeliest next token, one after the other, until the model ends the text

Works for runs and for published models alike; texts are encoded as they were in training.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.generation.decode import generate
from clearhead.model.transformer import Transformer
from clearhead.published.mapping import names_of_labels
from clearhead.published.similarity import pad_right
from clearhead.published.weights import Origin
from clearhead.text.encode_examples import (
    Encoded,
    encode_labelled,
    encode_pairs,
    encode_questions,
    encode_tagged,
    first_tokens,
)
from clearhead.text.examples import Labelled, Pair, Question, Tagged
from clearhead.text.foreign import AnyTokenizer
from clearhead.text.frame import end_of_text, first_of_target
from clearhead.training.example_tasks import best_piece
from clearhead.training.run_folder import RunFolder

Kind = Literal["class", "labels", "number"]


@dataclass(frozen=True)
class Reader:
    """A model that says something of texts, with what its outputs are called."""

    model: Transformer
    tokenizer: AnyTokenizer
    labels: list[str]
    kind: Kind = "class"  # of a sequence head: what its outputs mean
    start_token: str | None = None  # of a translation that a run has learned
    published: bool = False  # a published model, not a run: it says itself how texts begin and end


class Tag(NamedTuple):
    """A word, what it is called, how sure that is; a word that the model never saw has no tag."""

    word: str
    tag: str | None
    probability: float


class Answer(NamedTuple):
    """A piece of the context, its first and one behind its last character, and how sure that is.

    An empty text at (0, 0): the model finds no answer there.
    """

    text: str
    start: int
    end: int
    probability: float


def make_reader(place: str | Path, model: Transformer, tokenizer: AnyTokenizer) -> Reader:
    """The model of a place with the names of its labels, from its run or its config.json."""
    run, origin = RunFolder(place), model.origin
    n_labels = model.config.n_labels
    kinds: dict[str, Kind] = {"several_labels": "labels", "regression": "number"}
    if run.exists():
        names = run.labels() or []
        kind: Kind = kinds.get(run.recipe().train.objective, "class")
    elif isinstance(origin, Origin):
        names = names_of_labels(origin.settings)
        several = {"multi_label_classification": "several_labels", "regression": "regression"}
        named = several.get(str(origin.settings.get("problem_type")), "classes")
        kind = kinds.get("several_labels" if n_labels == 1 and named == "classes" else named, "class")
    else:
        names, kind = [], "class"
    if len(names) != n_labels:
        names = [f"LABEL_{number}" for number in range(n_labels)]
    start_token = run.recipe().data.start_token if run.exists() else None
    return Reader(model, tokenizer, names, kind, start_token, origin is not None and not run.exists())


# ---------------------------------------------------------------------------------------------------- texts


def classify(
    reader: Reader, texts: Sequence[str], seconds: Sequence[str] | None = None, batch_size: int = 32
) -> list[dict[str, float]]:
    """The probability of each label for each text, the likeliest first; of a regression its number.

    `seconds`: for models that look at two texts, the second of each pair.
    """
    others = [None] * len(texts) if seconds is None else seconds
    examples = [Labelled(text, second=other) for text, other in zip(texts, others, strict=True)]
    rows, _ = encode_labelled(examples, reader.tokenizer, reader.model.config.max_len)
    said: list[dict[str, float]] = []
    for logits in _outputs(reader.model, rows, batch_size):
        if reader.kind == "number":
            said.append({"value": logits[0].item()})
            continue
        values = logits.sigmoid() if reader.kind == "labels" else logits.softmax(-1)
        order = values.argsort(descending=True, stable=True).tolist()
        said.append({reader.labels[number]: values[number].item() for number in order})
    return said


def label(reader: Reader, sentences: Sequence[Sequence[str]], batch_size: int = 32) -> list[list[Tag]]:
    """The tag of every word; words that do not fit into the model's max_len have none."""
    examples = [Tagged(tuple(words)) for words in sentences]
    rows, _ = encode_tagged(examples, reader.tokenizer, reader.model.config.max_len)
    said = []
    for words, row, logits in zip(sentences, rows, _outputs(reader.model, rows, batch_size), strict=True):
        values, tags = logits.softmax(-1).max(-1)
        places = first_tokens(words, row.offsets or [])
        said.append(
            [
                Tag(word, None, 0.0)
                if place is None
                else Tag(word, reader.labels[int(tags[place])], values[place].item())
                for word, place in zip(words, places, strict=True)
            ]
        )
    return said


def answer(
    reader: Reader, questions: Sequence[Question], may_be_none: bool = False, batch_size: int = 16
) -> list[Answer]:
    """The piece of each question's context that answers it.

    `may_be_none`: an answer is empty where the model scores "not here" above every piece. The probability is
    that of its start times that of its end, in the window where it was found.
    """
    rows, _ = encode_questions(questions, reader.tokenizer, reader.model.config.max_len)
    best: list[tuple[float, Answer]] = [(-math.inf, Answer("", 0, 0, 0.0)) for _ in questions]
    nothing = [(math.inf, 0.0) for _ in questions]
    for row, logits in zip(rows, _outputs(reader.model, rows, batch_size), strict=True):
        found = best_piece(logits, row.offsets or [])
        total = logits.logsumexp(0).sum().item()
        if found.score > best[row.example][0]:
            context = questions[row.example].context
            start, end = without_blanks(context, found.start, found.end)
            sure = math.exp(found.score - total)
            best[row.example] = found.score, Answer(context[start:end], start, end, sure)
        nothing[row.example] = min(nothing[row.example], (found.nothing, math.exp(found.nothing - total)))
    return [
        Answer("", 0, 0, none[1]) if may_be_none and none[0] > score else piece
        for (score, piece), none in zip(best, nothing, strict=True)
    ]


def without_blanks(text: str, start: int, end: int) -> tuple[int, int]:
    """The piece [start, end) without white space at its ends: a token may begin with a blank.

    >>> without_blanks("in Cairo now", 2, 8)
    (3, 8)
    """
    piece = text[start:end]
    words = piece.strip()
    if not words:
        return start, end
    start += len(piece) - len(piece.lstrip())
    return start, start + len(words)


def translate(reader: Reader, texts: Sequence[str], max_new_tokens: int | None = None) -> list[str]:
    """What an encoder-decoder says of each text, the likeliest token at every step.

    `max_new_tokens`: at most so many; None: twice the text's tokens and 16, as far as the model goes.
    """
    model, tokenizer, length = reader.model, reader.tokenizer, reader.model.config.max_len
    special = set(tokenizer.special_tokens.values())
    marks: dict[str, Any] = {}  # with which ids it begins and ends; a published model says so itself
    if not reader.published:
        start = first_of_target(tokenizer, reader.start_token)
        marks = {"start_id": start, "eos_id": end_of_text(tokenizer)}
    said = []
    for text in texts:
        if reader.published:
            source = tokenizer.encode_sentence(text)
        else:
            source = encode_pairs([Pair(text, "")], tokenizer, length, length)[0][0].source or []
        room = length - 1
        longest = min(2 * len(source) + 16, room) if max_new_tokens is None else max_new_tokens
        ids = generate(model, source, tokenizer=tokenizer, max_new_tokens=longest, **marks)
        said.append(tokenizer.decode([token for token in ids if token not in special]).strip())
    return said


def _outputs(model: Transformer, rows: Sequence[Encoded], batch_size: int) -> Iterator[Float[Tensor, "..."]]:
    """What the head says of each row, without its padding, in float32 on the CPU; in the rows' order."""
    device = model.embed.weight.device
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        tokens, mask = pad_right([row.inputs for row in batch], device)
        types = None
        if model.config.n_token_types and any(row.token_types for row in batch):
            types, _ = pad_right([row.token_types or [0] * len(row.inputs) for row in batch], device)
        with torch.inference_mode():
            outputs = model(tokens, mask=mask, types=types).float().cpu()
        per_token = model.config.head in ("token", "span")
        for row, said in zip(batch, outputs, strict=True):
            yield said[: len(row.inputs)] if per_token else said
