"""The models of a page: the one that is looked at, and at most one beside it that it is compared with.

Two models stand side by side when every cell of one has its cell in the other: their manifests name the same
stacks and values, and a token means the same to both. What differs otherwise is said by name.
"""

import hashlib
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import clearhead
from clearhead.inspector.passes import Passes, Question
from clearhead.inspector.provenance import Cell, Unknown, explain
from clearhead.inspector.spelling import Speller
from clearhead.inspector.views import manifest
from clearhead.model.transformer import Transformer
from clearhead.server.run_view import RunView
from clearhead.text.foreign import AnyTokenizer
from clearhead.text.frame import end_of_text, role
from clearhead.text.tokenizer import Tokenizer

Json = dict[str, Any]


@dataclass(frozen=True)
class Given:
    """A model as it was handed over. `run`: gives it the weights of the steps of a run; `place`: where it
    can be opened again.
    """

    model: nn.Module
    tokenizer: AnyTokenizer | None
    name: str = "model"
    run: RunView | None = None
    place: str | None = None


class Side:
    """One model, its passes and its manifest. `mark`: what tells it from others, but for its weights."""

    def __init__(self, given: Given, example: Question, speller: Speller) -> None:
        self.model, self.name, self.run = given.model, given.name, given.run
        first = replace(example, step=self.step(None))
        weights = None if self.run is None else self.run.put
        self.passes = Passes(self.model, first, weights, padding_of(self.model, given.tokenizer))
        outline = self.passes.outline
        operations: dict[str, tuple[str, list[str]]] = {}
        for value_name, value in outline.values.items():
            try:
                cell = explain(outline, value_name, (0,) * value.dim())
            except (Unknown, ValueError, KeyError):
                continue  # the manifest then says what the pass itself shows
            operations[value_name] = cell.made.op, _operands(cell)
        self.manifest = manifest(self.model, given.tokenizer, outline, name=self.name, operations=operations)
        self.place = self.manifest["place"] = given.place or self.name
        self.manifest["pad_id"] = self.passes.anatomy.pad
        self.mark = (
            short_hash(self.manifest["config"], parts_of(self.manifest)),
            vocabulary_hash(speller, self.manifest["vocab_size"] or 0),
            short_hash(clearhead.__version__, torch.__version__, str(self.passes.device), sys.platform),
        )

    def step(self, asked: object) -> int | None:
        """The step of the training whose weights are asked for; of a run the newest, if none is named."""
        if self.run is not None:
            return self.run.step(asked)
        if asked is not None:
            raise ValueError("this model is not a run of clearhead train; it has no steps to go back to")
        return None

    @property
    def fingerprint(self) -> str:
        """Architecture, weights, vocabulary and machine of the latest pass, each as a short hash."""
        architecture, vocabulary, machine = self.mark
        return f"{architecture}.{self.passes.version[:8]}.{vocabulary}.{machine}"


def padding_of(model: nn.Module, tokenizer: AnyTokenizer | None) -> int | None:
    """The token that only fills up rows; None if there is none that does nothing else."""
    if tokenizer is None or not isinstance(model, Transformer):
        return None
    pad = role(tokenizer, "pad")
    used = [end_of_text(tokenizer), *(role(tokenizer, name) for name in ("bos", "eos", "cls", "sep"))]
    return None if pad in used else pad


def check_alike(ours: Side, theirs: Side) -> None:
    """ValueError, in one line that names what differs, for two models that cannot be laid side by side."""
    found = differences(ours.manifest, theirs.manifest)
    if not found and ours.mark[1] != theirs.mark[1]:
        found = ["their tokenizers give the same number to different tokens"]
    if found:
        more = f", and {len(found) - 4} more" if len(found) > 4 else ""
        raise ValueError(f"{theirs.name} cannot be compared with {ours.name}: {', '.join(found[:4])}{more}")


def differences(ours: Json, theirs: Json) -> list[str]:
    """What keeps two manifests from being compared: "n_layers 3 and 4"; nothing if they are alike."""
    first, second = parts_of(ours), parts_of(theirs)
    if first == second:
        return []
    configs = ours["config"] or {}, theirs["config"] or {}
    found = [f"{key} {ours[key]} and {theirs[key]}" for key in ("shape", "head") if ours[key] != theirs[key]]
    found += [
        f"{key} {configs[0].get(key)} and {configs[1].get(key)}"
        for key in {**configs[0], **configs[1]}
        if key not in ("shape", "head") and configs[0].get(key) != configs[1].get(key)
    ]
    values = [{value["name"]: value["shape"] for value in one["values"]} for one in (ours, theirs)]
    odd = [name for name in {**values[0], **values[1]} if values[0].get(name) != values[1].get(name)]
    return found or [f"the value {name}" for name in odd] or ["the number of their tokens"]


def parts_of(manifest: Json) -> list[Any]:
    """What of a manifest must be equal in two models whose numbers are laid side by side."""
    tokenizer = manifest["tokenizer"]
    return [
        manifest["shape"],
        manifest["head"],
        manifest["vocab_size"],
        manifest["stacks"],
        [[value["name"], value["axes"], value["shape"]] for value in manifest["values"]],
        None if tokenizer is None else [tokenizer["vocab_size"], tokenizer["special"]],
    ]


def short_hash(*parts: object) -> str:
    """Eight hexadecimal digits that stand for these values."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def vocabulary_hash(speller: Speller, size: int) -> str:
    """What every token id means, and for our own tokenizers in which order pairs are merged."""
    tokenizer = speller.tokenizer
    digest = hashlib.sha256()
    for token_id in range(size if tokenizer is None else max(size, tokenizer.vocab_size)):
        raw = speller.bytes_of(token_id)
        digest.update(b"%d %b" % (len(raw), raw))
    if isinstance(tokenizer, Tokenizer):
        digest.update(repr((tokenizer.merges, tokenizer.special_tokens)).encode())
    return digest.hexdigest()[:8]


def _operands(cell: Cell) -> list[str]:
    """The values that a cell is made of, each once."""
    names = [factor.name for term in cell.made.terms for factor in term if factor.name]
    if cell.made.bias is not None and cell.made.bias.name:
        names.append(cell.made.bias.name)
    return list(dict.fromkeys(names))
