"""Hugging Face's ``tokenizer.json``, read and written: byte-level BPE, or BPE over characters.

The file is a chain: added tokens -> normalizer -> pre_tokenizer -> model -> post_processor. Each stage
becomes fields of the `Definition`, or a ValueError that names what is asked for. Truncation and padding
settings are left aside: they belong to a call, and callers set them anew.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from clearhead.text.definition import Alphabet, Definition, check_alphabet, expect, expect_id, spell, unspell
from clearhead.text.normalise import CONTROL
from clearhead.text.pretokenize import SPLITTERS

_STEPS = {"NFC": "nfc", "NFKC": "nfkc", "Lowercase": "lowercase"}
_DIGITS = "digits"  # half of a splitter: each digit on its own, then what ByteLevel does
_THEN_GPT2 = {"none": "gpt2", _DIGITS: "smollm"}
_SPLITTER_OF = {pattern: name for name, pattern in SPLITTERS.items() if pattern is not None}


# -------------------------------------------------------------------------------------------------- reading


def read(text: str) -> Definition:
    """Read the text of a ``tokenizer.json``; a broken one is a ValueError, or RecursionError if too deep."""
    data = expect(json.loads(text), dict, "the file")
    splitter, alphabet = _read_pre_tokenizer(data.get("pre_tokenizer"))
    steps = tuple(_read_normalizer(data.get("normalizer")))
    _check_decoder(data.get("decoder"), alphabet)
    model = expect(data.get("model"), dict, "model")
    _check_model(model)
    ids = {
        token: expect_id(token_id, f"the id of token {token!r:.60}")
        for token, token_id in expect(model.get("vocab"), dict, "model.vocab").items()
    }
    special_tokens = _read_added_tokens(
        expect(data.get("added_tokens") or [], list, "added_tokens"), ids, steps
    )
    ignore_merges = expect(model.get("ignore_merges", False), bool, "model.ignore_merges")
    to_bytes = unspell if alphabet == "bytes" else str.encode
    vocab = _read_vocab(ids, special_tokens, to_bytes, strict=ignore_merges)
    if model.get("unk_token") is not None and check_alphabet(None, vocab) != "bytes":
        raise ValueError("model option unk_token is not supported for a vocabulary without all 256 bytes")
    begin, end = _read_post_processor(data.get("post_processor"), special_tokens)
    return Definition(
        vocab=vocab,
        merges=[(to_bytes(left), to_bytes(right)) for left, right in _read_merges(model.get("merges"))],
        special_tokens=special_tokens,
        splitter=splitter,
        alphabet=alphabet,
        ignore_merges=ignore_merges,
        normalise=steps,
        begin=begin,
        end=end,
    )


def _kind(part: dict[str, Any], where: str) -> str:
    return expect(part.get("type"), str, f"{where}.type")


def _sequence(part: Any, members: str, where: str) -> Iterator[dict[str, Any]]:
    """The steps of a stage: none, one, or those of a (nested) Sequence."""
    if part is None:
        return
    part = expect(part, dict, where)
    if _kind(part, where) != "Sequence":
        yield part
        return
    for member in expect(part.get(members), list, f"{where}.{members}"):
        yield from _sequence(member, members, where)


def _read_pre_tokenizer(stage: Any) -> tuple[str, Alphabet]:
    """The splitter's name, and whether the model sees bytes or characters."""
    parts = list(_sequence(stage, "pretokenizers", "pre_tokenizer"))
    alphabet: Alphabet = "characters"
    splitter = "none"
    for place, part in enumerate(parts):
        kind = _kind(part, "pre_tokenizer")
        if kind == "ByteLevel" and place == len(parts) - 1:
            if expect(part.get("add_prefix_space", True), bool, "add_prefix_space"):
                raise ValueError("pre_tokenizer ByteLevel with add_prefix_space is not supported")
            if expect(part.get("use_regex", True), bool, "use_regex"):
                if splitter not in _THEN_GPT2:
                    raise ValueError("two splitters one after the other are not supported")
                splitter = _THEN_GPT2[splitter]
            elif splitter == _DIGITS:
                raise ValueError("pre_tokenizer Digits without the splitter of ByteLevel is not supported")
            alphabet = "bytes"
        elif kind == "Digits" and place == 0 and len(parts) == 2 and part.get("individual_digits") is True:
            splitter = _DIGITS
        elif kind == "Split" and place == 0:
            splitter = _read_split(part)
        else:
            known = "Split with a known pattern or individual Digits, then ByteLevel"
            raise ValueError(f"pre_tokenizer {kind} is not supported here; what is: {known}")
    return splitter, alphabet


def _read_split(part: dict[str, Any]) -> str:
    pattern = expect(part.get("pattern"), dict, "Split.pattern").get("Regex")
    how = (part.get("behavior"), part.get("invert", False))
    if not isinstance(pattern, str) or pattern not in _SPLITTER_OF:
        raise ValueError(
            f"unknown splitter pattern {pattern!r:.100}; known: {', '.join(_SPLITTER_OF.values())}"
        )
    if how not in [("Isolated", False), ("Isolated", True), ("Removed", True)]:  # all keep every match
        raise ValueError(f"Split with behavior {how[0]!r} and invert {how[1]!r} is not supported")
    return _SPLITTER_OF[pattern]


def _read_normalizer(stage: Any) -> Iterator[str]:
    for part in _sequence(stage, "normalizers", "normalizer"):
        kind = _kind(part, "normalizer")
        if kind == "Replace" and (part.get("pattern"), part.get("content")) == ({"Regex": CONTROL}, ""):
            yield "strip_control"
        elif kind in _STEPS:
            yield _STEPS[kind]
        else:
            raise ValueError(f"normalizer {kind} is not supported; what is: {', '.join(_STEPS)}")


def _check_decoder(stage: Any, alphabet: Alphabet) -> None:
    known = "ByteLevel" if alphabet == "bytes" else "Fuse"
    for part in _sequence(stage, "decoders", "decoder"):
        if (kind := _kind(part, "decoder")) != known:
            raise ValueError(f"decoder {kind} is not supported with this pre_tokenizer; what is: {known}")


def _check_model(model: dict[str, Any]) -> None:
    if (kind := model.get("type", "BPE")) != "BPE":
        raise ValueError(f"model {kind!r:.60} is not supported; what is: BPE")
    for option in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(option):
            raise ValueError(f"model option {option}={model[option]!r:.60} is not supported")


def _read_vocab(
    ids: dict[str, int], special_tokens: dict[str, int], to_bytes: Callable[[str], bytes], strict: bool
) -> dict[int, bytes]:
    vocab: dict[int, bytes] = {}
    for token, token_id in ids.items():
        if token_id in vocab:
            raise ValueError(
                f"id {token_id} belongs to two tokens, {vocab[token_id]!r:.60} and {token!r:.60}"
            )
        try:
            vocab[token_id] = token.encode() if token in special_tokens else to_bytes(token)
        except ValueError:
            # A token that no text can become: kept under its spelling, as Hugging Face decodes it.
            if strict:
                raise
            vocab[token_id] = token.encode()
    return vocab


def _read_merges(merges: Any) -> Iterator[tuple[str, str]]:
    for place, merge in enumerate(expect(merges, list, "model.merges")):
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise ValueError(f"merge {place} should be a pair of tokens, found {merge!r:.60}")
        yield parts[0], parts[1]


def _read_added_tokens(entries: list[Any], ids: dict[str, int], steps: tuple[str, ...]) -> dict[str, int]:
    """Content -> id of the added tokens, which are matched before anything else."""
    special_tokens: dict[str, int] = {}
    groups: dict[bool, list[str]] = {False: [], True: []}
    for entry in entries:
        entry = expect(entry, dict, "an added token")
        content = expect(entry.get("content"), str, "the content of an added token")
        for flag in ("single_word", "lstrip", "rstrip"):
            if expect(entry.get(flag, False), bool, flag):
                raise ValueError(f"added token {content!r:.60} asks for {flag}, which is not supported")
        special_tokens[content] = expect_id(entry.get("id"), f"the id of added token {content!r:.60}")
        groups[expect(entry.get("normalized", False), bool, "normalized")].append(content)
    if groups[True] and steps:
        raise ValueError(f"added token {groups[True][0]!r:.60} is matched after normalisation: not supported")
    for first in groups[False]:
        for second in groups[True]:
            if _overlap(first, second):
                raise ValueError(
                    f"added tokens {first!r:.60}, {second!r:.60} overlap and differ in 'normalized'"
                )
    _check_added_ids(special_tokens, ids)
    return special_tokens


def _overlap(first: str, second: str) -> bool:
    """Whether two tokens can share characters of a text."""
    if first in second or second in first:
        return True
    ends = range(1, min(len(first), len(second)))
    return any(first[-n:] == second[:n] or second[-n:] == first[:n] for n in ends)


def _check_added_ids(special_tokens: dict[str, int], ids: dict[str, int]) -> None:
    """Hugging Face numbers added tokens itself: as in the vocabulary, or the next id. Refuse any other."""
    highest = -1
    for content, token_id in sorted(special_tokens.items(), key=lambda item: item[1]):
        expected = ids.get(content, max(len(ids), highest + 1))
        if token_id != expected:
            raise ValueError(
                f"added token {content!r:.60} has id {token_id}; the format numbers it {expected}"
            )
        highest = max(highest, token_id)


def _read_post_processor(
    stage: Any, special_tokens: dict[str, int]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tokens before and after a single sentence."""
    begin: list[str] = []
    end: list[str] = []
    for part in _sequence(stage, "processors", "post_processor"):
        kind = _kind(part, "post_processor")
        if kind == "ByteLevel":
            continue  # about offsets only
        if begin or end:
            raise ValueError("two post-processors that add tokens are not supported")
        if kind in ("BertProcessing", "RobertaProcessing"):
            begin.append(_named_token(part.get("cls"), special_tokens))
            end.append(_named_token(part.get("sep"), special_tokens))
        elif kind == "TemplateProcessing":
            begin, end = _read_template(part, special_tokens)
        else:
            raise ValueError(f"post_processor {kind} is not supported")
    return tuple(begin), tuple(end)


def _named_token(pair: Any, special_tokens: dict[str, int]) -> str:
    """The token of a [content, id] pair, if the file knows it under that id."""
    if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
        raise ValueError(f"post_processor should name a token and its id, found {pair!r:.60}")
    if special_tokens.get(pair[0]) != pair[1]:
        raise ValueError(f"post_processor adds {pair[0]!r:.60} with id {pair[1]!r:.60}: not an added token")
    return pair[0]


def _read_template(part: dict[str, Any], special_tokens: dict[str, int]) -> tuple[list[str], list[str]]:
    names = expect(part.get("special_tokens"), dict, "post_processor.special_tokens")
    sides: list[list[str]] = [[]]
    for piece in expect(part.get("single"), list, "post_processor.single"):
        piece = expect(piece, dict, "a piece of post_processor.single")
        if "Sequence" in piece:
            sides.append([])
            continue
        name = expect(piece.get("SpecialToken"), dict, "a piece of post_processor.single").get("id")
        entry = expect(
            names.get(expect(name, str, "the id of a template token")), dict, f"token {name!r:.60}"
        )
        tokens = expect(entry.get("tokens"), list, "tokens")
        token_ids = expect(entry.get("ids"), list, "ids")
        if len(tokens) != len(token_ids):
            raise ValueError(f"template token {name!r:.60} has {len(tokens)} tokens but {len(token_ids)} ids")
        sides[-1] += [
            _named_token(list(pair), special_tokens) for pair in zip(tokens, token_ids, strict=True)
        ]
    if len(sides) != 2:
        raise ValueError(f"post_processor.single should hold one sequence, found {len(sides) - 1}")
    return sides[0], sides[1]


# -------------------------------------------------------------------------------------------------- writing


def write(definition: Definition) -> str:
    """Return the text of the ``tokenizer.json`` that gives the same ids."""
    to_text = spell if definition.alphabet == "bytes" else bytes.decode
    data = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token_id,
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for content, token_id in sorted(definition.special_tokens.items(), key=lambda item: item[1])
        ],
        "normalizer": _write_normalizer(definition.normalise),
        "pre_tokenizer": _write_pre_tokenizer(definition.splitter, definition.alphabet),
        "post_processor": _write_post_processor(definition),
        "decoder": _BYTE_LEVEL if definition.alphabet == "bytes" else {"type": "Fuse"},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": definition.ignore_merges,
            "vocab": spelled_vocab(definition, to_text),
            "merges": [[to_text(left), to_text(right)] for left, right in definition.merges],
        },
    }
    return json.dumps(data, ensure_ascii=False, indent=1)


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def spelled_vocab(definition: Definition, to_text: Callable[[bytes], str]) -> dict[str, int]:
    """Token -> id as files hold it: special tokens as they are, the others spelled."""
    special = {token_id: content for content, token_id in definition.special_tokens.items()}
    spelled: dict[str, int] = {}
    for token_id, token in sorted(definition.vocab.items()):
        text = special.get(token_id) or to_text(token)
        if text in spelled:
            raise ValueError(f"the ids {spelled[text]} and {token_id} would both be spelled {text!r:.60}")
        spelled[text] = token_id
    return spelled


def _write_normalizer(steps: tuple[str, ...]) -> dict[str, Any] | None:
    names: dict[str, dict[str, Any]] = {step: {"type": kind} for kind, step in _STEPS.items()}
    names["strip_control"] = {"type": "Replace", "pattern": {"Regex": CONTROL}, "content": ""}
    return {"type": "Sequence", "normalizers": [names[step] for step in steps]} if steps else None


def _write_pre_tokenizer(splitter: str, alphabet: Alphabet | None) -> dict[str, Any] | None:
    if splitter == "gpt2" and alphabet == "bytes":
        return _BYTE_LEVEL | {"use_regex": True}
    if splitter == "smollm" and alphabet == "bytes":
        digits = {"type": "Digits", "individual_digits": True}
        return {"type": "Sequence", "pretokenizers": [digits, _BYTE_LEVEL | {"use_regex": True}]}
    parts: list[dict[str, Any]] = []
    if (pattern := SPLITTERS[splitter]) is not None:
        parts.append(
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        )
    if alphabet == "bytes":
        parts.append(_BYTE_LEVEL)
    return {"type": "Sequence", "pretokenizers": parts} if parts else None


def _write_post_processor(definition: Definition) -> dict[str, Any] | None:
    if not definition.begin and not definition.end:
        return None

    def sentence(name: str, type_id: int) -> list[dict[str, Any]]:
        def token(content: str) -> dict[str, Any]:
            return {"SpecialToken": {"id": content, "type_id": type_id}}

        middle = {"Sequence": {"id": name, "type_id": type_id}}
        return [*map(token, definition.begin), middle, *map(token, definition.end)]

    return {
        "type": "TemplateProcessing",
        "single": sentence("A", 0),
        "pair": sentence("A", 0) + sentence("B", 1),
        "special_tokens": {
            content: {"id": content, "ids": [definition.special_tokens[content]], "tokens": [content]}
            for content in dict.fromkeys([*definition.begin, *definition.end])
        },
    }
