"""Many runs from one recipe: every combination of some settings, one after the other, and a table at the end.

    out/lr=1e-3,n_layers=2/    a run like any other; its name says what is its own
    out/data-1f0c9a3e/         text that several runs learn from, prepared once
    out/sweep.jsonl, sweep.md  the table: one line for each run that has ended

A sweep that was stopped goes on where it was: what has ended is left alone, what has begun is resumed. A run
that fails, as with too high a learning rate, is noted in the table, and the next one begins.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from clearhead.model.summary import summarise
from clearhead.text.token_files import is_token_file
from clearhead.training.checkpoint import checkpoints, step_of
from clearhead.training.data import data_folder, prepare_data
from clearhead.training.demands import DEMANDS
from clearhead.training.dry_run import look_at_data
from clearhead.training.durable import lock_run, write_whole
from clearhead.training.loop import train
from clearhead.training.machine import find_device
from clearhead.training.recipe import DataConfig, Recipe
from clearhead.training.report import Watcher, read_metrics
from clearhead.training.run_folder import RunFolder, recipe_to_resume
from clearhead.training.start import recipe_as_begun
from clearhead.training.tasks import specials_of

Note = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: its name, what is its own, and the whole recipe."""

    name: str
    settings: dict[str, str]  # as they were written: {"train.lr": "1e-3"}
    recipe: Recipe


@dataclass(frozen=True)
class Result:
    """How a run ended. Losses are in nats per target, seconds those of its steps."""

    name: str
    settings: dict[str, str]
    parameters: int
    steps: int
    loss: float | None
    validation_loss: float | None
    seconds: float
    error: str | None = None  # why it did not end well


def combinations(lists: Mapping[str, Sequence[str]]) -> Iterator[dict[str, str]]:
    """Every choice of one value for each setting, the last setting changing fastest.

    >>> [*combinations({"train.lr": ["1e-3", "3e-3"], "model.n-layers": ["2"]})]
    [{'train.lr': '1e-3', 'model.n-layers': '2'}, {'train.lr': '3e-3', 'model.n-layers': '2'}]
    """
    return (dict(zip(lists, chosen, strict=True)) for chosen in product(*lists.values()))


def name_of(settings: Mapping[str, str]) -> str:
    """The name of a run, and of its folder: its own settings by their last words.

    >>> name_of({"train.lr": "1e-3", "data.source": "texts/a.txt"})
    'lr=1e-3,source=texts-a.txt'
    """
    short = [setting.rpartition(".")[2].replace("-", "_") for setting in settings]
    names = short if len(set(short)) == len(short) else list(settings)
    values = [value.replace("/", "-").replace("\\", "-").strip(".") for value in settings.values()]
    return ",".join(f"{name}={value}" for name, value in zip(names, values, strict=True))


def check_trials(trials: Sequence[Trial], out: Path) -> None:
    """Raise ValueError before anything starts: a recipe that cannot work, a folder with another run."""
    names = [trial.name for trial in trials]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"two runs of the sweep would be named {twice}; give each value once")
    if RunFolder(out).exists():
        raise ValueError(f"{out} holds a run; choose another folder for the sweep")
    seen: list[tuple[DataConfig, str]] = []
    for trial in trials:
        run, learns = RunFolder(out / trial.name), (trial.recipe.data, trial.recipe.train.objective)
        try:
            if run.exists():
                recipe_to_resume(recipe_as_begun(_shared(trial.recipe, out), run), run)
            elif trial.recipe.train.start_from is None:  # what it starts from fills in a part of the recipe
                trial.recipe.check()
            if not run.exists():
                run.check_free(trial.recipe.data.source, trial.recipe.data.validation)
            find_device(trial.recipe.train.device)
            if learns not in seen:
                look_at_data(trial.recipe, run)
                seen.append(learns)
        except ValueError as error:
            raise ValueError(f"{trial.name}: {error}") from None


def sweep(
    trials: Sequence[Trial], out: Path, watchers: Callable[[], Sequence[Watcher]], note: Note
) -> list[Result]:
    """Make all runs that have not ended yet, in order; their results, also of those that had, best first.

    `watchers` gives those of one run, afresh. ValueError: what `check_trials` finds. BlockingIOError: another
    sweep is at work in `out`. What stops a run from outside (loop.Interrupted, KeyboardInterrupt) stops the
    sweep.
    """
    check_trials(trials, out)
    results: list[Result] = []
    with lock_run(out):  # two sweeps would prepare the same text at once
        for number, trial in enumerate(trials, 1):
            run = RunFolder(out / trial.name)
            if has_ended(run):
                note(f"run {number} of {len(trials)}, {trial.name}, has ended already")
                results.append(result_of(trial, run))
            else:
                note(f"run {number} of {len(trials)}: {trial.name}")
                results.append(_attempt(trial, run, out, watchers, note))
            lines = (json.dumps(asdict(result)) + "\n" for result in results)
            write_whole(out / "sweep.jsonl", "".join(lines))
            write_whole(out / "sweep.md", "\n".join(table(results)) + "\n")
    return ranked(results)


def has_ended(run: RunFolder) -> bool:
    """Whether a run has made its last step and saved it."""
    there = checkpoints(run.path)
    return run.exists() and bool(there) and step_of(there[0]) == run.recipe().train.steps


def _attempt(
    trial: Trial, run: RunFolder, out: Path, watchers: Callable[[], Sequence[Watcher]], note: Note
) -> Result:
    """Make a run, or go on with it; what goes wrong in it becomes a part of its result."""
    try:
        recipe = _shared(trial.recipe, out)
        prepared = Path(recipe.data.source)
        if recipe != trial.recipe and not (prepared / "index.json").is_file():
            home = RunFolder(prepared.parent)
            prepare_data(trial.recipe.data, home, note, specials=specials_of(trial.recipe.train.objective))
        train(recipe, run.path, resume=run.exists(), watchers=watchers())
    except (ValueError, FileNotFoundError, MemoryError, RuntimeError) as error:
        note(f"{trial.name} failed: {error}")
        return replace(result_of(trial, run), error=str(error).partition("\n")[0])
    return result_of(trial, run)


def _shared(recipe: Recipe, out: Path) -> Recipe:
    """The recipe with its text prepared in a folder of the sweep, so that runs on the same text share it."""
    data, objective = recipe.data, recipe.train.objective
    is_text = DEMANDS[objective].examples == "text" and data.form == "text"
    if not is_text or is_token_file(data.source) or data_folder(data, RunFolder(out)) != RunFolder(out).data:
        return recipe
    told = json.dumps([asdict(data), specials_of(objective)])
    home = RunFolder(out / f"data-{hashlib.sha256(told.encode()).hexdigest()[:8]}")
    return replace(recipe, data=DataConfig(source=str(home.data), vocab_size=data.vocab_size))


def result_of(trial: Trial, run: RunFolder) -> Result:
    """What a run's folder tells of it so far."""
    entries = read_metrics(run.metrics_file)
    losses = [entry["loss"] for entry in entries if entry.get("loss") is not None]
    looks = [entry["validation_loss"] for entry in entries if entry.get("validation_loss") is not None]
    there = checkpoints(run.path)
    return Result(
        trial.name,
        trial.settings,
        summarise(run.config()).n_parameters if run.exists() else 0,
        step_of(there[0]) if there else 0,
        losses[-1] if losses else None,
        looks[-1] if looks else None,
        sum(entry.get("seconds", 0.0) for entry in entries),
    )


def ranked(results: Sequence[Result]) -> list[Result]:
    """Those with the lowest validation loss first, those without one last."""
    worst = float("inf")

    def place(result: Result) -> tuple[bool, float]:
        loss = result.validation_loss
        return result.error is not None, worst if loss is None else loss

    return sorted(results, key=place)


def table(results: Sequence[Result]) -> list[str]:
    """The results as the lines of a Markdown table, best first."""
    columns = list(dict.fromkeys(setting for result in results for setting in result.settings))
    titles = [*columns, "validation loss", "last loss", "steps", "parameters", "seconds"]
    rows: list[list[Any]] = []
    for result in ranked(results):
        shown = "failed" if result.error else _figure(result.validation_loss)
        own = [result.settings.get(name, "") for name in columns]
        sizes = [f"{result.steps:,}", f"{result.parameters:,}", f"{result.seconds:.1f}"]
        rows.append([*own, shown, _figure(result.loss), *sizes])
    widths = [max(len(str(row[i])) for row in [titles, *rows]) for i in range(len(titles))]
    lines = [[f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True)] for row in [titles, *rows]]
    lines.insert(1, ["-" * (width - 1) + ":" for width in widths])
    return ["| " + " | ".join(line) + " |" for line in lines]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
