"""What the page shows of a pass, as bytes: tokens, words and lengths of the map, lines, heads, experts.

Everything is read off one pass; the model runs only for rows of attention that a long pass left out.
"""

from typing import Any

import torch
from torch import Tensor

from clearhead.inspector.passes import Look, Pass, Passes
from clearhead.inspector.spelling import Speller, piece_dicts
from clearhead.inspector.views import map_rows, mean_scores, of_tokens
from clearhead.model.transformer import Transformer
from clearhead.server.reading import Read
from clearhead.server.sides import Side
from clearhead.server.wire import to_bytes

SAYING = ("lm", "masked", "sequence", "token", "span")  # heads whose output is logits
MOST_WATCHED = 8
WORDS = 100  # of the likeliest next tokens, sent with a summary


def summary(
    side: Side,
    speller: Speller,
    found: Pass,
    read: Read,
    source: Read | None,
    select: object = None,
    seconds: float | None = None,
) -> bytes:
    """What the map shows of a pass. `select`: the position whose lines and logits are sent, else the last."""
    passes, main = side.passes, side.passes.main
    position = found.length - 1 if select is None else position_in(found, select)
    tensors: dict[str, Tensor] = {}
    if found.lens is not None:
        tensors |= {"lens.id": found.lens.ids, "lens.p": found.lens.p}
    if main is not None:
        tensors["norm"] = found.norms[main["name"]]
    tensors |= lines_of(side, found, position)
    for prefix, looks in groups_of(passes).items():
        heads = [found.heads[look.path] for look in looks]
        tensors[f"{prefix}heads"] = torch.stack([each.picture for each in heads])
        tensors[f"{prefix}scores"] = torch.stack([mean_scores(each.scores) for each in heads])
    routed, routes = experts_of(passes, found)
    tensors |= routes
    metadata: dict[str, Any] = {
        "trace": found.id,
        "ms": f"{1000 * (found.seconds if seconds is None else seconds):.2f}",
        "delta": "" if found.delta is None else f"{found.delta:.3g}",
        "head": side.manifest["head"],
        "of": side.fingerprint,
        "select": str(position),
        "step": "" if found.question.step is None else str(found.question.step),
        "weights": "" if side.run is None else side.run.place(found.question.step),
        "length": str(found.length),
        "rows": [] if main is None else map_rows(main),
        "experts": routed,
        "ids": list(found.question.ids),
        "pieces": piece_dicts(speller.pieces(found.question.ids, read.before, read.after)),
        "source_pieces": "",
        "source_ids": "",
        "source_rows": "",
        "words": words_of(side, speller, found, tensors.get("logits")),
    }
    if source is not None:
        tensors["source.norm"] = found.norms["encoder"]
        metadata |= {
            "source_pieces": piece_dicts(speller.pieces(source.ids, source.before, source.after)),
            "source_ids": list(source.ids),
            "source_rows": map_rows(passes.stacks[0]),
        }
    return to_bytes(tensors, metadata)


def glance(side: Side, speller: Speller, found: Pass, position: int) -> bytes:
    """Where another position looks, and what the model says there."""
    tensors = lines_of(side, found, position_in(found, position))
    words = words_of(side, speller, found, tensors.get("logits"), with_lens=False)
    return to_bytes(tensors, {"trace": found.id, "select": str(position), "words": words})


def watched(side: Side, found: Pass, ids: list[int]) -> bytes:
    """What every row of the map says of some tokens: `logit` and `p`, each (token, row, position)."""
    passes, model = side.passes, side.model
    if found.lens is None or not isinstance(model, Transformer) or passes.main is None:
        raise ValueError("the rows of this model's map say no words")
    size = found.output.shape[-1]
    if not 1 <= len(ids) <= MOST_WATCHED or max(ids) >= size:
        raise ValueError(f"ids should be 1 to {MOST_WATCHED} token ids from 0 to {size - 1}")
    rows = torch.cat([passes.value(found, name) for name in passes.map[passes.main["name"]][:-1]])
    with torch.no_grad():
        logit, p = of_tokens(model, rows, found.output, torch.tensor(ids, device=rows.device))
    return to_bytes({"logit": logit, "p": p}, {"trace": found.id, "ids": ids})


def position_in(found: Pass, select: object) -> int:
    """A position of a pass, from a request."""
    if type(select) is not int or not 0 <= select < found.length:
        raise ValueError(f"select={select!r:.20} should be a position from 0 to {found.length - 1}")
    return select


def groups_of(passes: Passes) -> dict[str, list[Look]]:
    """The attentions of the main stack, those across, and those of the encoder beside it."""
    if passes.main is None:
        return {}
    main, groups = passes.main["name"], {}
    for look in passes.looks:
        prefix = "cross." if look.cross else "" if look.stack == main else "source."
        groups.setdefault(prefix, []).append(look)
    return groups


def lines_of(side: Side, found: Pass, position: int) -> dict[str, Tensor]:
    """The weights with which a position looks, of every head, and its logits."""
    tensors: dict[str, Tensor] = {}
    names = {"": "lines", "cross.": "cross", "source.": "source.lines"}
    for prefix, looks in groups_of(side.passes).items():
        here = found.heads[looks[0].path].scores.shape[1] - 1 if prefix == "source." else position
        rows = [side.passes.line(found, look, here).float() for look in looks]
        width = max(max(row.shape[-1] for row in rows), found.length if not prefix else 0)
        padded = [torch.nn.functional.pad(row, (0, width - row.shape[-1])) for row in rows]
        tensors[names[prefix]] = torch.stack(padded)
    if found.output.is_floating_point() and found.output.dim() in (1, 2):
        per_position = found.output.dim() == 2 and len(found.output) == found.length
        says = side.manifest["head"] in SAYING
        tensors["logits" if says else "output"] = (
            found.output[position] if per_position else found.output
        ).float()
    return tensors


def experts_of(passes: Passes, found: Pass) -> tuple[list[str], dict[str, Tensor]]:
    """To which experts each token went, and with which weight: the layers' paths, and (layers, T, k) of both.

    Nothing of a pass whose values were not kept whole; a page asks for them then.
    """
    layers = [] if passes.main is None else passes.main["layers"]
    paths = [layer["feed_forward"]["path"] for layer in layers if layer["feed_forward"]["kind"] == "experts"]
    if not paths or found.trace is None:
        return [], {}
    values = found.trace.values
    chosen = torch.stack([values[f"{path}.chosen"][0].int() for path in paths])
    weights = torch.stack([values[f"{path}.weights"][0].float() for path in paths])
    return paths, {"experts.chosen": chosen, "experts.weights": weights}


def words_of(
    side: Side, speller: Speller, found: Pass, logits: Tensor | None, with_lens: bool = True
) -> dict[int, str]:
    """The texts of the tokens that a reader is about to see."""
    if side.manifest["head"] not in ("lm", "masked"):
        return {}
    ids: list[int] = []
    if with_lens and found.lens is not None:
        ids += found.lens.ids.unique().tolist()
    if logits is not None:
        ids += logits.topk(min(WORDS, len(logits))).indices.tolist()
    return speller.words(ids)
