"""A pass made longer by the tokens that were typed: they alone run, on the keys and values of those before.

    map of T + n tokens = [map of the first T, the n new columns]

Typing at the end so costs one token whatever the length. The fused path that `generate` takes is run when
somebody asks how far its logits are from the recorded ones: once for all tokens typed since the last time.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.inspector.anatomy import Anatomy
from clearhead.inspector.kept import Heads, Look, Pass, Question, first_heads, joined, more_heads
from clearhead.inspector.record import hear
from clearhead.inspector.views import Lens, lens, norms, pool_factor
from clearhead.model.cache import Cache, LayerCache
from clearhead.model.transformer import Transformer

_CACHE_BLOCK = 128


class Growth:
    """The pass that can be made longer, and the cache that goes with it."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self.latest: Pass | None = None  # the pass that the cache goes with
        self.cache: Cache | None = None
        self.filled = 0  # how many of its tokens the cache holds
        self.fused = 0  # how many of those the fused path has put there
        self.apart = 0.0  # how far its logits were from the recorded ones
        self.glanced: tuple[str, int, dict[str, Tensor]] | None = None  # the newest position that was asked

    def forget(self) -> None:
        """The model has other weights now."""
        self.latest, self.cache, self.filled, self.fused = None, None, 0, 0

    # ----------------------------------------------------------------------------------- the fused path

    def begin(self, found: Pass) -> float:
        """Take the fused path with a cache, as `generate` does; how far its logits are from the recorded."""
        anatomy, model = self.anatomy, self.anatomy.model
        assert isinstance(model, Transformer)
        self.latest, self.filled, self.fused = None, 0, 0
        options: dict[str, Any] = anatomy.asked(found.question)
        grows = model.config.shape != "encoder" and not anatomy.padded(found.question)
        if grows and "source" in options:
            found.memory = model.encode(options.pop("source"))
            options["memory"] = found.memory
        if grows:
            needed = -(-(found.length + 32) // _CACHE_BLOCK) * _CACHE_BLOCK
            self.cache = model.new_cache(1, max(found.length, min(needed, model.config.max_len)))
            options["cache"] = self.cache
        fused = model(anatomy.tensor(found.question.ids), **options)[0]
        apart = float((fused - found.output).abs().max())
        if grows:
            self.latest, self.filled, self.fused, self.apart = found, found.length, found.length, apart
        return apart

    def measure(self, found: Pass) -> float:
        """The same for a pass that was made longer: the fused path reads what it has not read yet."""
        cache, model = self.cache, self.anatomy.model
        if found is not self.latest or cache is None:
            return self.begin(found)
        if self.fused < found.length:
            start = self.fused
            self._rewind(start)
            options: dict[str, Any] = {} if found.memory is None else {"memory": found.memory}
            fused = model(self.anatomy.tensor(found.question.ids[start:]), cache=cache, **options)[0]
            self.apart = max(self.apart, float((fused - found.output[start:]).abs().max()))
            self.filled = self.fused = found.length
        return self.apart

    # -------------------------------------------------------------------------------------- longer passes

    def longer(self, number: str, question: Question) -> Pass | None:
        """The pass of a text that begins like the latest one; None if that is not possible."""
        base, cache, anatomy = self.latest, self.cache, self.anatomy
        if question.edits or base is None or cache is None or anatomy.padded(question):
            return None
        if base.question.source != question.source:
            return None
        start = min(_common(base.question.ids, question.ids), self.filled)
        length = len(question.ids)
        if start < max(1, length // 2) or not self._can_join(base, start):
            return None
        self._make_room(length)
        assert self.cache is not None
        heads = {look.path: self._cut(look, base, start, question) for look in anatomy.looks}
        if start == length:
            return self._joined(number, question, base, start, {}, heads)
        looks = {look.path: look for look in anatomy.looks}
        options: dict[str, Any] = {} if base.memory is None else {"memory": base.memory}

        def keep(path: str, weights: Tensor) -> None:
            look = looks.get(path)
            if look is not None:
                queries, keys = anatomy.looking(look, question)
                seen = weights[0, ..., : weights.shape[-1] if look.cross else length]
                heads[path] = more_heads(heads[path], seen, queries[start:], keys, start, look.cross)

        harvest = anatomy.harvest(keep)
        self._rewind(start)
        with hear(anatomy.model, harvest):
            anatomy.model(anatomy.tensor(question.ids[start:]), cache=self.cache, **options)
        found = self._joined(number, question, base, start, harvest.values, heads)
        self.latest, self.filled = found, length
        return found

    def _can_join(self, base: Pass, start: int) -> bool:
        """Whether what is kept of the base is enough to join new tokens to it."""
        if self.anatomy.has_lens and base.lens is None:
            return False
        own = (look for look in self.anatomy.looks if look.stack != "encoder")
        return start == base.length or all(base.heads[look.path].rows is not None for look in own)

    def _cut(self, look: Look, base: Pass, start: int, question: Question) -> Heads:
        """The heads of the base at its first `start` positions."""
        heads = base.heads[look.path]
        if look.stack == "encoder" and question.source is not None:
            return heads
        keys = heads.last.shape[-1] if look.cross else len(question.ids)
        return first_heads(heads, start, pool_factor(len(question.ids), keys), look.cross)

    def _joined(
        self,
        number: str,
        question: Question,
        base: Pass,
        start: int,
        values: dict[str, Tensor],
        heads: dict[str, Heads],
    ) -> Pass:
        """The first `start` positions of the base, and the new ones."""
        anatomy = self.anatomy
        output, lengths, shown = base.output[:start], dict(base.norms), base.lens
        main = anatomy.main_name
        assert main is not None
        lengths[main] = lengths[main][:, :start]
        shown = None if shown is None else Lens(shown.ids[:, :start], shown.p[:, :start])
        if values:
            new = values["logits"][0]
            rows = torch.cat([values[name] for name in anatomy.map[main]])
            lengths[main] = torch.cat([lengths[main], norms(rows)], 1)
            output = torch.cat([output, new])
            if shown is not None:
                assert isinstance(anatomy.model, Transformer)
                more = lens(anatomy.model, rows[:-1], new)
                shown = Lens(*(torch.cat(pair, 1) for pair in zip(shown, more, strict=True)))
        found = Pass(number, question, output, shown, lengths, heads, None if values else base.delta, 0.0)
        found.memory, found.joined = base.memory, True
        if base.rows:
            found.rows = {name: joined(base.rows[name], start, values.get(name)) for name in base.rows}
            found.given = anatomy.given(len(question.ids), base.memory)
        return found

    # -------------------------------------------------------------------------------------------- the cache

    def glance(self, found: Pass, position: int) -> dict[str, Float[Tensor, "H S"]]:
        """The weights of one query in every attention of the main stack, by the attention's path."""
        if self.glanced is None or self.glanced[:2] != (found.id, position):
            self.glanced = found.id, position, self._glance(found, position)
        return self.glanced[2]

    def _glance(self, found: Pass, position: int) -> dict[str, Tensor]:
        anatomy, cache = self.anatomy, self.cache
        stack, main = anatomy.main_stack()
        assert cache is not None
        here = torch.tensor([position], device=anatomy.device)
        keys = torch.arange(cache.capacity, device=anatomy.device)
        view = stack.view(here, here, keys, None, None)
        found_rows: dict[str, Tensor] = {}

        def keep(path: str, weights: Tensor) -> None:
            found_rows[path] = weights[0, :, 0]

        with anatomy.running(), hear(anatomy.model, anatomy.harvest(keep)):
            for number, layer in enumerate(main["layers"]):
                x = found.rows[anatomy.row_before(layer["name"])][:, position : position + 1]
                old = cache.layers[number]
                own = LayerCache(old.keys.clone(), old.values.clone())
                own.slots = here
                stack.blocks[number](x, cache=own, **anatomy.options(number, view, found.memory))
        return found_rows

    def _rewind(self, length: int) -> None:
        """Let the cache hold its first `length` positions."""
        cache = self.cache
        assert cache is not None
        self.filled, self.fused = min(self.filled, length), min(self.fused, length)
        cache.length.fill_(length)
        cache.seen.fill_(length)
        cache.real[:, :length] = True
        cache.real[:, length:] = False

    def _make_room(self, length: int) -> None:
        """A cache with at least this many positions that holds what the old one held."""
        old, model = self.cache, self.anatomy.model
        assert old is not None and isinstance(model, Transformer)
        if length <= old.capacity:
            return
        needed = -(-(length + 32) // _CACHE_BLOCK) * _CACHE_BLOCK
        self.cache = model.new_cache(1, max(length, min(needed, model.config.max_len)))
        for new_layer, old_layer in zip(self.cache.layers, old.layers, strict=True):
            new_layer.keys[:, :, : old.capacity] = old_layer.keys
            new_layer.values[:, :, : old.capacity] = old_layer.values


def _common(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    """How many tokens two texts begin with alike."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))
