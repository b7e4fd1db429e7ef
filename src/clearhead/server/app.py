"""The HTTP app behind the page: the page itself, and what it asks about the model.

    GET  /                         the page, with the manifest and the first trace in it
    GET  /page/...                 its files
    GET  /api/model                the manifest              GET  /api/vocab     the text of every token
    POST /api/tokenize             tokens, bytes, merges
    POST /api/trace                a pass, as the map shows it
    GET  /api/trace/ID/lines       where another position looks
    GET  /api/trace/ID/delta       how far generate() is from it
    GET  /api/trace/ID/watch       what every row of the map says of some tokens
    GET  /api/trace/ID/t/NAME      a slice of a value        GET  /api/w/NAME    a slice of a weight
    GET  /api/trace/ID/cell/NAME   how one number was made   GET  /api/source/KEY
    GET  /api/trace/ID/near/NAME   rows of a table near one  GET  /api/trace/ID/origins   depths of a word
    POST /api/generate             tokens one by one, as server-sent events
    POST /api/sweep                every head off, or every row patched, as server-sent events
    GET  /api/export/ID.KIND       safetensors, csv, py, html

Errors are {"error": one line}: 400 for what cannot be answered, 404 for what is not there, 409 when a newer
question has come, 503 when too many wait.
"""

import json
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse

from clearhead.inspector.passes import Question
from clearhead.inspector.trace import source_text
from clearhead.inspector.views import cut
from clearhead.server import export
from clearhead.server.guard import Guard, answer
from clearhead.server.page_files import index_html, page_file
from clearhead.server.reading import read_sampling
from clearhead.server.session import Busy, Session, Stale
from clearhead.server.streams import generate as generated
from clearhead.server.streams import sweep
from clearhead.server.wire import for_html, to_bytes, to_json

META = '<meta name="clearhead-token" content="">'
FIRST = '<script type="application/json" id="first"></script>'
FOREVER = {"cache-control": "private, max-age=3600"}  # a trace never changes
NEVER = {"cache-control": "no-store"}


def create_app(session: Session, *, key: str | None = None, framed: bool = False) -> FastAPI:
    """The app of one session. `key`: what every request must have; `framed`: notebooks may show the page."""
    token = secrets.token_urlsafe(24)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        session.close()

    app = FastAPI(lifespan=lifespan, docs_url=None, redoc_url=None, openapi_url=None)
    app.state.session, app.state.token = session, token
    app.add_middleware(Guard, token=token, key=key, framed=framed)
    app.add_exception_handler(HTTPException, on_http)
    for kind in (ValueError, KeyError, Stale, Busy, MemoryError):
        app.add_exception_handler(kind, on_error)
    add_page(app, session, token)
    add_traces(app, session)
    add_values(app, session)
    return app


def on_http(request: Request, error: Exception) -> Response:
    """What is not there, or not with this method."""
    assert isinstance(error, HTTPException)
    return answer(error.status_code, f"{error.detail}".lower())


def on_error(request: Request, error: Exception) -> Response:
    """A mistake in what was asked, as one line."""
    statuses = {Stale: 409, Busy: 503, MemoryError: 503, KeyError: 404}
    status = next((code for kind, code in statuses.items() if isinstance(error, kind)), 400)
    return answer(status, "stale" if status == 409 else str(error.args[0] if error.args else error))


def add_page(app: FastAPI, session: Session, token: str) -> None:
    """The page and its files."""

    @app.get("/")
    async def page() -> Response:
        text = index_html()
        first = for_html(await session.call(session.page))
        text = text.replace(META, META.replace('""', f'"{token}"'), 1)
        text = text.replace(FIRST, FIRST.replace("></script>", f">{first}</script>"), 1)
        return HTMLResponse(text, headers=NEVER)

    @app.get("/page/{path:path}")
    async def file_of_the_page(path: str) -> Response:
        return page_file(path)

    @app.get("/favicon.ico")
    async def icon() -> Response:
        return Response(status_code=204)

    @app.get("/health")
    async def health() -> Response:
        return PlainTextResponse("ok")

    @app.get("/api/model")
    async def model() -> Response:
        return reply(session.manifest)

    @app.get("/api/vocab")
    async def vocabulary() -> Response:
        config = session.config
        size = 0 if config is None else config.vocab_size
        return reply(await session.call(session.speller.vocabulary, size))

    @app.get("/api/source/{key:path}")
    async def source(key: str) -> Response:
        known = {value["source"]["key"] for value in session.manifest["values"]}
        if key not in known:
            raise KeyError("this is no file that a value of the model comes from")
        return PlainTextResponse(source_text(key, session.model), headers=NEVER)


async def streamed(events: AsyncGenerator[Any, None]) -> Response:
    """Events as they come. A mistake in what was asked shows at the first: it is an answer of its own."""
    first = await anext(events)

    async def stream() -> AsyncIterator[str]:
        yield f"data: {to_json(first)}\n\n"
        try:
            async for event in events:
                yield f"data: {to_json(event)}\n\n"
        except (ValueError, Busy) as error:
            yield f"data: {to_json({'error': str(error)})}\n\n"
        finally:
            await events.aclose()

    return StreamingResponse(stream(), media_type="text/event-stream", headers=NEVER)


def add_traces(app: FastAPI, session: Session) -> None:
    """Passes of the model."""

    @app.post("/api/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read(request)
        if not isinstance(body.get("text"), str):
            raise ValueError("give text, a string")
        return reply(await session.call(session.tokenize, body["text"]))

    @app.post("/api/trace")
    async def trace(request: Request) -> Response:
        body = await read(request)
        seq, client = body.get("seq"), body.get("client", "")
        if seq is not None and (type(seq) is not int or not 0 <= seq < 1 << 53):
            raise ValueError("seq should be a number that grows with every question")
        if not isinstance(client, str) or len(client) > 100:
            raise ValueError("client should be a short text")
        if seq is not None:
            session.note(client, seq)
        return tensors(await session.call(session.trace, body, client, seq), NEVER)

    @app.get("/api/trace/{number}/lines")
    async def lines(number: str, at: str = "") -> Response:
        return tensors(await session.call(session.lines, number, whole_number(at)), FOREVER)

    @app.get("/api/trace/{number}/delta")
    async def delta(number: str) -> Response:
        return reply({"delta": await session.call(session.delta, number)}, FOREVER)

    @app.get("/api/trace/{number}/watch")
    async def watch(number: str, ids: str = "") -> Response:
        tokens = [whole_number(part) for part in ids.split(".")]
        return tensors(await session.call(session.watch, number, tokens), FOREVER)

    @app.post("/api/generate")
    async def generate(request: Request) -> Response:
        body = await read(request)
        question, sampling, n_new = await session.call(ready_to_generate, session, body)
        return await streamed(generated(session, question, sampling, n_new))

    @app.post("/api/sweep")
    async def swept(request: Request) -> Response:
        body = await read(request)
        return await streamed(sweep(session, await session.call(ours, session, body), body))

    @app.get("/api/export/{file}")
    async def exported(request: Request, file: str) -> Response:
        number, _, kind = file.rpartition(".")
        asked = dict(request.query_params)
        body, media = await session.call(export.export, session, number, kind, asked)
        name = f'attachment; filename="clearhead-{number[:8]}.{kind}"'
        return Response(body, media_type=media, headers={"content-disposition": name, **NEVER})


def add_values(app: FastAPI, session: Session) -> None:
    """The numbers of a pass and of the model."""

    @app.get("/api/trace/{number}/t/{name:path}")
    async def value(number: str, name: str, request: Request) -> Response:
        asked = dict(request.query_params)

        def work() -> bytes:
            return slice_bytes(session.value(number, name), name, asked, session)

        return tensors(await session.call(work), FOREVER)

    @app.get("/api/trace/{number}/cell/{name:path}")
    async def cell(number: str, name: str, at: str = "") -> Response:
        index = tuple(whole_number(part) for part in at.split(",")) if at else ()
        return reply(await session.call(session.cell, number, name, index), FOREVER)

    @app.get("/api/trace/{number}/near/{name:path}")
    async def near(number: str, name: str, row: str = "") -> Response:
        return reply(await session.call(session.near, number, name, whole_number(row)), FOREVER)

    @app.get("/api/trace/{number}/origins")
    async def origins(number: str, at: str = "", word: str = "") -> Response:
        place = whole_number(at), whole_number(word)
        return reply(await session.call(session.origins, number, *place), FOREVER)

    @app.get("/api/w/{name:path}")
    async def weight(name: str, request: Request) -> Response:
        asked = dict(request.query_params)

        def work() -> bytes:
            side = session.ours
            if asked.get("trace"):
                side, _ = session.find(asked["trace"])  # of a run: the weights of the step of that trace
            if name not in side.passes.outline.parameters:
                raise KeyError(f"{name[:80]!r} is no parameter of this model")
            return slice_bytes(side.passes.outline.parameters[name], name, asked, session)

        return tensors(await session.call(work), FOREVER)


def slice_bytes(value: Any, name: str, asked: dict[str, str], session: Session) -> bytes:
    """The slice of a value that the query of a request asks for."""
    level, reduce = whole_number(asked.get("level", "0")), asked.get("reduce", "max")
    if reduce != "max" and reduce != "sum":
        raise ValueError(f"reduce={reduce!r:.20} is unknown; choose max or sum")
    part = cut(value, asked.get("at", ""), level, reduce, asked.get("dtype", "f32"))
    node = session.passes.outline.nodes.get(name)
    metadata = {
        "name": name,
        "shape": list(value.shape),
        "axes": [] if node is None else list(node.axes),
        "at": asked.get("at", ""),
        "level": str(level),
        "reduce": reduce,
        "low": repr(part.low),
        "high": repr(part.high),
    }
    return to_bytes({"x": part.x}, metadata)


def ready_to_generate(session: Session, body: dict[str, Any]) -> Any:
    """The question, the sampling and the number of tokens of a request to generate."""
    if not session.manifest["capabilities"]["generate"]:
        raise ValueError(f"this model ({session.manifest['shape']}) says no next token")
    if body.get("trace") is not None:
        side, found = session.find(str(body["trace"])[:80])
        if side is not session.ours:
            raise ValueError("tokens are drawn from the model that is looked at, not from the one beside it")
        question = found.question
        if question.edits:
            raise ValueError("tokens are drawn from the model as it is; switch the edits off")
    else:
        question = ours(session, {**body, "edits": []})
    n_new = session.reader.new_tokens(len(question.ids), body.get("n", 1))
    return question, read_sampling(body.get("sampling")), n_new


def ours(session: Session, body: dict[str, Any]) -> Question:
    """The question of a request to the model that is looked at."""
    return session.question({**body, "model": None})


async def read(request: Request) -> dict[str, Any]:
    """The JSON object in the body of a request. ValueError for anything else."""
    raw = await request.body()
    try:
        body = json.loads(raw, parse_constant=not_json)
    except RecursionError:
        raise ValueError("the body is nested too deeply") from None
    except ValueError as error:
        reason = (
            error.args[0]
            if isinstance(error, json.JSONDecodeError)
            else "it is not UTF-8 or holds no numbers"
        )
        raise ValueError(f"the body is not JSON: {reason:.100}") from None
    if not isinstance(body, dict):
        raise ValueError("the body should be a JSON object")
    return body


def not_json(word: str) -> NoReturn:
    """NaN and the infinities, which Python reads and JSON does not have."""
    raise json.JSONDecodeError(f"{word} is no JSON number", word, 0)


def whole_number(text: str) -> int:
    """A number from 0 on, from a query."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise ValueError(f"{text!r:.20} should be a number from 0 on")
    return int(text)


def reply(value: object, headers: dict[str, str] = NEVER) -> Response:
    """JSON."""
    return Response(to_json(value), headers=headers, media_type="application/json")


def tensors(body: bytes, headers: dict[str, str]) -> Response:
    """Safetensors bytes."""
    return Response(body, headers=headers, media_type="application/octet-stream")
