"""What tokenizers were published as before tokenizer.json, rewritten as that.

vocab.txt              WordPiece: a piece per line, its number is the id; how BERT's words are cut comes
                       from tokenizer_config.json
"""

import json
from pathlib import Path
from typing import Any

from clearhead.text.usage import SETTINGS, Usage

Json = dict[str, Any]


def there(path: Path) -> bool:
    """Whether a file is, or a folder holds, one of these."""
    return _find(path) is not None


def definition(path: Path, usage: Usage) -> str:
    """The text of the tokenizer.json that does the same; ValueError for a broken file."""
    file = _find(path)
    if file is None:
        raise FileNotFoundError(f"no tokenizer in {path}")
    return json.dumps(_word_piece(file, usage), ensure_ascii=False)


def _find(path: Path) -> Path | None:
    file = path / "vocab.txt" if path.is_dir() else path
    return file if file.name == "vocab.txt" and file.is_file() else None


def added_token(text: str, number: int) -> Json:
    """An entry of `added_tokens`: matched as it is, before anything else."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": text, **flags, "special": True}


def template(begin: list[str], end: list[str], ids: dict[str, int], pair: Json | None = None) -> Json:
    """A post-processor that puts special tokens around a sentence."""

    def special(text: str, type_id: int) -> Json:
        return {"SpecialToken": {"id": text, "type_id": type_id}}

    def sentence(name: str, type_id: int, first: bool) -> list[Json]:
        before = [special(text, type_id) for text in begin] if first else []
        middle = {"Sequence": {"id": name, "type_id": type_id}}
        return [*before, middle, *(special(text, type_id) for text in end)]

    return {
        "type": "TemplateProcessing",
        "single": sentence("A", 0, True),
        "pair": sentence("A", 0, True) + sentence("B", 1, False),
        "special_tokens": {
            text: {"id": text, "ids": [ids[text]], "tokens": [text]} for text in dict.fromkeys([*begin, *end])
        },
    }


def _word_piece(file: Path, usage: Usage) -> Json:
    """BERT's tokenizer from its vocab.txt."""
    pieces = file.read_text(encoding="utf-8").split("\n")
    if pieces and not pieces[-1]:
        pieces.pop()
    ids = {piece.removesuffix("\r"): number for number, piece in enumerate(pieces)}
    found = usage.files.get(SETTINGS)
    settings = found if isinstance(found, dict) else {}
    roles = {
        role: usage.roles().get(f"{role}_token", f"[{role.upper()}]")
        for role in ("pad", "unk", "cls", "sep", "mask")
    }
    missing = [text for text in roles.values() if text not in ids]
    if missing:
        raise ValueError(f"vocab.txt lacks the special tokens {', '.join(missing)}")
    return {
        "version": "1.0",
        "added_tokens": [
            added_token(text, ids[text]) for text in sorted(roles.values(), key=ids.__getitem__)
        ],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
            "strip_accents": settings.get("strip_accents"),
            "lowercase": settings.get("do_lower_case", True),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": template([roles["cls"]], [roles["sep"]], ids),
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": roles["unk"],
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": ids,
        },
    }
