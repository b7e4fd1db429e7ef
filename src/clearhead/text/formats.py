"""The file formats that byte-level BPE vocabularies are published in, read and written.

    tokenizer.json            Hugging Face: everything in one file; also our own saved form
    vocab.json + merges.txt   GPT-2: tokens and merges; splitter gpt2; tokens that no merge makes are special
    NAME.tiktoken             OpenAI: a line per token, base64 bytes and rank; splitter and specials by name

All become the same inert `Definition`. What a file asks for and `Tokenizer` does not do is a ValueError that
names it, never passed over: the ids are those of the format's own library, or there are none.
"""

import base64
import binascii
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from clearhead.text import tokenizer_json
from clearhead.text.definition import Definition, expect, expect_id, spell, unspell, with_ids
from clearhead.text.merging import merge
from clearhead.text.pretokenize import check_splitter

Specials = Iterable[str] | Mapping[str, int] | None

_GPT2_PAIRS = {"vocab.json": "merges.txt", "encoder.json": "vocab.bpe"}


def read_definition(path: Path, special_tokens: Specials = None, splitter: str | None = None) -> Definition:
    """Read a tokenizer from one of its files or a folder that holds them; see `Tokenizer.load`."""
    file = _find(path)
    if splitter is not None:
        check_splitter(splitter)
    try:
        if file.suffix == ".tiktoken":
            return _read_tiktoken(file, special_tokens, splitter)
        if file.name in _GPT2_PAIRS:
            return _read_gpt2(file, special_tokens, splitter or "gpt2")
        if special_tokens is not None or splitter is not None:
            raise ValueError("the file names its own special tokens and splitter; leave those arguments out")
        return tokenizer_json.read(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{file}: nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def write_definition(definition: Definition, path: Path) -> Path:
    """Write a tokenizer in the format that the name of `path` asks for; see `Tokenizer.save`."""
    if path.suffix not in (".json", ".tiktoken") and path.name not in _GPT2_PAIRS.values():
        path = path / "tokenizer.json"
    path = _first_of_pair(path)
    try:
        if path.suffix == ".tiktoken":
            texts = {path: _write_tiktoken(definition, path)}
        elif path.name in _GPT2_PAIRS:
            vocab, merges = _write_gpt2(definition)
            texts = {path: vocab, path.with_name(_GPT2_PAIRS[path.name]): merges}
        else:
            texts = {path: tokenizer_json.write(definition)}
    except ValueError as error:
        raise ValueError(f"cannot save {path}: {error}") from error
    for file, text in texts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        draft.write_text(text, encoding="utf-8", newline="\n")
        draft.replace(file)
    return path


def _first_of_pair(path: Path) -> Path:
    for vocab, merges in _GPT2_PAIRS.items():
        if path.name == merges:
            return path.with_name(vocab)
    return path


def _find(path: Path) -> Path:
    """The file to read: `path` itself, or the one in the folder `path`."""
    if path.is_file():
        return _first_of_pair(path)
    if not path.exists():
        raise FileNotFoundError(f"no tokenizer at {path}: no such file or folder")
    for name in ("tokenizer.json", *_GPT2_PAIRS):
        if (path / name).is_file():
            return path / name
    ranks = sorted(path.glob("*.tiktoken"))
    if len(ranks) > 1:
        raise ValueError(f"{path} holds {len(ranks)} .tiktoken files; name the one to load")
    if not ranks:
        known = "tokenizer.json, vocab.json + merges.txt, NAME.tiktoken"
        raise FileNotFoundError(f"no tokenizer in {path}: it holds none of {known}")
    return ranks[0]


# ----------------------------------------------------------------------------------- vocab.json + merges.txt


def _read_gpt2(file: Path, special_tokens: Specials, splitter: str) -> Definition:
    entries = expect(json.loads(file.read_text(encoding="utf-8")), dict, "the file")
    ids = {
        token: expect_id(token_id, f"the id of token {token!r:.60}") for token, token_id in entries.items()
    }
    merges = _read_merges(file.with_name(_GPT2_PAIRS[file.name]))
    made = {left + right for left, right in merges}
    vocab: dict[int, bytes] = {}
    left_over: dict[str, int] = {}
    for token, token_id in ids.items():
        if token_id in vocab:
            raise ValueError(
                f"id {token_id} belongs to two tokens, {vocab[token_id]!r:.60} and {token!r:.60}"
            )
        if token in made or len(token) == 1:
            vocab[token_id] = unspell(token)
        else:
            vocab[token_id] = token.encode()
            left_over[token] = token_id
    return Definition(
        vocab=vocab,
        merges=[(unspell(left), unspell(right)) for left, right in merges],
        special_tokens=left_over if special_tokens is None else with_ids(special_tokens, vocab),
        splitter=splitter,
        alphabet="bytes",
    )


def _read_merges(file: Path) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        line = line.removesuffix("\r")
        if line and not line.startswith("#version"):
            parts = line.split(" ")
            if len(parts) != 2:
                raise ValueError(f"{file.name}:{number} should hold two tokens, found {line!r:.60}")
            merges.append((parts[0], parts[1]))
    return merges


def _write_gpt2(definition: Definition) -> tuple[str, str]:
    _refuse_extras(definition, "vocab.json + merges.txt")
    if definition.splitter != "gpt2" or definition.ignore_merges:
        what = "ignore_merges" if definition.ignore_merges else f"the splitter {definition.splitter}"
        raise ValueError(f"vocab.json + merges.txt cannot hold {what}; tokenizer.json can")
    vocab = json.dumps(tokenizer_json.spelled_vocab(definition, spell), ensure_ascii=False)
    made = {spell(left + right) for left, right in definition.merges}
    for token in definition.special_tokens:
        if token in made or len(token) == 1:
            raise ValueError(f"vocab.json cannot tell that {token!r:.60} is special; tokenizer.json can")
    merges = [f"{spell(left)} {spell(right)}" for left, right in definition.merges]
    return vocab, "\n".join(["#version: 0.2", *merges, ""])


def _refuse_extras(definition: Definition, target: str) -> None:
    extras = {
        "an alphabet of characters": definition.alphabet == "characters",
        "normalisation": definition.normalise,
        "begin and end tokens": definition.begin or definition.end,
    }
    for what, there in extras.items():
        if there:
            raise ValueError(f"{target} cannot hold {what}; tokenizer.json can")


# ------------------------------------------------------------------------------------------------ .tiktoken

# Beginning of the file's name: splitter, number of ranks, special tokens of the published file.
_END = {"<|endoftext|>": 50256}
_FIM = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}
_PUBLISHED: dict[str, tuple[str, int, dict[str, int]]] = {
    "gpt2": ("gpt2", 50256, _END),
    "r50k": ("gpt2", 50256, _END),
    "p50k": ("gpt2", 50280, _END),
    "cl100k": ("cl100k", 100256, {"<|endoftext|>": 100257, **_FIM, "<|endofprompt|>": 100276}),
    "o200k": ("o200k", 199998, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}


def _published(file: Path) -> tuple[str, int, dict[str, int]] | None:
    return next((known for name, known in _PUBLISHED.items() if file.stem.startswith(name)), None)


def _read_tiktoken(file: Path, special_tokens: Specials, splitter: str | None) -> Definition:
    ranks = _read_ranks(file)
    named = _published(file)
    if splitter is None:
        if named is None:
            raise ValueError("the file does not say how text is split; pass splitter=")
        splitter = named[0]
    vocab = {rank: token for token, rank in ranks.items()}
    if special_tokens is None:
        special_tokens = named[2] if named is not None and named[1] == len(ranks) else ()
    merges, complete = merges_from_ranks(ranks)
    return Definition(
        vocab=vocab,
        merges=merges,
        special_tokens=with_ids(special_tokens, vocab),
        splitter=splitter,
        alphabet="bytes",
        ignore_merges=not complete,
    )


def _read_ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().split(b"\n"), start=1):
        fields = line.split()
        if not fields:
            continue
        try:
            token = base64.b64decode(fields[0], validate=True)
            (rank,) = map(int, fields[1:])
        except (ValueError, binascii.Error):
            raise ValueError(f"line {number} should be 'base64 rank', found {line[:60]!r}") from None
        if token in ranks:
            raise ValueError(f"line {number} lists the token {token!r:.60} again")
        ranks[token] = expect_id(rank, f"the rank in line {number}")
    if len(set(ranks.values())) < len(ranks):
        raise ValueError("two tokens have the same rank")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"{len(missing)} of the 256 bytes are missing, the first is 0x{missing[0]:02X}")
    return ranks


def merges_from_ranks(ranks: Mapping[bytes, int]) -> tuple[list[tuple[bytes, bytes]], bool]:
    """Recover the merges behind token ranks; also tell whether every token can be reached by them.

    tiktoken merges whichever neighbours make the token of the lowest rank together. For each token only one
    pair ever does: what the token's own bytes have become just before. (Around those bytes the rest of
    a text changes nothing: as long as no merge crosses the token's ends, what happens inside is the same.)
    A token that its own bytes do not lead to is found only where it is a whole pre-token.

    >>> ranks = {bytes([i]): i for i in range(256)} | {b"ug": 256, b"hug": 257, b"xyz": 258}
    >>> merges_from_ranks(ranks)
    ([(b'u', b'g'), (b'h', b'ug')], False)
    """
    lengths = set(map(len, ranks))
    by_rank = sorted((rank, token) for token, rank in ranks.items() if len(token) > 1)
    splits: dict[int, list[tuple[int, int]]] = {}
    for rank, token in by_rank:
        cuts = [n for n in range(1, len(token)) if n in lengths and len(token) - n in lengths]
        halves = ((ranks.get(token[:n]), ranks.get(token[n:])) for n in cuts)
        splits[rank] = [(left, right) for left, right in halves if left is not None and right is not None]
    pairs = {pair: rank for rank, of_token in splits.items() for pair in of_token}
    token_of = {rank: token for token, rank in ranks.items()}
    made = range(max(token_of) + 1)  # ranks are ids here
    merges = []
    for rank, token in by_rank:
        for pair in splits[rank]:
            del pairs[pair]
        parts = merge([ranks[token[n : n + 1]] for n in range(len(token))], pairs, made)
        for pair in splits[rank]:
            pairs[pair] = rank
        if len(parts) == 2:
            merges.append((token_of[parts[0]], token_of[parts[1]]))
    return merges, len(merges) == len(by_rank)


def _write_tiktoken(definition: Definition, file: Path) -> str:
    _refuse_extras(definition, "a .tiktoken file")
    named = _published(file)
    if named is not None and named[0] != definition.splitter:
        raise ValueError(f"the name means the splitter {named[0]}, this tokenizer has {definition.splitter}")
    special = set(definition.special_tokens.values())
    ranks: dict[bytes, int] = {}
    for token_id, token in sorted(definition.vocab.items()):
        if token_id not in special and ranks.setdefault(token, token_id) != token_id:
            raise ValueError(f"the token {token!r:.60} has two ids, {ranks[token]} and {token_id}")
    merges, complete = merges_from_ranks(ranks)
    recovered = set(merges)
    there = [pair for pair in definition.merges if pair in recovered]
    if there != merges or not (complete or definition.ignore_merges):
        raise ValueError("a .tiktoken file holds merges in the order of their ids; here the orders differ")
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items()]
    return "".join(lines)
