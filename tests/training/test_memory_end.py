"""R13: memory that ends costs the run nothing but the step, and the user is told what to make smaller."""

import subprocess
import sys

import pytest
import torch

from clearhead.cli import main
from clearhead.training import loop
from clearhead.training.checkpoint import checkpoints, verify_checkpoint
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


LIMITED = """
import resource, sys
from pathlib import Path
import torch
from clearhead.cli import main
from clearhead.training import loop
from clearhead.training.report import Watcher

taken = []

class Limit(Watcher):
    def on_step(self, step, metrics):
        if step == 2:
            now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 20), now + (1 << 20)))
            try:
                while True:
                    taken.append(bytearray(1 << 20))
            except MemoryError:
                del taken[-2:]  # what is small finds room

torch.set_num_threads(1)
train = loop.train
loop.keep_freed_memory = lambda: None  # each step then asks the system anew
loop.train = lambda *args, watchers=(), **how: train(*args, watchers=[*watchers, Limit()], **how)
main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, and limits what only Linux limits")
def test_a_true_limit_on_memory(tmp_path):
    """A process that may not grow any more wants more in its next step: the same."""
    recipe = tiny_recipe(write_corpus(tmp_path / "corpus"), batch_size=1024, steps=6, save_every=2, probes=0)
    file, run = write_recipe(tmp_path / "r.toml", recipe), tmp_path / "run"
    command = [sys.executable, "-c", LIMITED, "train", str(file), "--run", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "not enough memory" in done.stderr.splitlines()[-1]
    newest, *_ = checkpoints(run)
    assert newest.name == "step-00000002" and verify_checkpoint(newest) == []
