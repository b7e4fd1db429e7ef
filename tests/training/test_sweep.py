"""Many runs from one recipe: named, resumed, told apart in a table."""

import doctest
import json
from pathlib import Path
from typing import Any

import pytest

from clearhead import cli_sweep
from clearhead.cli import main
from clearhead.training import loop
from clearhead.training import sweep as module
from clearhead.training.checkpoint import checkpoints
from clearhead.training.durable import lock_run
from clearhead.training.report import JsonLines, Watcher
from clearhead.training.run_folder import RunFolder
from clearhead.training.sweep import Trial, check_trials, combinations, has_ended, name_of, ranked, table
from tiny_run import tiny_recipe, write_corpus, write_recipe

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("sweep") / "corpus", documents=7)


def trials_of(corpus: Path, lists: dict[str, list[str]], **more: Any) -> list[Trial]:
    made = []
    for own in combinations(lists):
        values = {name.removeprefix("train."): json.loads(value) for name, value in own.items()}
        made.append(Trial(name_of(own), own, tiny_recipe(corpus, steps=3, probes=0, **values, **more)))
    return made


class Log:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def __call__(self, text: str) -> None:
        self.notes.append(text)


def only_json() -> list[Watcher]:
    return [JsonLines()]


def test_every_combination_has_its_run(corpus, tmp_path):
    """Two by two values are four runs in order; the table ranks them, both files hold it."""
    trials = trials_of(corpus, {"train.lr": ["1e-3", "1e-2"], "train.seed": ["1", "2"]})
    found = module.sweep(trials, tmp_path, only_json, Log())
    names = [trial.name for trial in trials]
    assert names == ["lr=1e-3,seed=1", "lr=1e-3,seed=2", "lr=1e-2,seed=1", "lr=1e-2,seed=2"]
    assert sorted(result.name for result in found) == sorted(names)
    losses = [result.validation_loss for result in found]
    assert losses == sorted(losses, key=lambda loss: loss or 0.0) and None not in losses
    written = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()]
    assert [entry["name"] for entry in written] == names
    assert all(
        entry["steps"] == 3 and entry["parameters"] > 0 and entry["error"] is None for entry in written
    )
    assert (tmp_path / "sweep.md").read_text() == "\n".join(table(found)) + "\n"
    shared = [path for path in tmp_path.iterdir() if path.name.startswith("data-")]
    assert len(shared) == 1 and not (tmp_path / names[0] / "data").exists()


def test_a_sweep_that_was_stopped_goes_on(corpus, tmp_path):
    """What has ended is left alone, what has begun is resumed, and the table is that of a sweep in one go."""
    trials = trials_of(corpus, {"train.lr": ["1e-3", "1e-2", "2e-2"]})

    class Stop(JsonLines):
        """Ends the second run after its second step, as a signal would."""

        def on_step(self, step: int, metrics: dict[str, Any]) -> None:
            super().on_step(step, metrics)
            if metrics["lr"] > 2e-3 and step == 1:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module.sweep(trials, tmp_path / "a", lambda: [Stop()], Log())
    first = checkpoints(tmp_path / "a" / "lr=1e-3")[0].stat().st_mtime_ns
    log = Log()
    again = module.sweep(trials, tmp_path / "a", only_json, log)
    assert log.notes[0] == "run 1 of 3, lr=1e-3, has ended already"
    assert checkpoints(tmp_path / "a" / "lr=1e-3")[0].stat().st_mtime_ns == first
    straight = module.sweep(trials, tmp_path / "b", only_json, Log())
    assert [(r.name, r.loss, r.validation_loss) for r in again] == [
        (r.name, r.loss, r.validation_loss) for r in straight
    ]


def test_a_run_that_fails_does_not_stop_the_others(corpus, tmp_path, monkeypatch):
    """Its error stands in the table, last; the next one is made."""
    real = loop.train

    def train(recipe, folder, **how):
        if recipe.train.lr == 1.0:
            raise ValueError("step 2: the loss is not finite; no update was made")
        return real(recipe, folder, **how)

    monkeypatch.setattr(module, "train", train)
    trials = trials_of(corpus, {"train.lr": ["1.0", "1e-2"]})
    found = module.sweep(trials, tmp_path, only_json, Log())
    assert [result.name for result in found] == ["lr=1e-2", "lr=1.0"]
    assert found[1].error is not None and "not finite" in found[1].error
    assert "failed" in table(found)[-1]
    assert has_ended(RunFolder(tmp_path / "lr=1e-2")) and not has_ended(RunFolder(tmp_path / "lr=1.0"))


def test_mistakes_come_before_any_work(corpus, tmp_path):
    """A recipe that cannot work, a folder with another run: one line that names the run."""
    with pytest.raises(ValueError, match=r"context_length=99: train\.context_length=99 exceeds"):
        check_trials(trials_of(corpus, {"train.context_length": ["8", "99"]}), tmp_path)
    assert list(tmp_path.iterdir()) == []
    trials = trials_of(corpus, {"train.lr": ["1e-3"]})
    module.sweep(trials, tmp_path, only_json, Log())
    with pytest.raises(ValueError, match=r"lr=1e-3: .*was started with another recipe \(train.warmup"):
        check_trials(trials_of(corpus, {"train.lr": ["1e-3"]}, warmup=0.5), tmp_path)


def test_a_second_sweep_in_the_same_folder_is_refused(corpus, tmp_path):
    """Both would prepare the same text and write the same table; nothing is begun."""
    trials = trials_of(corpus, {"train.seed": ["1", "2"]})
    with lock_run(tmp_path / "out"), pytest.raises(BlockingIOError, match="is in use by process"):
        module.sweep(trials, tmp_path / "out", only_json, Log())
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_names_and_tables():
    """Settings with the same last word keep their whole names; results without a loss come last."""
    assert name_of({"data.field": "a", "model.field": "b"}) == "data.field=a,model.field=b"
    good = module.Result("a", {"train.lr": "1"}, 10, 3, 2.0, 2.5, 1.0)
    best = module.Result("b", {"train.lr": "2"}, 10, 3, 2.0, 1.5, 1.0)
    none = module.Result("c", {"train.lr": "3"}, 0, 0, None, None, 0.0)
    assert ranked([none, good, best]) == [best, good, none]
    lines = table([none, good, best])
    assert lines[0].startswith("| train.lr | validation loss |") and set(lines[1]) <= set("| -:")
    assert len({len(line) for line in lines}) == 1


def test_the_command(corpus, tmp_path, monkeypatch, capsys):
    """`clearhead sweep` makes the runs and prints the table; the same command again makes none."""
    monkeypatch.chdir(tmp_path)
    write_recipe(tmp_path / "r.toml", tiny_recipe(corpus, steps=2, probes=0))
    words = ["sweep", "r.toml", "--train.lr", "1e-3", "1e-2", "--model.n-layers", "1", "--out", "here"]
    main(words)
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert "validation loss" in rows[0] and len(rows) == 4
    assert (tmp_path / "here/lr=1e-2/checkpoints").is_dir()
    assert RunFolder(tmp_path / "here/lr=1e-2").config().n_layers == 1
    main(words)
    again = capsys.readouterr().out
    assert [line for line in again.splitlines() if line.startswith("|")] == rows
    assert again.count("has ended already") == 2


def test_examples_in_the_docstrings():
    """The worked examples run."""
    assert doctest.testmod(module).failed == doctest.testmod(cli_sweep).failed == 0
