"""R13: memory that ends costs the run nothing but the step, and the user is told what to make smaller."""

import os
import signal
import warnings
from pathlib import Path

import pytest
import torch

from clearhead.cli import main
from clearhead.training import loop
from clearhead.training.checkpoint import checkpoints, verify_checkpoint
from clearhead.training.report import Watcher
from clearhead.training.run_folder import RunFolder
from tiny_run import tiny_recipe, write_corpus, write_recipe


def test_a_gpu_out_of_memory_is_one_line(tmp_path, monkeypatch, capsys):
    """torch.OutOfMemoryError in a step: code 2 and advice; the checkpoint before is whole."""
    file = write_recipe(tmp_path / "r.toml", tiny_recipe(write_corpus(tmp_path / "corpus")))
    take_step = loop.Trainer._take_step

    def full(self: loop.Trainer) -> None:
        if self.step == 7:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ...")
        take_step(self)

    monkeypatch.setattr(loop.Trainer, "_take_step", full)
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as stop:
        main(["train", str(file), "--run", str(run)])
    assert stop.value.code == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert "not enough memory" in told and "train.batch_size" in told and "accumulation" in told
    (newest,) = checkpoints(run)
    assert newest.name == "step-00000005" and verify_checkpoint(newest) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_true_limit_on_memory(tmp_path, capfd):
    """A process that may grow by 30 MB wants more in a step: the same."""
    resource = pytest.importorskip("resource")
    recipe = tiny_recipe(write_corpus(tmp_path / "corpus"), batch_size=1024, steps=6, save_every=2, probes=0)
    file, run = write_recipe(tmp_path / "r.toml", recipe), tmp_path / "run"

    class Limit(Watcher):
        def on_step(self, step: int, metrics: dict[str, float]) -> None:
            if step == 2:
                now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
                grown = now + (1 << 20)
                resource.setrlimit(resource.RLIMIT_AS, (grown, grown))
                blocks.append(bytearray(1 << 19))

    blocks: list[bytearray] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            loop.keep_freed_memory = lambda: None  # so that each step asks anew
            announce = loop.train

            def limited(*args, watchers=(), **how):
                return announce(*args, watchers=[*watchers, Limit()], **how)

            loop.train = limited
            main(["train", str(file), "--run", str(run)])
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == 2 and code != -signal.SIGKILL
    assert "not enough memory" in capfd.readouterr().err
    newest, *_ = checkpoints(RunFolder(run).path)
    assert newest.name == "step-00000002" and verify_checkpoint(newest) == []
