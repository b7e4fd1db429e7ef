"""What the page asks about a run: its curves and samples, what is new, and one sentence at every step.

    GET  /api/runs/current           log, samples, steps whose weights are kept
    GET  /api/runs/current/events    what is added to them, as server-sent events
    POST /api/runs/current/story     what each kept step makes of a text: heads, next word, experts

Which step a pass is of is said in its own request: {"text": ..., "step": 400}.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response, StreamingResponse

from clearhead.inspector.passes import Question
from clearhead.inspector.views import mean_scores
from clearhead.server.app import NEVER, read, reply
from clearhead.server.run_view import RunView, Tail
from clearhead.server.session import Busy, Session
from clearhead.server.wire import to_json
from clearhead.training.norms import IDLE

PAUSE = 0.5  # seconds between two looks at the folder
QUIET = 15.0  # seconds after which a line is sent that says nothing, to see whether anybody listens


def add_run(app: FastAPI, session: Session, run: RunView) -> None:
    """The requests about a run."""

    @app.get("/api/runs/current")
    async def current() -> Response:
        return reply(await session.call(run.summary))

    @app.get("/api/runs/current/events")
    async def events(request: Request, place: str = "") -> Response:
        start = request.headers.get("last-event-id", place)
        return StreamingResponse(news(run, start[:60]), media_type="text/event-stream", headers=NEVER)

    @app.post("/api/runs/current/story")
    async def story(request: Request) -> Response:
        body = await read(request)
        questions = await session.call(questions_of, session, run, body)

        async def stream() -> AsyncIterator[str]:
            for question in questions:
                try:
                    line = await session.call(chapter, session, run, question)
                except (KeyError, ValueError, Busy) as error:  # the step was dropped in the meantime
                    line = {"step": question.step, "error": str(error.args[0] if error.args else error)}
                yield f"data: {to_json(line)}\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream", headers=NEVER)


async def news(run: RunView, place: str) -> AsyncGenerator[str, None]:
    """Events: new lines of the log, and steps and samples when they changed. `anew`: ask for all again."""
    tail = Tail(run.run.metrics_file, place)
    known: dict[str, Any] = {}
    silent = 0.0
    while True:
        anew, entries = await asyncio.to_thread(tail.read)
        event: dict[str, Any] = {"lines": entries} if entries else {}
        if anew and place:
            event = {"anew": True}
        place = tail.place
        now = await asyncio.to_thread(changing, run)
        event |= {name: value for name, value in now.items() if known.get(name) != value}
        known = now
        if event:
            yield f"id: {tail.place}\ndata: {to_json(event)}\n\n"
            silent = 0.0
        elif silent >= QUIET:
            yield ": nothing new\n\n"
            silent = 0.0
        await asyncio.sleep(PAUSE)
        silent += PAUSE


def changing(run: RunView) -> dict[str, Any]:
    """What an event tells when it has changed."""
    try:
        return {"milestones": list(run.folders()), "newest": run.newest(), "samples": run.samples()}
    except OSError:
        return {}


def questions_of(session: Session, run: RunView, body: dict[str, Any]) -> list[Question]:
    """The question of a request at every kept step."""
    return [session.question({**body, "edits": [], "step": step}) for step in run.folders()]


def chapter(session: Session, run: RunView, question: Question) -> dict[str, Any]:
    """What one step makes of a text.

    scores: of every head, averaged over the text (layer, head, score); id, word, p: the likeliest next token;
    loss: nats per token of the text itself; experts: layer -> tokens that went to each; idle: layer -> share
    of the hidden units that no token of the text brings above a thousandth of the layer's root mean square;
    moved: how far each part of the model has come since the kept step before.
    """
    assert question.step is not None
    about = {"step": question.step, "moved": run.moved(question.step)}
    version = run.put(question.step)
    known = run.stories.get((version, question.ids))
    if known is not None:
        return known | about
    passes = session.passes
    found = passes.run(question)
    looks = [look for look in passes.looks if look.stack == passes.main_name and not look.cross]
    logs = found.output.float().log_softmax(-1)
    p, token = logs[-1].exp().max(0)
    targets = list(question.ids[1:])
    experts: dict[str, list[int]] = {}
    idle: dict[str, float] = {}
    for layer in (passes.main or {"layers": []})["layers"]:
        ff = layer.get("feed_forward") or {}
        if ff.get("kind") == "experts":
            chosen = passes.value(found, f"{ff['path']}.chosen").flatten().long()
            experts[ff["path"]] = chosen.bincount(minlength=ff["n_experts"]).tolist()
        elif ff.get("kind") in ("gated", "plain"):
            hidden = passes.value(found, f"{ff['path']}.hidden")[0].float()
            awake = hidden.abs().amax(0) > IDLE * hidden.square().mean().sqrt()
            idle[ff["path"]] = 1 - float(awake.float().mean())
    line = {
        "trace": found.id,
        "scores": [mean_scores(found.heads[look.path].scores).tolist() for look in looks],
        "id": int(token),
        "word": session.speller.word(int(token)),
        "p": float(p),
        "loss": -float(logs[range(len(targets)), targets].mean()) if targets else None,
        "experts": experts,
        "idle": idle,
    }
    run.remember(version, question, line)
    return line | about
