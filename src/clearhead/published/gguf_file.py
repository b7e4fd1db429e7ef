"""The GGUF format: one file of settings and tensors, quantised or not.

    "GGUF", version, number of tensors, number of settings
    settings   name, type, value; a value is a number, a text, or a list of one type
    tensors    name, sizes (innermost first), type, where its data begins
    data       at a multiple of general.alignment (32)

The head is read at once; data is mapped into memory and made floating-point numbers when a tensor is asked
for: by numpy for F32, F16 and BF16, by the `gguf` package for the quantised types. Nothing beyond the end of
the file is believed.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

VERSIONS = (2, 3)
MOST_DIMENSIONS = 4
TEXT, LIST = 8, 9
NUMBERS = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
PLAIN = {0: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2)}  # type -> name, bytes of a number


class Entry(NamedTuple):
    """Where a tensor lies: its shape (outermost first), its type's number, its first byte and how many."""

    shape: tuple[int, ...]
    kind: int
    start: int
    length: int


class GGUFFile:
    """A GGUF file: `settings`, and tensors by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{path} is no GGUF file: it does not begin with GGUF")
            self._data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        try:
            self.settings, self._entries = read_head(self._data)
        except ImportError as error:
            raise ValueError(f"{path}: {error}") from None
        except ValueError as error:
            raise ValueError(f"{path} is no complete GGUF file: {error}") from None
        self.names = list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape."""
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """The type of the numbers that `tensor` gives."""
        return {1: torch.float16, 30: torch.bfloat16}.get(self._entries[name].kind, torch.float32)

    def tensor(self, name: str) -> Shaped[Tensor, "..."]:
        """The tensor, as floating-point numbers."""
        shape, kind, start, length = self._entries[name]
        data = np.frombuffer(self._data[start : start + length], np.uint8)
        if kind in PLAIN:
            return torch.from_numpy(data.copy()).view(self.dtype(name)).reshape(shape)
        return torch.from_numpy(dequantise(data, kind, shape))

    def kinds(self) -> dict[str, str]:
        """The type of each tensor, by name: F32, Q4_1 and so on."""
        return {name: kind_name(entry.kind) for name, entry in self._entries.items()}


def dequantise(data: Shaped[np.ndarray, " N"], kind: int, shape: tuple[int, ...]) -> Float[np.ndarray, "..."]:
    """The numbers that quantised bytes stand for, in float32; the `gguf` package knows how."""
    gguf = gguf_package()
    rows = data.reshape(*shape[:-1], -1)
    try:
        return np.ascontiguousarray(gguf.dequantize(rows, gguf.GGMLQuantizationType(kind)), np.float32)
    except NotImplementedError:
        raise ValueError(f"tensors of type {kind_name(kind)} cannot be read") from None


def kind_name(kind: int) -> str:
    """The name of a type of tensor."""
    return PLAIN[kind][0] if kind in PLAIN else gguf_package().GGMLQuantizationType(kind).name


def gguf_package() -> Any:
    """The `gguf` package; without it a ValueError says how to get it."""
    try:
        import gguf
    except ImportError:
        raise ModuleNotFoundError(
            "reading quantised tensors needs the package gguf: pip install gguf"
        ) from None
    return gguf


# --------------------------------------------------------------------------------------------------- the head


def read_head(data: memoryview) -> tuple[dict[str, Any], dict[str, Entry]]:
    """Settings and tensors of a file; ValueError where it does not keep to the format."""
    head = Head(data)
    head.take(4)
    version = head.integer(4)
    if version not in VERSIONS:
        known = " and ".join(map(str, VERSIONS))
        raise ValueError(f"version {version} is not known; known: {known}, little-endian")
    n_tensors, n_settings = head.count(24), head.count(13)
    settings: dict[str, Any] = {}
    for _ in range(n_settings):
        name = head.text()
        if name in settings:
            raise ValueError(f"the setting {name!r:.60} stands twice")
        settings[name] = head.value(head.integer(4))
    infos = [(head.text(), *head.tensor()) for _ in range(n_tensors)]
    alignment = settings.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"general.alignment={alignment!r:.60} is no power of two")
    return settings, dict(place_tensors(infos, -(-head.place // alignment) * alignment, len(data)))


def place_tensors(
    infos: list[tuple[str, tuple[int, ...], int, int]], start: int, end: int
) -> Iterator[tuple[str, Entry]]:
    """Where each tensor's data lies between the head and the end of the file."""
    seen = set()
    for name, shape, kind, offset in infos:
        if name in seen:
            raise ValueError(f"the tensor {name!r:.60} stands twice")
        seen.add(name)
        length = data_length(name, shape, kind)
        if start + offset + length > end:
            raise ValueError(f"the tensor {name!r:.60} goes on beyond the end of the file")
        yield name, Entry(shape, kind, start + offset, length)


def data_length(name: str, shape: tuple[int, ...], kind: int) -> int:
    """How many bytes hold a tensor of this type."""
    count = 1
    for size in shape:
        count *= size
    if kind in PLAIN:
        return count * PLAIN[kind][1]
    gguf = gguf_package()
    try:
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise ValueError(f"the tensor {name!r:.60} has an unknown type, {kind}") from None
    if not shape or shape[-1] % block:
        raise ValueError(f"the tensor {name!r:.60} of shape {shape} does not fit blocks of {block} numbers")
    return count // block * size


class Head:
    """Reads the head of a file from its beginning; ValueError at the end of the data."""

    def __init__(self, data: memoryview) -> None:
        self.data, self.place = data, 0

    def take(self, length: int) -> memoryview:
        """The next bytes."""
        if length > len(self.data) - self.place:
            raise ValueError(f"it ends at byte {len(self.data)}, within its head")
        self.place += length
        return self.data[self.place - length : self.place]

    def integer(self, size: int) -> int:
        """The next integer without a sign."""
        return int.from_bytes(self.take(size), "little")

    def count(self, least: int) -> int:
        """The next number of things, which take at least so many bytes each."""
        count = self.integer(8)
        if count * least > len(self.data) - self.place:
            raise ValueError(f"it counts {count} things, more than it has room for")
        return count

    def text(self) -> str:
        """The next text."""
        return str(self.take(self.integer(8)), "utf-8")

    def value(self, kind: int) -> Any:
        """The next value of this type."""
        if kind == TEXT:
            return self.text()
        if kind == LIST:
            of = self.integer(4)
            if of == TEXT:
                return [self.text() for _ in range(self.count(8))]
            width = np.dtype(self.number(of)).itemsize
            return np.frombuffer(self.take(self.count(width) * width), NUMBERS[of]).tolist()
        number = self.number(kind)
        return np.frombuffer(self.take(np.dtype(number).itemsize), number)[0].item()

    def number(self, kind: int) -> str:
        """numpy's name of a type of numbers."""
        if kind not in NUMBERS:
            raise ValueError(f"a value has the type {kind}, which is not known")
        return NUMBERS[kind]

    def tensor(self) -> tuple[tuple[int, ...], int, int]:
        """Shape (outermost first), type and offset of the next tensor."""
        n_dimensions = self.integer(4)
        if n_dimensions > MOST_DIMENSIONS:
            raise ValueError(f"a tensor has {n_dimensions} dimensions")
        sizes = struct.unpack(f"<{n_dimensions}Q", self.take(8 * n_dimensions))
        return tuple(reversed(sizes)), self.integer(4), self.integer(8)
