"""What published models say of texts, through the library and the verbs, is what `transformers` computes."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead import load
from clearhead.cli import main
from clearhead.cli_tasks import words_of
from clearhead.text.examples import Question
from clearhead.training.predict import answer, classify, label, make_reader, translate, without_blanks
from tiny_published import make_bert

TAGS = ["O", "B-PER", "I-PER", "B-LOC"]


@pytest.fixture(scope="module")
def made(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any, Any]]:
    """Make a folder with a random model of a class and its tokenizer; return it with both, as theirs."""
    home = tmp_path_factory.mktemp("published")

    def make(kind: str, **settings: Any) -> tuple[Path, Any, Any]:
        folder = home / (kind + "-".join(map(str, settings)))
        return folder, *make_bert(transformers, folder, kind, **settings)

    return make


def reader_of(folder: Path) -> Any:
    model, tokenizer = load(folder)
    assert tokenizer is not None
    return make_reader(folder, model, tokenizer)


TEXTS = ["the cat sees a dog .", "an old house", "ann sees the small green tree under paris , bob ?"]


@torch.no_grad()
def test_classes_have_the_probabilities_of_transformers(made: Any) -> None:
    names = {0: "bad", 1: "good", 2: "so so"}
    folder, theirs, tokenizer = made("BertForSequenceClassification", id2label=names)
    reader = reader_of(folder)
    said = classify(reader, TEXTS, batch_size=2)
    for text, labels in zip(TEXTS, said, strict=True):
        expected = theirs(**tokenizer(text, return_tensors="pt")).logits[0].softmax(-1)
        for number, name in names.items():
            assert labels[name] == pytest.approx(expected[number].item(), abs=1e-5)
        assert list(labels.values()) == sorted(labels.values(), reverse=True)
    pair = classify(reader, TEXTS[:1], TEXTS[1:2])[0]
    expected = theirs(**tokenizer(TEXTS[0], TEXTS[1], return_tensors="pt")).logits[0].softmax(-1)
    assert pair["good"] == pytest.approx(expected[1].item(), abs=1e-5)


@torch.no_grad()
def test_a_models_config_says_what_its_outputs_mean(made: Any) -> None:
    several = {"problem_type": "multi_label_classification", "num_labels": 3}
    folder, theirs, tokenizer = made("BertForSequenceClassification", **several)
    expected = theirs(**tokenizer(TEXTS[0], return_tensors="pt")).logits[0].sigmoid()
    said = classify(reader_of(folder), TEXTS[:1])[0]
    assert said["LABEL_2"] == pytest.approx(expected[2].item(), abs=1e-5)
    folder, theirs, tokenizer = made("BertForSequenceClassification", problem_type="regression", num_labels=1)
    expected = theirs(**tokenizer(TEXTS[0], return_tensors="pt")).logits[0, 0].item()
    assert classify(reader_of(folder), TEXTS[:1]) == [{"value": pytest.approx(expected, abs=1e-5)}]


@torch.no_grad()
def test_words_have_the_tags_of_transformers(made: Any) -> None:
    folder, theirs, tokenizer = made("BertForTokenClassification", id2label=dict(enumerate(TAGS)))
    sentences = [words_of(text) for text in TEXTS]
    for words, tags in zip(sentences, label(reader_of(folder), sentences), strict=True):
        encoded = tokenizer(words, is_split_into_words=True, return_tensors="pt")
        values, found = theirs(**encoded).logits[0].softmax(-1).max(-1)
        firsts = [encoded.word_ids().index(number) for number in range(len(words))]
        assert [tag for _, tag, _ in tags] == [TAGS[int(found[place])] for place in firsts]
        assert tags[0].probability == pytest.approx(values[firsts[0]].item(), abs=1e-5)
    long = label(reader_of(folder), [["cat"] * 30])[0]
    assert [tag.tag is None for tag in long] == [False] * 22 + [True] * 8


@torch.no_grad()
def test_answers_are_the_best_piece_by_transformers(made: Any) -> None:
    folder, theirs, tokenizer = made("BertForQuestionAnswering")
    context = "ann sees an old house in paris and a small dog"
    encoded = tokenizer("the cat ?", context, return_tensors="pt", return_offsets_mapping=True)
    offsets = encoded.pop("offset_mapping")[0].tolist()
    output = theirs(**encoded)
    start, end = output.start_logits[0].softmax(-1), output.end_logits[0].softmax(-1)
    inside = [place for place, number in enumerate(encoded.sequence_ids()) if number == 1]
    _, first, last = max((start[i] * end[j], i, j) for i in inside for j in inside if i <= j)
    found = answer(reader_of(folder), [Question(context, "the cat ?")])[0]
    assert (found.start, found.end) == (offsets[first][0], offsets[last][1])
    assert found.text == context[found.start : found.end]
    assert found.probability == pytest.approx((start[first] * end[last]).item(), abs=1e-5)
    everywhere = answer(reader_of(folder), [Question(" ".join([context] * 3), "the cat ?")], may_be_none=True)
    assert everywhere[0].text in " ".join([context] * 3)


# -------------------------------------------------------------------------------------------------- the verbs


@pytest.fixture
def clear(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run a command line; return what it wrote to stdout."""

    def run(*words: str | Path, stdin: str = "") -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        capsys.readouterr()
        main([*map(str, words), "--device", "cpu"])
        return capsys.readouterr().out

    return run


def refused(capsys: pytest.CaptureFixture[str], clear: Callable[..., str], *words: str | Path) -> str:
    with pytest.raises(SystemExit) as stopped:
        clear(*words)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.count("\n") == 1
    return said


def test_classify_speaks_to_people_and_to_programs(made: Any, clear: Any, tmp_path: Path) -> None:
    folder, _, _ = made("BertForSequenceClassification", id2label={0: "bad", 1: "good", 2: "so so"})
    reader = reader_of(folder)
    expected = classify(reader, TEXTS)
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS) + "\n")
    for words, stdin in ((TEXTS, ""), (["-"], "\n".join(TEXTS)), (["--file", tmp_path / "texts.txt"], "")):
        found = json.loads(clear("classify", folder, *words, "--json", stdin=stdin))
        assert found["kind"] == "class"
        assert [row["text"] for row in found["texts"]] == TEXTS
        assert [list(row["labels"]) for row in found["texts"]] == [list(labels) for labels in expected]
    best, sure = next(iter(expected[0].items()))
    assert clear("classify", folder, TEXTS[0], "--top-k", "1") == f"{best} {sure:.4f}  | {TEXTS[0]}\n"


@pytest.mark.parametrize(
    ("text", "start", "end", "expected"),
    [
        ("lies in Cairo now", 7, 13, (8, 13)),
        ("a  b \n", 1, 6, (3, 4)),
        ("ab", 0, 2, (0, 2)),
        ("a  b", 1, 3, (1, 3)),
    ],
)
def test_an_answer_has_no_blanks_at_its_ends(
    text: str, start: int, end: int, expected: tuple[int, int]
) -> None:
    """The tokens of many vocabularies begin with the blank before a word; an answer of blanks stays."""
    assert without_blanks(text, start, end) == expected
    first, last = expected
    assert text[first:last] == text[start:end].strip() or not text[start:end].strip()


def test_label_shows_words_and_entities(made: Any, clear: Any) -> None:
    folder, _, _ = made("BertForTokenClassification", id2label=dict(enumerate(TAGS)))
    tags = label(reader_of(folder), [words_of(TEXTS[0])])[0]
    lines = clear("label", folder, TEXTS[0]).splitlines()
    assert [line.split()[:2] for line in lines] == [[tag.word, tag.tag] for tag in tags]
    found = json.loads(clear("label", folder, TEXTS[0], "--json"))["texts"][0]
    assert [word["word"] for word in found["words"]] == words_of(TEXTS[0])
    assert {entity["kind"] for entity in found["entities"]} <= {"PER", "LOC"}


def test_answer_shows_the_piece(made: Any, clear: Any, tmp_path: Path) -> None:
    folder, _, _ = made("BertForQuestionAnswering")
    context = "ann sees an old house in paris"
    (tmp_path / "context.txt").write_text(context)
    found = answer(reader_of(folder), [Question(context, "the cat ?")])[0]
    line = f"{found.probability:.4f}  {found.text}\n"
    assert clear("answer", folder, "the cat ?", "--context", context) == line
    assert clear("answer", folder, "-", "--context-file", tmp_path / "context.txt", stdin="the cat ?") == line
    said = json.loads(clear("answer", folder, "the cat ?", "--context", context, "--json"))["answers"][0]
    assert (said["question"], said["text"], said["start"]) == ("the cat ?", found.text, found.start)


def test_translate_says_what_generate_says(transformers: Any, made: Any, tmp_path: Path, clear: Any) -> None:
    _, _, tokenizer = made("BertForQuestionAnswering")
    torch.manual_seed(0)
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "max_position_embeddings": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "vocab_size": len(tokenizer)}
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
    widths = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "init_std": 0.5, "forced_eos_token_id": None}
    config = transformers.BartConfig(**sizes, **heads, **ids, **widths)
    theirs = transformers.BartForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path / "bart")
    tokenizer.save_pretrained(tmp_path / "bart")
    encoded = tokenizer(TEXTS[0], return_tensors="pt")
    expected = theirs.generate(
        input_ids=encoded.input_ids, max_new_tokens=12, num_beams=1, do_sample=False, forced_eos_token_id=None
    )
    text = tokenizer.decode(expected[0], skip_special_tokens=True)
    reader = reader_of(tmp_path / "bart")
    assert translate(reader, TEXTS[:1], max_new_tokens=12)[0].split() == text.split()
    said = clear("translate", tmp_path / "bart", TEXTS[0], "--max-new-tokens", "12")
    assert said.split() == text.split()


def test_a_model_with_another_head_names_its_verb(made: Any, clear: Any, capsys: Any) -> None:
    folder, _, _ = made("BertForQuestionAnswering")
    for verb in ("classify", "label", "translate"):
        said = refused(capsys, clear, verb, folder, "the cat")
        assert f"for something else than {verb}" in said and "use clearhead answer" in said
    masked, _, _ = made("BertForMaskedLM")
    assert "head 'masked'" in refused(capsys, clear, "classify", masked, "the cat")


def test_mistakes_are_one_line(made: Any, clear: Any, capsys: Any, tmp_path: Path) -> None:
    folder, _, _ = made("BertForQuestionAnswering")
    (tmp_path / "texts.txt").write_text("a\n")
    cases = {
        "--context TEXT or --context-file FILE": ("answer", folder, "why ?"),
        "the context is empty": ("answer", folder, "why ?", "--context", " "),
        "--top-k 0 must be at least 1": ("classify", folder, "a", "--top-k", "0"),
        "give one of them": ("classify", folder, "a", "--file", tmp_path / "texts.txt"),
        "there is no nowhere": ("classify", "nowhere", "a"),
        "nothing.txt: no such file": ("classify", folder, "--file", "nothing.txt"),
    }
    for message, words in cases.items():
        assert message in refused(capsys, clear, *words)
    with pytest.raises(ValueError, match="' ' has no words to label"):
        words_of(" ")
