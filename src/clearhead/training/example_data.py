"""From a recipe's [data] to batches of examples: read, split, encoded, each label given its number.

What is measured on is a source of its own (`data.validation`), or a part of `data.source` that is chosen by
the content of the examples. The tokenizer and the labels' numbers come from the training examples alone.
Files are read and checked at every start; what they become is encoded once, and kept (kept_rows.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from clearhead.text.counting import Progress
from clearhead.text.encode_examples import (
    Encoded,
    EncodingReport,
    Rows,
    encode_alike,
    encode_chats,
    encode_labelled,
    encode_pairs,
    encode_questions,
    encode_tagged,
    with_chat_template,
)
from clearhead.text.example_files import (
    read_chats,
    read_labelled,
    read_pairs,
    read_questions,
    read_tagged,
)
from clearhead.text.examples import (
    Chat,
    Example,
    Labelled,
    Pair,
    Question,
    Tagged,
    check_labels,
    label_names,
    split_examples,
)
from clearhead.text.foreign import AnyTokenizer
from clearhead.text.frame import first_of_target, padding
from clearhead.text.padded import PaddedBatches
from clearhead.training.data import find_tokenizer
from clearhead.training.demands import Objective
from clearhead.training.kept_rows import find_or_encode, key_of
from clearhead.training.recipe import DataConfig, Recipe
from clearhead.training.run_folder import RunFolder

Note = Callable[[str], object]


@dataclass(frozen=True)
class ExampleData:
    """Examples of both splits as batches, and what is needed to understand them."""

    tokenizer: AnyTokenizer
    train: PaddedBatches
    validation: PaddedBatches
    validation_rows: Sequence[Encoded]
    validation_examples: Sequence[Any]
    labels: list[str]
    """The labels' names by their numbers; none where the objective has no labels."""
    fingerprint: str
    """Names the very examples that are learned from, as the model reads them."""


def prepare_examples(
    recipe: Recipe, run: RunFolder, note: Callable[[str], None], progress: Progress | None = None
) -> ExampleData:
    """The examples of a recipe, ready to be learned.

    ValueError, FileNotFoundError: a file that is not there or not right, labels that do not fit, a split
    without examples.
    """
    objective, data, settings = recipe.train.objective, recipe.data, recipe.train
    train, validation = read_splits(objective, data, note)
    names = find_labels(objective, train, validation)
    texts = (text for example in train for text in texts_of(example))
    tokenizer = find_tokenizer(data, texts, data.source, run, note, progress)
    if objective == "next_token":
        tokenizer = with_chat_template(tokenizer)
    kept = []
    for split, examples in (("learn from", train), ("validate", validation)):
        make = partial(encode, recipe, examples, tokenizer, names, split)
        found = find_or_encode(run, key_of(examples, tokenizer, how_encoded(recipe, names)), make, note)
        where = "" if found.found is None else f"; encoded before, in {found.found.parents[2]}"
        note(f"to {split}: {found.report.summary()}{where}")
        kept.append(found)
    fill = padding(tokenizer)
    step = settings.batch_size * settings.accumulation  # their order is the step's, however it is cut
    return ExampleData(
        tokenizer,
        PaddedBatches(kept[0].rows, step, settings.seed, fill),
        PaddedBatches(kept[1].rows, settings.batch_size, settings.seed, fill),
        kept[1].rows,
        validation,
        names,
        kept[0].fingerprint,
    )


def read_splits(objective: Objective, data: DataConfig, note: Note) -> tuple[list[Any], list[Any]]:
    """The examples to learn from and those to measure on."""
    examples = read(objective, data, data.source, data.target, note)
    if data.validation is None:
        return split_examples(examples)
    return examples, read(objective, data, data.validation, data.validation_target, note)


def read(objective: Objective, data: DataConfig, source: str, target: str | None, note: Note) -> list[Any]:
    """The examples that an objective learns from, out of the files at `source`."""
    if objective in ("translation", "contrastive"):
        if data.target_field is None and data.field != DataConfig.field:
            raise ValueError(
                f"data.field={data.field!r} names one side of the pairs; give data.target_field, too"
            )
        fields = None if data.target_field is None else (data.field, data.target_field)
        return list(read_pairs(source, target, fields=fields, note=note))
    if objective in ("classes", "several_labels", "regression"):
        numbers = objective == "regression"
        return list(
            read_labelled(
                source, text=data.field, label=data.label_field, second=data.second_field, numbers=numbers
            )
        )
    if objective == "token_labels":
        return list(read_tagged(source, word=data.word_column, tag=data.tag_column))
    if objective == "span":
        return list(read_questions(source))
    return list(read_chats(source, field="messages" if data.field == DataConfig.field else data.field))


def find_labels(objective: Objective, train: Sequence[Any], validation: Sequence[Any]) -> list[str]:
    """The names of the labels by their numbers. ValueError for a label that only validation has, and for
    labels of another kind.
    """
    if objective not in ("classes", "several_labels", "token_labels"):
        return []
    if objective != "token_labels":
        several = objective == "several_labels"
        for example in (*train, *validation):
            if isinstance(example.label, tuple) != several:
                is_list, other = ("no list", "classes") if several else ("a list", "several_labels")
                raise ValueError(
                    f"{example.place}: the label is {is_list}, {example.label!r:.60}; "
                    f"train.objective={other!r} learns that"
                )
    names = label_names(train)
    check_labels(validation, names)
    return names


def how_encoded(recipe: Recipe, names: list[str]) -> list[Any]:
    """The settings that decide what an example becomes, beside the tokenizer."""
    settings = recipe.train
    typed = recipe.model.n_token_types > 1
    return [settings.objective, settings.context_length, recipe.data.start_token, names, typed]


def encode(
    recipe: Recipe, examples: Sequence[Any], tokenizer: AnyTokenizer, names: list[str], split: str
) -> tuple[list[Encoded], EncodingReport]:
    """Examples as rows of ids of at most `context_length` tokens, and a report of it. ValueError, which says
    what the `split` is for: nothing is left of them.
    """
    rows, report = _encode(recipe, examples, tokenizer, names)
    if not rows:
        raise ValueError(
            f"nothing is left to {split} of {recipe.data.source}: {report.summary()}; "
            f"raise train.context_length={recipe.train.context_length}"
        )
    return rows if recipe.model.n_token_types > 1 else without_types(rows), report


def _encode(recipe: Recipe, examples: Sequence[Any], tokenizer: AnyTokenizer, names: list[str]) -> Rows:
    objective, max_len = recipe.train.objective, recipe.train.context_length
    if objective == "translation":
        start = first_of_target(tokenizer, recipe.data.start_token)
        return encode_pairs(examples, tokenizer, max_len, max_len, start=start)
    if objective == "contrastive":
        return encode_alike(examples, tokenizer, max_len)
    if objective == "token_labels":
        return encode_tagged(examples, tokenizer, max_len, names)
    if objective == "span":
        return encode_questions(examples, tokenizer, max_len)
    if objective == "next_token":
        return encode_chats(examples, tokenizer, max_len)
    return encode_labelled(examples, tokenizer, max_len, names or None)


def texts_of(example: Example) -> list[str]:
    """The texts of an example, from which a vocabulary is learned."""
    if isinstance(example, Pair):
        return [example.source, example.target]
    if isinstance(example, Labelled):
        return [example.text] if example.second is None else [example.text, example.second]
    if isinstance(example, Tagged):
        return [" ".join(example.words)]
    if isinstance(example, Question):
        return [example.context, example.question]
    assert isinstance(example, Chat)
    return [str(message["content"]) for message in example.messages]


def without_types(rows: list[Encoded]) -> list[Encoded]:
    """The rows for a model that does not tell the first text from the second by a type."""
    return [row if row.token_types is None else replace(row, token_types=None) for row in rows]
