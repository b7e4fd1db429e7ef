"""Each objective is that of `transformers`: the same loss and the same gradients of all tensors, to 1e-5.

The models are tiny, every tensor random, the rows of a batch of different lengths, dropout 0.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from clearhead import load
from clearhead.model.experts import Routing
from clearhead.model.heads import make_head
from clearhead.model.transformer import Transformer
from clearhead.published.twins import TWINS, model_type
from clearhead.training.objectives import (
    SumAndCount,
    contrastive_loss,
    label_loss,
    shift_right,
    span_loss,
    squared_error,
    token_loss,
)
from clearhead.training.recipe import DataConfig, Recipe, TrainConfig
from clearhead.training.run_folder import RunFolder
from clearhead.training.start import fill, fit_recipe, open_start
from clearhead.training.tasks import make_task
from reference.parity import compare_gradients, tiny
from reference.parity_encoders import PAD, batch
from tiny_published import WORDS

SETTINGS = {model_type(name): settings for name, (_, settings) in reversed(TWINS.items())}
LENGTHS = (24, 7, 17)


def twins(
    transformers: Any, folder: Path, class_name: str, family: str, **more: Any
) -> tuple[Any, Transformer]:
    """A tiny random model of theirs, and ours read from its files."""
    theirs = tiny(transformers, class_name, **SETTINGS[family] | more)
    theirs.save_pretrained(folder / "theirs")
    for module in theirs.modules():  # theirs never trains the padding as an input, also where it is the start
        if isinstance(module, torch.nn.Embedding):
            module.padding_idx = None
    return theirs, load(folder / "theirs")[0]


def compare(
    theirs: Any, ours: Transformer, folder: Path, wanted: Tensor, found: SumAndCount | Tensor
) -> None:
    """Their mean and our sum over count are equal, and so are the gradients."""
    loss = found if isinstance(found, Tensor) else found[0] / found[1]
    assert abs(loss.item() - wanted.item()) <= 1e-5 * abs(wanted.item())
    theirs.zero_grad()
    ours.zero_grad()
    wanted.backward()
    loss.backward()
    compare_gradients(theirs, ours, folder)


def following(labels: Tensor) -> Tensor:
    """What each position is to predict: the label of the next; nothing follows the last."""
    return F.pad(labels[:, 1:], (0, 1), value=-100)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_next_token(family: str, transformers: Any, tmp_path: Path):
    """Theirs shifts the labels inside the model; -100 asks for nothing."""
    theirs, ours = twins(transformers, tmp_path, TWINS[family][0], family)
    tokens, mask = batch(99, LENGTHS)
    labels = tokens.masked_fill(~mask, -100)
    labels[1, :3] = -100
    wanted = theirs(tokens, attention_mask=mask.long(), labels=labels).loss
    compare(theirs, ours, tmp_path, wanted, token_loss(ours(tokens, mask=mask), following(labels)))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_balance_of_experts(family: str, transformers: Any, tmp_path: Path):
    """The loss of the routers is added with its coefficient, padding left out."""
    more = {"output_router_logits": True, "router_aux_loss_coef": 0.7}
    theirs, ours = twins(transformers, tmp_path, TWINS[family][0], family, **more)
    tokens, mask = batch(99, LENGTHS)
    labels = tokens.masked_fill(~mask, -100)
    wanted = theirs(tokens, attention_mask=mask.long(), labels=labels)
    routing, experts = Routing(), ours.config.experts
    loss, count = token_loss(ours(tokens, mask=mask, routing=routing), following(labels))
    assert experts is not None and experts.balance_loss == 0.7
    assert routing.balance_loss(mask).item() == pytest.approx(wanted.aux_loss.item(), rel=1e-5)
    compare(theirs, ours, tmp_path, wanted.loss, loss / count + routing.loss(experts, mask))


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_masked(family: str, transformers: Any, tmp_path: Path):
    """Only the hidden tokens count, and no label is shifted."""
    theirs, ours = twins(transformers, tmp_path, TWINS[family][0], family)
    tokens, mask = batch(59, LENGTHS)
    hidden = (torch.rand(tokens.shape) < 0.3) & mask
    labels = tokens.masked_fill(~hidden, -100)
    inputs = tokens.masked_fill(hidden, 4)
    wanted = theirs(inputs, attention_mask=mask.long(), labels=labels).loss
    compare(theirs, ours, tmp_path, wanted, token_loss(ours(inputs, mask=mask), labels))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("family", ["bart", "t5", "marian"])
def test_translation(family: str, smoothing: float, transformers: Any, tmp_path: Path):
    """The decoder reads the labels one later; smoothed as their trainer does it."""
    theirs, ours = twins(transformers, tmp_path, TWINS[family][0], family)
    start = SETTINGS[family]["decoder_start_token_id"]
    source, real = batch(59, LENGTHS)
    target, mask = batch(59, (12, 17, 5), seed=3)
    labels = target.masked_fill(~mask, -100)
    wanted = theirs(source, attention_mask=real.long(), labels=labels)
    loss = wanted.loss
    if smoothing:
        loss = transformers.trainer_pt_utils.LabelSmoother(smoothing)(wanted, labels)
    logits = ours(shift_right(labels, start, PAD), mask=mask, source=source, source_mask=real)
    compare(theirs, ours, tmp_path, loss, token_loss(logits, labels, smoothing))


def test_a_published_translator_goes_on_as_it_was_trained(transformers: Any, tmp_path: Path):
    """From a file to a batch, begun with the token that its folder names: it costs what theirs does."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS.split()]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n", encoding="utf-8")
    special = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 3}
    settings: dict[str, Any] = SETTINGS["bart"] | special | {"vocab_size": len(words)}
    theirs = tiny(transformers, "BartForConditionalGeneration", **settings)
    theirs.save_pretrained(tmp_path / "theirs")
    transformers.BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path / "theirs")
    some = WORDS.split()[:16]
    pairs = [f"{one} {other}\t{other} the {one}\n" for one in some for other in some[:5]]
    (tmp_path / "pairs.tsv").write_text("".join(pairs), encoding="utf-8")
    how: dict[str, Any] = {"objective": "translation", "context_length": 12, "batch_size": 6, "steps": 1}
    data = DataConfig(source=str(tmp_path / "pairs.tsv"))
    start = open_start(str(tmp_path / "theirs"))
    recipe = fit_recipe(Recipe(data, train=TrainConfig(start_from=start.place, **how)), start)
    assert recipe.data.start_token == "[SEP]"
    task, recipe = make_task(recipe, RunFolder(tmp_path / "run"), lambda text: None)
    ours = Transformer(recipe.model, seed=0).eval()
    fill(ours, start)
    found = task.batch(0)
    assert found.source_mask is not None
    wanted = theirs(found.source, attention_mask=found.source_mask.long(), labels=found.targets).loss
    loss = task.loss(ours, found) / task.n_targets(found)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)


def one_class(logits: Tensor, targets: Tensor) -> SumAndCount:
    return token_loss(logits, targets)


LABELS: dict[str, tuple[int, Tensor, Callable[[Tensor, Tensor], SumAndCount]]] = {
    "single_label_classification": (3, torch.tensor([2, 0, 1]), one_class),
    "multi_label_classification": (3, torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 0]]), label_loss),
    "regression": (1, torch.tensor([0.3, -2.0, 5.0]), squared_error),
}


@pytest.mark.parametrize("problem", LABELS)
@pytest.mark.parametrize(
    ("class_name", "family"),
    [
        ("BertForSequenceClassification", "bert"),
        ("RobertaForSequenceClassification", "roberta"),
        ("GPT2ForSequenceClassification", "gpt2"),
    ],
)
def test_sequences(class_name: str, family: str, problem: str, transformers: Any, tmp_path: Path):
    """A class, several labels, a number: read at the first token, or at the last real one.

    In float64: the biases of keys have gradients that are 0 up to rounding.
    """
    n_labels, targets, score = LABELS[problem]
    more = {"num_labels": n_labels, "problem_type": problem}
    theirs, ours = (model.double() for model in twins(transformers, tmp_path, class_name, family, **more))
    targets = targets.double() if targets.is_floating_point() else targets
    tokens, mask = batch(59, LENGTHS)
    wanted = theirs(tokens, attention_mask=mask.long(), labels=targets).loss
    compare(theirs, ours, tmp_path, wanted, score(ours(tokens, mask=mask), targets))


@pytest.mark.parametrize("family", ["bert", "distilbert"])
def test_token_labels(family: str, transformers: Any, tmp_path: Path):
    """A class per token, where one is asked for."""
    name = {"bert": "BertForTokenClassification", "distilbert": "DistilBertForTokenClassification"}[family]
    theirs, ours = twins(transformers, tmp_path, name, family, num_labels=5)
    tokens, mask = batch(59, LENGTHS)
    labels = (tokens % 5).masked_fill(~mask | (tokens % 3 == 0), -100)
    wanted = theirs(tokens, attention_mask=mask.long(), labels=labels).loss
    compare(theirs, ours, tmp_path, wanted, token_loss(ours(tokens, mask=mask), labels))


# The same number more at all places changes nothing, so some gradients are 0 up to rounding: float64.
ANSWERING = ("BertForQuestionAnswering", "bert")


@pytest.mark.parametrize("beyond", [False, True])
def test_spans(beyond: bool, transformers: Any, tmp_path: Path):
    """Start and end, half each; a place beyond the row asks for nothing."""
    theirs, ours = (model.double() for model in twins(transformers, tmp_path, *ANSWERING))
    tokens, _ = batch(59, (24, 24, 24))
    spans = torch.tensor([[3, 5], [0, 0], [30, 40] if beyond else [20, 23]])
    wanted = theirs(tokens, start_positions=spans[:, 0], end_positions=spans[:, 1]).loss
    compare(theirs, ours, tmp_path, wanted, span_loss(ours(tokens), spans))


def test_spans_among_padding(transformers: Any, tmp_path: Path):
    """Padding gets no probability: the loss of a padded batch is that of their rows one by one."""
    theirs, ours = (model.double() for model in twins(transformers, tmp_path, *ANSWERING))
    tokens, mask = batch(59, LENGTHS)
    spans = torch.tensor([[3, 5], [0, 6], [16, 16]])
    rows = [
        theirs(row[real][None], start_positions=span[:1], end_positions=span[1:]).loss
        for row, real, span in zip(tokens, mask, spans, strict=True)
    ]
    compare(theirs, ours, tmp_path, torch.stack(rows).mean(), span_loss(ours(tokens, mask=mask), spans, mask))


def test_contrastive(transformers: Any, tmp_path: Path):
    """Mean-pooled vectors of both texts, 20 cos, cross-entropy with the own one as the class."""
    theirs, ours = twins(transformers, tmp_path, "BertModel", "bert")
    texts = [batch(59, LENGTHS), batch(59, (5, 24, 11), seed=8)]
    vectors = []
    for tokens, mask in texts:
        hidden = theirs(tokens, attention_mask=mask.long()).last_hidden_state
        real = mask[..., None].float()
        vectors.append((hidden * real).sum(1) / real.sum(1))
    scores = 20 * F.cosine_similarity(vectors[0][:, None], vectors[1][None], dim=-1)
    ours.head = make_head(ours.config.replace(head="embedding", pool="mean", head_activation=None))
    found = contrastive_loss(*(ours(tokens, mask=mask) for tokens, mask in texts))
    loss = found[0] / found[1]
    wanted = F.cross_entropy(scores, torch.arange(3))
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    wanted.backward()
    loss.backward()
    one, other = theirs.embeddings.word_embeddings.weight.grad, ours.embed.weight.grad
    assert other is not None and (one - other).abs().max() <= 1e-5 * one.abs().max()
