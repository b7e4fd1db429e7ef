"""What one rank does in test_shared_work.py, beside what ranks.py does: python sharing_ranks.py PLAN."""

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.model.transformer import Transformer
from clearhead.training import loop, muon
from clearhead.training.checkpoint import load_checkpoint
from clearhead.training.parallel import start_parallel
from clearhead.training.recipe import Recipe
from clearhead.training.run_folder import RunFolder
from clearhead.training.sharded import local
from clearhead.training.step import Parallel
from clearhead.training.tasks import make_task
from training import ranks


def look_at(case: dict[str, Any], parallel: Parallel) -> list[dict[str, Any]]:
    """What a run is worth, at a look on the way and at the end, and how many passes that took."""
    run, found, passes = RunFolder(case["run"]), [], []
    run.begun = True  # what is there is only read
    recipe = run.recipe()
    task, recipe = make_task(
        replace(recipe, train=replace(recipe.train, **case["train"])), run, lambda text: None
    )
    model = Transformer(recipe.model, seed=9)
    load_checkpoint(run.path, model)
    parallel.wrap(model)
    model.register_forward_hook(lambda module, inputs, output: passes.append(1))
    for whole in (False, True):
        passes.clear()
        measures = task.evaluate(model, whole, parallel.looking)
        found.append({"measures": measures, "passes": len(passes)})
    return found


def look(recipe: Recipe, folder: Path, action: ranks.Action) -> dict[str, Any]:
    """`look_at` each of some runs."""
    with start_parallel(recipe.train, folder, print) as parallel:
        return {case["name"]: look_at(case, parallel) for case in action["cases"]}


def count_exchanges(recipe: Recipe, folder: Path, action: ranks.Action) -> list[int]:
    """How often all ranks sum something, from the beginning of each step to that of the next."""
    sums, before = torch.distributed.all_reduce, loop.Trainer._asked
    calls: list[int] = []
    begun: list[int] = []

    def counted(*inputs: Any, **how: Any) -> Any:
        calls.append(1)
        return sums(*inputs, **how)

    def asked(self: loop.Trainer, stop_requested: Callable[[], bool]) -> bool:
        begun.append(len(calls))
        return before(self, stop_requested)

    torch.distributed.all_reduce, loop.Trainer._asked = counted, asked
    try:
        loop.train(recipe, folder)
    finally:
        torch.distributed.all_reduce, loop.Trainer._asked = sums, before
    return [later - earlier for earlier, later in pairwise(begun)]


def few_matrices(recipe: Recipe, folder: Path, action: ranks.Action) -> list[list[int]]:
    """Learn with at most so many entries of whole matrices at a time; which were whole together."""
    at_once, few, seen = muon.AT_ONCE, muon.few_at_once, []

    def watched(params: list[Tensor]) -> Any:
        for some in few(params):
            seen.append([p.numel() for p in some])
            yield some

    muon.AT_ONCE, muon.few_at_once = action["entries"], watched
    try:
        ranks.learn(recipe, folder, action)
    finally:
        muon.AT_ONCE, muon.few_at_once = at_once, few
    return seen


def poison_part(trainer: loop.Trainer) -> None:
    """In one step a gradient is NaN in the part that this rank holds, after all exchanges of gradients."""
    clip = trainer.parallel.clip

    def poisoned(model: nn.Module, max_norm: float, *sums: Tensor) -> Any:
        trainer.parallel.clip = clip
        gradient = next(p.grad for p in model.parameters() if p.grad is not None)
        local(gradient).flatten()[0] = float("nan")
        return clip(model, max_norm, *sums)

    trainer.parallel.clip = poisoned


def poison_loss(trainer: loop.Trainer) -> None:
    """In one step this rank's loss is infinite, though its gradients are not."""
    clip = trainer.parallel.clip

    def poisoned(model: nn.Module, max_norm: float, total: Tensor, *sums: Tensor) -> Any:
        trainer.parallel.clip = clip
        return clip(model, max_norm, total + float("inf"), *sums)

    trainer.parallel.clip = poisoned


def fail_alone(recipe: Recipe, folder: Path, action: ranks.Action) -> str:
    """One rank fails, while the others wait to hear what it found; how each of them ends."""
    try:
        with start_parallel(recipe.train, folder, print) as parallel:
            parallel.looking.whole([1])
            if parallel.rank == action["rank"]:
                raise ValueError("this rank alone")
            parallel.looking.whole([2])
    except (ValueError, RuntimeError) as error:
        return type(error).__name__
    return "as if nothing had happened"


ranks.ACTIONS.update(
    look=look, count_exchanges=count_exchanges, few_matrices=few_matrices, fail_alone=fail_alone
)
ranks.HAPPENINGS.update(poison_part=poison_part, poison_loss=poison_loss)

if __name__ == "__main__":
    ranks.RANK = int(os.environ["RANK"])
    ranks.main()
