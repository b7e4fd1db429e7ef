"""What lies where in the folder of a run.

recipe.toml      every choice, filled in       metrics.jsonl   one line per step
model.json       the model's config            loss.png        the curves
tokenizer.json   the vocabulary                samples.txt     what the model wrote along the way
labels.json      the names of the labels, where a model tells labels apart
origin.json      which published model it started from, where it did
budget.json      what was asked for: steps...  data/           token shards, unless they were given;
                                               data/examples/  examples as rows of ids
checkpoints/     step-00001200/ ...                  probes/         weights along the way, for looking at
"""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer
from clearhead.published.weights import FAMILIES, Origin
from clearhead.text.corpus import BUILT_IN
from clearhead.text.foreign import AnyTokenizer, open_tokenizer
from clearhead.training.checkpoint import load_checkpoint
from clearhead.training.demands import fit_head
from clearhead.training.durable import lock_run, write_whole
from clearhead.training.recipe import (
    Recipe,
    differences,
    find_recipe,
    load_recipe,
    save_recipe,
    with_vocabulary,
)

LOGS = (".log", ".out", ".err")  # what the shell or Slurm writes there
# What is written before the run exists.
LEFT_BEHIND = ("data", "tokenizer.json", "labels.json", "origin.json", "model.json", "budget.json")
WORTH_KEEPING = 60.0  # seconds of preparation that an error does not undo


class RunFolder:
    """The paths of one run, and what can be read back from them."""

    begun = False  # said of a run that another process is about to begin, once its data are prepared

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.recipe_file = self.path / "recipe.toml"
        self.model_file = self.path / "model.json"
        self.tokenizer_file = self.path / "tokenizer.json"
        self.origin_file = self.path / "origin.json"
        self.labels_file = self.path / "labels.json"
        self.budget_file = self.path / "budget.json"
        self.metrics_file = self.path / "metrics.jsonl"
        self.curve_file = self.path / "loss.png"
        self.samples_file = self.path / "samples.txt"
        self.data = self.path / "data"
        self.examples = self.data / "examples"
        self.checkpoints = self.path / "checkpoints"
        self.probes = self.path / "probes"

    def exists(self) -> bool:
        """Whether a run was started here."""
        return self.begun or self.recipe_file.is_file()

    def check_free(self, *sources: str | None) -> None:
        """Raise ValueError if a new run in this folder would mix with something else: with files that no run
        wrote, or with the texts in one of the folders `sources`, which it would read as its own.
        """
        here = self.path.resolve()
        for source in filter(None, sources):
            folder = Path(source).expanduser().resolve()
            if source not in BUILT_IN and folder.is_dir() and folder in (here, *here.parents):
                raise ValueError(
                    f"the run's folder {self.path} lies in {source}, which is read as text; "
                    "choose one outside of it"
                )
        there = sorted(path.name for path in self.path.glob("*")) if self.path.is_dir() else []
        was_held = (self.path / ".lock").is_file()  # a start that was killed has left some of its own
        ours = LEFT_BEHIND if was_held else ()
        foreign = [name for name in there if not (name[0] == "." or name in ours or name.endswith(LOGS))]
        if foreign:
            raise ValueError(
                f"{self.path} is a folder with something in it that no run wrote ({foreign[0]:.60}); "
                "give the run a folder of its own"
            )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the folder against other writers. A new one is gone again after an error before the run began,
        unless what was prepared until then took long: it is taken up at the next try.
        """
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        started = time.monotonic()
        with lock_run(self.path):  # whoever does not get the lock takes nothing away
            try:
                yield
            except Exception:
                if missing and not self.exists() and time.monotonic() - started < WORTH_KEEPING:
                    shutil.rmtree(self.path, ignore_errors=True)
                    with suppress(OSError):
                        for path in missing[1:]:
                            path.rmdir()
                raise

    def recipe(self) -> Recipe:
        """The recipe this run was started with."""
        self._need(self.recipe_file)
        return load_recipe(self.recipe_file)

    def config(self) -> ModelConfig:
        """The config of this run's model."""
        self._need(self.model_file)
        return read_config(self.model_file)

    def budget(self) -> dict[str, int | float]:
        """The budget this run was started with, before it became a number of steps."""
        self._need(self.budget_file)
        return _read_object(self.budget_file)

    def labels(self) -> list[str] | None:
        """The names of the labels that the model tells apart, by their numbers; None if it has none."""
        if not self.labels_file.is_file():
            return None
        names = _read_json(self.labels_file)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"{self.labels_file} must hold a list of names")
        return names

    def write_labels(self, names: list[str]) -> None:
        """Write the names of the labels, by their numbers."""
        write_whole(self.labels_file, json.dumps(names, ensure_ascii=False, indent=2) + "\n")

    def published_settings(self) -> dict[str, Any]:
        """What a published model's config.json tells of labels: their names, and how they are meant."""
        names = self.labels()
        if names is None:
            return {}
        kinds = {
            "classes": "single_label_classification",
            "several_labels": "multi_label_classification",
            "regression": "regression",
        }
        kind = kinds.get(self.recipe().train.objective)
        return {
            "id2label": {str(number): name for number, name in enumerate(names)},
            "label2id": {name: number for number, name in enumerate(names)},
            **({} if kind is None else {"problem_type": kind}),
        }

    def origin(self) -> Origin | None:
        """Which published model the run started from, if its family can hold what the run makes of it."""
        if not self.origin_file.is_file():
            return None
        kept = _read_object(self.origin_file)
        if set(kept) != {"model_type", "settings", "generation"} or kept["model_type"] not in FAMILIES:
            raise ValueError(f"{self.origin_file} does not name a published model")
        return Origin(**kept)

    def write_origin(self, origin: Origin) -> None:
        """Write which published model the run starts from."""
        write_whole(self.origin_file, json.dumps(asdict(origin), ensure_ascii=False, indent=2) + "\n")

    def write(self, recipe: Recipe, tokenizer: AnyTokenizer, budget: dict[str, int | float]) -> None:
        """Write what a run is. The recipe comes last: with it the run exists, and can be resumed."""
        write_whole(self.model_file, json.dumps(recipe.model.to_dict(), indent=2) + "\n")
        write_whole(self.budget_file, json.dumps(budget) + "\n")
        tokenizer.save(self.path)
        save_recipe(recipe, self.recipe_file)

    def tokenizer(self) -> AnyTokenizer:
        """The tokenizer of this run."""
        self._need(self.tokenizer_file)
        return open_tokenizer(self.tokenizer_file)

    def model(self, device: torch.device | str = "cpu") -> tuple[Transformer, dict[str, Any]]:
        """The model with the weights of the newest valid checkpoint, or the mean that it has of them, in eval
        mode, and that checkpoint's state.
        """
        model = Transformer(self.config(), seed=0)
        state = load_checkpoint(self.path, model)
        model.origin = self.origin()
        return model.to(device).eval(), state

    def _need(self, file: Path) -> None:
        if not file.is_file():
            what = f"{file.name} is missing" if self.path.is_dir() else "there is no such folder"
            raise FileNotFoundError(
                f"{self.path} holds no run: {what}; give a folder that `clearhead train` wrote"
            )


def recipe_to_resume(new: Recipe, run: RunFolder) -> Recipe:
    """The recipe of the run; what the caller gives must agree with it, but for what changes no number.

    The budget was fixed when the run began: it may be given as it was, or as the steps that it became.
    """
    old, begun, given = run.recipe(), run.budget(), new.train.budget()
    if given not in (begun, old.train.budget()):
        was, now = (", ".join(f"{n}={v}" for n, v in budget.items()) for budget in (begun, given))
        became = "" if "steps" in begun else f", which became steps={old.train.steps},"
        raise ValueError(
            f"{run.path} was started with {was}{became} and stays with it, got {now}; "
            f"give train.{was} again, or start a new run in another folder"
        )
    old = replace(old, train=replace(old.train, **new.train.free()))
    fixed = replace(new.train, steps=old.train.steps, minutes=None, tokens=None)
    model = new.model.replace(vocab_size=old.model.vocab_size)
    if new.train.objective == old.train.objective:  # else the labels are none of its own
        model = fit_head(model, new.train.objective, old.model.n_labels)
    changed = differences(old, replace(new, train=fixed, model=model))
    if changed:
        raise ValueError(
            f"{run.path} was started with another recipe ({'; '.join(changed)}); undo that to resume"
        )
    return old


def load_run(path: str | Path, device: torch.device | str = "cpu") -> tuple[Transformer, AnyTokenizer]:
    """The model and the tokenizer of a run. Raises ValueError when they do not belong together."""
    run = RunFolder(path)
    tokenizer = run.tokenizer()
    model, state = run.model(device)
    if tokenizer.vocab_size > model.config.vocab_size:  # published tables may have rows to spare
        raise ValueError(
            f"{run.tokenizer_file} has {tokenizer.vocab_size} tokens but the model of {run.path} has "
            f"{model.config.vocab_size}; they belong to different runs"
        )
    if state["made_with"]["tokenizer"] != tokenizer.fingerprint:
        raise ValueError(
            f"{run.tokenizer_file} is not the tokenizer that the model of {run.path} was trained with; "
            "put that one back"
        )
    return model, tokenizer


def find_config(what: str | Path) -> ModelConfig:
    """The model config of a run's folder, of a recipe, or of a model.json."""
    path = Path(what)
    if path.is_dir():
        return RunFolder(path).config()
    if path.suffix == ".json":
        return read_config(path)
    try:
        recipe = load_recipe(find_recipe(what))
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; or the folder of a run, or its model.json") from None
    n_labels = recipe.model.n_labels or 1  # how many there are is known with the examples
    recipe = replace(recipe, model=fit_head(recipe.model, recipe.train.objective, n_labels))
    source = recipe.data.tokenizer or Path(recipe.data.source) / "tokenizer.json"
    if Path(source).exists():
        return with_vocabulary(recipe, open_tokenizer(source).vocab_size).model
    if recipe.model.vocab_size == ModelConfig().vocab_size:  # not given: that of the tokenizer to be learned
        return with_vocabulary(recipe, recipe.data.vocab_size).model
    return recipe.model


def read_config(file: Path) -> ModelConfig:
    """The model config in a JSON file. A broken one is a ValueError naming the file."""
    values = _read_object(file)
    try:
        return ModelConfig.from_dict(values)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _read_object(file: Path) -> dict[str, Any]:
    values = _read_json(file)
    if not isinstance(values, dict):
        raise ValueError(f"{file} must hold a JSON object, not {type(values).__name__}")
    return values


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from None
