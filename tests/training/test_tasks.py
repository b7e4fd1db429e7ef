"""Tasks: what a recipe's examples become, what a batch costs however it is cut, and mistakes in one line."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from clearhead.model.config_parts import ExpertsConfig
from clearhead.model.experts import Routing
from clearhead.model.transformer import Transformer
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.example_tasks import Contrastive, ExampleTask, best_piece, correlation
from clearhead.training.loop import train
from clearhead.training.objectives import shift_right
from clearhead.training.recipe import TrainConfig, save_recipe
from clearhead.training.report import Watcher
from clearhead.training.run_folder import RunFolder, find_config
from clearhead.training.tasks import MASK, Task, make_task
from tiny_tasks import CASES, END, jsonl, make_recipe, texts


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> dict[str, tuple[Task, Transformer]]:
    """Every task with a model that can learn it."""
    made = {}
    for case in CASES:
        folder = tmp_path_factory.mktemp(case)
        recipe = make_recipe(folder, case)
        recipe.check()
        (folder / "run").mkdir()
        task, recipe = make_task(recipe, RunFolder(folder / "run"), lambda text: None)
        made[case] = task, Transformer(recipe.model, seed=0)
    return made


def gradients(task: Task, model: Transformer, parts: int) -> tuple[Tensor, list[Tensor], int]:
    """The summed loss of batch 3 of the run in equal parts, its gradients, and its number of targets."""
    model.zero_grad()
    total, count = torch.zeros(()), 0
    for part in range(parts):
        batch = task.batch(3, part, parts)
        loss = task.loss(model, batch)
        loss.backward()
        total, count = total + loss.detach(), count + task.n_targets(batch)
    return total, [p.grad.clone() for p in model.parameters() if p.grad is not None], count


@pytest.mark.parametrize("case", [case for case in CASES if case != "contrastive"])
def test_cutting_a_batch_changes_nothing(case, tasks):
    """The sum of losses over parts of 2 rows is that of 8 rows, and so are gradients and targets."""
    task, model = tasks[case]
    whole, parts = (gradients(task, model, n) for n in (1, 4))
    assert whole[2] == parts[2] > 0
    torch.testing.assert_close(whole[0], parts[0], rtol=1e-5, atol=0)
    for one, other in zip(whole[1], parts[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * one.abs().max().item())


class Steps(Watcher):
    """Loss and norm of every step."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        self.found.append((metrics["loss"], metrics["norm"]))


@pytest.mark.parametrize("case", ["masked", "token_labels"])
def test_accumulation_is_a_big_batch(case, tmp_path):
    """Two micro-batches of 4 are one batch of 8: the same examples, the same loss and gradients."""
    found = []
    for n in (1, 2):
        steps = Steps()
        recipe = make_recipe(tmp_path, case, batch_size=8 // n, accumulation=n)
        train(recipe, tmp_path / f"run{n}", watchers=[steps])
        found.append(steps.found)
    assert len(found[0]) == 4
    for one, other in zip(*found, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_negatives_come_from_the_batch(tasks):
    """By nature the contrastive loss knows only the pairs of its part: fewer cost less."""
    task, model = tasks["contrastive"]
    whole, parts = (gradients(task, model, n) for n in (1, 4))
    assert whole[2] == parts[2] == 8 and parts[0] < whole[0]


@pytest.mark.parametrize("case", CASES)
def test_parts_are_the_rows_of_the_batch(case, tasks):
    """The same samples, in order, however many share them; and the same batch when it is asked for again."""
    task, _ = tasks[case]
    whole, again = task.batch(5), task.batch(5)
    assert torch.equal(whole.inputs, again.inputs) and torch.equal(whole.targets, again.targets)
    parts = [task.batch(5, part, 4) for part in range(4)]
    assert [part.first_sample for part in parts] == [40, 42, 44, 46]
    if whole.sample_ids is not None:
        assert [i for part in parts for i in part.sample_ids or []] == whole.sample_ids
    if case == "masked":
        assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)


@pytest.mark.parametrize("case", [case for case in CASES if case != "contrastive"])
def test_validation_is_a_total_over_a_total(case, tasks, monkeypatch):
    """However many rows a batch has; and dropout, training mode and gradients are left alone."""
    task, model = tasks[case]
    model.train()
    found = []
    for rows in (8, 3):
        monkeypatch.setattr(task, "settings", TrainConfig(batch_size=rows, context_length=32, steps=1))
        found.append(task.evaluate(model, whole=True))
    assert model.training
    assert next(iter(found[0])) == "validation_loss" and found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert found[1][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_all_are_tasks(tasks):
    for task, model in tasks.values():
        assert isinstance(task, Task)
        assert 1 <= task.targets_per_batch <= 8 * 32 and len(task.fingerprint) == 64
        assert task.sample(model) is None or model.config.shape != "encoder"


def test_how_many_targets_a_batch_has_is_told_by_examples_of_all_lengths(tmp_path):
    """1,000 translations, few of them long: a budget in tokens becomes the right number of steps."""
    recipe = make_recipe(tmp_path, "translation", accumulation=40)
    lines = [f"{number} {'cat ' * (9 if number % 10 == 0 else 1)}" for number in range(1000)]
    (tmp_path / "a.tsv").write_text("".join(f"{line}\t{line}\n" for line in lines), encoding="utf-8")
    task, _ = make_task(recipe, RunFolder(tmp_path / "run"), print)
    assert isinstance(task, ExampleTask)
    counts = [len(targets) for row in task.data.train.rows if isinstance(targets := row.targets, list)]
    exact = recipe.train.batch_size * sum(counts) / len(counts)
    assert task.targets_per_batch == pytest.approx(exact, rel=0.15)


def test_the_experts_of_both_stacks_are_balanced(tmp_path, monkeypatch):
    """An encoder's routers have their losses, over the tokens of the source, and their corrections."""
    seen: list[tuple[int, ...]] = []
    loss = Routing.loss

    def watched(self: Routing, config: ExpertsConfig, real: Tensor | None = None) -> Tensor:
        assert real is not None
        seen.append((len(self.layers), int(real.sum())))
        return loss(self, config, real)

    monkeypatch.setattr(Routing, "loss", watched)
    experts = ExpertsConfig(4, 2, 8, correction_bias=True, balance_loss=0.5)
    shape = {"n_encoder_layers": 2, "experts": experts}
    recipe = make_recipe(tmp_path, "translation", model=CASES["translation"][0] | shape, steps=1)
    run = train(recipe, tmp_path / "run")
    batch = make_task(recipe, run, print)[0].batch(0)
    assert batch.source_mask is not None and batch.mask is not None
    assert seen == [(2, int(batch.source_mask.sum())), (1, int(batch.mask.sum()))]
    state = run.model()[0].state_dict()
    moved = {name.split(".")[0] for name in state if name.endswith("correction") and state[name].any()}
    assert moved == {"encoder", "decoder"}


def test_a_few_examples_are_looked_at_on_the_way(tasks, monkeypatch):
    """Not whole: the first `eval_tokens` tokens are enough."""
    for case in ("classes", "masked"):
        task, model = tasks[case]
        small = TrainConfig(batch_size=1, context_length=32, steps=1, eval_tokens=1)
        monkeypatch.setattr(task, "settings", small)
        assert task.evaluate(model, False)["validation_loss"] != task.evaluate(model, True)["validation_loss"]


@pytest.mark.parametrize("case", ["classes", "translation"])
def test_a_run_resumes_to_the_same_bits(case, tmp_path):
    """Labels and head are in the run's folder; 4 steps are 2 and 2, and the last file of weights is equal."""
    recipe = make_recipe(tmp_path, case)
    whole = train(recipe, tmp_path / "whole")
    train(recipe, tmp_path / "cut", stop_after=2)
    cut = train(recipe, tmp_path / "cut", resume=True)
    one, other = (run.model()[0].state_dict() for run in (whole, cut))
    assert all(torch.equal(one[name], other[name]) for name in one)
    if case == "classes":
        assert (
            whole.labels() == sorted({text.split()[0] for text in texts()}) and whole.config().n_labels == 8
        )


def test_a_vocabulary_is_learned_from_the_training_examples(tmp_path):
    """Without a tokenizer one is learned; for masked tokens it has one that hides."""
    for case in ("classes", "masked"):
        folder = tmp_path / case
        (folder / "run").mkdir(parents=True)
        data, model = {"tokenizer": None, "vocab_size": 270}, {"vocab_size": 270}
        recipe = make_recipe(folder, case, data=data, model=model)
        task, recipe = make_task(recipe, RunFolder(folder / "run"), lambda text: None)
        assert task.tokenizer.vocab_size == recipe.model.vocab_size <= 270
        assert (MASK in task.tokenizer.special_tokens) == (case == "masked")


def test_a_decoder_reads_the_right_tokens_one_later(tasks):
    """The rows of a translation are the labels moved by one behind the token that begins."""
    task, _ = tasks["translation"]
    batch = task.batch(0)
    moved = shift_right(batch.targets, 256, 256)
    assert batch.mask is not None and torch.equal(batch.inputs[batch.mask], moved[batch.mask])
    assert torch.equal(batch.mask, batch.targets != -100)


def test_the_head_of_a_recipe_follows_from_its_objective(tmp_path):
    """Also where only the config is asked for."""
    recipe = make_recipe(tmp_path, "masked")
    save_recipe(recipe, tmp_path / "recipe.toml")
    assert find_config(tmp_path / "recipe.toml").head == "masked"
    save_recipe(make_recipe(tmp_path, "classes"), tmp_path / "recipe.toml")
    assert find_config(tmp_path / "recipe.toml").head == "sequence"


def test_hidden_tokens_are_never_special(tasks):
    task, _ = tasks["masked"]
    for index in range(5):
        batch = task.batch(index)
        asked = batch.targets != -100
        assert (batch.targets[asked] < 256).all() and (batch.inputs == 257).any()


# ----------------------------------------------------------------------------------------------- mistakes

NEEDS = r"train\.objective='classes' needs model\.shape='encoder' or 'decoder', not 'encoder-decoder'"
MISTAKES: list[tuple[str, dict[str, Any], str]] = [
    ("classes", {"model": {"shape": "encoder-decoder"}}, NEEDS),
    (
        "masked",
        {"model": {"shape": "decoder"}},
        r"needs model\.shape='encoder', not 'decoder'",
    ),
    ("span", {"model": {"head": "token", "n_labels": 2}}, r"needs model\.head='span', not 'token'; leave"),
    ("several_labels", {"model": {"pool": "first"}}, r"choose model\.pool='last' or 'mean'"),
    ("classes", {"mask_share": 0.5}, r"train\.mask_share=0\.5 has no effect with train\.objective='classes'"),
    ("next_token", {"data": {"target": "b.txt"}}, r"data\.target='b\.txt' has no effect with"),
    ("regression", {"label_smoothing": 0.1}, r"train\.label_smoothing=0\.1 has no effect"),
    (
        "classes",
        {"data": {"source": "python"}},
        r"learns from labelled texts: give their file as",
    ),
    ("classes", {"data": {"label_field": "lable"}}, r"a\.jsonl:1: .*'lable'"),
    ("classes", {"data": {"source": "nothing.csv"}}, r"nothing\.csv"),
    (
        "classes",
        {"model": {"head": "sequence", "n_labels": 5}},
        r"n_labels=5, but the training examples have 8",
    ),
    (
        "several_labels",
        {"objective": "classes"},
        r"jsonl:1: the label is a list, .*='several_labels'",
    ),
    ("classes", {"objective": "several_labels"}, r"a\.jsonl:1: the label is no list, 'red'; .*='classes'"),
    ("classes", {"objective": "regression"}, r"a\.jsonl:1: 'label' is .*not a finite number"),
    ("classes", {"model": {"vocab_size": 300}}, r"model\.vocab_size=300 but the tokenizer has 258 tokens"),
    (
        "translation",
        {"data": {"field": "de"}},
        r"names one side of the pairs; give data\.target_field",
    ),
]


@pytest.mark.parametrize(("case", "changes", "message"), MISTAKES)
def test_mistakes_are_named_before_any_work(case, changes, message, tmp_path, monkeypatch):
    """In one line, and no checkpoint is written."""
    monkeypatch.chdir(tmp_path)
    recipe = make_recipe(tmp_path, case, **changes)
    with pytest.raises((ValueError, KeyError, FileNotFoundError), match=message) as caught:
        train(recipe, tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_labels_of_validation_are_those_of_training(tmp_path):
    """A label that is not in the training examples has no number."""
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "blue 3", "label": "blue"}\n', encoding="utf-8")
    recipe = make_recipe(tmp_path, "classes", data={"validation": str(other)})
    with pytest.raises(ValueError, match=r"other\.jsonl:1: label 'blue' is none of the 8 of the training"):
        train(recipe, tmp_path / "run")


def test_a_split_without_examples_is_named(tmp_path):
    """Few examples may all fall on one side."""
    recipe = make_recipe(tmp_path, "regression")
    rows = [{"text": "a", "label": 1}, {"text": "b", "label": 2}]
    Path(recipe.data.source).write_text(jsonl(rows), encoding="utf-8")
    with pytest.raises(ValueError, match=r"2 examples are too few.* give a validation file of its own"):
        train(recipe, tmp_path / "run")


def test_masked_needs_a_token_that_hides(tmp_path):
    plain = Tokenizer({i: bytes([i]) for i in range(256)} | {256: END.encode()}, [], (END,))
    path = plain.save(tmp_path / "plain.json")
    recipe = make_recipe(tmp_path, "masked", data={"tokenizer": str(path)}, model={"vocab_size": 257})
    with pytest.raises(ValueError, match=r"needs a tokenizer with a token that hides others, such as <mask>"):
        train(recipe, tmp_path / "run")


# ----------------------------------------------------------------------------------------------- parts


@settings(deadline=None, max_examples=40)
@given(length=st.integers(1, 9), longest=st.integers(1, 4), seed=st.integers(0, 99))
def test_the_best_piece_is_found(length, longest, seed):
    """Equal to trying every start and every end."""
    source = torch.Generator().manual_seed(seed)
    logits = torch.randn(length, 2, generator=source)
    inside = torch.rand(length, generator=source) < 0.7
    offsets = [(2 * i, 2 * i + 1) if inside[i] else (-1, -1) for i in range(length)]
    found = best_piece(logits, offsets, longest)
    tried = {
        (first, last): (logits[first, 0] + logits[last, 1]).item()
        for first in range(length)
        for last in range(first, min(first + longest, length))
        if inside[first] and inside[last]
    }
    assert found.nothing == pytest.approx(logits[0].sum().item())
    if tried:
        first, last = max(tried, key=lambda pair: tried[pair])
        assert (found.start, found.end) == (2 * first, 2 * last + 1)
        assert found.score == pytest.approx(tried[first, last])
    else:
        assert found.score == -math.inf


def test_correlation_of_what_does_not_vary():
    assert correlation([1.0, 1.0], [2.0, 3.0]) == 0.0
    assert correlation([1.0, 2.0, 3.0], [-1.0, -2.0, -3.0]) == pytest.approx(-1)


def test_the_contrastive_batch_has_both_texts(tasks):
    """Rows of the same number belong together, each padded for itself."""
    task, _ = tasks["contrastive"]
    assert isinstance(task, Contrastive)
    batch = task.batch(0)
    assert batch.mask is not None and len(batch.inputs) == 16 and batch.source is None
    rows = zip(batch.inputs, batch.mask, strict=True)
    said = [task.tokenizer.decode(row[real].tolist()) for row, real in rows]
    assert [text.upper() for text in said[:8]] == [text.upper() for text in said[8:]]
