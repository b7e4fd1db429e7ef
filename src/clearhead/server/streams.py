"""What is told piece by piece: tokens as they are drawn, and sweeps as they get on.

Between two pieces the model is free for others, and whoever stops listening stops the work.
"""

from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import torch

from clearhead.generation.decode import Decoding
from clearhead.generation.sample import Sampling, check_finite, choose, seen_tokens
from clearhead.generation.special_ids import leave_only, leave_out
from clearhead.inspector.passes import Question
from clearhead.inspector.sweeps import Change, head_changes, logits_with, row_changes
from clearhead.model.transformer import Transformer
from clearhead.server.session import Session
from clearhead.server.summary import SAYING, position_in

ALTERNATIVES = 10


async def generate(
    session: Session, question: Question, sampling: Sampling, n_new: int
) -> AsyncGenerator[dict[str, Any], None]:
    """Tokens one by one, drawn as `generate` draws them, each with the trace it was drawn from."""
    model, passes, speller, reader = session.model, session.passes, session.speller, session.reader
    assert isinstance(model, Transformer)
    rows = [list(question.source if reader.two_sided and question.source else question.ids)]
    rules = Decoding(
        model,
        rows,
        sampling,
        tokenizer=session.tokenizer,
        max_new_tokens=n_new,
        start_id=reader.start_id if reader.two_sided else None,
    )
    generator = sampling.generator(passes.device)
    ids, text = list(question.ids), None if session.tokenizer is None else session.tokenizer.stream(True)
    banned, ends = rules.special.banned, rules.special.ends or ()

    def step(made: int) -> dict[str, Any]:
        found = passes.run(replace(question, ids=tuple(ids)))
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
            "text": speller.word(token) if text is None else text.feed(token),
            "piece": speller.word(token),
            "logprob": float(logs[token]),
            "alternatives": [
                [other, speller.word(other), float(p)]
                for other, p in zip(top.indices.tolist(), top.values.exp().tolist(), strict=True)
            ],
            "trace": found.id,
            "delta": found.delta,
        }

    reason = "length"
    for made in range(n_new):
        event = await session.call(step, made)
        yield event
        if event["id"] in ends:
            reason = "end"
            break
    rest = "" if text is None else text.flush()
    yield {"done": reason, "rest": rest}


async def sweep(
    session: Session, question: Question, body: dict[str, Any]
) -> AsyncGenerator[dict[str, Any], None]:
    """What each change does to one word: first the number of changes, then one by one."""
    changes, about = await session.call(prepare_sweep, session, question, body)
    word, position, base = about["word"], about["select"], about["logit"]

    def step(change: Change) -> float:
        return float(logits_with(session.passes, question, change, position)[word])

    yield about
    for done, change in enumerate(changes, 1):
        logit = await session.call(step, change)
        yield {"done": done, **change.place, "logit": logit, "change": logit - base}
    yield {"finished": len(changes)}


def prepare_sweep(
    session: Session, question: Question, body: dict[str, Any]
) -> tuple[list[Change], dict[str, Any]]:
    """The changes of a sweep, and what is known before the first of them."""
    passes, word = session.passes, body.get("word")
    found = passes.run(question)
    select = body.get("select")
    position = found.length - 1 if select is None else position_in(found, select)
    if body.get("what", "heads") == "heads":
        changes = head_changes(passes)
    elif body["what"] == "rows" and isinstance(body.get("from"), str):
        side, other = session.find(body["from"])
        changes = row_changes(passes, found, side.passes, other)
    else:
        raise ValueError("what is swept is 'heads', or 'rows' with from, the id of another trace")
    logits = logits_with(passes, question, None, position)
    if session.manifest["head"] not in SAYING:
        raise ValueError("this model has no logits that a change could move")
    if word is not None and (type(word) is not int or not 0 <= word < len(logits)):
        raise ValueError(f"word={word!r:.20} should be a token id from 0 to {len(logits) - 1}")
    word = int(logits.argmax()) if word is None else word
    return changes, {
        "all": len(changes),
        "trace": found.id,
        "select": position,
        "word": word,
        "text": session.speller.word(word),
        "logit": float(logits[word]),
    }
