"""The page as one file that needs no server: its code, its style, one text and the numbers of its pass.

The modules stand in an import map as data, so the file works from a disk with the network down. Under the
policy in its head it runs nothing but them, and loads nothing.
"""

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from clearhead.inspector.passes import Pass
from clearhead.inspector.provenance import Unknown, explain
from clearhead.inspector.trace import source_text
from clearhead.server.reading import Read
from clearhead.server.session import Session, Spoken
from clearhead.server.summary import groups_of, summary
from clearhead.server.wire import for_html, to_bytes

HERE = Path(__file__).parent
LARGEST = 24_000_000  # bytes of values; the largest are left out
MOST_CELLS = 500
LARGEST_VOCABULARY = 20_000


def saved_page(session: Session, found: Pass, cells: list[tuple[str, tuple[int, ...]]]) -> str:
    """The HTML of a pass. `cells`: numbers whose arithmetic is saved too."""
    if found.question.edits:
        raise ValueError("a saved page shows the model as it is; switch the edits off")
    session.passes.measure(found)
    text = (HERE / "page" / "index.html").read_text(encoding="utf-8")
    text = re.sub(r'<link rel="modulepreload"[^>]*>\n?', "", text)
    style = (HERE / "page" / "page.css").read_text(encoding="utf-8")
    text = replaced(text, r'<link rel="stylesheet"[^>]*>', f"<style>{style}</style>")
    modules = {file.name: file for file in sorted((HERE / "page").glob("*.js"))} | {
        "saved.js": HERE / "saved.js"
    }
    addresses = {f"clearhead/{name}": data_address(file) for name, file in modules.items()}
    imports = for_html({"imports": addresses})
    start = 'import "clearhead/saved.js"; import "clearhead/main.js";'
    policy = (
        f"default-src 'none'; script-src {sha(imports)} {sha(start)} data:; style-src {sha(style)}; "
        "img-src data: blob:; connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
    text = replaced(
        text,
        r'<meta name="clearhead-token"[^>]*>',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
    )
    data = (
        f'<script type="application/json" id="first">{for_html(first_of(session, found))}</script>\n'
        f'<script type="application/json" id="held">{for_html(held_of(session, found, cells))}</script>\n'
        f'<script type="importmap">{imports}</script>\n<script type="module">{start}</script>'
    )
    text = replaced(text, r'<script type="module"[^>]*></script>', "")  # it may not stand before the map
    return replaced(text, r'<script type="application/json" id="first"></script>', data)


def first_of(session: Session, found: Pass) -> dict[str, Any]:
    """What the page opens with."""
    ids, source = found.question.ids, found.question.source
    spoken = session.spoken.get(found.id) or Spoken(
        Read(ids), None if source is None else Read(source), None, None
    )
    words = [
        session.speller.pieces(part.ids, part.before, part.after) if part else []
        for part in (spoken.read, spoken.source)
    ]
    text, source_text = (
        "".join(piece.text for piece in pieces if piece.end > piece.start) for pieces in words
    )
    return {
        "manifest": {**session.manifest, "place": session.ours.name},  # where it lies is nobody else's affair
        "trace": {
            "data": base64.b64encode(
                summary(session.ours, session.speller, found, spoken.read, spoken.source)
            ).decode("ascii")
        },
        "text": text if spoken.text is None else spoken.text,
        "source": source_text if spoken.source_text is None else spoken.source_text,
        "run": None,
    }


def held_of(session: Session, found: Pass, cells: list[tuple[str, tuple[int, ...]]]) -> dict[str, Any]:
    """The numbers of the pass, and all else that the page may ask for."""
    passes = session.passes
    values: dict[str, Tensor] = {}
    left = LARGEST
    names = sorted(passes.outline.nodes, key=lambda name: passes.outline.values[name].numel())
    for name in names:
        try:
            value = passes.value(found, name).float()
        except KeyError:
            continue  # of a long text only rows are kept
        left -= value.numel() * 4
        if left < 0:
            break
        values[name] = value.clone()
    told: dict[str, Any] = {}
    for name, index in cells[:MOST_CELLS]:
        try:
            cell = explain(passes.trace_of(found, name), name, index)
        except (Unknown, ValueError, KeyError):
            continue
        told[f"{name}@{','.join(map(str, index))}"] = cell.to_dict()
    keys = {value["source"]["key"] for value in session.manifest["values"] if value["source"]["key"]}
    size = 0 if session.config is None else session.config.vocab_size
    spoken = session.spoken.get(found.id)
    text = None if spoken is None else spoken.text
    return {
        "values": base64.b64encode(to_bytes(values, {})).decode("ascii"),
        "cells": told,
        "sources": {key: source_text(key, session.model) for key in sorted(keys)},
        "vocabulary": session.speller.vocabulary(size) if size <= LARGEST_VOCABULARY else None,
        "tokens": session.tokenize(text) if text else None,
        "lines": {
            {"": "lines", "cross.": "cross"}[prefix]: [look.path for look in looks]
            for prefix, looks in groups_of(passes).items()
            if prefix in ("", "cross.")
        },
    }


def data_address(file: Path) -> str:
    """A module as an address that holds it; what it imports is asked for by names of the import map."""
    text = file.read_text(encoding="utf-8")
    text = re.sub(r'(\bfrom\s*|\bimport\s*\(?\s*)"\./([\w-]+\.js)"', r'\1"clearhead/\2"', text)
    return f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode('ascii')}"


def sha(text: str) -> str:
    """How a content policy names a script or a style that it allows."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def replaced(text: str, pattern: str, by: str) -> str:
    """The text with the one place that fits the pattern replaced."""
    made, count = re.subn(pattern, lambda _: by, text)
    assert count == 1, f"{pattern} stands {count} times in the page"
    return made
