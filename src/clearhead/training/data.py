"""From a recipe's [data] to a tokenizer and shards: learn the vocabulary, encode the text, both only once.

The vocabulary is learned from the training text alone; what the model is measured on, it has never seen.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from clearhead.text.bpe import train_bpe
from clearhead.text.corpus import Corpus, open_corpus, split_corpus
from clearhead.text.counting import Progress
from clearhead.text.documents import CorpusReport
from clearhead.text.prepare import prepare
from clearhead.text.shards import Shards
from clearhead.text.tokenizer import Tokenizer
from clearhead.training.recipe import DataConfig
from clearhead.training.run_folder import RunFolder

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class PreparedData:
    """A tokenizer and the two splits of a corpus as token shards."""

    tokenizer: Tokenizer
    train: Shards
    validation: Shards

    @property
    def fingerprint(self) -> str:
        """Names the very bytes of the training tokens: their hashes stand in the index."""
        return hashlib.sha256((self.train.folder / "index.json").read_bytes()).hexdigest()


def prepare_data(
    data: DataConfig, run: RunFolder, note: Callable[[str], None], progress: Progress | None = None
) -> PreparedData:
    """The tokenizer and the shards of a recipe, made in the run's folder unless `source` is a prepared
    folder.

    What an earlier, killed run finished is kept; the rest is made again. `note` hears what is done, in one
    line each; `progress` is called as (stage, done, total).
    """
    folder = data_folder(data, run)
    if folder != run.data:
        tokenizer = Tokenizer.load(folder / "tokenizer.json")
    else:
        corpus = open_corpus(
            data.source, field=data.field, document_separator=data.document_separator, strict=data.strict
        )
        tokenizer = find_tokenizer(data, corpus, run, note, progress)
        index = prepare(
            data.source,
            tokenizer,
            folder,
            field=data.field,
            document_separator=data.document_separator,
            strict=data.strict,
            progress=None if progress is None else partial(progress, "encode"),
        )
        note(
            f"{CorpusReport(**index['report']).summary()}: {index['train']['tokens']:,} tokens to learn from, "
            f"{index['validation']['tokens']:,} to validate"
        )
    return open_data(folder, tokenizer)


def data_folder(data: DataConfig, run: RunFolder) -> Path:
    """Where the shards of a run lie: in `source`, when that is a prepared folder, else in the run's own."""
    source = Path(data.source)
    return source if (source / "tokenizer.json").is_file() and (source / "train").is_dir() else run.data


def open_data(folder: Path, tokenizer: Tokenizer) -> PreparedData:
    """The two splits in a prepared folder. Raises ValueError when another tokenizer made them."""
    train, validation = (
        Shards(folder / split, tokenizer_fingerprint=tokenizer.fingerprint)
        for split in ("train", "validation")
    )
    return PreparedData(tokenizer, train, validation)


def find_tokenizer(
    data: DataConfig,
    corpus: Corpus,
    run: RunFolder,
    note: Callable[[str], None],
    progress: Progress | None,
) -> Tokenizer:
    """The recipe's tokenizer, the one this run learned before, or a new one."""
    if data.tokenizer is not None:
        return Tokenizer.load(data.tokenizer)
    if run.tokenizer_file.is_file():
        return Tokenizer.load(run.tokenizer_file)
    note(f"learning a vocabulary of {data.vocab_size} tokens from {corpus.name}")
    vocab, merges = train_bpe(
        training_text(corpus), data.vocab_size, (END_OF_TEXT,), data.splitter, progress=progress
    )
    tokenizer = Tokenizer(vocab, merges, (END_OF_TEXT,), data.splitter)
    tokenizer.save(run.tokenizer_file)
    note(f"{len(merges):,} merges learned")
    return tokenizer


def training_text(corpus: Corpus) -> Iterator[str]:
    """The documents that are not kept for validation."""
    return (text for split, text in split_corpus(corpus) if split == "train")
