"""Injured and hostile folders: one clear line each, and nothing in them is executed."""

import contextlib
import json
import pickle
import random
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from clearhead import ModelConfig, Tokenizer, Transformer, load, save
from clearhead.published.mapping import read_config
from clearhead.published.twins import TWINS
from clearhead.published.weights import FAMILIES

MANY = settings(
    max_examples=1000,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
SIZES: dict[str, Any] = {
    "vocab_size": 17,
    "d_model": 8,
    "n_layers": 1,
    "n_heads": 2,
    "d_ff": 12,
    "max_len": 32,
}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = Transformer(ModelConfig(**SIZES, tied=False), seed=0)
    return save(model, None, tmp_path_factory.mktemp("published") / "model")


@pytest.fixture
def folder(untouched: Path, tmp_path: Path, unchecked: None) -> Iterator[Path]:
    """A copy to be injured; afterwards nothing in it may have run."""
    yield Path(shutil.copytree(untouched, tmp_path / "model"))
    assert not (tmp_path / "EXECUTED").exists()


def refusal(folder: Path) -> str:
    """The line that loading is refused with."""
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        load(folder)
    line = str(caught.value)
    assert "\n" not in line and len(line) < 2000
    return line


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) | changes
    file.write_text(json.dumps(settings), encoding="utf-8")


def change_tensors(folder: Path, change: dict[str, Tensor | None]) -> None:
    """Set tensors; None removes one."""
    tensors = {**load_file(folder / "model.safetensors"), **change}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / "model.safetensors")


# ------------------------------------------------------------------------------------------------- tensors


def test_missing_left_over_and_renamed_tensors_are_listed_on_both_sides(folder: Path) -> None:
    change_tensors(folder, {"model.norm.weight": None})
    assert "missing: model.norm.weight; left over: nothing" in refusal(folder)
    change_tensors(folder, {"model.norm.weight": torch.ones(8), "extra": torch.ones(2)})
    assert "missing: nothing; left over: extra" in refusal(folder)
    change_tensors(folder, {"extra": None, "model.norm.weight": None, "model.nrm.weight": torch.ones(8)})
    assert "missing: model.norm.weight; left over: model.nrm.weight" in refusal(folder)
    change_tensors(folder, {f"spare.{i}": torch.ones(1) for i in range(1000)})
    assert "and 993 more" in refusal(folder)


def test_wrong_shapes_and_types_are_named(folder: Path) -> None:
    change_tensors(folder, {"model.layers.0.mlp.down_proj.weight": torch.ones(12, 8)})
    line = refusal(folder)
    assert "model.layers.0.mlp.down_proj.weight has shape (12, 8); config.json asks for (8, 12)" in line
    change_tensors(folder, {"model.layers.0.mlp.down_proj.weight": torch.ones(8, 12, dtype=torch.int8)})
    assert "is stored as I8; known: F64, F32, F16, BF16" in refusal(folder)


def test_layers_more_or_fewer_than_there_are(folder: Path) -> None:
    change_config(folder, num_hidden_layers=2)
    assert "missing: model.layers.1." in refusal(folder)
    change_config(folder, num_hidden_layers=9_999)
    assert "config.json names 9999 layers, the files hold 12 tensors" in refusal(folder)
    change_config(folder, num_hidden_layers=10**9)
    assert "num_hidden_layers=1000000000 is no number of layers up to 10000" in refusal(folder)


def test_truncated_and_foreign_files(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    for cut in (0, 4, 8, 100, len(data) - 1):
        file.write_bytes(data[:cut])
        assert "model.safetensors is no complete safetensors file: " in refusal(folder)
    file.write_bytes(data + b"\0")
    assert "is no complete safetensors file" in refusal(folder)
    file.write_text("version https://git-lfs.github.com/spec/v1\n", encoding="utf-8")
    assert "is no complete safetensors file" in refusal(folder)
    file.unlink()
    assert "no weights in" in refusal(folder)
    (folder / "config.json").unlink()
    assert "config.json" in refusal(folder)


# ------------------------------------------------------------------------------------------------ config.json


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "bart"}, "architectures=['LlamaForCausalLM'] is unknown; known: Bart"),
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "there is no n_layer"),
        ({"model_type": "mamba"}, "model_type='mamba' is unknown; known: llama, "),
        ({"model_type": ["llama"]}, "model_type=['llama'] is unknown"),
        ({"architectures": ["LlamaForImages"]}, "architectures=['LlamaForImages'] is unknown"),
        ({"architectures": "LlamaForCausalLM"}, "architectures='LlamaForCausalLM' is unknown"),
        ({"architectures": [["a"]]}, "is unknown"),
        ({"hidden_act": "mish"}, "hidden_act='mish' is unknown; known: silu, swish"),
        (
            {"rope_parameters": {"rope_type": "spiral"}},
            "rope_type='spiral' is unknown; known: default, linear",
        ),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type='spiral' is unknown"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type='linear' needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "factor=0.0 must be a positive number"),
        ({"rope_scaling": [1]}, "rope_scaling=[1] is no dictionary"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "needs low_freq_factor, high_freq_factor"),
        ({"num_key_value_heads": 3}, "n_heads=2 is not divisible by n_kv_heads=3"),
        ({"hidden_size": None}, "there is no hidden_size"),
        ({"hidden_size": "8"}, "d_model='8' must be a whole number, not a text"),
        ({"vocab_size": 10**30}, "no model has these sizes"),
        ({"quantization_config": {"quant_method": "fp8"}}, "the weights are quantised"),
    ],
)
def test_a_config_that_is_not_this_model(changes: dict[str, Any], said: str, folder: Path) -> None:
    change_config(folder, **changes)
    line = refusal(folder)
    assert said in line and str(folder) in line


def test_a_config_that_is_no_dictionary(folder: Path) -> None:
    for text in ("", "[1]", "{", "[" * 100_000, '{"a": ' * 100_000, "\x00", "NaN"):
        (folder / "config.json").write_text(text, encoding="utf-8")
        assert "config.json" in refusal(folder)
    (folder / "config.json").write_bytes(b"\xff\xfe{}")
    assert "config.json is no JSON" in refusal(folder)


# -------------------------------------------------------------------------------------------------- indexes


def shards(folder: Path) -> dict[str, Any]:
    """Cut the model into shards; what their index says."""
    model, _ = load(folder)
    save(model, None, folder, max_shard_bytes=600)
    return json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))


def write_index(folder: Path, index: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


@pytest.mark.parametrize(
    "name", ["../model/a.safetensors", "/etc/passwd", "a/b.safetensors", "..", ".", "", "..\\a.bin", "a.txt"]
)
def test_an_index_names_files_beside_it_only(name: str, folder: Path) -> None:
    index = shards(folder)
    (folder.parent / "outside.safetensors").write_bytes(b"")
    index["weight_map"]["lm_head.weight"] = name
    write_index(folder, index)
    assert f"names {name!r}, which is no file of weights beside it" in refusal(folder)


def test_an_index_that_disagrees_with_its_files(folder: Path) -> None:
    index = shards(folder)
    places = index["weight_map"]
    write_index(folder, {"weight_map": places | {"ghost": places["lm_head.weight"]}})
    assert "disagree about ghost" in refusal(folder)
    write_index(folder, {"weight_map": {k: v for k, v in places.items() if k != "model.norm.weight"}})
    assert "disagree about model.norm.weight" in refusal(folder)
    write_index(folder, {"weight_map": places | {"lm_head.weight": "gone.safetensors"}})
    assert "names gone.safetensors, not in the folder" in refusal(folder)
    for broken in ({}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {}}):
        write_index(folder, broken)
        assert "has no weight_map" in refusal(folder)


def test_a_tensor_in_two_shards(folder: Path) -> None:
    index = shards(folder)
    names = sorted(set(index["weight_map"].values()))
    shutil.copy(folder / names[0], folder / names[1])
    assert "the files it names disagree about " in refusal(folder)


# ------------------------------------------------------------------------------------------------- pickles


class Bomb:
    """Unpickled carelessly, it calls a function with arguments of the attacker's choice."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def bombs(marker: Path) -> dict[str, Any]:
    code = f"open({str(marker)!r}, 'w').close()"
    import os
    import subprocess

    return {
        "eval": Bomb(eval, code.replace("open", "__import__('builtins').open")),
        "exec": Bomb(exec, code),
        "system": Bomb(os.system, f"touch {marker}"),
        "popen": Bomb(subprocess.Popen, ["touch", str(marker)]),
        "open": Bomb(open, str(marker), "w"),
        "nested": {"model.norm.weight": [Bomb(exec, code)]},
        "torch": Bomb(torch.save, {}, str(marker)),
    }


@pytest.mark.parametrize("kind", ["eval", "exec", "system", "popen", "open", "nested", "torch"])
@pytest.mark.parametrize("form", ["pickle", "legacy", "zip"])
def test_pickle_bombs_do_not_go_off(kind: str, form: str, folder: Path) -> None:
    bomb = bombs(folder.parent / "EXECUTED")[kind]
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    if form == "pickle":
        file.write_bytes(pickle.dumps(bomb))
    else:
        torch.save(bomb, file, _use_new_zipfile_serialization=form == "zip")
    assert "is no file of plain tensors" in refusal(folder)


def test_files_of_torch_that_hold_no_plain_tensors(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    huge = torch.empty(1).expand(10**9, 10**6)
    odd: dict[str, Any] = {
        "holds a list, not tensors by name": [torch.ones(2)],
        "holds a dict, not tensors by name": {1: torch.ones(2)},
        "is a str, not a tensor": tensors | {"model.norm.weight": "a"},
        "is no plain tensor (torch.int64": tensors | {"model.norm.weight": torch.arange(8)},
        "asks for torch._utils._rebuild_sparse_tensor": tensors
        | {"model.norm.weight": torch.ones(8).to_sparse()},
        "has shape (1000000000, 1000000)": tensors | {"model.norm.weight": huge},
        "claims (8,), more than the file holds": tensors | {"model.norm.weight": torch.ones(1).expand(8)},
        "asks for torch._utils._rebuild_meta_tensor": tensors
        | {"model.norm.weight": torch.empty(8, device="meta")},
        "is no plain tensor (torch.complex64": tensors | {"model.norm.weight": torch.ones(8) * 1j},
        "bytearray, which is no part of a tensor": tensors | {"a": Bomb(bytearray, 10**12)},
        "a\\nb' is a int": tensors | {"a\nb": 1},
    }
    for said, value in odd.items():
        torch.save(value, folder / "pytorch_model.bin")
        assert said in refusal(folder)


def test_an_archive_that_grows_when_it_is_opened(folder: Path) -> None:
    """PyTorch compresses nothing; a kilobyte that becomes a gigabyte is not unpacked."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder.parent / "whole.zip")
    with (
        zipfile.ZipFile(folder.parent / "whole.zip") as whole,
        zipfile.ZipFile(folder / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in whole.namelist():
            archive.writestr(name, whole.read(name))
    assert "is compressed, which torch.save never does" in refusal(folder)


@pytest.mark.parametrize("size", [10**15, 3 * 10**9])
@pytest.mark.parametrize("legacy", [False, True])
def test_a_size_that_the_file_does_not_have(size: int, legacy: bool, folder: Path) -> None:
    """A kilobyte that declares a petabyte, or more than there is, is refused."""
    (folder / "model.safetensors").unlink()
    file = folder / "pytorch_model.bin"
    torch.save({"x": torch.ones(1000)}, file, _use_new_zipfile_serialization=not legacy)
    true, false = b"M" + (1000).to_bytes(2, "little"), b"\x8a\x08" + size.to_bytes(8, "little")
    if legacy:
        file.write_bytes(file.read_bytes().replace(true, false))
    else:
        with zipfile.ZipFile(file) as archive:
            entries = {name: archive.read(name) for name in archive.namelist()}
        with zipfile.ZipFile(file, "w") as archive:
            for name, data in entries.items():
                archive.writestr(name, data.replace(true, false) if name.endswith(".pkl") else data)
    assert "is no file of plain tensors" in refusal(folder)


@pytest.mark.parametrize("change", [0, -4])
def test_a_header_of_safetensors_that_declares_a_petabyte(change: int, folder: Path) -> None:
    sizes = {"dtype": "F32", "shape": [10**5, 10**10], "data_offsets": [0, 4 * 10**15 + change]}
    head = json.dumps({"model.norm.weight": sizes}).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    assert "is no complete safetensors file" in refusal(folder)


def test_ids_that_are_none_are_named(folder: Path) -> None:
    """What generation would stumble over later."""
    generation = folder / "generation_config.json"
    for value in ("2", 1.5, [[1]], {"a": 1}, True):
        generation.write_text(json.dumps({"eos_token_id": value}), encoding="utf-8")
        assert "generation_config.json: eos_token_id=" in refusal(folder)
    generation.write_text('{"bad_words_ids": [1]}', encoding="utf-8")
    assert "bad_words_ids=[1] should be" in refusal(folder)
    generation.unlink()
    change_config(folder, pad_token_id="0")
    assert "config.json: pad_token_id='0' should be the id of a token" in refusal(folder)


def test_numbers_beyond_float32_are_named(folder: Path) -> None:
    change_config(folder, rope_parameters={"rope_type": "default", "rope_theta": 10**300})
    assert "beyond the numbers of float32" in refusal(folder)


# ------------------------------------------------------------------------------------------------- writing


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("part", ["save_file", "write_json", "write_tokenizer"])
def test_saving_that_fails_leaves_what_was_there(
    there: bool, part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk at any file: no folder, or the old model; nothing beside it."""
    place = tmp_path / "model"
    tokenizer = Tokenizer({i: bytes([i]) for i in range(256)}, [])
    if there:
        save(Transformer(ModelConfig(**SIZES), seed=1), None, place)
        (place / "notes.txt").write_text("mine", encoding="utf-8")
    before = {file.name: file.read_bytes() for file in place.glob("*")}

    def full(*args: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    home = "storage" if part == "save_file" else "models"
    with monkeypatch.context() as patch:
        patch.setattr(f"clearhead.published.{home}.{part}", full)
        with pytest.raises(OSError, match="No space left"):
            save(Transformer(ModelConfig(**SIZES), seed=2), tokenizer, place)
    assert {file.name: file.read_bytes() for file in place.glob("*")} == before
    assert place.exists() == there and len(list(tmp_path.iterdir())) == int(there)
    save(Transformer(ModelConfig(**SIZES), seed=2), tokenizer, place, max_shard_bytes=600)
    assert not (place / "model.safetensors").exists() and len(list(place.glob("model-*"))) > 1
    assert (place / "notes.txt").exists() == there
    load(place)


def test_killed_at_any_rename_no_folder_looks_whole_and_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over an old model: after each step there is the old one, the new one, or none, never a mixture."""
    old, new = (Transformer(ModelConfig(**SIZES), seed=seed) for seed in (1, 2))
    place, replaced = tmp_path / "model", Path.replace
    for steps in range(6):
        save(old, None, place)
        left = [steps]

        def dying(self: Path, target: Path, left: list[int] = left) -> Path:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return replaced(self, target)

        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr(Path, "replace", dying)
            save(new, None, place, max_shard_bytes=2000)
        if (place / "config.json").exists():
            weights = load(place)[0].embed.weight
            assert any(torch.equal(weights, model.embed.weight) for model in (old, new))
        shutil.rmtree(place)


def test_a_zip_that_is_no_checkpoint(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with zipfile.ZipFile(folder / "pytorch_model.bin", "w") as archive:
        archive.writestr("../../escape.txt", "a")
    assert "is no file of plain tensors" in refusal(folder)


# ------------------------------------------------------------------------------------------------ any damage


def injure(data: bytes, rng: random.Random) -> bytes:
    """Cut, flip, insert, remove or repeat some bytes, mostly near the start, where the structure is."""
    place = rng.randrange(len(data)) if rng.random() < 0.4 else rng.randrange(min(len(data), 1500))
    length = rng.choice([1, 1, 1, 2, 8, 100])
    kind = rng.randrange(6)
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + rng.randbytes(length) + data[place + length :]
    if kind == 2:
        return data[:place] + rng.randbytes(length) + data[place:]
    if kind == 3:
        return data[:place] + data[place + length :]
    if kind == 4:
        return data[:place] + data[place : place + length] * 2 + data[place + length :]
    swapped = bytes([data[place] ^ (1 << rng.randrange(8))])
    return data[:place] + swapped + data[place + 1 :]


def refused_or_whole(folder: Path) -> None:
    """One line, or a model that runs: the numbers themselves carry no signature."""
    try:
        model, _ = load(folder)
    except (ValueError, OSError) as error:
        line = str(error)
        assert "\n" not in line and len(line) < 2000
    else:
        assert model(torch.tensor([[1, 2]])).shape == (1, 2, 17)


@pytest.mark.slow
@MANY
@given(seed=st.integers(0, 2**32))
def test_any_damage_to_a_safetensors_file(seed: int, untouched: Path, folder: Path) -> None:
    data = (untouched / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(injure(data, random.Random(seed)))
    refused_or_whole(folder)


@pytest.mark.slow
@MANY
@given(seed=st.integers(0, 2**32), legacy=st.booleans())
def test_any_damage_to_a_pytorch_file(seed: int, legacy: bool, untouched: Path, folder: Path) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    file = folder / "pytorch_model.bin"
    pristine = untouched.parent / f"pristine-{legacy}.bin"
    if not pristine.exists():
        tensors = load_file(untouched / "model.safetensors")
        torch.save(tensors, pristine, _use_new_zipfile_serialization=not legacy)
    file.write_bytes(injure(pristine.read_bytes(), random.Random(seed)))
    refused_or_whole(folder)


WORDS = ["llama", "default", "linear", "dynamic", "yarn", "longrope", "llama3", "gelu", "../x"]
ROPE_KEYS = ["rope_type", "type", "factor", "rope_theta", "short_factor", "long_factor", "a"]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.sampled_from([2**31, 2**63, 10**30, -(2**63)])
    | st.floats(allow_nan=True)
    | st.sampled_from(["", *WORDS]),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(ROPE_KEYS), inner, max_size=4)
    ),
    max_leaves=6,
)
KEYS = [
    "model_type",
    "architectures",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "mlp_bias",
    "tie_word_embeddings",
    "attention_bias",
    "max_position_embeddings",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "attention_dropout",
    "quantization_config",
    "dtype",
    "id2label",
    "num_labels",
]


@pytest.mark.filterwarnings("ignore:.*differ although the config ties them")  # two copies stay two
@pytest.mark.slow
@MANY
@given(changes=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=3))
def test_any_change_to_config_json(changes: dict[str, Any], untouched: Path, folder: Path) -> None:
    shutil.copy(untouched / "config.json", folder)
    change_config(folder, **changes)
    refused_or_whole(folder)


@pytest.mark.filterwarnings("ignore:.*differ although the config ties them")  # two copies stay two
@pytest.mark.slow
@MANY
@given(name=st.sampled_from([*TWINS]), data=st.data())
def test_any_change_to_the_config_of_any_family(name: str, data: st.DataObject, unchecked: None) -> None:
    """A model's config, or one line."""
    class_name, settings = TWINS[name]
    keys = st.sampled_from([*settings, *KEYS])
    changed = settings | data.draw(st.dictionaries(keys, VALUES, min_size=1, max_size=3))
    try:
        assert read_config(FAMILIES[name.split()[0]], changed, class_name).n_layers >= 1
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000


@pytest.mark.slow
@MANY
@given(data=st.data())
def test_any_change_to_an_index(data: st.DataObject, folder: Path) -> None:
    kept = folder.parent / "index.json"
    if not kept.exists():
        kept.write_text(json.dumps(shards(folder)), encoding="utf-8")
    index = json.loads(kept.read_text(encoding="utf-8"))
    if data.draw(st.booleans()):
        text = injure(kept.read_bytes(), random.Random(data.draw(st.integers(0, 2**32))))
        (folder / "model.safetensors.index.json").write_bytes(text)
    else:
        places = index["weight_map"]
        names = st.sampled_from([*places, "model.ghost.weight"])
        files = (
            st.sampled_from([*set(places.values()), "../x.safetensors", "/x.bin", "x.safetensors"]) | VALUES
        )
        index["weight_map"] = places | data.draw(st.dictionaries(names, files | VALUES, max_size=3))
        write_index(folder, index)
    refused_or_whole(folder)
