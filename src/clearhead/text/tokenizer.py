"""Tokenizer: an immutable value that turns text into token ids and back.

    text -> special tokens cut out -> normalised (off by default) -> pre-tokens -> merged by rank -> ids

With the merges u+g and h+ug, learned in this order, and the gpt2 splitter:

    "hugs bug<|end|>"   the special token is one id, whatever it is made of
    "hugs" " bug"       pre-tokens: nothing merges across their border
    h u g s -> h ug s -> hug s          lowest rank first
    " " b u g -> " " b ug               b+ug was never learned

Decoding joins the bytes of the tokens and reads them as UTF-8; nothing is cleaned up.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from operator import index
from pathlib import Path
from types import MappingProxyType
from typing import Literal, SupportsIndex

import numpy as np
from jaxtyping import Bool, Int64, UInt

from clearhead.text.definition import Definition, check_alphabet, check_specials, check_vocab
from clearhead.text.encoder import PieceEncoder
from clearhead.text.formats import read_definition, write_definition
from clearhead.text.incremental import PieceFeed, SpecialCutter, TextStream, mended
from clearhead.text.normalise import check_steps, frame, normalise, pad_sentences
from clearhead.text.pretokenize import check_splitter, compile_splitter, mend_surrogates, special_pattern
from clearhead.text.usage import Usage, write_usage


class Tokenizer:
    """Byte-level BPE: ids = merge(bytes of each pre-token), lowest rank first.

    vocab: id -> bytes of every token. merges: pairs in the order learned. Both as `train_bpe` returns them.
    special_tokens: texts, or text -> id. Without an id: the last id whose token has that text, else the
        next free one.
    splitter: a name of `pretokenize.SPLITTERS`; the one used in training.
    alphabet: "bytes" or "characters", what the smallest tokens are; None looks whether all 256 bytes are
        there.
    ignore_merges: a pre-token that is a token becomes it at once, even where merging would not lead there
        (tiktoken and Llama 3 do this).
    normalise: steps of `normalise.STEPS`, applied to all but special tokens.
    begin, end: special tokens that `encode_padded` puts around each text.

    >>> vocab = {i: bytes([i]) for i in range(256)} | {256: b"ug", 257: b"hug"}
    >>> tokenizer = Tokenizer(vocab, [(b"u", b"g"), (b"h", b"ug")], ["<|end|>"])
    >>> tokenizer.encode("hugs bug<|end|>")
    [257, 115, 32, 98, 256, 258]
    >>> [tokenizer.token_bytes(i) for i in [257, 115, 32, 98, 256]]
    [b'hug', b's', b' ', b'b', b'ug']
    >>> tokenizer.decode([257, 258])
    'hug<|end|>'
    """

    def __init__(
        self,
        vocab: Mapping[int, bytes],
        merges: Iterable[tuple[bytes, bytes]],
        special_tokens: Iterable[str] | Mapping[str, int] | None = (),
        splitter: str = "gpt2",
        *,
        alphabet: str | None = None,
        ignore_merges: bool = False,
        normalise: Iterable[str] = (),
        begin: Iterable[str] = (),
        end: Iterable[str] = (),
    ):
        self._vocab = check_vocab(vocab)
        self._specials = check_specials(special_tokens, self._vocab)
        self._vocab |= {token_id: text.encode() for text, token_id in self._specials.items()}
        self._definition = Definition(
            vocab=self._vocab,
            merges=[(left, right) for left, right in merges],
            special_tokens=self._specials,
            splitter=check_splitter(splitter),
            alphabet=check_alphabet(alphabet, self._vocab),
            ignore_merges=ignore_merges,
            normalise=check_steps(normalise),
            begin=tuple(begin),
            end=tuple(end),
        )
        for text in (*self._definition.begin, *self._definition.end):
            self.special_id(text)
        self._encoder = PieceEncoder(self._definition)
        self._split = compile_splitter(splitter)
        self._pattern = special_pattern(tuple(self._specials)) if self._specials else None
        self._usage = Usage()

    # ------------------------------------------------------------------------------------------ what it is

    @property
    def vocab(self) -> Mapping[int, bytes]:
        """Id -> bytes of every token, special tokens included."""
        return MappingProxyType(self._vocab)

    @cached_property
    def vocab_size(self) -> int:
        """The highest id + 1: the rows that an embedding needs. Published files may leave ids unused."""
        return max(self._vocab) + 1

    @property
    def merges(self) -> Sequence[tuple[bytes, bytes]]:
        """The pairs that are merged, in the order learned."""
        return tuple(self._definition.merges)

    @property
    def special_tokens(self) -> dict[str, int]:
        """Text -> id of the special tokens."""
        return dict(self._specials)

    @property
    def splitter(self) -> str:
        """The name of the splitter."""
        return self._definition.splitter

    @property
    def alphabet(self) -> str:
        """What the smallest tokens are: "bytes" or "characters"."""
        return self._definition.alphabet or "bytes"

    @property
    def usage(self) -> Usage:
        """What a published model's folder says beside the vocabulary: roles of tokens, chat template."""
        return self._usage

    def with_usage(self, usage: Usage) -> "Tokenizer":
        """The same tokenizer with something else beside it."""
        other = object.__new__(type(self))
        vars(other).update(vars(self), _usage=usage)
        return other

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides ids: tokenizers with equal ones encode every text alike."""
        what = self._definition
        content = {
            "vocab": [[token_id, token.hex()] for token_id, token in sorted(what.vocab.items())],
            "merges": [[left.hex(), right.hex()] for left, right in what.merges],
            "special_tokens": sorted(what.special_tokens.items(), key=lambda item: item[1]),
            "rules": [what.splitter, what.alphabet, what.ignore_merges, what.normalise],
        }
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def token_bytes(self, token_id: SupportsIndex) -> bytes:
        """Return the bytes of one token; an id without a token is a ValueError."""
        return self.decode_bytes([token_id])

    def special_id(self, text: str) -> int:
        """Return the id of a special token; a text that is none is a KeyError naming those there are."""
        if text not in self._specials:
            there = ", ".join(map(repr, self._specials)) or "none"
            raise KeyError(f"{text!r} is not a special token of this tokenizer; it has {there:.300}")
        return self._specials[text]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokenizer):
            return NotImplemented
        mine, theirs = self._definition, other._definition
        return self.fingerprint == other.fingerprint and (mine.begin, mine.end) == (theirs.begin, theirs.end)

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        specials = f"{len(self._specials)} of them special"
        return f"Tokenizer({len(self._vocab)} tokens, {specials}, splitter={self.splitter!r})"

    def __reduce__(self):
        return _from_definition, (self._definition, self._usage)

    # ----------------------------------------------------------------------------------------- text -> ids

    def encode(self, text: str, specials: str = "token") -> list[int]:
        """Return the ids of `text`.

        specials: what the text of a special token becomes. "token": its id. "text": ordinary text, as for
            input that users write. "error": a ValueError that names it.
        """
        return np.frombuffer(self._packed(text, specials), self._encoder.dtype).tolist()

    def encode_batch(self, texts: Iterable[str], specials: str = "token") -> list[list[int]]:
        """Return the ids of each text."""
        if isinstance(texts, str):
            raise TypeError(f"a batch is a list of texts; did you mean [{texts!r:.60}]?")
        return [self.encode(text, specials) for text in texts]

    def encode_sentence(self, text: str, specials: str = "token", truncate: int | None = None) -> list[int]:
        """Return the ids of `text` between the tokenizer's own `begin` and `end` tokens.

        truncate: the most ids, those around included; the end of the text is cut.
        """
        return frame(self.encode(text, specials), *self.around, truncate)

    @property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids before and after a sentence: the tokenizer's own `begin` and `end`."""
        begin, end = self._definition.begin, self._definition.end
        return tuple(self._specials[text] for text in begin), tuple(self._specials[text] for text in end)

    def encode_offsets(self, text: str, specials: str = "text") -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of `text` and which of its characters [start, end) each stands for.

        A character that is cut by two tokens belongs to both. A tokenizer that normalises is a ValueError:
        its tokens are those of another text.
        """
        if self._definition.normalise:
            steps = ", ".join(self._definition.normalise)
            raise ValueError(f"this tokenizer changes the text ({steps}): tokens have no places in it")
        text = mend_surrogates(text)
        ids = self.encode(text, specials)
        begins = (np.frombuffer(text.encode(), np.uint8) & 0xC0) != 0x80  # 10xxxxxx continues a character
        character = (np.cumsum(begins) - 1).tolist()
        ends = np.cumsum([len(self._vocab[token]) for token in ids], dtype=np.int64).tolist()
        starts = [0, *ends[:-1]]
        return ids, [
            (character[start], character[end - 1] + 1) for start, end in zip(starts, ends, strict=False)
        ]

    def encode_array(self, text: str, specials: str = "text") -> UInt[np.ndarray, " T"]:
        """Return the ids as uint16, or as uint32 if the vocabulary is larger: the quickest way to many ids.

        Special tokens are ordinary text here unless asked for otherwise: corpora are not trusted.
        """
        return np.frombuffer(self._packed(text, specials), self._encoder.dtype).copy()

    def encode_iterable(self, chunks: Iterable[str], specials: str = "token") -> Iterator[int]:
        """Yield the ids of the joined chunks, holding no more text than the longest pre-token needs."""
        return self._encode_chunks(chunks, _check_mode(specials))

    def encode_padded(
        self,
        texts: Iterable[str],
        *,
        pad: str,
        side: Literal["left", "right"] = "right",
        begin: Sequence[str] | None = None,
        end: Sequence[str] | None = None,
        truncate: int | None = None,
        keep: Literal["start", "end"] = "start",
        width: int | None = None,
        specials: str = "token",
    ) -> tuple[Int64[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
        """Return the ids of sentences as rows of one width, and the mask that is True at real tokens.

        pad: the special token that fills short rows at `side`, up to the longest row or to `width`.
        begin, end: special tokens put around each text; None takes the tokenizer's own.
        truncate: the most tokens of a row, `begin` and `end` included; `keep` tells what of a text stays.
        """
        before = [self.special_id(text) for text in (self._definition.begin if begin is None else begin)]
        after = [self.special_id(text) for text in (self._definition.end if end is None else end)]
        rows = self.encode_batch(texts, specials)
        return pad_sentences(rows, before, after, self.special_id(pad), side, truncate, keep, width)

    def compression(self, text: str) -> float:
        """Return UTF-8 bytes per token, special tokens read as text; an empty text is a ValueError."""
        if not text:
            raise ValueError("an empty text has no compression: it has no tokens")
        return len(mend_surrogates(text).encode()) / len(self.encode_array(text))

    def _packed(self, text: str, specials: str) -> bytes:
        """The ids of `text`, packed as `self._encoder.dtype`."""
        _check_mode(specials)
        if not isinstance(text, str):
            raise TypeError(f"a text is a str, not of type {type(text).__name__}: {text!r:.60}")
        text = mend_surrogates(text)
        if self._pattern is None or specials == "text":
            return self._pack_ordinary(text)
        parts = self._pattern.split(text)  # ordinary, special, ordinary, ..., ordinary
        if specials == "error" and len(parts) > 1:
            raise _special_found(parts[1])
        return b"".join(
            self._encoder.pack_ids([self._specials[part]]) if i % 2 else self._pack_ordinary(part)
            for i, part in enumerate(parts)
        )

    def _pack_ordinary(self, text: str) -> bytes:
        return self._encoder.pack(self._split(normalise(text, self._definition.normalise)))

    def _encode_chunks(self, chunks: Iterable[str], specials: str) -> Iterator[int]:
        cutter = SpecialCutter(() if specials == "text" else list(self._specials))
        feed = PieceFeed(self.splitter, self._definition.normalise)

        def ids(pieces: list[str]) -> list[int]:
            return np.frombuffer(self._encoder.pack(pieces), self._encoder.dtype).tolist()

        for chunk in chain(mended(chunks), [None]):
            for ordinary, special in cutter.feed(chunk or "", last=chunk is None):
                yield from ids(feed.feed(ordinary))
                if special is not None:
                    if specials == "error":
                        raise _special_found(special)
                    yield from ids(feed.close())
                    yield self._specials[special]
        yield from ids(feed.close())

    # ----------------------------------------------------------------------------------------- ids -> text

    def decode_bytes(self, ids: Iterable[SupportsIndex]) -> bytes:
        """Return the bytes of the tokens, joined; exact always. An id without a token is a ValueError."""
        try:
            return b"".join(map(self._vocab.__getitem__, map(index, ids)))
        except KeyError as error:
            raise ValueError(
                f"no token has the id {error.args[0]}; the last is {self.vocab_size - 1}"
            ) from None

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Return the text of the tokens; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def stream(self, continuing: bool = False) -> TextStream:
        """Return an incremental decoder: `feed(id)` and `flush()` give the text as it becomes certain.

        continuing: the ids go on with a text; here that makes no difference.
        """
        return TextStream(self.token_bytes)

    # ----------------------------------------------------------------------------------------------- files

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the tokenizer in the format that the name tells; return the path written.

        NAME.json: Hugging Face's tokenizer.json, which holds everything. vocab.json: GPT-2's pair, with
        merges.txt. NAME.tiktoken: ranks; special tokens and splitter are given again on loading. Anything
        else is a folder, for tokenizer.json and what goes beside it. What a format cannot hold: ValueError.
        """
        written = write_definition(self._definition, Path(path))
        if Path(path).is_dir():
            write_usage(self._usage, Path(path))
        return written

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        special_tokens: Iterable[str] | Mapping[str, int] | None = None,
        splitter: str | None = None,
    ) -> "Tokenizer":
        """Read a tokenizer from a folder or one of its files.

        A folder is searched for tokenizer.json, vocab.json + merges.txt, NAME.tiktoken, in this order. The
        latter two lack what `special_tokens` and `splitter` say. Unless said, GPT-2's have the splitter gpt2,
        and the tokens that no merge makes are special; a .tiktoken file that is named like a published one
        (gpt2, r50k, p50k, cl100k, o200k) has its splitter and, if it is as large, its special tokens.

        Not there: FileNotFoundError. Broken, or asking for what this class does not do: ValueError.
        """
        definition = read_definition(Path(path), special_tokens, splitter)
        try:
            return _from_definition(definition)
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path}: {error.args[0]}") from error


def _from_definition(definition: Definition, usage: Usage | None = None) -> Tokenizer:
    tokenizer = Tokenizer(**vars(definition))
    return tokenizer if usage is None else tokenizer.with_usage(usage)


def _check_mode(specials: str) -> str:
    if specials not in ("token", "text", "error"):
        raise ValueError(f"specials is 'token', 'text' or 'error', not {specials!r}")
    return specials


def _special_found(text: str) -> ValueError:
    return ValueError(f"the text holds the special token {text!r}; specials='text' takes it as plain text")
