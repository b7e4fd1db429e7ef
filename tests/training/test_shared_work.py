"""What many ranks would each do is shared out: looks at validation examples, exchanges, whole matrices."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.model.config_parts import ExpertsConfig
from clearhead.training import muon
from clearhead.training.checkpoint import checkpoints
from clearhead.training.evaluate import UNSHARED, Sharers, Totals
from clearhead.training.loop import Trainer, train
from clearhead.training.parallel import Single
from clearhead.training.recipe import Recipe, TrainConfig
from clearhead.training.report import read_metrics
from clearhead.training.run_folder import RunFolder
from clearhead.training.tasks import make_task
from training import test_parallel
from training.sharing_ranks import look_at
from training.test_parallel import Place, distances, weights
from training.test_tasks import CASES, make_recipe

SCRIPT = Path(__file__).with_name("sharing_ranks.py")
SHAPES: dict[str, dict[str, Any]] = {  # of a look: batches that do not come out even, and fewer than ranks
    "uneven": {"batch_size": 5, "eval_tokens": 150},
    "few": {"batch_size": 64, "eval_tokens": 1},
}
CUT = ("next_token", "masked", "classes")  # objectives tried with matrices cut between ranks
TENSORS: dict[str, Any] = {"parallel": "fsdp", "tensor_parallel": 2}
EXPERTS = ExpertsConfig(4, 2, 32, correction_bias=True)
QUIET: dict[str, Any] = {"compare_every": 0, "save_every": 100, "eval_every": 100}
MEAN: dict[str, Any] = {"average": 0.5, "eval_every": 1, "norms_every": 1, "accumulation": 2}
pytestmark = test_parallel.pytestmark


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("shared work"))


def carry_out(place: Place, plan: str, actions: list[dict[str, Any]], n: int = 2) -> list[dict[str, Any]]:
    """`Place.carry_out` of actions that only this file knows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_parallel, "SCRIPT", SCRIPT)
        return place.carry_out(plan, actions, n)


# ------------------------------------------------------------------------------------------------- a look


def with_validation(folder: Path, case: str, **changes: Any) -> Recipe:
    """A recipe of test_tasks.py whose validation examples are 23 of the others."""
    name, content = CASES[case][1:3]
    between = "\n\n" if name.endswith(("txt", "conll")) else "\n"
    (folder / f"validation-{name}").write_text(between.join(content.split(between)[20:43]) + "\n", "utf-8")
    data = {"validation": str(folder / f"validation-{name}")}
    return make_recipe(folder, case, data=data, **changes)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of every objective that has learned a little, so that its answers are right now and then."""
    made = {}
    for case in CASES:
        folder = tmp_path_factory.mktemp(case)
        steps = 150 if case == "translation" else 40
        recipe = with_validation(folder, case, steps=steps, lr=0.02, eval_every=1000, save_every=1000)
        made[case] = train(recipe, folder / "run").path
    return made


def cases(runs: dict[str, Path], shape: str, chosen: Sequence[str] = tuple(CASES)) -> list[dict[str, Any]]:
    return [{"name": case, "run": str(runs[case]), "train": SHAPES[shape]} for case in chosen]


@pytest.fixture(scope="module")
def alone(runs: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """What one process says of each run."""
    single = Single(TrainConfig(steps=1, device="cpu"))
    return {shape: {case["name"]: look_at(case, single) for case in cases(runs, shape)} for shape in SHAPES}


@pytest.fixture(scope="module")
def looks(place: Place, runs: dict[str, Path]) -> dict[str, list[dict[str, Any]]]:
    """What two ranks say of them; and four of some, where each two work on a matrix together."""
    kinds = {"ddp": {"parallel": "ddp"}, "fsdp": {"parallel": "fsdp"}, "tensors": TENSORS}
    actions = {
        kind: [
            {
                "do": "look",
                "name": f"{kind} {shape}",
                "recipe": place.recipe(**how),
                "cases": cases(runs, shape, CUT if kind == "tensors" else tuple(CASES)),
            }
            for shape in SHAPES
        ]
        for kind, how in kinds.items()
    }
    two = carry_out(place, "looks", actions["ddp"] + actions["fsdp"])
    four = carry_out(place, "looks of four", actions["tensors"], n=4)
    return {"ddp": two, "fsdp": two, "tensors": four}


LOOKS = [
    (kind, case) for kind in ("ddp", "fsdp", "tensors") for case in (CUT if kind == "tensors" else CASES)
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "case"), LOOKS)
def test_ranks_that_look_together_see_what_one_sees(kind, case, shape, looks, alone):
    """Each has every measure; counts and texts are those of one process exactly, sums to 1e-9 (with matrices
    cut in two, whose products round otherwise, to 1e-6).
    """
    exactly = {"accuracy", "f1", "exact_match", "bleu", "chrf"}
    for end, expected in enumerate(alone[shape][case]):
        first, *others = [rank[f"{kind} {shape}"][case][end]["measures"] for rank in looks[kind]]
        assert all(other == first for other in others)
        assert list(first) == list(expected["measures"])
        for name, value in expected["measures"].items():
            rounding = 0 if name in exactly else 1e-6 if kind == "tensors" else 1e-9
            assert first[name] == pytest.approx(value, rel=rounding, abs=0), name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "case"), LOOKS)
def test_each_rank_makes_its_part_of_the_passes(kind, case, shape, looks, alone):
    """With whole models no pass is made twice; with parts of one all make as many, and few for company."""
    for end, expected in enumerate(alone[shape][case]):
        passes, n = [rank[f"{kind} {shape}"][case][end]["passes"] for rank in looks[kind]], expected["passes"]
        assert n == 1 or shape == "uneven" or case == "translation"
        writes = case == "translation" and end == 1  # texts of different lengths
        if kind == "ddp":
            assert sum(passes) == n and (writes or passes[0] - passes[1] == n % 2)
        else:
            assert len(set(passes)) == 1 and n / 2 <= passes[0] < (0.8 * n if writes else n / 2 + 1)


def test_the_runs_test_something(alone):
    """Batches do not come out even; answers are right now and then; translations end at different lengths."""
    for case, ends in alone["uneven"].items():
        part, whole = (end["passes"] for end in ends)
        assert case == "translation" or (1 <= part < whole and whole % 2 == 1), (case, part, whole)
    shares = [ends[1]["measures"].get("accuracy") for ends in alone["uneven"].values()]
    assert sum(0 < share < 1 for share in shares if share is not None) >= 6


class Third(Sharers):
    """One of several, of which it knows what the others have told."""

    def __init__(self, rank: int, size: int, in_step: bool, *told: Any) -> None:
        self.rank, self.size, self.in_step, self.told = rank, size, in_step, list(told)

    def gather(self, value: Any) -> list[Any]:
        return [*self.told[: self.rank], value, *self.told[self.rank :]]


def test_things_are_dealt_out_in_turn_and_put_together_in_order():
    """Seven things for three; none for anyone; and where passes are made together, one to work on for all."""
    parts = [list(Third(rank, 3, False).part("abcdefg")) for rank in range(3)]
    assert ["".join(thing for thing, _ in part) for part in parts] == ["adg", "be", "cf"]
    assert all(counts for part in parts for _, counts in part)
    in_step = [list(Third(rank, 3, True).part("abcdefg")) for rank in range(3)]
    assert in_step == [[*part, *[("g", False)] * (3 - len(part))] for part in parts]
    assert Third(1, 3, False, list("adg"), list("cf")).whole(list("be")) == list("abcdefg")
    assert Third(2, 3, True, [], []).whole([]) == [] and list(Third(2, 3, True).part([])) == []
    assert UNSHARED.whole([None, 0]) == [None, 0]


def test_sums_of_ranks_without_a_batch():
    """One that has seen none adds nothing; each hears the sums of all."""
    totals = Totals()
    assert totals.read(Third(1, 3, True, [2.5, 3.0], [0.25, 1.0])) == [2.75, 4.0]
    totals.add(torch.tensor(0.5), torch.tensor(2))
    assert totals.read(Third(0, 2, True, [])) == totals.read() == [0.5, 2.0]


def test_who_goes_on():
    """Alone, or with a whole model, who wants to; in step, all while one wants to."""
    assert [UNSHARED.go_on(wanted) for wanted in (True, False)] == [True, False]
    assert not Third(0, 2, False, True).go_on(False)
    assert Third(0, 2, True, True).go_on(False) and not Third(0, 2, True, False).go_on(False)


def test_a_rank_that_fails_in_a_look_is_not_waited_for(place):
    """It leaves, whichever it is, and takes the others with it: they do not wait for 30 minutes."""
    actions = [
        {"do": "fail_alone", "name": f"alone {rank}", "recipe": place.recipe(parallel="ddp"), "rank": rank}
        for rank in range(2)
    ]
    told = carry_out(place, "alone", actions)
    for rank in range(2):
        ends = [one[f"alone {rank}"] for one in told]
        assert ends[rank] == "ValueError" and ends[1 - rank] == "RuntimeError"


# ---------------------------------------------------------------------------------- exchanges of each step


@pytest.fixture(scope="module")
def two(place: Place) -> list[dict[str, Any]]:
    """What two ranks told of one long plan."""
    fsdp: dict[str, Any] = {"parallel": "fsdp"}
    kinds = {"ddp": {"parallel": "ddp"}, "fsdp": fsdp, "tensors": TENSORS}
    actions: list[dict[str, Any]] = [
        {"do": "count_exchanges", "name": f"count {kind}", "recipe": place.recipe(**how, **QUIET)}
        for kind, how in kinds.items()
    ]
    experts = {"experts": EXPERTS}
    actions += [
        {"do": "count_exchanges", "name": "count experts", "recipe": place.recipe(model=experts, **QUIET)},
        {"do": "learn", "name": "experts", "recipe": place.recipe(accumulation=2, model=experts)},
        {"do": "learn", "name": "mean", "recipe": place.recipe(**fsdp, **MEAN)},
    ]
    muon = place.recipe(**fsdp, accumulation=2, optimizer="muon")
    for name, entries in (("one by one", 1), ("some", 10_000), ("all", 1 << 24)):
        actions.append({"do": "few_matrices", "name": name, "recipe": muon, "entries": entries})
    for how in kinds:
        for happens in ("poison_part", "poison_loss", "signal"):
            if (how, happens) != ("ddp", "poison_part"):  # there each rank holds all of it
                recipe = place.recipe(**kinds[how])
                name = f"{happens} {how}"
                actions.append({"do": "learn", "name": name, "recipe": recipe, "happens": happens})
    for action in actions:
        action.update({"rank": 1, "step": 2})
    return carry_out(place, "two", actions)


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tensors", "experts"])
def test_a_step_sums_over_ranks_twice(kind, two):
    """Before it the targets and the wish to stop, after it the loss, the norm and the experts' load."""
    for told in two:
        assert told[f"count {kind}"] == [2] * 4


def test_the_load_of_experts_is_that_of_all(place, two):
    """Their corrections, which follow from it, are to the bit those of one process; losses to 1e-5."""
    recipe = place.recipe(accumulation=2, model={"experts": EXPERTS})
    single = place.single("one with experts", recipe)
    loss, norm, weight = distances(place.folder / "experts", single, recipe)
    print(f"experts on two ranks: dloss {loss:.1e} dnorm {norm:.1e} dweight {weight:.1e}")
    assert loss <= 1e-5 and norm <= 1e-5 and weight <= 1e-4
    one, other = weights(single, recipe), weights(place.folder / "experts", recipe)
    corrections = [name for name in one if name.endswith("correction")]
    assert corrections and all(one[name].any() for name in corrections)
    assert all(torch.equal(one[name], other[name]) for name in corrections)


@pytest.mark.parametrize("kind", ["fsdp", "tensors"])
def test_a_bad_part_of_a_gradient_stops_all(kind, two, place):
    """R9: NaN in a part that only one rank holds is seen by both at the same step and named."""
    (said,) = {told[f"poison_part {kind}"]["said"] for told in two}
    assert said.startswith("step 3: the gradient of embed.weight is not finite; no update was made")
    assert not checkpoints(place.folder / f"poison_part {kind}")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_bad_loss_on_one_rank_stops_all(kind, two, place):
    """R9: of ranks that see different data, the loss of one alone."""
    (said,) = {told[f"poison_loss {kind}"]["said"] for told in two}
    assert said.startswith("step 3: the loss is not finite; no update was made")
    assert not checkpoints(place.folder / f"poison_loss {kind}")


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "tensors"])
def test_a_signal_to_one_rank_stops_all_at_the_same_step(kind, two):
    """D6, whoever holds what."""
    assert [told[f"signal {kind}"].get("said") for told in two] == ["stopped after 3 steps"] * 2
    assert two[0][f"signal {kind}"]["newest"] == ["step-00000003"]


def test_a_look_at_the_mean_leaves_the_weights_alone(place, two):
    """The ranks have gathered the mean's embedding for a look; the next step gathers that of the weights."""
    recipe = place.recipe(**MEAN)
    single = place.single("one with a mean", recipe)
    loss, norm, weight = distances(place.folder / "mean", single, recipe)
    print(f"mean looked at on two ranks: dloss {loss:.1e} dnorm {norm:.1e} dweight {weight:.1e}")
    assert loss <= 1e-5 and norm <= 1e-5 and weight <= 1e-4
    for entry, other in zip(*(validation(run) for run in (place.folder / "mean", single)), strict=True):
        assert entry == pytest.approx(other, rel=1e-5)


def validation(run: Path) -> list[float]:
    entries = read_metrics(run / "metrics.jsonl")
    return [entry["validation_loss"] for entry in entries if "validation_loss" in entry]


# -------------------------------------------------------------------------------------- whole matrices


def test_few_matrices_are_whole_at_a_time(two):
    """At most as many entries as are allowed, or one matrix; every matrix once in each step."""
    for told in two:
        for name, entries in (("one by one", 1), ("some", 10_000), ("all", 1 << 24)):
            assert all(len(some) == 1 or sum(some) <= entries for some in told[name])
            assert sum(map(len, told[name])) == 5 * 2 * 7  # steps, blocks, matrices of a block
        assert max(len(some) for some in told["one by one"]) == 1
        assert len(told["one by one"]) > len(told["some"]) > len(told["all"])


@pytest.mark.parametrize("name", ["one by one", "some"])
def test_how_many_are_whole_changes_nothing(name, place, two):
    """Two ranks end with the weights that they get with all at once, to 1e-6, and those of one to 1e-4."""
    recipe = place.recipe(accumulation=2, optimizer="muon")
    found, together = (weights(place.folder / each, recipe) for each in (name, "all"))
    for key in found:
        torch.testing.assert_close(found[key], together[key], rtol=0, atol=1e-6)
    single = place.folder / "one muon"
    if not single.exists():
        place.single(single.name, recipe)
    loss, norm, weight = distances(place.folder / name, single, recipe)
    assert loss <= 1e-5 and norm <= 1e-4 and weight <= 1e-4


def test_in_one_process_all_are_moved_together(monkeypatch):
    monkeypatch.setattr(muon, "AT_ONCE", 1)
    params = [torch.zeros(3, 4), torch.zeros(3, 4)]
    assert list(muon.few_at_once(params)) == [params] and list(muon.few_at_once([])) == []


# ----------------------------------------------------------------------- how long a silent rank is waited for


class Hurried(Single):
    """A rank that notes when it is no longer to wait long for others."""

    hurried = 0

    def hurry(self) -> None:
        self.hurried += 1


CHOICES = [("classes", True, 0), ("classes", False, 2), ("next_token", True, 2)]


@pytest.mark.parametrize(("case", "compiled", "times"), CHOICES)
def test_ranks_wait_long_where_a_step_may_compile(case, compiled, times, tmp_path):
    """A batch of a new length is compiled anew, in minutes, by a rank that others wait for."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    task, recipe = make_task(make_recipe(tmp_path, case), run, lambda text: None)
    parallel = Hurried(recipe.train)
    trainer = Trainer(recipe, run, task, (), parallel=parallel)
    trainer.stepper.compiled = compiled
    trainer.start(resume=False)
    trainer._take_step()
    trainer._take_step()
    trainer.stepper.close()
    assert parallel.hurried == times


# ------------------------------------------------------------------------------------------- pinned batches


def test_batches_for_a_gpu_lie_in_memory_that_stays(tmp_path, monkeypatch):
    """They are pinned where they are made, with the run's GPU as the thread's; on a CPU nothing is done."""
    run = RunFolder(tmp_path / "run")
    run.path.mkdir()
    task, recipe = make_task(make_recipe(tmp_path, "classes"), run, lambda text: None)
    stepper = Trainer(recipe, run, task, ()).stepper
    plain, chosen = stepper._batches(3), []
    assert not any(batch.inputs.is_pinned() for batch in plain)
    monkeypatch.setattr(torch.cuda, "device", lambda device: chosen.append(device) or nullcontext())
    monkeypatch.setattr(Tensor, "pin_memory", Tensor.clone)
    stepper.device = torch.device("cuda", 3)
    pinned = stepper._batches(3)
    assert chosen == [torch.device("cuda", 3)]
    for one, other in zip(plain, pinned, strict=True):
        assert torch.equal(one.inputs, other.inputs) and other.inputs is not one.inputs
        assert other.sample_ids == one.sample_ids
