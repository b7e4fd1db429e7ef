"""Exactness and speed on a CUDA GPU, in one script of at most five minutes.

    PYTHONPATH=src python benchmarks/gpu.py            on a machine with a GPU; elsewhere it says so and ends
    PYTHONPATH=src python benchmarks/gpu.py --out FILE also writes the report there, as Markdown
    PYTHONPATH=src python benchmarks/gpu.py --record   also appends it to RESULTS.md
    PYTHONPATH=src python benchmarks/gpu.py --tiny     tiny sizes on the CPU: shows that the script runs

Exactness: the same weights and tokens on the CPU in float64 and on the card in float32 (TF32 off), in float32
compiled, and in bf16 by autocast as training does it: logits, loss and gradients. And attention: our call, as
the model makes it, beside each of torch's kernels.

Speed: training a decoder of GPT-2's size, eager and compiled, with the share of the card's peak; reading a
prompt and writing, with the share of the memory's bandwidth. The peaks are measured by the script itself (a
matrix product, a copy) and the datasheet's stands beside them where the card is known. Only torch and what
clearhead's model needs are imported. A part that would begin after 200 seconds is left out, and named.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from clearhead.generation.decode import generate
from clearhead.model.attention import attend
from clearhead.model.config import ModelConfig
from clearhead.model.masks import causal_mask
from clearhead.model.transformer import Transformer
from clearhead.training.objectives import token_loss
from clearhead.training.optim import AdamW, clip_gradients, parameter_groups
from machine import describe_machine, record

# Dense bf16 by the datasheets, in TFLOP/s, by a part of the card's name.
DATASHEET = {"H200": 989, "H100": 989, "GH200": 989, "A100": 312, "L40S": 362, "L4": 121, "4090": 165}
LAST_START = 200.0  # seconds; a part that would begin later is left out
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Sizes:
    """How large everything is."""

    exact: ModelConfig
    train: ModelConfig
    batch: int
    steps: int
    product: int  # of the matrix product that measures the peak
    copied: int  # bytes of the copy that measures the bandwidth
    prompt: int
    new_tokens: int
    rows: tuple[int, ...]  # sequences that are written at once
    backend: str  # of torch.compile


SMALL = ModelConfig(vocab_size=512, d_model=256, n_layers=4, n_heads=8, n_kv_heads=2, max_len=256)
GPT2 = ModelConfig(vocab_size=50304, d_model=768, n_layers=12, n_heads=12, max_len=1024, gated=False)
FULL = Sizes(SMALL, GPT2, 16, 20, 8192, 4 << 30, 896, 128, (1, 32), "inductor")
TINY = Sizes(
    replace(SMALL, d_model=32, n_layers=2, max_len=32, d_head=4, d_ff=64),
    ModelConfig(vocab_size=300, d_model=32, n_layers=2, n_heads=2, max_len=32, gated=False),
    *(2, 2, 64, 1 << 20, 16, 4, (1, 2), "eager"),
)


class Clock:
    """Seconds of work on a device, which has done it all when the clock is read."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.begun = device, time.perf_counter()

    def wait(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def total(self) -> float:
        """Since the script began."""
        return time.perf_counter() - self.begun

    def of(self, call: Callable[[], object], n: int, warm: int = 1) -> float:
        """Median seconds of a call, `n` times after `warm` unmeasured ones."""
        for _ in range(warm):
            call()
        times = []
        for _ in range(n):
            started = self.wait()
            call()
            times.append(self.wait() - started)
        return statistics.median(times)


# Exactness ------------------------------------------------------------------------------------------------


def logits_and_gradients(model: nn.Module, run: Callable[..., Tensor], ids: Tensor) -> dict[str, Tensor]:
    """What a pass and its gradient give, in float64 on the CPU."""
    model.zero_grad()
    logits = run(ids[:, :-1])
    loss, n = token_loss(logits, ids[:, 1:])
    (loss / n).backward()
    found = {"logits": logits, "loss": loss / n}
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: tensor.detach().double().cpu() for name, tensor in found.items()}


def gap(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Largest differences relative to the largest value: of the logits, the loss, and any gradient."""
    gaps = {
        name: ((found[name] - other).abs().max() / other.abs().max().clamp(min=1e-12)).item()
        for name, other in expected.items()
    }
    worst = max(value for name, value in gaps.items() if name not in ("logits", "loss"))
    return {"logits": gaps["logits"], "loss": gaps["loss"], "gradients": worst}


def exactness(sizes: Sizes, device: torch.device) -> tuple[list[str], bool]:
    """The table of paths and whether each is within its tolerance."""
    config = sizes.exact
    ids = torch.randint(config.vocab_size, (4, config.max_len), generator=torch.Generator().manual_seed(1))
    reference = Transformer(config, seed=0).double()
    expected = logits_and_gradients(reference, reference, ids)
    model = Transformer(config, seed=0).to(device)
    compiled = torch.compile(model, backend=sizes.backend)

    def in_bf16(tokens: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            return model(tokens)

    paths: dict[str, tuple[Callable[..., Tensor], float]] = {
        "float32": (model, 1e-4),
        "float32, compiled": (compiled, 1e-4),
        "bf16 autocast": (in_bf16, 5e-2),
    }
    lines = ["| path | logits | loss | worst gradient | within |", "|---|---|---|---|---|"]
    fine = True
    for name, (run, tolerance) in paths.items():
        gaps = gap(logits_and_gradients(model, run, ids.to(device)), expected)
        good = max(gaps["logits"], gaps["loss"]) <= tolerance and gaps["gradients"] <= 4 * tolerance
        fine = fine and good
        cells = " | ".join(f"{value:.1e}" for value in gaps.values())
        lines.append(f"| {name} | {cells} | {tolerance:.0e}: {'yes' if good else 'NO'} |")
    return lines, fine


def kernels(sizes: Sizes, device: torch.device, clock: Clock) -> tuple[list[str], bool]:
    """Our attention beside torch's kernels: largest difference in bf16, and time of forward and backward."""
    config, heads = sizes.train, sizes.train.n_heads
    shape = (sizes.batch, heads, config.max_len, config.head_width)
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(shape, generator=generator).to(device, torch.bfloat16) for _ in "qkv")
    places = torch.arange(config.max_len, device=device)
    mask = causal_mask(places, places)
    expected = attend(q[:2].double(), k[:2].double(), v[:2].double(), mask)

    def both_ways(run: Callable[[], Tensor]) -> None:
        run().sum().backward()

    for tensor in (q, k, v):
        tensor.requires_grad_()
    calls: dict[str, tuple[SDPBackend | None, Callable[[], Tensor]]] = {
        "ours, as the model asks": (None, lambda: attend(q, k, v, "causal")),
        "ours, with a mask": (None, lambda: attend(q, k, v, mask)),
    }
    for name, kernel in KERNELS.items():
        calls[f"{name}, with the mask"] = kernel, lambda: attend(q, k, v, mask)
        calls[f"{name}, causal"] = kernel, lambda: attend(q, k, v, "causal")
    lines, fine = ["| attention, bf16 | difference | ms, both ways |", "|---|---|---|"], True
    for name, (kernel, run) in calls.items():
        try:
            with sdpa_kernel([kernel] if kernel is not None else list(KERNELS.values())):
                found = run()[: len(expected)]
                distance = (found.double() - expected).abs().max().item()
                seconds = clock.of(lambda run=run: both_ways(run), 3)
        except RuntimeError:
            lines.append(f"| {name} | this kernel refuses | |")
            continue
        fine = fine and distance <= 2e-2
        lines.append(f"| {name} | {distance:.1e} | {seconds * 1e3:.2f} |")
    return lines, fine


# Speed ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peaks:
    """What the card can do, as measured: FLOP/s in bf16, bytes per second."""

    flops: float
    bandwidth: float
    datasheet: float | None


def measure_peaks(sizes: Sizes, device: torch.device, clock: Clock) -> Peaks:
    """A product of two square bf16 matrices, and a copy that reads and writes."""
    n = sizes.product
    one, other = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * n**3 / clock.of(lambda: one @ other, 10, warm=3)
    block = torch.empty(sizes.copied // 4, device=device)
    target = torch.empty_like(block)
    bandwidth = 2 * block.nbytes / clock.of(lambda: target.copy_(block), 5)
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    known = next((tera * 1e12 for part, tera in DATASHEET.items() if part in name), None)
    return Peaks(flops, bandwidth, known)


def training(sizes: Sizes, device: torch.device, clock: Clock, peaks: Peaks) -> list[str]:
    """Tokens per second of whole training steps, eager and compiled."""
    config = sizes.train
    lines = [
        "| training, bf16 autocast | tokens/s | ms/step | TFLOP/s | of measured | of datasheet | GB |",
        "|---|---|---|---|---|---|---|",
    ]
    ids = torch.randint(config.vocab_size, (sizes.batch, config.max_len + 1), device=device)
    for name in ("eager", "compiled"):
        if clock.total() > LAST_START:
            lines.append(f"| {name} | left out: {clock.total():.0f} s have passed | | | | | |")
            continue
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        model = Transformer(config, seed=0).to(device)
        optimizer = AdamW(parameter_groups(model, 0.1), lr=3e-4)
        forward: Any = model if name == "eager" else torch.compile(model, backend=sizes.backend)

        def step(model: Transformer = model, optimizer: AdamW = optimizer, forward: Any = forward) -> None:
            with torch.autocast(device.type, torch.bfloat16):
                logits = forward(ids[:, :-1])
            loss, n = token_loss(logits, ids[:, 1:])
            (loss / n).backward()
            clip_gradients(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        started = clock.wait()
        try:
            step()
        except torch.OutOfMemoryError:
            lines.append(f"| {name} | does not fit into this card's memory | | | | | |")
            continue
        first = clock.wait() - started
        seconds = clock.of(step, sizes.steps, warm=2)
        tokens = sizes.batch * config.max_len
        rate = tokens / seconds * flops_per_token(model)
        of_sheet = "" if peaks.datasheet is None else f"{rate / peaks.datasheet:.1%}"
        memory = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
        lines.append(
            f"| {name}, first step {first:.1f} s | {tokens / seconds:,.0f} | {seconds * 1e3:.1f} | "
            f"{rate / 1e12:.1f} | {rate / peaks.flops:.1%} | {of_sheet} | {memory:.1f} |"
        )
        del model, optimizer, forward, step
    return lines


def flops_per_token(model: Transformer) -> float:
    """Of a training step: 6 for each weight that is multiplied, 6 T D for each layer's causal scores."""
    config = model.config
    multiplied = sum(p.numel() for p in model.parameters() if p.dim() >= 2)
    if not config.tied:
        multiplied -= model.embed.weight.numel()  # rows are looked up
    return 6 * multiplied + 6 * config.n_layers * config.max_len * config.d_model


def writing(sizes: Sizes, device: torch.device, clock: Clock, peaks: Peaks) -> list[str]:
    """Reading a prompt, and writing token after token, in bf16, eager and compiled."""
    lines = [
        "| bf16, greedy | rows | prompt tokens/s | new tokens/s | of the bandwidth |",
        "|---|---|---|---|---|",
    ]
    model = Transformer(sizes.train, seed=0).to(device, torch.bfloat16).eval()
    weights = sum(p.nbytes for p in model.parameters())
    for name in ("eager", "compiled"):
        for rows in sizes.rows:
            if clock.total() > LAST_START:
                lines.append(f"| {name} | {rows} | left out: {clock.total():.0f} s have passed | | |")
                continue
            run: Any = model if name == "eager" else torch.compile(model, backend=sizes.backend)
            prompt = torch.randint(sizes.train.vocab_size, (rows, sizes.prompt), device=device)

            def write(n: int, run: Any = run, prompt: Tensor = prompt) -> Tensor:
                return generate(run, prompt, max_new_tokens=n, eos_id=())

            read = clock.of(lambda write=write: write(1), 3, warm=2)
            whole = clock.of(lambda write=write: write(sizes.new_tokens), 2)
            each = max(whole - read, 1e-9) / max(sizes.new_tokens - 1, 1)
            share = weights / each / peaks.bandwidth
            lines.append(
                f"| {name} | {rows} | {rows * sizes.prompt / read:,.0f} | {rows / each:,.0f} | {share:.1%} |"
            )
    return lines


# The report -----------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU: does the script run?")
    parser.add_argument("--out", type=Path, help="also write the report into this file")
    parser.add_argument("--record", action="store_true", help="append the report to RESULTS.md")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        print("no GPU: this PyTorch sees no CUDA device, so there is nothing to measure")
        return
    device = torch.device("cpu" if options.tiny else "cuda")
    sizes = TINY if options.tiny else FULL
    torch.set_float32_matmul_precision("highest")
    clock = Clock(device)
    card = "CPU, tiny sizes" if options.tiny else torch.cuda.get_device_name()
    lines = [f"## GPU, {date.today()}", "", f"{card}; {describe_machine('torch')}.", ""]
    print(lines[2], flush=True)

    def say(*more: str) -> None:
        lines.extend((*more, ""))
        print("\n".join(more), flush=True)

    exact, fine = exactness(sizes, device)
    say("Against float64 on the CPU, relative to the largest value:", "", *exact)
    table, alike = kernels(sizes, device, clock)
    say(*table)
    peaks = measure_peaks(sizes, device, clock)
    sheet = "unknown" if peaks.datasheet is None else f"{peaks.datasheet / 1e12:.0f}"
    say(
        f"Peaks: {peaks.flops / 1e12:.3g} TFLOP/s in a {sizes.product}^3 bf16 product (datasheet {sheet}), "
        f"{peaks.bandwidth / 1e12:.3g} TB/s in a copy."
    )
    config = sizes.train
    n_parameters = sum(p.numel() for p in Transformer(config).parameters())
    say(
        f"{n_parameters:,} parameters, {config.n_layers} layers x {config.d_model}, batch {sizes.batch} x "
        f"{config.max_len}:",
        "",
        *training(sizes, device, clock, peaks),
    )
    say(*writing(sizes, device, clock, peaks))
    say(f"{clock.total():.0f} s in all; exact: {'yes' if fine and alike else 'NO'}.")
    report = "\n".join(lines)
    if options.out is not None:
        options.out.write_text(report, encoding="utf-8")
    if options.record:
        record(report)
    if not (fine and alike):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
