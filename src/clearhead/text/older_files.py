"""What tokenizers were published as before tokenizer.json, rewritten as that.

vocab.txt              WordPiece: a piece per line, its number is the id; how BERT's words are cut comes
                       from tokenizer_config.json
"""

import json
from pathlib import Path
from typing import Any

from clearhead.text import sentencepiece
from clearhead.text.sentencepiece import PieceTable, added_token, template
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
    if file.name == "vocab.txt":
        found = _word_piece(file, usage)
    elif file.suffix == ".spm":
        found = _marian(file)
    else:
        found = _sentence_piece(file, usage)
    return json.dumps(found, ensure_ascii=False)


def _find(path: Path) -> Path | None:
    if not path.is_dir():
        known = path.name == "vocab.txt" or path.suffix in (".model", ".spm")
        return path if known and path.is_file() else None
    for name in ("vocab.txt", "source.spm", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"):
        if (path / name).is_file():
            return path / name
    models = sorted(path.glob("*.model"))
    return models[0] if len(models) == 1 else None


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


def _sentence_piece(file: Path, usage: Usage) -> Json:
    """A SentencePiece model; the tokens around a text are what tokenizer_config.json asks for."""
    table = sentencepiece.read_model(file.read_bytes())
    found = usage.files.get(SETTINGS)
    settings = found if isinstance(found, dict) else {}
    # Unigram models of this kind are T5's, which end a text; BPE models are Llama's, which begin one
    begins = settings.get("add_bos_token", table.model == "bpe")
    ends = settings.get("add_eos_token", table.model == "unigram")
    begin = [usage.role("bos") or "<s>"] if begins else []
    end = [usage.role("eos") or "</s>"] if ends else []
    return sentencepiece.tokenizer_json(table, begin, end)


def _marian(source: Path) -> Json:
    """Marian's two models: a text is cut by the source's pieces, the ids are those of vocab.json."""
    try:
        ids = json.loads(source.with_name("vocab.json").read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"vocab.json is not valid JSON: {error}") from None
    if not isinstance(ids, dict) or sorted(map(str, ids.values())) != sorted(map(str, range(len(ids)))):
        raise ValueError("vocab.json should number its pieces from 0 on, without gaps")
    table = sentencepiece.read_model(source.read_bytes())
    scores = dict(zip(table.pieces, table.scores, strict=True))
    kinds = dict(zip(table.pieces, table.kinds, strict=True))
    pieces = sorted(ids, key=ids.__getitem__)
    never = min(table.scores) - 1000.0  # a piece of the target language only: never in the source's cut
    special = {"<unk>": sentencepiece.UNKNOWN, "</s>": sentencepiece.CONTROL, "<pad>": sentencepiece.CONTROL}
    joined = PieceTable(
        pieces,
        [scores.get(piece, never) for piece in pieces],
        [special.get(piece, kinds.get(piece, sentencepiece.NORMAL)) for piece in pieces],
        add_space=table.add_space,
        one_space=table.one_space,
        charsmap=table.charsmap,
    )
    return sentencepiece.tokenizer_json(joined, [], ["</s>"])
