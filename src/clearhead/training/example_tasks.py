"""What can be learned from examples of different lengths, each objective a class.

    class          the model says             a target is                         also measured
    Translation    logits of the next token   each token of the second text       perplexity, BLEU, chrF
    Answers        logits of the next token   each token of a chat's answers      perplexity, accuracy
    Classes        a logit per class          the text's class                    accuracy, F1 (macro)
    SeveralLabels  a logit per label          whether each label applies          accuracy, F1 (micro)
    Regression     a number                   the text's number                   mean error, correlation
    TokenLabels    logits of each token       the tag of each word                accuracy, F1 of entities
    Spans          logits of start and end    first and last token of the answer  exact match, F1
    Contrastive    a vector of each text      the text's own counterpart          accuracy

The validation loss is that of the objective without label smoothing, a total over a total.
"""

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.generation.decode import Decoding, read_prompts
from clearhead.generation.sample import Sampling
from clearhead.model.experts import Routing
from clearhead.model.transformer import Transformer
from clearhead.text.batches import IGNORED, Batch
from clearhead.text.examples import Pair, Question
from clearhead.text.frame import end_of_text
from clearhead.training.evaluate import (
    UNSHARED,
    Forward,
    Sharers,
    Totals,
    evaluating,
    first_batches,
    outputs_of,
    perplexity,
)
from clearhead.training.example_data import ExampleData
from clearhead.training.objectives import (
    SumAndCount,
    contrastive_loss,
    label_loss,
    real_spans,
    span_loss,
    squared_error,
    token_loss,
)
from clearhead.training.recipe import TrainConfig
from clearhead.training.scores import accuracy, bleu, chrf, entity_f1, exact_match, f1, token_f1


class ExampleTask(ABC):
    """A task whose batches are padded examples. What differs is `score`, and what else is measured."""

    lengths_vary = True

    def __init__(self, data: ExampleData, settings: TrainConfig) -> None:
        self.data, self.settings = data, settings
        self.tokenizer, self.fingerprint, self.labels = data.tokenizer, data.fingerprint, data.labels
        rows = min(256, len(data.train))  # so many tell what the others are like, if they lie all over
        some = data.train.collate([number * len(data.train) // rows for number in range(rows)])
        mean = self.n_targets(self.shown(some)) / rows
        self.targets_per_batch = max(1, round(mean * settings.batch_size))

    def batch(self, index: int, part: int = 0, parts: int = 1) -> Batch:
        """Batch number `index` of the run, or of its rows the `part`-th of `parts` equal shares."""
        rows = self.settings.batch_size // parts
        return self.shown(self.data.train.samples(index * self.settings.batch_size + part * rows, rows))

    def shown(self, batch: Batch) -> Batch:
        """A batch of examples as the model reads it."""
        return batch

    def n_targets(self, batch: Batch) -> int:
        """How many targets of the batch count."""
        return int((batch.targets != IGNORED).sum())

    def loss(self, forward: Forward, batch: Batch, routing: Routing | None = None) -> Float[Tensor, ""]:
        """The sum of the losses of the batch's targets."""
        return self.score(outputs_of(forward, batch, routing), batch, self.settings.label_smoothing)[0]

    @abstractmethod
    def score(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> SumAndCount:
        """Sum and number of the losses of a batch's targets, from what the model says of it."""

    @abstractmethod
    def answers(self, outputs: Tensor, batch: Batch) -> Iterator[tuple[Any, Any]]:
        """What `measure` needs of a batch: what the model answers and what is right, for each thing asked."""

    @abstractmethod
    def measure(self, loss: float, answered: list[Any], right: list[Any]) -> dict[str, float]:
        """What else is told of all answers, besides the loss."""

    def evaluate(self, model: Transformer, whole: bool, sharers: Sharers = UNSHARED) -> dict[str, float]:
        """Loss and measures on the validation examples; on the first `eval_tokens` tokens unless `whole`."""
        device = next(model.parameters()).device
        totals, limit = Totals(), None if whole else self.settings.eval_tokens
        batches = map(self.shown, self.data.validation.evaluation(self.settings.batch_size))
        found: list[list[tuple[Any, Any]]] = []  # of each batch
        with evaluating(model):
            for batch, counts in sharers.part(first_batches(batches, limit)):
                batch = batch.to(device)
                outputs = outputs_of(model, batch)
                if counts:
                    totals.add(*self.score(outputs, batch))
                    found.append(list(self.answers(outputs, batch)))
        total, count = totals.read(sharers)
        loss = total / max(count, 1)
        pairs = [pair for answers in sharers.whole(found) for pair in answers]
        measures = self.measure(loss, [one for one, _ in pairs], [other for _, other in pairs])
        return {"validation_loss": loss, **measures}

    def sample(self, model: Transformer) -> str | None:
        """Nothing: such a model writes no text."""
        return None


class _NextTokens(ExampleTask):
    """A decoder says the next token where one is asked for: loss = -log p(token)."""

    def score(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> SumAndCount:
        return token_loss(outputs, batch.targets, smoothing)

    def answers(self, outputs: Tensor, batch: Batch) -> Iterator[tuple[int, int]]:
        """How many tokens of the batch are right, and of how many: ranks would have much to tell of each."""
        right = outputs.argmax(-1) == batch.targets  # where nothing is asked none is
        yield int(right.sum()), self.n_targets(batch)

    def measure(self, loss: float, answered: list[int], right: list[int]) -> dict[str, float]:
        return {"perplexity": perplexity(loss), "accuracy": sum(answered) / max(sum(right), 1)}


class Answers(_NextTokens):
    """A decoder learns what the assistant says in conversations; the rest is only read."""


class Translation(_NextTokens):
    """An encoder-decoder reads a text and learns to say its counterpart, token after token.

    At the end it also translates the first validation examples on its own, which BLEU and chrF compare with
    what is right.
    """

    n_translated = 200

    def evaluate(self, model: Transformer, whole: bool, sharers: Sharers = UNSHARED) -> dict[str, float]:
        measures = super().evaluate(model, whole, sharers)
        if not whole:
            return measures
        pairs: Sequence[Pair] = self.data.validation_examples[: self.n_translated]
        rows = self.data.validation_rows[: self.n_translated]
        found = []
        for row, counts in sharers.part(rows):
            text = self.translate(model, row.source or [], sharers)
            if counts:
                found.append(text)
        said = sharers.whole(found)
        right = [pair.target for pair in pairs]
        exact = sum(one == other for one, other in zip(said, right, strict=True)) / len(right)
        measures["exact_match"] = exact
        if find_spec("sacrebleu") is not None:
            measures |= {"bleu": bleu(said, right), "chrf": chrf(said, right)}
        return measures

    def sample(self, model: Transformer) -> str:
        """The first validation example, translated."""
        pair: Pair = self.data.validation_examples[0]
        return f"{pair.source}\n-> {self.translate(model, self.data.validation_rows[0].source or [])}"

    def translate(self, model: Transformer, source: list[int], sharers: Sharers = UNSHARED) -> str:
        """The likeliest tokens one after the other, until the text ends or the context is full."""
        decoding = Decoding(
            model,
            read_prompts(source, tokenizer=None),
            Sampling(),
            max_new_tokens=self.settings.context_length - 1,
            start_id=self.data.validation_rows[0].inputs[0],  # every row begins with it
            eos_id=end_of_text(self.tokenizer),
            go_on=sharers.go_on,
        )
        for _ in decoding:
            pass
        ids = decoding.replies[0].ids
        special = set(self.tokenizer.special_tokens.values())
        return self.tokenizer.decode([token for token in ids if token not in special]).strip()


class Classes(ExampleTask):
    """A text has one of several classes: loss = -log p(its class)."""

    def score(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> SumAndCount:
        return token_loss(outputs, batch.targets, smoothing)

    def answers(self, outputs: Tensor, batch: Batch) -> Iterator[tuple[int, int]]:
        yield from zip(outputs.argmax(-1).tolist(), batch.targets.tolist(), strict=True)

    def measure(self, loss: float, answered: list[int], right: list[int]) -> dict[str, float]:
        return {"accuracy": accuracy(answered, right), "f1": f1(answered, right, "macro")}


class SeveralLabels(ExampleTask):
    """Any number of labels applies to a text: loss = -log p(applies or not), for each label."""

    def n_targets(self, batch: Batch) -> int:
        return batch.targets.numel()

    def score(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> SumAndCount:
        return label_loss(outputs, batch.targets)

    def answers(self, outputs: Tensor, batch: Batch) -> Iterator[tuple[set[int], set[int]]]:
        for said, right in zip((outputs > 0).tolist(), batch.targets.tolist(), strict=True):
            yield {i for i, there in enumerate(said) if there}, {i for i, there in enumerate(right) if there}

    def measure(self, loss: float, answered: list[set[int]], right: list[set[int]]) -> dict[str, float]:
        return {"accuracy": accuracy(answered, right), "f1": f1(answered, right, "micro")}


class Regression(ExampleTask):
    """A text has a number: loss = (what the model says - the number)^2."""

    def n_targets(self, batch: Batch) -> int:
        return batch.targets.numel()

    def score(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> SumAndCount:
        return squared_error(outputs, batch.targets)

    def answers(self, outputs: Tensor, batch: Batch) -> Iterator[tuple[float, float]]:
        yield from zip(outputs.flatten().tolist(), batch.targets.flatten().tolist(), strict=True)

    def measure(self, loss: float, answered: list[float], right: list[float]) -> dict[str, float]:
        error = sum(abs(one - other) for one, other in zip(answered, right, strict=True)) / len(right)
        return {"mean_error": error, "correlation": correlation(answered, right)}


class TokenLabels(ExampleTask):
    """Each word has a tag, which the model says at the word's first token: loss = -log p(tag)."""

    def score(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> SumAndCount:
        return token_loss(outputs, batch.targets, smoothing)

    def answers(self, outputs: Tensor, batch: Batch) -> Iterator[tuple[list[str], list[str]]]:
        for said, right in zip(outputs.argmax(-1), batch.targets, strict=True):
            asked = right != IGNORED
            yield self._names(said[asked]), self._names(right[asked])

    def _names(self, tags: Int[Tensor, " T"]) -> list[str]:
        return [self.labels[tag] for tag in tags.tolist()]

    def measure(self, loss: float, answered: list[list[str]], right: list[list[str]]) -> dict[str, float]:
        flat = [[tag for tags in sentences for tag in tags] for sentences in (answered, right)]
        measures = {"accuracy": accuracy(*flat)}
        if all(label == "O" or label[:2] in ("B-", "I-", "E-", "S-") for label in self.labels):
            measures["f1"] = entity_f1(answered, right)
        return measures


class Found(NamedTuple):
    """The best piece of a window: its score, its characters, and the score of "the answer is not here"."""

    score: float
    start: int
    end: int
    nothing: float


class Spans(ExampleTask):
    """The answer to a question is a piece of a text: loss = -log p(its start), and of its end."""

    def n_targets(self, batch: Batch) -> int:
        return int((real_spans(batch.targets, batch.mask, batch.inputs.shape[1]) != IGNORED).sum())

    def score(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> SumAndCount:
        return span_loss(outputs, batch.targets, batch.mask)

    def answers(self, outputs: Tensor, batch: Batch) -> Iterator[tuple[Found, int]]:
        assert batch.sample_ids is not None, "the batches of examples say which these are"
        for logits, number in zip(outputs, batch.sample_ids, strict=True):
            row = self.data.validation_rows[number]
            yield best_piece(logits[: len(row.inputs)], row.offsets or []), row.example

    def measure(self, loss: float, answered: list[Found], right: list[int]) -> dict[str, float]:
        windows: dict[int, list[Found]] = {}
        for found, number in zip(answered, right, strict=True):
            windows.setdefault(number, []).append(found)
        questions: Sequence[Question] = self.data.validation_examples
        may_be_none = any(not question.answers for question in questions)
        exact, shared = [], []
        for number, found in windows.items():
            question = questions[number]
            said = choose_answer(question.context, found, may_be_none)
            texts = [text for _, text in question.answers]
            exact.append(exact_match(said, texts))
            shared.append(token_f1(said, texts))
        return {"exact_match": sum(exact) / len(exact), "f1": sum(shared) / len(shared)}


class Contrastive(ExampleTask):
    """Two texts that mean the same have vectors near each other: loss = -log p(its own counterpart)."""

    def shown(self, batch: Batch) -> Batch:
        """One batch of twice as many texts: the first of each pair, then their counterparts."""
        return one_below_other(batch)

    def n_targets(self, batch: Batch) -> int:
        return len(batch.inputs) // 2

    def score(self, outputs: Tensor, batch: Batch, smoothing: float = 0.0) -> SumAndCount:
        one, other = outputs.chunk(2)
        return contrastive_loss(one, other, self.settings.contrastive_scale, self.settings.contrastive_both)

    def answers(self, outputs: Tensor, batch: Batch) -> Iterator[tuple[int, int]]:
        one, other = (F.normalize(vectors.float(), dim=-1) for vectors in outputs.chunk(2))
        yield from zip((one @ other.T).argmax(-1).tolist(), range(len(one)), strict=True)

    def measure(self, loss: float, answered: list[int], right: list[int]) -> dict[str, float]:
        return {"accuracy": accuracy(answered, right)}


def one_below_other(batch: Batch) -> Batch:
    """A batch of pairs as one of twice as many texts: the first texts, then their counterparts."""
    assert batch.source is not None, "a pair has a second text"
    width = max(batch.inputs.shape[1], batch.source.shape[1])
    texts, masks = [], []
    for ids, mask in ((batch.inputs, batch.mask), (batch.source, batch.source_mask)):
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        filling = (0, width - ids.shape[1])
        texts.append(F.pad(ids, filling))
        masks.append(F.pad(real, filling, value=False))
    return replace(
        batch,
        inputs=torch.cat(texts),
        mask=torch.cat(masks),
        targets=torch.cat(
            [batch.targets, batch.targets]
        ),  # nobody asks: the place in the batch is the answer
        source=None,
        source_mask=None,
    )


def best_piece(logits: Float[Tensor, "T 2"], offsets: list[tuple[int, int]], longest: int = 30) -> Found:
    """The piece of a window that scores best: start logit + end logit, at most `longest` tokens.

    offsets: which characters of the context each token is; (-1, -1): none, so that it is no part of an
    answer. "Not here" scores as the first token's start and end do.
    """
    start, end = logits.float().cpu().unbind(-1)
    inside = torch.tensor([first >= 0 for first, _ in offsets], dtype=torch.bool)
    scores = (start[:, None] + end[None, :]).where(inside[:, None] & inside[None, :], -math.inf)
    distance = torch.arange(len(offsets))[None, :] - torch.arange(len(offsets))[:, None]
    scores = scores.where((distance >= 0) & (distance < longest), -math.inf)
    place = int(scores.argmax())
    first, last = divmod(place, len(offsets))
    return Found(scores.max().item(), offsets[first][0], offsets[last][1], (start[0] + end[0]).item())


def choose_answer(context: str, windows: list[Found], may_be_none: bool) -> str:
    """The best piece of all windows of a context; "" if none is better, where there may be none."""
    best = max(windows, key=lambda found: found.score)
    if may_be_none and min(found.nothing for found in windows) > best.score:
        return ""
    return context[best.start : best.end]


def correlation(one: list[float], other: list[float]) -> float:
    """Pearson's correlation, -1 to 1; 0 where one of the two does not vary.

    >>> round(correlation([1.0, 2.0, 3.0], [2.0, 4.0, 6.5]), 3)
    0.998
    """
    try:
        return statistics.correlation(one, other)
    except statistics.StatisticsError:
        return 0.0
