"""How fast a vocabulary is learned and text encoded, beside Hugging Face `tokenizers` (and tiktoken).

    python benchmarks/tokenizer.py                   five rounds on 100 MB
    python benchmarks/tokenizer.py --quick           one round on 10 MB
    python benchmarks/tokenizer.py --only encoding   only that question (or: training)
    python benchmarks/tokenizer.py --record          also appends the result to RESULTS.md

The corpus is what is installed: the standard library with its tests, then the sources and texts of the
packages beside this interpreter, in sorted order until the size is reached. Every arm runs in a process of
its own, the arms of a round one after the other, in turned order from round to round. Wall time is that of
the training call, without imports; memory is the greatest sum of the resident sets of a process and its
workers.

Encoding is timed on one thread, over documents of 8,000 characters, with the 10k vocabulary learned from the
corpus; every arm starts with nothing remembered, and nothing is timed unless all arms give the same ids.
"""

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

import numpy as np

from machine import describe_machine, record

SOURCES = (".py", ".pyi", ".pyx", ".pxd", ".c", ".h", ".cpp", ".hpp", ".js", ".css")
TEXTS = (".txt", ".md", ".rst", ".html", ".json", ".toml", ".cfg", ".csv")
VOCAB_SIZE = 10_000


# The corpus


@dataclass
class Corpus:
    path: Path
    n_bytes: int
    n_files: int
    md5: str

    def __str__(self) -> str:
        return f"{self.n_bytes / 1e6:.1f} MB from {self.n_files:,} files, md5 {self.md5[:8]}"


def build_corpus(path: Path, n_bytes: int) -> Corpus:
    """Write the first `n_bytes` of the installed sources and texts to `path`, as valid UTF-8."""
    size, n_files, digest = 0, 0, hashlib.md5()
    with path.open("wb") as out:
        for file in installed_files():
            text = file.read_bytes().decode("utf-8", "replace")
            data = text.encode("utf-8")[: n_bytes - size].decode("utf-8", "ignore").encode("utf-8")
            out.write(data)
            digest.update(data)
            size, n_files = size + len(data), n_files + 1
            if size >= n_bytes - 3:  # a character may not fit in the last bytes
                return Corpus(path, size, n_files, digest.hexdigest())
    raise SystemExit(f"only {size / 1e6:.1f} MB of text are installed beside {sys.executable}")


def installed_files() -> Iterator[Path]:
    library, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    for root in (library, packages):
        for file in sorted(root.rglob("*")):
            foreign = root == library and "site-packages" in file.parts
            if file.suffix in SOURCES + TEXTS and not foreign and file.is_file():
                yield file


# The arms: each is a function of the corpus's path that returns what the report needs, run in its own process


def train_clearhead(corpus: Path) -> dict:
    from clearhead import train_bpe

    begun = time.perf_counter()
    vocab, _ = train_bpe(corpus, VOCAB_SIZE)
    seconds = time.perf_counter() - begun
    return {"seconds": seconds, "tokens": sorted(token.hex() for token in vocab.values())}


def train_tokenizers(corpus: Path) -> dict:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=True)
    trainer = BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    begun = time.perf_counter()
    tokenizer.train([str(corpus)], trainer)
    seconds = time.perf_counter() - begun
    to_byte = byte_level_alphabet()
    tokens = [bytes(to_byte[letter] for letter in token).hex() for token in tokenizer.get_vocab()]
    return {"seconds": seconds, "tokens": sorted(tokens)}


def byte_level_alphabet() -> dict[str, int]:
    """The letter that stands for each byte in GPT-2's files: itself if it can be seen, else one past 255."""
    seen = [byte for byte in range(256) if chr(byte).isprintable() and byte not in (0x20, 0xAD)]
    unseen = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + n): byte for n, byte in enumerate(unseen)}


# Encoding: all arms read the file that `learn_vocabulary` leaves beside the corpus

ENCODED = 20_000_000  # bytes of the corpus that are encoded
DOCUMENT = 8_000  # characters


def tokenizer_file(corpus: Path) -> Path:
    return corpus.with_name("tokenizer.json")


def learn_vocabulary(corpus: Path) -> dict:
    from clearhead import Tokenizer, train_bpe

    begun = time.perf_counter()
    vocab, merges = train_bpe(corpus, VOCAB_SIZE, ["<|endoftext|>"])
    Tokenizer(vocab, merges, ["<|endoftext|>"]).save(tokenizer_file(corpus))
    return {"seconds": time.perf_counter() - begun}


def time_encoding(corpus: Path, encode: Callable[[list[str]], list]) -> dict:
    """Encode the documents once; the ids of each come as a list or as an array."""
    with corpus.open("rb") as file:
        text = file.read(ENCODED).decode("utf-8", "ignore")
    documents = [text[start : start + DOCUMENT] for start in range(0, len(text), DOCUMENT)]
    begun, begun_cpu = time.perf_counter(), time.process_time()
    ids = encode(documents)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - begun_cpu
    digest = hashlib.md5()
    for document in ids:
        digest.update(np.asarray(document, np.uint32).tobytes())
    result = {"seconds": seconds, "encode_cpu": cpu, "bytes": len(text.encode()), "ids": digest.hexdigest()}
    return result | {"n_ids": sum(map(len, ids))}


def encode_clearhead(corpus: Path) -> dict:
    from clearhead import Tokenizer

    return time_encoding(corpus, Tokenizer.load(tokenizer_file(corpus)).encode_batch)


def encode_clearhead_array(corpus: Path) -> dict:
    from clearhead import Tokenizer

    tokenizer = Tokenizer.load(tokenizer_file(corpus))
    return time_encoding(corpus, lambda documents: [tokenizer.encode_array(text) for text in documents])


def encode_tokenizers(corpus: Path) -> dict:
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file(corpus)))

    def encode(documents: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in tokenizer.encode_batch_fast(documents, add_special_tokens=False)]

    return time_encoding(corpus, encode)


def encode_tiktoken(corpus: Path) -> dict:
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    from clearhead import Tokenizer

    ours = Tokenizer.load(tokenizer_file(corpus))
    special_ids = ours.special_tokens.values()
    ranks = {token: token_id for token_id, token in ours.vocab.items() if token_id not in special_ids}
    encoding = tiktoken.Encoding("own", pat_str=r50k_pat_str, mergeable_ranks=ranks, special_tokens={})
    return time_encoding(corpus, lambda documents: [encoding.encode_ordinary(text) for text in documents])


def encode_equal_letters(corpus: Path) -> dict:
    """One pre-token of a million equal letters, then one of two million."""
    from clearhead import Tokenizer

    tokenizer = Tokenizer.load(tokenizer_file(corpus))
    seconds = []
    for n in (1_000_000, 2_000_000):
        begun = time.perf_counter()
        tokenizer.encode_array("a" * n)
        seconds.append(time.perf_counter() - begun)
    return {"seconds": seconds[0], "twice": seconds[1]}


ARMS: dict[str, Callable[[Path], dict]] = {
    "train-clearhead": train_clearhead,
    "train-tokenizers": train_tokenizers,
    "learn-vocabulary": learn_vocabulary,
    "encode-clearhead": encode_clearhead,
    "encode-clearhead-array": encode_clearhead_array,
    "encode-tokenizers": encode_tokenizers,
    "encode-tiktoken": encode_tiktoken,
    "encode-equal-letters": encode_equal_letters,
}


# Running and watching an arm


def run_arm(name: str, corpus: Path) -> dict:
    """Run one arm in a process of its own; add the peak memory of its process tree."""
    command = [sys.executable, __file__, "--arm", name, "--corpus", str(corpus)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    peak = 0
    while True:
        peak = max(peak, tree_memory(process.pid))
        try:
            output, _ = process.communicate(timeout=0.05)
        except subprocess.TimeoutExpired:
            continue
        break
    if process.returncode:
        raise SystemExit(f"{name} ended with exit code {process.returncode}")
    return {**json.loads(output), "peak": peak / 1e6}


def be_arm(name: str, corpus: Path) -> None:
    """Be the process of one arm: print its result as JSON."""
    result = ARMS[name](corpus)
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    result["cpu"] = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    print(json.dumps(result))


def tree_memory(pid: int) -> int:
    """Sum of the resident sets of a process and its descendants, in bytes; what they share counts twice."""
    parents, sizes = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            parents[int(entry.name)], sizes[int(entry.name)] = int(stat[1]), int(stat[21])
    tree, grew = {pid}, True
    while grew:
        more = {child for child, parent in parents.items() if parent in tree} - tree
        tree, grew = tree | more, bool(more)
    return sum(sizes.get(member, 0) for member in tree) * os.sysconf("SC_PAGE_SIZE")


def rounds_of(names: list[str], corpus: Corpus, n_rounds: int) -> dict[str, list[dict]]:
    """Run the arms side by side: every round each once, in turned order."""
    results: dict[str, list[dict]] = {name: [] for name in names}
    for number in range(n_rounds):
        for name in names if number % 2 == 0 else names[::-1]:
            result = run_arm(name, corpus.path)
            results[name].append(result)
            shown = f"{result['seconds']:.1f} s, {result['cpu']:.1f} s CPU, {result['peak']:.0f} MB"
            print(f"round {number + 1}, load {os.getloadavg()[0]:.1f}: {name} {shown}", flush=True)
    return results


# The questions


def training(corpus: Corpus, n_rounds: int) -> str:
    """Learn the vocabulary with both and report medians, ratios and how far the two agree."""
    ours, peer = "train-clearhead", "train-tokenizers"
    results = rounds_of([ours, peer], corpus, n_rounds)
    lines = [
        f"Training: {VOCAB_SIZE:,} tokens, GPT-2 splitter, {corpus}; {n_rounds} interleaved rounds.",
        "",
        "| arm | wall s, median (least-most) | CPU s | peak RSS MB |",
        "|---|---|---|---|",
    ]
    for name, label in ((ours, "clearhead"), (peer, f"tokenizers {version('tokenizers')}")):
        seconds = [result["seconds"] for result in results[name]]
        cpu, peak = (statistics.median(result[key] for result in results[name]) for key in ("cpu", "peak"))
        spread = f"{statistics.median(seconds):.1f} ({min(seconds):.1f}-{max(seconds):.1f})"
        lines.append(f"| {label} | {spread} | {cpu:.1f} | {peak:.0f} |")
    pairs = zip(results[ours], results[peer], strict=True)
    ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in pairs)
    peak = max(result["peak"] for result in results[ours])
    common = set(results[ours][0]["tokens"]) & set(results[peer][0]["tokens"])
    lines += [
        "",
        f"clearhead takes {ratio:.2f} of the wall time of tokenizers (median of the rounds; goal <= 2)",
        f"and at most {peak:.0f} MB with its workers (goal <= 300). {len(common):,} of {VOCAB_SIZE:,} tokens",
        "are in both vocabularies (ties are broken differently).",
    ]
    return "\n".join(lines)


def encoding(corpus: Corpus, n_rounds: int) -> str:
    """Encode with all and report medians and ratios, after checking that the ids are the same."""
    labels = {
        "encode-clearhead": "clearhead, encode_batch: lists",
        "encode-clearhead-array": "clearhead, encode_array: uint16 arrays",
        "encode-tokenizers": f"tokenizers {version('tokenizers')}, encode_batch_fast",
        "encode-tiktoken": f"tiktoken {version('tiktoken')}, encode_ordinary",
    }
    run_arm("learn-vocabulary", corpus.path)
    results = rounds_of(list(labels), corpus, n_rounds)
    all_ids = {(result["ids"], result["n_ids"]) for arm in results.values() for result in arm}
    if len(all_ids) != 1:
        raise SystemExit(f"the encoders give different ids: {all_ids}")
    first = results["encode-clearhead"][0]
    lines = [
        f"Encoding: {first['bytes'] / 1e6:.1f} MB in documents of {DOCUMENT:,} characters, one thread,",
        f"nothing remembered at the start, {n_rounds} interleaved rounds.",
        f"All arms give the same {first['n_ids']:,} ids.",
        "",
        "| arm | MB/s, median (least-most) | MB/s of CPU time | peak RSS MB |",
        "|---|---|---|---|",
    ]
    for name, label in labels.items():
        speeds = [result["bytes"] / 1e6 / result["seconds"] for result in results[name]]
        cpu = statistics.median(result["bytes"] / 1e6 / result["encode_cpu"] for result in results[name])
        peak = statistics.median(result["peak"] for result in results[name])
        spread = f"{statistics.median(speeds):.1f} ({min(speeds):.1f}-{max(speeds):.1f})"
        lines.append(f"| {label} | {spread} | {cpu:.1f} | {peak:.0f} |")
    seconds = {name: [result["seconds"] for result in results[name]] for name in labels}
    ratio, ratio_array = (
        statistics.median(b / a for a, b in zip(seconds[name], seconds["encode-tokenizers"], strict=True))
        for name in ("encode-clearhead", "encode-clearhead-array")
    )
    equal = [run_arm("encode-equal-letters", corpus.path) for _ in range(n_rounds)]
    doubling = statistics.median(result["twice"] / result["seconds"] for result in equal)
    million = statistics.median(result["seconds"] for result in equal)
    lines += [
        "",
        f"clearhead's lists come {ratio:.2f} times as fast as those of tokenizers (median of the rounds;",
        f"goal >= 1.5), its arrays {ratio_array:.2f} times. A million equal letters take {million:.2f} s,",
        f"two million {doubling:.2f} times as long (goal < 2.5).",
    ]
    return "\n".join(lines)


QUESTIONS: dict[str, Callable[[Corpus, int], str]] = {"training": training, "encoding": encoding}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, help="interleaved rounds (default 5)")
    parser.add_argument("--quick", action="store_true", help="10 MB instead of 100, one round")
    parser.add_argument("--only", choices=QUESTIONS, help="ask only this question")
    parser.add_argument("--record", action="store_true", help="append the result to RESULTS.md")
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--corpus", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.arm:
        be_arm(options.arm, options.corpus)
        return
    n_rounds = options.rounds or (1 if options.quick else 5)
    with tempfile.TemporaryDirectory() as folder:
        before = describe_machine()
        corpus = build_corpus(Path(folder) / "corpus.txt", 10_000_000 if options.quick else 100_000_000)
        print(f"{before}\n{corpus}", flush=True)
        asked = [options.only] if options.only else list(QUESTIONS)
        answers = "\n\n".join(QUESTIONS[name](corpus, n_rounds) for name in asked)
        report = f"## Tokenizer, {date.today()}\n\n{before}.\n\n{answers}\n"
    print(f"\n{report}")
    if options.record:
        record(report)


if __name__ == "__main__":
    main()
