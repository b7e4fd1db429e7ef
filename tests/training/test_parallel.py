"""Several processes do what one does: learn the same, see the same examples, save, load and stop as one.

The processes meet over gloo on the CPU. `ranks.py` is what each of them runs; a plan of several actions is
done in one go, because every process takes seconds to load torch.
"""

import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer
from clearhead.training import tasks
from clearhead.training.checkpoint import checkpoints, load_checkpoint, verify_checkpoint
from clearhead.training.loop import train
from clearhead.training.parallel import Share, bits, find_place, share_out
from clearhead.training.recipe import Recipe, save_recipe
from clearhead.training.report import TIMINGS, JsonLines, read_metrics
from clearhead.training.run_folder import RunFolder
from clearhead.training.tensor_parallel import plan_for
from tiny_run import tiny_recipe, write_corpus

SCRIPT = Path(__file__).with_name("ranks.py")
SIZES = {"d_model": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2}
# eps: a gradient that is nothing but rounding is not to move a weight by the whole rate
SAME = {
    "eps": 1e-6,
    "steps": 5,
    "lr": 1e-2,
    "warmup": 0.0,
    "schedule": "constant",
    "batch_size": 4,
    "probes": 0,
}
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="gloo's processes are started as on Linux")


def free_ports(n: int) -> list[int]:
    """Ports that nobody listens at, below those that the system gives to connections: a plan takes long, and
    its own connections could be given one meanwhile.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(range(15_000, 32_000), 100 * n):
        with socket.socket() as tried, suppress(OSError):
            tried.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == n:
            break
    return ports


class Place:
    """A folder with prepared data, in which plans are carried out and single runs made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        corpus = write_corpus(folder / "corpus", documents=7)
        tasks.prepare_data(tiny_recipe(corpus).data, RunFolder(folder / "template"), note=lambda text: None)

    def recipe(self, source: str = "template/data", **train: Any) -> Recipe:
        model = {**SIZES, **train.pop("model", {})}
        return tiny_recipe(self.folder / source, model=model, **{**SAME, **train})

    def single(self, name: str, recipe: Recipe, **how: Any) -> Path:
        return train(recipe, self.folder / name, watchers=[JsonLines()], **how).path

    def start(
        self, plan: str, actions: list[dict[str, Any]], n: int = 2, launcher: list[str] | None = None
    ) -> list[subprocess.Popen[str]]:
        """Start the ranks, each action with its recipe in a file and a port to meet at."""
        ports = free_ports(len(actions))
        for action, port in zip(actions, ports, strict=True):
            recipe = action.pop("recipe")
            action["recipe"] = str(self.folder / f"{plan}-{port}.toml")
            save_recipe(recipe, action["recipe"])
            action.update({"port": port} if launcher is None else {})
        file = self.folder / f"{plan}.json"
        file.write_text(json.dumps(actions))
        command = [*(launcher or [sys.executable]), str(SCRIPT), str(file)]
        world = {"WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        places = [{}] if launcher else [{"RANK": str(r), "LOCAL_RANK": str(r), **world} for r in range(n)]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "TORCHELASTIC_"))}
        paths = os.pathsep.join(path for path in sys.path if path)
        return [
            subprocess.Popen(
                command, env={**clean, "PYTHONPATH": paths, **place}, stderr=subprocess.PIPE, text=True
            )
            for place in places
        ]

    def carry_out(self, plan: str, actions: list[dict[str, Any]], n: int = 2) -> list[dict[str, Any]]:
        """What every rank told of the actions, when all have ended well."""
        processes = self.start(plan, actions, n)
        errors = [end(process, 240) for process in processes]
        assert [process.returncode for process in processes] == [0] * n, "\n".join(errors)[-4000:]
        return [json.loads((self.folder / f"told-{plan}-{r}.json").read_text()) for r in range(n)]


def end(process: subprocess.Popen[str], seconds: float) -> str:
    """What a process says, which is ended if it takes too long: as when another one has failed."""
    try:
        return process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[1]


def weights(run: Path, recipe: Recipe) -> dict[str, Tensor]:
    """The newest weights of a run, in one process."""
    model = Transformer(RunFolder(run).config(), seed=9)
    load_checkpoint(run, model)
    return model.state_dict()


def log(run: Path) -> list[dict[str, Any]]:
    return [entry for entry in read_metrics(run / "metrics.jsonl") if "loss" in entry]


def distances(run: Path, other: Path, recipe: Recipe) -> tuple[float, float, float]:
    """The largest differences of loss, relative gradient norm and weight between two runs."""
    pairs = list(zip(log(run), log(other), strict=True))
    a, b = weights(run, recipe), weights(other, recipe)
    return (
        max(abs(x["loss"] - y["loss"]) for x, y in pairs),
        max(abs(x["norm"] - y["norm"]) / y["norm"] for x, y in pairs),
        max(float((a[name] - b[name]).abs().max()) for name in b),
    )


def outcome(run: Path) -> dict[str, Any]:
    """All that a run ends with, to the bit."""
    newest = checkpoints(run)[0]
    hashes = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(newest.iterdir())}
    entries = [{k: v for k, v in e.items() if k not in TIMINGS} for e in read_metrics(run / "metrics.jsonl")]
    return {"step": newest.name, "log": entries, **hashes}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("ranks"))


KINDS = [(kind, accumulation) for kind in ("ddp", "fsdp") for accumulation in (1, 2)]
DROPOUT = {"embed_dropout": 0.1, "attn_dropout": 0.1, "residual_dropout": 0.1, "ff_dropout": 0.1}
LOGITS = {"head_bias": True, "logit_scale": 0.7, "logit_softcap": 3.0}
MASKED = {"shape": "encoder", "head": "masked", "head_activation": "gelu", "head_norm": True}
SHAPES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "encoder-decoder": (["ddp", "fsdp"], {"shape": "encoder-decoder"}),
    "encoder": (["fsdp", "tensors"], {"shape": "encoder", "norm": "layer", "gated": False, "ff_bias": True}),
    "experts": (["ddp", "fsdp"], {"experts": {"n_experts": 4, "top_k": 2, "d_ff": 32}}),
    "norms of heads": (["tensors"], {"qk_norm": "head", "qkv_bias": True, "tied": True, "fused_qkv": True}),
    "logits": (["tensors"], {"vocab_size": 37, "tied": True, **LOGITS}),
    "masked": (["tensors"], {"vocab_size": 39, **MASKED, **LOGITS}),
}


@pytest.fixture(scope="module")
def two(place: Place) -> list[dict[str, Any]]:
    """What two ranks told of one long plan."""
    actions = [
        {
            "do": "learn",
            "name": f"{kind}-{accumulation}",
            "recipe": place.recipe(parallel=kind, accumulation=accumulation),
        }
        for kind, accumulation in KINDS
    ]
    muon = place.recipe(parallel="fsdp", accumulation=2, optimizer="muon", average=0.9, norms_every=2)
    actions.append({"do": "learn", "name": "muon", "recipe": muon})
    place.single("whole", place.recipe(accumulation=2))
    long = place.recipe(steps=12, accumulation=2)
    place.single("elastic", long, stop_after=4)
    shared, nine = {"parallel": "fsdp"}, place.recipe(steps=9, save_every=2, model=DROPOUT)
    actions += [
        {"do": "learn", "name": "elastic", "recipe": long, "train": shared, "resume": True, "stop_after": 8},
        {
            "do": "reshard",
            "name": "reshard",
            "recipe": place.recipe(parallel="fsdp"),
            "source": str(place.folder / "whole"),
        },
        {
            "do": "learn",
            "name": "stopped",
            "recipe": nine,
            "happens": "signal",
        },
        {"do": "learn", "name": "stopped", "as": "resumed", "recipe": nine, "resume": True},
        {"do": "learn", "name": "went on", "recipe": nine},
        {"do": "learn", "name": "poisoned", "recipe": place.recipe(), "happens": "poison"},
        {"do": "learn", "name": "flipped", "recipe": place.recipe(compare_every=2), "happens": "flip"},
        {
            "do": "learn",
            "name": "async",
            "recipe": place.recipe(parallel="fsdp", accumulation=2, save_every=1, async_save=True, keep=9),
        },
    ]
    actions += [
        {
            "do": "gradients",
            "name": f"{name} {index}",
            "recipe": place.recipe(
                parallel="fsdp" if kind == "tensors" else kind, tensor_parallel=1 + (kind == "tensors")
            ),
            "config": config,
        }
        for name, (kinds, config) in SHAPES.items()
        for index, kind in enumerate(kinds)
    ]
    for action in actions:
        action.update({"rank": 1, "step": 2})
    return place.carry_out("two", actions)


# ------------------------------------------------------------------- the same as one process (D1, D2, D9)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "accumulation"), KINDS)
def test_two_ranks_learn_what_one_learns(place, two, kind, accumulation):
    """D1: 5 steps at lr 1e-2; a step is shared by micro-batches, or by rows where there is one."""
    recipe = place.recipe(accumulation=accumulation)
    single = place.single(f"one for {kind}-{accumulation}", recipe)
    loss, norm, weight = distances(place.folder / f"{kind}-{accumulation}", single, recipe)
    print(f"D1 {kind} accumulation {accumulation}: dloss {loss:.1e} dnorm {norm:.1e} dweight {weight:.1e}")
    assert loss <= 1e-5 and norm <= 1e-5 and weight <= 1e-4


@pytest.mark.slow
def test_two_ranks_share_out_muon_and_the_mean(place, two):
    """Muon needs whole matrices, of which a rank holds half; the mean of the weights is shared out, too."""
    recipe = place.recipe(accumulation=2, optimizer="muon", average=0.9, norms_every=2)
    loss, norm, weight = distances(place.folder / "muon", place.single("one muon", recipe), recipe)
    print(f"Muon on two ranks: dloss {loss:.1e} dnorm {norm:.1e} dweight {weight:.1e}")
    assert loss <= 1e-5 and norm <= 1e-5 and weight <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_has_the_gradients_of_one_process(two, shape):
    """Encoder-decoders, experts, encoders; and matrices cut between two ranks, with what tests the cuts."""
    for index, kind in enumerate(SHAPES[shape][0]):
        print(shape, kind, two[0][f"{shape} {index}"])
        assert two[0][f"{shape} {index}"] <= 1e-6


@pytest.mark.slow
def test_four_ranks_in_two_dimensions(place):
    """D2: groups of ranks with a model each (HSDP); matrices cut between two ranks, with and without FSDP."""
    kinds = {
        "hsdp": {"replicate": 2},
        "fsdp with tensors": {"tensor_parallel": 2},
    }
    actions = [
        {"do": "learn", "name": name, "recipe": place.recipe(parallel="fsdp", accumulation=4, **how)}
        for name, how in kinds.items()
    ]
    place.carry_out("four", actions, n=4)
    recipe = place.recipe(accumulation=4)
    single = place.single("one for four", recipe)
    for name in kinds:
        loss, norm, weight = distances(place.folder / name, single, recipe)
        print(f"D2 {name}: dloss {loss:.1e} dnorm {norm:.1e} dweight {weight:.1e}")
        assert loss <= 1e-5 and norm <= 1e-5 and weight <= 1e-4


# What two ranks with parts of each matrix learn, and nothing else is between them and one process
TENSORS: dict[str, dict[str, Any]] = {
    "accumulation 1": {},
    "accumulation 2": {"accumulation": 2},
    "logits": {"label_smoothing": 0.1, "model": {"tied": True, **LOGITS}},
    "masked, an odd vocabulary": {
        "objective": "masked",
        "mask_share": 0.5,
        "source": "corpus",
        "data": {"vocab_size": 281},
        "model": {**MASKED, "vocab_size": 281},
    },
}
LOSSES = [
    {"vocab": vocab, "scale": scale, "smoothing": smoothing, "ignored": ignored}
    for vocab in (2, 11, 64)
    for scale in (1.0, 1e4)
    for smoothing in (0.0, 0.1)
    for ignored in (0.0, 0.4, 1.0)
]
LOSSES.append({"vocab": 65, "scale": 3.0, "smoothing": 0.1, "ignored": 0.4, "dtype": "bfloat16"})


@pytest.fixture(scope="module")
def tensors(place: Place) -> list[dict[str, Any]]:
    """What two ranks told that have parts of each matrix."""
    cut = {"parallel": "fsdp", "tensor_parallel": 2}
    actions = [
        {"do": "learn", "name": name, "recipe": place.recipe(**how, **cut)} for name, how in TENSORS.items()
    ]
    actions += [
        {"do": "shared_loss", "name": "losses", "recipe": place.recipe(**cut), "cases": LOSSES},
        {
            "do": "largest",
            "name": "largest",
            "recipe": place.recipe(**cut),
            "config": {"vocab_size": 1201, "tied": True},
        },
    ]
    return place.carry_out("tensors", actions)


@pytest.mark.slow
@pytest.mark.parametrize("case", TENSORS)
def test_two_ranks_with_parts_of_each_matrix_learn_what_one_learns(place, tensors, case):
    """D2: tensor parallelism alone, the loss made of the logits' shares; soft-capped, smoothed, masked."""
    recipe = place.recipe(**TENSORS[case])
    single = place.single(f"one for {case}", recipe)
    loss, norm, weight = distances(place.folder / case, single, recipe)
    print(f"D2 tensors, {case}: dloss {loss:.1e} dnorm {norm:.1e} dweight {weight:.1e}")
    assert loss <= 1e-5 and norm <= 1e-5 and weight <= 1e-4


@pytest.mark.slow
def test_the_loss_of_shared_logits_is_that_of_whole_ones(tensors):
    """Each token's loss and each logit's gradient to 1e-6, against whole logits in float64: vocabularies that
    do not come out even, smoothed or not, with targets that ask for nothing, and with logits of 1e4 (the loss
    as a part of that). A gradient in bfloat16 is rounded to it.
    """
    for rank, told in enumerate(tensors):
        for case, found in zip(LOSSES, told["losses"], strict=True):
            rounding = 2**-9 if "dtype" in case else 1e-6
            assert found["loss"] <= 1e-6 and found["gradient"] <= rounding, (rank, case, found)
            assert found["columns"] == (case["vocab"] + 1 - rank) // 2


@pytest.mark.slow
def test_no_rank_makes_whole_logits_in_training(tensors):
    """Of 6 x 32 tokens and 1,201 words the largest tensor of forward and backward pass is a rank's share of
    the logits; who measures gets them whole.
    """
    for told, columns in zip(tensors, (601, 600), strict=True):
        found = told["largest"]
        assert found["share"] == [6, 32, columns] and found["training"] == 6 * 32 * columns
        assert found["whole"] == [6, 32, 1201] and found["measuring"] >= 6 * 32 * 1201


@pytest.mark.slow
def test_one_rank_is_one_process(place):
    """D9: launched for one rank, every kind ends with the bits of a plain run."""
    recipe = place.recipe(accumulation=2, model=DROPOUT)
    actions = [
        {"do": "learn", "name": f"one {kind}", "recipe": recipe, "train": {"parallel": kind}}
        for kind in ("auto", "ddp", "fsdp")
    ]
    place.carry_out("one", actions, n=1)
    plain = place.single("plain", recipe)
    expected = outcome(plain)
    assert outcome(place.folder / "one auto") == expected
    assert outcome(place.folder / "one ddp") == expected
    assert outcome(place.folder / "one fsdp")["log"] == expected["log"]
    a, b = weights(plain, recipe), weights(place.folder / "one fsdp", recipe)
    assert all(torch.equal(a[name], b[name]) for name in a)


# ----------------------------------------------------------------------- other numbers of ranks (D3, D4)


@pytest.mark.slow
def test_shards_of_any_number_of_ranks_hold_the_same_bits(place, two):
    """D3: 1 -> 2 -> 1 -> 2: files of one process equal byte for byte, shards of two as well."""
    hops = [checkpoints(place.folder / "reshard" / str(hop))[0] for hop in range(3)]
    start = checkpoints(place.folder / "whole")[0]
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (hops[1] / name).read_bytes() == (start / name).read_bytes()
    names = sorted(path.name for path in hops[0].glob("*.safetensors"))
    assert names == [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    for name in names:
        a, b = (load_file(hops[hop] / name) for hop in (0, 2))
        assert a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)
    for hop in range(3):
        assert verify_checkpoint(hops[hop]) == []


@pytest.mark.slow
def test_any_number_of_ranks_sees_the_same_examples(place, two):
    """D4: 1 -> 2 -> 1 processes in mid-training: the same windows in each step, the loss within 1e-5."""
    seen: dict[int, list[int]] = {}
    for told in two:
        for index, samples in told["elastic"]["ids"]:
            seen.setdefault(index, []).extend(samples)
    recipe = place.recipe(steps=12, accumulation=2)
    place.single("elastic", recipe, resume=True)
    whole = place.single("never elastic", recipe)
    task, _ = tasks.make_task(recipe, RunFolder(whole), note=lambda text: None)
    for index in range(8, 16):
        assert sorted(seen[index]) == sorted(task.batch(index).sample_ids or [])
    loss, _, weight = distances(place.folder / "elastic", whole, recipe)
    print(f"D4: dloss {loss:.1e} dweight {weight:.1e}")
    assert loss <= 1e-5 and weight <= 1e-4


# ------------------------------------------------------------------- stopping and failing together (D5-D8)


@pytest.mark.slow
def test_a_signal_to_one_rank_stops_all(place, two):
    """D6: both stop after the same step and save; gone on with, the run ends as if it never stopped."""
    assert [told["stopped"].get("said") for told in two] == ["stopped after 3 steps"] * 2
    assert two[0]["stopped"]["newest"] == ["step-00000003"]
    assert outcome(place.folder / "stopped") == outcome(place.folder / "went on")


@pytest.mark.slow
def test_a_bad_gradient_on_one_rank_stops_all(place, two):
    """R9 with ranks: the same step, the same words, no update and no checkpoint of it."""
    said = {told["poisoned"].get("said") for told in two}
    assert len(said) == 1
    (message,) = said
    assert "step 3: the gradient of embed.weight" in message or "step 3: the gradient of" in message
    assert not checkpoints(place.folder / "poisoned")


@pytest.mark.slow
def test_weights_that_come_apart_are_reported(place, two):
    """D8: one bit flipped on one rank shows at the next comparison, by the parameter's name."""
    for told in two:
        assert told["flipped"]["error"] == "ValueError"
        assert "step 4: the ranks' weights have come apart" in told["flipped"]["said"]


@pytest.mark.slow
def test_asynchronous_checkpoints_of_shards(place, two):
    """R17 with ranks: every one is whole, and holds the weights of its own step."""
    run = place.folder / "async"
    assert [path.name for path in checkpoints(run)] == [f"step-0000000{n}" for n in (5, 4, 3, 2, 1)]
    assert all(verify_checkpoint(path) == [] for path in checkpoints(run))
    a, b = (weights(place.folder / name, place.recipe()) for name in ("async", "fsdp-2"))
    assert all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_rank_that_dies_in_a_save(place, kind):
    """D7: the checkpoint before stays the newest whole one; the other rank ends within 30 s."""
    main_or_not = 0 if kind == "ddp" else 1  # in DDP the main rank alone writes
    action = {
        "do": "learn",
        "name": f"dies in {kind}",
        "recipe": place.recipe(parallel=kind, accumulation=2, save_every=2, rank_timeout=20.0),
        "happens": "die_in_save",
        "rank": main_or_not,
        "step": 3,
    }
    processes = place.start(f"die-{kind}", [action])
    dead, survivor = processes[main_or_not], processes[1 - main_or_not]
    dead.communicate(timeout=120)
    survivor.communicate(timeout=30)
    assert dead.returncode == -signal.SIGKILL
    assert survivor.returncode not in (0, -signal.SIGKILL)
    newest, *_ = checkpoints(place.folder / f"dies in {kind}")
    assert newest.name == "step-00000002" and verify_checkpoint(newest) == []


@pytest.mark.slow
def test_a_rank_killed_twice_leaves_no_trace(place, two):
    """D5: all ranks are started anew and go on by themselves; the end is that of an unharmed run."""
    recipe = place.recipe(steps=9, save_every=2, model=DROPOUT)
    launcher = [sys.executable, "-m", "clearhead.cli_ranks", "--nproc-per-node=2", "--max-restarts=3"]
    launcher += ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--monitor-interval=0.2"]
    happens = [
        {"name": "killed", "rank": 1, "step": 3},
        {"name": "killed too", "rank": 0, "step": 5, "life": 1},
    ]
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    try:
        actions = [{"do": "learn", "recipe": recipe, "happens": "kill", **each} for each in happens]
        (process,) = place.start("kills", actions, launcher=launcher)
        _, errors = process.communicate(timeout=200)
    finally:
        del os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
    assert process.returncode == 0, errors[-4000:]
    assert "rank 1 ended with signal SIGKILL; all ranks start anew: restart 1 of 3" in errors
    expected = outcome(place.folder / "went on")
    assert outcome(place.folder / "killed") == expected
    assert outcome(place.folder / "killed too") == expected


# ------------------------------------------------------------------------------------ without processes


def test_every_micro_batch_or_row_belongs_to_one_rank():
    """Whole micro-batches where they come out even, else rows; else an error with both numbers."""
    assert [share_out(4, 3, rank, 2).micro_batches for rank in (0, 1)] == [range(0, 4, 2), range(1, 4, 2)]
    assert share_out(1, 6, 1, 3) == Share(range(1), 1, 3)
    with pytest.raises(ValueError, match=r"accumulation=3 nor train.batch_size=5 .* by 2 ranks"):
        share_out(3, 5, 0, 2)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"n_heads": 6, "d_model": 48}, "does not divide model.n_heads=6"),
        ({"n_kv_heads": 2}, "does not divide model.n_kv_heads=2"),
        ({"d_ff": 90}, "does not divide model.d_ff=90"),
        ({"vocab_size": 9}, "leaves a rank no token of model.vocab_size=9; take fewer ranks"),
        ({"residual_dropout": 0.1}, "does not go with model.embed_dropout, attn_dropout, residual_dropout"),
    ],
)
def test_matrices_that_cannot_be_cut_are_named(sizes, said):
    """Heads and feed-forward features come out even, and every rank gets a token; else one line says why."""
    fits = {"vocab_size": 10, "d_model": 64, "n_layers": 1, "n_heads": 4, "d_ff": 96, "max_len": 8}
    plan_for(ModelConfig(**fits), 4)
    with pytest.raises(ValueError, match=f"train.tensor_parallel=4 {said}"):
        plan_for(ModelConfig(**{**fits, **sizes}), 4)


def test_one_flipped_bit_changes_the_sum():
    """Each of 32 bits of a weight, and of half a weight, counts."""
    for dtype, whole, n in ((torch.float32, torch.int32, 32), (torch.bfloat16, torch.int16, 16)):
        value = torch.randn(3, 4).to(dtype)
        before = bits(value)
        for bit in range(n):
            changed = value.clone()
            changed.view(whole)[1, 2] ^= -(1 << bit) if bit == n - 1 else 1 << bit
            assert bits(changed) != before


def test_who_launched_us():
    """torchrun's variables, srun's, nobody's; and srun without a place to meet is one clear line."""
    assert find_place({}) is None
    assert find_place({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}) is None
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    assert find_place({**torchrun, "OTHER": "x"}) == torchrun
    srun = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "123"}
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        find_place(srun)
    place = find_place({**srun, "MASTER_ADDR": "node1"})
    assert place == {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": "20123",
    }


def test_settings_for_several_processes_need_them(tmp_path, place):
    """Asked for in one process they would do nothing: an error says how to start."""
    with pytest.raises(ValueError, match=r"parallel='fsdp'.*clearhead launch"):
        train(place.recipe(parallel="fsdp"), tmp_path / "run")
    with pytest.raises(ValueError, match="go with parallel='fsdp', not with 'ddp'"):
        replace(place.recipe().train, parallel="ddp", replicate=2)
