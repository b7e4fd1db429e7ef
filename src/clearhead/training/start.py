"""Training that starts from a model that is there already: a run, or a published one.

    config      taken over; the head becomes the one that the objective needs
    tokenizer   taken over: the model's weights speak its ids
    weights     taken over by name; what only the new head has starts as `initial.py` says

A published family says itself how its heads are made (the dense layer before a classifier, and so on), so
that what was trained can be saved in its form again.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from clearhead.generation.special_ids import published_ids
from clearhead.model.config import Head, ModelConfig
from clearhead.model.config_fields import given
from clearhead.model.transformer import Transformer
from clearhead.published.mapping import list_names, names_of_labels, read_config
from clearhead.published.models import load
from clearhead.published.weights import FAMILIES, Origin
from clearhead.text.foreign import AnyTokenizer, open_tokenizer
from clearhead.training.demands import DEMANDS
from clearhead.training.lora import Lora, find_layers
from clearhead.training.recipe import Recipe
from clearhead.training.run_folder import RunFolder, load_run

# What makes a head, and may differ from the model that one starts from.
HEAD_FIELDS = (
    "head",
    "n_labels",
    "head_activation",
    "head_dense_bias",
    "head_norm",
    "head_bias",
    "pool",
    "unit_length",
)
# What else may: it changes how a model is trained or how fast it runs, and no weight.
FREE_FIELDS = ("embed_dropout", "attn_dropout", "residual_dropout", "ff_dropout", "fused_qkv", "init")
# What [data] takes over from it.
TAKEN_OVER = ("tokenizer", "start_token")


@dataclass(frozen=True)
class Start:
    """The model that training starts from, in float32, and its tokenizer."""

    place: str
    model: Transformer
    tokenizer: AnyTokenizer


def open_start(place: str) -> Start:
    """The model at `train.start_from`: the folder of a run, or of a published model.

    ValueError or FileNotFoundError: nothing there, no tokenizer, or a form that training cannot go on with.
    """
    path = Path(place)
    if path.suffix == ".gguf" or (list(path.glob("*.gguf")) and not (path / "config.json").is_file()):
        raise ValueError(
            f"start_from={place}: a GGUF file is for using a model; make a folder of it first: "
            f"clearhead import {place} FOLDER"
        )
    if RunFolder(path).exists():
        model, tokenizer = load_run(path)
        return Start(place, model, tokenizer)
    if not path.is_dir():
        raise FileNotFoundError(
            f"start_from={place}: there is no such folder; give a run or a published model (one of the "
            "Hub is fetched by clearhead import NAME FOLDER --download)"
        )
    try:
        model, found = load(path, dtype=torch.float32)
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"start_from={place}, which is no run: {error}") from None
    if found is None:
        raise ValueError(f"start_from={place} holds no tokenizer, which turns text into the model's tokens")
    return Start(place, model, found)


def fit_recipe(recipe: Recipe, start: Start) -> Recipe:
    """The recipe with the model and the tokenizer that training starts from, and the head of its objective.

    [model] may name parts of the head and dropouts; what else it names must be what the model has.
    """
    asked, has, demand = recipe.model, start.model.config, DEMANDS[recipe.train.objective]
    if has.shape not in demand.shapes:
        raise ValueError(
            f"start_from={start.place} is of shape {has.shape!r}; objective={recipe.train.objective!r} "
            f"needs {' or '.join(map(repr, demand.shapes))}"
        )
    changes = {}
    for name in named(asked):
        if name in (*HEAD_FIELDS, *FREE_FIELDS):
            changes[name] = getattr(asked, name)
        elif getattr(asked, name) != getattr(has, name):
            raise ValueError(
                f"model.{name}={getattr(asked, name)!r:.60}, but start_from={start.place} has "
                f"{getattr(has, name)!r:.60}; leave it away, it is taken over"
            )
    if changes.pop("head", demand.head) != demand.head:
        raise ValueError(
            f"model.head={asked.head!r}, but objective={recipe.train.objective!r} needs {demand.head!r}; "
            "leave it away, it follows"
        )
    if recipe.train.context_length > has.max_len:
        raise ValueError(
            f"train.context_length={recipe.train.context_length} exceeds the {has.max_len} positions "
            f"(max_len) of start_from={start.place}; shorten the context"
        )
    if recipe.train.lora_rank:
        find_layers(start.model, Lora(recipe.train.lora_rank, recipe.train.lora_alpha, recipe.train.lora_on))
    data = recipe.data
    if data.tokenizer is None:
        data = replace(data, tokenizer=start.place)
    elif open_tokenizer(data.tokenizer).fingerprint != start.tokenizer.fingerprint:
        raise ValueError(
            f"data.tokenizer={data.tokenizer} is another vocabulary than that of start_from={start.place}; "
            "leave it away, it is taken over"
        )
    if recipe.train.objective == "translation" and data.start_token is None:
        data = replace(data, start_token=start_token(start))
    return replace(recipe, model=with_head(start, demand.head).replace(**changes), data=data)


def start_token(start: Start) -> str | None:
    """The special token with which the decoder of this model was trained to begin; None: its tokenizer's."""
    if RunFolder(start.place).exists():
        return RunFolder(start.place).recipe().data.start_token
    begin = published_ids(start.model).start
    return next((text for text, id in start.tokenizer.special_tokens.items() if id == begin), None)


def named(config: ModelConfig) -> list[str]:
    """The fields of a config that somebody has chosen: neither defaults nor sizes that follow from others."""
    return [name for name in given(config) if name not in config.following()]


def recipe_as_begun(recipe: Recipe, run: RunFolder) -> Recipe:
    """The recipe of a run that is resumed, with the model and the tokenizer that it took over when it began.

    The place it started from may be gone by now. Fields that are named stay, so that one that differs is
    found.
    """
    begun = run.recipe()
    if recipe.train.start_from is None or begun.train.start_from != recipe.train.start_from:
        return recipe
    model = begun.model.replace(**{name: getattr(recipe.model, name) for name in named(recipe.model)})
    taken = {name: getattr(recipe.data, name) or getattr(begun.data, name) for name in TAKEN_OVER}
    return replace(recipe, model=model, data=replace(recipe.data, **taken))


def with_head(start: Start, head: Head) -> ModelConfig:
    """The config of a model with another head: as its family makes it, else a single layer.

    n_labels is 1 until the examples say how many there are.
    """
    config = start.model.config
    if config.head == head:
        return config.replace(n_labels=1) if head in ("sequence", "token") else config
    made = _family_config(start, head)
    if made is not None:
        return made.replace(n_labels=1) if head in ("sequence", "token") else made
    plain = {name: ModelConfig.__dataclass_fields__[name].default for name in HEAD_FIELDS}
    plain["head"] = head
    if head in ("sequence", "token", "span"):
        plain["head_bias"] = True
    if head in ("sequence", "token"):
        plain["n_labels"] = 1
    if config.shape == "decoder":
        plain["pool"] = "last"  # the only position that has seen the whole text
    if head == "embedding":
        pooling = start.tokenizer.usage.pooling()
        plain["pool"], plain["unit_length"] = pooling or ("mean", True)
    return config.replace(**plain)


def _family_config(start: Start, head: Head) -> ModelConfig | None:
    """The config of the family's own class with this head; None if it has none."""
    origin: Origin | None = start.model.origin
    if origin is None:
        return None
    family = FAMILIES[origin.model_type]
    names = [name for name, kind in family.classes.items() if kind.fields.get("head") == head]
    if not names or head == "none":
        return None
    return read_config(family, origin.settings, names[0])


# ------------------------------------------------------------------------------------------------- weights


def fill(model: Transformer, start: Start, labels: list[str] | None = None) -> str:
    """Give a model the weights it starts from; say in one line what is new and what was left out.

    A head's layers are taken over when the head is of the same kind, and its last one when it tells the same
    labels apart (`labels`: their names, None: not known). The dense layer that a published encoder brings
    along without a head of its own is what its classifier begins with.
    """
    theirs, ours = start.model.state_dict(), model.state_dict()
    heads = (start.model.config.head, model.config.head)
    kept = heads[0] == heads[1] or heads == ("none", "sequence")
    known = label_names(start)
    others = labels is not None and known is not None and labels != known
    taken = {
        name: tensor
        for name, tensor in theirs.items()
        if name in ours
        and ours[name].shape == tensor.shape
        and (kept or not name.startswith("head.") or _tied(model, name))
        and not (others and name.startswith("head.out."))
    }
    new = [name for name in ours if name not in taken and not _tied(model, name)]
    left = [name for name in theirs if name not in taken and not _tied(start.model, name)]
    body = [name for name in (*new, *left) if not name.startswith("head.")]
    if body:
        raise ValueError(f"start_from={start.place} does not fit the model: {list_names(set(body))} differ")
    model.load_state_dict(taken, strict=False)
    if _family_config(start, model.config.head) is not None or heads[0] == heads[1]:
        model.origin = start.model.origin
    said = [f"start_from={start.place}: {len(taken)} tensors taken over"]
    said += [f"new: {list_names(new)}"] if new else []
    said += [f"left out: {list_names(left)}"] if left else []
    return "; ".join(said)


def _tied(model: Transformer, name: str) -> bool:
    return name == "head.weight" and getattr(model.head, "weight", None) is model.embed.weight


def label_names(start: Start) -> list[str] | None:
    """The names of the labels that the model tells apart, by their numbers; None if nobody says."""
    run = RunFolder(start.place)
    if run.exists():
        return run.labels()
    origin: Origin | None = start.model.origin
    return None if origin is None else names_of_labels(origin.settings)
