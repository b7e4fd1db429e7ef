"""What is still as it was written in the folder of a run: every checkpoint, every shard of token ids, every
folder of encoded examples.

Each has a manifest or an index with the SHA-256 of its files. The hashes find rot, torn and missing files.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from clearhead.text.shards import Shards
from clearhead.training.checkpoint import steps_in, verify_checkpoint
from clearhead.training.durable import damage
from clearhead.training.run_folder import RunFolder


class Finding(NamedTuple):
    """A part of a run and what is wrong with it; nothing: every byte is as written."""

    path: Path
    problems: list[str]


def verify_run(run: str | Path) -> Iterator[Finding]:
    """Go through the checkpoints, the best and the milestones of a run, and its data, reading every byte.

    FileNotFoundError: there is no run; or, at the end, it has no checkpoint.
    """
    folder = RunFolder(run)
    folder.recipe()
    for where in (folder.checkpoints, folder.path / "best", folder.path / "milestones"):
        for path in reversed(steps_in(where)):
            yield Finding(path, verify_checkpoint(path))
    for index in sorted(folder.data.glob("**/index.json")):
        if list(index.parent.glob("*.bin")):
            yield Finding(index.parent, _verify_shards(index.parent))
    for rows in sorted(folder.examples.glob("*")):
        if not rows.name.startswith("."):  # what a kill left, which the next start takes away
            yield Finding(rows, damage(rows))
    if not steps_in(folder.checkpoints):
        raise FileNotFoundError(
            f"{run} holds no checkpoint: it has not saved yet, and --resume begins it anew"
        )


def _verify_shards(folder: Path) -> list[str]:
    try:
        Shards(folder, verify=True)
    except (ValueError, OSError) as error:
        return [str(error)]
    return []
