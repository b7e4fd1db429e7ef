"""Files of examples: every form as people have it, and one line that says what is wrong with any other."""

import doctest
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.text import examples as examples_module
from clearhead.text.corpus import is_validation
from clearhead.text.example_files import (
    read_chats,
    read_labelled,
    read_pairs,
    read_questions,
    read_tagged,
)
from clearhead.text.examples import (
    Chat,
    Labelled,
    Pair,
    Question,
    Tagged,
    check_labels,
    content,
    label_names,
    majority,
    split_examples,
)

CONTEXT = "Ada wrote the first program. Ada lived in London."
SQUAD = {
    "version": "v2.0",
    "data": [
        {
            "title": "Ada",
            "paragraphs": [
                {
                    "context": CONTEXT,
                    "qas": [
                        {
                            "id": "1",
                            "question": "Where?",
                            "answers": [{"text": "London", "answer_start": 42}],
                        },
                        {"id": "2", "question": "When?", "answers": [], "is_impossible": True},
                    ],
                }
            ],
        }
    ],
}
CONLL = "-DOCSTART- -X- O\n\n# a comment\nAda NNP B-PER\nlives VBZ O\n# # O\n\nLondon NNP B-LOC\n"
CONLL_U = "# sent_id = 1\n1-2\tim\t_\t_\n1\tin\tin\tADP\n2\tdem\tder\tDET\n"
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture
def file(tmp_path) -> Callable[..., str]:
    def write(name: str, data: str | bytes | list[Any]) -> str:
        if isinstance(data, list):
            data = "".join(json.dumps(record) + "\n" for record in data)
        data = data if isinstance(data, bytes) else data.encode("utf-8")
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return str(tmp_path / name)

    return write


# ------------------------------------------------------------------------------------------------- the forms


def test_parallel_text_of_two_files_of_columns_and_of_fields(file):
    pairs = [Pair("Guten Tag", "Good day"), Pair("Danke", "Thanks")]
    german = file("a.de", "Guten Tag\r\nDanke\r\n\r\n")
    english = file("a.en.gz", "Good day\nThanks\n\n")
    notes: list[str] = []
    assert read_pairs(german, english, note=notes.append) == pairs
    assert notes == [f"1 pairs with an empty side left out (first {german}:3)"]
    assert read_pairs(file("a.tsv", "Guten Tag\tGood day\nDanke\tThanks")) == pairs
    assert (
        read_pairs(file("b.tsv", "x\ten\tde\n1\tGood day\tGuten Tag\n2\tThanks\tDanke"), fields=("de", "en"))
        == pairs
    )
    records = [{"source": one.source, "target": one.target, "n": 1} for one in pairs]
    assert read_pairs(file("a.jsonl", records)) == pairs
    assert [pair.place[-9:] for pair in read_pairs(file("b.jsonl", records))] == ["b.jsonl:1", "b.jsonl:2"]


def test_labelled_lines_of_every_kind(file):
    """Quotes, commas and line breaks in a .csv; quotes are text in a .tsv; numbers both ways."""
    texts = [Labelled('He said "no", twice\nor more', "bad"), Labelled("fine", "good")]
    assert (
        read_labelled(file("a.csv", 'label,text\nbad,"He said ""no"", twice\nor more"\ngood,fine\n')) == texts
    )
    assert read_labelled(file("a.tsv", '"ok" then\t1\nno\t0\n'), text="1", label="2") == [
        Labelled('"ok" then', "1"), Labelled("no", "0")
    ]  # fmt: skip
    records = [{"a": "x", "b": "y", "score": 2}, {"a": "x", "b": "z", "score": -0.5}]
    path = file("a.jsonl", records)
    assert read_labelled(path, text="a", second="b", label="score", numbers=True) == [
        Labelled("x", 2.0, "y"), Labelled("x", -0.5, "z")
    ]  # fmt: skip
    assert read_labelled(path, text="b", label=None) == [Labelled("y"), Labelled("z")]
    several = [{"text": "x", "label": ["red", "big"]}, {"text": "y", "label": []}]
    assert [one.label for one in read_labelled(file("b.jsonl", several))] == [("red", "big"), ()]
    long = file("c.csv", f"text,label\n{'x' * 200_000},1\n")
    assert len(read_labelled(long)[0].text) == 200_000


def test_a_glob_reads_its_files_in_order(file, tmp_path):
    for name in "ba":
        file(f"{name}.tsv", f"{name}\t1\n")
    read = read_labelled(str(tmp_path / "*.tsv"), text="1", label="2")
    assert [(one.text, Path(one.place).name) for one in read] == [("a", "a.tsv:1"), ("b", "b.tsv:1")]


def test_conll_of_2003_and_conll_u(file):
    assert read_tagged(file("a.conll", CONLL)) == [
        Tagged(("Ada", "lives", "#"), ("B-PER", "O", "O")), Tagged(("London",), ("B-LOC",))
    ]  # fmt: skip
    assert read_tagged(file("a.conll", CONLL), tag=2)[1].tags == ("NNP",)
    (sentence,) = read_tagged(file("a.conllu", CONLL_U), word=2, tag=4)
    assert (sentence.words, sentence.tags, sentence.place[-10:]) == (
        ("in", "dem"),
        ("ADP", "DET"),
        "a.conllu:3",
    )


def test_questions_of_squad_and_of_lines(file):
    expected = [Question(CONTEXT, "Where?", ((42, "London"),), "1"), Question(CONTEXT, "When?", (), "2")]
    assert read_questions(file("a.json", json.dumps(SQUAD))) == expected
    records = [
        {"id": "1", "context": CONTEXT, "question": "Where?",
         "answers": {"text": ["London"], "answer_start": [42]}},
        {"id": "2", "context": CONTEXT, "question": "When?", "answers": []},
    ]  # fmt: skip
    assert read_questions(file("a.jsonl", records)) == expected


def test_conversations(file):
    (chat,) = read_chats(file("a.jsonl", [{"messages": MESSAGES}]))
    assert chat == Chat(tuple(MESSAGES))
    assert read_chats(file("b.jsonl", [{"talk": MESSAGES}]), field="talk") == [chat]


# ---------------------------------------------------------------------------------------------- the messages


def squad(**changes: Any) -> str:
    record = {"context": CONTEXT, "question": "Where?", "answers": [{"text": "London", "answer_start": 42}]}
    return json.dumps(record | changes)


WRONG = [
    (read_labelled, "a.csv", b"text,label\ngood,\xff\n",
     r"a\.csv:2: byte 0xff at offset 16 is no UTF-8; save the"),
    (read_labelled, "a.csv", "\ufefftext,label".encode("utf-16"),
     r"a\.csv:1: UTF-16; save the file as UTF-8"),
    (read_labelled, "a.csv", " \n\n", r"a\.csv is empty"),
    (read_labelled, "a.csv", "text,label\n", r"a\.csv holds no labelled text"),
    (read_labelled, "a.csv", "text,label\na,b,c\n", r"a\.csv:2: 3 columns, where the first line has 2"),
    (read_labelled, "a.csv", 'text,label\n"a\nb,c\n',
     r"a\.csv:2: unexpected end of data; a field with a comma"),
    (read_labelled, "a.csv", "review,stars\na,b\n",
     r"a\.csv:1: no column 'text', the first line has 'review', 's"),
    (read_labelled, "a.csv", "text,label,text\na,b,c\n", r"a\.csv:1: 2 columns 'text', the first line has"),
    (read_labelled, "a.csv", "text,label\na,b\n\n ,c\n",
     r"a\.csv:4: 'text' is empty; take the line out or fill"),
    (read_labelled, "a.txt", "a b", r"a\.txt is neither \.csv nor .* by its name, as this objective"),
    (read_labelled, "a.jsonl", '{"text": "a"', r"a\.jsonl:1: not JSON, Expecting ',' delimiter in column 13"),
    (read_labelled, "a.jsonl", '\n["a"]', r"a\.jsonl:2: a list, not a JSON object"),
    (read_labelled, "a.jsonl", '{"text": "a", "stars": 1}',
     r"jsonl:1: no field 'label'; its fields: 'text', 'stars'"),
    (read_labelled, "a.jsonl", '{"text": 3, "label": 1}', r"a\.jsonl:1: 'text' is 3, not a text"),
    (read_labelled, "a.jsonl", '{"text": "a", "label": 0.5}',
     r"a\.jsonl:1: 'label' is the number 0\.5; a class"),
    (read_labelled, "a.jsonl", '{"text": "a", "label": null}', r"a\.jsonl:1: 'label' is null, not a text"),
    (read_labelled, "a.jsonl", "[" * 100_000, r"a\.jsonl:1: not JSON, "),
    (read_pairs, "a.tsv", "a\tb\tc\n", r"a\.tsv:1: 3 columns where 2 are needed; name those to read"),
    (read_pairs, "a.jsonl", '{"en": "a"}', r"a\.jsonl:1: no field 'source'; its fields: 'en'"),
    (read_tagged, "a.txt", "Ada B-PER\nlives\n", r"a\.txt:2: 1 column, where the first word has 2"),
    (read_tagged, "a.txt", "Ada\n", r"a\.txt:1: one column, 'Ada'; a word needs a tag beside it"),
    (read_tagged, "a.txt", "Ada\t\n", r"a\.txt:1: the word is 'Ada', its tag ''; neither may be empty"),
    (read_questions, "a.json", '{"data": [}', r"a\.json:1: not JSON, Expecting value in column 11"),
    (read_questions, "a.json", '{"rows": []}',
     r"a\.json: data is no list; SQuAD has data, .* its keys: 'rows'"),
    (read_questions, "a.jsonl", squad(answers="x"),
     r"a\.jsonl:1: 'answers' is no list of objects with a text"),
    (read_questions, "a.jsonl", squad(answers=[{"text": "London", "answer_start": 41}]),
     r"a\.jsonl:1: the answer 'London' is not at 41, where ' Londo' is; it stands at 42"),
    (read_questions, "a.jsonl", squad(answers=[{"text": "Paris", "answer_start": 41}]),
     "stands nowhere in the context"),
    (read_questions, "a.jsonl", squad(answers=[{"text": "London"}]),
     "no field 'answer_start'; its fields: 'text'"),
    (read_chats, "a.json", "{}", r"a\.json is no \.jsonl file; conversations are read from \.jsonl"),
    (read_chats, "a.jsonl", '{"messages": []}', r"a\.jsonl:1: 'messages' is empty, not a list of messages"),
    (read_chats, "a.jsonl", '{"messages": [{"role": "user", "text": "a"}]}',
     r"a\.jsonl:1: messages\[0\] needs a text as its 'content'; it has 'role', 'text'"),
    (read_chats, "a.jsonl", '{"messages": [{"role": "user", "content": "a"}]}',
     "no message of the assistant; the a"),
    (read_chats, "a.jsonl.gz", b"\x1f\x8b\x08", r"a\.jsonl\.gz: the file is broken, Compressed file ended"),
]  # fmt: skip


@pytest.mark.parametrize(("read", "name", "data", "message"), WRONG, ids=range(len(WRONG)))
def test_what_is_wrong_is_said_in_one_line_with_its_place(read, name, data, message, tmp_path):
    """And with what would be right."""
    (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode("utf-8"))
    with pytest.raises(ValueError, match=message) as error:
        read(str(tmp_path / name))
    assert "\n" not in str(error.value)


def test_sides_of_unequal_length_numbers_that_are_none_and_missing_files(file, tmp_path):
    one, other = file("a.de", "a\nb\nc\n"), file("a.en", "a\nb\n")
    with pytest.raises(ValueError, match=r"a\.de has 3 lines and .*a\.en 2; line n of one has to be"):
        read_pairs(one, other)
    with pytest.raises(ValueError, match="the fields 'a' and 'b' have no use where each file is a side"):
        read_pairs(one, other, fields=("a", "b"))
    for value in ("good", "nan", "1_0", "inf"):
        with pytest.raises(ValueError, match=rf"n\.csv:2: 'label' is '{value}', not a finite number"):
            read_labelled(file("n.csv", f"text,label\na,{value}\n"), numbers=True)
    with pytest.raises(ValueError, match=r"a\.tsv:1: 2 columns, there is no column 3"):
        read_labelled(file("a.tsv", "a\tb\n"), text="1", label="3")
    with pytest.raises(FileNotFoundError, match=r"no file 'nowhere\.csv' "):
        read_labelled("nowhere.csv")
    with pytest.raises(ValueError, match=r"is a folder; name a file, or several as in .*\*\.jsonl"):
        read_chats(str(tmp_path))


SOUND = {
    "a.csv": (read_labelled, 'text,label\n"a, b",x\nc,y\n'),
    "a.tsv": (read_pairs, "a b\tc d\ne\tf\n"),
    "b.jsonl": (read_labelled, '{"text": "a", "label": 1}\n{"text": "é", "label": 2}\n'),
    "a.conll": (read_tagged, CONLL),
    "a.json": (read_questions, json.dumps(SQUAD)),
    "c.jsonl": (read_chats, json.dumps({"messages": MESSAGES})),
}


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(SOUND)), st.data())
def test_an_injured_file_is_read_or_refused_in_one_line_that_names_it(tmp_path_factory, name, data):
    """Bytes changed, cut out or put in anywhere: never another error, never a partial list without a word."""
    read, text = SOUND[name]
    injured = bytearray(text.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(injured)))
        cut = data.draw(st.integers(0, 3))
        injured[at : at + cut] = data.draw(
            st.sampled_from(
                [b"", b"\xff", b'"', b"\n", b"\0", b"\t", b"{", b",", b"\xed\xa0\x80", b"1", b"\\ud800"]
            )
        )
    path = tmp_path_factory.mktemp("injured") / name
    path.write_bytes(injured)
    try:
        found = read(str(path))
    except ValueError as error:
        assert name in str(error) and "\n" not in str(error)
    else:
        assert found and all(content(one).encode("utf-8") for one in found)


# ------------------------------------------------------------------------------------------ splits and labels


def test_the_split_is_a_function_of_the_content():
    """The hash of documents; a question goes where its text goes."""
    pairs = [Pair(f"document {n}", "x") for n in range(100)]
    train, validation = split_examples(pairs)
    assert [pair.source for pair in validation] == [f"document {n}" for n in (6, 10, 39, 77, 98)]
    assert train + validation == sorted(
        pairs, key=lambda pair: (is_validation(pair.source), pairs.index(pair))
    )
    questions = [Question(f"document {n}", str(n), place=str(k)) for n in (6, 7) for k in range(3)]
    assert [one.context for one in split_examples(questions)[1]] == ["document 6"] * 3
    with pytest.raises(
        ValueError, match=r"5 examples are too few, .* leaves none for validation; give a valid"
    ):
        split_examples(pairs[:5])


def test_label_names_and_labels_that_are_not_among_them():
    examples = [Labelled("a", "10", place="f:1"), Labelled("b", "9"), Labelled("c", "no")]
    assert label_names(examples) == ["9", "10", "no"]
    assert label_names([Tagged(("a", "b"), ("X", "B"))]) == ["B", "X"]
    assert label_names([Labelled("a", ("x", "y")), Labelled("b", ())]) == ["x", "y"]
    with pytest.raises(
        ValueError, match="f:1: label '10' is none of the 2 of the training examples: '9', 'no'"
    ):
        check_labels(examples, ["9", "no"])
    with pytest.raises(ValueError, match=r"the labels are of two kinds, a word \(f:1\) and a list \(\)"):
        label_names([*examples, Labelled("d", ("x",))])
    with pytest.raises(ValueError, match="the 1 examples have one label, '10'; learning needs two"):
        label_names(examples[:1])
    with pytest.raises(ValueError, match="f:9: the label is a number, not the name of a class"):
        label_names([Labelled("a", 1.5, place="f:9")])
    assert majority(examples[:2]) == ("9", 0.5)


def test_documented_examples_hold():
    assert doctest.testmod(examples_module).failed == 0
