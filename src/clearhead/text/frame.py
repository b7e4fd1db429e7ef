"""What stands around one text and between two, as a model expects it.

    BERT      [CLS] a [SEP]     [CLS] a [SEP] b [SEP]        types 0 0 0 1 1
    RoBERTa   <s> a </s>        <s> a </s></s> b </s>
    ours      a <|endoftext|>   a <|endoftext|> b <|endoftext|>

A published tokenizer says it itself; it is found by looking at what its library makes of one text and of two.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from clearhead.text.foreign import AnyTokenizer, ForeignTokenizer

END_OF_TEXT = "<|endoftext|>"
Slots = tuple[tuple[int, int], ...]
"""Ids with their types; FIRST and SECOND stand where the texts go."""
FIRST, SECOND = -1, -2


@dataclass(frozen=True)
class Frame:
    """The special tokens of one text and of a pair, each with its token type; `pair` None: there are none."""

    single: Slots
    pair: Slots | None

    def extra(self, pair: bool) -> int:
        """How many tokens are put around one text, or around and between two."""
        return len(self._slots(pair)) - (2 if pair else 1)

    def fill(self, first: Sequence[int], second: Sequence[int] | None = None) -> tuple[list[int], list[int]]:
        """Return the ids of one text or two between the special tokens, and the token types.

        >>> Frame((), ((2, 0), (FIRST, 0), (3, 0), (SECOND, 1), (3, 1))).fill([7, 8], [9])
        ([2, 7, 8, 3, 9, 3], [0, 0, 0, 0, 1, 1])
        """
        ids: list[int] = []
        types: list[int] = []
        for slot, kind in self._slots(second is not None):
            part = first if slot == FIRST else (second or ()) if slot == SECOND else (slot,)
            ids += part
            types += [kind] * len(part)
        return ids, types

    def start(self, place: int, first_length: int = 0) -> int:
        """Where the text in the place FIRST or SECOND begins, the first being `first_length` tokens long."""
        position = 0
        for slot, _ in self._slots(place == SECOND):
            if slot == place:
                break
            position += first_length if slot == FIRST else 1
        return position

    def _slots(self, pair: bool) -> Slots:
        if not pair:
            return self.single
        if self.pair is None:
            raise ValueError(
                f"the tokenizer has no special token to stand between two texts; give it {END_OF_TEXT!r}"
            )
        return self.pair


def frame_of(tokenizer: AnyTokenizer) -> Frame:
    """Return how `tokenizer` frames one text and two.

    One that puts nothing around a text gets [CLS] and [SEP] if it has them, else an end of text behind each.
    """
    before, after = tokenizer.around
    roles = {name: role(tokenizer, name) for name in ("cls", "sep")}
    classes = roles["cls"] is not None and roles["sep"] is not None
    end = end_of_text(tokenizer)
    if not before and not after:
        if classes:
            before, after = (roles["cls"] or 0,), (roles["sep"] or 0,)
        elif end is not None:
            after = (end,)
    single = (*((one, 0) for one in before), (FIRST, 0), *((one, 0) for one in after))
    pair = _library_pair(tokenizer)
    between = after or (() if end is None else (end,))
    if pair is None and between:
        kind = int(classes)
        pair = (*single, *_typed(() if after else between, 0), (SECOND, kind), *_typed(between, kind))
    return Frame(single, pair)


def _typed(ids: Sequence[int], kind: int) -> Slots:
    return tuple((one, kind) for one in ids)


def _library_pair(tokenizer: AnyTokenizer) -> Slots | None:
    """The pair that the library makes; None if it puts nothing between two texts."""
    if not isinstance(tokenizer, ForeignTokenizer):
        return None
    bare = tokenizer.encode("a", "text")
    ids, types = tokenizer.encode_pair("a", "a")
    slots: list[tuple[int, int]] = []
    places = [SECOND, FIRST]
    position = 0
    while position < len(ids):
        if bare and places and ids[position : position + len(bare)] == bare:
            slots.append((places.pop(), types[position]))
            position += len(bare)
        else:
            slots.append((ids[position], types[position]))
            position += 1
    if (
        places
        or abs([slot for slot, _ in slots].index(SECOND) - [slot for slot, _ in slots].index(FIRST)) == 1
    ):
        return None
    return tuple(slots)


def role(tokenizer: AnyTokenizer, name: str) -> int | None:
    """The id of the token with this role, by the tokenizer's folder or by its usual spelling."""
    texts = (tokenizer.usage.roles().get(f"{name}_token"), f"[{name.upper()}]", f"<{name}>")
    return next((tokenizer.special_tokens[text] for text in texts if text in tokenizer.special_tokens), None)


def end_of_text(tokenizer: AnyTokenizer) -> int | None:
    """Return the id that ends a text: "<|endoftext|>", else the token with the role eos or sep; or None."""
    if END_OF_TEXT in tokenizer.special_tokens:
        return tokenizer.special_tokens[END_OF_TEXT]
    return next((found for name in ("eos", "sep") if (found := role(tokenizer, name)) is not None), None)


def padding(tokenizer: AnyTokenizer) -> int:
    """Return the id that fills up rows: the token with the role pad, else what ends a text, else 0.

    What stands there is masked; it has to be some id of the vocabulary.
    """
    pad = role(tokenizer, "pad")
    return pad if pad is not None else end_of_text(tokenizer) or 0


def first_of_target(tokenizer: AnyTokenizer, named: str | None = None) -> int:
    """Return the id with which a decoder begins: that of the special token `named`, else of bos, cls, pad, or
    what ends a text.
    """
    if named is not None:
        return tokenizer.special_id(named)
    for name in ("bos", "cls"):
        if (found := role(tokenizer, name)) is not None:
            return found
    return padding(tokenizer)
