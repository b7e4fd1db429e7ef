"""The fields of a config, which may come from a TOML or JSON file: each has the type its dataclass says.

A mistake is a ValueError in the words of who writes such a file.
"""

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

# What others call some of our settings.
ELSEWHERE = {
    "learning_rate": "lr",
    "max_steps": "steps",
    "max_iters": "steps",
    "epochs": "tokens",
    "num_train_epochs": "tokens",
    "block_size": "context_length",
    "seq_len": "context_length",
    "per_device_train_batch_size": "batch_size",
    "gradient_accumulation_steps": "accumulation",
    "gradient_checkpointing": "checkpoint_activations",
    "max_grad_norm": "clip",
    "grad_clip": "clip",
    "lr_scheduler_type": "schedule",
    "warmup_steps": "warmup",
    "warmup_ratio": "warmup",
    "warmup_iters": "warmup",
    "fp16": "dtype",
    "bf16": "dtype",
    "eval_steps": "eval_every",
    "eval_interval": "eval_every",
    "save_steps": "save_every",
    "hidden_size": "d_model",
    "n_embd": "d_model",
    "num_hidden_layers": "n_layers",
    "num_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "d_head",
    "intermediate_size": "d_ff",
    "hidden_act": "activation",
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that was meant: what another library calls `name`, or one that is spelled nearly so.

    >>> nearest("hidden_size", ["d_model", "d_ff"]), nearest("n_layer", ["n_layers"]), nearest("x", ["lr"])
    ('d_model', 'n_layers', None)
    """
    known = list(known)
    if ELSEWHERE.get(name) in known:
        return ELSEWHERE[name]
    return next(iter(get_close_matches(name, known, n=1)), None)


def check_field_names(cls: type, values: dict[str, Any], what: str) -> None:
    """Raise ValueError for a key of `values` that is no field of the dataclass `cls`, naming the nearest
    field.
    """
    known = [field.name for field in fields(cls)]
    for name in values:
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else f"known: {', '.join(known)}"
            raise ValueError(f"unknown {what} setting {name!r}; {hint}")


def check_field_types(config: Any) -> None:
    """Raise ValueError for a field of a dataclass that holds another type, as TOML or JSON may give."""
    for field in fields(config):
        _check_type(field.name, getattr(config, field.name), field.type)


def freeze_lists(config: Any) -> None:
    """Make tuples of the lists that TOML and JSON give for tuples, so that the config stays a value."""
    for field in fields(config):
        value = getattr(config, field.name)
        kinds = (field.type, *get_args(field.type))
        if isinstance(value, list) and any(get_origin(kind) is tuple for kind in kinds):
            object.__setattr__(config, field.name, tuple(value))


def given(config: Any) -> list[str]:
    """The names of the fields that are not at their defaults."""
    return [field.name for field in fields(config) if getattr(config, field.name) != field.default]


def check_positive(name: str, value: int) -> None:
    """Raise ValueError, naming the field, for a size below 1."""
    if value < 1:
        raise ValueError(f"{name}={value} must be at least 1")


def _check_type(name: str, value: Any, kind: Any) -> None:
    options = get_args(kind)
    if get_origin(kind) is Literal:
        if value not in options:
            raise ValueError(f"{name}={value!r:.120} is unknown; choose one of {', '.join(options)}")
        return
    allowed = options if get_origin(kind) in (UnionType, Union) else (kind,)
    if any(_is_a(value, option) for option in allowed):
        return
    wanted = " or ".join(_in_words(option) for option in allowed)
    shown = list(value) if isinstance(value, tuple) else value
    raise ValueError(f"{name}={shown!r:.120} must be {wanted}, not {_in_words(type(value))}")


def _in_words(kind: Any) -> str:
    """A type in the words of who writes a file.

    >>> _in_words(int), _in_words(tuple[str, ...])
    ('a whole number', 'a list of texts')
    """
    if get_origin(kind) is Literal:
        return " or ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        inside = _in_words(get_args(kind)[0])
        return f"a list of {inside.removeprefix('a ')}{'s' if inside.startswith('a ') else ''}"
    if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, dict)):
        return "a table of settings"
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    return (words | {type(None): "none", tuple: "a list", list: "a list"}).get(kind, str(kind))


def _is_a(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:  # tuple[bool, ...]
        return type(value) is tuple and all(_is_a(item, get_args(kind)[0]) for item in value)
    return type(value) is kind or (kind is float and type(value) is int)
