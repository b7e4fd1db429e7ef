"""Who may ask, and how much: the checks that every request passes before the app sees it.

    Host      the machine's own name, so that no page of another site reaches the server by a rebound name;
              any name if a key is set
    Origin    none, or the page's own
    key       if one is set: in a cookie, which `/?key=...` gives, or as `Authorization: Bearer ...`
    token     of this start, in the page and nowhere else; every POST carries it
    size      a body of at most 1 MB
    time      a request that does not arrive, or an answer that nobody takes, ends the connection

Answers carry a content policy under which a browser loads nothing from elsewhere. Nothing that is typed is
logged.
"""

import asyncio
import hmac
import logging
import traceback
from collections.abc import Iterator
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

import h11
from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from clearhead.server.wire import to_json

LARGEST_BODY = 1_000_000  # bytes
PIECE = 65_536  # bytes handed to a connection at once
SECONDS_TO_ARRIVE = 10.0  # a request, head and body
SECONDS_TO_LEAVE = 20.0  # what stands in the buffer of a client that does not read
COOKIE = "clearhead_key"
TOKEN = "x-clearhead-token"
HOME = ("127.0.0.1", "localhost")

POLICY = (
    "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'self'"
)
NOTEBOOKS = " http://localhost:* http://127.0.0.1:* vscode-webview:"

log = logging.getLogger("clearhead.server")


class TooLarge(Exception):
    """A body above the limit."""


def answer(status: int, error: str, headers: dict[str, str] | None = None) -> Response:
    """An error, as one line."""
    line = " ".join(error.split())[:500]
    return Response(to_json({"error": line}), status, headers, media_type="application/json")


class Guard:
    """The app behind its checks. `framed`: pages of this machine may show it inside them, as notebooks do."""

    def __init__(self, app: ASGIApp, *, token: str, key: str | None = None, framed: bool = False) -> None:
        self.app, self.token, self.key = app, token, key
        policy = POLICY + NOTEBOOKS if framed else POLICY
        self.headers = [
            (b"content-security-policy", policy.encode()),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-resource-policy", b"same-origin"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def say(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message = {**message, "headers": [*message.get("headers", []), *self.headers]}
            for part in pieces(message):
                await send(part)

        refusal = self.refuse(scope)
        if refusal is not None:
            await refusal(scope, receive, say)
            return
        try:
            await self.app(scope, limited(receive), say)
        except TooLarge:
            if not started:
                await too_large()(scope, receive, say)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # a mistake of ours; what was typed may be in its message
            place = traceback.extract_tb(error.__traceback__)[-1]
            log.error("%s in %s, line %s", type(error).__name__, place.filename, place.lineno)
            if started:
                raise ConnectionAbortedError("the answer broke off") from None
            await answer(500, f"the server made a mistake ({type(error).__name__})")(scope, receive, say)

    def refuse(self, scope: Scope) -> Response | None:
        """The answer to a request that may not pass; None to one that may."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        host = hosts[0] if len(hosts) == 1 else ""
        if not host or (self.key is None and name_of(host) not in HOME):
            return answer(
                403, "this server answers to 127.0.0.1 and localhost only; start it with a key for others"
            )
        origin = headers.get("origin")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):
            return answer(403, "the request comes from a page of another site")
        if headers.get("sec-fetch-site") == "cross-site" and scope["path"].startswith("/api/"):
            return answer(403, "the request comes from a page of another site")
        if not self.has_key(scope, headers):
            return answer(
                401, "this server wants its key: open /?key=... once, or send Authorization: Bearer"
            )
        if self.key is not None and scope["path"] == "/" and b"key=" in scope["query_string"]:
            response = RedirectResponse("/", 303, {"cache-control": "no-store"})
            response.set_cookie(COOKIE, self.key, httponly=True, samesite="strict")
            return response
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return answer(405, f"{scope['method'][:20]} is not known here")
        if scope["method"] == "POST":
            if not same(headers.get(TOKEN, ""), self.token):
                return answer(403, "the token is missing or of an earlier start; reload the page")
            length = headers.get("content-length", "0")
            if not length.isdecimal() or int(length[:20]) > LARGEST_BODY:
                return too_large()
        return None

    def has_key(self, scope: Scope, headers: Headers) -> bool:
        """Whether the request may pass without a key, or has it."""
        path = scope["path"]
        if self.key is None or path == "/health" or path.startswith("/page/"):
            return True
        given = [headers.get("authorization", "").removeprefix("Bearer ")]
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            cookie = None
        given += [cookie.value] if cookie is not None else []
        if path == "/":
            given += parse_qs(scope["query_string"].decode("latin-1")).get("key", [])
        return sum(same(each, self.key) for each in given) > 0  # all are compared: no time tells which


def same(given: str, wanted: str) -> bool:
    """Whether two secrets are equal, in a time that does not tell how far."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), wanted.encode())


def name_of(host: str) -> str:
    """The name in a Host header, without the port.

    >>> name_of("localhost:8000"), name_of("[::1]:80"), name_of(":8000")
    ('localhost', '[::1]', '')
    """
    name, colon, port = host.rpartition(":")
    return name.lower() if colon and port.isdecimal() else host.lower()


def too_large() -> Response:
    """The answer to a body above the limit."""
    return answer(413, f"the body is larger than {LARGEST_BODY} bytes", {"connection": "close"})


def pieces(message: Message) -> Iterator[Message]:
    """A large body as several messages, so that no more than one waits in the buffer of a slow client."""
    body = message.get("body", b"")
    for start in range(0, len(body) - PIECE, PIECE) if len(body) > PIECE else ():
        yield {"type": message["type"], "body": body[start : start + PIECE], "more_body": True}
    if len(body) > PIECE:
        message = {**message, "body": body[(len(body) - 1) // PIECE * PIECE :]}
    yield message


def limited(receive: Receive) -> Receive:
    """The same, but a body above the limit ends with `TooLarge`, also one that did not say its length."""
    total = 0

    async def counted() -> Message:
        nonlocal total
        message = await receive()
        total += len(message.get("body", b""))
        if total > LARGEST_BODY:
            raise TooLarge
        return message

    return counted


class Patience(H11Protocol):
    """uvicorn's protocol with deadlines: for a request to arrive, and for an answer to be taken."""

    arriving: asyncio.TimerHandle | None = None
    leaving: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self.arriving = self.loop.call_later(SECONDS_TO_ARRIVE, self.give_up)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self.await_rest(self.conn.their_state in (h11.IDLE, h11.SEND_BODY))

    def on_response_complete(self) -> None:
        super().on_response_complete()  # half of the next request may have come with this one
        if self.conn.their_state is h11.SEND_BODY or self.conn.trailing_data[0]:
            self.await_rest(self.conn.their_state in (h11.IDLE, h11.SEND_BODY))

    def await_rest(self, some_is_missing: bool) -> None:
        """Set the deadline of a request that has begun, or lift that of one that is there."""
        if some_is_missing and self.arriving is None:
            self.arriving = self.loop.call_later(SECONDS_TO_ARRIVE, self.give_up)
        elif not some_is_missing and self.arriving is not None:
            self.arriving.cancel()
            self.arriving = None

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.leaving is None:
            self.leaving = self.loop.call_later(SECONDS_TO_LEAVE, self.give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.leaving is not None:
            self.leaving.cancel()
            self.leaving = None

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self.arriving, self.leaving):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def give_up(self) -> None:
        """End the connection; what is still in its buffer is dropped."""
        self.transport.abort()
