"""What a model learns, and from which examples.

A task gives the batches of a run, each a pure function of its number, the loss of a batch as a sum over its
targets, and what the model is worth on examples it has not seen. The loop knows nothing else of it. Here are
the two that learn from running text, cut into windows of one length; the others are in example_tasks.py.

    NextToken    a decoder learns the token that follows
    Masked       an encoder learns the tokens that were hidden
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.generation.decode import generate
from clearhead.model.experts import Routing
from clearhead.model.transformer import Transformer
from clearhead.text.batches import IGNORED, Batch, Batches, evaluation_batches
from clearhead.text.counting import Progress
from clearhead.text.foreign import AnyTokenizer, open_tokenizer
from clearhead.text.frame import role
from clearhead.text.token_files import is_token_file
from clearhead.training.data import END_OF_TEXT, PreparedData, data_folder, prepare_data
from clearhead.training.demands import DEMANDS, Objective, fit_head
from clearhead.training.evaluate import (
    UNSHARED,
    Forward,
    Sharers,
    Totals,
    evaluate,
    evaluating,
    first_batches,
    outputs_of,
    perplexity,
)
from clearhead.training.example_data import prepare_examples
from clearhead.training.example_tasks import (
    Answers,
    Classes,
    Contrastive,
    ExampleTask,
    Regression,
    SeveralLabels,
    Spans,
    TokenLabels,
    Translation,
)
from clearhead.training.masking import mask_samples
from clearhead.training.objectives import token_loss
from clearhead.training.recipe import Recipe, TrainConfig, with_vocabulary
from clearhead.training.run_folder import RunFolder

MASK = "<mask>"  # the special token that hides another, in a vocabulary that is learned for it


@runtime_checkable
class Task(Protocol):
    """What a model learns, and from which examples."""

    tokenizer: AnyTokenizer
    fingerprint: str  # names the very bytes of the training examples
    targets_per_batch: int  # how many targets a batch has, on average
    lengths_vary: bool  # whether batches have different lengths

    def batch(self, index: int, part: int = 0, parts: int = 1) -> Batch:
        """Batch number `index` of the run, or of its rows the `part`-th of `parts` equal shares."""
        ...

    def n_targets(self, batch: Batch) -> int:
        """How many targets of the batch count."""
        ...

    def loss(self, forward: Forward, batch: Batch, routing: Routing | None = None) -> Float[Tensor, ""]:
        """The sum of the losses of the batch's targets, in nats."""
        ...

    def evaluate(self, model: Transformer, whole: bool, sharers: Sharers = UNSHARED) -> dict[str, float]:
        """The model on the validation examples, all or a part of them: `validation_loss`, a total over a
        total, comes first. `sharers` look together, and each hears all of it.
        """
        ...

    def sample(self, model: Transformer) -> str | None:
        """Something that the model makes, for people to read; None where a model makes nothing."""
        ...


class _Windows:
    """Running text in windows of one length, and the loss of each token that is asked for."""

    lengths_vary = False

    def __init__(self, data: PreparedData, settings: TrainConfig) -> None:
        self.data, self.settings = data, settings
        self.tokenizer, self.fingerprint = data.tokenizer, data.fingerprint
        self.batches = Batches(
            data.train,
            settings.batch_size,
            settings.context_length,
            seed=settings.seed,
            document_mask=settings.document_mask,
        )

    def batch(self, index: int, part: int = 0, parts: int = 1) -> Batch:
        rows = self.settings.batch_size // parts
        return self.shown(self.batches.samples(index * self.settings.batch_size + part * rows, rows))

    def shown(self, windows: Batch) -> Batch:
        """A batch of text as the model reads it."""
        return windows

    def n_targets(self, batch: Batch) -> int:
        return int((batch.targets != IGNORED).sum())

    def loss(self, forward: Forward, batch: Batch, routing: Routing | None = None) -> Float[Tensor, ""]:
        logits = outputs_of(forward, batch, routing)
        return token_loss(logits, batch.targets, self.settings.label_smoothing)[0]


class NextToken(_Windows):
    """A decoder learns the next token of packed text: loss = -log p(token that follows)."""

    def __init__(self, data: PreparedData, settings: TrainConfig) -> None:
        super().__init__(data, settings)
        self.targets_per_batch = settings.batch_size * settings.context_length
        if settings.sample_every:
            self.tokenizer.encode(settings.sample_prompt)  # it can be one that has no tokens

    def evaluate(self, model: Transformer, whole: bool, sharers: Sharers = UNSHARED) -> dict[str, float]:
        settings = self.settings
        result = evaluate(
            model,
            self.data.validation,
            batch_size=settings.batch_size,
            context_length=settings.context_length,
            max_tokens=None if whole else settings.eval_tokens,
            document_mask=settings.document_mask,
            sharers=sharers,
        )
        return {
            "validation_loss": result.loss,
            "perplexity": result.perplexity,
            "bits_per_byte": result.bits_per_byte,
        }

    def sample(self, model: Transformer) -> str:
        settings = self.settings
        text = generate(
            model,
            settings.sample_prompt,
            tokenizer=self.tokenizer,
            max_new_tokens=settings.sample_tokens,
            temperature=0.8,
            seed=settings.seed,
            overflow="slide",
        )
        return settings.sample_prompt + str(text)


class Masked(_Windows):
    """An encoder learns tokens that were hidden from it, from both sides: loss = -log p(what was there).

    On validation text the same tokens are hidden at every look, whatever the seed.
    """

    def __init__(self, data: PreparedData, settings: TrainConfig) -> None:
        super().__init__(data, settings)
        self.mask_id = mask_id(data.tokenizer)
        self.special = torch.tensor(sorted(data.tokenizer.special_tokens.values()))
        windows = settings.batch_size * settings.context_length
        self.targets_per_batch = max(1, round(settings.mask_share * windows))

    def shown(self, windows: Batch) -> Batch:
        return self._hide(windows, self.settings.seed)

    def evaluate(self, model: Transformer, whole: bool, sharers: Sharers = UNSHARED) -> dict[str, float]:
        device = next(model.parameters()).device
        totals, limit = Totals(), None if whole else self.settings.eval_tokens
        with evaluating(model):
            for windows, counts in sharers.part(first_batches(self._validation(), limit)):
                batch = self._hide(windows, seed=0).to(device)
                logits = outputs_of(model, batch)
                loss, n = token_loss(logits, batch.targets)
                if counts:
                    totals.add(loss, n, (logits.argmax(-1) == batch.targets).sum())
        total, count, right = totals.read(sharers)
        loss, accuracy = total / max(count, 1), right / max(count, 1)
        return {"validation_loss": loss, "perplexity": perplexity(loss), "accuracy": accuracy}

    def sample(self, model: Transformer) -> None:
        return None

    def _validation(self) -> Iterator[Batch]:
        """Validation text in windows, with a mask that leaves out what is no part of it."""
        settings, shards = self.settings, self.data.validation
        n_tokens = shards.n_tokens + (shards.end_of_text is not None)  # with the one that stands before it
        for windows in evaluation_batches(
            shards, settings.batch_size, settings.context_length, settings.document_mask
        ):
            first = windows.first_sample * settings.context_length
            places = first + torch.arange(windows.inputs.numel()).view(windows.inputs.shape)
            yield replace(windows, mask=places < n_tokens)

    def _hide(self, windows: Batch, seed: int) -> Batch:
        special = torch.isin(windows.inputs, self.special)
        if windows.mask is not None:
            special |= ~windows.mask
        inputs, targets = mask_samples(
            windows.inputs,
            special,
            self.mask_id,
            self.tokenizer.vocab_size,
            self.settings.mask_share,
            seed,
            windows.first_sample,
        )
        return replace(windows, inputs=inputs, targets=targets)


EXAMPLE_TASKS: dict[Objective, type[ExampleTask]] = {
    "next_token": Answers,
    "translation": Translation,
    "classes": Classes,
    "several_labels": SeveralLabels,
    "regression": Regression,
    "token_labels": TokenLabels,
    "span": Spans,
    "contrastive": Contrastive,
}


def make_task(
    recipe: Recipe, run: RunFolder, note: Callable[[str], None], progress: Progress | None = None
) -> tuple[Task, Recipe]:
    """The task of a recipe, its data prepared; and the recipe with the head and the sizes that follow.

    Where the examples have labels, their names are written into the run's folder.
    """
    objective = recipe.train.objective
    if not run.exists():
        check_tokenizer(recipe, run)
    if DEMANDS[objective].examples == "text" and recipe.data.form == "text":
        data = prepare_data(recipe.data, run, note, progress, specials_of(objective))
        recipe = fit_vocabulary(recipe, data.tokenizer)
        recipe = replace(recipe, model=fit_head(recipe.model, objective))
        return (Masked if objective == "masked" else NextToken)(data, recipe.train), recipe
    if objective == "translation" and find_spec("sacrebleu") is None:
        note("BLEU and chrF are left out, they need the package sacrebleu: pip install sacrebleu")
    examples = prepare_examples(recipe, run, note, progress)
    recipe = fit_vocabulary(recipe, examples.tokenizer)
    n_labels = 1 if objective == "regression" else len(examples.labels)
    recipe = replace(recipe, model=fit_head(recipe.model, objective, n_labels))
    if examples.labels and not run.begun and run.labels() != examples.labels:
        if run.exists():
            raise ValueError(
                f"{run.path} tells other labels apart than those that {recipe.data.source} now has"
            )
        run.write_labels(examples.labels)
    return EXAMPLE_TASKS[objective](examples, recipe.train), recipe


def check_tokenizer(recipe: Recipe, run: RunFolder) -> Recipe:
    """The recipe with the vocabulary that a run will have, before one is learned.

    ValueError: the objective cannot be learned with a tokenizer that is there already, or the model asks for
    another vocabulary.
    """
    prepared = data_folder(recipe.data, run)
    place = recipe.data.tokenizer or (prepared / "tokenizer.json" if prepared != run.data else None)
    if place is None and is_token_file(recipe.data.source):  # which needs one, as is told when it is opened
        return recipe
    if place is None:
        if recipe.model.vocab_size not in (type(recipe.model)().vocab_size, recipe.data.vocab_size):
            raise ValueError(
                f"model.vocab_size={recipe.model.vocab_size}, but a vocabulary of data.vocab_size="
                f"{recipe.data.vocab_size} is to be learned; leave model.vocab_size away, it follows"
            )
        return with_vocabulary(recipe, recipe.data.vocab_size)
    tokenizer = open_tokenizer(place)
    if recipe.train.objective == "masked":
        mask_id(tokenizer)
    return fit_vocabulary(recipe, tokenizer)


def mask_id(tokenizer: AnyTokenizer) -> int:
    """The id of the token that hides others; ValueError for a tokenizer that has none."""
    found = role(tokenizer, "mask")
    if found is None:
        raise ValueError(
            "train.objective='masked' needs a tokenizer with a token that hides others, such as "
            f"{MASK} or [MASK]; leave data.tokenizer away and one is learned"
        )
    return found


def specials_of(objective: Objective) -> tuple[str, ...]:
    """The special tokens of a vocabulary that is learned for an objective."""
    return (END_OF_TEXT, MASK) if objective == "masked" else (END_OF_TEXT,)


def fit_vocabulary(recipe: Recipe, tokenizer: AnyTokenizer) -> Recipe:
    """The recipe with the tokenizer's vocabulary. ValueError when it asks for another."""
    wanted, default = recipe.model.vocab_size, type(recipe.model)().vocab_size
    if recipe.train.start_from is not None and wanted >= tokenizer.vocab_size:
        return recipe  # a published table may have rows to spare
    if wanted not in (tokenizer.vocab_size, default, recipe.data.vocab_size):
        raise ValueError(
            f"model.vocab_size={wanted} but the tokenizer has {tokenizer.vocab_size} tokens; "
            "leave model.vocab_size away, it follows from the tokenizer"
        )
    return with_vocabulary(recipe, tokenizer.vocab_size)
