"""Tensors that ranks hold together, each a part: torch's DTensor. What is not shared out passes as it is.

    whole(t)        all of it, on every rank          local(t)           the part that is here
    cut_like(t, u)  of a whole tensor, the part that belongs here, where u is shared out
    whole_sums(t)   where each rank has a summand, the sum
    cut_along(t)    the dimensions of the mesh along which ranks hold different parts
    columns_of(t)   of a tensor whose last dimension is shared out, which columns are here

`whole`, `whole_sums` and `Columns.from_all` are asked by all ranks at once.
"""

from typing import Any, NamedTuple

from torch import Tensor


def is_shared_out(value: Any) -> bool:
    """Whether ranks hold a tensor together, each a part of it."""
    return hasattr(value, "device_mesh")  # only DTensor has one, whose import costs a second


def whole(value: Tensor) -> Tensor:
    """All of a tensor, of which ranks hold parts."""
    if not is_shared_out(value):
        return value
    from torch.distributed.tensor import DTensor

    assert isinstance(value, DTensor)
    return value.full_tensor()


def local(value: Tensor) -> Tensor:
    """The part of a tensor that this rank holds."""
    if not is_shared_out(value):
        return value
    from torch.distributed.tensor import DTensor

    assert isinstance(value, DTensor)
    return value.to_local()


def cut_like(value: Tensor, like: Tensor | None) -> Tensor:
    """The whole tensor `value`, cut as `like` is and on its device; itself where that is not shared out."""
    if like is None or not is_shared_out(like):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    value = value.to(like.to_local().device)
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)


def whole_sums(value: Tensor) -> Tensor:
    """The tensor; of one that ranks hold as parts of a sum, the sum."""
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(value, DTensor) and any(place.is_partial() for place in value.placements):
        return value.redistribute(placements=[Replicate() if p.is_partial() else p for p in value.placements])
    return value


def cut_along(value: Tensor) -> tuple[str, ...]:
    """The dimensions of the mesh along which ranks hold different parts of a tensor."""
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        return ()
    mesh = value.device_mesh
    pairs = zip(mesh.mesh_dim_names or (), value.placements, mesh.shape, strict=True)
    return tuple(name for name, how, n in pairs if n > 1 and not how.is_replicate() and not how.is_partial())


class Columns(NamedTuple):
    """The part of a last dimension that is here: from `first` on, of `total`; `group` has all of it."""

    first: int
    total: int
    group: Any

    def from_all(self, value: Tensor) -> Tensor:
        """What each rank of the group gives, one after the other: (ranks, *shape of value)."""
        import torch.distributed as dist

        told = value.new_empty((dist.get_world_size(self.group), *value.shape))
        dist.all_gather_into_tensor(told, value.contiguous()[None], group=self.group)
        return told


def columns_of(value: Tensor) -> Columns:
    """Which columns of a tensor are here, whose last dimension ranks share out and nothing else."""
    from torch.distributed.tensor import DTensor

    assert isinstance(value, DTensor) and value.device_mesh.ndim == 1
    assert value.placements[0].is_shard(value.ndim - 1)
    mesh, total = value.device_mesh, value.shape[-1]
    most = -(-total // mesh.size())  # as torch.chunk cuts: the last has what is left
    return Columns(min(most * mesh.get_local_rank(), total), total, mesh.get_group())
