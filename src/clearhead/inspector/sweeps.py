"""Sweeps: the same change made in every place, one after the other, and what each does to one word's logit.

    heads   every head of every layer switched off: what does the word lose without it?
    rows    every row of the map at every position as in another text or model: where does it matter?

A change is (logit with the edit) - (logit without); both are worked out in the same way, all tokens at once.
"""

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from clearhead.inspector.passes import Pass, Passes, Question
from clearhead.inspector.record import Edit


@dataclass(frozen=True)
class Change:
    """One place of a sweep: an edit, and how to name the place."""

    edit: Edit
    place: dict[str, Any]


def head_changes(passes: Passes) -> list[Change]:
    """Every head of every attention, switched off."""
    changes = []
    for look in passes.looks:
        heads = passes.outline.values[f"{look.path}.mixed"].shape[1]
        for head in range(heads):
            place = {"path": look.path, "stack": look.stack, "layer": look.layer, "head": head}
            changes.append(Change(Edit(f"{look.path}.mixed", "zero", (None, head)), place))
    return changes


def row_changes(passes: Passes, found: Pass, theirs: Passes, other: Pass) -> list[Change]:
    """Every row of the main map at every position, as in a pass of `theirs` of as many tokens."""
    if passes.main is None:
        raise ValueError("this model has no map whose rows could be replaced")
    if other.length != found.length:
        raise ValueError(
            f"the other text has {other.length} tokens and this one {found.length}; a patch needs as many"
        )
    changes = []
    for number, row in enumerate(passes.map[passes.main["name"]][1:], 1):
        value = theirs.value(other, row)[0]
        for position in range(found.length):
            edit = Edit(row, "replace", (None, position), value[position].clone())
            changes.append(Change(edit, {"row": row, "number": number, "position": position}))
    return changes


def logits_with(
    passes: Passes, question: Question, change: Change | None, position: int
) -> Float[Tensor, " V"]:
    """What the model says at a position when this change comes after the question's own edits."""
    edits = question.edits if change is None else (*question.edits, change.edit)
    return passes.says(replace(question, edits=edits), position)
