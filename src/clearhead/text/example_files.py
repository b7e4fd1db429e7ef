"""Files of examples, as people have them, read into the dataclasses of `examples`.

    parallel text     two files with as many lines, or .tsv of two columns, or .jsonl with two fields
    labelled lines    .csv, .tsv or .jsonl: a text, its label, and perhaps a second text
    CoNLL             a word and its tag on each line, an empty line after each sentence
    questions         the JSON of SQuAD (Rajpurkar et al. 2016), or .jsonl with a question on each line
    conversations     .jsonl with messages of a role and a content

Any of them may be packed as .gz. A column is named in the first line of a .csv or .tsv; one without such a
line has columns by number, from "1". Unlike running text, an example that is not right is not replaced by
something similar: the first one stops the reading with a ValueError that says file:line, what is wrong, and
what would be right.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from clearhead.text.examples import Chat, Label, Labelled, Pair, Question, Tagged
from clearhead.text.pretokenize import mend_surrogates
from clearhead.text.rows import (
    count_columns,
    field_of,
    find_files,
    kind_of,
    read_lines,
    read_records,
    read_rows,
    read_whole,
    what_is,
)

Note = Callable[[str], object]
"""Is told, in one line, what was left out."""


# ------------------------------------------------------------------------------------------------- the forms


def read_pairs(
    source: str,
    target: str | None = None,
    *,
    fields: tuple[str, str] | None = None,
    note: Note | None = None,
) -> list[Pair]:
    """Return the pairs in the files `source` and `target`, line by line, or in the one file `source`.

    fields: the columns or fields of a text and its counterpart in a single file. None: "source" and "target"
        in .jsonl and .csv; in .tsv the two columns that it has.

    A pair with an empty side is left out and counted in a note: parallel text has many of these.
    """
    pairs: list[Pair] = []
    left_out: list[str] = []
    if target is not None:
        if fields is not None:
            raise ValueError(
                f"the fields {fields[0]!r} and {fields[1]!r} have no use where each file is a side"
            )
        rows = _two_files(source, target)
    else:
        rows = (row for path in find_files(source) for row in _one_file(path, fields))
    for place, one, other in rows:
        if one.strip() and other.strip():
            pairs.append(Pair(one, other, place))
        else:
            left_out.append(place)
    if left_out and note is not None:
        note(f"{len(left_out):,} pairs with an empty side left out (first {left_out[0]})")
    return _some(pairs, source, "pair")


def read_labelled(
    source: str,
    *,
    text: str = "text",
    label: str | None = "label",
    second: str | None = None,
    numbers: bool = False,
) -> list[Labelled]:
    """Return the labelled texts of .csv, .tsv and .jsonl files.

    text, label, second: the columns or fields; `label=None` reads texts without one.
    numbers: the labels are numbers to be learned as such, not names of classes.
    """
    names = [name for name in (text, label, second) if name is not None]
    examples = []
    for path in find_files(source):
        for place, values in read_rows(path, names):
            row = dict(zip(names, values, strict=True))
            found = None if label is None else _label(row[label], label, place, numbers)
            other = None if second is None else _filled(row[second], second, place)
            examples.append(Labelled(_filled(row[text], text, place), found, other, place))
    return _some(examples, source, "labelled text")


def read_tagged(source: str, *, word: int = 1, tag: int | None = None) -> list[Tagged]:
    """Return the sentences of CoNLL files.

    word, tag: their columns, counted from 1; `tag=None` is the last one. Columns are divided by tabs where
        there are any, else by spaces. Lines of -DOCSTART- and comments (#) are no words.
    """
    sentences: list[Tagged] = []
    for path in find_files(source):
        words: list[tuple[str, str]] = []
        begun, n_columns = "", 0
        for number, line in enumerate([*read_lines(path), ""], 1):
            place = f"{path}:{number}"
            if not line.strip():
                if words:
                    sentences.append(_sentence(words, begun))
                words = []
                continue
            columns = line.split("\t") if "\t" in line else line.split()
            if columns[0] == "-DOCSTART-" or (line.startswith("#") and len(columns) != n_columns):
                continue
            n_columns = n_columns or len(columns)
            found = _word(columns, n_columns, word, tag, place)
            if found is not None:
                begun = begun if words else place
                words.append(found)
    return _some(sentences, source, "sentence")


def read_questions(source: str) -> list[Question]:
    """Return the questions of .json files in the form of SQuAD 1.1 or 2.0, or of .jsonl files whose lines
    have a question, a context and answers. An answer has to stand in its context where it says.
    """
    questions: list[Question] = []
    for path in find_files(source):
        if kind_of(path) == "jsonl":
            names = ["context", "question", "answers"]
            for place, record in read_records(path):
                context, question, answers = (field_of(record, name, place) for name in names)
                questions.append(
                    _question(context, question, _as_list(answers), record.get("id", place), place)
                )
        elif kind_of(path) in ("csv", "tsv", "conll", "txt"):
            raise ValueError(f"{path} is no .json or .jsonl file; questions are read from these")
        else:
            questions += _squad(path)
    return _some(questions, source, "question")


def read_chats(source: str, *, field: str = "messages") -> list[Chat]:
    """Return the conversations of .jsonl files; each has to hold an answer, a message of the assistant."""
    chats = []
    for path in find_files(source):
        if kind_of(path) != "jsonl":
            raise ValueError(f"{path} is no .jsonl file; conversations are read from .jsonl")
        for place, record in read_records(path):
            chats.append(Chat(_messages(field_of(record, field, place), field, place), place))
    return _some(chats, source, "conversation")


# ------------------------------------------------------------------------------------------------- one value


def _string(value: Any, name: str, place: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{place}: {name!r} is {what_is(value)}, not a text")
    return mend_surrogates(value)


def _filled(value: Any, name: str, place: str) -> str:
    text = _string(value, name, place)
    if not text.strip():
        raise ValueError(f"{place}: {name!r} is empty; take the line out or fill it in")
    return text


def _label(value: Any, name: str, place: str, numbers: bool) -> Label:
    if numbers:
        try:
            number = math.nan if isinstance(value, bool) or "_" in str(value) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{place}: {name!r} is {what_is(value)}, not a finite number")
        return number
    if isinstance(value, list):
        return tuple(_filled(one, name, place) for one in value)
    if isinstance(value, float):
        raise ValueError(f"{place}: {name!r} is the number {value!r}; a class needs a name or a whole number")
    if isinstance(value, bool | int):
        return json.dumps(value)
    return _filled(value, name, place).strip()


def _sentence(words: list[tuple[str, str]], place: str) -> Tagged:
    return Tagged(tuple(word for word, _ in words), tuple(tag for _, tag in words), place)


def _word(
    columns: list[str], n_columns: int, word: int, tag: int | None, place: str
) -> tuple[str, str] | None:
    """A word and its tag; None for a line of CoNLL-U that is no word of its own, such as 3-4 or 5.1."""
    if len(columns) != n_columns:
        raise ValueError(f"{place}: {count_columns(len(columns))}, where the first word has {n_columns}")
    if n_columns < 2:
        raise ValueError(f"{place}: one column, {columns[0]!r:.40}; a word needs a tag beside it")
    for name, column in (("word", word), ("tag", tag)):
        if column is not None and not 1 <= column <= n_columns:
            raise ValueError(
                f"{place}: {count_columns(n_columns)}, there is no column {column} for the {name}"
            )
    if word != 1 and not columns[0].isdecimal():
        return None
    found = columns[word - 1], columns[(n_columns if tag is None else tag) - 1]
    if not all(part.strip() for part in found):
        raise ValueError(f"{place}: the word is {found[0]!r}, its tag {found[1]!r}; neither may be empty")
    return mend_surrogates(found[0]), found[1]


def _messages(value: Any, name: str, place: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise ValueError(
            f"{place}: {name!r} is {'empty' if value == [] else what_is(value)}, not a list of messages"
        )
    for number, message in enumerate(value):
        inside = f"{place}: {name}[{number}]"
        if not isinstance(message, dict):
            raise ValueError(f"{inside} is {what_is(message)}, not an object with a role and a content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                there = ", ".join(map(repr, message)) or "nothing"
                what = f"its {key!r} is {what_is(message[key])}" if key in message else f"it has {there}"
                raise ValueError(f"{inside} needs a text as its {key!r}; {what}")
    if not any(message["role"] == "assistant" and message["content"].strip() for message in value):
        raise ValueError(f"{place}: no message of the assistant; the answers are what is learned")
    return tuple(
        {key: mend_surrogates(part) if isinstance(part, str) else part for key, part in message.items()}
        for message in value
    )


def _squad(path: Path) -> Iterator[Question]:
    """The questions of a SQuAD file; places are paths inside the JSON, which has no lines to speak of."""
    text = read_whole(path)
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError(f"{path}: the JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON, {error.msg} in column {error.colno}") from None
    for i, article in enumerate(_list(content, "data", f"{path}: ")):
        for j, paragraph in enumerate(_list(article, "paragraphs", f"{path}: data[{i}].")):
            inside = f"{path}: data[{i}].paragraphs[{j}]"
            for k, record in enumerate(_list(paragraph, "qas", f"{inside}.")):
                place = f"{inside}.qas[{k}]"
                record = record if isinstance(record, dict) else {}
                context = field_of(paragraph, "context", inside)
                question, answers = (field_of(record, name, place) for name in ("question", "answers"))
                yield _question(context, question, answers, record.get("id", place), place)


def _list(record: Any, name: str, before: str) -> list[Any]:
    found = record.get(name) if isinstance(record, dict) else None
    if not isinstance(found, list):
        keys = f"its keys: {', '.join(map(repr, list(record)[:8]))}" if isinstance(record, dict) else ""
        raise ValueError(f"{before}{name} is no list; SQuAD has data, paragraphs, qas. {keys}".rstrip(". "))
    return found


def _as_list(answers: Any) -> Any:
    """Answers as SQuAD has them, from {"text": [...], "answer_start": [...]} as tables have them."""
    if not isinstance(answers, dict):
        return answers
    texts, starts = answers.get("text"), answers.get("answer_start")
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        return None
    return [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]


def _question(context: Any, question: Any, answers: Any, name: Any, place: str) -> Question:
    context, question = _filled(context, "context", place), _filled(question, "question", place)
    if not isinstance(answers, list):
        raise ValueError(f"{place}: 'answers' is no list of objects with a text and an answer_start")
    found: list[tuple[int, str]] = []
    for answer in answers:
        answer = answer if isinstance(answer, dict) else {}
        text = _filled(field_of(answer, "text", place), "text", place)
        start = field_of(answer, "answer_start", place)
        if type(start) is not int:
            raise ValueError(f"{place}: 'answer_start' is {what_is(start)}, not a whole number")
        if start < 0 or context[start : start + len(text)] != text:
            there = context[max(start, 0) : max(start, 0) + len(text)]
            where = context.find(text)
            hint = f"it stands at {where}" if where >= 0 else "it stands nowhere in the context"
            raise ValueError(
                f"{place}: the answer {text!r:.60} is not at {start}, where {there!r:.60} is; {hint}"
            )
        found.append((start, text))
    return Question(context, question, tuple(found), str(name), place)


# ------------------------------------------------------------------------------------------------------ pairs


def _one_file(path: Path, fields: tuple[str, str] | None) -> Iterator[tuple[str, str, str]]:
    columns = None
    if kind_of(path) not in ("csv", "tsv", "jsonl"):
        raise ValueError(
            f"{path} is neither .csv nor .tsv nor .jsonl by its name, so it is one side of the pairs; "
            "the file of the other side is data.target, or data.validation_target"
        )
    if fields is None:
        fields, columns = (("1", "2"), 2) if kind_of(path) == "tsv" else (("source", "target"), None)
    for place, (one, other) in read_rows(path, fields, columns):
        yield place, _string(one, fields[0], place), _string(other, fields[1], place)


def _two_files(source: str, target: str) -> Iterator[tuple[str, str, str]]:
    ones, others = find_files(source), find_files(target)
    if len(ones) != len(others):
        raise ValueError(f"{source} is {len(ones)} files and {target} {len(others)}; each needs its other")
    for one, other in zip(ones, others, strict=True):
        lines, translations = read_lines(one), read_lines(other)
        if len(lines) != len(translations):
            raise ValueError(
                f"{one} has {len(lines):,} lines and {other} {len(translations):,}; line n of one has to be "
                "the counterpart of line n of the other"
            )
        for number, (line, translation) in enumerate(zip(lines, translations, strict=True), 1):
            yield f"{one}:{number}", line, translation


def _some(examples: list[Any], source: str, what: str) -> list[Any]:
    if not examples:
        raise ValueError(f"{source} holds no {what}")
    return examples
