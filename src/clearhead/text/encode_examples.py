"""Examples become ids: what the model reads, and what it is to say there.

    Pair       source ids; the decoder reads  start t1 t2 ... tn  and says  t1 t2 ... tn end
    Labelled   [CLS] text [SEP] second [SEP]; a class, a 0 or 1 for each label, or a number
    Tagged     the words as one text; a tag at the first token of each word, nothing at the others
    Question   [CLS] question [SEP] context [SEP]; the first and the last token of the answer
    Chat       the conversation by its template; the next token wherever that belongs to an answer

A context too long for the model gives several rows: windows that overlap by `stride` tokens, so that an
answer cut by one is whole in the next. Other texts that are too long are cut, and the report counts them.
Special tokens spelled in an example stay ordinary text.

Sources: Devlin et al. 2018 (arXiv:1810.04805) for pairs, tags and windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from clearhead.text.batches import IGNORED
from clearhead.text.chat import ChatTemplate
from clearhead.text.examples import Chat, Labelled, Pair, Question, Tagged
from clearhead.text.foreign import AnyTokenizer
from clearhead.text.frame import FIRST, SECOND, first_of_target, frame_of
from clearhead.text.usage import SETTINGS, Usage

Targets = list[int] | list[float] | int | float | tuple[int, int]
"""Ids or tags by position (-100: none); a number for each label; a class; a number; first and last token."""

PLAIN_CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The chat template of a tokenizer that has none."""
_LONGEST_QUESTION = 64


@dataclass(frozen=True)
class Encoded:
    """One row for a model."""

    inputs: list[int]
    targets: Targets
    source: list[int] | None = None
    """What an encoder reads, where `inputs` are the decoder's; or the other text of a pair that is alike."""
    token_types: list[int] | None = None
    example: int = 0
    """The number of the example; a long context gives several rows."""
    offsets: list[tuple[int, int]] | None = None
    """Which characters of the context, or of the words joined by spaces, each token is; (-1, -1): none."""


@dataclass
class EncodingReport:
    """What encoding found and cut."""

    examples: int = 0
    rows: int = 0
    cut: int = 0
    """Examples that were longer than the model may read."""
    lost: int = 0
    """Tokens of these that the model does not see."""
    longest: int = 0
    """Tokens of the longest example, before cutting."""
    left_out: int = 0
    """Examples without anything left to learn."""

    def seen(self, length: int, lost: int) -> None:
        """Count one example of `length` tokens, `lost` of which are cut away."""
        self.examples += 1
        self.longest = max(self.longest, length)
        self.cut += lost > 0
        self.lost += lost

    def summary(self) -> str:
        """Return the report in one line.

        >>> EncodingReport(examples=10, rows=9, cut=2, lost=70, longest=150, left_out=1).summary()
        '10 examples as 9 rows; the longest has 150 tokens; 2 cut, by 70 tokens; 1 left out, nothing to learn'
        """
        parts = [f"{self.examples:,} examples"]
        if self.rows != self.examples:
            parts[0] += f" as {self.rows:,} rows"
        parts.append(f"the longest has {self.longest:,} tokens")
        if self.cut:
            parts.append(f"{self.cut:,} cut, by {self.lost:,} tokens")
        if self.left_out:
            parts.append(f"{self.left_out:,} left out, nothing to learn")
        return "; ".join(parts)


Rows = tuple[list[Encoded], EncodingReport]


# ------------------------------------------------------------------------------------------------- one text


def encode_labelled(
    examples: Sequence[Labelled], tokenizer: AnyTokenizer, max_len: int, names: Sequence[str] | None = None
) -> Rows:
    """Return the rows of texts with labels; the targets are places in `names`, or numbers if there are none.

    An example whose label is a tuple has a 0.0 or 1.0 for each of `names`; one without a label has 0. Of two
    texts that are too long together the longer one is cut first.
    """
    frame, report = frame_of(tokenizer), EncodingReport()
    place = {name: number for number, name in enumerate(names or ())}
    rows = []
    for number, example in enumerate(examples):
        first = tokenizer.encode(example.text, "text")
        second = None if example.second is None else tokenizer.encode(example.second, "text")
        room = _room(max_len, frame.extra(second is not None))
        length = len(first) + len(second or ())
        keep = longest_first(len(first), len(second or ()), room)
        report.seen(length + max_len - room, length - sum(keep))
        ids, types = frame.fill(first[: keep[0]], None if second is None else second[: keep[1]])
        rows.append(Encoded(ids, _target(example, place), token_types=_types(types), example=number))
    report.rows = len(rows)
    return rows, report


def _target(example: Labelled, place: dict[str, int]) -> Targets:
    label = example.label
    if label is None:
        return 0
    if isinstance(label, tuple):
        return [float(name in label) for name in place]
    if isinstance(label, str):
        if label not in place:
            raise ValueError(f"{example.place}: label {label!r} is none of {', '.join(map(repr, place))}")
        return place[label]
    return float(label)


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return how many tokens of two texts stay when the longer is cut first, as `tokenizers` does.

    >>> longest_first(10, 4, 12), longest_first(10, 9, 11), longest_first(2, 3, 9)
    ((8, 4), (6, 5), (2, 3))
    """
    if first + second <= room:
        return first, second
    less, more = sorted((first, second))
    more = less if less > room else max(less, room - less)
    if less + more > room:
        less = room // 2
        more = less + room % 2
    return (more, less) if first > second else (less, more)


def encode_tagged(
    examples: Sequence[Tagged], tokenizer: AnyTokenizer, max_len: int, names: Sequence[str] = ()
) -> Rows:
    """Return the rows of tagged words, which are encoded as one text, a space between two of them.

    The target at the first token of a word is its tag's place in `names`, elsewhere -100. `first_tokens`
    finds these positions again. Words behind `max_len` are lost, with their tags.
    """
    frame, report = frame_of(tokenizer), EncodingReport()
    place = {name: number for number, name in enumerate(names)}
    room = _room(max_len, frame.extra(False))
    rows = []
    for number, example in enumerate(examples):
        ids, offsets = tokenizer.encode_offsets(" ".join(example.words))
        report.seen(len(ids) + max_len - room, len(ids) - len(ids[:room]))
        inputs, _ = frame.fill(ids[:room])
        around = _framed(offsets[:room], frame.start(FIRST), len(inputs))
        targets = [IGNORED] * len(inputs)
        for word, position in enumerate(first_tokens(example.words, around)):
            if position is not None and example.tags is not None:
                if targets[position] != IGNORED:
                    raise ValueError(
                        f"{example.place}: the tokenizer makes one token of the words "
                        f"{' '.join(example.words[word - 1 : word + 1])!r}; tags need one that cuts at spaces"
                    )
                if example.tags[word] not in place:
                    known = ", ".join(map(repr, place))
                    raise ValueError(f"{example.place}: tag {example.tags[word]!r} is none of {known}")
                targets[position] = place[example.tags[word]]
        rows.append(Encoded(inputs, targets, example=number, offsets=around))
    report.rows = len(rows)
    return rows, report


def first_tokens(words: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[int | None]:
    """Return the position of each word's first token, None for a word without one; `offsets` as in a row.

    >>> first_tokens(["ab", "c"], [(-1, -1), (0, 1), (1, 2), (2, 4)])
    [1, 3]
    """
    positions: list[int | None] = []
    begin = position = 0
    for word in words:
        end = begin + len(word)
        while position < len(offsets) and offsets[position][1] <= begin:
            position += 1
        found = position < len(offsets) and 0 <= offsets[position][0] < end
        positions.append(position if found else None)
        begin = end + 1
    return positions


# ------------------------------------------------------------------------------------------------ two texts


def encode_pairs(
    pairs: Sequence[Pair],
    tokenizer: AnyTokenizer,
    source_len: int,
    target_len: int,
    *,
    start: int | None = None,
    target_tokenizer: AnyTokenizer | None = None,
) -> Rows:
    """Return the rows of a text and its translation, for an encoder-decoder.

    start: the id with which the decoder begins; None: what `first_of_target` finds.
    target_tokenizer: the one of the translation, if it is another.
    """
    theirs = tokenizer if target_tokenizer is None else target_tokenizer
    frame, target_frame, report = frame_of(tokenizer), frame_of(theirs), EncodingReport()
    begin = first_of_target(theirs) if start is None else start
    if target_frame.single[-1][0] == FIRST:
        raise ValueError("the tokenizer of the translation has no special token that ends a text")
    room = _room(source_len, frame.extra(False)), _room(target_len, target_frame.extra(False))
    rows = []
    for number, pair in enumerate(pairs):
        source, target = tokenizer.encode(pair.source, "text"), theirs.encode(pair.target, "text")
        lost = max(0, len(source) - room[0]) + max(0, len(target) - room[1])
        report.seen(max(len(source), len(target)), lost)
        said, _ = target_frame.fill(target[: room[1]])
        read, _ = frame.fill(source[: room[0]])
        rows.append(Encoded([begin, *said[:-1]], said, source=read, example=number))
    report.rows = len(rows)
    return rows, report


def encode_alike(pairs: Sequence[Pair], tokenizer: AnyTokenizer, max_len: int) -> Rows:
    """Return the rows of two texts that mean the same: `inputs` and `source`, for sentence vectors."""
    frame, report = frame_of(tokenizer), EncodingReport()
    room = _room(max_len, frame.extra(False))
    rows = []
    for number, pair in enumerate(pairs):
        sides = [tokenizer.encode(text, "text") for text in (pair.source, pair.target)]
        report.seen(max(map(len, sides)), sum(max(0, len(side) - room) for side in sides))
        first, second = (frame.fill(side[:room])[0] for side in sides)
        rows.append(Encoded(first, 0, source=second, example=number))
    report.rows = len(rows)
    return rows, report


def encode_questions(
    questions: Sequence[Question], tokenizer: AnyTokenizer, max_len: int, stride: int = 128
) -> Rows:
    """Return the rows of questions, one for each window of the context.

    stride: the tokens that two windows share; less, if there is no room for so many. The target is the first
        and last token of the first answer, or (0, 0) in a window that does not hold all of it. A question
        of more than 64 tokens, or a quarter of `max_len`, is cut.
    """
    frame, report = frame_of(tokenizer), EncodingReport()
    rows: list[Encoded] = []
    for number, question in enumerate(questions):
        asked = tokenizer.encode(question.question, "text")
        kept = asked[: min(_LONGEST_QUESTION, max(1, max_len // 4))]
        ids, offsets = tokenizer.encode_offsets(question.context)
        room = _room(max_len, frame.extra(True) + len(kept))
        step = max(1, room - min(stride, room // 2))
        report.seen(len(ids) + len(asked) + frame.extra(True), len(asked) - len(kept))
        begin = frame.start(SECOND, len(kept))
        for first in range(0, max(1, len(ids) - (room - step)), step):
            window = slice(first, first + room)
            inputs, types = frame.fill(kept, ids[window])
            around = _framed(offsets[window], begin, len(inputs))
            span = _span(question, offsets[window], begin)
            rows.append(Encoded(inputs, span, token_types=_types(types), example=number, offsets=around))
    report.rows = len(rows)
    return rows, report


def _span(question: Question, offsets: Sequence[tuple[int, int]], begin: int) -> tuple[int, int]:
    """The first and the last token of the first answer in a window, (0, 0) if not all of it is there."""
    if not question.answers or not offsets:
        return 0, 0
    start, text = question.answers[0]
    end = start + len(text)
    if start < offsets[0][0] or end > offsets[-1][1]:
        return 0, 0
    inside = [i for i, (first, last) in enumerate(offsets) if first < end and last > start]
    return (begin + inside[0], begin + inside[-1]) if inside else (0, 0)


# ---------------------------------------------------------------------------------------------------- chats


def chat_template(tokenizer: AnyTokenizer, source: str | None = None) -> ChatTemplate:
    """Return the template `source`, else the tokenizer's own, else `PLAIN_CHAT` with what ends its texts."""
    if source is None and tokenizer.usage.template() is not None:
        return ChatTemplate.of(tokenizer)
    ends = ("<|endoftext|>", "<|im_end|>", "</s>")
    end = next((text for text in ends if text in tokenizer.special_tokens), "")
    names = {"eos_token": end, "bos_token": ""} | tokenizer.usage.roles()
    if source is None and not names["eos_token"]:
        raise ValueError("the tokenizer has no special token that ends an answer; give it '<|endoftext|>'")
    return ChatTemplate(PLAIN_CHAT if source is None else source, names)


def with_chat_template(tokenizer: AnyTokenizer) -> AnyTokenizer:
    """Return the tokenizer with `PLAIN_CHAT` as its template if it came without one, so that it is saved with
    what the model has learned and a conversation finds it.
    """
    template = chat_template(tokenizer)
    if tokenizer.usage.template() is not None:
        return tokenizer
    settings = dict(tokenizer.usage.files.get(SETTINGS) or {})
    settings.setdefault("eos_token", template.names["eos_token"])
    return tokenizer.with_usage(Usage({**tokenizer.usage.files, SETTINGS: settings}, template.source))


def encode_chats(
    chats: Sequence[Chat], tokenizer: AnyTokenizer, max_len: int, template: ChatTemplate | None = None
) -> Rows:
    """Return the rows of conversations for a decoder: the next token is a target where it is of an answer.

    A conversation is cut at its end; one whose answers are all cut away is left out.
    """
    template, report = template or chat_template(tokenizer), EncodingReport()
    rows = []
    for number, chat in enumerate(chats):
        try:
            ids, answers = template.encode_answers(chat.messages, tokenizer)
        except ValueError as error:
            raise ValueError(f"{chat.place}: {error}") from None
        report.seen(len(ids), max(0, len(ids) - 1 - max_len))
        said = [token if answer else IGNORED for token, answer in zip(ids, answers, strict=True)]
        inputs, targets = ids[:-1][:max_len], said[1:][:max_len]
        if all(target == IGNORED for target in targets):
            report.left_out += 1
        else:
            rows.append(Encoded(inputs, targets, example=number))
    report.rows = len(rows)
    return rows, report


# ---------------------------------------------------------------------------------------------------- parts


def _room(max_len: int, extra: int) -> int:
    if max_len - extra < 1:
        raise ValueError(
            f"context_length={max_len} leaves no room for a text: {extra} tokens stand around it; raise it"
        )
    return max_len - extra


def _types(types: list[int]) -> list[int] | None:
    return types if any(types) else None


def _framed(offsets: Sequence[tuple[int, int]], begin: int, length: int) -> list[tuple[int, int]]:
    """Offsets of a text's tokens at their positions in a row of `length` tokens."""
    nowhere = (-1, -1)
    return [nowhere] * begin + [*offsets] + [nowhere] * (length - begin - len(offsets))
