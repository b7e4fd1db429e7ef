"""What older or other files of a family hold beside, lack, or name otherwise: they give the same model."""

import json
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from clearhead import load
from clearhead.published.selfcheck import make_batch, run
from clearhead.published.twins import TWINS, model_type
from reference.parity import tiny

State = dict[str, Tensor]
SETTINGS = {model_type(name): settings for name, (_, settings) in reversed(TWINS.items())}


def all_of(*changes: Callable[[State], State]) -> Callable[[State], State]:
    """Several changes, one after the other."""
    return lambda state: reduce(lambda changed, change: change(changed), changes, state)


def copied(new: str, old: str) -> Callable[[State], State]:
    """Files that hold an equal copy of a tensor."""
    return lambda state: state | {new: state[old].clone()}


def with_noise(*names: str) -> Callable[[State], State]:
    """Files that hold tensors nothing uses."""
    return lambda state: state | {name: torch.randn(2, 3) for name in names}


def renamed(old: str, new: str) -> Callable[[State], State]:
    """Files with another name for some tensors."""
    return lambda state: {name.replace(old, new): tensor for name, tensor in state.items()}


def bare(state: State) -> State:
    """Files of the model alone, without the prefix that a class with a head puts before its names."""
    return {name.removeprefix("transformer.").removeprefix("bert."): tensor for name, tensor in state.items()}


OLDER: dict[str, tuple[str, Callable[[State], State]]] = {
    "gpt2, mask buffers": (
        "GPT2LMHeadModel",
        with_noise("transformer.h.0.attn.bias", "transformer.h.2.attn.masked_bias"),
    ),
    "gpt2, no prefix": ("GPT2LMHeadModel", all_of(bare, with_noise("h.0.attn.bias"))),
    "llama, frequencies": (
        "LlamaForCausalLM",
        with_noise("model.layers.1.self_attn.rotary_emb.inv_freq"),
    ),
    "bert, gamma and beta": (
        "BertForMaskedLM",
        all_of(renamed("LayerNorm.weight", "LayerNorm.gamma"), renamed("LayerNorm.bias", "LayerNorm.beta")),
    ),
    "bert, the decoder again": (
        "BertForMaskedLM",
        all_of(
            copied("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
            copied("cls.predictions.decoder.bias", "cls.predictions.bias"),
        ),
    ),
    "bert, positions, pooler and next sentence": (
        "BertForMaskedLM",
        with_noise(
            "bert.embeddings.position_ids",
            "bert.pooler.dense.weight",
            "bert.pooler.dense.bias",
            "cls.seq_relationship.weight",
            "cls.seq_relationship.bias",
        ),
    ),
    "bert, no prefix": ("BertForTokenClassification", bare),
    "bert, a prefix too much": (
        "BertModel",
        lambda state: {f"bert.{name}": tensor for name, tensor in state.items()},
    ),
    "roberta, the decoder again": (
        "RobertaForMaskedLM",
        all_of(
            copied("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
            copied("lm_head.decoder.bias", "lm_head.bias"),
            with_noise("roberta.embeddings.position_ids", "roberta.pooler.dense.weight"),
        ),
    ),
    "distilbert, the decoder again": (
        "DistilBertForMaskedLM",
        copied("vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"),
    ),
    "modernbert, the decoder again": (
        "ModernBertForMaskedLM",
        copied("decoder.weight", "model.embeddings.tok_embeddings.weight"),
    ),
    "bart, the table again": (
        "BartForConditionalGeneration",
        all_of(
            copied("model.encoder.embed_tokens.weight", "model.shared.weight"),
            copied("model.decoder.embed_tokens.weight", "model.shared.weight"),
            copied("lm_head.weight", "model.shared.weight"),
            with_noise("model.encoder.version"),
        ),
    ),
    "marian, the table again, and sinusoids": (
        "MarianMTModel",
        all_of(
            copied("model.encoder.embed_tokens.weight", "model.shared.weight"),
            with_noise("model.encoder.embed_positions.weight", "model.decoder.embed_positions.weight"),
        ),
    ),
    "t5, the table again, and a bias that is not used": (
        "T5ForConditionalGeneration",
        all_of(
            copied("encoder.embed_tokens.weight", "shared.weight"),
            copied("decoder.embed_tokens.weight", "shared.weight"),
            with_noise("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"),
        ),
    ),
}


@pytest.mark.parametrize("name", OLDER)
def test_an_older_file_is_the_same_model(name: str, transformers: Any, tmp_path: Path) -> None:
    class_name, change = OLDER[name]
    tiny(transformers, class_name, **SETTINGS[name.split(",")[0]]).save_pretrained(tmp_path)
    expected, _ = load(tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    changed = change(state)
    assert changed.keys() != state.keys()
    save_file(changed, file)
    found, _ = load(tmp_path)
    batch = make_batch(expected, "right")
    assert found.config == expected.config
    with torch.no_grad():
        assert torch.equal(run(found, batch), run(expected, batch))


@pytest.mark.parametrize("said", ["tie_word_embeddings", "scale_decoder_outputs"])
def test_a_t5_with_a_head_of_its_own(said: str, transformers: Any, tmp_path: Path) -> None:
    """Two tensors are two, in the older spelling and in the newer, which says tied; outputs are unscaled."""
    theirs = tiny(
        transformers, "T5ForConditionalGeneration", **SETTINGS["t5"] | {"tie_word_embeddings": False}
    )
    theirs.lm_head.weight = torch.nn.Parameter(torch.randn(59, 24) / 24**0.5)
    theirs.save_pretrained(tmp_path)
    assert "lm_head.weight" in load_file(tmp_path / "model.safetensors")
    change_settings(tmp_path, said)
    if said == "tie_word_embeddings":
        ours, _ = load(tmp_path)
    else:
        with pytest.warns(UserWarning, match="lm_head.weight and shared.weight differ"):
            ours, _ = load(tmp_path)
    batch = make_batch(ours, "right", equal=True)
    with torch.no_grad():
        torch.testing.assert_close(run(ours, batch), run(theirs, batch), atol=1e-5, rtol=0)


def change_settings(folder: Path, said: str) -> None:
    """Leave one of the two keys that say false."""
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name in ("tie_word_embeddings", "scale_decoder_outputs"):
        settings.pop(name, None)
    (folder / "config.json").write_text(json.dumps(settings | {said: False}), encoding="utf-8")
