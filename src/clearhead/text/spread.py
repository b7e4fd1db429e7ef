"""A corpus tokenised by many machines: one file in, one shard per split out, and an index at the end.

    tokenize_shard("in/0042.jsonl.gz", "out", tokenizer)     for each file, anywhere, in any order, any times
    join_shards("out", tokenizer)                            once, when all of them are done

The first is pure and idempotent: what it writes depends on the file, the tokenizer and the options alone, a
shard appears only whole, and one that is there and right is not made again. So any engine may schedule it,
and a job that was killed is started once more. docs/cluster.md shows three of them. The folder is then one
like `prepare` makes.

    out/train/shard-NAME.bin, .idx     out/validation/...     out/.parts/part-NAME.json     what is done
"""

import hashlib
import json
import os
import re
from pathlib import Path

from clearhead.text.corpus import SplitRule, open_corpus
from clearhead.text.documents import CorpusReport
from clearhead.text.foreign import AnyTokenizer
from clearhead.text.frame import end_of_text
from clearhead.text.prepare import RECEIPTS, file_state, read_json, tokenise_part, write_indexes
from clearhead.text.shards import VERSION


def tokenize_shard(
    in_path: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    tokenizer: AnyTokenizer,
    *,
    name: str | None = None,
    field: str = "text",
    document_separator: str | None = None,
    strict: bool = False,
    split: SplitRule = "hash",
) -> dict:
    """Tokenise one file into a shard of each split and return the receipt: tokens, hashes, what was skipped.

    name: of the shards; None: the file's own and a hash of its full path, which has to be the same on every
        machine. A name that another file has taken is a ValueError.
    field, document_separator, strict: as for `open_corpus`.
    split: "hash" sends one document in twenty to validation, by its text; "train" or "validation" all of
        them; "tail" cuts each at its end.
    """
    corpus = open_corpus(in_path, field=field, document_separator=document_separator, strict=strict)
    if len(corpus.files) != 1:
        raise ValueError(f"{in_path} is {len(corpus.files)} files; tokenize_shard takes one at a time")
    file = corpus.files[0]
    path = Path(file.path).absolute()
    if name is None:
        stem = re.sub(r"[^A-Za-z0-9._-]", "_", path.name)
        name = f"{stem}-{hashlib.sha256(str(path).encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        raise ValueError(f"name={name!r} becomes a file name: letters, digits and ._- only, no dot first")
    settings = _settings(tokenizer) | {
        "field": field, "document_separator": document_separator, "split": split
    }  # fmt: skip
    inputs = json.dumps([VERSION, settings, file.kind, file.packing, file_state(file)])
    job = {
        "part": name,
        "rule": split,
        "pieces": [(file.path, file.kind, file.packing, 0, None)],
        "bytes": file.size(),
        "end_of_text": settings["end_of_text"],
        "options": {"field": field, "document_separator": document_separator, "strict": strict},
        "inputs": hashlib.sha256(inputs.encode()).hexdigest(),
        "about": settings | {"path": str(path)},
    }
    folder = Path(out_dir)
    taken = folder / RECEIPTS / f"part-{name}.json"
    if taken.is_file() and (other := read_json(taken).get("about", {}).get("path")) != str(path):
        raise ValueError(f"{taken} is the shard of {other}, not of {path}; give another name")
    taken.parent.mkdir(parents=True, exist_ok=True)
    return tokenise_part(job, tokenizer, folder)


def join_shards(out_dir: str | os.PathLike[str], tokenizer: AnyTokenizer, files: int | None = None) -> dict:
    """Write the indexes that make a folder of shards one corpus, and return that of the whole.

    files: how many files there were; with fewer shards the ValueError says so, and nothing is written. Shards
    of another tokenizer or other options than the rest are a ValueError naming both.
    """
    folder = Path(out_dir)
    receipts = [read_json(path) for path in sorted((folder / RECEIPTS).glob("part-*.json"))]
    if not receipts:
        raise FileNotFoundError(f"{folder} holds no shard that tokenize_shard has finished")
    if files is not None and len(receipts) != files:
        raise ValueError(f"{folder} holds the shards of {len(receipts)} files, not of {files}; run the rest")
    about = [receipt.get("about", {}) for receipt in receipts]
    settings = {name: about[0].get(name) for name in about[0] if name != "path"} | _settings(tokenizer)
    for one in about:
        for name, value in settings.items():
            if name != "split" and one.get(name) != value:
                raise ValueError(
                    f"the shard of {one.get('path')} was made with {name} {one.get(name)!r}, not {value!r}; "
                    "run tokenize_shard for it again"
                )
    tokenizer.save(folder / "tokenizer.json")
    settings |= {
        "source": f"{len(receipts)} files",
        "split": " and ".join(sorted({a["split"] for a in about})),
    }
    return write_indexes(folder, settings, receipts, CorpusReport())


def _settings(tokenizer: AnyTokenizer) -> dict:
    return {
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": end_of_text(tokenizer),
    }
