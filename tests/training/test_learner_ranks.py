"""Muon, the mean of the weights, recomputed blocks and norms where several processes share the weights."""

from typing import Any

import pytest

from clearhead.training.report import read_metrics
from training.test_parallel import Place, distances

EVERYTHING = {
    "optimizer": "muon",
    "average": 0.8,
    "norms_every": 5,
    "checkpoint_activations": True,
    "on_spike": "skip",
}


@pytest.mark.slow
def test_two_ranks_learn_what_one_learns(tmp_path_factory: pytest.TempPathFactory) -> None:
    """With ddp, fsdp and matrices cut in two: losses to 1e-5, the mean of the weights to 1e-4, the norms of
    parts to 1e-3.
    """
    place = Place(tmp_path_factory.mktemp("learner ranks"))
    recipe = place.recipe(accumulation=2, **EVERYTHING)
    single = place.single("one", recipe)
    kinds: dict[str, dict[str, Any]] = {
        "ddp": {"parallel": "ddp"},
        "fsdp": {"parallel": "fsdp"},
        "tensors": {"parallel": "fsdp", "tensor_parallel": 2},
    }
    actions = [
        {"do": "learn", "name": kind, "recipe": place.recipe(accumulation=2, **how, **EVERYTHING)}
        for kind, how in kinds.items()
    ]
    place.carry_out("two", actions)
    expected = read_metrics(single / "metrics.jsonl")
    for kind in kinds:
        loss, norm, weight = distances(place.folder / kind, single, recipe)
        assert loss <= 1e-5 and norm <= 1e-4 and weight <= 1e-4
        for entry, other in zip(read_metrics(place.folder / kind / "metrics.jsonl"), expected, strict=True):
            for name in (name for name in other if "/" in name):
                assert entry[name] == pytest.approx(other[name], rel=1e-3, abs=1e-6), name
