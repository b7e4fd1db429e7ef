"""Every class of every family is that of `transformers`: names, shapes and numbers of a padded pass."""

from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead import load
from clearhead.published.selfcheck import make_batch, real_rows, run
from clearhead.published.twins import TWINS, model_type
from clearhead.published.weights import FAMILIES
from reference.parity import gap, tiny

SETTINGS = {model_type(name): settings for name, (_, settings) in reversed(TWINS.items())}
CLASSES = [
    (family, class_name) for family, table in FAMILIES.items() for class_name in table.classes
    if class_name not in {twin for twin, _ in TWINS.values()}  # those are the self-check's
    and class_name != "BartForSequenceClassification"  # it reads one text twice: see below
]  # fmt: skip


@pytest.mark.parametrize(("family", "class_name"), CLASSES, ids=[name for _, name in CLASSES])
def test_a_class_equals_its_twin(family: str, class_name: str, transformers: Any, tmp_path: Path) -> None:
    name, *kind = class_name.split()
    labels = {} if "Question" in name else {"num_labels": 3}
    depth = {"num_decoder_layers": 2} if family == "t5" else {}
    options = {"add_pooling_layer": False} if kind else {}
    theirs = tiny(transformers, name, options=options, **SETTINGS[family] | labels | depth)
    if name == "MarianModel":  # unlike the class with a head it saves its sinusoids
        for stack in (theirs.encoder, theirs.decoder):
            stack.embed_positions.weight.data = stack.embed_positions.create_weight()
    theirs.save_pretrained(tmp_path)
    ours, _ = load(tmp_path)
    batch = make_batch(ours, "right")
    with torch.no_grad():
        found, wanted = run(ours, batch), run(theirs, batch)
    assert found.shape == wanted.shape
    rows = zip(real_rows(found, batch), real_rows(wanted, batch), strict=True)
    assert max(gap(one, other) for one, other in rows) <= 1e-5


def test_a_text_is_classified_at_its_last_token(transformers: Any, tmp_path: Path) -> None:
    """BART reads a text, then says it again, moved by one; the state at its end is what is labelled."""
    settings = SETTINGS["bart"]
    theirs = tiny(transformers, "BartForSequenceClassification", **settings | {"num_labels": 3})
    theirs.save_pretrained(tmp_path)
    ours, _ = load(tmp_path)
    start, end, pad = (settings[f"{name}_token_id"] for name in ("decoder_start", "eos", "pad"))
    text, real = make_batch(ours, "right").source, make_batch(ours, "right").source_mask
    assert text is not None and real is not None
    text = text.scatter(1, real.sum(1, keepdim=True) - 1, end)
    said = torch.cat([torch.full((len(text), 1), start), text[:, :-1]], dim=1).masked_fill(~real, pad)
    with torch.no_grad():
        wanted = theirs(text, attention_mask=real.long()).logits
        found = ours(said, mask=real, source=text, source_mask=real)
    assert found.shape == (3, 3) and gap(found, wanted) <= 1e-5
