"""Named tensors in safetensors files: all in one file, or each rank's parts in files of its own.

    model.safetensors                                whole tensors, under their names
    shard-00002-model-00001-of-00001.safetensors     what the second rank holds of each tensor; where in it
                                                     the part belongs stands in the file's header

Shards are written and read by torch.distributed.checkpoint's safetensors writer and reader; its own format
is pickled and is never used. Whoever reads need not be cut like whoever wrote.
"""

import errno
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from clearhead.training.sharded import cut_like, is_shared_out

PARTS = ("model", "optimizer")


class Form(NamedTuple):
    """Shape and type of a tensor that is not read yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.shape} {str(self.dtype).removeprefix('torch.')}"


def form_of(tensor: Tensor) -> Form:
    """Shape and type of a tensor; of one that ranks share, of the whole."""
    return Form(tuple(tensor.shape), tensor.dtype)


def copy_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same values in memory of their own, on the CPU; what is shared out stays so."""
    if not any(map(is_shared_out, tensors.values())):
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

    return dict(BlockingAsyncStager(cache_staged_state_dict=False).stage(dict(tensors)))


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write one file of whole tensors; what shares memory is written apart."""
    packed: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage()
        own = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in storages
        packed[name] = tensor if own else tensor.clone()
        storages.add(storage.data_ptr())
    save_file(packed, path, metadata={"format": "pt"})  # with more entries, their order would be random
    path.chmod(0o644)  # safetensors leaves it to its owner alone


def write_shards(tensors: Mapping[str, Tensor], folder: Path, group: Any) -> Iterable[str]:
    """Write this rank's parts, all ranks of the group at once; the names of the files it made.

    OSError: a rank could not.
    """
    import torch.distributed as dist
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer, process_group=group)
    except CheckpointException as error:
        rank, (first, _) = next(iter(error.failures.items()))
        number = getattr(first, "errno", None) or errno.EIO
        raise OSError(number, f"rank {rank} failed: {getattr(first, 'strerror', None) or first}") from error
    return sorted(path.name for path in folder.glob(f"shard-{dist.get_rank(group) + 1:05d}-*.safetensors"))


class WholeFiles:
    """The tensors of model.safetensors or optimizer.safetensors."""

    def __init__(self, folder: Path, part: str) -> None:
        self.path = folder / f"{part}.safetensors"
        with safe_open(self.path, framework="pt") as file:
            names = list(file.keys())
            self.forms = {name: form_of(file.get_tensor(name)) for name in names}

    def read(self, like: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Each tensor of these names; of one that is shared out in `like`, this rank's part."""
        with safe_open(self.path, framework="pt") as file:
            return {name: cut_like(file.get_tensor(name), wanted) for name, wanted in like.items()}


class Shards:
    """The tensors of a part of a folder of shards."""

    def __init__(self, folder: Path, part: str) -> None:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

        self.path, self.prefix = folder, f"{part}."
        found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
        self.forms: dict[str, Form] = {}
        for name, entry in found.items():
            if name.startswith(self.prefix):
                form: Any = entry  # this reader knows tensors only
                self.forms[name.removeprefix(self.prefix)] = Form(tuple(form.size), form.properties.dtype)

    def read(self, like: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Each tensor of these names; of one that is shared out in `like`, this rank's part."""
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        made = {
            name: torch.empty(self.forms[name].shape, dtype=self.forms[name].dtype)
            if wanted is None or not is_shared_out(wanted)
            else torch.empty_like(wanted, dtype=self.forms[name].dtype)
            for name, wanted in like.items()
        }
        into = {self.prefix + name: tensor for name, tensor in made.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # each rank reads for itself
            load(into, storage_reader=HuggingFaceStorageReader(str(self.path)), no_dist=True)
        return made


class MeanPart:
    """The model's tensors, each as the mean that the optimizer's state has of it, if there is one."""

    def __init__(self, weights: WholeFiles | Shards, state: WholeFiles | Shards) -> None:
        self.weights, self.state = weights, state
        self.path, self.forms = weights.path, weights.forms

    def read(self, like: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        """Each tensor of these names; of one that is shared out in `like`, this rank's part."""
        means = {f"{name}.average": name for name in like if f"{name}.average" in self.state.forms}
        own = {name: tensor for name, tensor in like.items() if name not in means.values()}
        found = self.state.read({mean: like[name] for mean, name in means.items()})
        return self.weights.read(own) | {means[mean]: tensor for mean, tensor in found.items()}


def has_part(folder: Path, part: str) -> bool:
    """Whether a checkpoint has the model's or the optimizer's tensors."""
    return part == "model" or any(folder.glob("shard-*")) or (folder / f"{part}.safetensors").is_file()


def open_part(folder: Path, part: str) -> WholeFiles | Shards:
    """The model's or the optimizer's tensors of a checkpoint, however they were written."""
    has_shards = any(re.fullmatch(r"shard-.*\.safetensors", file.name) for file in folder.iterdir())
    return Shards(folder, part) if has_shards else WholeFiles(folder, part)
