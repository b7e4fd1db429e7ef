"""The verbs that use what was trained: classify texts, label words, answer questions, translate.

Each is a few lines around a function of training/predict.py. `place` is the folder of a run, a published
model with the right head, or, with --download, a name on the Hugging Face Hub. Texts come from the command
line, from a file, one a line, or from standard input.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from clearhead.cli_models import Json, lines_of, open_speaker, read_texts

if TYPE_CHECKING:
    from clearhead.training.predict import Reader

Texts = Positional[tuple[str, ...]]

FITTING = {  # (shape, head) -> the verb that uses such a model; "": any other shape
    ("encoder-decoder", "lm"): "translate",
    ("", "sequence"): "classify",
    ("", "token"): "label",
    ("", "span"): "answer",
    ("", "embedding"): "embed",
    ("decoder", "lm"): "generate",
}


def open_reader(verb: str, place: str, device: str, download: bool) -> "Reader":
    """The model at a place for this verb; one with another head is a ValueError that names its verb."""
    from clearhead.training.predict import make_reader

    model, tokenizer = open_speaker(place, device, download)
    config = model.config
    fitting = FITTING.get((config.shape, config.head)) or FITTING.get(("", config.head))
    if fitting != verb:
        advice = f"use clearhead {fitting}" if fitting else "train one: clearhead help train tells how"
        raise ValueError(
            f"{place} is for something else than {verb}: its shape is {config.shape!r}, "
            f"its head {config.head!r}; {advice}"
        )
    return make_reader(place, model, tokenizer)


def given_texts(texts: Sequence[str], file: Path | None) -> list[str]:
    """The texts of a command line, of a file, or of standard input: one of them."""
    if file is not None:
        if texts:
            raise ValueError(f"--file {file} and {len(texts)} texts were both given; give one of them")
        return lines_of(file)
    return filled(read_texts(texts or ("-",)))


def filled(texts: list[str]) -> list[str]:
    """The texts; an empty one, as of a variable that is not set, is a ValueError."""
    for number, text in enumerate(texts, 1):
        if not text.strip():
            raise ValueError(f"text {number} is empty")
    return texts


def classify(
    place: Positional[str],
    texts: Texts = (),
    file: Path | None = None,
    second: str | None = None,
    top_k: int | None = None,
    device: str = "auto",
    download: bool = False,
    as_json: Json = False,
) -> None:
    """Say which class a text is of, with probabilities; or its number, or every label that applies.

    Args:
        place: a run, a published classifier, or a name with --download.
        texts: the texts; - reads them from standard input, one a line.
        file: read the texts from this file, one a line.
        second: another text that goes with each, for models that compare two.
        top_k: how many labels to show for each text; by default all.
        device: auto, cpu or cuda.
        download: fetch the model by its name.
        as_json: print one JSON object.
    """
    from clearhead.training import predict

    if top_k is not None and top_k < 1:
        raise ValueError(f"--top-k {top_k} must be at least 1")
    given = given_texts(texts, file)
    reader = open_reader("classify", place, device, download)
    said = predict.classify(reader, given, None if second is None else [second] * len(given))
    shown = [dict(list(labels.items())[:top_k]) for labels in said]
    if as_json:
        rows = [{"text": text, "labels": labels} for text, labels in zip(given, shown, strict=True)]
        print(json.dumps({"kind": reader.kind, "texts": rows}, ensure_ascii=False))
        return
    for text, labels in zip(given, shown, strict=True):
        if reader.kind == "number":
            print(f"{labels['value']:10.4f}  {text}")
            continue
        print("  ".join(f"{name} {value:.4f}" for name, value in labels.items()) + f"  | {text}")


def label(
    place: Positional[str],
    texts: Texts = (),
    file: Path | None = None,
    device: str = "auto",
    download: bool = False,
    as_json: Json = False,
) -> None:
    """Give each word of a text its tag: names of people and places, parts of speech, what it was trained for.

    Args:
        place: a run, a published model that labels tokens, or a name with --download.
        texts: the texts; - reads them from standard input, one a line.
        file: read the texts from this file, one a line.
        device: auto, cpu or cuda.
        download: fetch the model by its name.
        as_json: print one JSON object, with the entities where tags have B- and I-.
    """
    from clearhead.training import predict
    from clearhead.training.scores import entities

    given = given_texts(texts, file)
    reader = open_reader("label", place, device, download)
    sentences = [words_of(text) for text in given]
    said = predict.label(reader, sentences)
    chunked = all(name == "O" or re.match(r"[BIES]-.", name) for name in reader.labels)
    if not as_json:
        for number, tags in enumerate(said):
            if number:
                print()
            width = max(len(word) for word, _, _ in tags)
            for word, tag, sure in tags:
                print(f"{word:<{width}}  {tag or '(not read: the text is too long)'}  {sure:.4f}")
        return
    rows = []
    for text, tags in zip(given, said, strict=True):
        row: dict[str, object] = {"text": text, "words": [tag._asdict() for tag in tags]}
        if chunked:
            found = entities([tag or "O" for _, tag, _ in tags])
            row["entities"] = [
                {"kind": kind, "words": " ".join(word for word, _, _ in tags[first : last + 1])}
                for kind, first, last in found
            ]
        rows.append(row)
    print(json.dumps({"texts": rows}, ensure_ascii=False))


def words_of(text: str) -> list[str]:
    """The words of a text, punctuation apart, as in the corpora of tagged words; none is a ValueError.

    >>> words_of("Mr. O'Neill, don't!")
    ['Mr', '.', "O'Neill", ',', "don't", '!']
    """
    words = re.findall(r"\w+(?:['’-]\w+)*|[^\w\s]", text)
    if not words:
        raise ValueError(f"{text!r:.60} has no words to label")
    return words


def answer(
    place: Positional[str],
    questions: Texts = (),
    context: str | None = None,
    context_file: Path | None = None,
    or_none: bool = False,
    device: str = "auto",
    download: bool = False,
    as_json: Json = False,
) -> None:
    """Answer questions with a piece of a text.

    Args:
        place: a run, a published model that answers questions, or a name with --download.
        questions: the questions; - reads them from standard input, one a line.
        context: the text that holds the answer.
        context_file: a file with that text.
        or_none: say nothing where the model finds no answer.
        device: auto, cpu or cuda.
        download: fetch the model by its name.
        as_json: print one JSON object.
    """
    from clearhead.text.examples import Question
    from clearhead.training import predict

    if (context is None) == (context_file is None):
        raise ValueError("give the text that holds the answer as --context TEXT or --context-file FILE")
    text = context if context_file is None else context_file.read_text(encoding="utf-8")
    if not text or not text.strip():
        raise ValueError("the context is empty; give the text that holds the answer")
    given = filled(read_texts(questions or ("-",)))
    reader = open_reader("answer", place, device, download)
    said = predict.answer(reader, [Question(text, question) for question in given], may_be_none=or_none)
    if as_json:
        rows = [{"question": asked, **found._asdict()} for asked, found in zip(given, said, strict=True)]
        print(json.dumps({"answers": rows}, ensure_ascii=False))
        return
    for asked, found in zip(given, said, strict=True):
        print(
            f"{found.probability:.4f}  {found.text or '(no answer)'}"
            + (f"  | {asked}" if len(given) > 1 else "")
        )


def translate(
    place: Positional[str],
    texts: Texts = (),
    file: Path | None = None,
    max_new_tokens: int | None = None,
    device: str = "auto",
    download: bool = False,
    as_json: Json = False,
) -> None:
    """Translate texts, or whatever an encoder-decoder was trained to make of them.

    Args:
        place: a run, a published encoder-decoder, or a name with --download.
        texts: the texts; - reads them from standard input, one a line.
        file: read the texts from this file, one a line.
        max_new_tokens: how long a translation may be; by default twice the text's tokens and 16.
        device: auto, cpu or cuda.
        download: fetch the model by its name.
        as_json: print one JSON object.
    """
    from clearhead.training import predict

    given = given_texts(texts, file)
    reader = open_reader("translate", place, device, download)
    if not as_json:
        for text in given:
            print(predict.translate(reader, [text], max_new_tokens)[0], flush=True)
        return
    said = predict.translate(reader, given, max_new_tokens)
    rows = [{"text": text, "translation": other} for text, other in zip(given, said, strict=True)]
    print(json.dumps({"texts": rows}, ensure_ascii=False))


VERBS: dict[str, Callable[..., None]] = {
    "classify": classify,
    "label": label,
    "answer": answer,
    "translate": translate,
}
