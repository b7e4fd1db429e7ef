"""Tensors in files: safetensors, and PyTorch's own .bin and .pt as plain data, in one file or in shards.

Opening a folder reads names, shapes and types; the numbers of a safetensors file stay on the disk, mapped
into memory, until they are looked at. A PyTorch file is a pickle: it is looked through first, and refused if
it names anything but tensors; then it is read with `weights_only=True`, which calls nothing else. Shards are
named by an index, and must lie beside it.
"""

import io
import json
import os
import pickletools
import re
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from errno import EEXIST
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from clearhead.published.mapping import list_names

# Where weights are looked for, best first; then any single file with such an ending.
WHOLE = ("model.safetensors", "pytorch_model.bin")
INDEXED = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
ENDINGS = (".safetensors", ".bin", ".pt", ".pth")

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

# What the pickle of plain tensors names. PyTorch's own list is longer: a `bytearray` of any size is on it.
PLAIN = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor|tensor_v2|parameter)"
    r"|torch(\.cuda|\.storage)? \w*Storage|torch\.nn\.parameter Parameter"
)
LEGACY_PICKLES = 5  # magic number, version, machine, tensors, keys of storages; then the numbers


class TensorFile:
    """One safetensors file: names, shapes and types at once, tensors when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file: Any = safe_open(path, framework="pt", device="cpu")
            self.names = list(self._file.keys())
        except (SafetensorError, OSError, ValueError, OverflowError) as error:
            raise ValueError(f"{path} is no complete safetensors file: {one_line(error)}") from None

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Its type; ValueError unless it holds floating-point numbers of 16 bits or more."""
        kind = self._file.get_slice(name).get_dtype()
        if kind not in FLOATS:
            raise ValueError(f"{self.path.name}: {name} is stored as {kind}; known: {', '.join(FLOATS)}")
        return FLOATS[kind]

    def tensor(self, name: str, mapped: bool = True) -> Shaped[Tensor, "..."]:
        """The tensor, mapped from the file; or in memory of its own, which a converted copy does not leave
        behind as it would leave mapped pages.
        """
        if mapped:
            return self._file.get_tensor(name)
        base, places = self._head
        start, stop = places[name]["data_offsets"]
        with self.path.open("rb") as file:
            file.seek(base + start)
            data = bytearray(file.read(stop - start))
        numbers = torch.frombuffer(data, dtype=self.dtype(name)) if data else torch.empty(0)
        return numbers.reshape(self.shape(name))

    @cached_property
    def _head(self) -> tuple[int, dict[str, Any]]:
        """Where the numbers begin, and what the head of the file says of each tensor."""
        with self.path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            return 8 + length, json.loads(file.read(length))


class PickledFile:
    """One file of `torch.save`, with the methods of TensorFile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            found = read_pickle(path)
        except Exception as error:  # the reader raises whatever the damaged bytes lead it to
            raise ValueError(f"{path} is no file of plain tensors: {one_line(error)}") from None
        if not isinstance(found, Mapping) or not all(isinstance(name, str) for name in found):
            raise ValueError(f"{path} holds a {type(found).__name__}, not tensors by name")
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in found.items():
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{path}: {list_names([name])} is a {type(tensor).__name__}, not a tensor")
            self._tensors[name] = tensor.detach()
        self.names = list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Its type; ValueError unless it is an ordinary tensor of floating-point numbers."""
        tensor = self._tensors[name]
        plain = tensor.layout == torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.dtype not in FLOATS.values():
            kind = f"{tensor.dtype}, {tensor.layout}, {tensor.device}"
            raise ValueError(f"{self.path.name}: {name} is no plain tensor ({kind})")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise ValueError(
                f"{self.path.name}: {name} claims {tuple(tensor.shape)}, more than the file holds"
            )
        return tensor.dtype

    def tensor(self, name: str, mapped: bool = True) -> Shaped[Tensor, "..."]:
        """The tensor, mapped from the file if its form allows."""
        return self._tensors[name].contiguous()


def read_pickle(path: Path) -> Any:
    """What a file of `torch.save` holds, mapped into memory where its form allows."""
    with path.open("rb") as file:
        mapped = file.read(4) == b"PK\x03\x04"
        file.seek(0)
        if mapped:
            check_archive(path)
        else:
            for _ in range(LEGACY_PICKLES):
                check_pickle(file)
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def check_archive(path: Path) -> None:
    """ValueError for an archive that holds more than its size, or a pickle of more than tensors."""
    with zipfile.ZipFile(path) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename!r:.80} in it is compressed, which torch.save never does")
            if entry.filename.lower().endswith(".pkl"):
                check_pickle(io.BytesIO(archive.read(entry)))


def check_pickle(file: io.BufferedReader | io.BytesIO) -> None:
    """Look through the next pickle of a file, building nothing; ValueError names what is no tensor."""
    for step, named, _ in pickletools.genops(file):
        if step.name in ("INST", "STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            raise ValueError(f"it holds more than tensors ({step.name})")
        if step.name == "GLOBAL" and not PLAIN.fullmatch(str(named)):
            raise ValueError(f"it asks for {str(named).replace(' ', '.'):.100}, which is no part of a tensor")


class Tensors:
    """The tensors of one or more files by name."""

    def __init__(self, files: list[TensorFile | PickledFile]) -> None:
        self._home: dict[str, TensorFile | PickledFile] = {}
        for file in files:
            for name in file.names:
                if name in self._home:
                    raise ValueError(f"{name} is in {self._home[name].path} and in {file.path}")
                self._home[name] = file

    def __iter__(self) -> Iterator[str]:
        return iter(self._home)

    def __contains__(self, name: object) -> bool:
        return name in self._home

    def __len__(self) -> int:
        return len(self._home)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of one tensor."""
        return self._home[name].shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """The type of one tensor, a floating-point one."""
        return self._home[name].dtype(name)

    def tensor(self, name: str, mapped: bool = True) -> Shaped[Tensor, "..."]:
        """One tensor, mapped from its file; or in memory of its own, to be converted and dropped."""
        return self._home[name].tensor(name, mapped)


def open_tensors(folder: Path) -> Tensors:
    """The weights in a folder; FileNotFoundError if it has none, ValueError if a file is damaged."""
    for whole, index in zip(WHOLE, INDEXED, strict=True):
        if (folder / whole).is_file():
            return Tensors([open_file(folder / whole)])
        if (folder / index).is_file():
            return open_shards(folder / index)
    for ending in ENDINGS:
        files = sorted(folder.glob(f"*{ending}"))
        if len(files) == 1:
            return Tensors([open_file(files[0])])
        if files:
            raise ValueError(f"{folder} holds {list_names(file.name for file in files)} and no index of them")
    raise FileNotFoundError(
        f"there are no weights in {folder}: it holds none of {', '.join(WHOLE + INDEXED)}"
    )


def open_file(path: Path) -> TensorFile | PickledFile:
    """One file of tensors, by its ending."""
    return TensorFile(path) if path.suffix == ".safetensors" else PickledFile(path)


def open_shards(index: Path) -> Tensors:
    """The files that an index names, which must hold exactly the tensors that it says."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(v, str) for v in places.values()):
        raise ValueError(f"{index} has no weight_map of names and files")
    for name in places.values():
        if Path(name).name != name or "\\" in name or name in (".", "..") or Path(name).suffix not in ENDINGS:
            raise ValueError(f"{index} names {name!r:.120}, which is no file of weights beside it")
    shards = sorted(set(places.values()))
    absent = [name for name in shards if not (index.parent / name).is_file()]
    if absent:
        raise FileNotFoundError(f"{index} names {list_names(absent)}, not in the folder")
    files = [open_file(index.parent / name) for name in shards]
    held = {name: file.path.name for file in files for name in file.names}
    if held != places:
        odd = [name for name in held.keys() | places.keys() if held.get(name) != places.get(name)]
        raise ValueError(f"{index} and the files it names disagree about {list_names(odd)}")
    return Tensors(files)


def write_tensors(tensors: Mapping[str, Shaped[Tensor, "..."]], folder: Path, max_shard_bytes: int) -> None:
    """Write tensors as model.safetensors, or as shards of at most so many bytes (or one tensor each)."""
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        try:
            (folder / name).touch()  # whose rights are those of any other new file
            rights = (folder / name).stat().st_mode
            save_file(shard, folder / name, metadata={"format": "pt"})
            (folder / name).chmod(rights)
        except SafetensorError as error:  # a full disk, for one
            raise OSError(f"{folder / name} cannot be written: {one_line(error)}") from None
    if len(shards) > 1:
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total = {"total_size": sum(tensor.nbytes for tensor in tensors.values())}
        write_json({"metadata": total, "weight_map": dict(sorted(weight_map.items()))}, folder / INDEXED[0])


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a new folder beside this one; when all is on the disk, its files come here.

    A crash before that leaves the folder as it was. Files of other names stay, but for weights, which would
    be taken for the model's. Where there is a folder already its config.json goes first and comes last: half
    a model is none.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(EEXIST, os.strerror(EEXIST), str(folder))
    draft = folder.with_name(f".{folder.name}.unfinished")
    shutil.rmtree(draft, ignore_errors=True)  # of a call that was killed
    draft.mkdir()
    try:
        write(draft)
        for file in draft.rglob("*"):
            flush(file)
        if not folder.exists() or not any(folder.iterdir()):
            draft.replace(folder)
            flush(folder.parent)
            return
        settings = folder / "config.json"
        settings.unlink(missing_ok=True)
        for old in folder.glob("model*.safetensors*"):
            if re.fullmatch(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?", old.name):
                old.unlink()
        files = [file.relative_to(draft) for file in draft.rglob("*") if file.is_file()]
        for name in sorted(files, key=lambda name: str(name) == settings.name):
            (folder / name).parent.mkdir(exist_ok=True)
            (draft / name).replace(folder / name)
        flush(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def flush(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk, as far as the system can."""
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):  # Windows opens no folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(path: Path) -> dict[str, Any]:
    """The dictionary in a JSON file; ValueError names the file if it holds none."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is no file")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {one_line(error)}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}, not a dictionary")
    return found


def write_json(value: Mapping[str, Any], path: Path) -> None:
    """Write a dictionary in the form that Hugging Face's files have."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8", newline="\n")


def one_line(error: BaseException) -> str:
    """The first line of what an error says."""
    lines = str(error).strip().splitlines()
    return f"{lines[0]:.200}" if lines else type(error).__name__
