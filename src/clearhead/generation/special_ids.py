"""The ids that steer decoding: with which it starts and ends, what fills up, what is forced or never said.

A published model says them in its generation_config.json, or in the config.json of older folders. They are
part of what the model is; how tokens are chosen (temperature, beams) is up to who asks, and not read here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from clearhead.model.transformer import Transformer

Ids = int | Sequence[int] | None


@dataclass(frozen=True)
class SpecialIds:
    """`None` and `()` mean: there is none."""

    start: int | None = None  # what the decoder of an encoder-decoder begins with
    ends: tuple[int, ...] | None = None  # after one of these a row has ended
    pad: int | None = None  # fills up behind rows that have ended
    first: int | None = None  # the first token of an encoder-decoder is this one
    last: int | None = None  # the last of `max_new_tokens` tokens is this one
    banned: tuple[int, ...] = ()  # never said; of published bans those of one token


def published_ids(model: Transformer) -> SpecialIds:
    """The ids that a published model's folder names; none for a model of our own.

    An id outside the vocabulary, which some folders hold, means none.
    """
    origin = getattr(model, "origin", None)
    if origin is None:
        return SpecialIds()
    # what newer folders say in one file, older ones say in the other
    named: dict[str, Any] = origin.settings if origin.generation is None else origin.generation

    def find(key: str, *, anywhere: bool = True) -> tuple[int, ...]:
        ids = named.get(key)
        ids = origin.settings.get(key) if ids is None and anywhere else ids
        return tuple(id for id in as_ids(ids) if 0 <= id < model.config.vocab_size)

    ends = find("eos_token_id")
    banned = [word[0] for word in named.get("bad_words_ids") or () if len(word) == 1]
    two_sided = model.config.shape == "encoder-decoder"
    return SpecialIds(
        start=only(find("decoder_start_token_id") or find("bos_token_id")),
        ends=ends or None,
        pad=only(find("pad_token_id")),
        first=only(find("forced_bos_token_id", anywhere=False)) if two_sided else None,
        last=only(find("forced_eos_token_id", anywhere=False)),
        banned=tuple(id for id in banned if id not in ends and 0 <= id < model.config.vocab_size),
    )


def only(ids: Sequence[int]) -> int | None:
    """The first of some ids, or None."""
    return next(iter(ids), None)


def as_ids(ids: Ids) -> tuple[int, ...]:
    """One id, several or none as a tuple."""
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def leave_out(logits: Float[Tensor, "B V"], banned: Sequence[int]) -> Float[Tensor, "B V"]:
    """Logits with -inf for the banned tokens."""
    if not banned:
        return logits
    return logits.index_fill(-1, logits.new_tensor(list(banned)).long(), float("-inf"))


def leave_only(logits: Float[Tensor, "B V"], token: int) -> Float[Tensor, "B V"]:
    """Logits that leave no choice: 0 for this token, -inf for all others."""
    forced = logits.new_full(logits.shape, float("-inf"))
    forced[:, token] = 0
    return forced
