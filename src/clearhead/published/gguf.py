"""A model in a GGUF file -> (Transformer, Tokenizer): decoders of the Llama type, and their chat template.

A GGUF file holds what a folder in Hugging Face form holds, under other names. So its settings are put as a
config.json, its tensors under the names of the family, and the family's own table does the rest. One thing is
more than a name: files of the type `llama` store the rows of q and k so that the features that turn together
are neighbours. Here they are put back into halves:

    row 2j + s of a head  ->  row s K/2 + j        s = 0, 1

Files are read, not written.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from clearhead.model.transformer import Transformer
from clearhead.published.gguf_file import GGUFFile
from clearhead.published.layout import into_halves
from clearhead.published.mapping import Json, read_config
from clearhead.published.storage import Tensors
from clearhead.published.weights import Origin, find_family, read_model
from clearhead.text.definition import unspell
from clearhead.text.foreign import AnyTokenizer, ForeignTokenizer
from clearhead.text.sentencepiece import CONTROL, USER, PieceTable, tokenizer_json
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.usage import SETTINGS, Usage


class Kind(NamedTuple):
    """A type of model: its class in Hugging Face form, and whether rows of q and k are neighbours."""

    model_type: str
    class_name: str
    neighbours: bool = False


KINDS = {
    "llama": Kind("llama", "LlamaForCausalLM", neighbours=True),
    "qwen2": Kind("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Kind("qwen3", "Qwen3ForCausalLM"),
}

# key of config.json <- setting, without the name of the type before it
SETTINGS_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "head_dim": "attention.key_length",
}
NEEDED = [key for key in SETTINGS_KEYS if key not in ("num_key_value_heads", "head_dim")]

# tensor of the file -> of the family
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
FREQUENCIES = "rope_freqs.weight"  # divisors of the rotary frequencies, which config.json tells otherwise

# tokenizer.ggml.pre -> our splitter, and whether a pre-token that is a token is taken at once
SPLITTER_OF = {
    **dict.fromkeys(("gpt-2", "gpt2", "olmo", "phi-2", "roberta-bpe", "modern-bert"), ("gpt2", False)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), ("smollm", False)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3"), ("llama3", True)),
    **dict.fromkeys(("dbrx", "smaug-bpe"), ("llama3", False)),
    **dict.fromkeys(("qwen2", "stablelm2", "deepseek-r1-qwen"), ("qwen2", False)),
    **dict.fromkeys(("gpt-4o", "llama4"), ("o200k", False)),
}


def load_gguf(
    path: str | Path, *, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> tuple[Transformer, AnyTokenizer]:
    """The model and the tokenizer in a GGUF file, in eval mode.

    `dtype`: the type of the weights; None: float32, whatever the file has. Raises FileNotFoundError if there
    is no such file, and ValueError for one that is damaged, of a type of model or tokenizer that is not known
    here, or quantised while the `gguf` package is not installed.
    """
    file = GGUFFile(Path(path))
    try:
        settings = read_settings(file)
        family, class_name = find_family(settings)
        config = read_config(family, settings, class_name)
        stored = FamilyTensors(file, settings)
        if config.n_layers > len(stored):
            raise ValueError(f"{config.n_layers} layers are named, and {len(stored)} tensors there")
        tokenizer = read_tokenizer(file.settings)
        if tokenizer.vocab_size > config.vocab_size:
            raise ValueError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding {config.vocab_size} rows"
            )
        model = read_model(config, family, class_name, stored, dtype or torch.float32, torch.device(device))
    except (ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"{path}: {error.args[0] if error.args else error}") from None
    model.origin = Origin(family.model_type, settings, special_ids(file.settings))
    return model.eval(), tokenizer


# --------------------------------------------------------------------------------------------------- settings


def read_settings(file: GGUFFile) -> Json:
    """What config.json would say about this model."""
    found = file.settings
    name = found.get("general.architecture")
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"general.architecture={name!r:.60} is not known; known: {', '.join(KINDS)}")
    kind = KINDS[name]
    settings: Json = {"architectures": [kind.class_name], "model_type": kind.model_type}
    for key, setting in SETTINGS_KEYS.items():
        value = found.get(f"{name}.{setting}")
        if value is None and key in NEEDED:
            raise ValueError(f"there is no {name}.{setting}")
        if value is not None:
            settings[key] = number(f"{name}.{setting}", value)
    if found.get(f"{name}.expert_count"):
        raise ValueError(f"{name}.expert_count={found[f'{name}.expert_count']!r:.60}: experts are not read")
    if "token_embd.weight" not in file.names:
        raise ValueError("there is no tensor token_embd.weight")
    settings["vocab_size"] = file.shape("token_embd.weight")[0]
    settings["hidden_act"] = "silu"
    settings["tie_word_embeddings"] = "output.weight" not in file.names
    if kind.model_type == "llama":
        settings["attention_bias"] = "blk.0.attn_q.bias" in file.names
        settings["mlp_bias"] = "blk.0.ffn_up.bias" in file.names
    settings |= read_rope(file, name, settings)
    return settings | special_ids(found)


def number(name: str, value: Any) -> Any:
    """A setting that is a number; a float in the shortest form that is the same in float32."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name}={value!r:.60} should be one number for all layers")
    return value if isinstance(value, int) else float(str(np.float32(value)))


def read_rope(file: GGUFFile, name: str, settings: Json) -> Json:
    """Rotary positions: base, and how they are stretched."""
    found = file.settings
    if not settings["num_attention_heads"]:
        raise ValueError(f"{name}.attention.head_count=0")
    d_head = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
    turned = found.get(f"{name}.rope.dimension_count", d_head)
    if turned != d_head:
        raise ValueError(f"{name}.rope.dimension_count={turned!r:.60} of {d_head} features is not read")
    rope: Json = {
        "rope_type": "default",
        "rope_theta": number(f"{name}.rope.freq_base", found.get(f"{name}.rope.freq_base", 10_000.0)),
    }
    kind = found.get(f"{name}.rope.scaling.type", "none")
    if kind == "yarn":
        rope["attention_factor"] = found.get(f"{name}.rope.scaling.attn_factor")
        rope["original_max_position_embeddings"] = found.get(f"{name}.rope.scaling.original_context_length")
        rope = {key: value for key, value in rope.items() if value is not None}
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": found.get(f"{name}.rope.scaling.factor")}
    elif kind != "none":
        raise ValueError(f"{name}.rope.scaling.type={kind!r:.60} is not known; known: none, linear, yarn")
    if FREQUENCIES in file.names:
        if kind != "none":
            raise ValueError(f"{FREQUENCIES} and {name}.rope.scaling.type={kind!r} do not go together")
        divisors = file.tensor(FREQUENCIES).float().tolist()
        rope |= {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
        }
    return {"rope_parameters": rope}


def special_ids(found: Mapping[str, Any]) -> Json:
    """The ids of the tokens that begin, end and pad a text; a chat may end by a token of its own."""
    ids = {
        role: found.get(f"tokenizer.ggml.{name}_token_id")
        for role, name in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("eot", "eot"))
    }
    for role, token_id in ids.items():
        if token_id is not None and type(token_id) is not int:
            raise ValueError(f"the id of the token {role} is {token_id!r:.60}, no whole number")
    ends = [ids[role] for role in ("eos", "eot") if ids[role] is not None]
    ends = list(dict.fromkeys(ends))
    made = {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": ids["pad"],
    }
    return {key: value for key, value in made.items() if value not in (None, [])}


# ---------------------------------------------------------------------------------------------------- tensors


class FamilyTensors(Tensors):
    """A GGUF file's tensors under the family's names."""

    def __init__(self, file: GGUFFile, settings: Json) -> None:
        super().__init__([])
        self._file = file
        kind = KINDS[file.settings["general.architecture"]]
        heads = settings["num_attention_heads"]
        self._heads = {"q": heads, "k": settings.get("num_key_value_heads") or heads}
        self._neighbours = kind.neighbours
        self._names = {family_name(name): name for name in file.names if name != FREQUENCIES}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return self._file.shape(self._names[name])

    def dtype(self, name: str) -> torch.dtype:
        """The type of its numbers."""
        return self._file.dtype(self._names[name])

    def tensor(self, name: str, mapped: bool = True) -> Shaped[Tensor, "..."]:
        """The tensor, in memory of its own; rows of q and k in halves."""
        tensor = self._file.tensor(self._names[name])
        turned = re.search(r"\.attn_([qk])\.", self._names[name])
        if turned is None or not self._neighbours:
            return tensor
        return into_halves(tensor, self._heads[turned[1]])


def family_name(name: str) -> str:
    """The family's name of a tensor; a name that is not known stays, and is refused later."""
    module, _, kind = name.rpartition(".")
    if module in OUTSIDE:
        return f"{OUTSIDE[module]}.{kind}"
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
    if found is None or found[2] not in IN_LAYER:
        return name
    return f"model.layers.{found[1]}.{IN_LAYER[found[2]]}.{kind}"


# ------------------------------------------------------------------------------------------------- tokenizers


def read_tokenizer(found: Mapping[str, Any]) -> AnyTokenizer:
    """The tokenizer that the settings of a file describe, with roles and chat template."""
    tokens = texts(found, "tokenizer.ggml.tokens")
    kinds = found.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise ValueError("tokenizer.ggml.token_type should name a type for each token")
    model = found.get("tokenizer.ggml.model")
    if model == "gpt2":
        tokenizer = byte_level(found, tokens, kinds)
    elif model == "llama":
        tokenizer = sentence_piece(found, tokens, kinds)
    else:
        raise ValueError(f"tokenizer.ggml.model={model!r:.60} is not known; known: gpt2, llama")
    return tokenizer.with_usage(read_usage(found, tokens))


def texts(found: Mapping[str, Any], name: str) -> list[str]:
    """A setting that is a list of texts."""
    value = found.get(name)
    if not isinstance(value, list) or not value or not isinstance(value[0], str):
        raise ValueError(f"there is no {name}, a list of texts")
    return value


def around(found: Mapping[str, Any], tokens: list[str], default: Mapping[str, bool]) -> tuple[list[str], ...]:
    """The tokens that go before and after a text."""
    sides = []
    for role in ("bos", "eos"):
        wanted = found.get(f"tokenizer.ggml.add_{role}_token", default[role])
        sides.append([token_of(found, tokens, role)] if wanted else [])
    return tuple(sides)


def token_of(found: Mapping[str, Any], tokens: list[str], role: str) -> str:
    """The text of the token with this role."""
    token_id = found.get(f"tokenizer.ggml.{role}_token_id")
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
        raise ValueError(f"tokenizer.ggml.{role}_token_id={token_id!r:.60} is no token")
    return tokens[token_id]


def byte_level(found: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> Tokenizer:
    """Byte-level BPE: tokens and merges as GPT-2's files spell them."""
    name = found.get("tokenizer.ggml.pre")
    if not isinstance(name, str) or name not in SPLITTER_OF:
        raise ValueError(f"tokenizer.ggml.pre={name!r:.60} is not known; known: {', '.join(SPLITTER_OF)}")
    splitter, whole = SPLITTER_OF[name]
    special = {
        text: i for i, (text, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind in (CONTROL, USER)
    }
    vocab = {i: text.encode() if text in special else as_bytes(text) for i, text in enumerate(tokens)}
    merges = []
    for merge in texts(found, "tokenizer.ggml.merges"):
        left, blank, right = merge.partition(" ")
        if not blank:
            raise ValueError(f"the merge {merge!r:.60} should be two tokens")
        merges.append((unspell(left), unspell(right)))
    begin, end = around(found, tokens, {"bos": splitter == "llama3", "eos": False})
    return Tokenizer(
        vocab,
        merges,
        special,
        splitter,
        alphabet="bytes",
        ignore_merges=whole,
        begin=begin,
        end=end,
    )


def as_bytes(text: str) -> bytes:
    """The bytes a token is spelled for; one that is not spelled is its text."""
    try:
        return unspell(text)
    except ValueError:
        return text.encode()


def sentence_piece(found: Mapping[str, Any], tokens: list[str], kinds: list[int]) -> ForeignTokenizer:
    """SentencePiece BPE: tokens with scores."""
    scores = found.get("tokenizer.ggml.scores")
    if not isinstance(scores, list):
        raise ValueError("there is no tokenizer.ggml.scores, a list of numbers")
    add_space = found.get("tokenizer.ggml.add_space_prefix", True)
    table = PieceTable(tokens, scores, kinds, "bpe", add_space=add_space)
    begin, end = around(found, tokens, {"bos": True, "eos": False})
    return ForeignTokenizer(json.dumps(tokenizer_json(table, begin, end), ensure_ascii=False))


def read_usage(found: Mapping[str, Any], tokens: list[str]) -> Usage:
    """The roles of tokens and the chat template, as tokenizer_config.json would have them."""
    settings: Json = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if f"tokenizer.ggml.{name}_token_id" in found:
            settings[f"{role}_token"] = token_of(found, tokens, name)
    template = found.get("tokenizer.chat_template")
    return Usage({SETTINGS: settings}, template if isinstance(template, str) else None)
