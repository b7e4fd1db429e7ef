"""Files from strangers (R7, R8): nothing in them is ever run, and any damage is a line or a sound file.

Bombs are put in the place of every file that some verb reads, and beside them under the names that other
programs load; the command line then does its work. The fuzz injures valid files of every format we read.
"""

import contextlib
import io
import itertools
import json
import pickle
import random
import resource
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from clearhead import ModelConfig, Transformer, save
from clearhead.cli import main
from clearhead.inspector.passes import give_back
from clearhead.published.models import load
from clearhead.text.foreign import open_tokenizer
from clearhead.text.prepare import prepare
from clearhead.text.shards import Shards
from clearhead.text.token_files import open_token_files
from clearhead.text.tokenizer import Tokenizer
from clearhead.training import durable
from clearhead.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from clearhead.training.loop import train
from clearhead.training.recipe import load_recipe
from clearhead.training.run_folder import RunFolder
from tiny_run import tiny_recipe, write_corpus, write_recipe

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unchecked")]

BYTES = Tokenizer({i: bytes([i]) for i in range(256)}, [], ["<|endoftext|>"])


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, a recipe, its run, prepared shards, and a published model."""
    folder = tmp_path_factory.mktemp("hostile")
    write_corpus(folder / "corpus", documents=7)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        recipe = tiny_recipe(
            "corpus",
            data={"tokenizer": "vocab", "vocab_size": 257},
            model={"vocab_size": 257},
            steps=2,
            probes=1,
        )
        BYTES.save(folder / "vocab")
        write_recipe(folder / "recipe.toml", recipe)
        train(recipe, "run")
        prepare("corpus", BYTES, "data")
        sizes: dict[str, Any] = {"d_model": 16, "n_layers": 1, "n_heads": 2, "max_len": 64}
        save(Transformer(ModelConfig(vocab_size=257, **sizes), seed=0), BYTES, folder / "published")
    return folder


# ------------------------------------------------------------------------------------- R7: nothing runs


class Bomb:
    """Unpickled carelessly, it leaves a mark."""

    def __init__(self, canary: Path) -> None:
        self.canary = str(canary)

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.canary, "w"))


def pickled(canary: Path) -> bytes:
    return pickle.dumps(Bomb(canary))


def torch_saved(canary: Path) -> bytes:
    file = io.BytesIO()
    torch.save({"model": Bomb(canary)}, file)
    return file.getvalue()


def numpy_saved(canary: Path) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Bomb(canary)], dtype=object), allow_pickle=True)
    return file.getvalue()


BOMBS = (pickled, torch_saved, numpy_saved)
RUN_VERBS = ("generate run The --max-new-tokens 1", "train recipe.toml --run run --resume")
MODEL_VERBS = (
    "generate published The --max-new-tokens 1",
    "train recipe.toml --run x --train.start-from published",
)
# Names under which other programs would load something, beside what is there.
BESIDE = (
    *("run/tokenizer.pkl", "run/checkpoint.pt", "run/checkpoints/step-00000002/.metadata"),
    *("run/checkpoints/step-00000002/__0_0.distcp", "run/checkpoints/latest.pt", "run/data/train/data.npy"),
    *("published/tokenizer.pkl", "published/pytorch_model.bin", "published/optimizer.pt"),
    *("published/.metadata", "published/training_args.bin", "published/scheduler.pt"),
)
ALONE = (  # files that are given by their names
    "train recipe.toml --run x --data.source bomb{}",
    "train recipe.toml --run x --data.tokenizer bomb{}",
    "train recipe.toml --run x --train.start-from bomb{}",
    "prepare bomb{} out --tokenizer vocab",
    "tokenizer show bomb{}",
    "tokenizer train bomb{} out",
    "generate bomb{} The",
    "train bomb{}",
)
ENDINGS = (".bin", ".npy", ".ds", ".pt", ".pkl", ".json", ".jsonl", ".txt", ".parquet", ".gguf", ".model", "")


def obey(command: str, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether a command line ends well; else it ends with one line of ours."""
    capsys.readouterr()
    try:
        main(shlex.split(command))
    except SystemExit as ended:
        answer = capsys.readouterr().err.splitlines()[-1]
        assert ended.code == 2 and answer.startswith("clearhead: ") and len(answer) < 2000, answer
        return False
    return True


@pytest.mark.filterwarnings("ignore::UserWarning")  # notes of what is passed over
def test_bombs_in_the_place_of_every_file_of_a_run_and_a_model(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And beside them: 100 % stay unexploded; a verb that needs such a file refuses it in one line."""
    home, canary, kinds = tmp_path / "home", tmp_path / "canary", itertools.cycle(BOMBS)
    shutil.copytree(workplace, home)
    monkeypatch.chdir(home)
    refused = 0
    for top, verbs in (("run", RUN_VERBS), ("published", MODEL_VERBS)):
        there = [path.relative_to(home) for path in sorted((home / top).rglob("*")) if path.is_file()]
        for place in [*there, *(Path(name) for name in BESIDE if name.startswith(top))]:
            shutil.rmtree(home / top)
            shutil.copytree(workplace / top, home / top)
            place.write_bytes(next(kinds)(canary))
            done = [obey(command, capsys) for command in verbs]
            refused += not all(done)
            shutil.rmtree(home / "x", ignore_errors=True)
            assert not canary.exists(), f"{place} was run"
    assert refused >= 15


def test_bombs_that_are_given_by_their_names(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As text, tokens, tokenizer, model or recipe, whatever their ending: none goes off, each is refused but
    where a text may hold any bytes.
    """
    home, canary, kinds = tmp_path / "home", tmp_path / "canary", itertools.cycle(BOMBS)
    shutil.copytree(workplace, home)
    monkeypatch.chdir(home)
    for ending in ENDINGS:
        for command in ALONE:
            Path(f"bomb{ending}").write_bytes(next(kinds)(canary))
            done = obey(command.format(ending), capsys)
            assert not canary.exists(), f"{command.format(ending)} ran it"
            assert not done or ending in (".txt", ".bin", ".ds", ".model", ""), command.format(ending)
            for left in ("x", "out"):
                shutil.rmtree(left, ignore_errors=True)


@pytest.mark.parametrize("make", BOMBS)
def test_the_bombs_are_live(make: Callable[[Path], bytes], tmp_path: Path) -> None:
    """Who loads them carelessly sets them off."""
    canary, content = tmp_path / "canary", io.BytesIO(make(tmp_path / "canary"))
    if make is pickled:
        pickle.load(content).close()
    elif make is torch_saved:
        torch.load(content, weights_only=False)["model"].close()
    else:
        np.load(content, allow_pickle=True)[0].close()
    assert canary.exists()


# ------------------------------------------------------------------------------- R8: any damage, any format

ODD = (None, True, -1, 0, 1, 2**31, 2**70, 1e308, 0.5, "", "x", "\ud800", "../x", [], {}, [[]], {"a": None})


def injured(data: bytes, rng: random.Random) -> bytes:
    """Cut, flip, insert, remove or repeat some bytes, mostly near the start, where the structure is."""
    place = rng.randrange(len(data)) if rng.random() < 0.4 else rng.randrange(min(len(data), 200))
    length = rng.choice((1, 1, 2, 4, 8, 64))
    before, here, after = data[:place], data[place : place + length], data[place + length :]
    new = rng.randbytes(length)
    flipped = bytes([here[0] ^ 1 << rng.randrange(8)]) + here[1:]
    return rng.choice(
        (before, before + new + after, before + new + here + after, before + after, before + here * 3 + after)
        + (before + flipped + after,) * 2
    )


def changed(tree: Any, rng: random.Random) -> Any:
    """A JSON or TOML tree with something odd at one place, or something gone."""
    if isinstance(tree, dict) and tree and rng.random() < 0.85:
        name = rng.choice(list(tree))
        if rng.random() < 0.1:
            return {key: value for key, value in tree.items() if key != name}
        return tree | {name: changed(tree[name], rng)}
    if isinstance(tree, list) and tree and rng.random() < 0.5:
        place = rng.randrange(len(tree))
        return [*tree[:place], changed(tree[place], rng), *tree[place + 1 :]]
    return rng.choice(ODD)


def any_json(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return injured(data, rng)
    return json.dumps(changed(json.loads(data), rng)).encode()


def any_toml(data: bytes, rng: random.Random) -> bytes:
    import tomllib

    tree = changed(tomllib.loads(data.decode()), rng)
    try:
        return injured(data, rng) if rng.random() < 0.5 else tomli_w.dumps(tree).encode()
    except (TypeError, AttributeError, ValueError):  # what TOML has no form for
        return injured(data, rng)


def vouched(folder: Path) -> None:
    """Write the manifest that fits a checkpoint's files as they are."""
    names = ("model.safetensors", "optimizer.safetensors", "state.json")
    entries = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": durable._sha256(folder / name)}
        for name in names
    }
    (folder / "manifest.json").write_bytes(durable._manifest(entries))


def make_checkpoint(folder: Path) -> Path:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return save_checkpoint(folder, 1, model, optimizer)


def open_checkpoint(folder: Path, vouch: bool) -> None:
    model = nn.Linear(3, 2)
    if vouch:
        vouched(folder)
    load_checkpoint(folder, model, torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9))


def make_tokens(folder: Path) -> Path:
    """Files of ids as llm.c, Megatron-LM and datatrove write them."""
    import struct

    ids = (np.arange(300) % 257).astype("<u2")
    head = np.zeros(256, "<i4")
    head[:3] = 20240520, 1, len(ids)
    (folder / "llm.bin").write_bytes(head.tobytes() + ids.tobytes())
    ids.tofile(folder / "corpus.bin")
    parts = (np.array([257, 43], "<i4"), np.array([0, 514], "<i8"), np.array([0, 1, 2], "<i8"))
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 2, 3) + b"".join(part.tobytes() for part in parts)
    (folder / "corpus.idx").write_bytes(index)
    ids.tofile(folder / "a.ds")
    np.array([257, 300], "<u8").tofile(folder / "a.ds.index")
    return folder


Damage = Callable[[bytes, random.Random], bytes]
FORMATS: dict[str, tuple[str, Damage, Callable[[Path], object]]] = {
    "safetensors of a checkpoint": (
        "step/model.safetensors",
        injured,
        lambda file: open_checkpoint(file.parent, vouch=True),
    ),
    "manifest": ("step/manifest.json", any_json, lambda file: open_checkpoint(file.parent, vouch=False)),
    "state of a checkpoint": (
        "step/state.json",
        any_json,
        lambda file: open_checkpoint(file.parent, vouch=True),
    ),
    "safetensors of a model": ("published/model.safetensors", injured, lambda file: load(file.parent)),
    "config.json": ("published/config.json", any_json, lambda file: load(file.parent)),
    "tokenizer.json": ("vocab/tokenizer.json", any_json, open_tokenizer),
    "recipe": ("recipe.toml", any_toml, load_recipe),
    "model.json": ("run/model.json", any_json, lambda file: RunFolder(file.parent).config()),
    "index of shards": ("data/train/index.json", any_json, lambda file: Shards(file.parent).tokens[:]),
    "header of a shard": ("data/train/shard-00000.bin", injured, lambda file: Shards(file.parent).tokens[:]),
    "ends of a shard": ("data/train/shard-00000.idx", injured, lambda file: Shards(file.parent).tokens[:]),
    "ids of llm.c": ("tokens/llm.bin", injured, lambda file: open_token_files(str(file), BYTES)),
    "index of Megatron": (
        "tokens/corpus.idx",
        injured,
        lambda file: open_token_files(str(file.with_suffix(".bin")), BYTES),
    ),
    "index of datatrove": (
        "tokens/a.ds.index",
        injured,
        lambda file: open_token_files(str(file.with_suffix("")), BYTES),
    ),
}


@pytest.fixture(scope="module")
def valid(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A valid file of each format."""
    folder = tmp_path_factory.mktemp("formats") / "valid"
    shutil.copytree(workplace, folder)
    make_checkpoint(folder / "saved").rename(folder / "step")
    (folder / "tokens").mkdir()
    make_tokens(folder / "tokens")
    assert checkpoints(folder / "run")
    yield folder


def forget_peak() -> None:
    """Let the peak of this process's memory begin anew, where the system can: one before would hide ours."""
    give_back()  # training keeps what was freed
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def fuzz(name: str, valid: Path, times: int) -> None:
    """Our own errors in one line, or a sound file; memory grows by less than 200 MB."""
    place, damage, read = FORMATS[name]
    file = valid / place
    whole = {path: path.read_bytes() for path in file.parent.iterdir() if path.is_file()}
    forget_peak()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes = {"read": 0, "refused": 0}

    @settings(max_examples=times, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    @given(seed=st.integers(0, 2**32))
    def one(seed: int) -> None:
        file.write_bytes(damage(whole[file], random.Random(seed)))
        try:
            read(file)
        except (ValueError, KeyError, OSError) as error:
            assert "\n" not in str(error) and 0 < len(str(error)) < 2000, str(error)
            outcomes["refused"] += 1
        else:
            outcomes["read"] += 1
        finally:
            for path, content in whole.items():
                path.write_bytes(content)

    read(file)
    one()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown * (1 if sys.platform == "darwin" else 1024) < 200e6
    assert outcomes["refused"] >= times // 10, outcomes


@pytest.mark.filterwarnings("ignore::UserWarning")  # notes of what is passed over
@pytest.mark.parametrize("name", FORMATS)
def test_damaged_files_give_one_line_or_are_sound(name: str, valid: Path) -> None:
    fuzz(name, valid, 100)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", FORMATS)
def test_two_thousand_damaged_files(name: str, valid: Path) -> None:
    fuzz(name, valid, 2000)
