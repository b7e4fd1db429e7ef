"""The verbs of text: learn a vocabulary, look at it, turn text into token ids on disk.

And how any verb is given a text, a tokenizer, or a folder to write to.
"""

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

if TYPE_CHECKING:
    from clearhead.text.foreign import AnyTokenizer

Specials = tuple[str, ...]

END_OF_TEXT = "<|endoftext|>"


def tokenizer_train(
    source: Positional[str],
    out: Positional[Path],
    vocab_size: int = 4096,
    splitter: str = "gpt2",
    special_tokens: Specials = (END_OF_TEXT,),
    alphabet: str = "bytes",
    field: str = "text",
    document_separator: str | None = None,
    workers: int | None = None,
    strict: bool = False,
) -> None:
    """Learn a BPE vocabulary from text and write it as tokenizer.json.

    Args:
        source: a file, folder or glob, or a built-in corpus: python, pydoc.
        out: the folder or .json file to write.
        vocab_size: tokens in all: 256 bytes, merges and special tokens.
        splitter: how text is cut before merging: gpt2, cl100k, o200k, llama3, qwen2, smollm, none.
        special_tokens: tokens that are never split or merged.
        alphabet: start from bytes, or from the corpus's characters.
        field: the field that holds the text, in .jsonl and .parquet.
        document_separator: text that divides a file into documents.
        workers: processes that count; by default what the size of the text deserves.
        strict: stop at the first broken piece of text.
    """
    from clearhead.text.bpe import train_bpe
    from clearhead.text.corpus import open_corpus
    from clearhead.text.tokenizer import Tokenizer
    from clearhead.training.report import Terminal

    room = make_room(out.parent if out.suffix in (".json", ".tiktoken", ".txt") else out)
    with room, contextlib.closing(Terminal()) as terminal:
        corpus = open_corpus(source, field=field, document_separator=document_separator, strict=strict)
        progress = terminal.on_progress
        vocab, merges = train_bpe(corpus, vocab_size, special_tokens, splitter, alphabet, workers, progress)
    tokenizer = Tokenizer(vocab, merges, special_tokens, splitter)
    path = tokenizer.save(out)
    say(corpus.report.summary())
    say(f"{tokenizer.vocab_size} tokens ({len(merges)} merges) -> {path}")


def tokenizer_encode(
    tokenizer: Positional[Path], text: Positional[str] = "-", specials: str = "token"
) -> None:
    """Text to token ids.

    Args:
        tokenizer: tokenizer.json, vocab.json, a .tiktoken file, or a folder with one.
        text: the text; - reads standard input.
        specials: what a special token's text in the input becomes: token, text or error.
    """
    loaded = open_tokenizer(tokenizer)
    print(" ".join(map(str, loaded.encode(text_or_stdin(text), specials=specials))))


def tokenizer_decode(tokenizer: Positional[Path], ids: Positional[tuple[str, ...]] = ("-",)) -> None:
    """Token ids to text, byte for byte.

    Args:
        tokenizer: tokenizer.json, vocab.json, a .tiktoken file, or a folder with one.
        ids: the token ids; - reads them from standard input.
    """
    loaded = open_tokenizer(tokenizer)
    words = text_or_stdin("-").split() if ids == ("-",) else ids
    for word in words:
        if not word.isdecimal():
            raise ValueError(f"{word!r} is not a token id; ids are numbers from 0 to {loaded.vocab_size - 1}")
    sys.stdout.buffer.write(loaded.decode_bytes(map(int, words)))
    if sys.stdout.isatty():
        print()


def tokenizer_show(tokenizer: Positional[Path], text: Positional[str] = "") -> None:
    """What is in a tokenizer and, with a text, how it is cut: each token's id, bytes and text.

    Args:
        tokenizer: tokenizer.json, vocab.json, a .tiktoken file, or a folder with one.
        text: a text to cut.
    """
    loaded = open_tokenizer(tokenizer)
    specials = ", ".join(f"{text}={number}" for text, number in loaded.special_tokens.items()) or "none"
    say(f"{loaded.vocab_size} tokens, splitter {loaded.splitter}, special tokens {specials}")
    if not text:
        return
    ids = loaded.encode(text)
    for token in ids:
        piece = loaded.token_bytes(token)
        print(f"{token:>7}  {piece.hex(' '):<36}  {piece.decode('utf-8', 'backslashreplace')!r}")
    say(f"{len(ids)} tokens, {loaded.compression(text):.2f} bytes per token")


def prepare(
    source: Positional[str],
    out: Positional[Path],
    tokenizer: Path,
    field: str = "text",
    document_separator: str | None = None,
    workers: int | None = None,
    strict: bool = False,
    validation: str | None = None,
) -> None:
    """Turn text into shards of token ids on disk, split into train and validation.

    A run that was killed continues where it stopped.

    Args:
        source: a file, folder or glob, or a built-in corpus: python, pydoc.
        out: the folder to write.
        tokenizer: the tokenizer to use.
        field: the field that holds the text, in .jsonl and .parquet.
        document_separator: text that divides a file into documents.
        workers: processes that encode.
        strict: stop at the first broken piece of text.
        validation: text of its own to measure on; by default one document in twenty, chosen by its content.
    """
    from clearhead.text.documents import CorpusReport
    from clearhead.text.prepare import prepare as prepare_shards
    from clearhead.training.report import Terminal

    with contextlib.closing(Terminal()) as terminal:
        index = prepare_shards(
            source,
            open_tokenizer(tokenizer),
            out,
            validation=validation,
            field=field,
            document_separator=document_separator,
            workers=workers,
            strict=strict,
            progress=functools.partial(terminal.on_progress, "encode"),
        )
    say(CorpusReport(**index["report"]).summary())
    for split in ("train", "validation"):
        part = index[split]
        say(f"{split}: {part['documents']} documents, {part['text_bytes']} bytes, {part['tokens']} tokens")
    say(f"-> {out}")


@contextlib.contextmanager
def make_room(folder: Path) -> Iterator[None]:
    """Make the folder to write to: where nobody can write is told before the work, not after it. A folder
    that stays empty because of an error is gone again.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not yours to write to; choose another folder")
        yield
    except Exception:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()
        raise


def open_tokenizer(path: Path) -> "AnyTokenizer":
    """The tokenizer in this file or folder."""
    from clearhead.text.foreign import open_tokenizer

    return open_tokenizer(path)


def text_or_stdin(text: str) -> str:
    """The text itself; - reads standard input. Text that is no UTF-8 is a ValueError, not guessed at."""
    where = "standard input" if text == "-" else "the text"
    data = sys.stdin.buffer.read() if text == "-" else os.fsencode(text)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start}"
        ) from None


def say(text: str) -> None:
    """Print a line for people."""
    print(text)


VERBS: dict[str, Callable[..., None]] = {
    "tokenizer train": tokenizer_train,
    "tokenizer encode": tokenizer_encode,
    "tokenizer decode": tokenizer_decode,
    "tokenizer show": tokenizer_show,
    "prepare": prepare,
}
