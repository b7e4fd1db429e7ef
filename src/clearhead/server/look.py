"""look(model, tokenizer, text): the page of a model, served from this process until it is closed.

    seen = look(model, tokenizer, "The quick brown fox")
    seen.url  # open it in a browser; in a notebook the last line of a cell shows the page itself
    seen.close()

The server listens on this machine only. Another address needs a key, which every request must then have.
"""

import html
import ipaddress
import logging
import socket
import threading
from types import TracebackType

import uvicorn
from torch import nn

from clearhead.server.app import create_app
from clearhead.server.guard import Patience
from clearhead.server.run_view import RunView
from clearhead.server.runs import add_run
from clearhead.server.session import Session
from clearhead.server.sides import Given
from clearhead.text.foreign import AnyTokenizer

PORT = 8765
MOST_CONNECTIONS = 256
LARGEST_HEAD = 32_768  # bytes of a request's line and headers


class Looking:
    """A page that is being served; `close` ends it. Also a context manager."""

    def __init__(
        self, session: Session, server: uvicorn.Server, sock: socket.socket, key: str | None
    ) -> None:
        self.session, self.server, self.sock, self.key = session, server, sock, key
        self.url = url_of(sock)
        self.thread: threading.Thread | None = None

    def start(self) -> "Looking":
        """Serve in a thread of its own; return when the port answers. It listens already."""
        self.thread = threading.Thread(target=self.run, name="clearhead-look", daemon=True)
        self.thread.start()
        return self

    def run(self) -> None:
        """Serve until `close`, or Ctrl-C in the main thread."""
        self.server.run(sockets=[self.sock])

    def close(self) -> None:
        """Stop serving. What is being sent is finished first, for a second at most."""
        self.server.should_exit = True
        if self.thread is not None:
            self.thread.join(timeout=10)
        else:
            self.session.close()
        self.sock.close()

    def __enter__(self) -> "Looking":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{self.session.name} at {self.url}>"

    def _repr_html_(self) -> str:
        name, url = html.escape(self.session.name), html.escape(self.url, quote=True)
        style = "width:100%;height:860px;border:1px solid #ccc"
        return f'<iframe src="{url}" title="look inside {name}" style="{style}"></iframe>'


def look(
    model: nn.Module,
    tokenizer: AnyTokenizer | None = None,
    text: str | None = None,
    *,
    source: str | None = None,
    name: str = "model",
    host: str = "127.0.0.1",
    port: int = 0,
    key: str | None = None,
    compare: nn.Module | None = None,
) -> Looking:
    """Serve the page of a model and return at once; `text` is what it opens with.

    `source`: what an encoder-decoder reads at first. `port`: 0 takes a free one. `host`: another address than
    this machine's own needs a `key`. `compare`: a second model with the same tokenizer, to lay beside this
    one. Raises ValueError for a text that the model cannot take or models that cannot be compared, and
    OSError for a port that is taken.
    """
    beside = None if compare is None else Given(compare, tokenizer, "the other model")
    return prepare(
        model,
        tokenizer,
        text,
        source=source,
        name=name,
        host=host,
        port=port,
        key=key,
        framed=True,
        beside=beside,
    ).start()


def prepare(
    model: nn.Module,
    tokenizer: AnyTokenizer | None,
    text: str | None = None,
    *,
    source: str | None = None,
    name: str = "model",
    host: str = "127.0.0.1",
    port: int = 0,
    key: str | None = None,
    framed: bool = False,
    run: RunView | None = None,
    beside: Given | None = None,
    place: str | None = None,
) -> Looking:
    """The same, listening but not yet serving. `run`: the run whose steps the page goes through; `beside`:
    the model to compare with; `place`: where the offered Python opens this one, by default its name.
    """
    check_place(host, key)
    sock = listen(host, port)
    try:
        session = Session(model, tokenizer, text, source, name, run, beside, place)
    except BaseException:
        sock.close()
        raise
    app = create_app(session, key=key, framed=framed)
    if run is not None:
        add_run(app, session, run)
    config = uvicorn.Config(
        app,
        http=Patience,
        ws="none",
        access_log=False,
        log_config=None,
        log_level=logging.CRITICAL,  # what goes wrong in the app is told by the guard, in one line
        server_header=False,
        date_header=False,
        lifespan="on",
        limit_concurrency=MOST_CONNECTIONS,
        h11_max_incomplete_event_size=LARGEST_HEAD,
        timeout_keep_alive=30,  # longer than clients keep a line: none closes as a request arrives
        timeout_graceful_shutdown=1,
        proxy_headers=False,
    )
    return Looking(session, uvicorn.Server(config), sock, key)


def check_place(host: str, key: str | None) -> None:
    """ValueError for an address that others reach without a key, or a key that is easily guessed."""
    if key is not None and len(key) < 8:
        raise ValueError("the key is too short; give at least 8 characters")
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and key is None:
        raise ValueError(f"host={host!r:.60} can be reached by others; give a key that they must know")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; OSError says why there is none."""
    if not 0 <= port < 1 << 16:
        raise ValueError(f"port={port} should be between 0 and 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # named as TCP, so that asyncio switches Nagle's delay off: it costs small answers 40 ms
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(128)
    except OSError as error:
        sock.close()
        raise OSError(
            error.errno, f"cannot listen: {(error.strerror or '').lower()}", f"{host}:{port}"
        ) from None
    return sock


def free_port(host: str) -> int:
    """The usual port, or 0, which means any free one, if it is taken."""
    try:
        listen(host, PORT).close()
    except OSError:
        return 0
    return PORT


def url_of(sock: socket.socket) -> str:
    """Where a browser finds what this socket serves."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
