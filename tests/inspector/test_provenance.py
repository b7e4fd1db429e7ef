"""Every number of every architecture follows from the numbers its cell names."""

import itertools
import math
import random

import pytest
import torch

from clearhead.inspector.provenance import Unknown, explain, recompute
from clearhead.inspector.trace import Trace, trace
from reference.zoo import ZOO, animal, inputs

# Many passes: the shapes are checked in the tests of the model.
pytestmark = pytest.mark.usefixtures("unchecked")

CELLS = 4  # of every value


def cells_of(t: Trace, name: str, n: int) -> list[tuple[int, ...]]:
    """Random places, the same in every run."""
    draw = random.Random(name)
    return [tuple(draw.randrange(size) for size in t.values[name].shape) for _ in range(n)]


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", ZOO)
def test_invariant_21_recorded_equals_recomputed(name: str, padded: bool) -> None:
    """Random cells of every value of a pass, in float64 so that only wrong rules differ; none has no rule."""
    model = animal(name).double()
    t = trace(model, **inputs(model, padded))
    assert len(t.values) > 20
    for value in t.values:
        for index in cells_of(t, value, CELLS):
            cell = explain(t, value, index)
            found = recompute(cell)
            # angles, sinusoids and routers are float32 by design
            assert math.isclose(found, cell.value, rel_tol=2e-6, abs_tol=2e-6), (cell.to_dict(), found)


@pytest.mark.parametrize("name", ["mha rotary", "experts", "encoder-decoder", "latent"])
def test_in_float32_the_tolerance_is_kept(name: str) -> None:
    model = animal(name)
    t = trace(model, **inputs(model))
    for value in t.values:
        for index in cells_of(t, value, 2):
            cell = explain(t, value, index)
            assert abs(recompute(cell) - cell.value) <= max(cell.tolerance, 2e-6), cell.to_dict()


@pytest.mark.parametrize("name", ["mha rotary", "latent", "mqa window"])
def test_the_reason_is_the_same_for_a_mask_by_name_and_one_spelled_out(name: str) -> None:
    """A text without padding is causal by name; a padding mask that hides nothing says as much key by key."""
    model = animal(name)
    given = inputs(model)
    plain, spelled = (
        trace(model, **given),
        trace(model, **given, mask=torch.ones(given["tokens"].shape).bool()),
    )
    value = "decoder.blocks.0.attn.weights"
    assert name == "mqa window" or plain.given["decoder.blocks.0.attn"]["mask"] == "causal"
    length, reasons = plain.values[value].shape[-1], set()
    for t, s in itertools.product(range(length), repeat=2):
        one, other = (explain(made, value, (1, 0, t, s)) for made in (plain, spelled))
        assert one.made.params["allowed"] == other.made.params["allowed"]
        assert one.made.params["allowed"][: t + 1] == [
            name != "mqa window" or t - j < 3 for j in range(t + 1)
        ]
        assert not any(one.made.params["allowed"][t + 1 :]) and one.made.note == other.made.note
        reasons.add(one.made.note)
    expected = {"", "masked: the key comes after the query (causal)"}
    assert reasons == expected | (
        {"masked: the key is outside the window"} if name == "mqa window" else set()
    )


def test_a_foreign_module_opens() -> None:
    """Embedding, norm and linear are known; the inside of the GRU is not, and says so."""
    model = animal("foreign")
    t = trace(model, **inputs(model))
    assert {"table", "norm", "out", "logits"} <= t.values.keys()
    known = [explain(t, value, (1, 3, 5)) for value in ("table", "norm", "out")]
    assert all(abs(recompute(cell) - cell.value) < 1e-5 for cell in known)
    with pytest.raises(Unknown, match=r"no rule tells how norm\.input was made"):
        explain(t, "norm.input", (0, 0, 0))
