"""From a recipe's [data] to a tokenizer and shards: learn the vocabulary, encode the text, both only once.

The vocabulary is learned from the training text alone; what the model is measured on, it has never seen.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from clearhead.text.bpe import train_bpe
from clearhead.text.corpus import Corpus, Split, open_corpus, split_corpus
from clearhead.text.counting import Progress
from clearhead.text.documents import CorpusReport
from clearhead.text.foreign import AnyTokenizer, open_tokenizer
from clearhead.text.frame import END_OF_TEXT
from clearhead.text.prepare import prepare
from clearhead.text.shards import Shards
from clearhead.text.token_files import is_token_file, open_token_files
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.recipe import DataConfig
from clearhead.training.run_folder import RunFolder

_CHECKED_BYTES = 4 << 30
HOW_TEXT_IS_READ = ("field", "document_separator", "strict")


@dataclass(frozen=True)
class PreparedData:
    """A tokenizer and the two splits of a corpus as token shards."""

    tokenizer: AnyTokenizer
    train: Shards
    validation: Shards

    @property
    def fingerprint(self) -> str:
        """Names the very training tokens."""
        return self.train.fingerprint


def prepare_data(
    data: DataConfig,
    run: RunFolder,
    note: Callable[[str], None],
    progress: Progress | None = None,
    specials: tuple[str, ...] = (END_OF_TEXT,),
) -> PreparedData:
    """The tokenizer and the shards of a recipe, made in the run's folder unless `source` is a prepared
    folder. `specials`: the special tokens of a tokenizer that is learned.

    What a run has learned from stays as it is: a resumed run takes its own shards, whatever has become of the
    source. What an earlier, killed preparation finished is kept; the rest is made again. `note` hears what is
    done, in one line each; `progress` is called as (stage, done, total).
    """
    if is_token_file(data.source):
        found = open_ids(data, run.tokenizer() if run.exists() else None)
        note(f"{found.train.n_tokens:,} tokens to learn from, {found.validation.n_tokens:,} to validate")
        return found
    folder = data_folder(data, run)
    if folder != run.data:
        _check_effect(data, folder, (*HOW_TEXT_IS_READ, "validation"))
        place = data.tokenizer or str(folder / "tokenizer.json")
        tokenizer = open_tokenizer(place) if run.exists() else _given_tokenizer(data, place)
        return open_data(folder, tokenizer, verify=_worth_checking(folder, note))
    if run.begun:  # the first process has made or checked them, and they are its own to mend
        return open_data(folder, run.tokenizer())
    if run.exists() and (folder / "index.json").is_file():
        try:
            return open_data(folder, run.tokenizer(), verify=True)
        except ValueError as error:
            note(str(error))
    return _make_data(data, run, note, progress, specials)


def _make_data(
    data: DataConfig,
    run: RunFolder,
    note: Callable[[str], None],
    progress: Progress | None,
    specials: tuple[str, ...],
) -> PreparedData:
    reading: dict[str, Any] = {name: getattr(data, name) for name in HOW_TEXT_IS_READ}
    corpus = open_corpus(data.source, **reading)
    if data.validation is not None:  # that it is there is known before a vocabulary is learned
        open_corpus(data.validation, **reading)
    texts = training_text(corpus) if data.validation is None else corpus
    tokenizer = find_tokenizer(data, texts, corpus.name, run, note, progress, specials)
    encoding = None if progress is None else partial(progress, "encode")
    index = prepare(
        data.source, tokenizer, run.data, validation=data.validation, progress=encoding, **reading
    )
    note(
        f"{CorpusReport(**index['report']).summary()}: {index['train']['tokens']:,} tokens to learn from, "
        f"{index['validation']['tokens']:,} to validate"
    )
    return open_data(run.data, tokenizer)


def open_ids(data: DataConfig, tokenizer: AnyTokenizer | None = None) -> PreparedData:
    """The two splits of files of ids that another program wrote, read where they lie.

    `tokenizer`: that of a run which has begun; None: the one that the recipe names.
    """
    _check_effect(data, data.source, HOW_TEXT_IS_READ)
    if tokenizer is None:
        if data.tokenizer is None:
            raise ValueError(
                f"{data.source} holds ids; data.tokenizer has to name the vocabulary that made them"
            )
        tokenizer = _given_tokenizer(data, data.tokenizer)
    train, validation = open_token_files(data.source, tokenizer, data.validation)
    return PreparedData(tokenizer, train, validation)


def _check_effect(data: DataConfig, source: Path | str, names: Iterable[str]) -> None:
    """Raise ValueError for a setting that says how text is read, where there is no text to read."""
    for name in names:
        if getattr(data, name) != getattr(DataConfig, name):
            raise ValueError(
                f"data.{name}={getattr(data, name)!r} has no effect, {source} is prepared already; "
                "leave it away, or give the text as data.source"
            )


def _worth_checking(folder: Path, note: Callable[[str], None]) -> bool:
    """Whether to read a prepared folder in full before it is learned from: up to 4 GB, which is seconds."""
    size = sum(path.stat().st_size for path in folder.glob("*/shard-*"))
    if size > _CHECKED_BYTES:
        note(f"{folder} holds {size / 1e9:.0f} GB: sizes and headers are checked, not every byte")
    return size <= _CHECKED_BYTES


def data_folder(data: DataConfig, run: RunFolder) -> Path:
    """Where the shards of a run lie: in `source`, when that is a prepared folder, else in the run's own."""
    source = Path(data.source)
    return source if (source / "tokenizer.json").is_file() and (source / "train").is_dir() else run.data


def open_split(data: DataConfig, run: RunFolder, tokenizer: AnyTokenizer, split: Split) -> Shards:
    """A split of what a run of running text has learned from, wherever that lies.

    FileNotFoundError: it is neither in the run's folder nor where the recipe says.
    """
    if is_token_file(data.source):
        return getattr(open_ids(data, tokenizer), split)
    folder = data_folder(data, run) / split
    if not (folder / "index.json").is_file():
        raise FileNotFoundError(
            f"{run.path} learned from {data.source}; neither that, as seen from {Path.cwd()}, nor {run.data} "
            "holds prepared text; go to the folder it was trained from, or give prepared text with --data"
        )
    return Shards(folder, tokenizer_fingerprint=tokenizer.fingerprint)


def open_data(folder: Path, tokenizer: AnyTokenizer, verify: bool = False) -> PreparedData:
    """The two splits in a prepared folder. Raises ValueError when another tokenizer made them, and, with
    `verify`, when a byte of them has changed.
    """
    train, validation = (
        Shards(folder / split, tokenizer_fingerprint=tokenizer.fingerprint, verify=verify)
        for split in ("train", "validation")
    )
    return PreparedData(tokenizer, train, validation)


def find_tokenizer(
    data: DataConfig,
    texts: Iterable[str],
    name: str,
    run: RunFolder,
    note: Callable[[str], None],
    progress: Progress | None,
    specials: tuple[str, ...] = (END_OF_TEXT,),
) -> AnyTokenizer:
    """The tokenizer of a run that has begun, else the recipe's, else a new one, learned from `texts`."""
    if run.exists():
        return run.tokenizer()
    if data.tokenizer is not None:
        return _given_tokenizer(data, data.tokenizer)
    note(f"learning a vocabulary of {data.vocab_size} tokens from {name}")
    vocab, merges = train_bpe(texts, data.vocab_size, specials, data.splitter, progress=progress)
    tokenizer = Tokenizer(vocab, merges, specials, data.splitter)
    tokenizer.save(run.tokenizer_file)
    note(f"{len(merges):,} merges learned")
    return tokenizer


def _given_tokenizer(data: DataConfig, path: str) -> AnyTokenizer:
    """The tokenizer at `path`; ValueError when the recipe also says what only a learned one can follow."""
    tokenizer = open_tokenizer(path)
    for name in ("vocab_size", "splitter"):
        wanted, found = getattr(data, name), getattr(tokenizer, name)
        if wanted not in (getattr(DataConfig, name), found):
            raise ValueError(
                f"data.{name}={wanted!r} has no effect with the tokenizer {path}, whose {name} is {found!r}; "
                "leave one of them away"
            )
    return tokenizer


def training_text(corpus: Corpus) -> Iterator[str]:
    """The documents that are not kept for validation."""
    return (text for split, text in split_corpus(corpus) if split == "train")
