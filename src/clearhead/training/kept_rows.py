"""Examples as rows of ids, kept in a run's folder: they are encoded once, and not at every start.

    data/examples/<key>/   rows.safetensors   the numbers of all rows in line, and where each row ends
                           about.json         what encoding found and cut, and which rows these are
                           manifest.json      the size and the hash of both

The key is a hash of all that decides the rows: the examples as they were read, the tokenizer, the settings.
So another source or another tokenizer finds nothing here, and another run beside this one finds the same. A
folder is there whole or not at all (durable.py), and every byte of it is checked before it is used.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, overload

import numpy as np
from safetensors.numpy import load_file, save_file

from clearhead import __version__
from clearhead.text.encode_examples import Encoded, EncodingReport
from clearhead.text.examples import Example
from clearhead.text.foreign import AnyTokenizer
from clearhead.text.frame import frame_of
from clearhead.training.durable import damage, write_folder
from clearhead.training.run_folder import RunFolder

FORMAT = 1
ROWS, ABOUT = "rows.safetensors", "about.json"

# The parts of a row that are lists of different lengths, and how wide their numbers are.
_LISTS = {"inputs": np.int32, "source": np.int32, "token_types": np.uint8, "offsets": np.int32}

Arrays = Mapping[str, np.ndarray]


class KeptRows(Sequence[Encoded]):
    """Rows that are made anew from arrays whenever one is looked at: 4 bytes for an id, where a list has 36.

    >>> rows = [Encoded([5, 6], 1), Encoded([7], 0, example=1)]
    >>> list(KeptRows(pack(rows))) == rows
    True
    """

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = arrays

    def __len__(self) -> int:
        return len(self.arrays["example"])

    @overload
    def __getitem__(self, index: int) -> Encoded: ...
    @overload
    def __getitem__(self, index: slice) -> list[Encoded]: ...
    def __getitem__(self, index: int | slice) -> Encoded | list[Encoded]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        offsets = self._list("offsets", number)
        return Encoded(
            inputs=self._list("inputs", number) or [],
            targets=self._targets(number),
            source=self._list("source", number),
            token_types=self._list("token_types", number),
            example=int(self.arrays["example"][number]),
            offsets=None if offsets is None else [(first, last) for first, last in offsets],
        )

    def _list(self, name: str, number: int) -> list[Any] | None:
        ends, there = self.arrays.get(f"{name}.ends"), self.arrays.get(f"{name}.there")
        if ends is None or (there is not None and not there[number]):
            return None
        return self.arrays[name][0 if number == 0 else ends[number - 1] : ends[number]].tolist()

    def _targets(self, number: int) -> Any:
        if "targets.ends" in self.arrays:
            return self._list("targets", number) or []
        found = self.arrays["targets"][number].tolist()
        return tuple(found) if isinstance(found, list) else found


def pack(rows: Sequence[Encoded]) -> dict[str, np.ndarray]:
    """The rows as arrays, one for each part, with the place where each row ends.

    ValueError: some targets are lists and others are not.
    """
    arrays = {"example": np.array([row.example for row in rows], np.int64)}
    for name, kind in _LISTS.items():
        arrays |= _joined(name, [getattr(row, name) for row in rows], kind)
    targets: list[Any] = [row.targets for row in rows]
    kinds = {type(target) for target in targets}
    if len(kinds) != 1:
        raise ValueError(f"the targets are of {len(kinds)} kinds, {sorted(kind.__name__ for kind in kinds)}")
    if kinds == {list}:
        shares = any(isinstance(value, float) for target in targets for value in target[:1])
        return arrays | _joined("targets", targets, np.float64 if shares else np.int32)
    return arrays | {"targets": np.array(targets, np.float64 if kinds == {float} else np.int64)}


def _joined(name: str, lists: Sequence[list[Any] | None], kind: type) -> dict[str, np.ndarray]:
    """Lists one after the other, where each ends, and which of them are there; nothing if none is."""
    there = np.array([one is not None for one in lists], np.uint8)
    if not there.any():
        return {}
    width = (2,) if name == "offsets" else ()
    parts = [np.array(one or [], kind).reshape(-1, *width) for one in lists]
    ends = np.cumsum([len(part) for part in parts])
    arrays = {name: np.concatenate(parts), f"{name}.ends": ends}
    return arrays if there.all() else arrays | {f"{name}.there": there}


@dataclass(frozen=True)
class Kept:
    """Rows with the report of their encoding."""

    rows: Sequence[Encoded]
    report: EncodingReport
    fingerprint: str
    """Names these very rows, as a model reads them."""
    found: Path | None = None
    """The folder where they were found, data/examples/<key> of a run; None: they were encoded now."""


def key_of(examples: Sequence[Example], tokenizer: AnyTokenizer, settings: Sequence[Any]) -> str:
    """A name for the rows that these examples become; `settings`: what else decides them, as JSON values."""
    usage = tokenizer.usage
    made_by = [
        tokenizer.fingerprint,
        repr(frame_of(tokenizer)),
        sorted(usage.roles().items()),
        usage.template(),
    ]
    digest = hashlib.sha256(json.dumps([FORMAT, __version__, *made_by, *settings]).encode())
    names = [field.name for field in fields(examples[0]) if field.compare] if examples else []
    for example in examples:
        digest.update(json.dumps([getattr(example, name) for name in names], default=str).encode())
    return digest.hexdigest()[:32]


def fingerprint(rows: Sequence[Encoded]) -> str:
    """A hash of all that the rows let a model read and say."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.inputs, row.targets, row.source, row.token_types]).encode())
    return digest.hexdigest()


def find_or_encode(
    run: RunFolder,
    key: str,
    encode: Callable[[], tuple[Sequence[Encoded], EncodingReport]],
    note: Callable[[str], object],
) -> Kept:
    """The rows of this key: those of the run, or of a run beside it, or else encoded, and kept in the run.

    What is damaged is encoded anew, and a disk that refuses them stops nothing; `note` is told.
    """
    own = run.examples / key
    beside = run.path.parent.glob(f"*/{run.examples.relative_to(run.path)}/{key}")
    for folder in dict.fromkeys([own, *sorted(beside)]):
        kept = _load(folder, note) if folder.is_dir() else None
        if kept is not None:
            if folder != own:
                _write(run, own, {name: _copier(folder / name) for name in (ROWS, ABOUT)}, note)
            return kept
    rows, report = encode()
    arrays, name = pack(rows), fingerprint(rows)
    about = json.dumps({"fingerprint": name, "report": asdict(report)}, indent=2) + "\n"

    def write_rows(path: Path) -> None:
        save_file(arrays, path)
        path.chmod(0o644)  # safetensors leaves it to its owner alone

    _write(run, own, {ROWS: write_rows, ABOUT: lambda path: path.write_text(about, encoding="utf-8")}, note)
    return Kept(KeptRows(arrays), report, name)


def _load(folder: Path, note: Callable[[str], object]) -> Kept | None:
    """The rows in a folder; None if it is not as it was written, or goes away meanwhile with its run."""
    try:
        problems = damage(folder)
        if not problems:
            about = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
            rows = KeptRows(load_file(folder / ROWS))
            return Kept(rows, EncodingReport(**about["report"]), about["fingerprint"], folder)
    except OSError as error:
        problems = [str(error)]
    note(f"{folder} is not used: {'; '.join(problems)}")
    return None


def _write(
    run: RunFolder,
    folder: Path,
    files: Mapping[str, Callable[[Path], object]],
    note: Callable[[str], object],
) -> None:
    if run.begun:  # the first process of a run writes, the others read
        return
    try:
        write_folder(folder, files)
    except OSError as error:
        note(f"the encoded examples could not be kept in {folder}, the next start makes them anew: {error}")


def _copier(source: Path) -> Callable[[Path], object]:
    """What makes a file the same as `source`, by a second name where the disk can do that."""

    def copy(path: Path) -> None:
        try:
            os.link(source, path)
        except OSError:
            shutil.copyfile(source, path)

    return copy
