"""Real examples for every objective, without a network: what Python's own library says about itself.

    pairs            a function's name and its words     get_default_type -> get default type
                     a function's name and what its documentation begins with
    labelled texts   a line: code, comment or documentation; what a line of code does; how much of it is signs
    tagged words     the tokens of a line of code, and what Python's tokenizer calls them
    questions        a signature: what is the function called, what does it take?
    conversations    what is this for? The answer is what the documentation begins with.

Each function writes a file that `clearhead train` reads.
"""

import ast
import functools
import io
import json
import keyword
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MODULES = """
    argparse ast calendar cmd codecs configparser copy datetime difflib dis doctest enum fractions ftplib
    gettext http/client inspect ipaddress locale mailbox optparse os pathlib pdb platform pprint random shutil
    smtplib socket statistics tarfile tempfile textwrap threading turtle typing unittest/mock urllib/request
    uuid weakref zipfile
"""
OPERATORS = {"=": "assigns", "(": "calls", ".": "looks inside", "==": "compares"}


class Function(NamedTuple):
    """A function of the library."""

    name: str
    arguments: str
    summary: str  # first line of its documentation


@functools.cache
def sources() -> list[str]:
    """The texts of the modules that this version of Python has."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = [folder / f"{name}.py" for name in MODULES.split()]
    return [file.read_text(encoding="utf-8") for file in files if file.is_file()]


@functools.cache
def functions() -> list[Function]:
    """All functions with a documentation, each name once."""
    found: dict[str, Function] = {}
    for source in sources():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                summary = (ast.get_docstring(node) or "").partition("\n")[0].strip()
                if len(summary) > 8 and not node.name.startswith("__"):
                    found.setdefault(node.name, Function(node.name, ast.unparse(node.args), summary))
    return list(found.values())


def lines() -> Iterator[tuple[str, str]]:
    """Lines of the sources with what they are: code, comment or documentation."""
    for source in sources():
        inside = False
        for line in source.splitlines():
            text = line.strip()
            quotes = text.count('"""') + text.count("'''")
            if len(text) > 12:
                kind = "comment" if text.startswith("#") else "documentation" if inside or quotes else "code"
                yield text, kind
            inside ^= quotes % 2 == 1


@functools.cache
def code_lines(count: int) -> list[tuple[str, list[tuple[str, str]]]]:
    """Lines of code that stand alone, with their tokens: text and kind."""
    found = {}
    for text, kind in lines():
        if kind == "code" and len(found) < count:
            try:
                tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
            except (tokenize.TokenError, SyntaxError):
                continue
            pairs = [(token.string, kind_of(token)) for token in tokens if token.string.strip()]
            if 2 < len(pairs) < 20 and not any(" " in word for word, _ in pairs):
                found[text] = pairs
    return list(found.items())


def kind_of(token: tokenize.TokenInfo) -> str:
    """What Python's tokenizer calls a token; keywords apart from names."""
    if token.type == tokenize.NAME:
        return "keyword" if keyword.iskeyword(token.string) else "name"
    return tokenize.tok_name[token.type].lower()


def write_jsonl(path: Path, records: list[dict]) -> Path:
    """One object on each line."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def write_names(folder: Path) -> Path:
    """Names and their words."""
    rows = [f"{f.name}\t{re.sub('_+', ' ', f.name).strip()}" for f in functions() if "_" in f.name.strip("_")]
    path = folder / "names.tsv"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def write_summaries(folder: Path) -> Path:
    """Names as words, and what the function does."""
    records = [{"source": f.name.replace("_", " "), "target": f.summary} for f in functions()]
    return write_jsonl(folder / "summaries.jsonl", records)


def write_kinds(folder: Path, count: int = 3000) -> Path:
    """Lines, and whether they are code, comment or documentation."""
    found = dict(lines())
    records = [{"text": text, "label": kind} for text, kind in list(found.items())[:: len(found) // count]]
    return write_jsonl(folder / "kinds.jsonl", records)


def write_doings(folder: Path, count: int = 2500) -> Path:
    """Lines of code, and all that they do."""
    records = [
        {"text": text, "label": [doing for sign, doing in OPERATORS.items() if (sign, "op") in tokens]}
        for text, tokens in code_lines(count)
    ]
    return write_jsonl(folder / "doings.jsonl", records)


def write_signs(folder: Path, count: int = 2500) -> Path:
    """Lines of code, and ten times the share of their characters that are neither letters nor digits."""
    records = [
        {"text": text, "label": round(10 * sum(not c.isalnum() for c in text) / len(text), 3)}
        for text, _ in code_lines(count)
    ]
    return write_jsonl(folder / "signs.jsonl", records)


def write_tokens(folder: Path, count: int = 2000) -> Path:
    """Lines of code, each token with its kind, as CoNLL has them."""
    path = folder / "tokens.conll"
    blocks = ["\n".join(f"{word}\t{kind}" for word, kind in tokens) for _, tokens in code_lines(count)]
    path.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")
    return path


def write_questions(folder: Path) -> Path:
    """Signatures: what is it called, what does it take?"""
    records = []
    for f in functions():
        if f.arguments and len(f.arguments) < 40:
            context = f"def {f.name}({f.arguments}): ..."
            for question, text, start in (("name", f.name, 4), ("takes", f.arguments, 5 + len(f.name))):
                answers = [{"text": text, "answer_start": start}]
                records.append({"context": context, "question": question, "answers": answers})
    return write_jsonl(folder / "questions.jsonl", records)


def write_chats(folder: Path) -> Path:
    """What is this function for? The documentation answers."""
    records = [
        {
            "messages": [
                {"role": "user", "content": f"What is {f.name} for?"},
                {"role": "assistant", "content": f.summary},
            ]
        }
        for f in functions()[:700]
    ]
    return write_jsonl(folder / "chats.jsonl", records)
