"""Published tokenizers that are not byte-level BPE, behind the interface of `Tokenizer`.

    WordPiece          the longest known piece first, ##ing for the rest of a word     BERT
    Unigram            the likeliest way to cut a text, by the pieces' probabilities   T5, Marian
    SentencePiece BPE  merges over characters, a space spelled ▁, bytes as a last way  Llama 2, Gemma

The `tokenizers` library does the cutting, from the tokenizer.json that was published or from the older files
it is made of; ids, special tokens, streams and files are as with our own. `open_tokenizer` reads any of them.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, SupportsIndex

import numpy as np
from jaxtyping import Bool, Int64, UInt

from clearhead.text import older_files
from clearhead.text.definition import expect
from clearhead.text.incremental import TextStream
from clearhead.text.normalise import frame, pad_sentences
from clearhead.text.pieces import Reading, read_decoder
from clearhead.text.pretokenize import mend_surrogates, special_pattern
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.usage import Usage, read_usage, write_usage

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

# What decides no ids: settings of a call, the tokens around a sentence, how ids become text.
_LEFT_ASIDE = ("version", "truncation", "padding", "post_processor", "decoder")


class ForeignTokenizer:
    """A tokenizer.json that the `tokenizers` library runs; text -> normalised -> words -> pieces -> ids.

    definition: the text of the file. Its truncation and padding are left aside: they belong to a call.
    usage: what the folder says beside it.

    Normalisation may lose something: with BERT `decode(encode(text))` is lower case. `decode` joins the bytes
    of the pieces, reads them as UTF-8 and follows the file's decoder in where spaces stand.
    """

    def __init__(self, definition: str, usage: Usage | None = None) -> None:
        self.definition, self.usage = definition, usage or Usage()
        try:
            data = expect(json.loads(definition), dict, "the file")
        except RecursionError:
            raise ValueError("nested too deeply") from None
        self._data: dict[str, Any] = data | {"truncation": None, "padding": None}
        self._library = _build(self._data)
        numbers = ((text, self._library.token_to_id(text)) for text in _special_texts(data))
        self._specials = {text: number for text, number in numbers if number is not None}
        self._pieces = {number: piece for piece, number in self._library.get_vocab(True).items()}
        if not self._pieces:
            raise ValueError("the vocabulary is empty")
        self._special_bytes = {number: text.encode() for text, number in self._specials.items()}
        self._reading: Reading = read_decoder(data.get("decoder"))
        self._pattern = special_pattern(tuple(self._specials)) if self._specials else None

    # ------------------------------------------------------------------------------------------ what it is

    @cached_property
    def vocab_size(self) -> int:
        """The highest id + 1: the rows that an embedding needs."""
        return max(self._pieces) + 1

    @property
    def special_tokens(self) -> dict[str, int]:
        """Text -> id of the special tokens, which are matched before anything else."""
        return dict(self._specials)

    @property
    def splitter(self) -> str:
        """The kind of model: WordPiece, Unigram, BPE, WordLevel."""
        return str(self._data["model"].get("type", "BPE"))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides ids: tokenizers with equal ones encode every text alike."""
        content = {name: part for name, part in self._data.items() if name not in _LEFT_ASIDE}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def piece(self, token_id: SupportsIndex) -> str:
        """Return a token as the vocabulary spells it; an id without a token is a ValueError."""
        try:
            return self._pieces[index(token_id)]
        except KeyError:
            raise ValueError(f"no token has the id {token_id}; the last is {self.vocab_size - 1}") from None

    def token_bytes(self, token_id: SupportsIndex) -> bytes:
        """Return the bytes of one token inside a text, with the space before it; no such id: ValueError."""
        piece = self.piece(token_id)
        special = self._special_bytes.get(index(token_id))
        return self._reading.next(piece) if special is None else self._around(special)

    def special_id(self, text: str) -> int:
        """Return the id of a special token; a text that is none is a KeyError naming those there are."""
        if text not in self._specials:
            there = ", ".join(map(repr, self._specials)) or "none"
            raise KeyError(f"{text!r} is not a special token of this tokenizer; it has {there:.300}")
        return self._specials[text]

    def with_usage(self, usage: Usage) -> "ForeignTokenizer":
        """The same tokenizer with something else beside it."""
        return ForeignTokenizer(self.definition, usage)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ForeignTokenizer):
            return NotImplemented
        return self.fingerprint == other.fingerprint and self.around == other.around

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        specials = f"{len(self._specials)} of them special"
        return f"ForeignTokenizer({len(self._pieces)} tokens, {specials}, {self.splitter})"

    def __reduce__(self) -> tuple[Any, ...]:
        return ForeignTokenizer, (self.definition, self.usage)

    # ----------------------------------------------------------------------------------------- text -> ids

    def encode(self, text: str, specials: str = "token") -> list[int]:
        """Return the ids of `text`, without the tokens that go around a sentence.

        specials: what the text of a special token becomes. "token": its id. "text": ordinary text, as for
            input that users write. "error": a ValueError that names it.
        """
        if specials not in ("token", "text", "error"):
            raise ValueError(f"specials is 'token', 'text' or 'error', not {specials!r}")
        text = mend_surrogates(text)
        if specials == "error" and self._pattern and (found := self._pattern.search(text)):
            raise ValueError(
                f"the text holds the special token {found[0]!r}; specials='text' takes it as plain text"
            )
        library = self._plain if specials == "text" else self._library
        return _run(library.encode, text, add_special_tokens=False).ids

    def encode_batch(self, texts: Iterable[str], specials: str = "token") -> list[list[int]]:
        """Return the ids of each text."""
        return [self.encode(text, specials) for text in texts]

    def encode_array(self, text: str, specials: str = "text") -> UInt[np.ndarray, " T"]:
        """Return the ids as uint16, or as uint32 if the vocabulary is larger; special tokens as text."""
        return np.array(self.encode(text, specials), np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    def encode_sentence(self, text: str, specials: str = "token", truncate: int | None = None) -> list[int]:
        """Return the ids of `text` with the tokens around them that the model expects.

        truncate: the most ids, those around included; the end of the text is cut.
        """
        return frame(self.encode(text, specials), *self.around, truncate)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """Return the ids of two texts as the model expects a pair, and which of the two each belongs to."""
        encoding = _run(self._library.encode, mend_surrogates(first), mend_surrogates(second))
        return encoding.ids, encoding.type_ids

    def encode_offsets(self, text: str, specials: str = "text") -> tuple[list[int], list[tuple[int, int]]]:
        """Return the ids of `text` and which of its characters [start, end) each stands for."""
        if specials not in ("token", "text"):
            raise ValueError(f"specials is 'token' or 'text', not {specials!r}")
        library = self._plain if specials == "text" else self._library
        encoding = _run(library.encode, mend_surrogates(text), add_special_tokens=False)
        return encoding.ids, encoding.offsets

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
        """Return the ids of sentences as rows of one width, and the mask; the options of `Tokenizer`'s."""
        before = list(self.around[0]) if begin is None else [self.special_id(text) for text in begin]
        after = list(self.around[1]) if end is None else [self.special_id(text) for text in end]
        rows = self.encode_batch(texts, specials)
        return pad_sentences(rows, before, after, self.special_id(pad), side, truncate, keep, width)

    def compression(self, text: str) -> float:
        """Return UTF-8 bytes per token, special tokens read as text; an empty text is a ValueError."""
        if not text:
            raise ValueError("an empty text has no compression: it has no tokens")
        return len(mend_surrogates(text).encode()) / len(self.encode(text, "text"))

    @cached_property
    def _plain(self) -> "Library":
        """The same without special tokens: their texts are ordinary."""
        return _build(_without(self._data, self._specials))

    @cached_property
    def around(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The ids before and after a sentence, found by looking at one."""
        bare = _run(self._library.encode, "a", add_special_tokens=False).ids
        framed = _run(self._library.encode, "a").ids
        for place in range(len(framed) - len(bare) + 1):
            if framed[place : place + len(bare)] == bare:
                return tuple(framed[:place]), tuple(framed[place + len(bare) :])
        return (), ()

    # ----------------------------------------------------------------------------------------- ids -> text

    def decode_bytes(self, ids: Iterable[SupportsIndex]) -> bytes:
        """Return the bytes of the tokens, joined as one text. An id without a token is a ValueError."""
        return b"".join(map(_Reader(self), ids))

    def decode(self, ids: Iterable[SupportsIndex]) -> str:
        """Return the text of the tokens; bytes that are not UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def stream(self, continuing: bool = False) -> TextStream:
        """Return an incremental decoder: `feed(id)` and `flush()` give the text as it becomes certain.

        continuing: the ids go on with a text, so that the first one keeps the space before it.
        """
        return TextStream(_Reader(self, continuing))

    def first_bytes(self, token_id: SupportsIndex) -> bytes:
        """Return the bytes of a token at the beginning of a text; an id without a token is a ValueError."""
        piece = self.piece(token_id)
        special = self._special_bytes.get(index(token_id))
        return self._reading.first(piece) if special is None else special

    def _around(self, special: bytes) -> bytes:
        """A special token inside a text; where words are joined by spaces, it is a word."""
        return b" " + special if self._reading.next("a") == b" a" else special

    # ----------------------------------------------------------------------------------------------- files

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write NAME.json, or into a folder tokenizer.json and what goes beside it; return its path."""
        path = Path(path)
        file = path if path.suffix == ".json" else path / "tokenizer.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        if file != path:
            write_usage(self.usage, path)
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        draft.write_text(self.definition, encoding="utf-8", newline="\n")
        draft.replace(file)
        return file

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "ForeignTokenizer":
        """Read a tokenizer.json or the older files of a folder; see `open_tokenizer`."""
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        file = path / "tokenizer.json" if path.is_dir() else path
        usage = read_usage(folder)
        try:
            if file.suffix == ".json" and file.is_file():
                definition = file.read_text(encoding="utf-8")
            else:
                definition = older_files.definition(path, usage)
            return cls(definition, usage)
        except ValueError as error:
            raise ValueError(f"{file if file.is_file() else path}: {error}") from None


AnyTokenizer = Tokenizer | ForeignTokenizer


def open_tokenizer(path: str | os.PathLike[str]) -> AnyTokenizer:
    """Read any tokenizer: a folder, or one of its files.

    Byte-level BPE becomes our own `Tokenizer` as far as it does all that the file asks for; everything else
    runs in the `tokenizers` library. A folder is searched for tokenizer.json, vocab.json + merges.txt,
    NAME.tiktoken, vocab.txt (WordPiece), and SentencePiece models (NAME.model, NAME.spm), in this order.

    Not there: FileNotFoundError. Broken, or asking for what neither does: ValueError.
    """
    path = Path(path)
    ours: Exception
    try:
        own = Tokenizer.load(path)
        return own.with_usage(read_usage(path if path.is_dir() else path.parent))
    except (ValueError, FileNotFoundError) as error:
        ours = error
    if path.exists() and (json_in(path) or older_files.there(path)):
        return ForeignTokenizer.load(path)
    if isinstance(ours, FileNotFoundError) and path.is_dir():
        raise FileNotFoundError(f"{ours}, vocab.txt, NAME.model, NAME.spm")
    raise ours


def json_in(path: Path) -> bool:
    """Whether a file or a folder is, or has, a tokenizer.json."""
    return (path / "tokenizer.json").is_file() if path.is_dir() else path.name == "tokenizer.json"


class _Reader:
    """Token id -> bytes, in the order of a text: the first token may be read differently."""

    def __init__(self, tokenizer: ForeignTokenizer, continuing: bool = False) -> None:
        self._next, self._first = tokenizer.token_bytes, tokenizer.first_bytes
        self._begun = continuing

    def __call__(self, token_id: SupportsIndex) -> bytes:
        if self._begun:
            return self._next(token_id)
        self._begun = True
        return self._first(token_id)


def _special_texts(data: dict[str, Any]) -> list[str]:
    """The texts of the special tokens. Other added tokens are ordinary pieces that are matched first."""
    entries = expect(data.get("added_tokens") or [], list, "added_tokens")
    special = [entry for entry in entries if expect(entry, dict, "an added token").get("special")]
    texts = [expect(entry.get("content"), str, "the content of an added token") for entry in special]
    return [text for text in texts if text]


def _without(data: dict[str, Any], specials: Mapping[str, int]) -> dict[str, Any]:
    """The file with names for the special tokens that stand in no text, so that no text becomes one.

    A model may know them as pieces like others: Unigram would cut "</s>" out of a text as the likeliest way.
    """
    hidden = {text: f"\U000f0000{number}\U000f0000" for text, number in specials.items()}
    model = dict(data["model"])
    if isinstance(model.get("vocab"), list):
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in model["vocab"]]
    else:
        model["vocab"] = {hidden.get(piece, piece): number for piece, number in model["vocab"].items()}
    if "merges" in model:
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [
            [left, right] for left, right in pairs if not {left, right, left + right} & hidden.keys()
        ]
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    added = [entry for entry in data.get("added_tokens") or [] if not entry.get("special")]
    return data | {"model": model, "added_tokens": added, "post_processor": None}


def _build(data: dict[str, Any]) -> "Library":
    """The library's object; what it cannot read is a ValueError."""
    from tokenizers import Tokenizer as Library

    expect(data.get("model"), dict, "model")
    try:
        definition = json.dumps(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return _run(Library.from_str, definition, what="read it")


def _run(function: Callable[..., Any], *arguments: Any, what: str = "encode this", **options: Any) -> Any:
    """What the library answers; that it cannot is a ValueError, also where Rust panics.

    A pattern of the file that goes back and forth for ever is one that it gives up.
    """
    try:
        return function(*arguments, **options)
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"the tokenizers library cannot {what}: {reason:.200}") from None
