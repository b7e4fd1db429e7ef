"""What a page asks beside a pass: which tokens are near one, and which depths a word comes from."""

from typing import Any

import torch

from clearhead.inspector.passes import Pass
from clearhead.inspector.spelling import Speller
from clearhead.inspector.views import nearest_rows, pushes
from clearhead.model.transformer import Transformer
from clearhead.server.sides import Side
from clearhead.server.summary import position_in


def near(side: Side, speller: Speller, name: str, row: int) -> list[list[Any]]:
    """The tokens whose rows of a table point nearest to that of one: id, text, cosine."""
    table = side.passes.outline.parameters.get(name)
    if table is None or table.dim() != 2:
        raise KeyError(f"{name[:80]!r} is no table of this model")
    return [[token, speller.word(token), cosine] for token, cosine in nearest_rows(table, row)]


def origins(side: Side, found: Pass, position: int, word: int) -> dict[str, Any]:
    """What each row of the map adds to the logit of a word at a position, and what biases add."""
    model, passes = side.model, side.passes
    position_in(found, position)
    if not isinstance(model, Transformer) or passes.main_name is None:
        raise ValueError("this model has no depths whose sum its answer is")
    if not 0 <= word < model.config.vocab_size:
        raise ValueError(f"word={word} is outside the model's vocabulary 0..{model.config.vocab_size - 1}")
    names = passes.map[passes.main_name]
    told = pushes(model, torch.stack([passes.value(found, name)[0, position] for name in names]), word)
    if told is None:
        raise ValueError("the head of this model is no plain product: its logits are no sums of the depths")
    amounts, rest = told
    rows = list(zip(names, amounts.tolist(), strict=True))
    return {"rows": rows, "rest": rest, "logit": float(amounts.sum()) + rest}
