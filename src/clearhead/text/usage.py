"""How a published model wants its tokens used: what lies in its folder beside the vocabulary.

    tokenizer_config.json     which special tokens begin, end, pad and separate
    special_tokens_map.json   the same, in older folders
    chat_template.jinja       how a conversation becomes one text; older: a field of tokenizer_config.json
    modules.json, 1_Pooling/  how hidden states become the vector of a sentence (sentence-transformers)

A tokenizer carries this along, so that a model that was loaded and saved is whole again. Nothing here is run
or interpreted until it is asked for.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Role = Literal["bos", "eos", "unk", "pad", "cls", "sep", "mask"]
Pool = Literal["mean", "first", "last"]

SETTINGS, ROLES, TEMPLATE, MODULES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "modules.json",
)
_POOLS: dict[str, Pool] = {"mean": "mean", "cls": "first", "lasttoken": "last"}


@dataclass(frozen=True)
class Usage:
    """The files beside a vocabulary: name below the folder -> JSON value; and the chat template."""

    files: Mapping[str, Any] = field(default_factory=dict)
    chat_template: str | None = None

    def roles(self) -> dict[str, str]:
        """Role with its ending -> text of the special token, as in {"eos_token": "</s>"}.

        >>> Usage({"tokenizer_config.json": {"eos_token": {"content": "</s>"}, "bos_token": None}}).roles()
        {'eos_token': '</s>'}
        """
        found: dict[str, str] = {}
        for name in (ROLES, SETTINGS):  # the latter counts
            for role, token in _dictionary(self.files, name).items():
                text = token.get("content") if isinstance(token, Mapping) else token
                if role.endswith("_token") and isinstance(text, str):
                    found[role] = text
        return found

    def role(self, name: Role) -> str | None:
        """The text of the special token with this role, or None."""
        return self.roles().get(f"{name}_token")

    def template(self, name: str = "default") -> str | None:
        """The chat template, or the one of this name where there are several; None if there is none."""
        if self.chat_template is not None and name == "default":
            return self.chat_template
        found = _dictionary(self.files, SETTINGS).get("chat_template")
        if isinstance(found, list):
            named = {part.get("name"): part.get("template") for part in found if isinstance(part, Mapping)}
            found = named.get(name)
        return found if isinstance(found, str) else None

    def pooling(self) -> tuple[Pool, bool] | None:
        """How a sentence's vector is made: which positions, and whether its length becomes 1.

        None: the folder does not say. ValueError: in a way that is not known here.
        """
        modules = self.files.get(MODULES)
        if modules is None:
            return None
        pool: Pool | None = None
        normalise = False
        for kind, path in _modules(modules):
            if kind == "Normalize":
                normalise = True
            elif kind == "Pooling":
                pool = _pool_of(_dictionary(self.files, f"{path}/config.json"))
            elif kind != "Transformer":
                raise ValueError(f"{MODULES} asks for {kind!r:.60}; known: Transformer, Pooling, Normalize")
        return None if pool is None else (pool, normalise)

    def longest_sentence(self) -> int | None:
        """How many tokens of a sentence are read at most, if the folder says so."""
        longest = _dictionary(self.files, "sentence_bert_config.json").get("max_seq_length")
        return longest if isinstance(longest, int) else None


def read_usage(folder: Path) -> Usage:
    """What a folder says beside its vocabulary; nothing is needed. A broken file: ValueError naming it."""
    files: dict[str, Any] = {}
    for name in (SETTINGS, ROLES, MODULES, "sentence_bert_config.json", "config_sentence_transformers.json"):
        if (folder / name).is_file():
            files[name] = _read_json(folder / name)
    for kind, path in _modules(files.get(MODULES, [])):
        if kind == "Pooling" and (folder / path / "config.json").is_file():
            files[f"{path}/config.json"] = _read_json(folder / path / "config.json")
    template = folder / TEMPLATE
    return Usage(files, _read_text(template) if template.is_file() else None)


def write_usage(usage: Usage, folder: Path) -> None:
    """Write the files beside the vocabulary; those there are replaced, each as a whole."""
    texts = {
        name: json.dumps(value, indent=2, ensure_ascii=False) + "\n" for name, value in usage.files.items()
    }
    if usage.chat_template is not None:
        texts[TEMPLATE] = usage.chat_template
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        draft.write_text(text, encoding="utf-8", newline="\n")
        draft.replace(path)


def _dictionary(files: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = files.get(name)
    return found if isinstance(found, Mapping) else {}


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise ValueError(f"{path} is not UTF-8: byte 0x{wrong:02x} at {error.start}") from None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None


def _modules(modules: Any) -> Iterator[tuple[str, str]]:
    """Kind and folder of each step in modules.json."""
    if not isinstance(modules, list):
        raise ValueError(f"{MODULES} should hold a list, not {type(modules).__name__}")
    for module in modules:
        module = module if isinstance(module, Mapping) else {}
        kind, path = str(module.get("type", "")).rsplit(".", 1)[-1], str(module.get("path", ""))
        if path and (path in (".", "..") or Path(path).name != path or "\\" in path):
            raise ValueError(f"{MODULES} names {path!r:.60}, which is no folder beside it")
        yield kind, path


def _pool_of(config: Mapping[str, Any]) -> Pool:
    """mean, first or last, from the old or the new spelling of 1_Pooling/config.json."""
    named = [config["pooling_mode"]] if isinstance(config.get("pooling_mode"), str) else []
    for name, value in config.items():
        if name.startswith("pooling_mode_") and value is True:
            named.append(name.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token"))
    if len(named) != 1 or named[0] not in _POOLS:
        what = " and ".join(map(str, named)) or "nothing"
        raise ValueError(f"the pooling asked for is {what:.80}; known: one of {', '.join(_POOLS)}")
    return _POOLS[named[0]]
