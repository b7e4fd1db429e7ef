"""What a model learns, and from which examples.

A task gives the batches of a run, each a pure function of its number, the loss of a batch as a sum over its
targets, and what the model is worth on examples it has not seen. The loop knows nothing else of it:

    task         model (shape, head)     a target is
    NextToken    decoder, lm             the token that follows
"""

from collections.abc import Callable
from typing import Protocol

from jaxtyping import Float
from torch import Tensor

from clearhead.generation.decode import generate
from clearhead.model.experts import Routing
from clearhead.model.transformer import Transformer
from clearhead.text.batches import IGNORED, Batch, Batches
from clearhead.text.counting import Progress
from clearhead.text.foreign import AnyTokenizer
from clearhead.training.data import PreparedData, prepare_data
from clearhead.training.evaluate import evaluate
from clearhead.training.objectives import token_loss
from clearhead.training.recipe import Recipe, TrainConfig, with_vocabulary
from clearhead.training.run_folder import RunFolder

Forward = Callable[..., Tensor]
"""The model as the loop calls it: compiled or wrapped, with the arithmetic of the recipe."""


class Task(Protocol):
    """What a model learns, and from which examples."""

    tokenizer: AnyTokenizer
    fingerprint: str  # names the very bytes of the training examples
    targets_per_batch: int  # how many targets a batch has at most

    def batch(self, index: int, part: int = 0, parts: int = 1) -> Batch:
        """Batch number `index` of the run, or of its rows the `part`-th of `parts` equal shares."""
        ...

    def n_targets(self, batch: Batch) -> int:
        """How many targets of the batch count."""
        ...

    def loss(self, forward: Forward, batch: Batch, routing: Routing | None = None) -> Float[Tensor, ""]:
        """The sum of the losses of the batch's targets, in nats."""
        ...

    def evaluate(self, model: Transformer, whole: bool) -> dict[str, float]:
        """The model on the validation examples, all or a part of them: `validation_loss`, a total over a
        total, comes first.
        """
        ...

    def sample(self, model: Transformer) -> str | None:
        """Something that the model makes, for people to read; None where a model makes nothing."""
        ...


class NextToken:
    """A decoder learns the next token of packed text: loss = -log p(token that follows)."""

    def __init__(self, data: PreparedData, settings: TrainConfig) -> None:
        self.data, self.settings = data, settings
        self.tokenizer, self.fingerprint = data.tokenizer, data.fingerprint
        self.targets_per_batch = settings.batch_size * settings.context_length
        self.batches = Batches(
            data.train,
            settings.batch_size,
            settings.context_length,
            seed=settings.seed,
            document_mask=settings.document_mask,
        )
        if settings.sample_every:
            self.tokenizer.encode(settings.sample_prompt)  # it can be one that has no tokens

    def batch(self, index: int, part: int = 0, parts: int = 1) -> Batch:
        rows = self.settings.batch_size // parts
        return self.batches.samples(index * self.settings.batch_size + part * rows, rows)

    def n_targets(self, batch: Batch) -> int:
        return int((batch.targets != IGNORED).sum())

    def loss(self, forward: Forward, batch: Batch, routing: Routing | None = None) -> Float[Tensor, ""]:
        logits = forward(batch.inputs, documents=batch.documents, routing=routing)
        return token_loss(logits, batch.targets)[0]

    def evaluate(self, model: Transformer, whole: bool) -> dict[str, float]:
        settings = self.settings
        result = evaluate(
            model,
            self.data.validation,
            batch_size=settings.batch_size,
            context_length=settings.context_length,
            max_tokens=None if whole else settings.eval_tokens,
            document_mask=settings.document_mask,
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


def make_task(
    recipe: Recipe, run: RunFolder, note: Callable[[str], None], progress: Progress | None = None
) -> tuple[Task, Recipe]:
    """The task of a recipe, its data prepared; and the recipe with the sizes that follow from the data."""
    data = prepare_data(recipe.data, run, note, progress)
    recipe = fit_vocabulary(recipe, data.tokenizer)
    return NextToken(data, recipe.train), recipe


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
