"""How long preparing 100 MB of text takes with one worker process, and how much sooner two are done.

    python benchmarks/prepare.py             three rounds on 100 MB
    python benchmarks/prepare.py --quick     one round on 10 MB
    python benchmarks/prepare.py --record    also appends the result to RESULTS.md

The corpus is that of tokenizer.py, as .jsonl with documents of 8,000 characters; the vocabulary of 4,096
tokens is learned from its first 5 MB, before anything is timed. Each arm is one call of `prepare` in a
process of its own into a new folder, the start of the workers included, imports not; the arms take turns.
Nothing is reported unless all folders hold the same bytes.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

from machine import describe_machine, record
from tokenizer import build_corpus

DOCUMENT = 8000  # characters
ARM = """
import sys, time
from clearhead.text.foreign import open_tokenizer
from clearhead.text.prepare import prepare

source, vocabulary, out, workers = sys.argv[1:]
tokenizer = open_tokenizer(vocabulary)
begun = time.perf_counter()
prepare(source, tokenizer, out, workers=int(workers))
print(time.perf_counter() - begun)
"""


def write_documents(corpus: Path, path: Path) -> int:
    """Write the corpus as .jsonl and return the UTF-8 bytes of its texts."""
    text = corpus.read_text(encoding="utf-8")
    with path.open("w", encoding="utf-8") as file:
        for start in range(0, len(text), DOCUMENT):
            file.write(json.dumps({"text": text[start : start + DOCUMENT]}) + "\n")
    return len(text.encode("utf-8"))


def learn_vocabulary(corpus: Path, path: Path) -> None:
    from clearhead import Tokenizer, train_bpe

    with corpus.open(encoding="utf-8") as file:
        text = file.read(5_000_000)
    specials = ["<|endoftext|>"]
    Tokenizer(*train_bpe([text], 4096, specials), specials).save(path)


def run_arm(source: Path, vocabulary: Path, out: Path, workers: int) -> tuple[float, str]:
    """Seconds, and a hash of all that was written."""
    command = [sys.executable, "-c", ARM, str(source), str(vocabulary), str(out), str(workers)]
    seconds = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    digest = hashlib.sha256()
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        digest.update(path.relative_to(out).as_posix().encode() + path.read_bytes())
    return seconds, digest.hexdigest()


def measure(folder: Path, n_bytes: int, n_rounds: int) -> str:
    corpus = build_corpus(folder / "corpus.txt", n_bytes)
    size = write_documents(corpus.path, folder / "corpus.jsonl")
    learn_vocabulary(corpus.path, folder / "vocabulary.json")
    print(corpus, flush=True)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    hashes = set()
    for number in range(n_rounds):
        for workers in (1, 2) if number % 2 == 0 else (2, 1):
            out = folder / f"out-{number}-{workers}"
            taken, digest = run_arm(folder / "corpus.jsonl", folder / "vocabulary.json", out, workers)
            seconds[workers].append(taken)
            hashes.add(digest)
            print(f"round {number + 1}, {workers} workers: {taken:.1f} s", flush=True)
    if len(hashes) != 1:
        raise SystemExit("one worker and two have written different bytes")
    ratio = statistics.median(one / two for one, two in zip(seconds[1], seconds[2], strict=True))
    lines = [f"{corpus}, {n_rounds} interleaved rounds; all folders hold the same bytes.", ""]
    lines += ["| workers | seconds, median (least-most) | MB/s |", "|---|---|---|"]
    for workers, taken in seconds.items():
        middle = statistics.median(taken)
        lines.append(
            f"| {workers} | {middle:.1f} ({min(taken):.1f}-{max(taken):.1f}) | {size / 1e6 / middle:.1f} |"
        )
    lines += ["", f"Two workers are {ratio:.2f} times as fast as one (median of the rounds; goal >= 1.6)."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default 3)")
    parser.add_argument("--quick", action="store_true", help="10 MB instead of 100, one round")
    parser.add_argument("--record", action="store_true", help="append the result to RESULTS.md")
    options = parser.parse_args()
    n_rounds = options.rounds or (1 if options.quick else 3)
    before = describe_machine()
    print(before, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        answer = measure(Path(folder), 10_000_000 if options.quick else 100_000_000, n_rounds)
    report = f"## Preparing a corpus, {date.today()}\n\n{before}.\n\n{answer}\n"
    print(f"\n{report}")
    if options.record:
        record(report)


if __name__ == "__main__":
    main()
