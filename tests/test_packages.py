"""Packages out of a registry: one that cannot be had leaves a test out, one that is wrong fails it."""

import hashlib
import io
import os
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks import packages
from benchmarks.packages import Package, Unreachable

pytestmark = pytest.mark.slow

ARCHIVE = "grain-1.2-py3-none-any.whl"


def wheel() -> bytes:
    """A wheel with one file of data."""
    about = "grain-1.2.dist-info"
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        file.writestr("grain/weights.txt", "3 1 4")
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: grain\nVersion: 1.2\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return content.getvalue()


WHEEL = wheel()
GRAIN = Package("grain==1.2", ARCHIVE, hashlib.sha256(WHEEL).hexdigest())
INDEX = f'<a href="/{ARCHIVE}">{ARCHIVE}</a>'.encode()


@dataclass
class Registry:
    """What it answers: a status and a content by path, else 404; and what it was asked."""

    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """A registry that pip asks, and no other; packages lie in a folder of the test's own."""
    registry = Registry()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            registry.asked.append(self.path)
            status, content = registry.answers.get(self.path, (404, b""))
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/zip")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    for name in [name for name in os.environ if name.upper().startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(packages, "FOLDER", tmp_path / "packages")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        settings = {"CONFIG_FILE": os.devnull, "NO_CACHE_DIR": "1"}
        settings["INDEX_URL"] = f"http://127.0.0.1:{server.server_port}/simple"
        for name, value in settings.items():
            monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield registry
        server.shutdown()


def test_a_package_is_fetched_once_and_unpacked(registry: Registry) -> None:
    registry.answers = {"/simple/grain/": (200, INDEX), f"/{ARCHIVE}": (200, WHEEL)}
    assert (GRAIN.unpack() / "grain" / "weights.txt").read_text(encoding="utf-8") == "3 1 4"
    assert GRAIN.path.read_bytes() == WHEEL
    assert registry.asked.count(f"/{ARCHIVE}") == 1
    GRAIN.unpack()
    GRAIN.fetch()
    assert registry.asked.count(f"/{ARCHIVE}") == 1
    assert sorted(path.name for path in packages.FOLDER.iterdir()) == [ARCHIVE.removesuffix(".whl"), ARCHIVE]


@pytest.mark.parametrize(
    "answers",
    [
        {},
        {"/simple/grain/": (403, b"")},
        {"/simple/grain/": (503, b"")},
        {"/simple/grain/": (200, INDEX)},
        {"/simple/grain/": (200, INDEX), f"/{ARCHIVE}": (502, b"")},
        {"/simple/grain/": (200, INDEX), f"/{ARCHIVE}": (503, b"")},
    ],
    ids=["knows no such package", "forbids", "is out of order", "lost the file", "bad gateway", "busy"],
)
def test_a_registry_without_the_package_is_told_apart(
    registry: Registry, answers: dict[str, tuple[int, bytes]]
) -> None:
    registry.answers = answers
    with pytest.raises(Unreachable, match=r"^pip cannot fetch grain==1\.2: .+$"):
        GRAIN.unpack()


def test_a_registry_that_is_not_there_is_told_apart(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(Unreachable, match=r"^pip cannot fetch grain==1\.2: .+$"):
        GRAIN.unpack()


def test_a_version_that_does_not_exist_and_a_changed_file_are_errors(registry: Registry) -> None:
    """They are mistakes of ours or worse: no reason to leave a test out."""
    registry.answers = {"/simple/grain/": (200, INDEX), f"/{ARCHIVE}": (200, WHEEL)}
    for package, told in (
        (Package("grain==1.3", ARCHIVE, GRAIN.sha256), "No matching distribution"),
        (Package("grain==1.2", ARCHIVE, "0" * 64), f"came with sha256 {GRAIN.sha256}, not 0000"),
    ):
        with pytest.raises(OSError, match=told) as raised:
            package.unpack()
        assert not isinstance(raised.value, Unreachable)
        assert not package.path.exists()
