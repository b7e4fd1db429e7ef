"""Published models come and go: a folder in Hugging Face form <-> (Transformer, Tokenizer).

    load    config.json -> family, class, our config; the tensors in their places; the tokenizer beside them
    save    the same tables read backwards: config.json, model.safetensors (in shards if large),
            generation_config.json, tokenizer.json and what goes beside it

A model keeps where it came from (`model.origin`), so that saving it again gives the same names, bytes and
settings. A GGUF file is read too. Nothing is downloaded unless that is asked for.
"""

from pathlib import Path

import torch

from clearhead.model.transformer import Transformer
from clearhead.published.gguf import load_gguf
from clearhead.published.layout import with_halves
from clearhead.published.mapping import Json, list_names, read_config, write_config
from clearhead.published.storage import (
    ENDINGS,
    one_line,
    open_tensors,
    read_json,
    replace_folder,
    write_json,
    write_tensors,
)
from clearhead.published.weights import (
    FAMILIES,
    Origin,
    find_family,
    find_kind,
    fitting_class,
    match_family,
    named_tensors,
    read_model,
)
from clearhead.text.foreign import AnyTokenizer, open_tokenizer
from clearhead.text.usage import SETTINGS, Usage

SHARD_BYTES = 5_000_000_000


def load(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    download: bool = False,
) -> tuple[Transformer, AnyTokenizer | None]:
    """The model and the tokenizer in a folder in Hugging Face form, or in a GGUF file.

    The tokenizer is None if the folder has none. `dtype`: the type of the weights; None: as in the file (of a
    GGUF file: float32). The model is in eval mode. Weights that keep their type are mapped from the file and
    not copied. `download`: fetch a model of this name from the Hugging Face Hub if there is no such folder.
    Raises FileNotFoundError for what is missing, and ValueError for a file that is damaged, of an unknown
    family, or does not fit its config.json.
    """
    place = find_place(path, download)
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype} holds no fractions; give torch.float32, bfloat16 or float16")
    if place.is_file():
        return load_gguf(place, dtype=dtype, device=device)
    settings = read_json(place / "config.json")
    try:
        family, class_name = find_family(settings)
        config = read_config(family, settings, class_name)
    except ValueError as error:
        raise ValueError(f"{place / 'config.json'}: {error}") from None
    stored = open_tensors(place)
    layers = config.n_layers + (config.n_encoder_layers or 0)
    if layers > len(stored):
        raise ValueError(f"{place}: config.json names {layers} layers, the files hold {len(stored)} tensors")
    try:
        kind = find_kind(family, class_name, stored)
        config = config if kind == class_name else read_config(family, settings, kind)
        model = read_model(config, family, kind, stored, dtype, torch.device(device))
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    generation = place / "generation_config.json"
    kept = read_json(generation) if generation.is_file() else None
    for file, named in ((place / "config.json", settings), (generation, kept or {})):
        check_ids(file, named)
    model.origin = Origin(family.model_type, settings, kept)
    return model.eval(), read_tokenizer(place)


def save(
    model: Transformer,
    tokenizer: AnyTokenizer | None,
    folder: str | Path,
    *,
    max_shard_bytes: int = SHARD_BYTES,
    settings: Json | None = None,
) -> Path:
    """Write a model, and its tokenizer unless that is None, as a folder in Hugging Face form; return it.

    A loaded model keeps its family; another is saved as the first family that has all its options, with
    rotary positions in halves. ValueError lists the options that have no Hugging Face form. Weights above
    `max_shard_bytes` go into several files. `settings`: what else config.json says, as the names of labels
    (id2label). The model is there whole or not at all, also when the disk is
    full or the program is killed. A folder that was there keeps its other files.
    """
    folder = Path(folder)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} must be at least 1")
    origin: Origin | None = model.origin
    if origin is None:
        if model.config.rotary_layout == "interleaved" and model.config.latent is None:
            model = with_halves(model)
        family, class_name = match_family(model.config)
        kept, generation = special_tokens(tokenizer), None
    else:
        family, kept, generation = FAMILIES[origin.model_type], origin.settings, origin.generation
        class_name = fitting_class(family, model.config, kept)
    written = write_config(family, model.config, class_name, kept | (settings or {}))
    written.pop("torch_dtype", None)  # how older files spell it
    written["dtype"] = str(model.embed.weight.dtype).removeprefix("torch.")
    tensors = named_tensors(model, family, class_name)

    def write(draft: Path) -> None:
        write_tensors(tensors, draft, max_shard_bytes)
        write_json(written, draft / "config.json")
        if generation is not None:
            write_json(generation, draft / "generation_config.json")
        if tokenizer is not None:
            write_tokenizer(tokenizer, draft)

    replace_folder(folder, write)
    return folder


# ----------------------------------------------------------------------------------------------------- places


def find_place(path: str | Path, download: bool) -> Path:
    """The folder or GGUF file that is meant: there already, or downloaded."""
    place = Path(path)
    if place.is_file() and place.suffix == ".gguf":
        return place
    if place.is_dir():
        if (place / "config.json").exists():
            return place
        files = sorted(place.glob("*.gguf"))
        if len(files) > 1:
            raise ValueError(f"{place} holds {list_names(file.name for file in files)}; name one of them")
        if not files:
            raise FileNotFoundError(
                f"{place} is no published model: it holds no config.json and no .gguf file"
            )
        return files[0]
    if place.exists():
        raise ValueError(f"{place} is neither a folder nor a GGUF file")
    if not download:
        raise FileNotFoundError(
            f"there is no folder {place}; with download=True a model of this name is fetched from the Hub"
        )
    return fetch(str(path))


def fetch(name: str) -> Path:
    """Download a model by its name on the Hugging Face Hub; the folder it is kept in."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ValueError("downloading a model needs the hub extra: pip install 'clearhead[hub]'") from None
    beside = ["*.json", "*.jinja", "*.txt", "*.model", "*.spm", "*.tiktoken"]
    try:
        folder = Path(snapshot_download(name, allow_patterns=[*beside, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=[f"*{ending}" for ending in ENDINGS])
    except Exception as error:  # whatever the network and its library raise
        reason = one_line(error).removeprefix("Got: ")
        raise FileNotFoundError(
            f"cannot download {name!r:.120} from the Hugging Face Hub: {reason}"
        ) from None
    return folder


def check_ids(file: Path, named: Json) -> None:
    """ValueError unless the ids of tokens that a file names are ids."""
    for key, value in named.items():
        each = value if isinstance(value, list) else [] if value is None else [value]
        if key == "bad_words_ids":
            wrong = not all(isinstance(word, list) and all(type(id) is int for id in word) for word in each)
        else:
            wrong = key.endswith("_token_id") and not all(type(id) is int for id in each)
        if wrong:
            raise ValueError(f"{file}: {key}={value!r:.80} should be the id of a token, or a list of ids")


# ------------------------------------------------------------------------------------------------- tokenizers


def read_tokenizer(folder: Path) -> AnyTokenizer | None:
    """The tokenizer in a folder, or None if it has no file of one; half of one is an error."""
    try:
        return open_tokenizer(folder)
    except FileNotFoundError:
        if any((folder / name).exists() for name in ("vocab.json", "merges.txt", "source.spm")):
            raise
        return None


def write_tokenizer(tokenizer: AnyTokenizer, folder: Path) -> None:
    """Write a tokenizer and what goes beside it; for one of our own, how Hugging Face is to read it."""
    if not tokenizer.usage.files:
        end = {"eos_token": "<|endoftext|>"} if "<|endoftext|>" in tokenizer.special_tokens else {}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **end}
        tokenizer = tokenizer.with_usage(Usage({SETTINGS: settings}, tokenizer.usage.chat_template))
    tokenizer.save(folder)


def special_tokens(tokenizer: AnyTokenizer | None) -> Json:
    """The ids that config.json names, as far as a tokenizer of our own has them."""
    specials = {} if tokenizer is None else tokenizer.special_tokens
    end = specials.get("<|endoftext|>")
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
