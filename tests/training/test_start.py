"""Training that starts from a model: what is taken over, what is new, and that it comes back as it was."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead import load
from clearhead.cli_models import open_model
from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer
from clearhead.published.models import save
from clearhead.training.checkpoint import load_checkpoint
from clearhead.training.loop import train
from clearhead.training.predict import classify, make_reader
from clearhead.training.recipe import DataConfig, Recipe, TrainConfig
from clearhead.training.report import JsonLines, Watcher, read_metrics
from clearhead.training.run_folder import RunFolder, load_run
from clearhead.training.start import fill, fit_recipe, open_start
from tiny_published import WORDS, make_bert
from tiny_run import tiny_recipe, write_corpus

pytestmark = pytest.mark.slow

Made = Callable[..., tuple[Path, Any, Any]]


class Notes(Watcher):
    """Keeps what a run says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def on_note(self, text: str) -> None:
        self.said.append(text)


@pytest.fixture(scope="module")
def made(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Make a published model of a class."""
    home = tmp_path_factory.mktemp("published")

    def make(kind: str, **settings: Any) -> tuple[Path, Any, Any]:
        folder = home / (kind + "-".join(map(str, settings)))
        if folder.exists():
            return folder, None, None
        return folder, *make_bert(transformers, folder, kind, **settings)

    return make


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts with the animal in them as their label."""
    folder, words = tmp_path_factory.mktemp("labelled"), WORDS.split()
    lines = [
        f"{'cat' if number % 2 else 'dog'}\tthe {'cat' if number % 2 else 'dog'} {words[number % 17]} "
        f"{words[number % 13]} {number}"
        for number in range(60)
    ]
    (folder / "train.tsv").write_text("label\ttext\n" + "\n".join(lines) + "\n", encoding="utf-8")
    return folder / "train.tsv"


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run that others start from; text/ beside it is what it learned."""
    home = tmp_path_factory.mktemp("begun")
    write_corpus(home / "text")
    train(tiny_recipe(home / "text", probes=0), home / "run")
    return home


def recipe_for(source: Path, start: Path, **settings: Any) -> Recipe:
    options: dict[str, Any] = {"objective": "classes", "steps": 6, "batch_size": 4, "context_length": 20}
    options |= {"eval_every": 3, "save_every": 3, "lr": 3e-3, "probes": 0, "start_from": str(start)}
    return Recipe(DataConfig(source=str(source)), ModelConfig(), TrainConfig(**(options | settings)))


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    return RunFolder(run).model()[0].state_dict()


# ----------------------------------------------------------------------------------------------------- runs


def test_a_run_goes_on_from_another_ones_weights(begun: Path, tmp_path: Path) -> None:
    """With a learning rate of almost nothing, the new run ends where the old one did."""
    notes, recipe = Notes(), tiny_recipe(begun / "text", start_from=str(begun / "run"), lr=1e-12, steps=2)
    train(recipe, tmp_path / "run", watchers=[notes])
    assert f"start_from={begun / 'run'}: 21 tensors taken over" in notes.said
    for name, tensor in weights_of(begun / "run").items():
        torch.testing.assert_close(weights_of(tmp_path / "run")[name], tensor, rtol=0, atol=1e-6)
    ours, theirs = load_run(tmp_path / "run")[1], load_run(begun / "run")[1]
    assert ours.fingerprint == theirs.fingerprint


def test_a_run_that_died_before_its_first_save_begins_with_those_weights_again(
    begun: Path, tmp_path: Path
) -> None:
    """There is no checkpoint to resume from; the weights are not those of a new model."""

    class Dies(Watcher):
        def on_step(self, step: int, metrics: dict[str, Any]) -> None:
            raise OSError("the machine is gone")

    recipe = tiny_recipe(begun / "text", start_from=str(begun / "run"), lr=1e-12, steps=2, probes=0)
    with pytest.raises(OSError, match="the machine is gone"):
        train(recipe, tmp_path / "run", watchers=[Dies()])
    train(recipe, tmp_path / "run", resume=True)
    for name, tensor in weights_of(begun / "run").items():
        torch.testing.assert_close(weights_of(tmp_path / "run")[name], tensor, rtol=0, atol=1e-6)


def test_adapters_resume_to_the_bit_and_their_run_is_a_plain_model(begun: Path, tmp_path: Path) -> None:
    lora: dict[str, Any] = {"start_from": str(begun / "run"), "lora_rank": 2, "lora_on": ("q", "down")}
    recipe = tiny_recipe(begun / "text", probes=2, **lora)
    notes = Notes()
    train(recipe, tmp_path / "whole", watchers=[notes])
    assert any(note.startswith("LoRA: adapters on 4 layers; 640 of") for note in notes.said)
    train(recipe, tmp_path / "parts", stop_after=5)
    train(recipe, tmp_path / "parts", resume=True)
    one, other = (tmp_path / name / "checkpoints/step-00000010" for name in ("whole", "parts"))
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (one / file).read_bytes() == (other / file).read_bytes()
    before, after = weights_of(begun / "run"), weights_of(tmp_path / "whole")
    assert list(after) == list(before)
    moved = {name for name in after if not torch.equal(after[name], before[name])}
    assert moved == {f"decoder.blocks.{i}.{layer}.weight" for i in (0, 1) for layer in ("attn.q", "ff.down")}
    probe = Transformer(RunFolder(begun / "run").config())
    load_checkpoint(sorted((tmp_path / "whole/probes").iterdir())[-1], probe)


# ------------------------------------------------------------------------------------------ published models


def test_a_published_encoder_becomes_a_classifier(
    made: Made, labelled: Path, tmp_path: Path, transformers: Any
) -> None:
    """The head is that of its family, so that what was trained is a classifier for `transformers`, too."""
    folder, _, _ = made("BertModel")
    notes = Notes()
    train(recipe_for(labelled, folder, steps=40), tmp_path / "run", watchers=[notes, JsonLines()])
    said = next(note for note in notes.said if note.startswith("start_from="))
    assert said.endswith("new: head.out.bias, head.out.weight")
    config = RunFolder(tmp_path / "run").config()
    assert (config.head, config.n_labels, config.head_activation) == ("sequence", 2, "tanh")
    assert RunFolder(tmp_path / "run").labels() == ["cat", "dog"]
    losses = [
        row["validation_loss"]
        for row in read_metrics(RunFolder(tmp_path / "run").metrics_file)
        if "validation_loss" in row
    ]
    assert losses[-1] < losses[0]

    model, tokenizer = open_model(tmp_path / "run")
    assert tokenizer is not None
    found = classify(make_reader(tmp_path / "run", model, tokenizer), ["the cat sees", "the dog sees"])
    assert set(found[0]) == {"cat", "dog"}
    settings = RunFolder(tmp_path / "run").published_settings()
    save(model, tokenizer, tmp_path / "out", settings=settings)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    encoded = transformers.AutoTokenizer.from_pretrained(folder)("the cat sees", return_tensors="pt")
    with torch.no_grad():
        expected = theirs(**encoded).logits[0].softmax(-1)
    assert found[0]["cat"] == pytest.approx(expected[0].item(), abs=1e-5)
    assert theirs.config.id2label == {0: "cat", 1: "dog"}
    assert theirs.config.model_type == "bert"


def filled(start_at: Path, objective: Any, labels: list[str] | None = None) -> tuple[Any, Any, str]:
    """The model that is started from, the new one, and what is said of it."""
    start = open_start(str(start_at))
    recipe = fit_recipe(recipe_for(Path("unread.tsv"), start_at, objective=objective), start)
    config = recipe.model
    if config.head in ("sequence", "token"):
        config = config.replace(n_labels=len(labels or ["one", "two"]))
    model = Transformer(config, seed=3)
    said = fill(model, start, labels)
    return start.model, model, said


def test_a_head_is_kept_where_it_means_the_same(made: Made) -> None:
    names = {0: "bad", 1: "good"}
    folder, _, _ = made("BertForSequenceClassification", id2label=names)
    before, after, said = filled(folder, "classes", ["bad", "good"])
    assert "new" not in said
    assert torch.equal(after.head.out.weight, before.head.out.weight)
    before, after, said = filled(folder, "classes", ["no", "yes"])
    assert "new: head.out.bias, head.out.weight; left out: head.out.bias, head.out.weight" in said
    assert torch.equal(after.head.dense.weight, before.head.dense.weight)
    before, after, said = filled(folder, "classes", ["bad", "good", "so so"])
    assert after.head.out.weight.shape == (3, 32) and "new: head.out.bias, head.out.weight" in said


def test_a_head_of_another_kind_is_new(made: Made) -> None:
    folder, _, _ = made("BertForMaskedLM")
    before, after, said = filled(folder, "masked")
    assert "new" not in said and torch.equal(after.head.dense.weight, before.head.dense.weight)
    assert after.head.weight is after.embed.weight
    before, after, said = filled(folder, "classes")
    assert "left out: head.bias" in said and "new: head.dense.bias" in said
    assert not torch.equal(after.head.dense.weight, before.head.dense.weight)
    assert torch.equal(after.embed.weight, before.embed.weight)
    for objective, head in (("token_labels", "token"), ("span", "span"), ("contrastive", "embedding")):
        before, after, said = filled(folder, objective)
        assert after.config.head == head
        assert torch.equal(after.encoder.blocks[1].ff.up.weight, before.encoder.blocks[1].ff.up.weight)


def test_a_decoder_reads_to_the_end_before_it_classifies(begun: Path) -> None:
    _, after, said = filled(begun / "run", "classes")
    assert (after.config.pool, after.config.head_bias) == ("last", True)
    assert "new: head.out.bias, head.out.weight" in said


# -------------------------------------------------------------------------------------------------- mistakes


def test_mistakes_are_told_before_any_work(made: Made, labelled: Path, begun: Path, tmp_path: Path) -> None:
    folder, _, _ = made("BertModel")
    recipe = recipe_for(labelled, folder)
    run = str(begun / "run")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")

    def with_model(**fields: Any) -> Recipe:
        return replace(recipe, model=ModelConfig(**fields))

    def with_data(**fields: Any) -> Recipe:
        return replace(recipe, data=replace(recipe.data, **fields))

    cases = {
        "there is no such folder; give a run or a published model": recipe_for(labelled, tmp_path / "no"),
        "a GGUF file is for using a model": recipe_for(labelled, tmp_path / "model.gguf"),
        "exceeds the 24 positions": recipe_for(labelled, folder, context_length=25),
        "is of shape 'encoder'; objective='translation' needs": recipe_for(
            labelled, folder, objective="translation"
        ),
        r"model.n_layers=3, but start_from=.* has 2": with_model(n_layers=3),
        "model.head='token', but objective='classes' needs 'sequence'": with_model(head="token", n_labels=2),
        "is another vocabulary than that of start_from": with_data(tokenizer=run),
    }
    for message, wrong in cases.items():
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            train(wrong, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=r"lora_rank=2 has an effect only with start_from"):
        TrainConfig(steps=1, lora_rank=2)
    with pytest.raises(ValueError, match=r"lora_alpha=2.0 has an effect only with lora_rank"):
        TrainConfig(steps=1, lora_alpha=2.0)


def test_a_model_that_was_changed_meanwhile_cannot_be_resumed_as_another(begun: Path, tmp_path: Path) -> None:
    recipe = tiny_recipe(begun / "text", start_from=str(begun / "run"), probes=0)
    train(recipe, tmp_path / "run", stop_after=5)
    other = replace(recipe, model=recipe.model.replace(attn_dropout=0.5))
    with pytest.raises(ValueError, match=r"model.attn_dropout: 0.0 -> 0.5"):
        train(other, tmp_path / "run", resume=True)
    assert load(make_copy(tmp_path / "run", tmp_path / "copy"))[0].config.n_layers == 2


def make_copy(run: Path, out: Path) -> Path:
    """A run written as a published model, from which one can start as well."""
    model, tokenizer = load_run(run)
    save(model, tokenizer, out)
    assert open_start(str(out)).tokenizer.fingerprint == tokenizer.fingerprint
    return out
