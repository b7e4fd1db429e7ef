"""From a corpus to token shards: cut the work into parts, tokenise them, survive being killed.

A part is a group of small files or a piece of a large one; which parts there are depends on the corpus alone.
A part gives one shard per split and then a receipt with their hashes. A run that is killed leaves whole
shards with receipts and nothing else that counts: the next run checks those, does the other parts, and ends
with the same bytes as a run that was never disturbed. The same holds for any number of worker processes.

    DIR/train/        shard-00000.bin, shard-00000.idx, ..., index.json
    DIR/validation/   the same
    DIR/tokenizer.json, DIR/index.json
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from clearhead.text.corpus import Corpus, Source, SplitRule, open_corpus, split_document, split_rule
from clearhead.text.documents import CorpusReport, Piece, TextFile, read_piece
from clearhead.text.foreign import AnyTokenizer
from clearhead.text.frame import end_of_text
from clearhead.text.shards import VERSION, ShardWriter, file_hash, remove_temporary, write_index, write_json
from clearhead.text.workers import cores, in_workers

SPLITS = ("train", "validation")
RECEIPTS = ".parts"
_SMALL = 4 << 20  # bytes of text below which another process costs more than it saves


def prepare(
    source: Source,
    tokenizer: AnyTokenizer,
    out_dir: str | os.PathLike[str],
    *,
    validation: Source | None = None,
    field: str = "text",
    document_separator: str | None = None,
    strict: bool = False,
    shard_bytes: int | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> dict:
    """Tokenise a corpus into `out_dir` and return its index: counts per split, the corpus report, the parts.

    source        as for `open_corpus`, like `field`, `document_separator` and `strict`
    validation    a source of its own for the validation split; without it `source` is split by `split_rule`
    shard_bytes   text per shard: smaller files are grouped up to it, larger ones cut where they can be; by
                  default a 64th of the corpus, at least 1 MiB and at most 128 MiB
    workers       processes; None takes one per core, but no more than one per 4 MiB of text
    progress      called as (bytes done, bytes in all) after each part

    Each document ends with the tokenizer's "<|endoftext|>", or what its folder says ends a text; without one
    the documents follow each other directly (where they end is stored either way). The same words in a text
    stay ordinary text. An interrupted run goes on where it stopped. A folder that holds something else (made
    with another tokenizer, source or option) is a ValueError; a file that changed since is tokenised again.
    """
    for name, value in (("workers", workers), ("shard_bytes", shard_bytes)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it is at least 1, or None to choose by size")
    options: dict[str, Any] = {"field": field, "document_separator": document_separator, "strict": strict}
    corpus = open_corpus(source, **options)
    corpora: list[tuple[Corpus, SplitRule]] = [(corpus, "train")]
    if validation is None:
        corpora = [(corpus, split_rule(corpus))]
    else:
        corpora.append((open_corpus(validation, **options), "validation"))
    settings = {
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": end_of_text(tokenizer),
        "source": " and ".join(corpus.name for corpus, _ in corpora),
        "split": " and ".join(rule for _, rule in corpora),
        "field": field,
        "document_separator": document_separator,
    }
    folder = Path(out_dir)
    jobs = _jobs(corpora, settings, shard_bytes)
    _open_folder(folder, settings, jobs, tokenizer)

    total, done = sum(job["bytes"] for job in jobs), 0
    limit = min(cores(), total // _SMALL) if workers is None else workers
    receipts: dict[int, dict] = {}
    with closing(_tokenise(jobs, tokenizer, folder, limit)) as results:
        for receipt in results:
            receipts[receipt["part"]] = receipt
            done += jobs[receipt["part"]]["bytes"]
            if progress is not None:
                progress(done, total)
    return _close_folder(folder, settings, [receipts[number] for number in range(len(jobs))], corpora)


# ---------------------------------------------------------------- the parts


def _jobs(corpora: list[tuple[Corpus, SplitRule]], settings: dict, shard_bytes: int | None) -> list[dict]:
    """The parts in order, each as plain data that can go to another process."""
    if shard_bytes is None:
        total = sum(file.size() for corpus, _ in corpora for file in corpus.files)
        shard_bytes = min(128 << 20, max(1 << 20, total // 64))
    same = [VERSION] + [
        settings[name] for name in ("tokenizer", "end_of_text", "field", "document_separator")
    ]
    jobs = []
    for corpus, rule in corpora:
        for pieces in _groups(corpus.pieces(shard_bytes), shard_bytes):
            job = {
                "part": len(jobs),
                "rule": rule,
                "pieces": [(p.file.path, p.file.kind, p.file.packing, p.start, p.stop) for p in pieces],
                "bytes": sum(piece.size() for piece in pieces),
                "end_of_text": settings["end_of_text"],
                "options": {
                    "field": corpus.field,
                    "document_separator": corpus.document_separator,
                    "strict": corpus.strict,
                },
            }
            inputs = json.dumps([same, rule, job["pieces"], [file_state(piece.file) for piece in pieces]])
            jobs.append(job | {"inputs": hashlib.sha256(inputs.encode()).hexdigest()})
    return jobs


def _groups(pieces: list[Piece], shard_bytes: int) -> Iterator[list[Piece]]:
    """Small pieces together until they fill a shard, a large one alone."""
    group: list[Piece] = []
    filled = 0
    for piece in pieces:
        size = piece.size()
        if group and (filled >= shard_bytes or size >= shard_bytes):
            yield group
            group, filled = [], 0
        group.append(piece)
        filled += size
    if group:
        yield group


def file_state(file: TextFile) -> list:
    """Return what tells that a file is still the one that was tokenised: place, size, time of change."""
    if file.kind == "pydoc":
        return []
    stat = Path(file.path).stat()
    return [str(Path(file.path).absolute()), stat.st_size, stat.st_mtime_ns]


def _tokenise(
    jobs: list[dict], tokenizer: AnyTokenizer, folder: Path, limit: int
) -> Generator[dict, None, None]:
    """The receipts of all parts, in the order in which they are done."""
    if limit > 1 and len(jobs) > 1:
        yield from in_workers(_worker, (tokenizer, folder), jobs, limit)
    else:
        for job in jobs:
            yield tokenise_part(job, tokenizer, folder)


def tokenise_part(job: dict, tokenizer: AnyTokenizer, folder: Path) -> dict:
    """Write the shards of one part and its receipt; if they are there and right, only return the receipt."""
    done = _receipt(job, folder)
    if done is not None:
        return done
    name = f"shard-{part_name(job['part'])}"
    report = CorpusReport()
    writers = {
        split: ShardWriter(folder / split, name, tokenizer.vocab_size, tokenizer.fingerprint)
        for split in SPLITS
    }
    try:
        for path, kind, packing, start, stop in job["pieces"]:
            piece = Piece(TextFile(path, kind, packing), start, stop)
            for document in read_piece(piece, report, **job["options"]):
                for split, text in split_document(document, job["rule"]):
                    ids = tokenizer.encode_array(text, specials="text")
                    writers[split].add(ids, job["end_of_text"], len(text.encode("utf-8")))
        shards = {split: writer.finish() for split, writer in writers.items()}
    except OSError as error:
        if error.filename is None and error.errno is not None:  # a full disk does not say where
            raise OSError(error.errno, error.strerror, str(folder)) from None
        raise
    finally:
        for writer in writers.values():
            writer.discard()
    receipt = {"part": job["part"], "inputs": job["inputs"], **shards, "report": report.to_dict()}
    if "about" in job:
        receipt["about"] = job["about"]
    # No need to wait for the disk: what a receipt says is checked before it counts.
    write_json(_receipt_path(folder, job["part"]), receipt, to_disk=False)
    return receipt


def _worker(tokenizer: AnyTokenizer, folder: Path) -> Callable[[dict], dict]:
    """What a worker process does with its jobs."""
    return lambda job: tokenise_part(job, tokenizer, folder)


# ---------------------------------------------------------------- the folder


def part_name(part: int | str) -> str:
    """Return a part's own name, or its number with five digits."""
    return part if isinstance(part, str) else f"{part:05d}"


def _receipt_path(folder: Path, part: int | str) -> Path:
    return folder / RECEIPTS / f"part-{part_name(part)}.json"


def _receipt(job: dict, folder: Path) -> dict | None:
    """The receipt of a part that is done and whose shards are on the disk with the right hashes."""
    try:
        receipt = read_json(_receipt_path(folder, job["part"]))
    except (OSError, ValueError):  # not there, or not whole after a power cut
        return None
    if receipt.get("inputs") != job["inputs"]:
        return None
    if job["options"]["strict"] and not CorpusReport(**receipt["report"]).clean:
        return None
    for split in SPLITS:
        if (entry := receipt[split]) is None:
            continue
        shard = folder / split / entry["file"]
        for file, name in ((shard, "sha256"), (shard.with_suffix(".idx"), "ends_sha256")):
            if not file.is_file() or file_hash(file) != entry[name]:
                return None
    return receipt


def _open_folder(folder: Path, settings: dict, jobs: Sequence[dict], tokenizer: AnyTokenizer) -> None:
    """Make `folder` ready for the parts: the same settings as before, receipts in place, left-overs gone."""
    receipts, index_path = folder / RECEIPTS, folder / "index.json"
    settings_path = receipts / "settings.json"
    index = read_json(index_path) if index_path.is_file() else {}
    before = read_json(settings_path) if settings_path.is_file() else index.get("settings", settings)
    for name, value in settings.items():
        if before.get(name) != value:
            was, now = repr(before.get(name)), repr(value)
            raise ValueError(
                f"{folder} was prepared with {name} {was}, not {now}; choose another folder or delete it"
            )
    receipts.mkdir(parents=True, exist_ok=True)
    for place in (folder, receipts, *(folder / split for split in SPLITS)):
        remove_temporary(place)
    write_json(settings_path, settings, to_disk=False)
    saved = receipts / "tokenizer.json"
    tokenizer.save(saved)
    saved.replace(folder / "tokenizer.json")
    parts = index.get("parts", [])
    for receipt in parts:
        write_json(_receipt_path(folder, receipt["part"]), receipt, to_disk=False)
    if [receipt["inputs"] for receipt in parts] != [job["inputs"] for job in jobs]:
        # The folder is about to change: until it is whole again nobody should read it.
        for place in (folder, *(folder / split for split in SPLITS)):
            (place / "index.json").unlink(missing_ok=True)


def _close_folder(
    folder: Path, settings: dict, receipts: list[dict], corpora: list[tuple[Corpus, SplitRule]]
) -> dict:
    """Write the indexes and remove what no longer belongs to the folder."""
    report = CorpusReport()
    for corpus, _ in corpora:
        report.merge(corpus.new_report())
    index = write_indexes(folder, settings, receipts, report)
    for split in SPLITS:
        names = {Path(receipt[split]["file"]).stem for receipt in receipts if receipt[split] is not None}
        for path in (folder / split).glob("shard-*"):
            if path.stem not in names:
                path.unlink()
    shutil.rmtree(folder / RECEIPTS)
    return index


def write_indexes(folder: Path, settings: dict, receipts: list[dict], report: CorpusReport) -> dict:
    """Write the index of each split, then that of the whole folder, and return the latter.

    report: what is known besides the receipts, whose reports are added to it. A split without text is a
    ValueError.
    """
    for receipt in receipts:
        report.merge(CorpusReport(**receipt["report"]))
    entries = {split: [r[split] for r in receipts if r[split] is not None] for split in SPLITS}
    for split in SPLITS:
        if not entries[split]:
            raise ValueError(f"{settings['source']} has no text for the {split} split: {report.summary()}")
    totals = {
        split: write_index(
            folder / split,
            entries[split],
            settings["vocab_size"],
            settings["tokenizer"],
            settings["end_of_text"],
        )
        for split in SPLITS
    }
    index = {
        "format": "clearhead corpus",
        "version": VERSION,
        "settings": settings,
        **totals,
        "report": report.to_dict(),
        "parts": receipts,
    }
    write_json(folder / "index.json", index)
    return index


def read_json(path: Path) -> dict:
    """Return the object in a JSON file; anything else in it is a ValueError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is no JSON object; delete it and prepare again")
    return content
