"""A folder that is on the disk whole or not at all, and that shows when it is no longer what was written.

`write_folder` writes every file into a new folder `.tmp-...` and brings it to the disk; then the manifest,
with the size and the SHA-256 of each file; then the folder itself; then come one rename and the folder above.
A crash at any moment leaves the old state or the new one. What is to go is renamed to `.trash-...` first, so
that half a folder never bears a good name. `damage` compares a folder with its manifest.

Several processes (`Ranks`) may write one folder together: each brings its own files to the disk and tells
their hashes; the first one, once it has heard of all, writes the manifest and renames.

The hashes find rot and torn files, not an attacker: whoever can write the folder can write the manifest.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

logger = logging.getLogger(__name__)

MANIFEST = "manifest.json"
FORMAT = 1
ASIDE = ".replaced-"  # the former folder of a name, until the new one bears it


@runtime_checkable
class Ranks(Protocol):
    """The processes that write a folder together."""

    @property
    def is_main(self) -> bool:
        """Whether this one writes what only one may."""
        ...

    @property
    def group(self) -> Any:
        """Their process group; None for one process."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Wait for all; return everyone's value (of JSON's kinds), in order, the main one's first."""
        ...


class Alone:
    """One process, which writes everything."""

    is_main, group = True, None

    def gather(self, value: Any) -> list[Any]:
        """[value]"""
        return [value]


ALONE = Alone()


def no_shards(folder: Path) -> Iterable[str]:
    """Nothing is written in parts."""
    return ()


def write_whole(path: str | Path, text: str) -> None:
    """Write a file so that a kill or a power cut at any moment leaves the old or the new content, no part."""
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text, encoding="utf-8", newline="\n")
    _sync(draft)  # the new name must not come to the disk before the content
    draft.replace(path)


def write_folder(
    final: Path,
    files: Mapping[str, Callable[[Path], object]],
    ranks: Ranks = ALONE,
    shards: Callable[[Path], Iterable[str]] = no_shards,
) -> None:
    """Write a folder of `files`, each by its function, and only then give it its name, replacing any other.

    Whatever an earlier, killed call left in the folder above is cleared away first; so one run at a time may
    write there (see `lock_run`). With several `ranks`, all of them call this: the main one writes `files`,
    each writes its part by `shards`, which returns the names of the files it made; and if one fails, all
    raise. OSError leaves no trace but the former state.
    """
    new = final.with_name(f".tmp-{final.name}-{ranks.gather(os.getpid())[0]}")
    try:
        _agree(ranks, lambda: _begin(final, new), main_only=True)
        written = _agree(ranks, lambda: _write(new, files if ranks.is_main else {}, shards))
        entries = {name: entry for part in written for name, entry in part.items()}
        _agree(ranks, lambda: _finish(final, new, entries), main_only=True)
    except Exception:
        if ranks.is_main:
            with suppress(OSError):
                clear_unfinished(final.parent)
        raise


def _agree(ranks: Ranks, action: Callable[[], Any], main_only: bool = False) -> list[Any]:
    """Everyone's result of the action; if it failed for one, all raise, and name the first that failed."""
    result, own = None, None
    try:
        result = action() if ranks.is_main or not main_only else None
    except Exception as error:
        own = error
    told = ranks.gather((result, None if own is None else str(own), getattr(own, "errno", None)))
    if own is not None:
        raise own
    for rank, (_, problem, number) in enumerate(told):
        if problem is not None:
            raise OSError(number or errno.EIO, f"rank {rank} failed: {problem}")
    return [value for value, _, _ in told]


def _begin(final: Path, new: Path) -> None:
    _make_folder(final.parent)
    clear_unfinished(final.parent)
    _point("begin")
    new.mkdir()


def _write(
    new: Path, files: Mapping[str, Callable[[Path], object]], shards: Callable[[Path], Iterable[str]]
) -> dict[str, dict[str, Any]]:
    """Write and sync this process's files; their sizes and hashes."""
    entries = {}
    for name in shards(new):
        entries[name] = _seal(new / name)
    for name, write in files.items():
        write(new / name)
        entries[name] = _seal(new / name)
    return entries


def _seal(path: Path) -> dict[str, Any]:
    _sync(path)
    entry = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    _point(path.name)
    return entry


def _finish(final: Path, new: Path, entries: dict[str, Any]) -> None:
    """The manifest, then the good name, then the former folder of that name goes."""
    old = final.with_name(ASIDE + final.name)
    (new / MANIFEST).write_bytes(_manifest(entries))
    _sync(new / MANIFEST)
    _point(MANIFEST)
    _sync(new)
    _point("before rename")
    if final.exists():
        final.rename(old)
        _point("replaced")
    new.rename(final)
    _point("after rename")
    _sync(final.parent)
    if old.exists():
        remove_folder(old)


def remove_folder(path: Path) -> None:
    """Take a folder's good name away, then delete it; a failure is logged, for it does no harm."""
    trash = path.with_name(f".trash-{path.name.lstrip('.')}-{os.getpid()}")
    try:
        path.rename(trash)
        _point("trashed")
        shutil.rmtree(trash)
        _point("removed")
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)


def damage(folder: Path, *, hashes: bool = True) -> list[str]:
    """Say in what a folder differs from its manifest, naming the files; without `hashes`, by name and size.

    Files whose name begins with a dot belong to the system and are not looked at.
    """
    try:
        files = _read_manifest(folder)
        there = {file.name for file in folder.iterdir() if not file.name.startswith(".")}
        problems = [f"{name} does not belong there" for name in sorted(there - {MANIFEST, *files})]
        for name, entry in files.items():
            if name not in there:
                problems.append(f"{name} is missing")
            elif (size := (folder / name).stat().st_size) != entry["bytes"]:
                problems.append(f"{name} has {size} bytes, not {entry['bytes']}")
            elif hashes and _sha256(folder / name) != entry["sha256"]:
                problems.append(f"{name} is not what was written: its SHA-256 differs")
        return problems
    except (ValueError, OSError) as error:
        return [str(error)]


@contextmanager
def lock_run(run: str | Path) -> Iterator[None]:
    """Hold the folder `run` for this process, so that no second one writes there; to die is to let go.

    BlockingIOError: another process holds it.
    """
    folder = Path(run)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("a+b") as file:
        if not _acquire(file.fileno(), folder):
            file.seek(0)
            holder = "" if sys.platform == "win32" else file.read(32).decode("ascii", "replace").strip()
            who = f"process {holder}" if holder else "another process"
            raise BlockingIOError(
                f"{folder} is in use by {who}; wait for it, stop it, or choose another folder"
            )
        try:
            file.truncate(0)
            file.write(b"%d\n" % os.getpid())
            file.flush()
            yield
        finally:
            _release(file.fileno())


def _manifest(files: Mapping[str, Any]) -> bytes:
    """The manifest's own hash is the last thing in it, so that a bit flipped there shows as well."""
    content = {"format": FORMAT, "files": files}
    own = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps({**content, "sha256": own}, indent=2) + "\n").encode()


def _read_manifest(folder: Path) -> dict[str, dict[str, Any]]:
    """{file: {"bytes": ..., "sha256": ...}}; ValueError unless byte for byte what `_manifest` writes."""
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{MANIFEST} is missing")
    raw = (folder / MANIFEST).read_bytes()
    try:
        files = json.loads(raw)["files"]
        plain = all(Path(name).name == name for name in files)
        complete = all(entry.keys() == {"bytes", "sha256"} for entry in files.values())
        good = plain and complete and raw == _manifest(files)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        good, files = False, {}
    if not good:
        raise ValueError(f"{MANIFEST} is not what was written")
    return files


def clear_unfinished(parent: Path) -> None:
    """Take away what a killed call of `write_folder` left in a folder, or finish what it had begun."""
    for old in parent.glob(f"{ASIDE}*"):
        final = old.with_name(old.name.removeprefix(ASIDE))
        if final.exists():
            remove_folder(old)
        else:
            old.rename(final)
    for pattern in (".tmp-*", ".trash-*"):
        for leftover in parent.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def _make_folder(folder: Path) -> None:
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    if sys.platform == "win32" and path.is_dir():
        return  # Windows knows no such call
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _point(name: str) -> None:
    """Do nothing. The tests of faults put a crash here, at each name in turn."""


if sys.platform == "win32":

    def _acquire(descriptor: int, folder: Path) -> bool:
        try:
            os.lseek(descriptor, 0, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _release(descriptor: int) -> None:
        os.lseek(descriptor, 0, os.SEEK_SET)
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)

else:

    def _acquire(descriptor: int, folder: Path) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:  # some network file systems
            logger.warning("%s cannot be locked (%s): let one run alone write there", folder, error.strerror)
        return True

    def _release(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_UN)
