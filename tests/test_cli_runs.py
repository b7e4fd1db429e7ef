"""clearhead launch and clearhead verify."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from clearhead.cli import main
from clearhead.cli_runs import Launch, torchrun
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
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
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
    assert began[0][:4] == [sys.executable, sys.executable, "-m", "torch.distributed.run"]
    assert began[0][-2:] == ["train", "demo"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--processes 2", "say what to start"),
        ("--processes 0 train demo", "processes=0"),
        ("--processes 2 --machines 2 train demo", "must know where to meet"),
        ("--processs 2 train demo", "did you mean --processes"),
    ],
)
def test_mistakes_of_launch(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["launch", *words.split()])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


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
    names = sorted(file.name for file in (tmp_path / "run/checkpoints/step-00000010").iterdir())
    assert names[1:3] == [f"shard-0000{n}-model-00001-of-00001.safetensors" for n in (1, 2)]
    main(["verify", str(tmp_path / "run")])
