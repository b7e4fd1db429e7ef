"""clearhead sweep: flags with several values each become one run for every combination."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Read = Callable[[Sequence[str]], Any]
"""How `clearhead train` reads its words: a command with the recipe in `settings`."""


def sweep(argv: Sequence[str], read: Read, say: Callable[[str], None]) -> None:
    """Train every combination of some settings, one run after the other, with a table at the end.

    clearhead sweep RECIPE --train.lr 1e-3 3e-3 --model.n-layers 2 4 --out runs/sweep

    Every flag of `clearhead train` that belongs to the recipe can have several values. The same command goes
    on where a sweep was stopped: runs that have ended are left alone.

      --out FOLDER    where the runs and the table go; by default runs/ and the recipe's name and -sweep
    """
    if {"-h", "--help"} & set(argv):
        print("usage: clearhead sweep RECIPE --FLAG VALUE [VALUE ...] ... [--out FOLDER]\n")
        print("\n".join(line.removeprefix("    ") for line in (sweep.__doc__ or "").splitlines()).rstrip())
        raise SystemExit(0)
    recipe, lists = read_lists(argv)
    out = Path(lists.pop("out", [f"runs/{Path(recipe).stem}-sweep"])[0])

    from clearhead.training import loop, report
    from clearhead.training.machine import tell_crowd
    from clearhead.training.sweep import Trial, combinations, name_of, table
    from clearhead.training.sweep import sweep as run_all

    varied = [name for name, values in lists.items() if len(values) > 1]
    trials = []
    for chosen in combinations(lists):
        words = [word for name, value in chosen.items() for word in (f"--{name}", value)]
        own = {name: chosen[name] for name in varied}
        trials.append(Trial(name_of(own), own, read([recipe, *words]).settings))

    tell_crowd(trials[0].recipe.train.device, say)

    def watchers() -> list[report.Watcher]:
        return [report.JsonLines(), report.Terminal(), report.Samples(), report.Curve()]

    try:
        results = run_all(trials, out, watchers, say)
    except loop.Interrupted as interrupted:
        say(f"{interrupted}; saved in {out}; the same command goes on from there")
        raise SystemExit(130) from None
    print("\n".join(table(results)))
    say(f"runs and table in {out}")


def read_lists(argv: Sequence[str]) -> tuple[str, dict[str, list[str]]]:
    """The recipe and the values of each flag. ValueError: words that are no such thing.

    >>> read_lists(["demo", "--train.lr", "1e-3", "3e-3", "--out", "runs/x"])
    ('demo', {'train.lr': ['1e-3', '3e-3'], 'out': ['runs/x']})
    """
    example = "as in: clearhead sweep demo --train.lr 1e-3 3e-3"
    if not argv or argv[0].startswith("-"):
        raise ValueError(f"name the recipe first, {example}")
    lists: dict[str, list[str]] = {}
    values: list[str] | None = None
    for word in argv[1:]:
        if word.startswith("--"):
            name, equals, first = word.removeprefix("--").partition("=")
            if name in lists:
                raise ValueError(f"--{name} is there twice; give all its values after one of them")
            if name != "out" and name.partition(".")[0] not in ("data", "model", "train"):
                raise ValueError(f"--{name} is no flag of a sweep; it has --out and settings, as --train.lr")
            values = lists.setdefault(name, [first] if equals else [])
        elif values is None:
            raise ValueError(
                f"{word!r} belongs to no flag; name the recipe, then flags and values, {example}"
            )
        else:
            values.append(word)
    for name, values in lists.items():
        if not values or (name == "out" and len(values) > 1):
            raise ValueError(
                f"--{name} has {len(values)} values; give it {'one' if name == 'out' else 'some'}"
            )
    if not any(len(values) > 1 for values in lists.values()):
        raise ValueError(f"no flag has several values, so there is nothing to compare; give some, {example}")
    return argv[0], lists
