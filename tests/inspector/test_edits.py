"""Edits of a pass: they do what they say where they say it, and nothing upstream of it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from clearhead.inspector.record import Edit, record
from clearhead.inspector.trace import source_text, trace
from reference.zoo import ZOO, animal, inputs

# Many passes: the shapes are checked in the tests of the model.
pytestmark = pytest.mark.usefixtures("unchecked")

WEIGHTS = "decoder.blocks.1.attn.weights"


def run(name: str, *edits: Edit) -> dict[str, Tensor]:
    model = animal(name)
    return trace(model, **inputs(model), edits=edits).values


def upstream(values: dict[str, Tensor], name: str) -> list[str]:
    names = list(values)
    return names[: names.index(name)]


@pytest.mark.parametrize("kind", ["scale", "replace", "patch"])
@pytest.mark.parametrize("name", ["mha rotary", "experts", "encoder-decoder", "latent"])
def test_invariant_23_writing_values_into_themselves_changes_no_bit(name: str, kind: Any) -> None:
    """All values of a pass at once."""
    plain = run(name)
    names = [key for key in plain if not key.endswith(".input") and "chosen" not in key]
    edits = [Edit(key, kind, value=1.0 if kind == "scale" else plain[key]) for key in names]
    edited = run(name, *edits)
    assert all(torch.equal(edited[key], plain[key]) for key in plain)


@pytest.mark.parametrize(
    "name", ["mha rotary", "sandwich soft-cap", "experts", "encoder", "encoder-decoder shared"]
)
def test_invariant_23_an_edit_changes_nothing_upstream(name: str) -> None:
    plain = run(name)
    for value in ("middle", "attn.weights", "ff"):
        target = next(key for key in plain if key.endswith(value))
        edited = run(name, Edit(target, "zero"))
        assert (edited[target] == 0).all()
        assert all(torch.equal(edited[key], plain[key]) for key in upstream(plain, target))
        assert not torch.equal(edited["logits"], plain["logits"])


def test_invariant_24_no_head_means_the_bias_alone() -> None:
    """With all heads of a layer switched off its attention adds b_O to every position."""
    values = run("sinks", Edit("decoder.blocks.1.attn.mixed", "zero"))
    bias = animal("sinks").decoder.blocks[1].attn.o.bias
    assert torch.equal(values["decoder.blocks.1.attn"], bias.detach().expand(2, 7, -1))


def test_a_place_is_a_number_per_axis() -> None:
    plain = run("mha rotary")
    edited = run("mha rotary", Edit(WEIGHTS, "scale", (None, 2), 0.5))[WEIGHTS]
    assert torch.equal(edited[:, 2], plain[WEIGHTS][:, 2] * 0.5)
    assert torch.equal(edited[:, 3], plain[WEIGHTS][:, 3])
    one = run("mha rotary", Edit(WEIGHTS, "replace", (1, 2, 3, 0), 0.25))[WEIGHTS]
    assert one[1, 2, 3, 0] == 0.25 and (one != plain[WEIGHTS]).sum() == 1


def test_mean_is_over_the_positions() -> None:
    plain = run("mha rotary")["decoder.blocks.0"]
    edited = run("mha rotary", Edit("decoder.blocks.0", "mean", (0,)))["decoder.blocks.0"]
    torch.testing.assert_close(edited[0], plain[0].mean(0).expand(7, -1))
    assert torch.equal(edited[1], plain[1])


def test_a_patch_of_everything_gives_the_other_pass() -> None:
    """The last block's output of another text carries its whole answer."""
    model = animal("mha rotary")
    texts = inputs(model)["tokens"]
    one, other = (trace(model, row[None]).values for row in texts)
    patched = trace(
        model, texts[:1], edits=[Edit("decoder.blocks.1", "patch", value=other["decoder.blocks.1"])]
    )
    assert torch.equal(patched.values["logits"], other["logits"])
    assert not torch.equal(one["logits"], other["logits"])


def test_record_takes_edits_too_and_leaves_nothing() -> None:
    model = animal("gqa interleaved")
    tokens = inputs(model)["tokens"]
    with torch.no_grad():
        before = model(tokens)
        with record(model, names=["logits"], edits=[Edit("embed", "zero")]) as values:
            model(tokens)
        assert not torch.equal(values["logits"], before)
        assert torch.equal(model(tokens), before)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "kind": ({"name": "embed", "kind": "explode"}, "kind 'explode' is unknown; known: zero, scale, replace"),
    "no value": ({"name": "embed", "kind": "scale"}, "kind 'scale' needs a value"),
    "a value too many": ({"name": "embed", "kind": "zero", "value": 1.0}, "kind 'zero' takes no value"),
    "name": ({"name": "decoder.blocks.0.at", "kind": "zero"}, "did you mean decoder.blocks.0.attn"),
    "an input": ({"name": "decoder.input", "kind": "zero"}, "'decoder.input', which is no value"),
    "place": (
        {"name": "embed", "kind": "zero", "at": (0, 99)},
        r"at \(0, 99\) does not fit its shape \(2, 7, 24\)",
    ),
    "axes": ({"name": "embed", "kind": "zero", "at": (0, 0, 0, 0)}, "does not fit its shape"),
    "patch of another shape": (
        {"name": "embed", "kind": "patch", "value": torch.zeros(2, 3)},
        r"the other value has shape \(2, 3\)",
    ),
    "new values of another shape": (
        {"name": "embed", "kind": "replace", "value": torch.zeros(5, 5)},
        "does not fit its shape",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    settings, message = MISTAKES[mistake]
    model = animal("mha rotary")
    with pytest.raises(ValueError, match=message):
        trace(model, **inputs(model), edits=[Edit(**settings)])
    assert trace(model, **inputs(model)).values  # and nothing is left hanging


@pytest.mark.parametrize("name", [*ZOO, "foreign"])
def test_invariant_22_the_source_line_is_where_the_value_is_made(name: str) -> None:
    """The line of a tap holds its name; that of a module's output is in its own forward, and returns."""
    model = animal(name)
    t = trace(model, **inputs(model))
    for node in t.nodes.values():
        if not node.key.endswith(".py"):
            assert name == "foreign"
            continue
        line = source_text(node.key, model).splitlines()[node.line - 1]
        tap = node.name.removeprefix(f"{node.path}.").split(".")[0]
        if node.tapped and tap not in ("gate", "up", "hidden"):  # experts name these through one function
            assert f'tap("{tap}"' in line, (node, line)
        elif not node.tapped:
            assert "return" in line, (node, line)
