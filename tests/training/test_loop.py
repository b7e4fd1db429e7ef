"""The training loop, on a model that takes a moment: exact, resumable, honest about steps that go wrong."""

import hashlib
import json
import math
import shutil
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.model.config_parts import ExpertsConfig
from clearhead.model.transformer import Transformer
from clearhead.text.batches import Batches
from clearhead.text.shards import Shards
from clearhead.training import budget, run_folder
from clearhead.training.checkpoint import checkpoints
from clearhead.training.data import prepare_data
from clearhead.training.durable import lock_run
from clearhead.training.loop import Interrupted, Trainer, train
from clearhead.training.machine import find_device
from clearhead.training.objectives import cross_entropy
from clearhead.training.recipe import Recipe
from clearhead.training.report import TIMINGS, JsonLines, Samples, Watcher, read_metrics
from clearhead.training.run_folder import RunFolder, load_run
from clearhead.training.step import Stepper, dropout_seed
from clearhead.training.tasks import make_task
from tiny_run import tiny_recipe, write_corpus

# Many runs: the shapes are checked in the tests of the model, here they would double the time.
pytestmark = pytest.mark.usefixtures("unchecked")

DROPOUT = {"embed_dropout": 0.1, "attn_dropout": 0.1, "residual_dropout": 0.1, "ff_dropout": 0.1}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven texts: 10 steps see them more than once."""
    return write_corpus(tmp_path_factory.mktemp("loop") / "corpus", documents=7)


@pytest.fixture(scope="module")
def template(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus prepared with a tokenizer learned from it, so that not every run has to."""
    folder = tmp_path_factory.mktemp("template")
    prepare_data(tiny_recipe(corpus).data, RunFolder(folder), note=lambda text: None)
    return folder / "data"


def log_of(folder: Path) -> list[dict[str, Any]]:
    """The loss log without timings."""
    return [
        {name: value for name, value in entry.items() if name not in TIMINGS}
        for entry in read_metrics(folder / "metrics.jsonl")
    ]


def losses(folder: Path) -> list[float]:
    return [entry["loss"] for entry in log_of(folder) if "loss" in entry]


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run ends with, to the bit."""
    newest = checkpoints(folder)[0]
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(newest.iterdir())}
    return {"step": newest.name, "log": log_of(folder), **hashes}


def weights_of(model: torch.nn.Module) -> str:
    parts = [value.numpy().tobytes() for value in model.state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def moments_of(optimizer: torch.optim.Optimizer) -> str:
    parts = [value.numpy().tobytes() for state in optimizer.state.values() for value in state.values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def run(recipe: Recipe, folder: Path, *watchers: Watcher, **how: Any) -> Path:
    return train(recipe, folder, watchers=[JsonLines(), *watchers], **how).path


def trainer(recipe: Recipe, folder: Path, *watchers: Watcher) -> Trainer:
    """A trainer at the beginning of its run."""
    run_folder = RunFolder(folder)
    folder.mkdir(exist_ok=True)
    task, recipe = make_task(recipe, run_folder, note=lambda text: None)
    made = Trainer(recipe, run_folder, task, watchers)
    made.start(resume=False)
    return made


class Events(Watcher):
    """Writes down what it hears; `at` maps a step to what to do there."""

    def __init__(self, at: dict[int, Callable[[], object]] | None = None) -> None:
        self.heard: list[str] = []
        self.notes: list[str] = []
        self.at = at or {}

    def on_note(self, text: str) -> None:
        self.notes.append(text)

    def on_start(self, run: RunFolder, first_step: int, steps: int) -> None:
        self.heard.append(f"start {first_step}/{steps}")

    def on_step(self, step: int, metrics: dict[str, Any]) -> None:
        self.heard.append(f"step {step}")
        self.at.get(step, lambda: None)()

    def on_evaluation(self, step: int, metrics: dict[str, Any]) -> None:
        self.heard.append(f"evaluation {step}")

    def on_sample(self, step: int, text: str) -> None:
        self.heard.append(f"sample {step}")

    def before_save(self, step: int) -> None:
        self.heard.append(f"save {step}")
        self.at.get(-step, lambda: None)()

    def on_end(self) -> None:
        self.heard.append("end")


# ---------------------------------------------------------------- exactness


@pytest.mark.parametrize("cuts", [(5,), (3, 6)], ids=["5+5", "3+3+4"])
@pytest.mark.parametrize(
    "kind", [{}, {"document_mask": True, "dtype": "bfloat16"}], ids=["plain", "documents"]
)
def test_ten_steps_are_five_and_five(template, tmp_path, cuts, kind):
    """Weights, optimizer and log to the bit, with dropout, two micro-batches a step and several epochs."""
    recipe = tiny_recipe(template, model=DROPOUT, batch_size=3, accumulation=2, **kind)
    whole = run(recipe, tmp_path / "whole")
    parts = run(recipe, tmp_path / "parts", stop_after=cuts[0])
    for cut in (*cuts[1:], None):
        run(recipe, parts, resume=True, stop_after=cut)
    assert outcome(parts) == outcome(whole)
    assert [entry["step"] for entry in log_of(whole) if "loss" in entry] == list(range(10))


def test_experts_learn_and_resume_exactly(template, tmp_path):
    """Routers' losses count in the gradient, not in the log; corrections move by one rate; 10 = 5+5."""
    experts = ExpertsConfig(4, 2, 24, correction_bias=True, balance_loss=0.5, z_loss=0.1, jitter=0.1)
    recipe = tiny_recipe(
        template, model={"experts": experts, "attn_dropout": 0.1}, batch_size=3, accumulation=2
    )
    whole = run(recipe, tmp_path / "whole")
    parts = run(recipe, tmp_path / "parts", stop_after=5)
    run(recipe, parts, resume=True)
    assert outcome(parts) == outcome(whole)
    bare = replace(recipe, model=recipe.model.replace(experts=replace(experts, balance_loss=0.0, z_loss=0.0)))
    free = run(bare, tmp_path / "free")
    assert losses(free)[0] == losses(whole)[0]
    assert losses(free)[1] != losses(whole)[1]
    state = RunFolder(whole).model()[0].state_dict()
    moves = torch.stack([value for name, value in state.items() if name.endswith("correction")]) / 1e-3
    assert moves.abs().max() > 1
    torch.testing.assert_close(moves, moves.round(), atol=1e-3, rtol=0)


def test_the_same_recipe_twice_gives_the_same_run(template, tmp_path):
    """Also from the text itself; and another seed gives another run."""
    recipe = tiny_recipe(template, model=DROPOUT)
    first, second = (outcome(run(recipe, tmp_path / name)) for name in "ab")
    assert first == second
    other = run(tiny_recipe(template, model=DROPOUT, seed=1), tmp_path / "c")
    assert losses(other)[0] != first["log"][0]["loss"]


def test_looking_changes_nothing(template, tmp_path):
    """Evaluation, samples and checkpoints in every step leave no trace in the weights."""
    often: dict[str, Any] = {"eval_every": 1, "sample_every": 1, "sample_tokens": 3, "save_every": 1}
    seldom: dict[str, Any] = {"eval_every": 10, "sample_every": 0, "save_every": 10}
    files = []
    for name, settings in (("often", often), ("seldom", seldom)):
        folder = run(tiny_recipe(template, model=DROPOUT, **settings), tmp_path / name, Samples())
        files.append((checkpoints(folder)[0] / "model.safetensors").read_bytes())
    assert files[0] == files[1]
    assert losses(tmp_path / "often") == losses(tmp_path / "seldom")


def test_micro_batches_equal_one_batch(template, tmp_path):
    """Sum of token losses / targets of the whole step; with documents the parts have unequal counts."""
    kinds: list[dict[str, Any]] = [{}, {"document_mask": True}]
    for kind in kinds:
        one = run(tiny_recipe(template, batch_size=4, **kind), tmp_path / f"one-{len(kind)}")
        two = run(tiny_recipe(template, batch_size=2, accumulation=2, **kind), tmp_path / f"two-{len(kind)}")
        assert losses(two) == pytest.approx(losses(one), rel=1e-6)
        assert log_of(two)[-1]["validation_loss"] == pytest.approx(
            log_of(one)[-1]["validation_loss"], rel=1e-5
        )
        assert [e["tokens"] for e in log_of(one) if "tokens" in e] == [
            e["tokens"] for e in log_of(two) if "tokens" in e
        ]


def test_the_first_loss_by_hand(template, tmp_path):
    """With a document mask: each piece of a document alone, from position 0, summed and divided once."""
    recipe = tiny_recipe(template, document_mask=True, batch_size=32)
    folder = run(recipe, tmp_path / "run", stop_after=1)
    model = Transformer(RunFolder(folder).config(), seed=0).eval()
    batch = Batches(Shards(template / "train"), 32, 16, seed=0, document_mask=True).batch(0)
    assert batch.documents is not None
    assert batch.documents.max() > 0, "the batch should hold a border of documents"
    total = torch.zeros(())
    for inputs, targets, documents in zip(batch.inputs, batch.targets, batch.documents, strict=True):
        for document in documents.unique():
            here = documents == document
            logits = model(inputs[here][None])[0]
            total += cross_entropy(logits, targets[here], reduction="sum").detach()
    expected = total / (batch.targets != -100).sum()
    assert losses(folder)[0] == pytest.approx(expected.item(), rel=1e-5)


def test_dropout_seeds_depend_on_what_they_should():
    seeds = {dropout_seed(*key) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 8))}
    assert len(seeds) == 5
    assert dropout_seed(0, 1, 2) == dropout_seed(0, 1, 2)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_bfloat16_keeps_the_weights_in_float32(template, tmp_path):
    folder = run(tiny_recipe(template, dtype="bfloat16"), tmp_path / "run")
    model, _ = load_run(folder)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    exact = run(tiny_recipe(template), tmp_path / "exact")
    assert losses(folder) != losses(exact)
    assert losses(folder) == pytest.approx(losses(exact), rel=0.02)


@pytest.mark.compiled
@pytest.mark.slow
def test_a_compiled_run_resumes_to_the_bit(template, tmp_path):
    """With dropout, too; and its checkpoints hold the plain model's names."""
    often: dict[str, Any] = {"steps": 2, "eval_every": 2, "save_every": 1}
    recipe = tiny_recipe(template, model={**DROPOUT, "n_layers": 1}, compile="on", **often)
    whole = run(recipe, tmp_path / "whole")
    parts = run(recipe, tmp_path / "parts", stop_after=1)
    run(recipe, parts, resume=True)
    assert outcome(parts) == outcome(whole)
    model, _ = load_run(parts)
    assert not [name for name in model.state_dict() if "_orig_mod" in name]


# ---------------------------------------------------------------- budgets and rates


def test_a_budget_of_tokens(template, tmp_path):
    """64 target tokens in a step: 300 are 5 steps, the last of them begun."""
    folder = run(tiny_recipe(template, tokens=300), tmp_path / "run")
    assert checkpoints(folder)[0].name == "step-00000005"
    assert log_of(folder)[-2]["tokens"] == 320


def test_a_budget_of_minutes(template, tmp_path, monkeypatch):
    """Measured once: 6 seconds at half a second are 12 steps. The measuring leaves no trace in the weights,
    and a resumed run measures nothing.
    """

    class Clock:
        seconds = 0.0

        def perf_counter(self) -> float:
            self.seconds += 0.5
            return self.seconds

    monkeypatch.setattr(budget, "time", Clock())
    recipe, events = tiny_recipe(template, model=DROPOUT, minutes=0.1), Events()
    measured = run(recipe, tmp_path / "minutes", events, stop_after=7)
    assert "0.1 minutes at 0.500 s per step: 12 steps" in events.notes
    assert RunFolder(measured).recipe().train.budget() == {"steps": 12}
    assert RunFolder(measured).budget() == {"minutes": 0.1}
    monkeypatch.setattr(Stepper, "measure", None)
    run(recipe, measured, resume=True)
    counted = run(tiny_recipe(template, model=DROPOUT, steps=12), tmp_path / "steps")
    assert outcome(measured) == outcome(counted)


def test_a_measured_budget_is_at_least_one_step(template, tmp_path):
    folder = run(tiny_recipe(template, minutes=1e-9), tmp_path / "run")
    assert checkpoints(folder)[0].name == "step-00000001"


def test_the_log_tells_the_rate_that_was_used(template, tmp_path):
    recipe = tiny_recipe(template, lr=0.01, warmup=0.5, schedule="constant")
    rates = [entry["lr"] for entry in log_of(run(recipe, tmp_path / "run")) if "lr" in entry]
    assert rates == pytest.approx([0.002, 0.004, 0.006, 0.008] + [0.01] * 6)


def test_clip_of_zero_is_no_clipping(template, tmp_path):
    folders = [run(tiny_recipe(template, clip=clip), tmp_path / str(clip)) for clip in (0.0, 1e9, 0.01)]
    assert losses(folders[0]) == losses(folders[1]) != losses(folders[2])


# ---------------------------------------------------------------- steps that go wrong


def spoil_gradient(made: Trainer, name: str, steps: set[int], value: float = math.nan) -> None:
    """Let the gradient of one parameter hold a bad number in some steps."""

    def spoil(gradient: torch.Tensor) -> torch.Tensor | None:
        if made.step not in steps:
            return None
        bad = gradient.clone()
        bad.view(-1)[3] = value
        return bad

    made.model.get_parameter(name).register_hook(spoil)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bad_gradient_stops_before_the_update(template, tmp_path, value):
    """No weight and no moment moves; the message names the step, counted from 1, and the parameter."""
    made = trainer(tiny_recipe(template), tmp_path / "run")
    spoil_gradient(made, "decoder.blocks.1.ff.up.weight", {2}, value)
    for _ in range(2):
        made._take_step()
    before = weights_of(made.model), moments_of(made.learner.optimizer)
    with pytest.raises(ValueError, match=r"^step 3: the gradient of decoder.blocks.1.ff.up.weight is not "):
        made._take_step()
    assert (weights_of(made.model), moments_of(made.learner.optimizer)) == before
    assert made.step == 2


def test_a_bad_loss_stops_before_the_update(template, tmp_path, monkeypatch):
    made = trainer(tiny_recipe(template), tmp_path / "run")
    made._take_step()
    before = weights_of(made.model)
    honest = made.task.loss
    monkeypatch.setattr(made.task, "loss", lambda *a: honest(*a) * math.inf)
    with pytest.raises(ValueError, match=r"step 2: the loss is not finite; no update was made; lower"):
        made._take_step()
    assert weights_of(made.model) == before


def test_gradients_whose_norm_overflows(template, tmp_path):
    """Every number is finite and their norm is not: it is named itself."""
    made = trainer(tiny_recipe(template), tmp_path / "run")
    made.model.get_parameter("decoder.norm.weight").register_hook(lambda g: torch.full_like(g, 3e38))
    with pytest.raises(ValueError, match="step 1: the gradient's norm is not finite"):
        made._take_step()


def test_skipping_leaves_the_weights_and_goes_on(template, tmp_path):
    """The step counts, nothing moves, a note says so, the log has null for the loss if that was bad."""
    events = Events()
    recipe = tiny_recipe(template, on_nonfinite="skip", max_skips=2)
    made = trainer(recipe, tmp_path / "run", events, JsonLines())
    spoil_gradient(made, "embed.weight", {3, 4})
    seen = []
    for watcher in made.watchers:
        watcher.on_start(made.run, 0, 10)
    for _ in range(6):
        made._take_step()
        seen.append(weights_of(made.model))
    assert seen[2] == seen[3] == seen[4] != seen[5]
    assert [note for note in events.notes if "step" in note] == [
        "step 4: the gradient of embed.weight is not finite; no update was made",
        "step 5: the gradient of embed.weight is not finite; no update was made",
    ]
    made.watchers[1].on_end()
    assert [entry["norm"] is None for entry in log_of(made.run.path) if "norm" in entry] == [
        False,
        False,
        False,
        True,
        True,
        False,
    ]


def test_skipping_is_bounded_also_over_a_resume(template, tmp_path):
    """How many steps in a row were skipped is part of the state that a checkpoint holds."""
    recipe = tiny_recipe(template, on_nonfinite="skip", max_skips=2)
    made = trainer(recipe, tmp_path / "run")
    spoil_gradient(made, "embed.weight", {0, 1, 2})
    made._take_step()
    made._take_step()
    made.save()
    again = Trainer(made.recipe, made.run, made.task, ())
    again.start(resume=True)
    spoil_gradient(again, "embed.weight", {2})
    with pytest.raises(ValueError, match=r"step 3: .*; that was 3 times in a row \(max_skips=2\)"):
        again._take_step()


# ---------------------------------------------------------------- being stopped


def test_watchers_hear_in_order(template, tmp_path):
    events = Events()
    recipe = tiny_recipe(template, steps=4, eval_every=2, sample_every=4, sample_tokens=2, save_every=2)
    run(recipe, tmp_path / "run", events)
    assert events.heard == [
        "start 0/4",
        "step 0",
        "step 1",
        "evaluation 1",
        "save 2",
        "step 2",
        "step 3",
        "evaluation 3",
        "sample 3",
        "save 4",
        "end",
    ]
    assert any(note.startswith("device=auto: cpu") for note in events.notes)
    assert any(note.startswith("compile=auto: not compiled") for note in events.notes)


def test_watchers_hear_the_end_of_a_failed_run(template, tmp_path):
    def fail() -> None:
        raise ValueError("stop here")

    events = Events({2: fail})
    with pytest.raises(ValueError, match="stop here"):
        run(tiny_recipe(template), tmp_path / "run", events)
    assert events.heard[-2:] == ["step 2", "end"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_after_the_step(template, tmp_path, number):
    """Saved at the step that was finished; the former handlers are back; the resumed run ends as any."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    recipe = tiny_recipe(template, model=DROPOUT)
    with pytest.raises(Interrupted, match="stopped after 7 steps"):
        run(recipe, tmp_path / "run", Events({6: lambda: signal.raise_signal(number)}))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    assert checkpoints(tmp_path / "run")[0].name == "step-00000007"
    run(recipe, tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(run(recipe, tmp_path / "whole"))


def test_a_signal_in_a_save_lets_it_finish(template, tmp_path):
    """In one on the way the run stops after it; in the last there is nothing left to stop."""
    recipe = tiny_recipe(template)
    with pytest.raises(Interrupted, match="stopped after 5 steps"):
        run(recipe, tmp_path / "way", Events({-5: lambda: signal.raise_signal(signal.SIGINT)}))
    assert len(checkpoints(tmp_path / "way")) == 1
    run(recipe, tmp_path / "last", Events({-10: lambda: signal.raise_signal(signal.SIGINT)}))
    assert checkpoints(tmp_path / "last")[0].name == "step-00000010"


def test_a_second_ctrl_c_stops_at_once(template, tmp_path):
    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run(tiny_recipe(template), tmp_path / "run", Events({1: twice}))
    assert checkpoints(tmp_path / "run") == []


def test_training_in_another_thread(template, tmp_path):
    """Signals belong to the main thread; elsewhere training works without them."""
    thread = threading.Thread(target=run, args=(tiny_recipe(template), tmp_path / "run"))
    thread.start()
    thread.join()
    assert checkpoints(tmp_path / "run")[0].name == "step-00000010"


def test_only_one_process_may_write(template, tmp_path):
    recipe = tiny_recipe(template)
    folder = run(recipe, tmp_path / "run", stop_after=1)
    with lock_run(folder), pytest.raises(BlockingIOError, match="in use by process"):
        run(recipe, folder, resume=True)


# ---------------------------------------------------------------- going on


def test_killed_before_the_first_checkpoint(template, tmp_path):
    """There is a run but nothing saved: it begins again, and its log too."""
    recipe = tiny_recipe(template)
    with pytest.raises(ZeroDivisionError):
        run(recipe, tmp_path / "run", Events({2: lambda: 1 / 0}))
    assert checkpoints(tmp_path / "run") == []
    run(recipe, tmp_path / "run", resume=True)
    assert outcome(tmp_path / "run") == outcome(run(recipe, tmp_path / "whole"))


def test_a_damaged_checkpoint_costs_its_steps_only(template, tmp_path, caplog):
    """The one before it is taken, and the end is the same."""
    recipe = tiny_recipe(template, save_every=3)
    whole = outcome(run(recipe, tmp_path / "whole"))
    folder = run(recipe, tmp_path / "run", stop_after=8)
    (checkpoints(folder)[0] / "optimizer.safetensors").write_bytes(b"torn")
    run(recipe, folder, resume=True)
    assert "step-00000008: optimizer.safetensors has 4 bytes" in caplog.text
    assert outcome(folder) == whole


def test_resuming_a_finished_run_does_nothing(template, tmp_path):
    recipe, events = tiny_recipe(template), Events()
    folder = run(recipe, tmp_path / "run")
    before = outcome(folder)
    run(recipe, folder, events, resume=True)
    assert events.heard == ["start 10/10", "end"]
    assert outcome(folder) == before


def test_a_run_keeps_the_text_it_began_with(tmp_path):
    """Its own shards are what it goes on with, whatever becomes of the corpus; lost or damaged ones are made
    again if the corpus is still the same, and refused if it is not.
    """
    corpus = write_corpus(tmp_path / "corpus", documents=7)
    recipe = tiny_recipe(corpus, model=DROPOUT)
    whole = outcome(run(recipe, tmp_path / "whole"))
    begun = run(recipe, tmp_path / "run", stop_after=4)
    copies = [shutil.copytree(begun, tmp_path / name) for name in ("lost", "damaged", "changed")]

    shutil.rmtree(copies[0] / "data")
    [shard] = (copies[1] / "data/train").glob("*.bin")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    for copy in copies[:2]:
        run(recipe, copy, resume=True)
        assert outcome(copy) == whole

    (corpus / "000.txt").write_text("Somebody worked on this text.", encoding="utf-8")
    run(recipe, begun, resume=True)
    assert outcome(begun) == whole
    shutil.rmtree(copies[2] / "data")
    with pytest.raises(ValueError, match="were made with another text"):
        run(recipe, copies[2], resume=True)


def test_a_start_that_failed_decides_nothing(tmp_path, monkeypatch):
    """It leaves no folder behind; one whose preparation took long stays, but its tokenizer is not taken for
    another vocabulary.
    """
    corpus = write_corpus(tmp_path / "corpus", documents=7)
    too_long = tiny_recipe(corpus, model={"max_len": 30_000}, context_length=30_000)
    (tmp_path / "there").mkdir()
    for place in ("new/run", "there"):
        with pytest.raises(ValueError, match="at least 30001 tokens"):
            run(too_long, tmp_path / place)
    assert not (tmp_path / "new").exists() and (tmp_path / "there").exists()
    monkeypatch.setattr(run_folder, "WORTH_KEEPING", 0.0)
    with pytest.raises(ValueError, match="at least 30001 tokens"):
        run(too_long, tmp_path / "run")
    other = tiny_recipe(corpus, data={"vocab_size": 270}, model={"vocab_size": 270})
    with pytest.raises(ValueError, match="data was prepared with tokenizer"):
        run(other, tmp_path / "run")
    shutil.rmtree(tmp_path / "run/data")
    assert RunFolder(run(other, tmp_path / "run")).tokenizer().vocab_size == 270


def test_the_model_takes_its_vocabulary_from_the_tokenizer(tmp_path):
    """The corpus has fewer merges than asked for: the model gets as many rows as there are tokens."""
    (tmp_path / "a.txt").write_text("aaaa bbbb " * 60, encoding="utf-8")
    recipe = tiny_recipe(tmp_path / "a.txt", data={"vocab_size": 4000}, model={"vocab_size": 4000}, steps=1)
    folder = run(recipe, tmp_path / "run")
    assert RunFolder(folder).config().vocab_size == RunFolder(folder).tokenizer().vocab_size < 300


def test_a_sample_prompt_without_tokens_is_told_at_the_start(tmp_path):
    """Not after the hours until the first sample: here the tokenizer's alphabet lacks its characters."""
    from clearhead.text.bpe import train_bpe
    from clearhead.text.tokenizer import Tokenizer

    vocab, merges = train_bpe(["abcde " * 9], 8, ["<|endoftext|>"], alphabet="characters")
    Tokenizer(vocab, merges, ["<|endoftext|>"]).save(tmp_path / "letters")
    (tmp_path / "a.txt").write_text("abc de cab bad " * 99, encoding="utf-8")
    recipe = tiny_recipe(
        tmp_path / "a.txt",
        data={"tokenizer": str(tmp_path / "letters"), "vocab_size": 4096},
        model={"vocab_size": 4096},
        sample_every=10,
        sample_prompt="def ",
    )
    events = Events()
    with pytest.raises(ValueError, match="'f'"):
        run(recipe, tmp_path / "run", events)
    assert events.heard == []


def test_what_a_run_folder_says_of_its_model(template, tmp_path):
    folder = run(tiny_recipe(template), tmp_path / "run")
    model, tokenizer = load_run(folder)
    assert not model.training
    assert json.loads((folder / "model.json").read_text(encoding="utf-8")) == model.config.to_dict()
    assert tokenizer.fingerprint == Shards(template / "train").tokenizer_fingerprint


def test_devices():
    assert find_device("cpu") == torch.device("cpu")
    assert find_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("gpu", "cuda:99", "meta", ""):
        with pytest.raises(ValueError, match="device="):
            find_device(name)
