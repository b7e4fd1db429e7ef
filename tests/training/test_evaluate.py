"""Evaluation: total loss over total tokens, every token once, however the windows and batches are cut."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer
from clearhead.text.batches import Batch
from clearhead.text.prepare import prepare
from clearhead.text.shards import Shards
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.evaluate import evaluate, first_batches, first_targets, keep_first
from clearhead.training.loop import train
from clearhead.training.run_folder import load_run
from tiny_run import tiny_recipe, write_corpus

CONTEXT = 16


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Transformer, Shards]:
    """A model that has learned what the words are, and its validation text of some 500 tokens."""
    folder = tmp_path_factory.mktemp("evaluate")
    recipe = tiny_recipe(write_corpus(folder / "corpus"), steps=60, lr=0.01, eval_every=100, save_every=100)
    run = train(recipe, folder / "run")
    model, tokenizer = load_run(run.path)
    shards = Shards(run.data / "validation", tokenizer_fingerprint=tokenizer.fingerprint)
    return model, shards


def untrained(shards: Shards, **changes: float) -> Transformer:
    config = ModelConfig(vocab_size=shards.vocab_size, d_model=32, n_layers=1, n_heads=2)
    return Transformer(config.replace(**changes))


@torch.no_grad()
def one_by_one(model: Transformer, shards: Shards, context: int, stride: int) -> tuple[float, int]:
    """The dull twin: each token alone, predicted from the first window that holds it as a target."""
    stream = [shards.end_of_text, *np.asarray(shards.tokens).tolist()]
    total = 0.0
    for target in range(1, len(stream)):
        start = max(0, -(-(target - context) // stride)) * stride
        logits = model(torch.tensor([stream[start:target]]))[0, -1]
        total -= logits.double().log_softmax(-1)[stream[target]].item()
    return total, len(stream) - 1


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("stride", [16, 5])
def test_every_token_is_predicted_once(trained, stride):
    """Equal to scoring the tokens one by one, each with the context that its window gives it."""
    model, shards = trained
    total, count = one_by_one(model, shards, CONTEXT, stride)
    result = evaluate(model, shards, context_length=CONTEXT, stride=stride)
    assert result.n_tokens == count == shards.n_tokens
    assert result.loss == pytest.approx(total / count, rel=1e-6)


def test_a_smaller_stride_gives_more_context_and_a_lower_loss(trained):
    model, shards = trained
    whole, half, fine = (
        evaluate(model, shards, context_length=CONTEXT, stride=stride).loss for stride in (16, 8, 2)
    )
    assert max(fine, half) < whole


@pytest.mark.parametrize("max_tokens", [None, 100, 1])
def test_how_a_batch_is_cut_changes_nothing(trained, max_tokens):
    """Neither the loss nor which tokens count depends on the rows of a batch."""
    model, shards = trained
    results = [
        evaluate(model, shards, context_length=CONTEXT, stride=12, batch_size=rows, max_tokens=max_tokens)
        for rows in (2, 7, 1000)
    ]
    assert {result.n_tokens for result in results} == {min(max_tokens or 10**9, shards.n_tokens)}
    for result in results[1:]:
        assert result.loss == pytest.approx(results[0].loss, rel=1e-6)


def test_loss_perplexity_and_bits_per_byte_mean_the_same(trained):
    """perplexity = e^loss; bits per byte = all bits of the text over all its bytes."""
    model, shards = trained
    result = evaluate(model, shards, context_length=CONTEXT)
    assert result.perplexity == pytest.approx(math.exp(result.loss))
    bits = result.loss * shards.n_tokens / math.log(2)
    assert result.bits_per_byte == pytest.approx(bits / shards.text_bytes)


def test_the_context_is_the_models_own_unless_said(trained):
    model, shards = trained
    assert evaluate(model, shards).loss == evaluate(model, shards, context_length=32).loss


def test_a_uniform_model_knows_log_v(trained):
    """All logits equal: each token costs log V, whatever the text."""
    _, shards = trained
    model = untrained(shards)
    with torch.no_grad():
        model.embed.weight.zero_()
    assert evaluate(model, shards).loss == pytest.approx(math.log(shards.vocab_size))


def test_documents_are_kept_apart_as_in_training(trained):
    """With a document mask each document is predicted from itself alone, its first token not at all."""
    model, shards = trained
    ends = [0, *shards.document_ends.tolist()]
    assert len(ends) > 2
    total, count = 0.0, 0
    for number, (start, stop) in enumerate(pairwise(ends)):
        lead = [shards.end_of_text] if number == 0 else []
        ids = torch.tensor([[*lead, *np.asarray(shards.tokens)[start:stop].tolist()]])
        with torch.no_grad():
            logits = model(ids[:, :-1])[0].double().log_softmax(-1)
        total -= logits.gather(-1, ids[0, 1:, None]).sum().item()
        count += ids.shape[1] - 1
    result = evaluate(model, shards, context_length=shards.n_tokens, document_mask=True)
    assert result.n_tokens == count == shards.n_tokens - (len(ends) - 2)
    assert result.loss == pytest.approx(total / count, rel=1e-5)


def test_the_model_comes_back_as_it_was(trained):
    """Dropout is off while measuring; training mode and weights are as before, also after an error."""
    _, shards = trained
    model = Transformer(
        ModelConfig(vocab_size=shards.vocab_size, d_model=32, n_heads=2, residual_dropout=0.5)
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    first, second = (evaluate(model, shards, max_tokens=100).loss for _ in range(2))
    assert first == second
    assert model.training
    with pytest.raises(ValueError, match="stride=0"):
        evaluate(model, shards, stride=0)
    assert model.training
    evaluate(model.eval(), shards, max_tokens=1)
    assert not model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_without_measure_has_a_perplexity(trained):
    """e^loss ends at e^700, where a float still holds it."""
    _, shards = trained
    model = untrained(shards)
    with torch.no_grad():
        model.embed.weight.mul_(1e5)
    assert evaluate(model, shards).perplexity == math.exp(700)


def test_nothing_to_predict(tmp_path):
    """One token without an end-of-text token before it has nothing that predicts it."""
    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)}, [])
    (tmp_path / "a.txt").write_text("long enough", encoding="utf-8")
    (tmp_path / "b.txt").write_text("x", encoding="utf-8")
    prepare(tmp_path / "a.txt", tokenizer, tmp_path / "data", validation=tmp_path / "b.txt")
    model = Transformer(ModelConfig(vocab_size=256, d_model=32, n_layers=1, n_heads=2))
    with pytest.raises(ValueError, match="1"):
        evaluate(model, Shards(tmp_path / "data/validation"))
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):
        evaluate(model, Shards(tmp_path / "data/train"), max_tokens=0)


def test_keep_first():
    """Targets beyond the n-th that count are left out, in reading order."""
    targets = torch.tensor([[5, -100, 6], [7, 8, -100]])
    keep_first(targets, 3)
    assert targets.tolist() == [[5, -100, 6], [7, -100, -100]]
    keep_first(targets, 0)
    assert targets.eq(-100).all()


def three_batches(padded: bool) -> list[Batch]:
    """Of 2 x 3 places each, of which one is no target, and the same is padding."""
    targets = torch.tensor([[-100, 1, 2], [3, 4, 5]])
    ids, mask = targets.clamp(min=0), targets > 0 if padded else None
    return [Batch(ids, targets.clone(), first_sample=2 * i, mask=mask) for i in range(3)]


@pytest.mark.parametrize(
    ("n", "counted"),
    [
        (1, [1]),
        (4, [4]),
        (5, [5]),
        (6, [5, 1]),
        (14, [5, 5, 4]),
        (15, [5, 5, 5]),
        (99, [5, 5, 5]),
        (None, [5, 5, 5]),
    ],
)
def test_a_part_of_the_batches(n, counted):
    """They end with that of the n-th target, where no later one counts, or with that of the n-th token."""
    found = list(first_targets(three_batches(padded=False), n))
    assert [int((batch.targets != -100).sum()) for batch in found] == counted
    assert len(list(first_batches(three_batches(padded=True), n))) == len(counted)
    places = 18 if n is None else n  # six in each without padding
    assert len(list(first_batches(three_batches(padded=False), n))) == min(3, -(-places // 6))
