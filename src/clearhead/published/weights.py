"""The tensors of a published model <-> the Transformer of its config, exactly.

    our config -> a model without data -> names paired by the family's rows -> every tensor in its place

What cannot be placed is refused: a tensor that is missing or left over, a wrong shape, an unknown option. A
model of our own belongs to the first family that can hold its options. `models.py` opens the folder.
"""

import math
import re
import warnings
from collections import Counter
from dataclasses import dataclass, replace

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer
from clearhead.published import (
    families,
    families_encoder_decoders,
    families_encoders,
    families_experts,
)
from clearhead.published.mapping import (
    SAME,
    SPLIT,
    Family,
    Json,
    Pair,
    differences,
    find,
    find_class,
    list_names,
    pair_names,
    read_config,
    write_config,
)
from clearhead.published.storage import Tensors

# In the order in which a model of our own is matched.
FAMILIES = (
    families.FAMILIES
    | families_experts.FAMILIES
    | families_encoders.FAMILIES
    | families_encoder_decoders.FAMILIES
)

HEAD = "head.weight"


@dataclass(frozen=True)
class Origin:
    """Where a model came from: its family, and what its config.json and generation_config.json say."""

    model_type: str
    settings: Json
    generation: Json | None = None


# --------------------------------------------------------------------------------------------------- families


def find_family(settings: Json) -> tuple[Family, str]:
    """The family and the class that config.json names."""
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise ValueError(f"model_type={model_type!r:.80} is unknown; known: {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    names = settings.get("architectures")
    if not names:
        return family, next(iter(family.classes))
    if not isinstance(names, list) or names[0] not in [*family.classes]:
        raise ValueError(f"architectures={names!r:.80} is unknown; known: {', '.join(family.classes)}")
    return family, names[0]


def find_kind(family: Family, class_name: str, stored: Tensors) -> str:
    """The kind of a class that these tensors are: the first whose head they have."""
    *kinds, last = [name for name in family.classes if name.split()[0] == class_name]
    for kind in kinds:
        ends = [row.theirs.replace("*", "weight") for row in family.classes[kind].rows]
        if all(any(name.endswith(end) for name in stored) for end in ends):
            return kind
    return last


def match_family(config: ModelConfig) -> tuple[Family, str]:
    """The first family that can hold a model, and the class; ValueError lists what stands in the way."""
    best: tuple[list[str], str] | None = None
    for family in FAMILIES.values():
        class_name = find_class(family, config)
        if class_name is None:
            continue
        odd = unfit(family, config, class_name)
        if not odd:
            return family, class_name
        if best is None or distance(odd) < distance(best[0]):
            best = odd, class_name
    best = best or nearest_head(config)
    if best is None:
        raise ValueError(f"no published family has a head={config.head!r} with shape={config.shape!r}")
    options = ", ".join(f"{name}={find(config, name)!r}" for name in best[0])
    raise ValueError(f"these options have no Hugging Face form (nearest: {best[1]}): {options}")


def nearest_head(config: ModelConfig) -> tuple[list[str], str] | None:
    """The class with a head for the same purpose that differs least, and in what; None without one."""
    found: list[tuple[list[str], str]] = []
    for family in FAMILIES.values():
        for class_name, kind in family.classes.items():
            if kind.fields.get("head") != config.head:
                continue
            try:
                theirs = config.replace(**kind.fields)
            except ValueError:
                continue  # with these options it is no model at all
            own = [name for name, value in kind.fields.items() if find(config, name) != value]
            found.append((own + unfit(family, theirs, class_name), class_name))
    return min(found, key=lambda pair: distance(pair[0]), default=None)


def distance(odd: list[str]) -> int:
    """How far a family is from a model: a whole part of the config that it lacks counts for many fields."""
    return sum(100 if name in ("shape", "experts", "latent") else 1 for name in odd)


def fitting_class(family: Family, config: ModelConfig, settings: Json) -> str:
    """The class of a loaded model, which may have been given other options since."""
    class_name = find_class(family, config)
    odd = ["head"] if class_name is None else unfit(family, config, class_name, settings)
    if class_name is None or odd:
        options = ", ".join(f"{name}={find(config, name)!r}" for name in odd)
        raise ValueError(f"these options have no form in the family {family.model_type}: {options}")
    return class_name


def unfit(family: Family, config: ModelConfig, class_name: str, kept: Json | None = None) -> list[str]:
    """The fields that would come back differently from the family's config.json."""
    try:
        back = read_config(family, write_config(family, config, class_name, kept), class_name)
    except ValueError:
        return ["shape", "n_layers"]
    return differences(config, back)


# --------------------------------------------------------------------------------------------------- tensors


def own_tensors(model: nn.Module) -> dict[str, Shaped[Tensor, "..."]]:
    """Every tensor of a model once, by its first name."""
    names: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            names[name] = tensor
    return names


def named_tensors(model: Transformer, family: Family, class_name: str) -> dict[str, Shaped[Tensor, "..."]]:
    """Every tensor of a model, as the family's files name and shape it."""
    ours, made = own_tensors(model), {}
    for pair in pair_names(family, class_name, ours):
        values = [ours[name].detach().cpu() for name in pair.ours]
        for name, tensor in zip(pair.theirs, pair.op.write(values), strict=True):
            made[name] = tensor.contiguous()
    return made


def empty_model(config: ModelConfig) -> Transformer:
    """A model without data."""
    try:
        with torch.device("meta"):
            return Transformer(config)
    except (RuntimeError, OverflowError, TypeError) as error:
        raise ValueError(f"no model has these sizes: {str(error).splitlines()[0]:.120}") from None


def read_model(
    config: ModelConfig,
    family: Family,
    class_name: str,
    stored: Tensors,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Transformer:
    """The model of this config with the stored tensors in their places.

    `dtype`: the type of all weights; None: as stored, or what most are stored in where they differ. Buffers,
    which some files keep wider than the weights, stay as stored.
    """
    model, copies = empty_model(config), []
    if config.tied and config.head in ("lm", "masked"):
        copies = find_equal_heads(family, class_name, model, stored)
        if copies is None:
            config = replace(config, tied=False)
            model, copies = empty_model(config), []
    tied = config.tied and config.head in ("lm", "masked")
    ours = own_tensors(model)
    pairs = pair_names(family, class_name, ours)
    places = find_places(family, class_name, pairs, stored)
    check_names(family, pairs, places, stored, copies)
    for pair in pairs:
        check_shapes(pair, [ours[name] for name in pair.ours], places, stored)
    trained = [pair for pair in pairs if isinstance(ours[pair.ours[0]], nn.Parameter)]
    dtype = dtype or most_common_type([places[name] for pair in trained for name in pair.theirs], stored)
    weights: dict[str, Tensor] = {}
    for pair in pairs:
        shapes = [tuple(ours[name].shape) for name in pair.ours]
        kind, mapped = dtype if pair in trained else None, pair.op in (SAME, SPLIT)
        theirs = [read_tensor(stored, places[name], kind, mapped) for name in pair.theirs]
        weights |= zip(pair.ours, (t.to(device) for t in pair.op.read(theirs, shapes)), strict=True)
    if tied:
        weights[HEAD] = weights["embed.weight"]
    model.load_state_dict(weights, assign=True)
    if tied:
        model.head.weight = model.embed.weight
    return model


def most_common_type(names: list[str], stored: Tensors) -> torch.dtype:
    """The type in which most of these numbers are stored."""
    counts: Counter[torch.dtype] = Counter()
    for name in names:
        counts[stored.dtype(name)] += math.prod(stored.shape(name))
    return counts.most_common(1)[0][0]


def read_tensor(stored: Tensors, name: str, dtype: torch.dtype | None, kept: bool) -> Shaped[Tensor, "..."]:
    """A tensor in this type (None: its own), mapped from the file if it is `kept` as it is."""
    kept = kept and dtype in (None, stored.dtype(name))
    tensor = stored.tensor(name, mapped=kept)
    return tensor if dtype is None else tensor.to(dtype)


def find_places(family: Family, class_name: str, pairs: list[Pair], stored: Tensors) -> dict[str, str]:
    """The family's name of a tensor -> its name in the file.

    A file of the bare model lacks the prefix that the class puts before its names, and the other way round.
    """
    expected = {name for pair in pairs for name in pair.theirs}
    prefix = family.classes[class_name].prefix
    others = {kind.prefix for kind in family.classes.values()}
    places = {name: name for name in stored if name in expected}
    for name in stored:
        now = newest_name(family, name)
        bare = [now, *(now.removeprefix(other) for other in others if other and now.startswith(other))]
        for candidate in (now, *(prefix + part for part in bare)):
            if candidate in expected and candidate not in places:
                places[candidate] = name
    return places


def newest_name(family: Family, name: str) -> str:
    """The name of a tensor as files of today have it."""
    for old, new in family.older_names.items():
        if name.endswith(old):
            return name.removesuffix(old) + new
    return name


def find_equal_heads(
    family: Family, class_name: str, model: Transformer, stored: Tensors
) -> list[str] | None:
    """What a file has beside the embedding for a tied head: nothing, an equal copy, or None for one that
    differs.
    """
    pairs = pair_names(family, class_name, own_tensors(model) | {HEAD: model.embed.weight})
    places = find_places(family, class_name, pairs, stored)
    head = next((pair.theirs[0] for pair in pairs if HEAD in pair.ours), "")
    embed = next(pair.theirs[0] for pair in pairs if "embed.weight" in pair.ours)
    if head not in places or embed not in places:
        return []
    one, other = (stored.tensor(places[name]) for name in (head, embed))
    if one.shape == other.shape and torch.equal(one, other):
        return [places[head]]
    warnings.warn(
        f"{head} and {embed} differ although the config ties them; they stay two",
        stacklevel=5,
    )
    return None


def check_names(
    family: Family, pairs: list[Pair], places: dict[str, str], stored: Tensors, copies: list[str]
) -> None:
    """Raise ValueError, with both lists, unless the file has the tensors of the model and no others, but
    copies.
    """
    missing = [name for pair in pairs for name in pair.theirs if name not in places]
    used = {*places.values(), *copies}
    ignored = [re.compile(pattern) for pattern in family.ignored]
    left = [name for name in stored if name not in used]
    left = [name for name in left if not any(pattern.fullmatch(name) for pattern in ignored)]
    if missing or left:
        raise ValueError(
            f"the tensors are not those of this {family.model_type} model; "
            f"missing: {list_names(missing)}; left over: {list_names(left)}"
        )


def check_shapes(pair: Pair, ours: list[Tensor], places: dict[str, str], stored: Tensors) -> None:
    """Raise ValueError unless the tensors of a file have the shapes and types that the model needs."""
    for name, tensor in zip(pair.theirs, pair.op.write(ours), strict=True):
        found, fitting = stored.shape(places[name]), tuple(tensor.shape)
        if found != fitting:
            raise ValueError(f"{places[name]} has shape {found}; config.json asks for {fitting}")
        stored.dtype(places[name])
