"""Examples as ids: equal to what the `tokenizers` library makes of them, and right when worked by hand."""

import doctest
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.text import encode_examples as module
from clearhead.text import frame as frame_module
from clearhead.text.batches import IGNORED
from clearhead.text.chat import ChatTemplate
from clearhead.text.encode_examples import (
    chat_template,
    encode_alike,
    encode_chats,
    encode_labelled,
    encode_pairs,
    encode_questions,
    encode_tagged,
    first_tokens,
    longest_first,
    with_chat_template,
)
from clearhead.text.examples import Chat, Labelled, Pair, Question, Tagged
from clearhead.text.foreign import AnyTokenizer, ForeignTokenizer, open_tokenizer
from clearhead.text.frame import frame_of, padding
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.usage import Usage
from text.conftest import END, MIXED_TEXT
from text.test_foreign import byte_level_with_extras, sentence_piece_bpe, unigram, word_piece

BYTES = {i: bytes([i]) for i in range(256)}
WORDS = ["the", "fox", "doesn't", "jump", "over", "3.14", "lazy", "naïve", "façade,", "東京", "thesis"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def library() -> tokenizers.Tokenizer:
    return word_piece()


@pytest.fixture(scope="module")
def bert(library) -> ForeignTokenizer:
    return ForeignTokenizer(library.to_str())


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return Tokenizer(BYTES | {256: b"th", 257: b" th"}, [(b"t", b"h"), (b" ", b"th")], [END])


def sentences(max_size: int = 30) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(WORDS), min_size=1, max_size=max_size).map(" ".join)


# ------------------------------------------------------------------------------------------------- frames


def test_frames_of_published_kinds_and_of_our_own(bert, ours):
    """Those of the library are found, the others made of what special tokens there are."""
    assert frame_of(bert).fill([7], [8, 9]) == ([2, 7, 3, 8, 9, 3], [0, 0, 0, 1, 1, 1])
    assert frame_of(bert).fill([7]) == ([2, 7, 3], [0, 0, 0])
    assert frame_of(ours).fill([7], [8]) == ([7, 258, 8, 258], [0] * 4)
    assert frame_of(ours).fill([7])[0] == [7, 258] and padding(ours) == 258 and padding(bert) == 0
    roberta = byte_level_with_extras()
    roberta.post_processor = tokenizers.processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    assert frame_of(ForeignTokenizer(roberta.to_str())).fill([7], [8])[0] == [0, 7, 1, 1, 8, 1]
    t5 = ForeignTokenizer(unigram().to_str())  # it frames one text, and of two only each by its end
    assert frame_of(t5).fill([7])[0] == [7, 1] and frame_of(t5).fill([7], [8])[0] == [7, 1, 8, 1]
    usage = Usage({"tokenizer_config.json": {"eos_token": "</s>"}})
    llama = ForeignTokenizer(sentence_piece_bpe().to_str(), usage)
    assert frame_of(llama).fill([7])[0] == [1, 7] and frame_of(llama).fill([7], [8])[0] == [1, 7, 2, 8, 2]
    classes = Tokenizer(BYTES, [], ["[PAD]", "[CLS]", "[SEP]"])
    assert (
        frame_of(classes).fill([7], [8]) == ([257, 7, 258, 8, 258], [0, 0, 0, 1, 1])
        and padding(classes) == 256
    )
    begun = Tokenizer(BYTES, [], ["<s>", "</s>"], begin=["<s>"], end=["</s>"])
    assert frame_of(begun).fill([7], [8])[0] == [256, 7, 257, 8, 257]
    assert frame_of(Tokenizer(BYTES, [])).fill([7])[0] == [7]
    with pytest.raises(ValueError, match=r"no special token to stand between two texts; give it '<\|endoft"):
        frame_of(Tokenizer(BYTES, [])).fill([7], [8])


@pytest.mark.parametrize("make", [word_piece, unigram, sentence_piece_bpe, byte_level_with_extras])
def test_offsets_of_a_foreign_tokenizer_are_its_library_s(make):
    """Without its post-processor, which cuts spaces off the tokens of byte-level BPE."""
    library = make()
    ids, offsets = ForeignTokenizer(library.to_str()).encode_offsets(MIXED_TEXT)
    encoding = library.encode(MIXED_TEXT, add_special_tokens=False)
    assert ids == encoding.ids
    spaces = make is byte_level_with_extras
    for (begin, end), (theirs, their_end) in zip(offsets, encoding.offsets, strict=True):
        assert end == their_end and (begin == theirs or (spaces and MIXED_TEXT[begin:theirs].isspace()))


def test_offsets_of_ours_are_those_of_the_library_too(trained):
    """Byte-level BPE, also where a character is cut by two tokens."""
    ours = trained["gpt2"]
    for text in (MIXED_TEXT, "", "é", "x東京x"):
        ids, offsets = ours.encode_offsets(text)
        assert ids == ours.encode(text, "text")
        assert all(
            ours.token_bytes(i).decode("utf-8", "ignore") in text[a:b]
            for i, (a, b) in zip(ids, offsets, strict=True)
        )
        assert [a for a, _ in offsets[:1]] == [0] * bool(text) and all(
            b == len(text) for _, b in offsets[-1:]
        )
    with pytest.raises(ValueError, match=r"changes the text \(nfc\): tokens have no places in it"):
        Tokenizer(BYTES, [], normalise=["nfc"]).encode_offsets("a")


# ----------------------------------------------------------------------------------------- labels and tags


@settings(deadline=None, max_examples=60)
@given(sentences(), sentences(), st.booleans(), st.integers(6, 40))
def test_labelled_texts_are_encoded_and_cut_as_the_library_does(first, second, pair, max_len):
    library = word_piece_once()
    library.enable_truncation(max_len)
    expected = library.encode(first, second if pair else None)
    library.no_truncation()
    example = Labelled(first, "b", second if pair else None)
    (row,), report = encode_labelled([example], bert_once(), max_len, ["a", "b"])
    assert row.inputs == expected.ids and row.targets == 1
    assert (row.token_types or [0] * len(row.inputs)) == expected.type_ids
    whole = library.encode(first, second if pair else None)
    assert (report.longest, report.lost) == (len(whole.ids), len(whole.ids) - len(expected.ids))
    assert report.cut == (report.lost > 0)


_kept: dict[str, Any] = {}


def word_piece_once() -> tokenizers.Tokenizer:
    return _kept.setdefault("library", word_piece())


def bert_once() -> ForeignTokenizer:
    return _kept.setdefault("bert", ForeignTokenizer(word_piece_once().to_str()))


def test_targets_of_classes_of_several_labels_and_of_numbers(ours):
    examples = [Labelled("x", ("red",)), Labelled("x", ()), Labelled("x", ("big", "red"))]
    rows, report = encode_labelled(examples, ours, 10, ["big", "red"])
    assert [row.targets for row in rows] == [[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]]
    assert report.summary() == "3 examples; the longest has 2 tokens"
    assert encode_labelled([Labelled("x", 2.5)], ours, 10)[0][0].targets == 2.5
    assert encode_labelled([Labelled("x")], ours, 10)[0][0].targets == 0
    with pytest.raises(ValueError, match="f:3: label 'c' is none of 'a', 'b'"):
        encode_labelled([Labelled("x", "c", place="f:3")], ours, 10, ["a", "b"])
    with pytest.raises(
        ValueError, match="context_length=1 leaves no room for a text: 1 tokens stand around it"
    ):
        encode_labelled([Labelled("x", "a")], ours, 1, ["a", "b"])


def test_a_special_token_in_an_example_is_text(ours, bert):
    rows, _ = encode_labelled([Labelled(f"a{END}b", 1.0)], ours, 100)
    assert rows[0].inputs.count(258) == 1 and ours.decode(rows[0].inputs) == f"a{END}b{END}"
    rows, _ = encode_labelled([Labelled("the [SEP] fox", 1.0)], bert, 100)
    assert rows[0].inputs.count(3) == 1


@pytest.mark.parametrize("kind", ["bert", "ours"])
def test_tags_stand_at_the_first_token_of_their_word(kind, bert, ours):
    tokenizer: AnyTokenizer = bert if kind == "bert" else ours
    tags = tuple(str(n % 3) for n in range(len(WORDS)))
    (row,), _ = encode_tagged([Tagged(tuple(WORDS), tags)], tokenizer, 200, ["0", "1", "2"])
    assert isinstance(row.targets, list) and row.offsets is not None
    positions = [i for i, target in enumerate(row.targets) if target != IGNORED]
    assert [str(row.targets[i]) for i in positions] == list(tags)
    assert positions == first_tokens(WORDS, row.offsets)
    text = " ".join(WORDS)
    for word, position in zip(WORDS, positions, strict=True):
        begin, end = row.offsets[position]
        assert word.startswith(text[begin:end].lstrip()) and text[begin:end].strip()
    (cut,), report = encode_tagged([Tagged(tuple(WORDS), tags)], tokenizer, 9, ["0", "1", "2"])
    assert cut.inputs[:8] == row.inputs[:8] and report.cut == 1 and report.lost == len(row.inputs) - 9
    with pytest.raises(ValueError, match="f:1: tag 'X' is none of '0', '1'"):
        encode_tagged([Tagged(("a",), ("X",), "f:1")], tokenizer, 9, ["0", "1"])


def test_a_token_that_joins_two_words_is_refused():
    joined = Tokenizer(BYTES | {256: b"a ", 257: b"a b"}, [(b"a", b" "), (b"a ", b"b")], splitter="none")
    with pytest.raises(
        ValueError, match="makes one token of the words 'a b'; tags need one that cuts at spaces"
    ):
        encode_tagged([Tagged(("a", "b"), ("X", "Y"))], joined, 9, ["X", "Y"])


# -------------------------------------------------------------------------------------- pairs and questions


def test_a_translation_is_shifted_and_ends(ours, bert):
    (row,), _ = encode_pairs([Pair("ab", "cd")], ours, 10, 10)
    assert row.source == [97, 98, 258] and row.inputs == [258, 99, 100] and row.targets == [99, 100, 258]
    (row,), report = encode_pairs([Pair("abcdef", "ghij")], ours, 3, 4, start=5)
    assert (
        row.source == [97, 98, 258]
        and row.inputs == [5, 103, 104, 105]
        and row.targets == [103, 104, 105, 258]
    )
    assert (report.cut, report.lost) == (1, 5)
    (row,), _ = encode_pairs([Pair("ab", "the")], ours, 10, 10, target_tokenizer=bert)
    assert row.inputs[:2] == [2, 2] and isinstance(row.targets, list) and row.targets[-1] == 3
    with pytest.raises(ValueError, match="of the translation has no special token that ends a text"):
        encode_pairs([Pair("a", "b")], Tokenizer(BYTES, []), 10, 10)
    (row,), _ = encode_alike([Pair("ab", "cd")], ours, 10)
    assert (row.inputs, row.source) == ([97, 98, 258], [99, 100, 258])


@settings(deadline=None, max_examples=60)
@given(sentences(8), sentences(60), st.integers(24, 60), st.integers(1, 6), st.data())
def test_windows_over_a_long_context_are_the_library_s_and_hold_the_answer(
    question, context, max_len, stride, data
):
    """Every window; each answer is found again from the tokens of every window that holds all of it."""
    words = context.split()
    first = data.draw(st.integers(0, len(words) - 1))
    answer = " ".join(words[first : first + data.draw(st.integers(1, 3))])
    start = len(" ".join([*words[:first], ""]))
    library = word_piece_once()
    kept = bert_once().encode(question)[: max(1, max_len // 4)]
    asked = Question(context, question, ((start, answer),))
    rows, report = encode_questions([asked], bert_once(), max_len, stride)
    assert report.rows == len(rows) and {row.example for row in rows} == {0}
    if len(kept) == len(bert_once().encode(question)):
        library.enable_truncation(max_len, stride=stride, strategy="only_second")
        encoding = library.encode(question, context)
        library.no_truncation()
        assert [row.inputs for row in rows] == [one.ids for one in (encoding, *encoding.overflowing)]
        assert [row.token_types for row in rows] == [
            one.type_ids for one in (encoding, *encoding.overflowing)
        ]
    for row in rows:
        assert row.offsets is not None and isinstance(row.targets, tuple)
        spans = [offset for offset in row.offsets if offset != (-1, -1)]
        a, b = row.targets
        if spans[0][0] <= start and start + len(answer) <= spans[-1][1]:
            assert context[row.offsets[a][0] : row.offsets[b][1]] == answer
        else:
            assert row.targets == (0, 0)
    if len(answer) < stride:
        assert any(row.targets != (0, 0) for row in rows)


def test_questions_without_an_answer_and_long_ones(ours):
    (row,), report = encode_questions([Question("some text", "q" * 100)], ours, 40)
    assert row.targets == (0, 0) and row.inputs[:11] == [113] * 10 + [258] and report.lost == 90
    text = "ab the cd"
    (row,), _ = encode_questions([Question(text, "what", ((3, "the"),))], ours, 60)
    assert row.offsets is not None and isinstance(row.targets, tuple)
    a, b = row.targets
    assert text[row.offsets[a][0] : row.offsets[b][1]].strip() == "the"


@settings(deadline=None)
@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 60))
def test_cutting_two_texts_keeps_all_the_room_allows(first, second, room):
    kept = longest_first(first, second, room)
    assert kept[0] <= first and kept[1] <= second and sum(kept) == min(first + second, room)


# -------------------------------------------------------------------------------------------------- chats

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi<|im_end|>"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "So long"},
]


def test_only_the_answers_of_a_conversation_are_learned():
    """With what ends them; a special token spelled by a user stays text."""
    tokenizer = Tokenizer(BYTES, [], ["<|im_start|>", "<|im_end|>"])
    (row,), _ = encode_chats([Chat(tuple(TALK))], tokenizer, 500, ChatTemplate(CHATML))
    assert isinstance(row.targets, list)
    said = [int(target) for target in row.targets if target != IGNORED]
    assert tokenizer.decode(said) == "Hello<|im_end|>So long<|im_end|>"
    whole = ChatTemplate(CHATML).encode(TALK, tokenizer, add_generation_prompt=False)
    assert row.inputs == whole[:-1] and row.inputs.count(257) == 5
    assert all(t in (IGNORED, i) for t, i in zip(row.targets, whole[1:], strict=True))
    prompt = ChatTemplate(CHATML).encode(TALK[:2], tokenizer)
    assert row.targets.index(ord("H")) == len(prompt) - 1


def test_a_tokenizer_without_a_template_gets_a_plain_one_and_long_conversations_are_cut(ours):
    chat = Chat(({"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}))
    (row,), _ = encode_chats([chat], ours, 500)
    assert isinstance(row.targets, list)
    assert ours.decode(row.inputs) == f"user: Hi\nassistant: Yes{END}"
    assert ours.decode([int(t) for t in row.targets if t != IGNORED]) == f" Yes{END}"
    rows, report = encode_chats([chat, chat], ours, 21)
    assert len(rows) == 2 and report.cut == 2
    rows, report = encode_chats([chat, chat], ours, 10)
    assert rows == [] and report.left_out == 2 and "2 left out, nothing to learn" in report.summary()
    assert chat_template(ours, CHATML).source == CHATML
    with pytest.raises(ValueError, match=r"no special token that ends an answer; give it '<\|endoftext"):
        chat_template(Tokenizer(BYTES, []))


def test_the_plain_template_goes_with_a_tokenizer_that_had_none(ours, tmp_path):
    """Saved, opened again, and used in a conversation as it was in training."""
    with_chat_template(ours).save(tmp_path)
    again = open_tokenizer(tmp_path)
    assert again.fingerprint == ours.fingerprint and with_chat_template(again) is again
    prompt = ChatTemplate.of(again).render([{"role": "user", "content": "Hi"}])
    assert prompt == "user: Hi\nassistant:"
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
    whole = ChatTemplate.of(again).render(talk, add_generation_prompt=False)
    assert whole == f"user: Hi\nassistant: Yes{END}\n"


def test_a_template_that_rewrites_earlier_turns_is_refused():
    forgetful = "{% for m in messages %}{{ m.role if loop.last else '' }}{{ m.content }}|{% endfor %}"
    tokenizer = Tokenizer(BYTES, [], [END])
    with pytest.raises(
        ValueError, match=r"f:1: the chat template writes what comes before messages\[1\] diff"
    ):
        encode_chats([Chat(tuple(TALK[1:3]), "f:1")], tokenizer, 500, ChatTemplate(forgetful))


def test_documented_examples_hold():
    assert doctest.testmod(module).failed == doctest.testmod(frame_module).failed == 0
