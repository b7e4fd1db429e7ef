"""What a rank that is not the main one does and leaves alone, tried in one process."""

from pathlib import Path
from typing import Any

import pytest

from clearhead.training.durable import lock_run
from clearhead.training.loop import Trainer
from clearhead.training.parallel import Single
from clearhead.training.probe import Probes
from clearhead.training.recipe import Recipe
from clearhead.training.run_folder import RunFolder
from clearhead.training.tasks import make_task
from tiny_run import tiny_recipe, write_corpus


class Second(Single):
    """A rank beside a main one, which told `main`."""

    rank, is_main = 1, False
    main: Any = None

    def gather(self, value: Any) -> list[Any]:
        return [self.main, value]


def second_trainer(recipe: Recipe, folder: Path) -> Trainer:
    """A trainer of the second rank, at the beginning of its run."""
    run = RunFolder(folder)
    folder.mkdir()
    task, recipe = make_task(recipe, run, note=lambda text: None)
    made = Trainer(recipe, run, task, (), parallel=Second(recipe.train))
    made.start(resume=False)
    return made


def test_only_the_main_rank_keeps_probes_and_begins_the_run(tmp_path):
    made = second_trainer(tiny_recipe(write_corpus(tmp_path / "corpus", 7), probes=3), tmp_path / "run")
    assert not any(isinstance(watcher, Probes) for watcher in made.watchers)
    assert not made.run.exists() and not made.run.probes.exists()


def test_all_ranks_judge_by_what_the_main_one_measured(tmp_path, monkeypatch):
    """A last bit that differs would let one of them stop, or save, without the others."""
    made = second_trainer(tiny_recipe(write_corpus(tmp_path / "corpus", 7), patience=1), tmp_path / "run")
    monkeypatch.setattr(Second, "main", {"validation_loss": 2.5})
    made._look(0)
    assert (made.best, made.waited) == (2.5, 0)
    monkeypatch.setattr(Second, "main", {"validation_loss": 2.6})
    made._look(1)
    assert made._out_of_patience()


def test_the_second_rank_writes_no_labels(tmp_path):
    """The first one has; two that write one file under the name of their process may be of one number."""
    lines = [f"{word} {number}\t{word}\n" for number in range(60) for word in ("good", "bad")]
    (tmp_path / "a.tsv").write_text("text\tlabel\n" + "".join(lines), encoding="utf-8")
    recipe = tiny_recipe(tmp_path / "a.tsv", objective="classes", model={"shape": "encoder"})
    first, second = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    task, _ = make_task(recipe, first, note=lambda text: None)
    task.tokenizer.save(first.tokenizer_file)
    first.labels_file.unlink()
    second.begun = True
    assert make_task(recipe, second, note=lambda text: None)[0].fingerprint == task.fingerprint
    assert not second.labels_file.exists()


def test_who_does_not_get_the_folder_takes_nothing_of_it_away(tmp_path, monkeypatch):
    """Two start at once in a folder that is not there yet: the one that comes late leaves it as it is."""
    run = RunFolder(tmp_path / "run")
    with lock_run(run.path):
        (run.path / "prepared").touch()
        monkeypatch.setattr(Path, "exists", lambda path: False)  # as it was a moment ago
        with pytest.raises(BlockingIOError), run.held():
            pass
        monkeypatch.undo()
    assert (run.path / "prepared").is_file()
