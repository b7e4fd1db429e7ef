"""Checkpoints: exact, whole or absent, and never silently wrong."""

import copy
import errno
import json
import logging
import os
import pickle
import random
import shutil
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from clearhead.training import durable
from clearhead.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint, verify_checkpoint
from clearhead.training.named_tensors import plain_names
from clearhead.training.objectives import cross_entropy
from clearhead.training.optim import AdamW, parameter_groups

FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"]
can_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Forked children may not use the threads of their parent, and tensors this small need none."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Small(nn.Module):
    """Every kind of entry: tied weights, vectors, buffers of floats and integers."""

    def __init__(self, tie: bool = True, width: int = 12) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.hidden = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 17, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(torch.relu(self.hidden(self.embed(tokens)))))


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        source = torch.Generator().manual_seed(step)
        tokens, targets = torch.randint(17, (2, 8), generator=source)
        optimizer.zero_grad()
        cross_entropy(model(tokens), targets).backward()
        optimizer.step()


def trained(steps: int = 3, tie: bool = True, **setting: Any) -> tuple[Small, AdamW]:
    torch.manual_seed(0)
    model = Small(tie)
    optimizer = AdamW(parameter_groups(model, 0.1), lr=1e-2, **setting)
    learn(model, optimizer, range(steps))
    return model, optimizer


def filled(value: float) -> nn.Linear:
    """A model whose every weight is `value`, so that a mixture of two checkpoints would show."""
    model = nn.Linear(40, 30)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    return model


def value_of(model: nn.Linear) -> float:
    (value,) = {float(x) for p in model.parameters() for x in p.detach().flatten()}
    return value


def load_value(path: Path) -> tuple[int, float]:
    model = filled(-1.0)
    return load_checkpoint(path, model)["step"], value_of(model)


def same(a: Any, b: Any) -> bool:
    """Whether two nests of dicts, lists and tensors are equal bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


# ------------------------------------------------------------------------------------- exact round trips


def test_checkpointing(tmp_path):
    """The course's test: model, optimizer (its settings too) and iteration come back as they were."""
    model, optimizer = trained(10)
    path = save_checkpoint(tmp_path, 10, model, optimizer)
    torch.manual_seed(1)
    other = Small()
    fresh = AdamW(parameter_groups(other, 0.7), lr=5.0, betas=(0.1, 0.2))
    assert load_checkpoint(path, other, fresh) == {"step": 10}
    assert same(other.state_dict(), model.state_dict())
    assert same(fresh.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("cuts", [(5,), (3, 6)], ids=["5+5", "3+3+4"])
def test_resumed_equals_uninterrupted(tmp_path, cuts):
    """10 steps equal 5 + 5 and 3 + 3 + 4, bit for bit, in weights, buffers and the optimizer."""
    model, optimizer = trained(10)
    part, part_optimizer = trained(0)
    start = 0
    for cut in (*cuts, 10):
        learn(part, part_optimizer, range(start, cut))
        save_checkpoint(tmp_path, cut, part, part_optimizer)
        torch.manual_seed(99)
        part = Small()
        part_optimizer = AdamW(parameter_groups(part, 0.1))
        start = load_checkpoint(tmp_path, part, part_optimizer)["step"]
    assert same(part.state_dict(), model.state_dict())
    assert same(part_optimizer.state_dict(), optimizer.state_dict())


def test_layout_on_disk(tmp_path):
    """Four files, plain names, no pickle; the manifest knows the other three."""
    path = save_checkpoint(tmp_path, 1200, *trained(), state={"tokens": 5})
    assert path == tmp_path / "checkpoints" / "step-00001200"
    assert sorted(file.name for file in path.iterdir()) == sorted(FILES)
    assert sorted(load_file(path / "optimizer.safetensors"))[:3] == [
        "embed.weight.exp_avg",
        "embed.weight.exp_avg_sq",
        "embed.weight.step",
    ]
    content = json.loads((path / "state.json").read_text())
    assert (content["step"], content["state"]) == (1200, {"tokens": 5})
    assert content["optimizer"]["groups"][0]["settings"]["weight_decay"] == 0.1
    assert sorted(json.loads((path / "manifest.json").read_text())["files"]) == sorted(FILES[:3])
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_same_state_same_bytes(tmp_path):
    """Two saves of one state are equal byte for byte, so runs can be compared by their files' hashes."""
    model, optimizer = trained()
    first, second = (save_checkpoint(tmp_path / name, 3, model, optimizer) for name in "ab")
    for name in FILES:
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_model_alone(tmp_path):
    """Without an optimizer there is no optimizer file, and asking for one says what to do."""
    model, optimizer = trained()
    path = save_checkpoint(tmp_path, 0, model)
    assert not (path / "optimizer.safetensors").exists()
    assert load_checkpoint(tmp_path, Small()) == {"step": 0}
    with pytest.raises(ValueError, match=r"no optimizer's state.*optimizer=None"):
        load_checkpoint(tmp_path, Small(), optimizer)


def test_every_dtype_and_layout(tmp_path):
    """16-bit, integer, boolean, transposed, empty, scalar and overlapping tensors keep every bit."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            base = torch.arange(24.0)
            tensors = {
                "half_": torch.randn(5).bfloat16(),
                "count": torch.tensor(7),
                "flags": torch.tensor([True, False]),
                "turned": torch.randn(3, 4).t(),
                "nothing": torch.empty(0, 3),
                "also_nothing": torch.empty(0, 3),
                "front_": base[:16],
                "back_": base[8:],
                "reshaped": base.view(4, 6),
                "nan": torch.tensor([float("nan"), float("inf"), -0.0]),
            }
            for name, tensor in tensors.items():
                self.register_buffer(name, tensor)

    torch.manual_seed(0)
    model, other = Odd(), Odd()
    save_checkpoint(tmp_path, 1, model)
    with torch.no_grad():
        for buffer in other.buffers():
            buffer.zero_()
    load_checkpoint(tmp_path, other)
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        bits = [t.contiguous().view(torch.uint8) if t.ndim else t for t in (a, b)]
        assert a.dtype == b.dtype and torch.equal(bits[0], bits[1]), name


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # by torch
def test_wrapped_models_share_names(tmp_path):
    """A compiled or data-parallel model and the bare one read each other's checkpoints."""
    model, optimizer = trained()

    class Wrapper(nn.Module):  # what DistributedDataParallel does to names, without processes
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    bare = save_checkpoint(tmp_path / "bare", 1, model, optimizer)
    wraps: dict[str, Any] = {"compiled": torch.compile, "parallel": Wrapper}
    for name, wrap in wraps.items():
        path = save_checkpoint(tmp_path / name, 1, wrap(model), optimizer)
        for file in FILES:
            assert (path / file).read_bytes() == (bare / file).read_bytes()
        other = Small()
        load_checkpoint(bare, wrap(other), AdamW(parameter_groups(other, 0.1)))
        assert same(other.state_dict(), model.state_dict())
    twice = Wrapper(Wrapper(wraps["compiled"](model)))
    both = save_checkpoint(tmp_path / "both", 1, twice, optimizer)
    assert (both / "model.safetensors").read_bytes() == (bare / "model.safetensors").read_bytes()


def test_tied_tensors(tmp_path):
    """Stored once; a tied model stays tied, an untied one gets two copies, unequal copies are refused."""
    model, _ = trained()
    path = save_checkpoint(tmp_path / "tied", 1, model)
    assert "head.weight" not in load_file(path / "model.safetensors")
    assert json.loads((path / "state.json").read_text())["tied"] == {"head.weight": "embed.weight"}
    tied, untied = Small(tie=True), Small(tie=False)
    load_checkpoint(path, tied)
    load_checkpoint(path, untied)
    assert tied.head.weight is tied.embed.weight
    assert torch.equal(untied.head.weight, model.embed.weight)
    assert untied.head.weight.data_ptr() != untied.embed.weight.data_ptr()
    equal = save_checkpoint(tmp_path / "equal", 1, untied)
    load_checkpoint(equal, tied)
    with torch.no_grad():
        untied.head.weight += 1
    different = save_checkpoint(tmp_path / "different", 1, untied)
    before = copy.deepcopy(tied.state_dict())
    with pytest.raises(ValueError, match=r"ties head.weight to embed.weight, and the file has two"):
        load_checkpoint(different, tied)
    assert same(tied.state_dict(), before)


def test_state_is_json(tmp_path):
    """The caller's state comes back; what JSON cannot hold and a contradicting step are refused."""
    state = {
        "tokens": 2**60,
        "loss": 0.1 + 0.2,
        "best": float("inf"),
        "note": "é",
        "nested": [1, {"a": None}],
    }
    save_checkpoint(tmp_path, 3, filled(0), state=state)
    assert load_checkpoint(tmp_path, filled(1)) == {**state, "step": 3}
    with pytest.raises(TypeError, match="must be JSON values"):
        save_checkpoint(tmp_path, 4, filled(0), state={"loss": torch.zeros(())})
    with pytest.raises(ValueError, match=r"state\['step'\] is 9, but the checkpoint is of step 4"):
        save_checkpoint(tmp_path, 4, filled(0), state={"step": 9})
    assert [p.name for p in checkpoints(tmp_path)] == ["step-00000003"]


# ------------------------------------------------------------------------------------------ optimizers


def test_optimizers_of_the_same_kind_exchange_state(tmp_path):
    """A checkpoint of torch's AdamW continues in ours and back; our own settings stay."""
    model, _ = trained()
    theirs = torch.optim.AdamW(model.parameters(), lr=0.03, betas=(0.8, 0.9), weight_decay=0.2)
    learn(model, theirs, range(3))
    save_checkpoint(tmp_path, 3, model, theirs)
    ours = AdamW(model.parameters())
    load_checkpoint(tmp_path, model, ours)
    group = ours.param_groups[0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.03, (0.8, 0.9), 0.2)
    assert (group["style"], group["lr_scale"]) == ("torch", 1.0)
    assert same(ours.state_dict()["state"], theirs.state_dict()["state"])
    learn(model, ours, range(3, 5))
    save_checkpoint(tmp_path, 5, model, ours)
    load_checkpoint(tmp_path, model, theirs)
    assert same(theirs.state_dict()["state"], ours.state_dict()["state"])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_other_optimizers(tmp_path, momentum):
    """Any torch optimizer can be saved: SGD with and without momentum resumes exactly."""
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    learn(model, optimizer, range(3))
    save_checkpoint(tmp_path, 3, model, optimizer)
    other = Small()
    fresh = torch.optim.SGD(other.parameters(), lr=9.0)
    load_checkpoint(tmp_path, other, fresh)
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_a_learners_own_optimizer(tmp_path):
    """State that is a plain number, as a learner's first optimizer keeps it, comes back too."""

    class Decaying(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr})

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    t = self.state[p].get("t", 0)
                    p.data -= group["lr"] / (t + 1) ** 0.5 * p.grad
                    self.state[p]["t"] = t + 1

    model = Small()
    optimizer = Decaying(model.parameters(), 0.1)
    learn(model, optimizer, range(3))
    save_checkpoint(tmp_path, 3, model, optimizer)
    fresh = Decaying(model.parameters(), 0.2)
    load_checkpoint(tmp_path, model, fresh)
    assert same(fresh.state_dict(), optimizer.state_dict())
    assert fresh.state[model.hidden.weight]["t"] == 3


def test_other_groups_get_the_state_by_name(tmp_path, caplog):
    """Parameters grouped or ordered otherwise still find their averages; the settings stay, with a line."""
    model, optimizer = trained()
    save_checkpoint(tmp_path, 3, model, optimizer)
    regrouped = AdamW(list(model.parameters())[::-1], lr=7.0)
    load_checkpoint(tmp_path, model, regrouped)
    for p in model.parameters():
        assert same(dict(regrouped.state[p]), dict(optimizer.state[p]))
    assert regrouped.param_groups[0]["lr"] == 7.0
    assert "other parameter groups" in caplog.text


def test_optimizer_that_does_not_fit(tmp_path):
    """Another kind, other parameters, or parameters of another model are named."""
    model, optimizer = trained()
    save_checkpoint(tmp_path, 3, model, optimizer)
    with pytest.raises(ValueError, match=r"holds the state of AdamW, not that of SGD"):
        load_checkpoint(tmp_path, model, torch.optim.SGD(model.parameters(), lr=1.0))
    part = AdamW([model.hidden.weight])
    with pytest.raises(ValueError, match=r"missing none; left over embed.weight, hidden.bias"):
        load_checkpoint(tmp_path, model, part)
    with pytest.raises(ValueError, match=r"a parameter \(12, 12\) float32 that is not the model's"):
        save_checkpoint(tmp_path, 4, model, AdamW(Small().hidden.parameters()))


# ------------------------------------------------------------------------------- models that do not fit


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda m: m.register_parameter("extra", nn.Parameter(torch.zeros(1))),
            "missing extra; left over none",
        ),
        (lambda m: delattr(m, "hidden"), "missing none; left over hidden.bias, hidden.weight"),
        (
            lambda m: setattr(m, "hidden", nn.Linear(12, 5)),
            r"hidden.weight is \(12, 12\) float32 in the file, ",
        ),
        (lambda m: m.hidden.double(), r"in the file, \(12, 12\) float64 in the model"),
        (
            lambda m: m.hidden.to("meta"),
            r"no values to save or to fill: it is \(12, 12\) float32 on the meta",
        ),
    ],
    ids=["missing", "left over", "shape", "dtype", "meta"],
)
def test_model_that_does_not_fit_is_left_alone(tmp_path, change, message):
    """Both sides are listed, and neither the model nor the optimizer is half-filled."""
    model, optimizer = trained()
    save_checkpoint(tmp_path, 3, model, optimizer)
    torch.manual_seed(5)
    other = Small()
    fresh = AdamW(parameter_groups(other, 0.1))
    change(other)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=message) as error:
        load_checkpoint(tmp_path, other, fresh)
    assert "\n" not in str(error.value)
    assert not fresh.state
    if "meta" not in message:
        assert same(other.state_dict(), before)


def test_a_long_list_of_names_is_cut(tmp_path):
    """A model of another kind gives one readable line."""
    save_checkpoint(tmp_path, 1, nn.Sequential(*(nn.Linear(1, 1) for _ in range(10))))
    with pytest.raises(ValueError, match=r"missing bias, weight; left over 0.bias, .* and 12 more$"):
        load_checkpoint(tmp_path, nn.Linear(1, 1))


def test_nothing_to_load(tmp_path):
    """A path that is not there, an empty folder and a run that never saved are three clear errors."""
    with pytest.raises(FileNotFoundError, match=r"nowhere does not exist"):
        load_checkpoint(tmp_path / "nowhere", filled(0))
    with pytest.raises(FileNotFoundError, match=r"holds no checkpoint; give the folder of a run"):
        load_checkpoint(tmp_path, filled(0))
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(FileNotFoundError, match=r"holds no checkpoint"):
        load_checkpoint(tmp_path, filled(0))
    assert checkpoints(tmp_path) == checkpoints(tmp_path / "nowhere") == []


def test_entries_that_are_no_tensors_are_refused(tmp_path):
    """A module's extra state would need a pickle."""

    class Extra(nn.Linear):
        def get_extra_state(self) -> object:
            return {"a": 1}

    with pytest.raises(ValueError, match="_extra_state has no values to save or to fill: it is dict"):
        save_checkpoint(tmp_path, 1, Extra(1, 1))


# -------------------------------------------------------------------------------- keeping and replacing


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_keeps_the_newest(tmp_path):
    """`keep` of them stay, newest first by number (not by name); fewer than two may not be asked for."""
    for step in (9, 10, 99_999_999, 100_000_000):
        save_checkpoint(tmp_path, step, filled(step % 97), keep=3)
    assert [path.name for path in checkpoints(tmp_path)] == [
        "step-100000000",
        "step-99999999",
        "step-00000010",
    ]
    assert len(names_in(tmp_path)) == 3
    for keep in (1, 0, -1):
        with pytest.raises(ValueError, match=f"keep={keep} must be at least 2"):
            save_checkpoint(tmp_path, 5, filled(0), keep=keep)
    with pytest.raises(ValueError, match="step=-1"):
        save_checkpoint(tmp_path, -1, filled(0))


def test_damaged_ones_do_not_count_as_kept(tmp_path):
    """A torn checkpoint does not push a good one out."""
    for step in (1, 2):
        save_checkpoint(tmp_path, step, filled(step))
    (tmp_path / "checkpoints" / "step-00000002" / "model.safetensors").write_bytes(b"")
    save_checkpoint(tmp_path, 3, filled(3))
    assert [path.name[-1] for path in checkpoints(tmp_path)] == ["3", "2", "1"]


def test_same_step_is_replaced(tmp_path):
    """Saving a step again, intact or damaged, leaves one folder with the new content."""
    for value in (1, 2):
        path = save_checkpoint(tmp_path, 7, filled(value))
    assert load_value(tmp_path) == (7, 2.0)
    (path / "state.json").unlink()
    save_checkpoint(tmp_path, 7, filled(3))
    assert load_value(tmp_path) == (7, 3.0)
    assert names_in(tmp_path) == ["step-00000007"]


def test_going_back_deletes_nothing_newer(tmp_path, caplog):
    """A run taken back to an earlier step keeps what it just saved, and says that newer ones exist."""
    for step in (10, 20):
        save_checkpoint(tmp_path, step, filled(step))
    for step in (5, 6, 7):
        save_checkpoint(tmp_path, step, filled(step))
    assert [path.name[-2:] for path in checkpoints(tmp_path)] == ["20", "10", "07", "06"]
    assert "step-00000020 is newer than step 5, just saved; unless damaged, it is loaded first" in caplog.text


# ------------------------------------------------------------------- injuries: every one is detected (R4)


@pytest.fixture(scope="module")
def patient(tmp_path_factory, one_thread) -> Path:
    """A run with two checkpoints, of steps 3 and 4; tests put back what they break."""
    run = tmp_path_factory.mktemp("patient")
    for steps in (3, 4):
        save_checkpoint(run, steps, *trained(steps), state={"tokens": steps})
    return run


def flip_bit(content: bytearray, dice: random.Random) -> None:
    content[dice.randrange(len(content))] ^= 1 << dice.randrange(8)


def truncate(content: bytearray, dice: random.Random) -> None:
    del content[dice.randrange(len(content)) :]


def zero_page(content: bytearray, dice: random.Random) -> None:
    size = min(512, len(content))
    start = dice.randrange(len(content) - size + 1)
    content[start : start + size] = bytes(size)


def append(content: bytearray, dice: random.Random) -> None:
    content += dice.randbytes(dice.randint(1, 9))


def swap_bytes(content: bytearray, dice: random.Random) -> None:
    while True:
        i, j = dice.randrange(len(content)), dice.randrange(len(content))
        if content[i] != content[j]:
            content[i], content[j] = content[j], content[i]
            return


@pytest.mark.parametrize("injure", [flip_bit, truncate, zero_page, append, swap_bytes])
def test_300_random_injuries_are_detected(patient, injure):
    """300 of 300 show, each naming the injured file, in every file of a checkpoint."""
    dice = random.Random(injure.__name__)
    newest = checkpoints(patient)[0]
    detected = 0
    for i in range(300):
        file = newest / FILES[i % len(FILES)]
        whole = file.read_bytes()
        content = bytearray(whole)
        injure(content, dice)
        assert content != whole
        file.write_bytes(content)
        problems = verify_checkpoint(newest)
        detected += any(file.name in problem for problem in problems)
        file.write_bytes(whole)
    assert detected == 300
    assert verify_checkpoint(newest) == []


def test_every_byte_of_the_manifest_counts(patient):
    """The manifest has no manifest: a bit flipped in any of its own bytes is found as well."""
    file = checkpoints(patient)[0] / "manifest.json"
    whole = file.read_bytes()
    missed = []
    for i in range(len(whole)):
        content = bytearray(whole)
        content[i] ^= 1 << i % 8
        file.write_bytes(content)
        if durable.damage(file.parent, hashes=False) != ["manifest.json is not what was written"]:
            missed.append(i)
    file.write_bytes(whole)
    assert missed == []


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("injury", ["missing", "empty", "a folder"])
def test_lost_files_fall_back(patient, tmp_path, caplog, name, injury):
    """A missing or empty file is named, in one line, and the checkpoint before is loaded instead."""
    run = tmp_path / "run"
    shutil.copytree(patient, run)
    file = checkpoints(run)[0] / name
    file.unlink()
    if injury == "empty":
        file.touch()
    elif injury == "a folder":
        file.mkdir()
    model = Small()
    optimizer = AdamW(parameter_groups(model, 0.1))
    assert load_checkpoint(run, model, optimizer) == {"tokens": 3, "step": 3}
    expected, expected_optimizer = trained(3)
    assert same(model.state_dict(), expected.state_dict())
    assert same(optimizer.state_dict(), expected_optimizer.state_dict())
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and name in record.message and "\n" not in record.message
    assert "step-00000004" in record.message


def test_extra_files(patient, tmp_path):
    """A file too many is named; what the system drops (`.DS_Store`) is not ours."""
    run = tmp_path / "run"
    shutil.copytree(patient, run)
    newest = checkpoints(run)[0]
    (newest / ".DS_Store").touch()
    assert verify_checkpoint(newest) == []
    (newest / "model-2.safetensors").touch()
    assert verify_checkpoint(newest) == ["model-2.safetensors does not belong there"]


def test_files_of_two_checkpoints_do_not_mix(patient, tmp_path):
    """A good file of another step is not good here."""
    run = tmp_path / "run"
    shutil.copytree(patient, run)
    newest, older = checkpoints(run)
    for name in FILES:
        whole = (newest / name).read_bytes()
        shutil.copyfile(older / name, newest / name)
        assert verify_checkpoint(newest)
        (newest / name).write_bytes(whole)


def test_no_intact_checkpoint(patient, tmp_path):
    """All damaged: one line says so of each; a single one by its path says where else to look."""
    run = tmp_path / "run"
    shutil.copytree(patient, run)
    for path in checkpoints(run):
        (path / "state.json").write_text("{}")
    message = (
        r"step-00000004: state.json has 2 bytes, not \d+ \| step-00000003: state.json .*no other is left"
    )
    with pytest.raises(ValueError, match=message):
        load_checkpoint(run, Small())
    with pytest.raises(ValueError, match=r"step-00000003 cannot be loaded .*give the folder of the run"):
        load_checkpoint(checkpoints(run)[1], Small())


# --------------------------------------------------------------------------- crashes at every point (R2)


def in_child(action: Callable[[], None]) -> int:
    """Run `action` in a forked process; return its exit status, negative for the signal that killed it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside threads
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def points_of(action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The points that a save passes, in order."""
    passed: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(durable, "_point", passed.append)
        action()
    return passed


def die_at(place: int) -> None:
    """Make this process kill itself (-9) at the given point of the next save."""
    passed = []

    def point(name: str) -> None:
        passed.append(name)
        if len(passed) == place + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    durable._point = point


def run_with(tmp_path: Path, name: str) -> Path:
    run = tmp_path / name
    for step in (1, 2):
        save_checkpoint(run, step, filled(step))
    return run


SAVE_POINTS = [
    *("begin", "model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"),
    *("before rename", "after rename", "trashed", "removed"),
]


@can_fork
def test_killed_at_every_point_of_a_save(tmp_path, monkeypatch):
    """After kill -9 at any point, the newest checkpoint is the one before or the new one, whole."""

    def save_third(run: Path) -> None:
        model = filled(3)
        save_checkpoint(run, 3, model, torch.optim.SGD(model.parameters(), lr=1.0))

    dry = run_with(tmp_path, "dry")
    points = points_of(lambda: save_third(dry), monkeypatch)
    assert points == SAVE_POINTS
    for place, point in enumerate(points):
        run = run_with(tmp_path, f"at {point}")

        def crash(run: Path = run, place: int = place) -> None:
            die_at(place)
            save_third(run)

        assert in_child(crash) == -signal.SIGKILL, point
        done = place >= points.index("after rename")
        assert load_value(run) == ((3, 3.0) if done else (2, 2.0)), point
        intact = [path for path in checkpoints(run) if not verify_checkpoint(path)]
        assert len(intact) >= 2, point
        save_checkpoint(run, 4, filled(4))
        assert load_value(run) == (4, 4.0), point
        assert names_in(run) == ["step-00000003" if done else "step-00000002", "step-00000004"], point


@can_fork
def test_killed_while_replacing_the_same_step(tmp_path, monkeypatch):
    """Saving a step over itself never loses it: the old or the new one is there, whole, at every point."""

    def replace(run: Path) -> None:
        save_checkpoint(run, 2, filled(22))

    dry = run_with(tmp_path, "dry")
    points = points_of(lambda: replace(dry), monkeypatch)
    assert "replaced" in points
    for place, point in enumerate(points):
        run = run_with(tmp_path, f"at {point}")

        def crash(run: Path = run, place: int = place) -> None:
            die_at(place)
            replace(run)

        assert in_child(crash) == -signal.SIGKILL, point
        step, value = load_value(run)
        assert (step, value) == (2, 22.0 if place >= points.index("after rename") else 2.0), point
        save_checkpoint(run, 3, filled(3))
        assert load_value(run) == (3, 3.0), point
        assert names_in(run) == ["step-00000002", "step-00000003"], point
        assert verify_checkpoint(checkpoints(run)[1]) == [], point


@can_fork
def test_killed_while_clearing_up_after_a_kill(tmp_path):
    """A second kill, during the clearing of the first one's leavings, loses nothing either."""
    run = run_with(tmp_path, "run")
    for place in (4, 0, 2, 6, 7, 5):
        before = load_value(run)

        def crash(place: int = place) -> None:
            die_at(place)
            save_checkpoint(run, 2, filled(2))

        assert in_child(crash) == -signal.SIGKILL
        assert load_value(run) == before == (2, 2.0)
    save_checkpoint(run, 3, filled(3))
    assert names_in(run) == ["step-00000002", "step-00000003"]


# ------------------------------------------------------------------------------- the disk refuses (R5)


def refuse(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("point", SAVE_POINTS[:6])
def test_disk_full_at_every_point(tmp_path, monkeypatch, point):
    """The error names the path, the size and the reason; nothing half-written stays; the last one loads."""
    run = run_with(tmp_path, "run")

    def fill_up(name: str) -> None:
        if name == point:
            refuse()

    with monkeypatch.context() as patch:
        patch.setattr(durable, "_point", fill_up)
        model = filled(3)
        with pytest.raises(
            OSError, match=r"step-00000003 \([\d,]+ bytes\) could not be written: No space"
        ) as e:
            save_checkpoint(run, 3, model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert e.value.errno == 28 and "\n" not in str(e.value)
    assert names_in(run) == ["step-00000001", "step-00000002"]
    assert load_value(run) == (2, 2.0)
    save_checkpoint(run, 3, filled(3))
    assert load_value(run) == (3, 3.0)


@pytest.mark.parametrize("call", ["fsync", "mkdir", "rename"])
def test_system_calls_that_fail(tmp_path, monkeypatch, call):
    """The same when a system call of the save itself reports a full disk."""
    run = run_with(tmp_path, "run")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse)
        with pytest.raises(OSError, match="No space left on device"):
            save_checkpoint(run, 3, filled(3))
    assert load_value(run) == (2, 2.0)
    save_checkpoint(run, 3, filled(3))
    assert names_in(run) == ["step-00000002", "step-00000003"]


@can_fork
def test_a_really_limited_disk(tmp_path):
    """With a true limit on file sizes, the writing of the tensors fails as cleanly."""
    resource = pytest.importorskip("resource")
    run = run_with(tmp_path, "run")
    outcome = tmp_path / "outcome"

    def save_too_much() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
        try:
            save_checkpoint(run, 3, nn.Linear(200, 200))
        except OSError as error:
            outcome.write_text(str(error))

    assert in_child(save_too_much) == 0
    assert outcome.read_text().startswith(f"[Errno {errno.EFBIG}]")
    assert "step-00000003" in outcome.read_text() and "too large" in outcome.read_text()
    assert names_in(run) == ["step-00000001", "step-00000002"]
    assert load_value(run) == (2, 2.0)


def test_old_ones_that_cannot_be_removed_do_no_harm(tmp_path, monkeypatch, caplog):
    """The checkpoint counts as saved even if pruning fails; the next save catches up."""
    run = run_with(tmp_path, "run")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refuse)
        save_checkpoint(run, 3, filled(3))
    assert "could not be removed" in caplog.text
    assert load_value(run) == (3, 3.0)
    save_checkpoint(run, 4, filled(4))
    assert names_in(run) == ["step-00000003", "step-00000004"]


# --------------------------------------------------------------------- nothing in a checkpoint runs (R7)


class Bomb:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.canary,))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("forged", [False, True], ids=["as found", "manifest forged"])
def test_pickles_are_refused_and_never_run(patient, tmp_path, name, forged):
    """A pickle in place of any file, even with a manifest that vouches for it, executes nothing."""
    run, canary = tmp_path / "run", tmp_path / "canary"
    shutil.copytree(patient, run)
    for path in checkpoints(run):
        (path / name).write_bytes(pickle.dumps(Bomb(canary)))
        if forged and name != "manifest.json":
            vouch(path)
    with pytest.raises(ValueError, match=name.partition(".")[2]):
        load_checkpoint(run, Small(), None)
    assert not canary.exists()
    pickle.loads((checkpoints(run)[0] / name).read_bytes())
    assert canary.exists(), "the bomb of this test must be a live one"


def vouch(path: Path) -> None:
    """Write the manifest that fits the files as they are."""
    entries = {
        name: {"bytes": (path / name).stat().st_size, "sha256": durable._sha256(path / name)}
        for name in FILES[:3]
        if (path / name).exists()
    }
    (path / "manifest.json").write_bytes(durable._manifest(entries))


# -------------------------------------------------------------------------------- hostile content (R8)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
shapes_of_state = st.fixed_dictionaries(
    {},
    optional={
        "format": st.just(1) | json_values,
        "step": st.integers() | json_values,
        "state": json_values,
        "tied": st.just({"head.weight": "embed.weight"}) | json_values,
        "optimizer": json_values
        | st.fixed_dictionaries({"kind": json_values, "groups": json_values, "values": json_values}),
    },
)


@settings(deadline=None, max_examples=60)
@given(content=st.binary(max_size=60) | shapes_of_state.map(lambda v: json.dumps(v).encode()))
@pytest.mark.parametrize(
    "name", ["manifest.json", "state.json", "model.safetensors", "optimizer.safetensors"]
)
def test_any_content_gives_a_clear_error(patient, name, content):
    """Random bytes and JSON in any file, with a manifest that vouches for it: our ValueError or a load."""
    newest = checkpoints(patient)[0]
    whole, manifest = (newest / name).read_bytes(), (newest / "manifest.json").read_bytes()
    (newest / name).write_bytes(content)
    if name != "manifest.json":
        vouch(newest)
    model = Small()
    try:
        state = load_checkpoint(newest, model, AdamW(parameter_groups(model, 0.1)))
        assert isinstance(state["step"], int)
    except ValueError as error:
        assert str(newest) in str(error) and "\n" not in str(error)
    finally:
        (newest / name).write_bytes(whole)
        (newest / "manifest.json").write_bytes(manifest)


def test_deep_json_is_refused(patient, tmp_path):
    """A hundred thousand brackets are damage, not a crash."""
    run = tmp_path / "run"
    shutil.copytree(patient, run)
    newest = checkpoints(run)[0]
    for name in ("state.json", "manifest.json"):
        (newest / name).write_text("[" * 100_000)
        if name == "state.json":
            vouch(newest)
        assert verify_checkpoint(newest) != []


def test_another_format_is_named(tmp_path):
    """A checkpoint of a later version says so instead of half-loading."""
    path = save_checkpoint(tmp_path, 1, filled(1))
    content = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**content, "format": 2}))
    vouch(path)
    assert verify_checkpoint(path) == ["state.json is of format 2; this version reads 1"]


def test_foreign_tensors_in_the_optimizers_file(tmp_path):
    """A state for a parameter that is not there is listed like any other left-over."""
    model, optimizer = trained()
    path = save_checkpoint(tmp_path, 1, model, optimizer)
    save_file({"ghost.exp_avg": torch.zeros(1)}, path / "optimizer.safetensors")
    vouch(path)
    with pytest.raises(ValueError, match="missing none; left over ghost"):
        load_checkpoint(path, model, optimizer)


def test_loaded_tensors_do_not_hang_on_the_file(tmp_path):
    """After loading, the files may be overwritten or deleted: model and optimizer own their memory."""
    model, optimizer = trained()
    path = save_checkpoint(tmp_path, 1, model, optimizer)
    other = Small()
    fresh = AdamW(parameter_groups(other, 0.1))
    load_checkpoint(path, other, fresh)
    for name in FILES[:2]:
        with (path / name).open("r+b") as file:
            file.write(bytes((path / name).stat().st_size))
    shutil.rmtree(path)
    assert same(other.state_dict(), model.state_dict())
    assert same(fresh.state_dict(), optimizer.state_dict())


def test_reading_module_names():
    """`_plain` takes away what wrappers add, and nothing else."""
    assert plain_names(["module.a._orig_mod.b", "module.module_list.c"]) == ["a.b", "module_list.c"]
    assert plain_names(["module.a", "b"]) == ["module.a", "b"]
    assert plain_names([]) == []
