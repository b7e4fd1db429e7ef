"""Passes of one model that are kept for looking at: whole, cut short, or made longer by one more token.

    whole       a trace of all tokens; every value is kept
    longer      the new tokens alone, on the keys and values of those before: typing at the end costs one
                token whatever the length. What the map shows is joined; the rest is made whole when asked for
    long        of a text whose values would fill the memory only the rows of the map are kept; a block is run
                again from its kept input when it is opened

A pass is known by a number made of the weights, the tokens, the edits and the dtype: the same question gives
the same number. The fused path that `generate` takes runs beside every pass, and how far its logits are from
the recorded ones is kept as `delta`.
"""

import hashlib
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from clearhead.generation.window import evaluating
from clearhead.inspector.manifest import LENS_HEADS, Json, describe_stack, map_rows, shape_of, stacks_of
from clearhead.inspector.record import Edit, Recorder, hear, record
from clearhead.inspector.trace import Trace, Tracer, trace
from clearhead.inspector.views import (
    Lens,
    halved,
    head_scores,
    lens,
    norms,
    pool_factor,
    thumbnails,
    top_words,
)
from clearhead.model.cache import Cache, LayerCache
from clearhead.model.transformer import Memory, Stack, Transformer, View

Stop = Callable[[], None]

SHORT = 128_000_000  # bytes of values up to which a whole trace is kept
KEPT_WEIGHTS = 64_000_000  # bytes of attention weights up to which a pass keeps them
KEPT = 256_000_000  # bytes of all passes together
_CACHE_BLOCK = 128


@dataclass(frozen=True)
class Question:
    """What a pass is asked: tokens, what an encoder-decoder reads, and changes on the way."""

    ids: tuple[int, ...]
    source: tuple[int, ...] | None = None
    edits: tuple[Edit, ...] = ()
    edit_key: str = ""  # says the edits as text
    step: int | None = None  # of a run: after how many steps of its training


class Look(NamedTuple):
    """One attention of the model: the stack it stands in, its layer there, and what it looks at."""

    path: str
    stack: str
    layer: int
    cross: bool


@dataclass(frozen=True)
class Heads:
    """What is kept of the heads of one attention. `rows`: the weights, as the parts in which they came."""

    picture: UInt8[Tensor, "H 32 32"]
    factor: int
    scores: Float[Tensor, "H T 6"]
    rows: tuple[Tensor, ...] | None  # each (H, n, S) with the S of its time
    last: Float[Tensor, "H S"]

    def row(self, position: int) -> Float[Tensor, "H S"] | None:
        """The weights of one query; None if they were not kept."""
        if position == self.scores.shape[1] - 1:
            return self.last
        for part in self.rows or ():
            if position < part.shape[1]:
                return part[:, position]
            position -= part.shape[1]
        return None


@dataclass
class Pass:
    """What is kept of one pass."""

    id: str
    question: Question
    output: Tensor  # what the model says: (T, V), or (labels,), or anything of a foreign module
    lens: Lens | None
    norms: dict[str, Tensor]  # stack -> (R, T)
    heads: dict[str, Heads]  # by the path of the attention
    delta: float | None
    seconds: float
    trace: Trace | None = None  # all values, of a whole pass
    rows: dict[str, Tensor] = field(default_factory=dict)  # of a long pass: the rows of the map, (1, T, D)
    given: dict[str, dict[str, Any]] = field(default_factory=dict)  # of a long pass: what its blocks got
    memory: Memory | None = None
    joined: bool = False  # made longer, token by token
    n_bytes: int = 0

    @property
    def length(self) -> int:
        """The number of tokens."""
        return len(self.question.ids)

    def weigh(self) -> int:
        """The memory that this pass holds, tensors shared with others counted in full."""
        tensors = [self.output, *self.rows.values(), *self.norms.values()]
        tensors += [part for heads in self.heads.values() for part in heads.rows or ()]
        tensors += list(self.trace.values.values()) if self.trace is not None else []
        return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())


class Harvest(Recorder):
    """A recorder that keeps the rows of the map, and of the attention weights what `keep` makes of them."""

    def __init__(self, rows: set[str], starts: dict[str, str], keep: Callable[[str, Tensor], None]) -> None:
        super().__init__(None, None)
        self.rows, self.starts, self.keep = rows, starts, keep
        self.given: dict[str, dict[str, Any]] = {}

    def on_enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name in self.starts:
            self.values[self.starts[name]] = args[0].detach()
        if name in self.rows:
            self.given[name] = kwargs

    def on_value(self, name: str, value: Tensor, module_path: str, tapped: bool) -> Tensor:
        if name in self.rows or name == "logits":
            self.values[name] = value.detach()
        elif tapped and name.endswith(".weights"):
            self.keep(module_path, value.detach())
        return value


class Passes:
    """Runs one model and keeps what a page may ask about. Not for two threads at once.

    `example`: a question the model can answer; from its trace the outline of the model is drawn. `weights`:
    of a run, gives the model the weights of a step and returns their hash.
    """

    def __init__(
        self, model: nn.Module, example: Question, weights: Callable[[int], str] | None = None
    ) -> None:
        self.model, self.weights = model, weights
        self.modules = list(model.modules())
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.version = _digest(model)
        with evaluating(self.modules):
            self.outline = trace(model, self._tensor(example.ids[:2]), source=self._source(example))
        self.stacks: list[Json] = [describe_stack(*stack, self.outline) for stack in stacks_of(model)]
        self.main: Json | None = self.stacks[-1] if self.stacks else None
        self.looks = [
            Look(attention["path"], stack["name"], number, attention["kind"] == "cross")
            for stack in self.stacks
            for number, layer in enumerate(stack["layers"])
            for attention in layer["attention"]
        ]
        self.map = {stack["name"]: map_rows(stack) for stack in self.stacks}
        self.blocks = [
            child
            for path, child in model.named_modules()
            if any(path == layer["name"] for stack in self.stacks for layer in stack["layers"])
        ]
        self.stop: Stop = lambda: None  # of the pass that runs
        self.kept: OrderedDict[str, Pass] = OrderedDict()
        self.asked: OrderedDict[str, Question] = OrderedDict()
        self.opened: tuple[str, str, Trace] | None = None  # the newest block that was run again
        self.glanced: tuple[str, int, dict[str, Tensor]] | None = None  # the newest position that was asked
        self.main_name = None if self.main is None else self.main["name"]
        self.latest: Pass | None = None  # the pass that the cache goes with
        self.cache: Cache | None = None
        self.filled = 0  # how many of its tokens the cache holds

    # ------------------------------------------------------------------------------------------ asking

    def identify(self, question: Question) -> str:
        """The number of a question: a hash of the weights, tokens, edits, dtype and device."""
        parts = (self.version, question.ids, question.source, question.edit_key, str(self.device))
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:20]

    def run(self, question: Question, stop: Stop = lambda: None) -> Pass:
        """The pass of a question: one that is kept, a longer one, or a new one.

        `stop` is called between the layers and may raise. With edits the unedited pass is made whole first,
        so that both were worked out in the same way and a difference between them is the edits'.
        """
        self._go_to(question.step)
        number = self.identify(question)
        found = self.kept.get(number)
        if found is None:
            if question.edits:
                self._fresh(replace(question, edits=(), edit_key=""), stop)
            began = time.perf_counter()
            with self._running(stop):
                found = self._longer(number, question) or self._new(number, question)
            found.seconds = time.perf_counter() - began
        self._keep(found)
        return found

    def _go_to(self, step: int | None) -> None:
        """Give the model the weights of this step of its training."""
        if self.weights is None or step is None:
            return
        version = self.weights(step)
        if version != self.version:
            self.version, self.latest, self.cache, self.filled = version, None, None, 0

    def _fresh(self, question: Question, stop: Stop) -> None:
        """Make the pass of a question of all tokens at once, unless it is there."""
        number = self.identify(question)
        found = self.kept.get(number)
        if found is None or found.joined:
            with self._running(stop):
                self._keep(self._new(number, question))

    def find(self, number: str) -> Pass:
        """The pass with this number, run again if it was dropped; KeyError if nobody asked for it."""
        if number not in self.asked:
            raise KeyError(f"there is no trace {number[:40]!r}; ask for one with its text")
        found = self.run(self.asked[number])
        if found.id != number:
            raise KeyError(f"the weights behind trace {number!r:.40} were replaced; ask again with its text")
        return found

    def whole(self, found: Pass) -> Pass:
        """The same pass with all its values, of a long one its rows; what it says is taken from them.

        Of a pass that was made longer, the lens of the rows above the last one stays as it was shown.
        """
        if found.trace is None and not found.rows:
            with self._running(lambda: None):
                values, heads = self._read_all(found, found.question)
            found.output, found.heads = values["logits"][0], heads
            if found.lens is not None:
                ids, p = found.lens.ids.clone(), found.lens.p.clone()
                ids[-1], p[-1] = top_words(found.output)
                found.lens = Lens(ids, p)
            found.n_bytes = 0
            self._keep(found)
        return found

    def trace_of(self, found: Pass, name: str) -> Trace:
        """A trace that holds this value: the whole one, or of a long pass its block, run again."""
        self._go_to(found.question.step)
        self.whole(found)
        if found.trace is not None:
            return found.trace
        block = next((path for path in found.given if name == path or name.startswith(f"{path}.")), "")
        if self.opened is None or self.opened[:2] != (found.id, block):
            with self._running(lambda: None):
                self.opened = found.id, block, self._again(found, block)
        return self.opened[2]

    def value(self, found: Pass, name: str) -> Tensor:
        """One value of a pass; KeyError if it has none of this name."""
        if name not in self.outline.nodes:
            raise KeyError(f"{name[:80]!r} is no value of this model")
        held = self.trace_of(found, name).values
        if name not in held:
            raise KeyError(f"{name} is not kept of a text this long; choose a value inside a block")
        return held[name]

    def line(self, found: Pass, look: Look, position: int) -> Float[Tensor, "H S"]:
        """Where one position looks: its row of an attention's weights."""
        row = found.heads[look.path].row(position)
        if row is not None:
            return row if look.cross or look.stack != self.main_name else row[:, : found.length]
        if found is not self.latest or look.stack != self.main_name:
            return self.value(found, f"{look.path}.weights")[0, :, position]
        if self.glanced is None or self.glanced[:2] != (found.id, position):
            self.glanced = found.id, position, self._glance(found, position)
        row = self.glanced[2][look.path]
        return row if look.cross else row[:, : found.length]

    def says(self, question: Question, position: int) -> Float[Tensor, "..."]:
        """What the model says at a position of a question, all tokens at once; nothing is kept."""
        self._go_to(question.step)
        source = self._source(question)
        options = {} if source is None else {"source": source}
        with self._running(lambda: None), record(self.model, names=[], edits=question.edits):
            output = self.model(self._tensor(question.ids), **options)[0]
        per_position = output.dim() == 2 and len(output) == len(question.ids)
        return output[position] if per_position else output

    # ----------------------------------------------------------------------------------------- running

    @contextmanager
    def _running(self, stop: Stop) -> Iterator[None]:
        """No dropout, no gradients, and a look at `stop` after every block."""
        self.stop = stop
        with ExitStack() as hooks:
            for block in self.blocks:
                hooks.callback(block.register_forward_hook(lambda module, args, output: stop()).remove)
            hooks.enter_context(evaluating(self.modules))
            hooks.enter_context(torch.no_grad())
            yield

    def _new(self, number: str, question: Question) -> Pass:
        """A pass of all tokens at once."""
        found = Pass(number, question, torch.empty(0), None, {}, {}, None, 0.0)
        values, found.heads = self._read_all(found, question)
        self._fill(found, values)
        if not question.edits and isinstance(self.model, Transformer):
            found.delta = self._begin(found, self._tensor(question.ids), self._source(question))
        return found

    def _read_all(self, found: Pass, question: Question) -> tuple[dict[str, Tensor], dict[str, Heads]]:
        """Run all tokens at once, and keep in `found` every value, or of a long text the rows of the map."""
        tokens, source = self._tensor(question.ids), self._source(question)
        looks = {look.path: look for look in self.looks}
        if question.edits or self.n_bytes(question) <= SHORT:
            found.trace = trace(self.model, tokens, source=source, edits=question.edits)
            values = found.trace.values
            return values, {
                path: self._heads(look, values[f"{path}.weights"], question) for path, look in looks.items()
            }
        heads: dict[str, Heads] = {}

        def keep(path: str, weights: Tensor) -> None:
            if path in looks:
                heads[path] = self._heads(looks[path], weights, question)

        harvest = self._harvest(keep)
        with hear(self.model, harvest):
            self.model(tokens, **({} if source is None else {"source": source}))
        names = [*itertools.chain(*self.map.values()), "logits"]
        found.rows, found.given = {name: harvest.values[name] for name in names}, harvest.given
        return harvest.values, heads

    def _fill(self, found: Pass, values: dict[str, Tensor]) -> None:
        """What the map shows of these values."""
        found.output = values["logits"][0]
        for stack in self.stacks:
            rows = torch.cat([values[name] for name in self.map[stack["name"]]])
            found.norms[stack["name"]] = norms(rows)
            if stack is self.main and self._has_lens():
                assert isinstance(self.model, Transformer)
                found.lens = lens(self.model, rows[:-1], found.output, self.stop)

    def _has_lens(self) -> bool:
        return isinstance(self.model, Transformer) and self.model.config.head in LENS_HEADS

    def _harvest(self, keep: Callable[[str, Tensor], None]) -> Harvest:
        names = {name for rows in self.map.values() for name in rows}
        starts = {stack["layers"][0]["name"]: stack["start"] for stack in self.stacks if stack["layers"]}
        return Harvest(names, starts, keep)

    def _heads(self, look: Look, weights: Tensor, question: Question) -> Heads:
        """What is kept of the weights (1, H, T, S) of all queries."""
        weights = weights[0]
        queries, keys = self._looking(look, question)
        factor = pool_factor(*weights.shape[1:])
        small = weights.numel() * weights.element_size() * len(self.looks) <= KEPT_WEIGHTS
        return Heads(
            thumbnails(weights, factor),
            factor,
            head_scores(weights, queries, keys, cross=look.cross),
            (weights,) if small else None,
            weights[:, -1].clone(),
        )

    def _looking(self, look: Look, question: Question) -> tuple[Tensor, Tensor]:
        """The tokens that look, and those that are looked at."""
        ids = self._tensor(question.ids)[0]
        source = self._tensor(question.source or ())[0]
        if look.stack == "encoder" and question.source is not None:
            return source, source
        return ids, source if look.cross else ids

    def _again(self, found: Pass, block: str) -> Trace:
        """A trace of one block of a long pass, from its kept input; "" gives what is outside the blocks."""
        question = found.question
        made = Trace(self.model, self._tensor(question.ids), self._source(question), None, None, ())
        made.nodes.update(self.outline.nodes)
        made.values.update(found.rows)
        if not block:
            return made
        tracer = Tracer(made, None, None)
        stack = block.split(".")[0]
        rows = self.map[stack]
        before = rows[rows.index(f"{block}.middle") - 1]
        x = found.rows[before]
        tracer.latest[id(x)] = before
        module = dict(self.model.named_modules())[block]
        with hear(self.model, tracer):
            module(x, **found.given[block])
        return made

    # ------------------------------------------------------------------------------------- one more token

    def _begin(self, found: Pass, tokens: Tensor, source: Tensor | None) -> float:
        """Take the fused path with a cache, as `generate` does; how far its logits are from the recorded."""
        model = self.model
        assert isinstance(model, Transformer)
        self.latest, self.filled = None, 0
        options: dict[str, Any] = {}
        if source is not None:
            found.memory = model.encode(source)
            options["memory"] = found.memory
        if model.config.shape != "encoder":
            needed = -(-(found.length + 32) // _CACHE_BLOCK) * _CACHE_BLOCK
            self.cache = model.new_cache(1, max(found.length, min(needed, model.config.max_len)))
            options["cache"] = self.cache
        fused = model(tokens, **options)[0]
        if model.config.shape != "encoder":
            self.latest, self.filled = found, found.length
        return float((fused - found.output).abs().max())

    def _longer(self, number: str, question: Question) -> Pass | None:
        """The pass of a text that begins like the latest one; None if that is not possible."""
        base, cache = self.latest, self.cache
        if question.edits or base is None or cache is None or base.question.source != question.source:
            return None
        start = min(_common(base.question.ids, question.ids), self.filled)
        length = len(question.ids)
        if start < max(1, length // 2) or not self._can_join(base, start, length):
            return None
        model = self.model
        assert isinstance(model, Transformer)
        self._make_room(length)
        assert self.cache is not None
        heads = {look.path: self._cut(look, base, start, question) for look in self.looks}
        if start == length:
            return self._joined(number, question, base, start, {}, heads)
        new = self._tensor(question.ids[start:])
        looks = {look.path: look for look in self.looks}
        options: dict[str, Any] = {} if base.memory is None else {"memory": base.memory}

        def keep(path: str, weights: Tensor) -> None:
            look = looks.get(path)
            if look is not None:
                width = weights.shape[-1] if look.cross else length
                heads[path] = self._add(look, heads[path], weights[0, ..., :width], start, question)

        harvest = self._harvest(keep)
        self._rewind(start)
        with hear(model, harvest):
            model(new, cache=self.cache, **options)
        self._rewind(start)  # the cache goes on as generate() would fill it
        fused = model(new, cache=self.cache, **options)[0]
        found = self._joined(number, question, base, start, harvest.values, heads)
        found.delta = max(base.delta or 0.0, float((fused - found.output[start:]).abs().max()))
        self.latest, self.filled = found, length
        return found

    def _can_join(self, base: Pass, start: int, length: int) -> bool:
        """Whether what is kept of the base is enough to join new tokens to it."""
        if self._has_lens() and base.lens is None:
            return False
        if start < base.length:
            return all(
                base.heads[look.path].rows is not None for look in self.looks if look.stack != "encoder"
            )
        return True

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
        output, lengths, shown = base.output[:start], dict(base.norms), base.lens
        assert self.main is not None
        main = self.main["name"]
        lengths[main] = lengths[main][:, :start]
        shown = None if shown is None else Lens(shown.ids[:, :start], shown.p[:, :start])
        if values:
            new = values["logits"][0]
            rows = torch.cat([values[name] for name in self.map[main]])
            lengths[main] = torch.cat([lengths[main], norms(rows)], 1)
            output = torch.cat([output, new])
            if shown is not None:
                assert isinstance(self.model, Transformer)
                more = lens(self.model, rows[:-1], new)
                shown = Lens(*(torch.cat(pair, 1) for pair in zip(shown, more, strict=True)))
        found = Pass(number, question, output, shown, lengths, heads, base.delta, 0.0)
        found.memory, found.joined = base.memory, True
        if base.rows:
            found.rows = {name: joined(base.rows[name], start, values.get(name)) for name in base.rows}
            found.given = self._given(len(question.ids), base.memory)
        return found

    def _cut(self, look: Look, base: Pass, start: int, question: Question) -> Heads:
        """The heads of the base at its first `start` positions."""
        heads = base.heads[look.path]
        if look.stack == "encoder" and question.source is not None:
            return heads
        keys = heads.last.shape[-1] if look.cross else len(question.ids)
        factor = pool_factor(len(question.ids), keys)
        if start == base.length:
            if factor == heads.factor:
                return heads
            grown = halved(heads.picture, (factor // heads.factor).bit_length() - 1)
            return replace(heads, picture=grown, factor=factor)
        assert heads.rows is not None
        rows, left = [], start
        for part in heads.rows:
            if left > 0:
                rows.append(part[:, :left])
                left -= part.shape[1]
        width = keys if look.cross else start
        all_rows = torch.cat([_widen(part, width) for part in rows], 1)
        picture = thumbnails(all_rows, factor)
        return Heads(picture, factor, heads.scores[:, :start], tuple(rows), all_rows[:, -1])

    def _add(self, look: Look, heads: Heads, weights: Tensor, start: int, question: Question) -> Heads:
        """The heads with the weights (H, n, S) of new queries."""
        queries, keys = self._looking(look, question)
        more = head_scores(weights, queries[start:], keys, start, look.cross)
        picture = torch.maximum(heads.picture, thumbnails(weights, heads.factor, start))
        kept = None if heads.rows is None else (*heads.rows, weights.clone())
        if kept is not None and len(kept) > 48:  # many small parts are slow to look through
            kept = (torch.cat([_widen(part, weights.shape[-1]) for part in kept], 1),)
        return Heads(picture, heads.factor, torch.cat([heads.scores, more], 1), kept, weights[:, -1].clone())

    def _given(self, length: int, memory: Memory | None) -> dict[str, dict[str, Any]]:
        """What the blocks of the main stack are called with in a pass of this length."""
        stack, main = self._stack()
        places = torch.arange(length, device=self.device)
        view = stack.view(places, places, places, None, None)
        return {
            layer["name"]: self._options(stack, number, view, memory)
            for number, layer in enumerate(main["layers"])
        }

    def _options(self, stack: Stack, layer: int, view: View, memory: Memory | None) -> dict[str, Any]:
        """The arguments of one block, as its stack gives them."""
        window = stack.windowed[layer]
        return {
            "rotation": view.rotations[window] if stack.turned[layer] else None,
            "mask": view.masks[window],
            "bias": view.bias,
            "memory": None if memory is None else memory.layers[layer],
        }

    def _stack(self) -> tuple[Stack, Json]:
        assert isinstance(self.model, Transformer) and self.main is not None
        return self.model.stack, self.main

    def _glance(self, found: Pass, position: int) -> dict[str, Tensor]:
        """The weights of one query in every attention of the main stack, from the latest pass's cache."""
        stack, main = self._stack()
        cache = self.cache
        assert cache is not None
        here = torch.tensor([position], device=self.device)
        keys = torch.arange(cache.capacity, device=self.device)
        view = stack.view(here, here, keys, None, None)
        rows = self.map[main["name"]]
        found_rows: dict[str, Tensor] = {}

        def keep(path: str, weights: Tensor) -> None:
            found_rows[path] = weights[0, :, 0]

        harvest = self._harvest(keep)
        with self._running(lambda: None), hear(self.model, harvest):
            for number, layer in enumerate(main["layers"]):
                x = found.rows[rows[rows.index(f"{layer['name']}.middle") - 1]][:, position : position + 1]
                old = cache.layers[number]
                own = LayerCache(old.keys.clone(), old.values.clone())
                own.slots = here
                block = stack.blocks[number]
                block(x, cache=own, **self._options(stack, number, view, found.memory))
        return found_rows

    def _rewind(self, length: int) -> None:
        """Let the cache hold its first `length` positions."""
        cache = self.cache
        assert cache is not None
        self.filled = min(self.filled, length)
        cache.length.fill_(length)
        cache.seen.fill_(length)
        cache.real[:, :length] = True
        cache.real[:, length:] = False

    def _make_room(self, length: int) -> None:
        """A cache with at least this many positions that holds what the old one held."""
        old, model = self.cache, self.model
        assert old is not None and isinstance(model, Transformer)
        if length <= old.capacity:
            return
        needed = -(-(length + 32) // _CACHE_BLOCK) * _CACHE_BLOCK
        self.cache = model.new_cache(1, max(length, min(needed, model.config.max_len)))
        for new_layer, old_layer in zip(self.cache.layers, old.layers, strict=True):
            new_layer.keys[:, :, : old.capacity] = old_layer.keys
            new_layer.values[:, :, : old.capacity] = old_layer.values

    # ----------------------------------------------------------------------------------------- keeping

    def n_bytes(self, question: Question) -> int:
        """About how many bytes a whole trace of this question holds."""
        length = len(question.ids)
        sizes = {"T": length, "S": max(length, len(question.source or ()))}
        total = 0
        for name, node in self.outline.nodes.items():
            numbers = self.outline.values[name].element_size()
            for size in shape_of(node, self.outline.values[name]):
                numbers *= sizes[size] if isinstance(size, str) else size
            total += numbers
        return total

    def _keep(self, found: Pass) -> None:
        """Put a pass in front; drop those that were not asked for the longest time."""
        self.asked[found.id] = found.question
        self.asked.move_to_end(found.id)
        while len(self.asked) > 4096:
            self.asked.popitem(last=False)
        found.n_bytes = found.n_bytes or found.weigh()
        self.kept[found.id] = found
        self.kept.move_to_end(found.id)
        total = sum(kept.n_bytes for kept in self.kept.values())
        while len(self.kept) > 2 and (total > KEPT or len(self.kept) > 64):
            _, dropped = self.kept.popitem(last=False)
            total -= dropped.n_bytes

    def _tensor(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor([list(ids)], dtype=torch.long, device=self.device)

    def _source(self, question: Question) -> Tensor | None:
        return None if question.source is None else self._tensor(question.source)


def _digest(model: nn.Module) -> str:
    """A hash of all weights and of their types."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(memoryview(flat.numpy()))
    return digest.hexdigest()


def joined(before: Tensor, start: int, new: Tensor | None) -> Tensor:
    """The first `start` positions of a value (1, T, D), and the new ones."""
    kept = before[:, :start]
    return kept if new is None else torch.cat([kept, new], 1)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts begin with alike."""
    for place, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return place
    return min(len(first), len(second))


def _widen(weights: Float[Tensor, "H n S"], width: int) -> Float[Tensor, "H n W"]:
    """The same rows over `width` keys: those after a query have no weight."""
    if weights.shape[-1] >= width:
        return weights[..., :width]
    return nn.functional.pad(weights, (0, width - weights.shape[-1]))
