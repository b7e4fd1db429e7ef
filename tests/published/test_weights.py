"""Folders in Hugging Face form: what is read, written, kept, and refused with a line that says both sides."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from clearhead import ModelConfig, Tokenizer, Transformer, load, save
from clearhead.published.models import fetch

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "d_model": 24,
    "n_layers": 2,
    "n_heads": 4,
    "d_ff": 40,
    "max_len": 32,
}
TOKENS = torch.arange(40).reshape(2, 20) % 61


def own(**options: Any) -> Transformer:
    """A small model of our own, random throughout."""
    model = Transformer(ModelConfig(**SIZES | options), seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


@pytest.fixture(scope="session")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untied model of the Llama type, saved."""
    return save(own(tied=False, n_kv_heads=2), None, tmp_path_factory.mktemp("published") / "model")


@pytest.fixture
def folder(untouched: Path, tmp_path: Path) -> Path:
    """A copy of that folder to be injured."""
    return Path(shutil.copytree(untouched, tmp_path / "model"))


def change_config(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; None removes one."""
    file = folder / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) | changes
    settings = {name: value for name, value in settings.items() if value is not None}
    file.write_text(json.dumps(settings), encoding="utf-8")


def change_tensors(folder: Path, **changes: Tensor | None) -> None:
    """Set tensors, with __ for the dots of their names; None removes one."""
    file = folder / "model.safetensors"
    tensors = load_file(file) | {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, file)


def logits(model: Transformer) -> Tensor:
    with torch.no_grad():
        return model(TOKENS)


# ---------------------------------------------------------------------------------------- models of our own

EXPORTS: dict[str, tuple[dict[str, Any], str]] = {
    "as it comes": ({}, "LlamaForCausalLM"),
    "course": ({"rotary_layout": "interleaved", "tied": False}, "LlamaForCausalLM"),
    "biases": ({"qkv_bias": True, "out_bias": True, "ff_bias": True}, "LlamaForCausalLM"),
    "biases on q, k and v": ({"qkv_bias": True}, "Qwen2ForCausalLM"),
    "normalised heads": (
        {"qk_norm": "head", "d_head": 10, "n_kv_heads": 1, "rotary_layout": "interleaved"},
        "Qwen3ForCausalLM",
    ),
    "all heads normalised together": (
        {"qk_norm": "flat", "norm_placement": "branch", "norm_wide_gain": True, "n_kv_heads": 1}
        | {"rotary_layout": "interleaved"},
        "Olmo2ForCausalLM",
    ),
    "gains around 1, scaled embeddings": (
        {"norm_offset": 1.0, "embed_scale": 24**0.5, "activation": "gelu_tanh"},
        "GemmaForCausalLM",
    ),
    "window": ({"window": 5}, "Qwen2ForCausalLM"),
    "learned positions": (
        {
            "positions": "learned",
            "norm": "layer",
            "activation": "gelu_tanh",
            "gated": False,
            "qkv_bias": True,
            "out_bias": True,
            "ff_bias": True,
        },
        "GPT2LMHeadModel",
    ),
    "some layers without rotary": ({"rotary_layers": (True, False)}, "SmolLM3ForCausalLM"),
    "partial rotary": ({"rotary_dim": 2, "rotary_layout": "interleaved"}, "Phi3ForCausalLM"),
    "classifier": (
        {"head": "sequence", "n_labels": 3, "pool": "last", "head_bias": False},
        "LlamaForSequenceClassification",
    ),
}


@pytest.mark.parametrize("name", EXPORTS)
def test_a_model_of_our_own_finds_its_family(name: str, transformers: Any, tmp_path: Path) -> None:
    """`transformers` reads it to the same logits, and so do we."""
    options, class_name = EXPORTS[name]
    if name == "window":
        options |= {"qkv_bias": True}
    model = own(**options)
    save(model, None, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["architectures"] == [class_name]
    theirs = getattr(transformers, class_name).from_pretrained(tmp_path, attn_implementation="eager").eval()
    rows = TOKENS[:1] if model.config.head == "sequence" else TOKENS
    with torch.no_grad():
        torch.testing.assert_close(model(rows), theirs(rows).logits, atol=1e-5, rtol=0)
    torch.testing.assert_close(logits(load(tmp_path)[0]), logits(model), atol=1e-5, rtol=0)


def test_options_without_a_form_are_listed(tmp_path: Path) -> None:
    expected = r"no Hugging Face form \(nearest: LlamaForCausalLM\): norm_placement='post'"
    with pytest.raises(ValueError, match=expected):
        save(own(norm_placement="post"), None, tmp_path)
    with pytest.raises(ValueError, match=r"attn_softcap=3\.0"):
        save(own(attn_softcap=3.0), None, tmp_path)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"nearest: BartForQuestionAnswering\): .*qkv_bias=False"):
        save(own(shape="encoder-decoder", head="span", positions="sinusoidal"), None, tmp_path)


def test_a_changed_model_that_left_its_family_is_refused(folder: Path) -> None:
    model, _ = load(folder)
    model.config = model.config.replace(norm_placement="sandwich")
    with pytest.raises(ValueError, match="no form in the family llama: norm_placement='sandwich'"):
        save(model, None, folder)


def test_training_options_do_not_matter(tmp_path: Path) -> None:
    model = own(residual_dropout=0.1, ff_dropout=0.2, init="gpt2", fused_qkv=True)
    save(model, None, tmp_path)
    torch.testing.assert_close(logits(load(tmp_path)[0]), logits(model))


# ------------------------------------------------------------------------------------------- what is kept


def test_settings_and_generation_config_are_kept(folder: Path, tmp_path: Path) -> None:
    """What our config has no field for travels along; spellings that mean the same stay."""
    extras = {"initializer_range": 0.017, "custom": {"a": [1]}, "hidden_act": "swish", "bos_token_id": 7}
    change_config(folder, **extras)
    generation = {"eos_token_id": [2, 3], "temperature": 0.6, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    model, tokenizer = load(folder)
    assert tokenizer is None
    save(model, tokenizer, tmp_path / "again")
    places = (folder, tmp_path / "again")
    before, after = (json.loads((place / "config.json").read_text(encoding="utf-8")) for place in places)
    assert before == after
    assert json.loads((tmp_path / "again/generation_config.json").read_text(encoding="utf-8")) == generation


def test_a_byte_level_tokenizer_comes_along(tmp_path: Path) -> None:
    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)}, [], ["<|endoftext|>"])
    model = own(vocab_size=257)
    save(model, tokenizer, tmp_path)
    again, read = load(tmp_path)
    assert read is not None and read.encode("a b<|endoftext|>") == tokenizer.encode("a b<|endoftext|>")
    settings = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert (settings["bos_token_id"], settings["eos_token_id"], settings["pad_token_id"]) == (256, 256, None)
    assert again.config.vocab_size == 257


def test_a_broken_tokenizer_is_not_passed_over(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="model should be of type dict"):
        load(folder)


def test_a_family_reads_its_class_and_head_from_the_file(folder: Path) -> None:
    """Without `architectures` the first class of the family is meant."""
    change_config(folder, architectures=None)
    assert load(folder)[0].config.head == "lm"


# ------------------------------------------------------------------------------------------------- tensors


def test_weights_are_mapped_and_writing_to_them_leaves_the_file_alone(folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    model, _ = load(folder)
    assert not model.training and all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert (folder / "model.safetensors").read_bytes() == before
    save(model, None, folder)  # onto the files it is mapped from
    assert logits(load(folder)[0]).abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_type_can_be_chosen_and_is_kept_by_default(
    dtype: torch.dtype, folder: Path, tmp_path: Path
) -> None:
    model, _ = load(folder, dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    save(model, None, tmp_path / "narrow")
    settings = json.loads((tmp_path / "narrow/config.json").read_text(encoding="utf-8"))
    assert settings["dtype"] == str(dtype).removeprefix("torch.")
    again, _ = load(tmp_path / "narrow")
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_weights_of_several_types_get_that_of_most(folder: Path) -> None:
    change_tensors(folder, model__norm__weight=torch.ones(24, dtype=torch.bfloat16))
    assert {parameter.dtype for parameter in load(folder)[0].parameters()} == {torch.float32}


def test_shards_are_written_and_read(folder: Path, tmp_path: Path) -> None:
    model, _ = load(folder)
    save(model, None, tmp_path / "shards", max_shard_bytes=10_000)
    names = sorted(file.name for file in (tmp_path / "shards").glob("*.safetensors"))
    assert len(names) > 2 and names[0] == f"model-00001-of-{len(names):05}.safetensors"
    index = json.loads((tmp_path / "shards/model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    for name in names:
        assert (tmp_path / "shards" / name).stat().st_size < 13_000
    again, _ = load(tmp_path / "shards")
    assert torch.equal(logits(again), logits(model))
    save(again, None, tmp_path / "shards")  # one file again: no shard is left behind
    assert [file.name for file in (tmp_path / "shards").glob("model*")] == ["model.safetensors"]
    assert (tmp_path / "shards/model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("legacy", [False, True])
def test_pytorch_files_are_read_as_plain_data(legacy: bool, folder: Path) -> None:
    model, _ = load(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=not legacy)
    assert torch.equal(logits(load(folder)[0]), logits(model))
    (folder / "pytorch_model.bin").rename(folder / "weights.pt")
    assert torch.equal(logits(load(folder)[0]), logits(model))


def test_pytorch_shards_are_read(folder: Path) -> None:
    model, _ = load(folder)
    tensors = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    files = {"a.bin": dict(tensors[:5]), "b.bin": dict(tensors[5:])}
    for name, part in files.items():
        torch.save(part, folder / name)
    places = {key: name for name, part in files.items() for key in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    assert torch.equal(logits(load(folder)[0]), logits(model))


def test_a_prefix_may_be_missing_or_too_much(folder: Path) -> None:
    model, _ = load(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): t for name, t in tensors.items()}, folder / "model.safetensors")
    assert torch.equal(logits(load(folder)[0]), logits(model))
    body = {name: t for name, t in tensors.items() if name.startswith("model.")}
    save_file(body, folder / "model.safetensors")
    change_config(folder, architectures=["LlamaModel"])
    bare, _ = load(folder)
    assert torch.equal(logits(bare) @ model.head.weight.T, logits(model))


def test_old_buffers_are_ignored(folder: Path) -> None:
    model, _ = load(folder)
    change_tensors(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(3))
    assert torch.equal(logits(load(folder)[0]), logits(model))


def test_tied_with_one_copy_or_two_equal_ones(folder: Path, tmp_path: Path) -> None:
    change_config(folder, tie_word_embeddings=True)
    embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(folder, lm_head__weight=embed.clone())
    two, _ = load(folder)
    change_tensors(folder, lm_head__weight=None)
    one, _ = load(folder)
    for model in (one, two):
        assert model.config.tied and model.head.weight is model.embed.weight
    assert torch.equal(logits(one), logits(two))
    save(two, None, tmp_path / "again")
    assert "lm_head.weight" not in load_file(tmp_path / "again/model.safetensors")


def test_two_different_copies_stay_two_with_a_warning(folder: Path, tmp_path: Path) -> None:
    untied, _ = load(folder)
    change_config(folder, tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="lm_head.weight and model.embed_tokens.weight differ"):
        model, _ = load(folder)
    assert not model.config.tied
    assert torch.equal(logits(model), logits(untied))
    save(model, None, tmp_path / "again")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(logits(load(tmp_path / "again")[0]), logits(model))


def test_files_say_that_they_are_pytorch_tensors(untouched: Path) -> None:
    """`transformers` refuses a safetensors file without this."""
    with safe_open(untouched / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


# --------------------------------------------------------------------------------------------------- names


def test_a_name_that_is_no_folder_is_not_downloaded_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder org/model; with download=True"):
        load("org/model")
    file = tmp_path / "model.txt"
    file.write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="neither a folder nor a GGUF file"):
        load(file)


def test_a_download_is_asked_for_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "org/absent":
            raise OSError("404\nmany lines")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    model, _ = load("org/model", download=True)
    assert model.config.d_model == 24
    assert [name for name, _ in asked] == ["org/model"] and "*.bin" not in asked[0][1]
    with pytest.raises(FileNotFoundError, match=r"cannot download 'org/absent' from the .* Hub: 404$"):
        fetch("org/absent")
    (folder / "model.safetensors").unlink()
    fetch("org/model")
    assert "*.bin" in asked[-1][1]
