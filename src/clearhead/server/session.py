"""One model that is being looked at: its texts, its passes, its words. All work is done by one thread.

    question    what a request asks, read and checked: text or ids, a source, edits
    summary     what the map needs of a pass, as bytes
    generate    tokens one by one, each drawn from the very logits that its pass shows

The newest question of a page wins: an older one ends between two layers. A tensor is only touched by the
model's thread, which computes on one core: for small models a second one costs more than it brings.
"""

import asyncio
import base64
import gc
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from clearhead.generation.decode import END_OF_TEXT, Decoding, expects_frame
from clearhead.generation.sample import Sampling, check_finite, choose, seen_tokens
from clearhead.generation.special_ids import leave_only, leave_out, published_ids
from clearhead.inspector.passes import Look, Pass, Passes, Question
from clearhead.inspector.provenance import Cell, Unknown, explain
from clearhead.inspector.record import Edit
from clearhead.inspector.spelling import Speller, piece_dicts
from clearhead.inspector.sweeps import Change, head_changes, logits_with, row_changes
from clearhead.inspector.views import manifest, map_rows, mean_scores
from clearhead.model.transformer import Transformer
from clearhead.server.run_view import RunView
from clearhead.server.wire import to_bytes
from clearhead.text.foreign import AnyTokenizer

P = ParamSpec("P")
R = TypeVar("R")

LONGEST_TEXT = 20_000  # characters
LONGEST_FOREIGN = 4_096  # tokens of a model that does not say how many it takes
MOST_NEW_TOKENS = 1_024
MOST_EDITS = 64
MOST_SPOKEN = 512
MOST_WAITING = 64  # requests
SAYING = ("lm", "masked", "sequence", "token", "span")  # heads whose output is logits
WORDS = 100  # of the likeliest next tokens, sent with a summary
ALTERNATIVES = 10


class Stale(Exception):
    """A newer question has come."""


class Busy(Exception):
    """Too many requests wait."""


@dataclass(frozen=True)
class Read:
    """Tokens of a text, and how many of them stand before and after it."""

    ids: tuple[int, ...]
    before: int = 0
    after: int = 0


@dataclass(frozen=True)
class Spoken:
    """With which words a pass was asked for; no words where it was asked with ids."""

    read: Read
    source: Read | None
    text: str | None
    source_text: str | None


class Session:
    """A model, its tokenizer, and what was asked of them."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: AnyTokenizer | None,
        text: str | None = None,
        source: str | None = None,
        name: str = "model",
        run: RunView | None = None,
    ) -> None:
        self.model, self.tokenizer, self.name, self.run = model, tokenizer, name, run
        self.speller = Speller(tokenizer)
        self.config = model.config if isinstance(model, Transformer) else None
        self.max_len = LONGEST_FOREIGN if self.config is None else self.config.max_len
        self.two_sided = self.config is not None and self.config.shape == "encoder-decoder"
        self.newest: OrderedDict[str, int] = OrderedDict()  # of each page
        self.spoken: OrderedDict[str, Spoken] = OrderedDict()  # by the number of the pass
        self.waiting = 0
        self.threads_before = torch.get_num_threads()
        self.thread = ThreadPoolExecutor(
            1, "clearhead-model", initializer=torch.set_num_threads, initargs=(1,)
        )
        self.text, self.source = (
            text or self._some_text(),
            source or (self._some_text() if self.two_sided else ""),
        )
        self.passes: Passes
        self.manifest: dict[str, Any]
        self.first: bytes
        self.thread.submit(self._open).result()
        gc.collect()
        gc.freeze()  # a pass makes thousands of objects; the collector need not walk the libraries' each time

    def _open(self) -> None:
        example = self.question(
            {"text": self.text, "source": self.source} if self.two_sided else {"text": self.text}
        )
        self.passes = Passes(self.model, example, None if self.run is None else self.run.put)
        outline = self.passes.outline
        operations: dict[str, tuple[str, list[str]]] = {}
        for value_name, value in outline.values.items():
            try:
                cell = explain(outline, value_name, (0,) * value.dim())
            except (Unknown, ValueError, KeyError):
                continue  # the manifest then says what the pass itself shows
            operations[value_name] = cell.made.op, _operands(cell)
        self.manifest = manifest(
            self.model, self.tokenizer, outline, name=self.name, operations=operations
        ) | {"start_id": self.start_id if self.two_sided else None}
        self.first = self._first(example)

    def _first(self, example: Question) -> bytes:
        body = {"text": self.text, "source": self.source}
        read, found = self._read_both(body), self.passes.run(example)
        self._remember(found, body, *read)
        return self.summary(found, None, *read)

    def _remember(self, found: Pass, body: dict[str, Any], read: Read, source: Read | None) -> None:
        """Keep with which words a pass was asked for."""
        texts = [body.get(key) if isinstance(body.get(key), str) else None for key in ("text", "source")]
        self.spoken[found.id] = Spoken(read, source, texts[0], texts[1])
        self.spoken.move_to_end(found.id)
        while len(self.spoken) > MOST_SPOKEN:
            self.spoken.popitem(last=False)

    def _some_text(self) -> str:
        """What is looked at when nobody says what."""
        if self.tokenizer is None:
            return "0 1 2 3"
        return "The quick brown fox jumps over the lazy dog"

    def close(self) -> None:
        """Stop the thread; PyTorch computes on as many as before."""
        self.thread.shutdown(wait=True, cancel_futures=True)
        torch.set_num_threads(self.threads_before)
        gc.unfreeze()

    async def call(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The answer of `work`, done by the model's thread."""
        if self.waiting >= MOST_WAITING:
            raise Busy("too many requests are waiting; try again in a moment")
        self.waiting += 1
        try:
            return await asyncio.wrap_future(self.thread.submit(work, *args, **kwargs))
        finally:
            self.waiting -= 1

    # ------------------------------------------------------------------------------------ reading a question

    @property
    def start_id(self) -> int:
        """With what the decoder of an encoder-decoder begins."""
        found = published_ids(self.model).start if isinstance(self.model, Transformer) else None
        if found is None and self.tokenizer is not None:
            found = self.tokenizer.special_tokens.get(END_OF_TEXT)
        return found or 0

    def tokens_of(self, text: str, as_source: bool = False) -> Read:
        """The tokens of a text, as `generate` reads it; without a tokenizer a text is numbers."""
        if len(text) > LONGEST_TEXT:
            raise ValueError(f"the text has {len(text)} characters; at most {LONGEST_TEXT} are read")
        start = (self.start_id,) if self.two_sided and not as_source else ()
        if self.tokenizer is None:
            numbers = text.replace(",", " ").split()
            if not all(number.isdecimal() and len(number) < 10 for number in numbers):
                raise ValueError(
                    "this model has no tokenizer; its text is token ids, numbers with spaces between"
                )
            return Read((*start, *map(int, numbers)), len(start))
        bare = self.tokenizer.encode(text)
        if self.two_sided and not as_source:
            return Read((*start, *bare), len(start))
        framed = isinstance(self.model, Transformer) and (
            expects_frame(self.model) or self.model.config.shape == "encoder"
        )
        if not framed:
            return Read(tuple(bare))
        whole = self.tokenizer.encode_sentence(text)
        extra = len(whole) - len(bare)
        before = next((n for n in range(extra + 1) if whole[n : n + len(bare)] == bare), 0)
        return Read(tuple(whole), before, extra - before)

    def _read(self, body: dict[str, Any], text_key: str, ids_key: str, as_source: bool) -> Read:
        ids, text = body.get(ids_key), body.get(text_key)
        if ids is not None:
            if not isinstance(ids, list) or not all(type(token) is int for token in ids):
                raise ValueError(f"{ids_key} should be a list of token ids")
            read = Read(tuple(ids))
        elif isinstance(text, str):
            read = self.tokens_of(text, as_source)
        else:
            raise ValueError(f"give {text_key}, a text, or {ids_key}, a list of token ids")
        what = "source" if as_source else "text"
        if not read.ids:
            raise ValueError(f"the {what} is empty; give at least one token")
        if len(read.ids) > self.max_len:
            raise ValueError(
                f"the {what} has {len(read.ids)} tokens; the model takes at most {self.max_len} (max_len)"
            )
        size = self._vocab_size(as_source)
        for token in read.ids:
            if not 0 <= token < size:
                raise ValueError(f"token id {token} is outside the model's vocabulary 0..{size - 1}")
        return read

    def _vocab_size(self, as_source: bool) -> int:
        if self.config is None:
            return 1 << 31 if self.tokenizer is None else self.tokenizer.vocab_size
        return (
            (self.config.source_vocab_size or self.config.vocab_size) if as_source else self.config.vocab_size
        )

    def _read_both(self, body: dict[str, Any]) -> tuple[Read, Read | None]:
        if not self.two_sided:
            return self._read(body, "text", "ids", False), None
        return self._read(body, "text", "ids", False), self._read(body, "source", "source_ids", True)

    def question(self, body: dict[str, Any]) -> Question:
        """The question of a request. Raises ValueError for one that cannot be answered."""
        read, source = self._read_both(body)
        plain = Question(read.ids, None if source is None else source.ids, step=self._step(body))
        edits, key = self._read_edits(body.get("edits") or [], plain)
        return replace(plain, edits=edits, edit_key=key)

    def _step(self, body: dict[str, Any]) -> int | None:
        """The step of the training whose weights are asked for; of a run the newest, if none is named."""
        if self.run is not None:
            return self.run.step(body.get("step"))
        if body.get("step") is not None:
            raise ValueError("this model is not a run of clearhead train; it has no steps to go back to")
        return None

    def _read_edits(self, edits: object, plain: Question) -> tuple[tuple[Edit, ...], str]:
        if not isinstance(edits, list) or len(edits) > MOST_EDITS:
            raise ValueError(f"edits should be a list of at most {MOST_EDITS}")
        made, keys = [], []
        for edit in edits:
            if (
                not isinstance(edit, dict)
                or not isinstance(edit.get("name"), str)
                or not isinstance(edit.get("kind"), str)
            ):
                raise ValueError("an edit is {name, kind, at, value}")
            at, value = edit.get("at") or [], edit.get("value")
            if not isinstance(at, list) or not all(place is None or type(place) is int for place in at):
                raise ValueError("the place of an edit is a list of numbers and nulls")
            name, kind = edit["name"], edit["kind"]
            keys.append([name, kind, at, value])
            if kind == "freeze":  # whatever else is changed, this stays as in the unedited pass
                if value is not None:
                    raise ValueError("an edit of kind 'freeze' takes no value")
                made.append(Edit(name, "patch", tuple(at), self.passes.value(self.passes.run(plain), name)))
            else:
                made.append(Edit(name, kind, tuple(at), self._edit_value(name, kind, value)))
        return tuple(made), repr(keys) if keys else ""

    def _edit_value(self, name: str, kind: str, value: object) -> float | Tensor | None:
        """A number, numbers, or for a patch {"trace": id}: the same value of another pass."""
        if isinstance(value, dict) and isinstance(value.get("trace"), str):
            return self.passes.value(self.passes.find(value["trace"]), name)
        if value is None:
            return None
        if isinstance(value, float) or (type(value) is int and abs(value) < 1 << 100):
            return float(value)
        if isinstance(value, list) and kind != "patch":
            try:
                return torch.tensor(value, dtype=torch.float32)
            except (TypeError, ValueError):
                pass
        raise ValueError("the value of an edit is a number, a list of numbers, or for a patch {trace: id}")

    # ---------------------------------------------------------------------------------------- answering

    def note(self, client: str, seq: int) -> None:
        """A page has asked its question number `seq`."""
        self.newest[client] = max(seq, self.newest.get(client, seq))
        self.newest.move_to_end(client)
        while len(self.newest) > 256:
            self.newest.popitem(last=False)

    def trace(self, body: dict[str, Any], client: str, seq: int | None) -> bytes:
        """The summary of the pass that a request asks for; `Stale` when a newer question has come."""

        def stop() -> None:
            if seq is not None and seq < self.newest.get(client, seq):
                raise Stale

        stop()
        began = time.perf_counter()
        read, source = self._read_both(body)
        try:
            question = self.question(body)
            found = self.passes.run(question, stop)
        except (RuntimeError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError) or "memory" in str(error):
                raise MemoryError("the memory does not suffice for this text; make it shorter") from None
            raise ValueError(f"the model cannot take this text: {str(error).splitlines()[0]:.200}") from None
        self._remember(found, body, read, source)
        return self.summary(found, body.get("select"), read, source, time.perf_counter() - began)

    def summary(
        self, found: Pass, select: object, read: Read, source: Read | None, seconds: float | None = None
    ) -> bytes:
        """What the map shows of a pass."""
        position = found.length - 1 if select is None else self._position(found, select)
        tensors: dict[str, Tensor] = {}
        main = self.passes.main
        if found.lens is not None:
            tensors |= {"lens.id": found.lens.ids, "lens.p": found.lens.p}
        if main is not None:
            tensors["norm"] = found.norms[main["name"]]
        tensors |= self._lines(found, position)
        for prefix, looks in self.groups().items():
            heads = [found.heads[look.path] for look in looks]
            tensors[f"{prefix}heads"] = torch.stack([each.picture for each in heads])
            tensors[f"{prefix}scores"] = torch.stack([mean_scores(each.scores) for each in heads])
        metadata: dict[str, Any] = {
            "trace": found.id,
            "ms": f"{1000 * (found.seconds if seconds is None else seconds):.2f}",
            "delta": "" if found.delta is None else f"{found.delta:.3g}",
            "head": self.manifest["head"],
            "select": str(position),
            "step": "" if found.question.step is None else str(found.question.step),
            "weights": "" if self.run is None else self.run.place(found.question.step),
            "length": str(found.length),
            "rows": [] if main is None else map_rows(main),
            "ids": list(found.question.ids),
            "pieces": piece_dicts(self.speller.pieces(found.question.ids, read.before, read.after)),
            "source_pieces": "",
            "source_ids": "",
            "source_rows": "",
            "words": self._words(found, tensors.get("logits")),
        }
        if source is not None:
            tensors["source.norm"] = found.norms["encoder"]
            metadata |= {
                "source_pieces": piece_dicts(self.speller.pieces(source.ids, source.before, source.after)),
                "source_ids": list(source.ids),
                "source_rows": map_rows(self.passes.stacks[0]),
            }
        return to_bytes(tensors, metadata)

    def lines(self, number: str, position: int) -> bytes:
        """Where another position looks, and what the model says there."""
        found = self.passes.find(number)
        tensors = self._lines(found, self._position(found, position))
        words = self._words(found, tensors.get("logits"), with_lens=False)
        return to_bytes(tensors, {"trace": found.id, "select": str(position), "words": words})

    def _position(self, found: Pass, select: object) -> int:
        if type(select) is not int or not 0 <= select < found.length:
            raise ValueError(f"select={select!r:.20} should be a position from 0 to {found.length - 1}")
        return select

    def groups(self) -> dict[str, list[Look]]:
        """The attentions of the main stack, those across, and those of the encoder beside it."""
        if self.passes.main is None:
            return {}
        main, groups = self.passes.main["name"], {}
        for look in self.passes.looks:
            prefix = "cross." if look.cross else "" if look.stack == main else "source."
            groups.setdefault(prefix, []).append(look)
        return groups

    def _lines(self, found: Pass, position: int) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        names = {"": "lines", "cross.": "cross", "source.": "source.lines"}
        for prefix, looks in self.groups().items():
            here = found.heads[looks[0].path].scores.shape[1] - 1 if prefix == "source." else position
            rows = [self.passes.line(found, look, here).float() for look in looks]
            width = max(max(row.shape[-1] for row in rows), found.length if not prefix else 0)
            padded = [torch.nn.functional.pad(row, (0, width - row.shape[-1])) for row in rows]
            tensors[names[prefix]] = torch.stack(padded)
        if found.output.is_floating_point() and found.output.dim() in (1, 2):
            per_position = found.output.dim() == 2 and len(found.output) == found.length
            says = self.manifest["head"] in SAYING
            tensors["logits" if says else "output"] = (
                found.output[position] if per_position else found.output
            ).float()
        return tensors

    def _words(self, found: Pass, logits: Tensor | None, with_lens: bool = True) -> dict[int, str]:
        """The texts of the tokens that a reader is about to see."""
        if self.manifest["head"] not in ("lm", "masked"):
            return {}
        ids: list[int] = []
        if with_lens and found.lens is not None:
            ids += found.lens.ids.unique().tolist()
        if logits is not None:
            ids += logits.topk(min(WORDS, len(logits))).indices.tolist()
        return self.speller.words(ids)

    def cell(self, number: str, name: str, index: tuple[int, ...]) -> dict[str, Any]:
        """How one number was made."""
        found = self.passes.find(number)
        trace = self.passes.trace_of(found, name)
        try:
            return explain(trace, name, index).to_dict()
        except Unknown as error:  # the number itself is known
            value, axes = float(trace.values[name][index]), list(trace.nodes[name].axes)
            return {"name": name, "index": list(index), "axes": axes, "value": value, "unknown": str(error)}

    def tokenize(self, text: str) -> dict[str, Any]:
        """The tokens of a text, and the merges that built each."""
        read = self.tokens_of(text)
        return {
            "ids": list(read.ids),
            "pieces": piece_dicts(self.speller.pieces(read.ids, read.before, read.after)),
            "merges": [self.speller.merges(token) for token in read.ids],
        }

    def page(self) -> dict[str, Any]:
        """What the page opens with: the manifest and the first trace; of a run that of its newest step."""
        if self.run is not None:
            self.first = self._first(self.question({"text": self.text}))
        return {
            "manifest": self.manifest,
            "trace": {"data": base64.b64encode(self.first).decode("ascii")},
            "text": self.text,
            "source": self.source,
            "run": None if self.run is None else self.run.run.path.resolve().name,
        }

    # ---------------------------------------------------------------------------------------- generating

    async def generate(
        self, question: Question, sampling: Sampling, n_new: int
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Tokens one by one, drawn as `generate` draws them, each with the trace it was drawn from."""
        model = self.model
        assert isinstance(model, Transformer)
        rows = [list(question.source if self.two_sided and question.source else question.ids)]
        rules = Decoding(
            model,
            rows,
            sampling,
            tokenizer=self.tokenizer,
            max_new_tokens=n_new,
            start_id=self.start_id if self.two_sided else None,
        )
        generator = sampling.generator(self.passes.device)
        ids, text = list(question.ids), None if self.tokenizer is None else self.tokenizer.stream(True)
        banned, ends = rules.special.banned, rules.special.ends or ()

        def step(made: int) -> dict[str, Any]:
            found = self.passes.run(replace(question, ids=tuple(ids)))
            logits = found.output[-1:]
            check_finite(logits, made + 1)
            allowed = leave_out(logits, banned)
            if made + 1 == n_new and rules.special.last is not None:
                allowed = leave_only(logits, rules.special.last)
            elif made == 0 and rules.special.first is not None:
                allowed = leave_only(logits, rules.special.first)
            said = torch.tensor([ids], device=logits.device)
            seen = None
            if sampling.repetition_penalty != 1:
                seen = seen_tokens(said, torch.ones_like(said, dtype=torch.bool), logits.shape[-1])
            token = int(choose(allowed, sampling, seen, generator))
            logs = logits[0].float().log_softmax(-1)
            top = logs.topk(min(ALTERNATIVES, len(logs)))
            ids.append(token)
            return {
                "id": token,
                "text": self.speller.word(token) if text is None else text.feed(token),
                "piece": self.speller.word(token),
                "logprob": float(logs[token]),
                "alternatives": [
                    [other, self.speller.word(other), float(p)]
                    for other, p in zip(top.indices.tolist(), top.values.exp().tolist(), strict=True)
                ],
                "trace": found.id,
                "delta": found.delta,
            }

        reason = "length"
        for made in range(n_new):
            event = await self.call(step, made)
            yield event
            if event["id"] in ends:
                reason = "end"
                break
        rest = "" if text is None else text.flush()
        yield {"done": reason, "rest": rest}

    async def sweep(self, question: Question, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """What each change does to one word: first the number of changes, then one by one."""

        def begin() -> tuple[Pass, list[Change], int, int, float]:
            found = self.passes.run(question)
            select = body.get("select")
            position = found.length - 1 if select is None else self._position(found, select)
            if body.get("what", "heads") == "heads":
                changes = head_changes(self.passes)
            elif body["what"] == "rows" and isinstance(body.get("from"), str):
                changes = row_changes(self.passes, found, self.passes.find(body["from"]))
            else:
                raise ValueError("what is swept is 'heads', or 'rows' with from, the id of another trace")
            logits = logits_with(self.passes, question, None, position)
            if self.manifest["head"] not in SAYING:
                raise ValueError("this model has no logits that a change could move")
            word = body.get("word")
            if word is not None and (type(word) is not int or not 0 <= word < len(logits)):
                raise ValueError(f"word={word!r:.20} should be a token id from 0 to {len(logits) - 1}")
            word = int(logits.argmax()) if word is None else word
            return found, changes, position, word, float(logits[word])

        def step(change: Change) -> float:
            return float(logits_with(self.passes, question, change, position)[word])

        found, changes, position, word, base = await self.call(begin)
        yield {
            "all": len(changes),
            "trace": found.id,
            "select": position,
            "word": word,
            "text": self.speller.word(word),
            "logit": base,
        }
        for done, change in enumerate(changes, 1):
            logit = await self.call(step, change)
            yield {"done": done, **change.place, "logit": logit, "change": logit - base}
        yield {"finished": len(changes)}

    def sampling(self, values: object) -> Sampling:
        """How tokens are chosen, from a request."""
        if values is None:
            return Sampling()
        known = asdict(Sampling())
        if not isinstance(values, dict) or set(values) - set(known):
            raise ValueError(f"sampling takes {', '.join(known)}")
        for key, value in values.items():
            numbers = int if key in ("top_k", "seed") else int | float
            if not (value is None and key == "seed") and (
                isinstance(value, bool) or not isinstance(value, numbers)
            ):
                raise ValueError(f"sampling.{key}={value!r:.20} should be a number")
        if values.get("temperature", 0) == 0:  # sliders without an effect are no mistake on a page
            values = {key: value for key, value in values.items() if key not in ("top_k", "top_p", "min_p")}
        whole = ("top_k", "seed")
        try:
            chosen: dict[str, Any] = {k: v if k in whole else float(v) for k, v in values.items()}
            return Sampling(**chosen)
        except OverflowError:
            raise ValueError("sampling takes numbers of an ordinary size") from None


def _operands(cell: Cell) -> list[str]:
    """The values that a cell is made of, each once."""
    names = [factor.name for term in cell.made.terms for factor in term if factor.name]
    if cell.made.bias is not None and cell.made.bias.name:
        names.append(cell.made.bias.name)
    return list(dict.fromkeys(names))


def new_tokens(session: Session, question: Question, n_new: object) -> int:
    """How many tokens a request asks for; ValueError if they do not fit."""
    if type(n_new) is not int or not 1 <= n_new <= MOST_NEW_TOKENS:
        raise ValueError(f"n={n_new!r:.20} should be a number of tokens from 1 to {MOST_NEW_TOKENS}")
    room = session.max_len - len(question.ids)
    if n_new > room:
        raise ValueError(
            f"n={n_new} tokens do not fit; the model takes {session.max_len} in all, {room} more"
        )
    return n_new
