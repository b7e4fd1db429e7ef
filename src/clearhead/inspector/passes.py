"""Passes of one model that are kept for looking at: whole, cut short, or made longer by one more token.

    whole       a trace of all tokens; every value is kept
    longer      the new tokens alone, on the keys and values of those before (growth.py). What the map shows
                is joined; the rest is made whole when asked for
    long        of a text whose values would fill the memory only the rows of the map are kept; a block is run
                again from its kept input when it is opened

A pass is known by a number made of the weights, the tokens, the edits and the dtype: the same question gives
the same number. How far the logits of the fused path that `generate` takes are from the recorded ones is kept
as `delta`; of a pass that was made longer it is measured when somebody asks.
"""

import ctypes
import hashlib
import itertools
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.inspector.anatomy import Anatomy, Stop
from clearhead.inspector.growth import Growth
from clearhead.inspector.kept import Heads, heads_of
from clearhead.inspector.kept import Look as Look
from clearhead.inspector.kept import Pass as Pass
from clearhead.inspector.kept import Question as Question
from clearhead.inspector.record import hear, record
from clearhead.inspector.trace import Trace, Tracer, trace
from clearhead.inspector.views import Lens, lens, norms, top_words
from clearhead.model.transformer import Transformer

SHORT = 128_000_000  # bytes of values up to which a whole trace is kept
KEPT_WEIGHTS = 64_000_000  # bytes of attention weights up to which a pass keeps them
KEPT = 256_000_000  # bytes of all passes together


class Passes:
    """Runs one model and keeps what a page may ask about. Not for two threads at once.

    `example`: a question the model can answer; from its trace the outline of the model is drawn. `weights`:
    of a run, gives the model the weights of a step and returns their hash. `pad`: the token that fills up
    rows, which nothing looks at.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Question,
        weights: Callable[[int], str] | None = None,
        pad: int | None = None,
    ) -> None:
        self.model, self.weights = model, weights
        self.version = _digest(model)
        self.anatomy = anatomy = Anatomy(model, example, pad)
        self.device, self.outline, self.stacks = anatomy.device, anatomy.outline, anatomy.stacks
        self.main, self.main_name = anatomy.main, anatomy.main_name
        self.looks, self.map, self.n_bytes = anatomy.looks, anatomy.map, anatomy.n_bytes
        self.growth = Growth(anatomy)
        self.kept: OrderedDict[str, Pass] = OrderedDict()
        self.asked: OrderedDict[str, Question] = OrderedDict()
        self.opened: tuple[str, str, Trace] | None = None  # the newest block that was run again

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
            with self.anatomy.running(stop):
                found = self.growth.longer(number, question) or self._new(number, question)
            found.seconds = time.perf_counter() - began
            if found.rows and not found.joined:
                give_back()
        self._keep(found)
        return found

    def _go_to(self, step: int | None) -> None:
        """Give the model the weights of this step of its training."""
        if self.weights is None or step is None:
            return
        version = self.weights(step)
        if version != self.version:
            self.version = version
            self.growth.forget()

    def _fresh(self, question: Question, stop: Stop) -> None:
        """Make the pass of a question of all tokens at once, unless it is there."""
        number = self.identify(question)
        found = self.kept.get(number)
        if found is None or found.joined:
            with self.anatomy.running(stop):
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
            with self.anatomy.running():
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
            with self.anatomy.running():
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
        if found is not self.growth.latest or look.stack != self.main_name:
            return self.value(found, f"{look.path}.weights")[0, :, position]
        row = self.growth.glance(found, position)[look.path]
        return row if look.cross else row[:, : found.length]

    def measure(self, found: Pass) -> float | None:
        """How far the logits of the path that `generate` takes are from the recorded ones; of a changed pass
        or a foreign model None.
        """
        self._go_to(found.question.step)
        if found.delta is None and not found.question.edits and isinstance(self.model, Transformer):
            with self.anatomy.running():
                found.delta = self.growth.measure(found)
        return found.delta

    def says(self, question: Question, position: int) -> Float[Tensor, "..."]:
        """What the model says at a position of a question, all tokens at once; nothing is kept."""
        self._go_to(question.step)
        options = self.anatomy.asked(question)
        with self.anatomy.running(), record(self.model, names=[], edits=question.edits):
            output = self.model(self.anatomy.tensor(question.ids), **options)[0]
        per_position = output.dim() == 2 and len(output) == len(question.ids)
        return output[position] if per_position else output

    # ----------------------------------------------------------------------------------------- running

    def _new(self, number: str, question: Question) -> Pass:
        """A pass of all tokens at once."""
        found = Pass(number, question, torch.empty(0), None, {}, {}, None, 0.0)
        values, found.heads = self._read_all(found, question)
        self._fill(found, values)
        if not question.edits and isinstance(self.model, Transformer):
            found.delta = self.growth.begin(found)
        return found

    def _read_all(self, found: Pass, question: Question) -> tuple[dict[str, Tensor], dict[str, Heads]]:
        """Run all tokens at once, and keep in `found` every value, or of a long text the rows of the map."""
        tokens, options = self.anatomy.tensor(question.ids), self.anatomy.asked(question)
        looks = {look.path: look for look in self.looks}
        if question.edits or self.n_bytes(question) <= SHORT:
            found.trace = trace(self.model, tokens, edits=question.edits, **options)
            values = found.trace.values
            return values, {
                path: self._heads(look, values[f"{path}.weights"], question) for path, look in looks.items()
            }
        heads: dict[str, Heads] = {}

        def keep(path: str, weights: Tensor) -> None:
            if path in looks:
                heads[path] = self._heads(looks[path], weights, question)

        harvest = self.anatomy.harvest(keep)
        with hear(self.model, harvest):
            self.model(tokens, **options)
        names = [*itertools.chain(*self.map.values()), "logits"]
        found.rows, found.given = {name: harvest.values[name] for name in names}, harvest.given
        return harvest.values, heads

    def _fill(self, found: Pass, values: dict[str, Tensor]) -> None:
        """What the map shows of these values."""
        found.output = values["logits"][0]
        for stack in self.stacks:
            rows = torch.cat([values[name] for name in self.map[stack["name"]]])
            found.norms[stack["name"]] = norms(rows)
            if stack is self.main and self.anatomy.has_lens:
                assert isinstance(self.model, Transformer)
                found.lens = lens(self.model, rows[:-1], found.output, self.anatomy.stop)

    def _heads(self, look: Look, weights: Tensor, question: Question) -> Heads:
        """What is kept of the weights (1, H, T, S) of all queries."""
        queries, keys = self.anatomy.looking(look, question)
        small = weights.numel() * weights.element_size() * len(self.looks) <= KEPT_WEIGHTS
        return heads_of(weights[0], queries, keys, cross=look.cross, keep_rows=small)

    def _again(self, found: Pass, block: str) -> Trace:
        """A trace of one block of a long pass, from its kept input; "" gives what is outside the blocks."""
        question = found.question
        tokens, source = self.anatomy.tensor(question.ids), self.anatomy.source(question)
        made = Trace(self.model, tokens, source, *self.anatomy.masks(question), ())
        made.nodes.update(self.outline.nodes)
        made.values.update(found.rows)
        if not block:
            return made
        tracer = Tracer(made, None, None)
        before = self.anatomy.row_before(block)
        x = found.rows[before]
        tracer.latest[id(x)] = before
        module = dict(self.model.named_modules())[block]
        with hear(self.model, tracer):
            module(x, **found.given[block])
        return made

    # ----------------------------------------------------------------------------------------- keeping

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


def give_back() -> None:
    """Return to the system what was freed: after a long pass the C library keeps several times what we do.
    Where it has no such call nothing happens.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _digest(model: nn.Module) -> str:
    """A hash of all weights and of their types."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(memoryview(flat.numpy()))
    return digest.hexdigest()
