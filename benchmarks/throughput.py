"""How many tokens per second training takes in, beside `transformers` with a plain loop: the same model.

    python benchmarks/throughput.py            4 x 128 and 6 x 384, eager and compiled: about ten minutes
    python benchmarks/throughput.py --quick    4 x 128, eager only: a minute
    python benchmarks/throughput.py --tiny     a model of no size, to see that the script runs
    python benchmarks/throughput.py --record   also appends the result to RESULTS.md

Both arms hold the same GPT-2 (its weights are written once and read by both), see the same batches of random
ids in float32 and take whole training steps: batch, forward, loss, backward, clipping, AdamW (fused). The
peer's loop is the customary one. Their losses are compared at the first and at the last step.

Each arm lives in a process of its own and sleeps while the other works; they take turns slice by slice, and
the ratio is the median of the slices' ratios. Compiling is timed apart. Memory is the greatest resident set
of an arm's process less what it held before the model was made (VmHWM and VmRSS of /proc/self/status).
"""

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"  # nothing here is downloaded from a hub

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from machine import describe_machine, record

ARMS = ("clearhead", "transformers")


@dataclass(frozen=True)
class Size:
    """A GPT-2, its batches, and how it is measured."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    vocab_size: int
    slices: int
    steps: int  # in a slice
    goal: float

    def __str__(self) -> str:
        return f"{self.layers} x {self.width}"


SMALL = Size(4, 4, 128, 64, 12, 65, 15, 20, 1.3)
LARGE = Size(6, 6, 384, 256, 16, 65, 7, 2, 1.0)
TINY = Size(1, 2, 16, 8, 2, 65, 2, 1, 0.0)

Step = Callable[[Tensor, Tensor], Tensor]


def silent_transformers() -> Any:
    """The library, without its progress bars."""
    import transformers

    transformers.logging.disable_progress_bar()
    return transformers


def write_peer(size: Size, folder: Path) -> None:
    """The model of both arms."""
    transformers = silent_transformers()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=size.vocab_size,
        n_positions=size.context,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


# The arms: each opens the model and returns its step, from inputs and targets to the loss, and how to compile


def open_clearhead(folder: Path) -> tuple[nn.Module, Callable[[bool], Step]]:
    from clearhead import AdamW, clip_gradients, load
    from clearhead.training.machine import keep_freed_memory
    from clearhead.training.objectives import token_loss
    from clearhead.training.optim import parameter_groups

    keep_freed_memory()  # as every run does
    model, _ = load(folder)
    model.train()
    optimizer = AdamW(parameter_groups(model, 0.1), lr=1e-3, betas=(0.9, 0.99))

    def make(compiled: bool) -> Step:
        forward: Any = torch.compile(model) if compiled else model

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            loss, n = token_loss(forward(inputs), targets)
            loss = loss / n
            loss.backward()
            clip_gradients(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    return model, make


def open_transformers(folder: Path) -> tuple[nn.Module, Callable[[bool], Step]]:
    model: Any = silent_transformers().GPT2LMHeadModel.from_pretrained(folder)
    model.train()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=True)

    def make(compiled: bool) -> Step:
        forward: Any = torch.compile(model) if compiled else model

        def step(inputs: Tensor, targets: Tensor) -> Tensor:
            logits = forward(input_ids=inputs, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return step

    return model, make


OPEN = {"clearhead": open_clearhead, "transformers": open_transformers}


def resident(name: str) -> float:
    """A line of /proc/self/status in MB; 0 where there is none."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="utf-8").splitlines() if status.exists() else []
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), 0.0)


def work(arm: str, size: Size, folder: Path, threads: int, compiled: bool, orders: Connection) -> None:
    """A process: opens its arm, then takes as many steps as it is told and answers (seconds, last loss)."""
    torch.set_num_threads(threads)
    for name in ARMS:
        __import__(name)  # what both libraries hold by themselves does not count
    before = resident("VmRSS")
    _, make = OPEN[arm](folder)
    step = make(compiled)
    generator = torch.Generator().manual_seed(1)

    def take(n: int) -> tuple[float, float]:
        loss, begun = torch.zeros(()), time.perf_counter()
        for _ in range(n):
            ids = torch.randint(size.vocab_size, (size.batch, size.context + 1), generator=generator)
            loss = step(ids[:, :-1], ids[:, 1:])
        return time.perf_counter() - begun, loss.item()

    while (n := orders.recv()) is not None:
        orders.send((*take(n), resident("VmHWM") - before))


@dataclass(frozen=True)
class Outcome:
    """What one size gave in one mode: arm -> seconds of each slice, seconds of the first step, losses, MB."""

    seconds: dict[str, list[float]]
    first: dict[str, float]
    losses: dict[str, tuple[float, float]]
    memory: dict[str, float]


def race(size: Size, folder: Path, threads: int, compiled: bool) -> Outcome:
    """Both arms in turns, slice by slice; who begins changes from slice to slice."""
    context = multiprocessing.get_context("spawn")
    lines: dict[str, Connection] = {}
    processes = []
    for arm in ARMS:
        here, there = context.Pipe()
        process = context.Process(
            target=work, args=(arm, size, folder, threads, compiled, there), daemon=True
        )
        process.start()
        lines[arm] = here
        processes.append(process)

    def order(arm: str, n: int) -> tuple[float, float, float]:
        lines[arm].send(n)
        return lines[arm].recv()

    begun = {arm: order(arm, 1) for arm in ARMS}  # loading ends and compiling happens here
    for arm in ARMS:
        order(arm, size.steps)  # warm
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    last: dict[str, tuple[float, float, float]] = {}
    for number in range(size.slices):
        for arm in ARMS if number % 2 else ARMS[::-1]:
            last[arm] = order(arm, size.steps)
            seconds[arm].append(last[arm][0])
    for line in lines.values():
        line.send(None)
    for process in processes:
        process.join(30)
    losses = {arm: (begun[arm][1], last[arm][1]) for arm in ARMS}
    return Outcome(seconds, {arm: begun[arm][0] for arm in ARMS}, losses, {arm: last[arm][2] for arm in ARMS})


def row(size: Size, mode: str, outcome: Outcome) -> str:
    """A line of the report."""
    n_tokens = size.steps * size.batch * size.context
    ours, theirs = (outcome.seconds[arm] for arm in ARMS)
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    rates = [f"{n_tokens / statistics.median(seconds):,.0f}" for seconds in (ours, theirs)]
    first = [f"{outcome.first[arm]:.1f}" for arm in ARMS]
    memory = [f"{outcome.memory[arm]:.0f}" for arm in ARMS]
    apart = max(abs(outcome.losses[ARMS[0]][i] - outcome.losses[ARMS[1]][i]) for i in (0, 1))
    cells = [str(size), mode, *rates, f"{ratio:.2f}", f">= {size.goal:g}", *first, *memory, f"{apart:.0e}"]
    return f"| {' | '.join(cells)} |"


HEAD = [
    "| size | mode | clearhead tokens/s | transformers tokens/s | ratio | goal | first step s | theirs "
    "| peak MB | theirs | losses apart |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="4 x 128, eager only")
    parser.add_argument("--tiny", action="store_true", help="a model of no size, eager only")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of each arm")
    parser.add_argument("--record", action="store_true", help="append the result to RESULTS.md")
    options = parser.parse_args()
    sizes = [TINY] if options.tiny else [SMALL] if options.quick else [SMALL, LARGE]
    modes = ["eager"] if options.tiny or options.quick else ["eager", "compiled"]
    before = describe_machine("torch", "transformers", threads=options.threads)
    print(f"{before}\n\n" + "\n".join(HEAD), flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as home:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(
            Path(home) / "cache"
        )  # what was compiled before looks free
        for size in sizes:
            folder = Path(home) / str(size).replace(" ", "")
            write_peer(size, folder)
            for mode in modes:
                rows.append(row(size, mode, race(size, folder, options.threads, mode == "compiled")))
                print(rows[-1], flush=True)
    lines = [
        f"## Training throughput, {date.today()}",
        "",
        f"{before}, load after {os.getloadavg()[0]:.1f}.",
        "",
    ]
    lines += ["The same GPT-2 in float32, whole training steps, processes that take turns.", "", *HEAD, *rows]
    if options.record:
        record("\n".join(lines))


if __name__ == "__main__":
    main()
