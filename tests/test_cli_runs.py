"""clearhead launch and clearhead verify."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from clearhead.cli import main
from clearhead.cli_ranks import describe
from clearhead.cli_runs import TELLS, Launch, tell_launcher, torchrun
from clearhead.training.loop import train
from tiny_run import tiny_recipe, write_corpus, write_recipe


def test_verify_names_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints, the best, milestones and tokens: each is a line; damage is told and ends with code 2."""
    corpus = write_corpus(tmp_path / "corpus")
    run = tmp_path / "run"
    train(tiny_recipe(corpus, keep_best=True, milestones=5, probes=0), run)
    main(["verify", str(run)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.removeprefix(f"{run}/") for line in lines] == [
        "checkpoints/step-00000005: whole",
        "checkpoints/step-00000010: whole",
        "best/step-00000010: whole",
        "milestones/step-00000005: whole",
        "milestones/step-00000010: whole",
        "data/train: whole",
        "data/validation: whole",
    ]
    for file in (run / "checkpoints/step-00000005/model.safetensors", *(run / "data/train").glob("*.bin")):
        content = bytearray(file.read_bytes())
        content[-2] ^= 4
        file.write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(run)])
    assert stop.value.code == 2
    told = capsys.readouterr()
    assert "step-00000005: model.safetensors is not what was written: its SHA-256 differs" in told.out
    assert "data/train: " in told.out and "data/train: whole" not in told.out
    assert "damaged in 2 places" in told.err


def test_verify_wants_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", str(tmp_path / "none")])
    assert "holds no run: there is no such folder" in capsys.readouterr().err


def test_a_run_that_never_saved_is_not_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it has is looked at; that there is no checkpoint is told, and ends with code 2."""
    run = train(tiny_recipe(write_corpus(tmp_path / "corpus"), probes=0), tmp_path / "run", stop_after=1)
    shutil.rmtree(run.checkpoints)
    with pytest.raises(SystemExit) as stop:
        main(["verify", str(run.path)])
    assert stop.value.code == 2
    told = capsys.readouterr()
    assert "data/train: whole" in told.out
    assert "holds no checkpoint: it has not saved yet, and --resume begins it anew" in told.err


def test_what_launch_starts() -> None:
    """torchrun with what its restarts need; what the user has set stays."""
    command, environment = torchrun(Launch(processes=2, max_restarts=3), ["train", "demo", "--run", "x"])
    assert command[:3] == [sys.executable, "-m", "clearhead.cli_ranks"]
    assert command[-6:] == ["--", "clearhead.cli", "train", "demo", "--run", "x"]
    assert {"--nproc-per-node=2", "--nnodes=1", "--max-restarts=3"} <= set(command)
    assert environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert environment["PATH"] == os.environ["PATH"]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no exec")
def test_launch_becomes_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process stands between who asks a run to stop and torchrun, which passes it on to the ranks."""
    began: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda path, command, environment: began.append([path, *command]))
    main(["launch", "--processes", "2", "train", "demo"])
    assert began[0][:4] == [sys.executable, sys.executable, "-m", "clearhead.cli_ranks"]
    assert began[0][-2:] == ["train", "demo"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--processes 2", "say what to start"),
        ("--processes 0 train demo", "processes=0"),
        ("--processes 2 --machines 2 train demo", "must know where to meet"),
        ("--processs 2 train demo", "did you mean --processes"),
        ("--processes 2 train", "name the recipe first"),
        ("--processes 2 train nowhere.toml", "no recipe 'nowhere.toml'"),
        ("--processes 2 train demo --train.lrr 3", "did you mean --train.lr?"),
        ("--processes 2 train demo --run x --dry-run --resume", "resume=True has no effect with --dry-run"),
    ],
)
def test_mistakes_of_launch(
    words: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the command line can know is one line, before any process is started."""
    monkeypatch.setattr(os, "execve", lambda *words: pytest.fail("started"))
    with pytest.raises(SystemExit) as stop:
        main(["launch", *words.split()])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("parallel", ["auto", "fsdp"])
def test_a_dry_run_starts_nothing(
    parallel: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One table, and whose figures they are."""
    monkeypatch.setattr(os, "execve", lambda *words: pytest.fail("started"))
    recipe = write_recipe(tmp_path / "r.toml", tiny_recipe(write_corpus(tmp_path / "corpus"), device="cpu"))
    flags = ["--run", str(tmp_path / "run"), "--dry-run", "--train.parallel", parallel]
    main(["launch", "--processes", "3", "train", str(recipe), *flags])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines].count("memory") == 1
    assert lines[-1].startswith("processes   3, and the figures are for one process that is alone")
    assert lines[-1].endswith("share weights, gradients and optimizer out") == (parallel == "fsdp")


def failure(file: Path, code: int, moment: int = 0) -> ProcessFailure:
    made = ProcessFailure(local_rank=0, pid=7, exitcode=code, error_file=str(file))
    made.timestamp = moment
    return made


def test_what_ended_the_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line counts, and whether it was a mistake; a crash is told of the rank that died first."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "0"))
    assert not tell_launcher("clearhead: no lr", mistake=True)  # bare torchrun: the rank says it itself
    monkeypatch.setenv(TELLS, "1")
    with pytest.raises(SystemExit) as stop:
        main(["train", "nowhere.toml"])
    assert stop.value.code == 2 and capsys.readouterr().err == ""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "1"))
    assert tell_launcher("clearhead: rank 0 stopped: the disk is full", mistake=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "no" / "2"))
    assert not tell_launcher("clearhead: no lr", mistake=True)
    told = {rank: failure(tmp_path / str(rank), 2) for rank in (1, 0)}
    line, code, mistake = describe(told)
    assert line.startswith("clearhead: no recipe 'nowhere.toml'") and (code, mistake) == (2, True)
    dead = {3: failure(tmp_path / "none", -9, 5), 2: failure(tmp_path / "none", 1, 6)}
    assert describe(dead) == ("clearhead: rank 3 ended with signal SIGKILL", 1, False)
    assert describe({1: told[1], **dead}) == ("clearhead: the disk is full", 2, False)
    assert describe({2: dead[2]}) == ("clearhead: rank 2 ended with exit code 1", 1, False)
    assert describe({})[1:] == (1, False)


def launch_command(processes: int, recipe: Path, *words: str) -> list[str]:
    start = [sys.executable, "-m", "clearhead.cli", "launch", "--processes", str(processes)]
    return [*start, "--max-restarts", "1", "train", str(recipe), "--train.device", "cpu", *words]


@pytest.mark.slow
def test_a_mistake_that_only_ranks_find(tmp_path: Path) -> None:
    """One line from all of them, exit code 2, and nothing is tried again."""
    corpus = write_corpus(tmp_path / "corpus")
    recipe = write_recipe(tmp_path / "r.toml", tiny_recipe(corpus, batch_size=5, probes=0))
    command = launch_command(2, recipe, "--run", "run")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 2
    *notes, last = done.stderr.splitlines()
    assert last.startswith("clearhead: neither train.accumulation=1 nor train.batch_size=5 can be shared")
    assert "clearhead: " not in "".join(notes) and "Traceback" not in done.stderr
    assert done.stderr.count("parallel=auto") == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM that can be caught")
@pytest.mark.parametrize("request_to_stop", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_ends_as_in_one_process(request_to_stop: signal.Signals, tmp_path: Path) -> None:
    """Saved; one line; 130; not a word of torchrun's, nor PyTorch's warnings for those who share matrices."""
    settings: dict[str, Any] = {"steps": 100_000, "probes": 0, "sample_every": 0, "tensor_parallel": 2}
    recipe = write_recipe(tmp_path / "r.toml", tiny_recipe(write_corpus(tmp_path / "corpus"), **settings))
    command = launch_command(2, recipe, "--run", "run")
    out: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, **out) as process:
        assert process.stdout is not None
        said = ""
        while "step 5: validation" not in said:
            said += (line := process.stdout.readline())
            assert line, said
        process.send_signal(request_to_stop)
        said += process.communicate(timeout=100)[0]
    assert process.returncode == 130, said
    assert "saved in run; go on with the same command and --resume" in said.splitlines()[-1]
    assert "note: " not in said and "Traceback" not in said
    assert list((tmp_path / "run/checkpoints").iterdir())


@pytest.mark.slow
def test_launch_trains_in_two_processes(tmp_path: Path) -> None:
    """From text to shards of a checkpoint, one process speaking; and the run is whole."""
    recipe = write_recipe(tmp_path / "r.toml", tiny_recipe(write_corpus(tmp_path / "corpus")))
    flags = ["--run", "run", "--train.parallel", "fsdp", "--train.device", "cpu"]
    command = [
        sys.executable,
        "-m",
        "clearhead.cli",
        "launch",
        "--processes",
        "2",
        "train",
        str(recipe),
        *flags,
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("model in run") == 1
    assert "note: " not in done.stderr  # none of the warnings that PyTorch has for those who share weights
    names = sorted(file.name for file in (tmp_path / "run/checkpoints/step-00000010").iterdir())
    assert names[1:3] == [f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2)]
    main(["verify", str(tmp_path / "run")])
