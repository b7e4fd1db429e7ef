"""What is looked at: a model, at most one beside it, and what was asked of them. One thread does all work.

The newest question of a page wins: an older one ends between two layers. A tensor is only touched by the
models' thread, which computes on one core: for small models a second one costs more than it brings.
"""

import asyncio
import base64
import gc
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from clearhead.inspector.passes import Pass, Passes, Question
from clearhead.inspector.provenance import Unknown, explain
from clearhead.inspector.spelling import Speller, piece_dicts
from clearhead.server.asides import near, origins
from clearhead.server.reading import Read, Reader, read_edits
from clearhead.server.run_view import RunView
from clearhead.server.sides import Given, Side, check_alike
from clearhead.server.summary import glance, summary, watched
from clearhead.text.foreign import AnyTokenizer

P = ParamSpec("P")
R = TypeVar("R")

MOST_SPOKEN = 512
MOST_WAITING = 64  # requests


class Stale(Exception):
    """A newer question has come."""


class Busy(Exception):
    """Too many requests wait."""


@dataclass(frozen=True)
class Spoken:
    """With which words a pass was asked for; no words where it was asked with ids."""

    read: Read
    source: Read | None
    text: str | None
    source_text: str | None


class Session:
    """A model, its tokenizer, and what was asked of them. `beside`: a model to compare it with."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: AnyTokenizer | None,
        text: str | None = None,
        source: str | None = None,
        name: str = "model",
        run: RunView | None = None,
        beside: Given | None = None,
        place: str | None = None,
    ) -> None:
        self.model, self.tokenizer, self.name, self.run = model, tokenizer, name, run
        self.place = place
        self.speller = Speller(tokenizer)
        self.reader = Reader(model, tokenizer)
        self.config = self.reader.config
        self.newest: OrderedDict[str, int] = OrderedDict()  # of each page
        self.spoken: OrderedDict[str, Spoken] = OrderedDict()  # by the number of the pass
        self.waiting = 0
        self.threads_before = torch.get_num_threads()
        self.thread = ThreadPoolExecutor(
            1, "clearhead-model", initializer=torch.set_num_threads, initargs=(1,)
        )
        some = "0 1 2 3" if tokenizer is None else "The quick brown fox jumps over the lazy dog"
        self.text, self.source = text or some, source or (some if self.reader.two_sided else "")
        self.ours: Side
        self.theirs: Side | None = None
        self.first: bytes
        try:
            self.thread.submit(self._open, beside).result()
        except BaseException:
            self.thread.shutdown()
            raise
        gc.collect()
        gc.freeze()  # a pass makes thousands of objects; the collector need not walk the libraries' each time

    def _open(self, beside: Given | None) -> None:
        read, source = self.reader.both({"text": self.text, "source": self.source})
        example = Question(read.ids, None if source is None else source.ids)
        given = Given(self.model, self.tokenizer, self.name, self.run, self.place)
        self.ours = Side(given, example, self.speller)
        self.ours.manifest |= {"start_id": self.reader.start_id if self.reader.two_sided else None}
        if beside is not None:
            self.theirs = Side(beside, example, Speller(beside.tokenizer))
            check_alike(self.ours, self.theirs)
        self.first = self._first()

    @property
    def passes(self) -> Passes:
        """The passes of the model that is looked at."""
        return self.ours.passes

    @property
    def manifest(self) -> dict[str, Any]:
        """What the page knows of it."""
        return self.ours.manifest

    def _first(self) -> bytes:
        """The trace that the page opens with."""
        body = {"text": self.text, "source": self.source}
        read, source = self.reader.both(body)
        found = self.passes.run(self.question(body))
        self._remember(found, body, read, source)
        return summary(self.ours, self.speller, found, read, source)

    def _remember(self, found: Pass, body: dict[str, Any], read: Read, source: Read | None) -> None:
        """Keep with which words a pass was asked for."""
        texts = [body.get(key) if isinstance(body.get(key), str) else None for key in ("text", "source")]
        self.spoken[found.id] = Spoken(read, source, texts[0], texts[1])
        self.spoken.move_to_end(found.id)
        while len(self.spoken) > MOST_SPOKEN:
            self.spoken.popitem(last=False)

    def close(self) -> None:
        """Stop the thread; PyTorch computes on as many as before."""
        self.thread.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(self.threads_before)
        gc.unfreeze()

    async def call(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The answer of `work`, done by the models' thread."""
        if self.waiting >= MOST_WAITING:
            raise Busy("too many requests are waiting; try again in a moment")
        self.waiting += 1
        try:
            return await asyncio.wrap_future(self.thread.submit(work, *args, **kwargs))
        finally:
            self.waiting -= 1

    # ------------------------------------------------------------------------------------------ asking

    def side(self, body: dict[str, Any]) -> Side:
        """The model that a request asks: the one that is looked at, or {"model": "beside"}."""
        asked = body.get("model")
        if asked is None:
            return self.ours
        if asked != "beside":
            raise ValueError(f"model={asked!r:.20} is unknown; leave it out, or say beside")
        if self.theirs is None:
            raise ValueError("no model stands beside this one; start the page with --compare OTHER")
        return self.theirs

    def question(self, body: dict[str, Any]) -> Question:
        """The question of a request. Raises ValueError for one that cannot be answered."""
        read, source = self.reader.both(body)
        side = self.side(body)
        plain = Question(read.ids, None if source is None else source.ids, step=side.step(body.get("step")))
        edits, key = read_edits(
            body.get("edits") or [],
            lambda name: side.passes.value(side.passes.run(plain), name),
            lambda number, name: self.value(number, name),
        )
        return replace(plain, edits=edits, edit_key=key)

    def find(self, number: str) -> tuple[Side, Pass]:
        """The pass with this number, and whose it is; KeyError if nobody asked for it."""
        if self.theirs is not None and number not in self.passes.asked and number in self.theirs.passes.asked:
            return self.theirs, self.theirs.passes.find(number)
        return self.ours, self.passes.find(number)

    def value(self, number: str, name: str) -> Tensor:
        """One value of the pass with this number."""
        side, found = self.find(number)
        return side.passes.value(found, name)

    def delta(self, number: str) -> float | None:
        """How far the logits of `generate` are from those of the pass with this number."""
        side, found = self.find(number)
        return side.passes.measure(found)

    def near(self, number: str, name: str, row: int) -> list[list[Any]]:
        """The tokens whose rows of a table point nearest to that of one."""
        side, _ = self.find(number)
        return near(side, self.speller, name, row)

    def origins(self, number: str, position: int, word: int) -> dict[str, Any]:
        """What each depth adds to the logit of a word."""
        return origins(*self.find(number), position, word)

    def note(self, client: str, seq: int) -> None:
        """A page has asked its question number `seq`."""
        self.newest[client] = max(seq, self.newest.get(client, seq))
        self.newest.move_to_end(client)
        while len(self.newest) > 256:
            self.newest.popitem(last=False)

    # ---------------------------------------------------------------------------------------- answering

    def trace(self, body: dict[str, Any], client: str, seq: int | None) -> bytes:
        """The summary of the pass that a request asks for; `Stale` when a newer question has come."""

        def stop() -> None:
            if seq is not None and seq < self.newest.get(client, seq):
                raise Stale

        stop()
        began = time.perf_counter()
        read, source = self.reader.both(body)
        side = self.side(body)
        try:
            question = self.question(body)
            found = side.passes.run(question, stop)
        except (RuntimeError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "memory" in str(error):
                raise MemoryError("the memory does not suffice for this text; make it shorter") from None
            raise ValueError(f"the model cannot take this text: {str(error).splitlines()[0]:.200}") from None
        if side is self.ours:
            self._remember(found, body, read, source)
        seconds = time.perf_counter() - began
        return summary(side, self.speller, found, read, source, body.get("select"), seconds)

    def lines(self, number: str, position: int) -> bytes:
        """Where another position looks, and what the model says there."""
        side, found = self.find(number)
        return glance(side, self.speller, found, position)

    def watch(self, number: str, ids: list[int]) -> bytes:
        """The logits and probabilities of some tokens in every row of the map, as (token, row, position)."""
        side, found = self.find(number)
        return watched(side, found, ids)

    def cell(self, number: str, name: str, index: tuple[int, ...]) -> dict[str, Any]:
        """How one number was made."""
        side, found = self.find(number)
        trace = side.passes.trace_of(found, name)
        try:
            return explain(trace, name, index).to_dict()
        except Unknown as error:  # the number itself is known
            value, axes = float(trace.values[name][index]), list(trace.nodes[name].axes)
            return {"name": name, "index": list(index), "axes": axes, "value": value, "unknown": str(error)}

    def tokenize(self, text: str) -> dict[str, Any]:
        """The tokens of a text, and the merges that built each."""
        read = self.reader.tokens_of(text)
        return {
            "ids": list(read.ids),
            "pieces": piece_dicts(self.speller.pieces(read.ids, read.before, read.after)),
            "merges": [self.speller.merges(token) for token in read.ids],
        }

    def page(self) -> dict[str, Any]:
        """What the page opens with: the manifest and the first trace; of a run that of its newest step."""
        if self.run is not None:
            self.first = self._first()
        return {
            "manifest": self.manifest,
            "trace": {"data": base64.b64encode(self.first).decode("ascii")},
            "text": self.text,
            "source": self.source,
            "run": None if self.run is None else self.run.run.path.resolve().name,
            "beside": None if self.theirs is None else self.theirs.name,
            "beside_place": None if self.theirs is None else self.theirs.place,
        }
