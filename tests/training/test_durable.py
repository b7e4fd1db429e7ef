"""Folders that appear whole: the order of system calls, and one writer at a time."""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.training import durable
from clearhead.training.durable import damage, lock_run, write_folder

FILES = {"b.bin": lambda path: path.write_bytes(b"two" * 99), "a.txt": lambda path: path.write_text("one")}


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot bring a folder to the disk")
def test_everything_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    """What kill -9 cannot prove, for power loss: files, manifest, folder, then rename, then the folder above.

    At each fsync the file has its final size; new folders above are brought to the disk as well.
    """
    events: list[tuple[str, int, int]] = []
    fsync, rename = os.fsync, os.rename

    def watch_fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        events.append(("sync", status.st_ino, status.st_size))
        fsync(descriptor)

    def watch_rename(source: Path, target: Path) -> None:
        events.append(("rename", Path(source).stat().st_ino, 0))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watch_fsync)
    monkeypatch.setattr(os, "rename", watch_rename)
    final = tmp_path / "run" / "checkpoints" / "one"
    write_folder(final, FILES)

    def at(kind: str, path: Path) -> int:
        (place,) = (i for i, event in enumerate(events) if event[:2] == (kind, path.stat().st_ino))
        return place

    written = [final / name for name in (*FILES, "manifest.json")]
    places = [at("sync", path) for path in written]
    assert places == sorted(places), "the manifest is the last file"
    for path, place in zip(written, places, strict=True):
        assert events[place][2] == path.stat().st_size
    assert places[-1] < at("sync", final) < at("rename", final)
    above = [i for i, event in enumerate(events) if event[1] == final.parent.stat().st_ino]
    assert above[-1] == len(events) - 1 > at("rename", final)
    assert at("sync", tmp_path) < at("sync", tmp_path / "run") < places[0]
    assert sum(kind == "rename" for kind, *_ in events) == 1


def test_damage_is_named(tmp_path):
    """A folder as written has none; each kind of damage names its file; hashes can be left out."""
    folder = tmp_path / "one"
    write_folder(folder, FILES)
    assert damage(folder) == []
    (folder / "a.txt").write_text("0ne")
    (folder / "b.bin").unlink()
    (folder / "c").touch()
    assert damage(folder, hashes=False) == ["c does not belong there", "b.bin is missing"]
    assert damage(folder)[-1] == "a.txt is not what was written: its SHA-256 differs"
    assert damage(tmp_path / "none") == ["manifest.json is missing"]


def test_a_manifest_cannot_point_elsewhere(tmp_path):
    """Names that lead out of the folder are refused even if the manifest is otherwise in order."""
    folder = tmp_path / "one"
    write_folder(folder, FILES)
    entry = {"bytes": 3, "sha256": "0" * 64}
    for name in ("../secret", "/etc/passwd", "sub/file"):
        (folder / "manifest.json").write_bytes(durable._manifest({name: entry}))
        assert damage(folder) == ["manifest.json is not what was written"]


def test_a_failed_write_leaves_the_former_folder(tmp_path):
    """An exception in the middle of replacing a folder leaves it as it was, and nothing beside it."""
    folder = tmp_path / "one"
    write_folder(folder, FILES)
    content = (folder / "manifest.json").read_bytes()

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("out of ideas")

    with pytest.raises(RuntimeError, match="out of ideas"):
        write_folder(folder, {"a.txt": fail})
    assert (folder / "manifest.json").read_bytes() == content
    assert damage(folder) == []
    assert [path.name for path in tmp_path.iterdir()] == ["one"]


def test_a_second_writer_is_refused(tmp_path):
    """The second run in a folder is told which process holds it; when the first ends, it may start (R14)."""
    with lock_run(tmp_path / "run"):
        message = f"run is in use by process {os.getpid()}; wait for it, stop it, or choose another folder"
        if sys.platform == "win32":
            message = "run is in use by another process"
        with pytest.raises(BlockingIOError, match=message), lock_run(tmp_path / "run"):
            pass
        with lock_run(tmp_path / "other"):
            pass
    with lock_run(tmp_path / "run"):
        pass


def test_the_lock_goes_with_an_error(tmp_path):
    """An exception inside lets the folder go."""
    with pytest.raises(RuntimeError), lock_run(tmp_path):
        raise RuntimeError
    with lock_run(tmp_path):
        assert (tmp_path / ".lock").exists()


def test_another_process_is_refused_and_a_killed_one_lets_go(tmp_path):
    """Across processes: refused while it lives, free at once after kill -9, with no stale lock to remove."""
    code = (
        "import sys, time\n"
        "from clearhead.training.durable import lock_run\n"
        "with lock_run(sys.argv[1]):\n"
        "    print('held', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(BlockingIOError, match="in use by"), lock_run(tmp_path):
            pass
        child.send_signal(signal.SIGKILL if sys.platform != "win32" else signal.SIGTERM)
        child.wait()
    with lock_run(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_what_the_system_is_asked_in_a_save(tmp_path):
    """R3: every file of a checkpoint is synced after it was written, then the folder; then comes the rename;
    then the folder above is synced. Seen from outside, in the system calls of a whole process.
    """
    code = (
        "import sys; from torch import nn, optim; from clearhead.training.checkpoint import save_checkpoint\n"
        "model = nn.Linear(3, 2); optimizer = optim.SGD(model.parameters(), lr=1.0)\n"
        "save_checkpoint(sys.argv[1], 1, model, optimizer)\n"
    )
    trace = tmp_path / "trace"
    kinds = "trace=openat,write,pwrite64,ftruncate,fsync,fdatasync,rename,renameat,renameat2"
    watch = ["strace", "-f", "-y", "-s", "0", "-e", kinds, "-o", str(trace)]
    run = tmp_path / "run"
    done = subprocess.run([*watch, sys.executable, "-c", code, str(run)], capture_output=True, text=True)
    if "ptrace" in done.stderr:
        pytest.skip("this machine lets nobody trace")
    assert done.returncode == 0, done.stderr
    folder = run / "checkpoints"
    calls = [line.split(maxsplit=1)[1] for line in trace.read_text().splitlines() if f"{run}" in line]

    def last(pattern: str) -> int:
        return max(i for i, call in enumerate(calls) if re.match(pattern, call))

    new = re.escape(f"{folder}/.tmp-step-00000001-") + r"\d+"
    renamed = last(rf'rename\w*\(.*"{new}".*"{re.escape(str(folder))}/step-00000001"')
    whole = last(rf"fsync\(\d+<{new}>")
    for name in ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"):
        file = rf"\d+<{new}/{re.escape(name)}>"
        synced = last(rf"fsync\({file}")
        changes = [i for i, c in enumerate(calls) if re.match(rf"(write|pwrite64|ftruncate)\({file}", c)]
        assert max(changes, default=-1) < synced < whole, name
    assert whole < renamed < last(rf"fsync\(\d+<{re.escape(str(folder))}>")
