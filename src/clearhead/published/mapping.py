"""What a family of published models is: a table that is read in both directions.

A `Family` says, as data, how a folder in Hugging Face form and a Transformer correspond:

    keys      our config's field  <->  a key of config.json                       Key, or Part for what one
                                                                                   key does not tell alone
    fixed     our fields that every model of the family has alike
    refused   keys of config.json whose other values would be another model
    rows      the names of tensors, theirs <-> ours, and an invertible `Op` where not a plain renaming
    classes   architectures[0] -> the head: our fields, its tensors, the prefix of the rows. What follows a
              blank in a name tells apart kinds of one class that only the tensors in a file distinguish
    ignored   what files of the family are known to carry needlessly

Rows are templates: `{i}` is a layer, `{e}` an expert (theirs only: an Op joins the experts), `*` is weight or
bias. A table may hold rows that a model lacks: the model's own tensors choose (see `pair_names`), so that the
map is one-to-one and no option need be asked for. Field names with a dot reach into a part of the config:
"experts.top_k".

`read_config(write_config(config)) == config` is the definition of "this family can hold this model".
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor

from clearhead.model.config import ModelConfig
from clearhead.model.config_parts import ExpertsConfig, LatentConfig

Json = dict[str, Any]
Shapes = list[tuple[int, ...]]

# Fields that change how a model is trained or how fast it runs, and nothing that it computes.
TRAINING_ONLY = (
    "init",
    "fused_qkv",
    "embed_dropout",
    "attn_dropout",
    "residual_dropout",
    "ff_dropout",
    "experts.jitter",
    "experts.balance_loss",
    "experts.z_loss",
)
LARGEST = 3.4e38  # of float32
MOST_LAYERS = MOST_EXPERTS = 10_000  # a config that asks for more is damaged


class Required:
    """The default of a key that config.json must have."""


@dataclass(frozen=True)
class Key:
    """One field of ours under one key of config.json."""

    name: str  # newest spelling, the one that is written
    default: Any = Required  # when the key is missing; None: our field's own rule
    values: Mapping[str, Any] | None = None  # theirs -> ours; of several for one of ours the first is written
    older: tuple[str, ...] = ()  # other spellings that files use
    null: bool = False  # null in the file is the value None, not a missing key

    @property
    def names(self) -> tuple[str, ...]:
        """All keys it reads."""
        return (self.name, *self.older)

    def read(self, settings: Json) -> Any:
        """Our value from config.json; ValueError if the key or what it says is unknown."""
        if self.null and self.name in settings and settings[self.name] is None:
            return None
        found = [settings[name] for name in self.names if settings.get(name) is not None]
        if not found and self.default is Required:
            raise ValueError(f"there is no {' or '.join(self.names)}")
        value = found[0] if found else self.default
        if self.values is None or (value is None and not found):
            return value
        if not isinstance(value, str) or value not in self.values:
            raise ValueError(f"{self.name}={value!r:.80} is unknown; known: {', '.join(self.values)}")
        return self.values[value]

    def write(self, value: Any, kept: Json) -> Json:
        """The key for our value. What the old file `kept` says stays if it means the same."""
        for name in self.names:
            if kept.get(name) is not None and self._means(kept[name], value):
                return {self.name: kept[name]}
        if self.values is None:
            return {self.name: value}
        return dict([(self.name, theirs) for theirs, ours in self.values.items() if ours == value][:1])

    def _means(self, theirs: Any, ours: Any) -> bool:
        if self.values is None:
            return theirs == ours and isinstance(theirs, bool) == isinstance(ours, bool)
        return isinstance(theirs, str) and self.values.get(theirs, Required) == ours


@dataclass(frozen=True)
class Part:
    """Fields of ours that several keys tell together, or in several spellings."""

    names: tuple[str, ...]  # every key that `read` looks at; when saving again they are written anew
    read: Callable[[Json], Json]  # config.json -> our fields (dotted names allowed)
    write: Callable[[ModelConfig], Json]  # our config -> keys, in the newest spelling


class Op(NamedTuple):
    """How some tensors of theirs become some of ours, and back.

    `read(theirs, shapes)` gets the shapes of ours; `write(ours)` is also run on tensors without data, to know
    which shapes a file must have.
    """

    read: Callable[[list[Tensor], Shapes], list[Tensor]]
    write: Callable[[list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Row:
    """Names of tensors that correspond, theirs and ours, each separated by blanks, and how they convert."""

    theirs: str
    ours: str
    op: Op | None = None  # None: the same tensor under another name
    given: str = ""  # only in a model that also has this tensor of ours
    unless: str = ""  # only in a model that does not have it


@dataclass(frozen=True)
class Class:
    """A class: our fields that it means, its head's rows, and what stands before the family's rows."""

    fields: Json
    rows: tuple[Row, ...] = ()
    prefix: str = ""


@dataclass(frozen=True)
class Family:
    """A family as data; see the top of this file."""

    model_type: str
    keys: Mapping[str, Key]
    rows: tuple[Row, ...]
    classes: Mapping[str, Class]  # the first is meant when config.json names none
    parts: tuple[Part, ...] = ()
    fixed: Json = field(default_factory=dict)
    refused: Mapping[str, tuple[Any, ...]] = field(
        default_factory=dict
    )  # key -> the values that are no other model
    ignored: tuple[str, ...] = ()  # patterns of names, each matched as a whole
    older_names: Mapping[str, str] = field(default_factory=dict)  # old end of a name -> the end it has now

    @property
    def defaults(self) -> Json:
        """What keys say that are not there, for parts that look at them."""
        return {key.name: key.default for key in self.keys.values() if key.default not in (Required, None)}


def in_layers(theirs: str, ours: str, rows: Mapping[str, str | tuple[str, Op]]) -> tuple[Row, ...]:
    """Rows below a layer's two prefixes, from a table theirs -> ours or (ours, op)."""
    made = []
    for their_names, entry in rows.items():
        our_names, op = entry if isinstance(entry, tuple) else (entry, None)
        made.append(
            Row(
                " ".join(theirs + name for name in their_names.split()),
                " ".join(ours + name for name in our_names.split()),
                op,
            )
        )
    return tuple(made)


# ---------------------------------------------------------------------------------------------- config.json


def read_config(family: Family, settings: Json, class_name: str) -> ModelConfig:
    """The config that config.json describes; ValueError names what is missing, unknown or not supported."""
    for name, allowed in family.refused.items():
        if settings.get(name) is not None and settings[name] not in allowed:
            raise ValueError(f"{name}={settings[name]!r:.80} is not supported")
    if settings.get("quantization_config") is not None:
        raise ValueError("the weights are quantised (quantization_config); dequantise them first")
    ours: Json = dict(family.fixed)
    for key in (family.keys[name] for name in ("n_layers", "n_encoder_layers") if name in family.keys):
        layers = key.read(settings)
        if type(layers) is not int or not 1 <= layers <= MOST_LAYERS:
            raise ValueError(f"{key.name}={layers!r:.80} is no number of layers up to {MOST_LAYERS}")
    ours |= {name: key.read(settings) for name, key in family.keys.items()}
    settings = family.defaults | settings
    for part in family.parts:
        try:
            ours |= part.read(settings)
        except (TypeError, KeyError, AttributeError, ArithmeticError, IndexError) as error:
            known = ", ".join(name for name in part.names if name in settings) or "the sizes"
            raise ValueError(f"cannot make sense of {known}: {error!r:.120}") from None
    ours |= family.classes[class_name].fields
    if ours.get("head") in ("sequence", "token"):
        ours["n_labels"] = count_labels(settings)
    config = build_config(ours)
    if config.experts is not None and config.experts.n_experts > MOST_EXPERTS:
        raise ValueError(f"{config.experts.n_experts} experts are more than {MOST_EXPERTS}")
    return config


def build_config(ours: Json) -> ModelConfig:
    """The config with these fields; dotted names make its parts."""
    flat = {name: value for name, value in ours.items() if "." not in name}
    for part, kind in (("experts", ExpertsConfig), ("latent", LatentConfig)):
        inner = {name.split(".", 1)[1]: value for name, value in ours.items() if name.startswith(part + ".")}
        if inner:
            flat[part] = kind(**as_fields(kind, inner))
    return ModelConfig(**as_fields(ModelConfig, flat))


def as_fields(config: type, values: Json) -> Json:
    """Values from JSON in the types of a dataclass's fields: tuples for lists, floats for whole numbers."""
    real = {item.name for item in fields(config) if item.type in (float, float | None, tuple[float, ...])}

    made: Json = {}
    for name, value in values.items():
        value = tuple(value) if isinstance(value, list) else value
        if name in real:
            value = (
                tuple(as_real(name, part) for part in value)
                if isinstance(value, tuple)
                else as_real(name, value)
            )
        made[name] = value
    return made


def as_real(name: str, value: Any) -> Any:
    """A whole number as a float; ValueError for one that a model's float32 cannot hold."""
    if isinstance(value, int | float) and LARGEST < abs(value) < math.inf:
        raise ValueError(f"{name}={value!r:.40} is beyond the numbers of float32")
    return float(value) if type(value) is int else value


def write_config(family: Family, config: ModelConfig, class_name: str, kept: Json | None = None) -> Json:
    """config.json of this model: what the family's keys tell, and the rest as the old file `kept` had it."""
    kept = {} if kept is None else kept
    owned = {name for key in family.keys.values() for name in key.names}
    owned |= {name for part in family.parts for name in part.names}
    made = {name: value for name, value in kept.items() if name not in owned}
    for name, key in family.keys.items():
        made |= key.write(find(config, name), kept)
    for part in family.parts:
        made |= part.write(config)
    if config.head in ("sequence", "token") and count_labels(kept) != config.n_labels:
        made["id2label"] = {str(index): f"LABEL_{index}" for index in range(config.n_labels)}
        made["label2id"] = {f"LABEL_{index}": index for index in range(config.n_labels)}
    return made | {"model_type": family.model_type, "architectures": [class_name.split()[0]]}


def find(config: ModelConfig, name: str) -> Any:
    """A field, also a dotted one; None where the part is missing."""
    value: Any = config
    for step in name.split("."):
        value = getattr(value, step, None)
    return value


def count_labels(settings: Json) -> int:
    """How many classes a classifier tells apart: 2 unless config.json says otherwise."""
    labels = settings.get("id2label")
    if isinstance(labels, dict) and labels:
        return len(labels)
    count = settings.get("num_labels")
    return 2 if count is None else count


def names_of_labels(settings: Json) -> list[str]:
    """What a classifier calls its classes, by their numbers, as config.json says; "LABEL_0" where it does
    not.

    >>> names_of_labels({"id2label": {"1": "good", "0": "bad"}}), names_of_labels({})
    (['bad', 'good'], ['LABEL_0', 'LABEL_1'])
    """
    named = settings.get("id2label")
    named = {str(number): str(name) for number, name in named.items()} if isinstance(named, dict) else {}
    return [named.get(str(number), f"LABEL_{number}") for number in range(count_labels(settings))]


def find_class(family: Family, config: ModelConfig) -> str | None:
    """The family's class with this model's head, or None."""
    for name, kind in family.classes.items():
        if all(find(config, key) == value for key, value in kind.fields.items()):
            return name
    return None


def differences(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Names of the fields by which two models compute different things."""
    names: list[str] = []
    for name in (item.name for item in fields(ModelConfig)):
        part = getattr(one, name)
        inside = is_dataclass(part) and getattr(other, name) is not None
        names += [f"{name}.{item.name}" for item in fields(part)] if inside else [name]
    return [name for name in names if name not in TRAINING_ONLY and find(one, name) != find(other, name)]


# ---------------------------------------------------------------------------------------------- tensor names


class Pair(NamedTuple):
    """Tensors that correspond, by their full names."""

    theirs: list[str]
    ours: list[str]
    op: Op


def pair_names(family: Family, class_name: str, ours: Mapping[str, Tensor]) -> list[Pair]:
    """The names of a file for each tensor of a model; `ours`: name -> tensor, whose data is not looked at.

    ValueError names the tensors of ours that the family has no name for.
    """
    kind = family.classes[class_name]
    left = dict.fromkeys(ours)
    pairs = []
    prefixed = [(kind.prefix, row) for row in family.rows]
    for prefix, row in [*prefixed, *(("", row) for row in kind.rows)]:
        for pair in pair_row(prefix, row, ours):
            pairs.append(pair)
            for name in pair.ours:
                if name not in left:
                    raise AssertionError(f"two rows of {family.model_type} name {name}")
                del left[name]
    if left:
        raise ValueError(f"{class_name} has no name for {list_names(left)}")
    return pairs


def pair_row(prefix: str, row: Row, ours: Mapping[str, Tensor]) -> Iterator[Pair]:
    """The pairs of one row: one for each layer, weight or bias that the model has."""
    first, *others = row.ours.split()
    pattern = re.escape(first).replace(r"\{i\}", r"(?P<layer>\d+)").replace(r"\*", "(?P<kind>weight|bias)")
    for name, tensor in ours.items():
        match = re.fullmatch(pattern, name)
        if not match:
            continue
        found = match.groupdict()
        layer, kind = found.get("layer") or "", found.get("kind") or ""

        our_names = [name, *(fill(other, layer, kind) for other in others)]
        needed = [*our_names, *([fill(row.given, layer, kind)] if row.given else [])]
        if not all(other in ours for other in needed) or fill(row.unless, layer, kind) in ours:
            continue
        theirs = []
        for template in row.theirs.split():
            filled = prefix + fill(template, layer, kind)
            experts = range(tensor.shape[0]) if "{e}" in filled else [""]
            theirs += [filled.replace("{e}", str(expert)) for expert in experts]
        yield Pair(theirs, our_names, row.op or SAME)


def fill(template: str, layer: str, kind: str) -> str:
    """A name of a row in this layer, of this kind."""
    return template.replace("{i}", layer).replace("*", kind)


def list_names(names: Any, most: int = 8) -> str:
    """Some names in one line, and how many more there are."""
    listed = sorted(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    shown = (name if name.isprintable() else ascii(name) for name in listed[:most])
    return (", ".join(f"{name:.120}" for name in shown) or "nothing") + more


# ------------------------------------------------------------------------------------------------ operations


def _transpose(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    return tensor.t().contiguous() if tensor.dim() == 2 else tensor


def _turn(tensor: Shaped[Tensor, "..."]) -> Shaped[Tensor, "..."]:
    return (tensor.transpose(1, 2) if tensor.dim() == 3 else tensor).contiguous()


def _split(theirs: list[Tensor], shapes: Shapes) -> list[Tensor]:
    return list(theirs[0].split([shape[0] for shape in shapes]))


SAME = Op(lambda theirs, shapes: theirs, lambda ours: ours)
# A matrix stored (in, out); a bias as it is.
TRANSPOSED = Op(
    lambda theirs, shapes: [_transpose(tensor) for tensor in theirs],
    lambda ours: [_transpose(tensor) for tensor in ours],
)
# Several of ours below each other in one of theirs.
SPLIT = Op(_split, lambda ours: [torch.cat(ours)])
# The same, stored (in, out).
SPLIT_TRANSPOSED = Op(
    lambda theirs, shapes: [part.contiguous() for part in _split([_transpose(theirs[0])], shapes)],
    lambda ours: [_transpose(torch.cat(ours))],
)
# One of theirs for every expert.
STACKED = Op(lambda theirs, shapes: [torch.stack(theirs)], lambda ours: list(ours[0].unbind()))
# Every expert's matrix stored (in, out).
SWAPPED = Op(
    lambda theirs, shapes: [tensor.transpose(1, 2).contiguous() for tensor in theirs],
    lambda ours: [tensor.transpose(1, 2).contiguous() for tensor in ours],
)
# Two of ours in alternating columns of one, matrices of experts stored (in, out).
DEINTERLEAVED = Op(
    lambda theirs, shapes: [_turn(theirs[0][..., start::2]) for start in (0, 1)],
    lambda ours: [torch.stack([_turn(tensor) for tensor in ours], dim=-1).flatten(-2)],
)
# A leading dimension of 1.
FLAT = Op(
    lambda theirs, shapes: [tensor[0] for tensor in theirs], lambda ours: [tensor[None] for tensor in ours]
)
