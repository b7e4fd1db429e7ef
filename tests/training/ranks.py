"""What one rank does in the tests of several processes: python ranks.py PLAN runs a list of actions.

Every action is one meeting of all ranks; what it finds goes into FOLDER/told-<rank>.json.
"""

import json
import math
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer
from clearhead.training import durable, loop, tasks
from clearhead.training.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from clearhead.training.learner import make_optimizer
from clearhead.training.objectives import cross_entropy, token_loss
from clearhead.training.optim import clip_gradients
from clearhead.training.parallel import Distributed, start_parallel
from clearhead.training.recipe import Recipe, load_recipe
from clearhead.training.report import JsonLines
from clearhead.training.sharded import local

RANK = int(os.environ.get("RANK", "-1"))  # where nobody started it, it is only read
Action = dict[str, Any]


def learn(recipe: Recipe, folder: Path, action: Action) -> Any:
    """Train; things may happen on the way, each to one rank: signal, kill, flip, poison."""
    happens, ids = action.get("happens"), []
    take_step, batch = loop.Trainer._take_step, tasks.NextToken.batch

    def take(self: loop.Trainer) -> None:
        first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == str(action.get("life", 0))
        if happens and action["rank"] == RANK and self.step == action["step"] and first_life:
            HAPPENINGS[happens](self)
        take_step(self)

    def noted(self: tasks.NextToken, index: int, part: int = 0, parts: int = 1) -> Any:
        made = batch(self, index, part, parts)
        ids.append([index, made.sample_ids])
        return made

    loop.Trainer._take_step, tasks.NextToken.batch = take, noted
    try:
        how = {"resume": bool(action.get("resume")), "stop_after": action.get("stop_after")}
        loop.train(recipe, folder, watchers=[JsonLines()], **how)
        return {"ids": ids}
    except (loop.Interrupted, ValueError) as error:
        newest = [path.name for path in checkpoints(folder)][:1]
        return {"ids": ids, "error": type(error).__name__, "said": str(error), "newest": newest}
    finally:
        loop.Trainer._take_step, tasks.NextToken.batch = take_step, batch


def flip(trainer: loop.Trainer) -> None:
    """One bit of one weight is wrong from now on."""
    weight = trainer.model.decoder.blocks[1].attn.q.weight.data.view(torch.int32)
    weight[3, 5] ^= 1 << 4


def poison(trainer: loop.Trainer) -> None:
    """A gradient of this rank becomes NaN, once."""
    weight = trainer.model.decoder.blocks[0].ff.up.weight
    handle = weight.register_hook(lambda grad: handle.remove() or grad * float("nan"))


def die_in_save(trainer: loop.Trainer) -> None:
    """kill -9 at the first point of the next save."""
    durable._point = lambda name: os.kill(os.getpid(), signal.SIGKILL)


HAPPENINGS = {
    "signal": lambda trainer: signal.raise_signal(signal.SIGTERM),
    "kill": lambda trainer: os.kill(os.getpid(), signal.SIGKILL),
    "flip": flip,
    "poison": poison,
    "die_in_save": die_in_save,
}


def reshard(recipe: Recipe, folder: Path, action: Action) -> None:
    """From one process to all ranks, to one, to all: each loads what the one before saved."""
    source, settings = Path(action["source"]), recipe.train
    with start_parallel(settings, folder, print) as ranks:
        for hop, shared in enumerate((True, False, True)):
            model = Transformer(recipe.model, seed=hop)
            if shared:
                ranks.wrap(model)
            optimizer = make_optimizer(model, settings)
            if shared or ranks.is_main:
                together = [ranks.saving] if shared else []
                load_checkpoint(source, model, optimizer, *together)
                save_checkpoint(folder / str(hop), 5, model, optimizer, {}, 2, *together)
            ranks.gather(None)
            source = folder / str(hop)


def gradients(recipe: Recipe, folder: Path, action: Action) -> float:
    """The largest difference of a gradient from that of a model that is not wrapped, on the same batch; with
    the model in training, and not.
    """
    config = ModelConfig.from_dict({**recipe.model.to_dict(), **action["config"]})
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, config.vocab_size, (2, 9), generator=generator)
    how = {"source": ids.flip(1)} if config.shape == "encoder-decoder" else {}
    targets = torch.randint(0, config.vocab_size, (2, 9), generator=generator)
    targets[1, 3:6] = -100
    plain = Transformer(config, seed=3)
    n_targets = 15
    (token_loss(plain(ids, **how), targets, 0.1)[0] / n_targets).backward()
    worst = 0.0
    with start_parallel(recipe.train, folder, print) as ranks:
        model = Transformer(config, seed=3)
        forward = ranks.wrap(model)
        for training in (True, False):
            model.train(training).zero_grad()
            with ranks.accumulate(forward, last=True):
                (token_loss(forward(ids, **how), targets, 0.1)[0] / n_targets).backward()
            found = dict(model.named_parameters())
            norm, _ = ranks.clip(model, math.inf)
            wanted = clip_gradients(plain.parameters(), math.inf)
            worst = max(worst, float((norm - wanted).abs() / wanted))
            for name, p in plain.named_parameters():
                grad = found[name].grad
                assert p.grad is not None and grad is not None, name
                whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
                worst = max(worst, float((whole - p.grad).abs().max()))
    return worst


def shared_loss(recipe: Recipe, folder: Path, action: Action) -> list[dict[str, float]]:
    """How far each token's loss of logits that ranks share out, as a part of its largest logit where that is
    above 1, and each gradient are from those of whole logits in float64.
    """
    told = []
    with start_parallel(recipe.train, folder, print) as ranks:
        assert isinstance(ranks, Distributed)
        mesh, source = ranks.mesh["tensor"], torch.Generator().manual_seed(5)
        for case in action["cases"]:
            shape, dtype = (3, 7, case["vocab"]), getattr(torch, case.get("dtype", "float32"))
            logits = (case["scale"] * torch.randn(shape, generator=source)).to(dtype)
            weights = torch.rand(shape[:2], generator=source)
            targets = torch.randint(case["vocab"], shape[:2], generator=source)
            targets[torch.rand(shape[:2], generator=source) < case["ignored"]] = -100
            alone = logits.double().requires_grad_()
            parts = distribute_tensor(logits, mesh, [Shard(2)], src_data_rank=None).requires_grad_()
            how = {"reduction": "none", "label_smoothing": case["smoothing"]}
            wanted, losses = cross_entropy(alone, targets, **how), cross_entropy(parts, targets, **how)
            (wanted * weights).sum().backward()
            (losses * weights).sum().backward()
            assert alone.grad is not None and isinstance(parts.grad, DTensor)
            told.append(
                {
                    "loss": float(((losses - wanted).abs() / logits.abs().amax(-1).clamp(min=1)).max()),
                    "gradient": float((parts.grad.full_tensor() - alone.grad).abs().max()),
                    "columns": local(parts).shape[-1],
                }
            )
            total, count = token_loss(parts, targets, case["smoothing"])
            assert torch.equal(total, losses.sum()) and count == (targets != -100).sum()
    return told


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that is made on this rank."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [local(each).numel() for each in tree_leaves(made) if isinstance(each, Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return made


def largest(recipe: Recipe, folder: Path, action: Action) -> dict[str, Any]:
    """The largest tensor that a rank makes in training, backward pass included, and without training."""
    config = ModelConfig.from_dict({**recipe.model.to_dict(), **action["config"]})
    ids = torch.randint(0, config.vocab_size, (6, 32), generator=torch.Generator().manual_seed(1))
    with start_parallel(recipe.train, folder, print) as ranks:
        model = Transformer(config, seed=3)
        forward = ranks.wrap(model)
        forward(ids)  # what is made once
        with Largest() as training:
            logits = forward(ids)
            token_loss(logits, ids, 0.1)[0].backward()
        with torch.no_grad(), Largest() as measuring:
            whole = model.eval()(ids)
    shapes = {"share": list(local(logits).shape), "whole": list(local(whole).shape)}
    return {"training": training.numbers, "measuring": measuring.numbers, **shapes}


ACTIONS = {
    "learn": learn,
    "reshard": reshard,
    "gradients": gradients,
    "shared_loss": shared_loss,
    "largest": largest,
}


def main() -> None:
    torch.set_num_threads(1)
    plan = Path(sys.argv[1])
    told = {}
    for action in json.loads(plan.read_text()):
        os.environ["MASTER_PORT"] = str(action.get("port", os.environ.get("MASTER_PORT")))
        recipe = load_recipe(action["recipe"])
        recipe = replace(recipe, train=replace(recipe.train, **action.get("train", {})))
        folder = plan.parent / action["name"]
        do = ACTIONS[action["do"]]
        told[action.get("as", action["name"])] = do(recipe, folder, action)
    (plan.parent / f"told-{plan.stem}-{RANK}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
