"""The flags of a command line, read by tyro; what it says of mistakes becomes one line in plain words."""

import contextlib
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import tyro
from tyro.conf import PositionalMetavarFromFieldName

PLAIN = [  # what tyro says, and how we say it
    (r"^Error parsing settings\.(\w+): ", r"[\1] "),
    (r"^Error parsing (\S+): invalid literal for int\(\) with base 10: (.*)$", r"\1: \2 is no whole number"),
    (r"^Error parsing (\S+): could not convert string to float: (.*)$", r"\1: \2 is no number"),
    (
        r"^Error parsing (\S+): no type matching \S*\|INT could .*? from \[(.*?)\].*$",
        r"\1: \2 is no whole number",
    ),
    (
        r"^Error parsing (\S+): no type matching \S*\|FLOAT could .*? from \[(.*?)\].*$",
        r"\1: \2 is no number",
    ),
    (r"^Unrecognized options: (--[^\s,]+).*$", r"there is no flag \1"),
    (r"^Unrecognized options: ([^\s,]+).*$", r"there is no use for \1"),
    (r"^Missing from [\w ]+: (\S+) (?:[A-Z|]+ )?(.*?)\.? \(required\)", r"\1 is missing: \2"),
    (r"^Missing value for argument '(\S+?)'.*$", r"\1 needs a value"),
    (
        r"^invalid choice (.*?) for argument '(\S+?)'\. Expected one of \((.*?),?\)\.$",
        r"\2: \1 is none of \3",
    ),
    (r"','", "', '"),  # where tyro broke the line
]


def parse(
    target: Callable[..., Any], words: Sequence[str], prog: str, see: str = "--help", **options: Any
) -> Any:
    """Parse flags with tyro into a dataclass, or into a call of a function that is ready to be made.

    tyro's boxed error becomes the one-line ValueError that every other mistake is; `see` names the flag that
    tells all the others.
    """
    captured = io.StringIO()
    options["config"] = (PositionalMetavarFromFieldName, *options.get("config", ()))
    try:
        with contextlib.redirect_stderr(captured):
            return tyro.cli(target, prog=prog, args=list(words), **options)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
    raise ValueError(f"{one_line(captured.getvalue())}; see {prog} {see}")


def one_line(box: str) -> str:
    """The message inside one of tyro's boxes: its first paragraph and the flag it suggests.

    >>> one_line("╭─ Unrecognized ─╮\\n│ Unrecognized options: --lrr │\\n│ ──── │\\n│ Perhaps: │\\n╰──╯")
    'there is no flag --lrr'
    """
    drawn = [line.removeprefix("│ ").removesuffix(" │") for line in box.splitlines()]
    lines = drawn[1:] if box.startswith("╭") else drawn[2:]  # in plain ASCII, a title and a rule come first
    end = next((n for n, line in enumerate(lines) if re.match(r"\s*[─-]{3}|╰", line)), len(lines))
    # A line of a wide box that is full to its end breaks off within a word.
    words = (line if len(line) > 70 and line[-1] != " " else f"{line} " for line in lines[:end])
    near = re.search(r"Perhaps you meant:\W*(--[\w.-]+)", box)
    hint = f"; did you mean {near[1]}?" if near else ""
    said = " ".join("".join(words).split()) or "the command line could not be read"
    for pattern, ours in PLAIN:
        said = re.sub(pattern, ours, said)
    return said.removesuffix(".") + hint
