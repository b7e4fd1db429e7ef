"""The verbs of training: a recipe in one process, in several, or in every combination of some settings."""

import copy
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import AvoidSubcommands, Positional, arg

from clearhead import cli_runs, cli_sweep
from clearhead.cli_flags import parse
from clearhead.cli_help import ALL, HELP, train_help
from clearhead.cli_text import say
from clearhead.model.config_fields import nearest
from clearhead.training.recipe import Recipe, find_recipe, load_recipe


@dataclass(frozen=True)
class TrainCommand:
    """Train a model by a recipe; every setting of the recipe is a flag, too."""

    recipe: Positional[str]  # a TOML file, or the name of one that comes with clearhead
    settings: Annotated[Recipe, arg(name="")] = field(default_factory=Recipe)
    run: Path | None = None  # the run's folder; by default runs/ and the recipe's name
    resume: bool = False  # go on from the newest checkpoint
    stop_after: int | None = None  # save and stop after this many steps in all
    tensorboard: bool = False  # also log for TensorBoard
    dry_run: bool = False  # only say what it needs: parameters, memory, arithmetic, time


def train(argv: Sequence[str]) -> None:
    """Train a model by a recipe, or go on with a run that was stopped."""
    command = read_train(argv)
    run = folder_of(command)
    if command.dry_run:
        foresee(command, run)
    else:
        train_recipe(command.settings, run, command.resume, command.stop_after, command.tensorboard)


def folder_of(command: TrainCommand) -> Path:
    """The run's folder."""
    return command.run or Path("runs") / Path(command.recipe).stem


USAGE = f"""usage: clearhead train RECIPE [FLAGS]

{TrainCommand.__doc__}
RECIPE is a TOML file, or the name of one that comes with clearhead, as demo. Flags are shown with
the value they have now; one in capitals has none.
"""


def read_train(argv: Sequence[str]) -> TrainCommand:
    """The recipe and its flags. SystemExit: help was asked for, and told."""
    named, asked = bool(argv) and not argv[0].startswith("-"), {*HELP, ALL} & set(argv)
    if not named and not asked:
        raise ValueError("name the recipe first, as in: clearhead train demo --train.minutes 10")
    recipe = load_recipe(find_recipe(argv[0])) if named else Recipe()
    # The recipe's values become the defaults of the flags.
    start = TrainCommand(argv[0], flags_start(recipe, argv))
    if asked:
        print(train_help(start, start.settings, "the run", USAGE, whole=ALL in asked))
        raise SystemExit(0)
    # AvoidSubcommands: experts and the like are flags only if the recipe has some.
    options: dict[str, Any] = {"config": (AvoidSubcommands,), "default": start, "see": ALL}
    try:
        return parse(TrainCommand, argv, prog="clearhead train", **options)
    except ValueError as error:
        raise ValueError(UNKNOWN.sub(name_nearest, str(error))) from None


UNKNOWN = re.compile(r"there is no flag --(?P<flag>[\w.-]+)(; did you mean (?P<near>--[\w.-]+)\?)?")


def name_nearest(mistake: re.Match[str]) -> str:
    """A flag that there is not, with the one that was meant: a setting may be named without its section, or
    as others call it.
    """
    section, _, name = mistake["flag"].replace("-", "_").rpartition(".")
    settings = {
        field.name: part.name
        for part in fields(Recipe)
        if is_dataclass(kind := part.type) and section in ("", part.name)
        for field in fields(kind)
    }
    meant = name if name in settings else nearest(name, settings)
    near = mistake["near"] if meant is None else f"--{settings[meant]}.{meant.replace('_', '-')}"
    return f"there is no flag --{mistake['flag']}" + (f"; did you mean {near}?" if near else "")


def launch(argv: Sequence[str]) -> None:
    """Start `train` in several processes, on one machine or many."""
    train = list(argv).index("train") if "train" in argv else len(argv)
    if {*HELP, ALL} & set(argv[train:]):  # told once, and not by each process
        read_train(argv[train + 1 :])
    flags, words = cli_runs.read_launch(argv, parse)
    torchrun = cli_runs.torchrun(flags, words)
    command = read_train(words[1:])  # a mistake is told before any process is started
    if not command.dry_run:
        cli_runs.launch(*torchrun)
        return
    foresee(command, folder_of(command))
    n = cli_runs.count_processes(flags) * flags.machines
    if n > 1:
        shares = command.settings.train.parallel == "fsdp"
        said = "; with train.parallel=fsdp they share weights, gradients and optimizer out" if shares else ""
        say(f"processes   {n}, and the figures are for one process that is alone{said}")


def sweep(argv: Sequence[str]) -> None:
    """Train every combination of some settings, one run after the other, with a table at the end."""
    cli_sweep.sweep(argv, read_train, say)


def foresee(command: TrainCommand, run: Path) -> None:
    """Say what a run needs, and start nothing."""
    from clearhead.training.dry_run import dry_run
    from clearhead.training.run_folder import RunFolder

    given = {"resume": command.resume, "stop_after": command.stop_after, "tensorboard": command.tensorboard}
    for name, value in given.items():
        if value:
            raise ValueError(f"{name}={value} has no effect with --dry-run; leave one of them away")
    for line in dry_run(command.settings, RunFolder(run)).lines():
        print(line)


def flags_start(recipe: Recipe, argv: Sequence[str]) -> Recipe:
    """The recipe as the flags' defaults: open where a flag for one thing decides another.

    A budget among the flags takes the place of the recipe's. Sizes that follow from others are None again, so
    that `--model.d-model 512` brings its own d_head and d_ff along; the flags' parser fills them in.
    """
    if any(re.match(r"--train\.(steps|tokens|minutes)\b", word) for word in argv):
        recipe = replace(recipe, train=replace(recipe.train, steps=None, tokens=None, minutes=None))
    model = copy.copy(recipe.model)
    for name in model.following():
        object.__setattr__(model, name, None)  # it is frozen, but nobody has seen this copy yet
    return replace(recipe, model=model)


def train_recipe(recipe: Recipe, run: Path, resume: bool, stop_after: int | None, tensorboard: bool) -> None:
    """Train with the terminal's watchers; Ctrl-C says how to go on."""
    from clearhead.training import loop, machine, report

    is_main = os.environ.get("RANK", "0") == "0"  # of several processes one speaks
    terminal = report.Terminal()
    watchers = [report.JsonLines(), terminal, report.Samples(), report.Curve()]
    machine.tell_crowd(recipe.train.device, terminal.on_note)
    if tensorboard:
        watchers.append(report.TensorBoard())
    try:
        done = loop.train(recipe, run, resume=resume, stop_after=stop_after, watchers=watchers)
    except loop.Interrupted as interrupted:
        if is_main:
            say(f"{interrupted}; saved in {run}; go on with the same command and --resume")
        raise SystemExit(130) from None
    if is_main:
        say(f"model in {done.checkpoints}, curve in {done.curve_file}, log in {done.metrics_file}")


VERBS: dict[str, Callable[..., None]] = {"train": train, "sweep": sweep, "launch": launch}
