"""One process or many, behind the same few methods, so that the loop need not know which.

    Single   one process: every method is trivial, and torch.distributed is not even imported
    ddp      each rank holds the whole model and learns from its share of a step; gradients are averaged
             (Li et al. 2020, arXiv:2006.15704)
    fsdp     weights, gradients and moments are shared out; a block's weights are gathered while it works
             (Rajbhandari et al. 2019, arXiv:1910.02054; Zhao et al. 2023, arXiv:2304.11277)
    fsdp with replicate = n          n groups of ranks, each of which shares out one copy of the model
    fsdp with tensor_parallel = n    n ranks work on each matrix together (tensor_parallel.py)

Both average gradients over the ranks that see different data, so a rank's loss is multiplied by their number:
the gradient is then the sum over all ranks of (loss / targets of the whole step), as in one process.
Processes come from torchrun (`clearhead launch`) or from Slurm's srun, and find each other by its variables.
"""

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.model.block import Block
from clearhead.training.durable import ALONE, Ranks
from clearhead.training.evaluate import UNSHARED, Sharers
from clearhead.training.machine import find_device
from clearhead.training.optim import clip_gradients, scale_gradients
from clearhead.training.recipe import TrainConfig
from clearhead.training.run_folder import RunFolder
from clearhead.training.sharded import cut_along, local, whole_sums

T = TypeVar("T")
FIRST_STEP = timedelta(minutes=30)  # compiling, loading, the first meeting of all ranks
SAVING = timedelta(minutes=30)
DATA = ("replicate", "shard")  # the dimensions of the mesh along which ranks see different data
_meetings = count()


@dataclass(frozen=True)
class Share:
    """What one rank learns from in each step: some of the micro-batches, or some rows of every one."""

    micro_batches: range
    part: int = 0
    parts: int = 1


def share_out(accumulation: int, batch_size: int, rank: int, size: int) -> Share:
    """Micro-batches rank, rank + size, ... if that comes out even, else rows; ValueError if neither does."""
    if accumulation % size == 0:
        return Share(range(rank, accumulation, size))
    if batch_size % size == 0:
        return Share(range(accumulation), rank, size)
    raise ValueError(
        f"neither train.accumulation={accumulation} nor train.batch_size={batch_size} can be shared evenly "
        f"by {size} ranks; make one of them a multiple of {size}"
    )


class Single:
    """One process."""

    rank, world_size, data_size, is_main, shares_weights = 0, 1, 1, True, False
    saving: Ranks = ALONE
    looking: Sharers = UNSHARED

    def __init__(self, settings: TrainConfig) -> None:
        self.device = find_device(settings.device)

    def main_first(self, action: Callable[[bool], T], share: Callable[[T], object]) -> T:
        """action(True). Other ranks wait for that, and for `share` of it, then call action(False)."""
        return action(True)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Move the model to the device; return what is to be called in its stead."""
        return model.to(self.device)

    def share(self, accumulation: int, batch_size: int) -> Share:
        """What this rank learns from in each step."""
        return share_out(accumulation, batch_size, 0, 1)

    def accumulate(self, forward: nn.Module, last: bool) -> AbstractContextManager[Any]:
        """Around a backward pass: only the last one of a step exchanges gradients."""
        return nullcontext()

    def count(self, n: int, *flags: bool) -> list[int]:
        """The sum of `n` over the ranks with different data, and on how many ranks each flag is set."""
        return [n, *map(int, flags)]

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return flag

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, the main rank's first; for what is seldom and small."""
        return [value]

    def clip(
        self, model: nn.Module, max_norm: float, *sums: Tensor
    ) -> tuple[Float[Tensor, ""], list[Tensor]]:
        """`clip_gradients` over all that the ranks hold together, and each of `sums` summed over those with
        different data. Both travel at once, and nothing waits for the device.
        """
        return clip_gradients(model.parameters(), max_norm), list(sums)

    def hurry(self) -> None:
        """After the first step a rank that does not answer is soon given up."""

    def check_same(self, model: nn.Module, step: int) -> None:
        """Raise ValueError if ranks that should hold the same weights do not."""

    def close(self) -> None:
        """Part from the other ranks."""


class RankGroup:
    """All ranks, in a group of their own, by which one thread of each may talk to those of the others."""

    def __init__(self) -> None:
        import torch.distributed as dist

        group = dist.new_group(backend="gloo", timeout=SAVING)
        assert isinstance(group, dist.ProcessGroup)
        self.group, self.size, self.is_main = group, dist.get_world_size(), dist.get_rank() == 0

    def gather(self, value: Any) -> list[Any]:
        """Everyone's value, the main rank's first."""
        import torch.distributed as dist

        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, value, group=self.group)
        return told


class DataRanks(Sharers):
    """The ranks that see different data; of those that see the same the first one speaks."""

    def __init__(self, talk: RankGroup, rank: int, size: int, in_step: bool) -> None:
        self.talk, self.rank, self.size, self.in_step = talk, rank, size, in_step

    def gather(self, value: Any) -> list[Any]:
        return self.talk.gather(value)[:: self.talk.size // self.size]


class Distributed:
    """One of several processes; the same methods."""

    def __init__(self, settings: TrainConfig, place: Mapping[str, str]) -> None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        self.rank, self.world_size, local = (int(place[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        self.is_main = self.rank == 0
        self.settings, self.timeout = settings, FIRST_STEP
        replicas, tensor = settings.replicate, settings.tensor_parallel
        if self.world_size % (replicas * tensor):
            raise ValueError(
                f"train.replicate={replicas} times train.tensor_parallel={tensor} does not divide the "
                f"{self.world_size} ranks"
            )
        self.data_rank, self.data_size = self.rank // tensor, self.world_size // tensor
        self.device = find_device(settings.device)
        if self.device.type == "cuda":
            if local >= torch.cuda.device_count():
                raise ValueError(
                    f"{local + 1} processes or more share a machine with {torch.cuda.device_count()} GPUs; "
                    "start one for each GPU"
                )
            torch.cuda.set_device(local)
            self.device = torch.device("cuda", local)
        os.environ.update({name: place[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in place})
        store, _, _ = next(rendezvous("env://", self.rank, self.world_size))
        self.store = PrefixStore(f"meeting {next(_meetings)}", store)  # torchrun's store outlives a meeting
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            store=self.store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=self.timeout,
        )
        self.talk, self.saving = RankGroup(), RankGroup()
        sizes = (replicas, self.world_size // (replicas * tensor), tensor)
        self.mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=("replicate", "shard", "tensor"))
        self.shares_weights = settings.parallel == "fsdp"
        self.looking = DataRanks(self.talk, self.data_rank, self.data_size, self.shares_weights)
        self.met = 0

    def main_first(self, action: Callable[[bool], T], share: Callable[[T], object]) -> T:
        self.met += 1
        key = f"main was first {self.met}"
        if not self.is_main:
            self.store.wait([key], timedelta(days=30))  # preparing data may take long
            if told := self.store.get(key).decode():
                raise ValueError(f"rank 0 stopped: {told}")
            return action(False)
        try:
            result = action(True)
            share(result)
        except BaseException as error:
            self.store.set(key, str(error) or type(error).__name__)
            raise
        self.store.set(key, "")
        return result

    def wrap(self, model: nn.Module) -> nn.Module:
        if not self.shares_weights:
            from torch.nn.parallel import DistributedDataParallel

            devices = [self.device] if self.device.type == "cuda" else None
            with warnings.catch_warnings():  # the name that newer PyTorch wants is unknown to older
                warnings.simplefilter("ignore", FutureWarning)
                return DistributedDataParallel(
                    model.to(self.device), devices, broadcast_buffers=False, gradient_as_bucket_view=True
                )
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

        if self.settings.tensor_parallel > 1:
            from clearhead.training.tensor_parallel import split_matrices

            split_matrices(model.to(self.device), self.mesh["tensor"])
        mesh = self.mesh["replicate", "shard"] if self.settings.replicate > 1 else self.mesh["shard"]
        for block in [module for module in model.modules() if isinstance(module, Block)]:
            if "cross" in dict(block.named_children()):  # called by itself, too: `remember` runs before
                fully_shard(block.cross, mesh=mesh)
                register_fsdp_forward_method(block.cross, "remember")
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model.to(self.device)

    def share(self, accumulation: int, batch_size: int) -> Share:
        return share_out(accumulation, batch_size, self.data_rank, self.data_size)

    def accumulate(self, forward: nn.Module, last: bool) -> AbstractContextManager[Any]:
        from torch.distributed.fsdp import FSDPModule
        from torch.nn.parallel import DistributedDataParallel

        if isinstance(forward, FSDPModule):
            forward.set_requires_gradient_sync(last)
        elif isinstance(forward, DistributedDataParallel) and not last:
            return forward.no_sync()
        return nullcontext()

    def count(self, n: int, *flags: bool) -> list[int]:
        total = torch.tensor([n * self._speaks(DATA), *flags], dtype=torch.int64)
        torch.distributed.all_reduce(total)
        return total.tolist()

    def any(self, flag: bool) -> bool:
        seen = torch.tensor(int(flag))
        torch.distributed.all_reduce(seen, torch.distributed.ReduceOp.MAX)
        return bool(seen)

    def gather(self, value: Any) -> list[Any]:
        return self.talk.gather(value)

    @torch.no_grad()
    def clip(
        self, model: nn.Module, max_norm: float, *sums: Tensor
    ) -> tuple[Float[Tensor, ""], list[Tensor]]:
        grads: list[Tensor] = []
        apart: dict[tuple[str, ...], list[Tensor]] = {}
        for p in model.parameters():
            if p.grad is not None:
                p.grad = whole_sums(p.grad)
                grads.append(local(p.grad))
                norm = torch.linalg.vector_norm(grads[-1], dtype=torch.float32)
                apart.setdefault(cut_along(p.grad), []).append(norm)
        norms = {cut: torch.linalg.vector_norm(torch.stack(parts)) for cut, parts in apart.items()}
        told = [value.double().flatten() * self._speaks(DATA) for value in sums]
        told += [norms[cut].double().square()[None] * self._speaks(cut) for cut in norms if cut]
        found = self._sum_all(told)
        squares = iter(found[len(sums) :])
        parts = [next(squares).sqrt()[0].float() if cut else norm for cut, norm in norms.items()]
        norm = parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts))
        scale_gradients(grads, norm, max_norm)
        return norm, [total.to(own.dtype).view_as(own) for own, total in zip(sums, found, strict=False)]

    def _sum_all(self, values: list[Tensor]) -> list[Tensor]:
        """Vectors of one dtype, each summed over all ranks."""
        if not values:
            return []
        together = torch.cat(values)
        torch.distributed.all_reduce(together)
        return list(together.split([len(value) for value in values]))

    def _speaks(self, cut: tuple[str, ...]) -> bool:
        """Whether this is the first of the ranks that hold one part of what is cut along these dimensions."""
        places = zip(self.mesh.mesh_dim_names or (), self.mesh.get_coordinate() or (), strict=True)
        return all(name in cut or place == 0 for name, place in places)

    def hurry(self) -> None:
        wanted = timedelta(seconds=self.settings.rank_timeout)
        if self.timeout != wanted:
            self.timeout = wanted
            for group in (None, *(self.mesh.get_group(name) for name in self.mesh.mesh_dim_names or ())):
                torch.distributed.distributed_c10d._set_pg_timeout(wanted, group)

    @torch.no_grad()
    def check_same(self, model: nn.Module, step: int) -> None:
        alike: dict[tuple[str, ...], dict[str, Tensor]] = {}
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            cut = cut_along(value)
            copies = tuple(n for n in ("replicate", "shard", "tensor") if n not in cut)
            alike.setdefault(copies, {})[name] = bits(local(value))
        problem = ""
        for copies, sums in alike.items():
            own = torch.stack(list(sums.values()))
            for name in copies:
                everyone = [torch.empty_like(own) for _ in range(self.mesh[name].size())]
                torch.distributed.all_gather(everyone, own, group=self.mesh.get_group(name))
                for other in everyone:
                    wrong = [
                        tensor for tensor, differs in zip(sums, other != everyone[0], strict=True) if differs
                    ]
                    if wrong:
                        problem = f"{wrong[0]} and {len(wrong) - 1} more" if len(wrong) > 1 else wrong[0]
        for rank, told in enumerate(self.gather(problem)):
            if told:
                raise ValueError(
                    f"step {step}: the ranks' weights have come apart: {told} (seen by rank {rank})"
                    "; look for broken memory or an unequal start, and resume from a checkpoint before"
                )

    def close(self) -> None:
        # All at once if all come: a rank that leaves first can make another one's last words fail.
        with suppress(RuntimeError):  # by the store: one that waits for this rank elsewhere does not come
            self.store.set(f"parting {self.rank}", "")
            self.store.wait([f"parting {rank}" for rank in range(self.world_size)], timedelta(seconds=5))
        torch.distributed.destroy_process_group()


def bits(value: Tensor) -> Tensor:
    """A sum over a tensor's bits, int64: one flipped bit always changes it."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return value.detach().contiguous().view(whole[value.element_size()]).sum(dtype=torch.int64)


def find_place(environment: Mapping[str, str]) -> dict[str, str] | None:
    """RANK, WORLD_SIZE and so on, as torchrun gives them or made of srun's; None: nobody launched several.

    ValueError: Slurm does not say where the first rank is.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if all(name in environment for name in names):
        return {name: environment[name] for name in names}
    if int(environment.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return None
    slurm = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS", "LOCAL_RANK": "SLURM_LOCALID"}
    place = {name: environment[theirs] for name, theirs in slurm.items()}
    if "MASTER_ADDR" not in environment:
        raise ValueError(
            "srun started several tasks, but not MASTER_ADDR says where the first one is; put "
            'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) before srun'
        )
    port = environment.get("MASTER_PORT") or str(
        20_000 + int(re.sub(r"\D", "", environment["SLURM_JOB_ID"])) % 20_000
    )
    return {**place, "MASTER_ADDR": environment["MASTER_ADDR"], "MASTER_PORT": port}


def was_restarted() -> bool:
    """Whether torchrun or Slurm has started this job anew after a failure: it is then to go on by itself."""
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return any(int(os.environ.get(name) or "0") > 0 for name in names)


def _say_nothing(text: str) -> None:
    """The other ranks' notes."""


@contextmanager
def start_parallel(
    settings: TrainConfig, run: Path, note: Callable[[str], None]
) -> Iterator[Single | Distributed]:
    """Meet the other ranks, if there are any, and hold the run's folder; part from them at the end, also
    after an error.

    ValueError: settings that need several ranks and have one, or do not go together. BlockingIOError: another
    process holds the folder.
    """
    place = find_place(os.environ)
    if place is None:
        if settings.parallel != "auto" or settings.replicate * settings.tensor_parallel > 1:
            raise ValueError(
                f"train.parallel={settings.parallel!r}, train.replicate={settings.replicate}, "
                f"train.tensor_parallel={settings.tensor_parallel} are for several processes, and this is one"
                "; start it by `clearhead launch`, or leave them away"
            )
        single = Single(settings)
        with RunFolder(run).held():
            yield single
        return
    if place["RANK"] != "0":
        note = _say_nothing  # one tells what all have chosen
    alone = int(place["WORLD_SIZE"]) == 1 and settings.parallel == "auto"
    if settings.parallel == "auto" and not alone:
        chosen = "ddp" if settings.replicate * settings.tensor_parallel == 1 else "fsdp"
        settings = replace(settings, parallel=chosen)
        note(f"parallel=auto: {chosen}, {place['WORLD_SIZE']} ranks")
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS") or "0")
    if restarts and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in os.environ:
        note(
            "torchrun's restarts are slow and may fail unless TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set; "
            "`clearhead launch` does that"
        )
    parallel = Single(settings) if alone else Distributed(settings, place)
    try:
        with quiet(), RunFolder(run).held() if parallel.is_main else nullcontext():
            yield parallel
    finally:
        parallel.close()


@contextmanager
def quiet() -> Iterator[None]:
    """Without two warnings of PyTorch that each rank would repeat, and that nobody can do anything about."""
    with warnings.catch_warnings():
        # Logits may be a view; whoever gets them changes nothing in place (objectives.py makes new tensors).
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        # It is PyTorch's own code that calls the old name; ours never does.
        warnings.filterwarnings(
            "ignore", r"`torch\.distributed\.all_gather_into_tensor` is deprecated", FutureWarning
        )
        yield
