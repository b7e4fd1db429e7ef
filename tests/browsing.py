"""A page in a real browser, for tests: opened, waited for, and every complaint of it noted."""

from collections.abc import Callable
from typing import Any

from serving import Served

CHROMIUM = "/usr/bin/chromium"
FLAGS = [
    "--no-sandbox",
    "--headless",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
    "--disable-component-update",
    "--disable-sync",
]
READY = "html[data-ready]:not([data-ready=''])"
SHOWS = """(text) => import("/page/store.js").then(
    ({ app }) => !app.stale && app.trace.pieces.map((piece) => piece.text).join("") === text)"""


class Open:
    """Opens an address, waits for its trace, and notes every complaint."""

    def __init__(self, browser: Any) -> None:
        self.browser, self.contexts, self.served = browser, [], []
        self.complaints: list[str] = []

    def __call__(
        self, served: Served, fragment: str = "", width: int = 1440, height: int = 900, **options: Any
    ) -> Any:
        context = self.browser.new_context(viewport={"width": width, "height": height}, **options)
        self.contexts.append(context)
        self.served.append(served)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", lambda message: self.complaints.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))

        def watch(route: Any) -> None:
            if route.request.url.startswith((served.base_url, "data:", "blob:")):
                route.continue_()
            else:
                self.complaints.append(f"a request to {route.request.url}")
                route.abort()

        page.route("**/*", watch)
        page.goto(f"{served.base_url}/{fragment}")
        page.wait_for_selector(READY)
        return page

    def close(self) -> None:
        """Close all pages and let the servers finish: one model records at a time."""
        for context in self.contexts:
            context.close()
        for served in self.served:
            served.client.get("/api/vocab")
        self.contexts, self.served = [], []


def until(page: Any, expression: str, arg: Any = None) -> None:
    """Wait until this is true on the page; the page's policy forbids the browser to evaluate it by itself."""
    for _ in range(2400):
        if page.evaluate(expression, arg):
            return
        page.wait_for_timeout(25)
    raise AssertionError(f"never true: {expression} {arg}")


def settled(page: Any, action: Callable[[], None]) -> None:
    """Do something that asks the model again, and wait for the answer."""
    before = trace_id(page)
    action()
    until(page, "before => !['', before].includes(document.documentElement.dataset.ready)", before)


def number_shown(page: Any) -> float:
    """The recorded value in the number view."""
    return float(page.inner_text("#recorded").replace("−", "-"))


def trace_id(page: Any) -> str:
    """The number of the trace on screen."""
    return page.get_attribute("html", "data-ready")
