"""The help of a verb whose flags are a recipe's settings: the usual ones, or all, in groups by concern.

What a flag does stands in the comment beside its field, and a comment on a line of its own begins a group:
the source of the dataclasses is the one place where both are written, and the order there is the order here.
"""

import ast
import inspect
import io
import shutil
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from clearhead.training.recipe import Recipe

HELP = ("-h", "--help")
ALL = "--help-all"

USUAL = (
    *("run", "resume", "dry_run", "train.objective", "train.start_from"),
    *("data.source", "data.tokenizer", "data.vocab_size", "data.validation"),
    *("model.shape", "model.d_model", "model.n_layers", "model.n_heads"),
    *("train.steps", "train.tokens", "train.minutes", "train.batch_size", "train.context_length"),
    *("train.optimizer", "train.lr", "train.warmup", "train.schedule"),
    *("train.eval_every", "train.patience", "train.sample_every", "train.save_every", "train.keep_best"),
    "train.parallel",
)
"""What `--help` shows of any recipe, beside what the recipe itself sets."""

_NAMES = {int: "N", float: "X", str: "TEXT", Path: "FOLDER", bool: "True|False"}
_COLUMN = 34


@dataclass(frozen=True)
class Flag:
    """One flag: its name as a setting, how it is written, what it does."""

    name: str
    written: str
    text: str
    given: bool  # whether it is not at its default

    def lines(self, width: int) -> Iterator[str]:
        """The flag in two columns, at most `width` wide."""
        head = f"  {self.written:<{_COLUMN - 4}}  "
        wrapped = textwrap.wrap(self.text, max(20, width - _COLUMN), break_on_hyphens=False) or [""]
        if len(head) > _COLUMN:
            yield head.rstrip()
            head = ""
        for text in wrapped:
            yield f"{head:<{_COLUMN}}{text}".rstrip()
            head = ""


def train_help(command: Any, settings: Recipe, own: str, usage: str, whole: bool) -> str:
    """The help of a command with the flags of a recipe, each with the value it has there.

    command: a dataclass whose simple fields are flags of its own, under the heading `own`. settings: the
    recipe. usage: what stands above the flags. whole: every flag, and not the usual ones alone.
    """
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    groups = {own: [flag for flags in groups_of(command, "", "").values() for flag in flags]}
    learned, *others = groups_of(settings.train, "train.", "").items()
    groups |= dict([learned])
    groups |= groups_of(settings.data, "data.", "data")
    groups |= groups_of(settings.model, "model.", "model")
    groups |= dict(others)
    shown: dict[str, list[Flag]] = {}
    for heading, flags in groups.items():
        heading = heading if whole else heading.partition(":")[0]
        shown.setdefault(heading, []).extend(
            flag for flag in flags if whole or flag.name in USUAL or flag.given
        )
    lines = [usage]
    for heading, flags in shown.items():
        lines += [heading, *(line for flag in flags for line in flag.lines(width))] if flags else []
    if not whole:
        lines.append(f"\n{ALL} tells all flags.")
    return "\n".join(lines)


def groups_of(table: Any, prefix: str, title: str) -> dict[str, list[Flag]]:
    """The flags of a dataclass's fields by the headings in its source; `title` stands before these.

    A field that holds a dataclass becomes a group of its own; one that could, a pointer to the recipe.
    """
    texts, headings = comments_of(type(table))
    groups: dict[str, list[Flag]] = {}
    group, inner = title, {}
    for field in fields(table):
        if field.name in headings:
            group = f"{title}: {headings[field.name]}" if title else headings[field.name]
        value, text = getattr(table, field.name), texts.get(field.name, "")
        if is_dataclass(value) and not isinstance(value, type):
            if prefix:
                inner |= groups_of(value, f"{prefix}{field.name}.", f"{title}: {field.name}")
        elif any(is_dataclass(kind) for kind in get_args(field.type)):
            place = f"[{prefix}{field.name}]"
            told = f"{text}; a table in the recipe, whose settings are flags then".removeprefix("; ")
            groups.setdefault(group, []).append(Flag(place, place, told, given=False))
        elif not (prefix == "" and field.name == "recipe"):
            name, given = f"{prefix}{field.name}", value != field.default
            groups.setdefault(group, []).append(
                Flag(name, written(name, field.type, value), told_of(text, field.type, value), given)
            )
    return groups | inner


def written(name: str, kind: Any, value: Any = None) -> str:
    """A flag as it is written, with its value, or with the kind of it where it has none.

    >>> written("train.keep_best", bool), written("train.lr", float, 3e-3), written("train.steps", int)
    ('--train.[no-]keep-best', '--train.lr 0.003', '--train.steps N')
    """
    table, dot, last = name.replace("_", "-").rpartition(".")
    if kind is bool:
        return f"--{table}{dot}[no-]{last}"
    if isinstance(value, tuple):
        return f"--{table}{dot}{last} {' '.join(map(str, value))}".rstrip()
    if value is not None:
        blank = isinstance(value, str) and value.split() != [value]
        return f"--{table}{dot}{last} {value!r}" if blank else f"--{table}{dot}{last} {value}"
    kind = _some(kind)
    if get_origin(kind) is tuple:
        return f"--{table}{dot}{last} {_NAMES[get_args(kind)[0]]} ..."
    return f"--{table}{dot}{last} {'NAME' if get_origin(kind) is Literal else _NAMES[kind]}"


def told_of(text: str, kind: Any, value: Any) -> str:
    """What a flag does, and what its value can be.

    >>> told_of("how it falls", Literal["linear", "cosine"], "linear"), told_of("a norm", bool, True)
    ('how it falls (linear, cosine)', 'a norm; on')
    """
    if kind is bool:
        return f"{text}; {'on' if value else 'off'}".removeprefix("; ")
    if get_origin(_some(kind)) is Literal:
        return f"{text} ({', '.join(map(str, get_args(_some(kind))))})".strip()
    return text


def _some(kind: Any) -> Any:
    """The type without its None."""
    kinds = [one for one in get_args(kind) if one is not type(None)]
    return kinds[0] if type(None) in get_args(kind) else kind


@cache
def comments_of(cls: type) -> tuple[dict[str, str], dict[str, str]]:
    """What the comments in a dataclass's source say: of each field, and as the heading above a field."""
    source = textwrap.dedent(inspect.getsource(cls))
    (tree,) = ast.parse(source).body
    assert isinstance(tree, ast.ClassDef)
    places = {
        node.target.id: range(node.lineno, (node.end_lineno or node.lineno) + 1)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    texts: dict[str, str] = {}
    headings: dict[str, str] = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, said = token.start[0], token.string.lstrip("# ")
        name = next((name for name, lines in places.items() if lines.stop > line), None)
        if name is not None:
            (texts if line in places[name] else headings)[name] = said
    return texts, headings
