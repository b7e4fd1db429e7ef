"""What a request asks, read and checked: text or ids, a source, edits, how tokens are chosen, and how many.

Every mistake is a ValueError of one line with the names and numbers involved.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.generation.decode import END_OF_TEXT, expects_frame
from clearhead.generation.sample import Sampling
from clearhead.generation.special_ids import published_ids
from clearhead.inspector.record import Edit
from clearhead.model.transformer import Transformer
from clearhead.text.foreign import AnyTokenizer

LONGEST_TEXT = 20_000  # characters
LONGEST_FOREIGN = 4_096  # tokens of a model that does not say how many it takes
MOST_NEW_TOKENS = 1_024
MOST_EDITS = 64


@dataclass(frozen=True)
class Read:
    """Tokens of a text, and how many of them stand before and after it."""

    ids: tuple[int, ...]
    before: int = 0
    after: int = 0


class Reader:
    """Reads texts as one model takes them."""

    def __init__(self, model: nn.Module, tokenizer: AnyTokenizer | None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.config = model.config if isinstance(model, Transformer) else None
        self.max_len = LONGEST_FOREIGN if self.config is None else self.config.max_len
        self.two_sided = self.config is not None and self.config.shape == "encoder-decoder"

    @property
    def start_id(self) -> int:
        """With what the decoder of an encoder-decoder begins."""
        found = published_ids(self.model).start if isinstance(self.model, Transformer) else None
        if found is None and self.tokenizer is not None:
            found = self.tokenizer.special_tokens.get(END_OF_TEXT)
        return found or 0

    def tokens_of(self, text: str, as_source: bool = False) -> Read:
        """The tokens of a text, as `generate` reads it; without a tokenizer a text is numbers."""
        if len(text) > LONGEST_TEXT:
            raise ValueError(f"the text has {len(text)} characters; at most {LONGEST_TEXT} are read")
        start = (self.start_id,) if self.two_sided and not as_source else ()
        if self.tokenizer is None:
            numbers = text.replace(",", " ").split()
            if not all(number.isdecimal() and len(number) < 10 for number in numbers):
                raise ValueError(
                    "this model has no tokenizer; its text is token ids, numbers with spaces between"
                )
            return Read((*start, *map(int, numbers)), len(start))
        bare = self.tokenizer.encode(text)
        if self.two_sided and not as_source:
            return Read((*start, *bare), len(start))
        framed = isinstance(self.model, Transformer) and (
            expects_frame(self.model) or self.model.config.shape == "encoder"
        )
        if not framed:
            return Read(tuple(bare))
        whole = self.tokenizer.encode_sentence(text)
        extra = len(whole) - len(bare)
        before = next((n for n in range(extra + 1) if whole[n : n + len(bare)] == bare), 0)
        return Read(tuple(whole), before, extra - before)

    def both(self, body: dict[str, Any]) -> tuple[Read, Read | None]:
        """The text of a request, and of an encoder-decoder its source."""
        if not self.two_sided:
            return self._read(body, "text", "ids", False), None
        return self._read(body, "text", "ids", False), self._read(body, "source", "source_ids", True)

    def _read(self, body: dict[str, Any], text_key: str, ids_key: str, as_source: bool) -> Read:
        ids, text = body.get(ids_key), body.get(text_key)
        if ids is not None:
            if not isinstance(ids, list) or not all(type(token) is int for token in ids):
                raise ValueError(f"{ids_key} should be a list of token ids")
            read = Read(tuple(ids))
        elif isinstance(text, str):
            read = self.tokens_of(text, as_source)
        else:
            raise ValueError(f"give {text_key}, a text, or {ids_key}, a list of token ids")
        what = "source" if as_source else "text"
        if not read.ids:
            raise ValueError(f"the {what} is empty; give at least one token")
        if len(read.ids) > self.max_len:
            raise ValueError(
                f"the {what} has {len(read.ids)} tokens; the model takes at most {self.max_len} (max_len)"
            )
        size = self._vocab_size(as_source)
        for token in read.ids:
            if not 0 <= token < size:
                raise ValueError(f"token id {token} is outside the model's vocabulary 0..{size - 1}")
        return read

    def _vocab_size(self, as_source: bool) -> int:
        if self.config is None:
            return 1 << 31 if self.tokenizer is None else self.tokenizer.vocab_size
        return (
            (self.config.source_vocab_size or self.config.vocab_size) if as_source else self.config.vocab_size
        )

    def new_tokens(self, length: int, n_new: object) -> int:
        """How many tokens a request asks for after this many."""
        if type(n_new) is not int or not 1 <= n_new <= MOST_NEW_TOKENS:
            raise ValueError(f"n={n_new!r:.20} should be a number of tokens from 1 to {MOST_NEW_TOKENS}")
        room = self.max_len - length
        if n_new > room:
            raise ValueError(
                f"n={n_new} tokens do not fit; the model takes {self.max_len} in all, {room} more"
            )
        return n_new


def read_edits(
    edits: object, plain: Callable[[str], Tensor], other: Callable[[str, str], Tensor]
) -> tuple[tuple[Edit, ...], str]:
    """The edits of a request, and what tells them from others.

    `plain`: a value of the same pass without edits; `other`: a value of the trace with this number.
    """
    if not isinstance(edits, list) or len(edits) > MOST_EDITS:
        raise ValueError(f"edits should be a list of at most {MOST_EDITS}")
    made, keys = [], []
    for edit in edits:
        if (
            not isinstance(edit, dict)
            or not isinstance(edit.get("name"), str)
            or not isinstance(edit.get("kind"), str)
        ):
            raise ValueError("an edit is {name, kind, at, value}")
        at, value = edit.get("at") or [], edit.get("value")
        if not isinstance(at, list) or not all(place is None or type(place) is int for place in at):
            raise ValueError("the place of an edit is a list of numbers and nulls")
        name, kind = edit["name"], edit["kind"]
        keys.append([name, kind, at, value])
        if kind == "freeze":  # whatever else is changed, this stays as in the unedited pass
            if value is not None:
                raise ValueError("an edit of kind 'freeze' takes no value")
            made.append(Edit(name, "patch", tuple(at), plain(name)))
        else:
            made.append(Edit(name, kind, tuple(at), edit_value(name, kind, value, other)))
    return tuple(made), repr(keys) if keys else ""


def edit_value(
    name: str, kind: str, value: object, other: Callable[[str, str], Tensor]
) -> float | Tensor | None:
    """A number, numbers, or for a patch {"trace": id}: the same value of another pass."""
    if isinstance(value, dict) and isinstance(value.get("trace"), str):
        return other(value["trace"], name)
    if value is None:
        return None
    if isinstance(value, float) or (type(value) is int and abs(value) < 1 << 100):
        return float(value)
    if isinstance(value, list) and kind != "patch":
        try:
            return torch.tensor(value, dtype=torch.float32)
        except (TypeError, ValueError):
            pass
    raise ValueError("the value of an edit is a number, a list of numbers, or for a patch {trace: id}")


def read_sampling(values: object) -> Sampling:
    """How tokens are chosen, from a request."""
    if values is None:
        return Sampling()
    known = asdict(Sampling())
    if not isinstance(values, dict) or set(values) - set(known):
        raise ValueError(f"sampling takes {', '.join(known)}")
    for key, value in values.items():
        numbers = int if key in ("top_k", "seed") else int | float
        if not (value is None and key == "seed") and (
            isinstance(value, bool) or not isinstance(value, numbers)
        ):
            raise ValueError(f"sampling.{key}={value!r:.20} should be a number")
    if values.get("temperature", 0) == 0:  # sliders without an effect are no mistake on a page
        values = {key: value for key, value in values.items() if key not in ("top_k", "top_p", "min_p")}
    whole = ("top_k", "seed")
    try:
        chosen: dict[str, Any] = {k: v if k in whole else float(v) for k, v in values.items()}
        return Sampling(**chosen)
    except OverflowError:
        raise ValueError("sampling takes numbers of an ordinary size") from None
