"""The files of the page, as they are, under addresses that change when they do.

    /page/7c1f0e94a2b3/store.js    kept by the browser for good: another store.js has another address
    /page/store.js                 leads to it, asked for each time

The mark is a hash of the files' names, sizes and times, so a page that is opened again needs no other file.
"""

import hashlib
import re
from pathlib import Path

from starlette.responses import Response

PAGE = Path(__file__).parent / "page"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".json": "application/json",
}
FOR_GOOD = {"cache-control": "private, max-age=31536000, immutable"}
EACH_TIME = {"cache-control": "no-cache"}


def index_html() -> str:
    """The page, its files at their marked addresses."""
    text = (PAGE / "index.html").read_text(encoding="utf-8")
    return text.replace('"/page/', f'"/page/{mark()}/')


def mark() -> str:
    """What changes when a file of the page does."""
    told = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(PAGE.iterdir())]
    return hashlib.sha256(repr(told).encode()).hexdigest()[:12]


def page_file(path: str) -> Response:
    """The answer to /page/PATH; KeyError for what is no file of the page."""
    marked = re.match(r"([0-9a-f]{12})/", path)
    file, now = find_file(path[13:] if marked else path), mark()
    if marked is None and file.suffix == ".js":  # a module that is loaded from two addresses is two modules
        return Response(f'export * from "/page/{now}/{file.name}";\n', 200, EACH_TIME, KINDS[".js"])
    # read here: the files are small, and a thread of its own would cost more than the reading
    kept = FOR_GOOD if marked is not None and marked[1] == now else EACH_TIME
    return Response(file.read_bytes(), 200, kept, KINDS[file.suffix])


def find_file(path: str) -> Path:
    """A file of the page; KeyError for anything else."""
    root = PAGE.resolve()
    try:
        file = (root / path).resolve()
        if file.is_relative_to(root) and file.suffix in KINDS and file.is_file():
            return file
    except (OSError, ValueError):  # a name that is too long, or holds a NUL
        pass
    raise KeyError("the page has no such file")
