"""What is taken away: the numbers of a pass as safetensors or CSV, Python that prints them, the page."""

import csv
import io
from collections.abc import Callable
from fnmatch import fnmatchcase
from itertools import product

import torch
from torch import Tensor

from clearhead.inspector.passes import Pass
from clearhead.inspector.views import parse_place
from clearhead.server.saved import saved_page
from clearhead.server.session import Session
from clearhead.server.sides import Side
from clearhead.server.wire import to_bytes

LARGEST = 256_000_000  # bytes
MOST_LINES = 200_000

Asked = dict[str, str]
Answer = tuple[bytes, str]


def export(session: Session, number: str, kind: str, asked: Asked) -> Answer:
    """A file about a pass, and its media type. `asked`: name and at, which part; all without."""
    if kind not in KINDS:
        raise KeyError(f"there is no export as {kind!r:.20}; there are {', '.join(KINDS)}")
    side, found = session.find(number)
    return KINDS[kind](session, side, found, asked)


def as_safetensors(session: Session, side: Side, found: Pass, asked: Asked) -> Answer:
    """The values whose names fit the pattern `name`, all without one."""
    passes, pattern = side.passes, asked.get("name", "*")
    names = [name for name in passes.outline.nodes if fnmatchcase(name, pattern)]
    if not names:
        raise KeyError(f"no value is named like {pattern[:80]!r}")
    if passes.n_bytes(found.question) > LARGEST and len(names) > 1:
        raise ValueError(f"the values of this text take more than {LARGEST} bytes; choose some with name=...")
    tensors = {name: passes.value(found, name).clone() for name in names}
    about = {"trace": found.id, "model": side.name, "ids": list(found.question.ids)}
    return to_bytes(tensors, about), "application/octet-stream"


def as_csv(session: Session, side: Side, found: Pass, asked: Asked) -> Answer:
    """The cells of a slice, one a line with their indices; without a name the next token's probabilities."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n").writerow
    if "name" not in asked:
        logits = found.output[-1].float() if found.output.dim() == 2 else found.output.flatten().float()
        write(["id", "text", "logit", "probability"])
        for number, (logit, p) in enumerate(zip(logits.tolist(), logits.softmax(-1).tolist(), strict=True)):
            write([number, harmless(session.speller.word(number)), repr(logit), repr(p)])
        return out.getvalue().encode(), "text/csv; charset=utf-8"
    name = asked["name"]
    value = side.passes.value(found, name)
    place = parse_place(asked.get("at", ""), value.shape)
    ranges = [range(i, i + 1) if isinstance(i, int) else range(i.start, i.stop) for i in place]
    part = value[tuple(slice(r.start, r.stop) for r in ranges)]
    if part.numel() > MOST_LINES:
        raise ValueError(f"this slice has {part.numel()} numbers; at most {MOST_LINES} go into a CSV file")
    axes = side.passes.outline.nodes[name].axes
    write([axis or f"axis {i}" for i, axis in enumerate(axes)] + ["value"])
    for index, number in zip(product(*ranges), flat(part), strict=True):
        write([*index, repr(number)])
    return out.getvalue().encode(), "text/csv; charset=utf-8"


def as_python(session: Session, side: Side, found: Pass, asked: Asked) -> Answer:
    """A program that prints the same numbers."""
    question, name = found.question, asked.get("name", "logits")
    if name not in side.passes.outline.nodes:
        raise KeyError(f"{name[:80]!r} is no value of this model")
    shape = side.passes.value(found, name).shape
    place = parse_place(asked.get("at", ""), shape)
    at = ", ".join(str(i) if isinstance(i, int) else f"{i.start}:{i.stop}" for i in place)
    weights = "" if side.run is None else side.run.place(question.step)
    lines = [
        "import torch",
        "",
        "from clearhead.cli_models import open_model",
        "from clearhead.inspector.trace import Edit, trace"
        if question.edits
        else "from clearhead.inspector.trace import trace",
        *(["from clearhead.training.checkpoint import load_checkpoint"] if weights else []),
        "",
        f"model, tokenizer = open_model({side.place!r}, 'cpu')",
        *([f"load_checkpoint({weights!r}, model)  # step {question.step}"] if weights else []),
        f"tokens = torch.tensor([{list(question.ids)}])",
    ]
    options = ""
    if question.source is not None:
        lines.append(f"source = torch.tensor([{list(question.source)}])")
        options += ", source=source"
    if question.edits:
        made = [f"Edit({e.name!r}, {e.kind!r}, {e.at!r}{value_of(e.value)})" for e in question.edits]
        lines.append(f"edits = [{', '.join(made)}]")
        options += ", edits=edits"
    lines += [f"values = trace(model, tokens{options}).values", f"print(values[{name!r}][{at}])", ""]
    return "\n".join(lines).encode(), "text/x-python; charset=utf-8"


def value_of(value: float | Tensor | None) -> str:
    """The value of an edit as an argument."""
    if isinstance(value, Tensor):
        return f", torch.tensor({value.tolist()})"
    return "" if value is None else f", {value!r}"


def flat(part: Tensor) -> list[float] | list[int]:
    """The numbers of a slice in order, widened exactly."""
    return (part.double() if part.is_floating_point() else part.to(torch.int64)).flatten().tolist()


def harmless(text: str) -> str:
    """A text that a spreadsheet does not take for a formula."""
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def as_html(session: Session, side: Side, found: Pass, asked: Asked) -> Answer:
    """The page as one file. `cells`: numbers whose arithmetic is saved, as NAME@0,1;NAME@2,3."""
    if side is not session.ours:
        raise ValueError("a saved page shows the model that is looked at, not the one beside it")
    cells = []
    for cell in filter(None, asked.get("cells", "").split(";")):
        name, _, index = cell.rpartition("@")
        if not all(part.isascii() and part.isdecimal() and len(part) < 10 for part in index.split(",")):
            raise ValueError(f"cells={cell!r:.60} should be NAME@0,1,2")
        cells.append((name, tuple(map(int, index.split(",")))))
    return saved_page(session, found, cells).encode(), "text/html; charset=utf-8"


KINDS: dict[str, Callable[[Session, Side, Pass, Asked], Answer]] = {
    "safetensors": as_safetensors,
    "csv": as_csv,
    "py": as_python,
    "html": as_html,
}
