"""Count the pre-tokens of a corpus: all that BPE training needs to know of it.

A corpus of a hundred megabytes has millions of words but few different ones, and BPE asks only how often each
occurs. So the corpus streams through once, and what stays in memory is one count per distinct pre-token:

    source -> documents -> pieces (64 KB, cut at safe borders) -> parts (1 MB) -> counts

Parts are counted in worker processes when there are enough of them. A piece ends where the splitter cuts
anyway and where no special token lies, so the sum of all parts is the same however the text was cut and
whichever process counted. This file imports neither torch nor numpy: a worker starts in a tenth of a second.
"""

import codecs
import logging
import os
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain, islice
from pathlib import Path

from clearhead.text.pretokenize import (
    SAFE_BORDER,
    SPLITTERS,
    compile_splitter,
    mend_surrogates,
    special_pattern,
)
from clearhead.text.workers import Workers, cores

Source = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]
"""A path, or an iterable of documents, each a path or a text (see `documents`)."""

Progress = Callable[[str, int, int | None], object]
"""Called as (stage, done, total): ("count", characters, None), then ("merge", merges, merges asked for)."""

PIECE = 1 << 16
"""Characters of one piece. Small, for an ASCII piece is split twice as fast as one with a single é in it."""

PART = 1 << 20
"""Characters of one part, the unit of work of a process."""

SMALL = 8
"""A corpus of fewer parts than this is counted in the calling process unless `workers` is given."""

_log = logging.getLogger(__name__)


def count_pretokens(
    source: Source,
    special_tokens: Sequence[str] = (),
    splitter: str = "gpt2",
    workers: int | None = None,
    progress: Progress | None = None,
) -> dict[str, int]:
    """Return how often each pre-token occurs in `source`; special tokens cut the text and are not counted.

    `workers` is the number of processes; None takes one per core (at most 8) from 8 MB of text on.

    >>> count_pretokens(["low low<|end|>low"], ["<|end|>"])
    {'low': 2, ' low': 1}
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers is {workers}; it is at least 1, or None to choose by size and cores")
    specials = tuple(special_tokens)
    parts = _parts(documents(source), specials, splitter)
    if workers is None:
        first = list(islice(parts, SMALL))
        parts = chain(first, parts)
        workers = min(8, cores()) if len(first) == SMALL else 1
        _log.info("counting pre-tokens in %d process(es): one per core from %d MB on", workers, SMALL)
    total: dict[str, int] = {}
    done = 0
    with closing(_count_parts(parts, specials, splitter, workers)) as counted:
        for size, counts in counted:
            for pretoken, count in counts.items():
                total[pretoken] = total.get(pretoken, 0) + count
            done += size
            if progress is not None:
                progress("count", done, None)
    return total


# From a source to parts


def documents(source: Source) -> Iterator[Iterator[str]]:
    """Give each document of `source` as an iterator over chunks of its text.

    A str or a Path alone is the path of a file. In an iterable a Path is a file and a str is a text, except
    that a list whose strings all name existing files is a list of paths. Files are UTF-8: where bytes are
    not, U+FFFD takes their place and one line of the log says how often. Surrogates are mended.
    """
    bad: Counter[str] = Counter()
    for number, document in enumerate(_paths_or_texts(source)):
        if isinstance(document, os.PathLike):
            yield _read(Path(document), bad)
        elif isinstance(document, str):
            yield _chunks(mend_surrogates(document))
        else:
            kind = type(document).__name__
            raise TypeError(f"document {number} of the source is of type {kind}, neither str nor Path")
    if bad:
        worst, _ = bad.most_common(1)[0]
        places = f"{bad.total()} places in {len(bad)} files are not UTF-8"
        _log.warning("%s and were read as U+FFFD; the file with most of them is %s", places, worst)


def _paths_or_texts(source: Source) -> Iterable[str | os.PathLike[str]]:
    if isinstance(source, str):
        if not _names_a_file(source):
            shown = source if len(source) <= 60 else source[:57] + "..."
            raise FileNotFoundError(f"no file {shown!r}; a str alone is a path, a text is passed as [text]")
        return [Path(source)]
    if isinstance(source, os.PathLike):
        return [source]
    if isinstance(source, list | tuple) and all(map(_names_a_file, source)):
        return [Path(name) for name in source]
    return source


def _names_a_file(name: object) -> bool:
    try:
        return isinstance(name, str) and Path(name).is_file()
    except (OSError, ValueError):  # too long, or with a NUL: not a name
        return False


def _chunks(text: str) -> Iterator[str]:
    return (text[at : at + PIECE] for at in range(0, len(text), PIECE))


def _read(path: Path, bad: Counter[str]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with path.open("rb") as file:
        at_end = False
        while not at_end:
            block = file.read(PIECE)
            at_end = not block
            data = decoder.getstate()[0] + block
            text = decoder.decode(block, final=at_end)
            replaced = text.count("\ufffd") - data.count("\ufffd".encode())
            if replaced:
                bad[str(path)] += replaced
            yield text


def _parts(
    texts: Iterable[Iterable[str]], special_tokens: tuple[str, ...], splitter: str
) -> Iterator[list[str]]:
    """Collect the pieces of all documents into lists of at least PART characters."""
    part, size = [], 0
    for chunks in texts:
        for piece in _pieces(chunks, special_tokens, splitter):
            part.append(piece)
            size += len(piece)
            if size >= PART:
                yield part
                part, size = [], 0
    if part:
        yield part


def _pieces(chunks: Iterable[str], special_tokens: tuple[str, ...], splitter: str) -> Iterator[str]:
    """Cut one document into pieces of at least PIECE characters; their pre-tokens are those of the whole."""
    if SPLITTERS[splitter] is None:
        yield "".join(chunks)
        return
    longest = max(map(len, special_tokens), default=1)
    held, looked = "", PIECE
    for chunk in chunks:
        held += chunk
        in_sight = max(
            0, len(held) - longest
        )  # a special token that lies across a border must show as a whole
        for border in SAFE_BORDER.finditer(held, looked, in_sight):
            if not _lies_across(border.start(), held, special_tokens):
                yield held[: border.start()]
                held, looked = held[border.start() :], PIECE
                break
        else:
            looked = max(looked, in_sight)
    if held:
        yield held


def _lies_across(border: int, text: str, special_tokens: tuple[str, ...]) -> bool:
    return any(
        text.find(special, max(0, border - len(special) + 1), border + len(special) - 1) >= 0
        for special in special_tokens
    )


# From parts to counts


def count_part(part: list[str], special_tokens: tuple[str, ...], splitter: str) -> tuple[int, dict[str, int]]:
    """Return the number of characters in `part` and how often each pre-token occurs in its texts."""
    split = compile_splitter(splitter)
    special = special_pattern(special_tokens) if special_tokens else None
    counts: Counter[str] = Counter()
    for text in part:
        for stretch in special.split(text)[::2] if special else (text,):
            counts.update(split(stretch))
    return sum(map(len, part)), dict(counts)


def _count_parts(
    parts: Iterable[list[str]], special_tokens: tuple[str, ...], splitter: str, workers: int
) -> Generator[tuple[int, dict[str, int]], None, None]:
    jobs = ((part, special_tokens, splitter) for part in parts)
    if workers == 1:
        yield from map(_count_job, jobs)
    else:
        with Workers(workers, _worker) as pool:
            yield from pool.do(jobs)


def _worker() -> Callable[[tuple], tuple[int, dict[str, int]]]:
    return _count_job


def _count_job(job: tuple) -> tuple[int, dict[str, int]]:
    return count_part(*job)
