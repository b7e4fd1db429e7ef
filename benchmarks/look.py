"""How soon the look-inside page answers: in Chromium, with the model on one thread.

    python benchmarks/look.py            15 measurements of each, medians
    python benchmarks/look.py --quick    5
    python benchmarks/look.py --record   also appends the result to RESULTS.md

P is a decoder of 13.8 M parameters: 6 layers, 384 wide, 6 heads, vocabulary 8,192, gated feed-forward. Its
weights are random, which costs what trained ones cost. SmolLM2 is the one of `loading.py`, in float32. All
times are taken inside the page, from the event to the frame in which the picture is drawn: the map, the next
words and the heads; the steps and the number follow. The server runs in this process. Chromium is Debian's,
through Playwright.
"""

import argparse
import gzip
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import torch
from playwright.sync_api import Browser, Page, ViewportSize, sync_playwright

import clearhead
from clearhead import ModelConfig, Tokenizer, Transformer, load, look, train_bpe
from clearhead.inspector.passes import give_back
from clearhead.text.corpus import open_corpus
from loading import MODEL, import_model
from machine import describe_machine, record

FLAGS = [
    "--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
SIZES: dict[str, Any] = {"vocab_size": 8192, "max_len": 1280, "d_model": 384, "n_layers": 6, "n_heads": 6}

SCREEN: ViewportSize = {"width": 1440, "height": 900}

# When the picture of each trace was drawn, and when the key was struck before it.
WATCH = """
window.struck = 0; window.drawn = [];
document.addEventListener("keydown", () => { window.struck = performance.now(); }, true);
document.addEventListener("pointermove", () => { window.moved = performance.now(); }, true);
const look = () => new MutationObserver(() => {
  if (document.documentElement.dataset.picture) window.drawn.push(performance.now());
}).observe(document.documentElement, { attributes: true, attributeFilter: ["data-picture"] });
if (document.documentElement) look();
else document.addEventListener("readystatechange", look, { once: true });
"""

STATE = "[window.struck, window.drawn, document.activeElement.id, document.documentElement.dataset.picture]"

SLIDE = """
async () => {
  const slider = document.querySelector("#next input[type=range]");
  const frame = () => new Promise((done) => requestAnimationFrame((now) => done(performance.now())));
  const begun = frame();
  const before = performance.now();
  slider.value = String(Number(slider.value) + Number(slider.step || 1));
  slider.dispatchEvent(new Event("input", { bubbles: true }));
  const spent = performance.now() - before;
  const ended = frame();
  return spent + (await ended) - (await begun);
}
"""

NUMBER = """
async (key) => {
  const grid = document.getElementById("step-grid"), body = document.getElementById("number-body");
  const press = (key) => grid.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  grid.focus();
  const changed = new Promise((done, fail) => {
    const seen = new MutationObserver(() => { seen.disconnect(); done(performance.now()); });
    seen.observe(body, { childList: true, subtree: true, characterData: true });
    setTimeout(() => fail(new Error("no number came")), 5000);
  });
  const before = performance.now();
  press(key);
  press("Enter");
  return (await changed) - before;
}
"""


def words(tokenizer: Any, n_tokens: int) -> str:
    """A text of so many tokens."""
    text = " ".join(Path(__file__).read_text(encoding="utf-8").split() * 20)
    low, high = 1, len(text)
    while low < high:  # the longest start that has no more
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(tokenizer.encode(text[:middle])) <= n_tokens else (low, middle - 1)
    return text[:low].rstrip()


def times(n: int, measure: Callable[[int], float]) -> list[float]:
    """Measurements in milliseconds, after two that do not count."""
    return [measure(i) for i in range(n + 2)][2:]


def until(page: Page, condition: str) -> None:
    """Wait; Playwright's own waiting needs an eval, which the page forbids."""
    deadline = time.monotonic() + 20
    while not page.evaluate(condition):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the page never came to {condition}: {page.evaluate(STATE)}")
        page.wait_for_timeout(5)


def opened(page: Page, url: str) -> float:
    """From the start of the navigation to the first picture."""
    page.goto("about:blank")
    page.goto(url)
    until(page, "window.drawn.length > 0")
    return page.evaluate("window.drawn[0]")


def opened_anew(browser: Browser, url: str) -> float:
    """The same in a browser that has kept no file of the page."""
    context = browser.new_context(viewport=SCREEN)
    page = context.new_page()
    page.add_init_script(WATCH)
    found = opened(page, url)
    context.close()
    return found


def typed(page: Page, letter: str) -> float:
    """From a key at the end of the text to its picture."""
    seen = page.evaluate("window.drawn.length")
    page.keyboard.type(letter)
    until(page, f"window.drawn.length > {seen} && window.drawn.at(-1) > window.struck")
    page.wait_for_timeout(30)
    return page.evaluate("window.drawn.find((t) => t > window.struck) - window.struck")


def keys(page: Page, url: str, n: int) -> list[float]:
    """Keys typed at the end of the text that is served."""
    opened(page, url)
    page.focus("#text")
    page.keyboard.press("Control+End")
    return times(n, lambda i: typed(page, "etaoinshrdlu"[i % 12]))


def resident() -> float:
    """Memory of this process, in MB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def small_model() -> tuple[Transformer, Tokenizer]:
    """P and a vocabulary of its size."""
    vocab, merges = train_bpe(islice(open_corpus("python"), 300), SIZES["vocab_size"])
    return Transformer(ModelConfig(**SIZES), seed=0).eval(), Tokenizer(vocab, merges)


def long_trace(model: Transformer, tokenizer: Tokenizer, n: int) -> tuple[float, list[float]]:
    """MB by which a trace of 1,024 tokens makes the process grow, and ms until the weights of a layer that
    nobody opened are there.
    """
    give_back()  # what the pages before have freed is not this trace's
    before = resident()
    with look(model, tokenizer, words(tokenizer, 1024)) as served:
        token = served.server.config.app.state.token
        client = httpx.Client(base_url=served.url, headers={"x-clearhead-token": token}, timeout=60)
        body = {"text": words(tokenizer, 1024)}
        answer = client.post("/api/trace", json=body)
        length = int.from_bytes(answer.content[:8], "little")

        trace = json.loads(answer.content[8 : 8 + length])["__metadata__"]["trace"]
        kept = resident() - before

        def layer(i: int) -> float:
            started = time.perf_counter()
            name = f"decoder.blocks.{i % 6}.attn.weights"
            client.get(
                f"/api/trace/{trace}/t/{name}", params={"at": f"0,{i // 6 % 6},:,:"}
            ).raise_for_status()
            return 1e3 * (time.perf_counter() - started)

        return kept, [layer(i) for i in range(min(n, 6))]


def measure(n: int) -> list[tuple[str, float, list[float]]]:
    """Every line of the report: what, the goal, the measurements."""
    lines: list[tuple[str, float, list[float]]] = []
    model, tokenizer = small_model()
    import_model()
    smol, smol_tokenizer = load(MODEL)
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport=SCREEN)
        page.add_init_script(WATCH)
        with look(model, tokenizer, words(tokenizer, 54)) as served:
            anew = times(n, lambda i: opened_anew(browser, served.url))
            lines.append(("P: first picture, server warm, browser new, ms", 300, anew))
            again = times(n, lambda i: opened(page, served.url))
            lines.append(("P: the same, opened again, ms", 300, again))
            lines.append(("P: a key at the end of 54 tokens, ms", 150, keys(page, served.url, n)))
            opened(page, served.url)
            page.focus("#map-0")
            page.keyboard.press("Enter")
            page.wait_for_timeout(800)
            numbers = times(n, lambda i: page.evaluate(NUMBER, "ArrowRight"))
            lines.append(("P: from a cell to its number, ms", 50, numbers))
            lines.append(("P: slider, ms of work", 16, times(n, lambda i: page.evaluate(SLIDE))))
        with look(model, tokenizer, words(tokenizer, 246)) as served:
            lines.append(("P: a key at the end of 246 tokens, ms", 150, keys(page, served.url, n)))
        assert smol_tokenizer is not None
        with look(smol, smol_tokenizer, words(smol_tokenizer, 54)) as served:
            lines.append(("SmolLM2-135M: a key at the end of 54 tokens, ms", 400, keys(page, served.url, n)))
        browser.close()
    kept, layers = long_trace(model, tokenizer, n)
    lines.append(("P: a trace of 1,024 tokens opens a layer, ms", 500, layers))
    lines.append(("P: that trace keeps, MB", 250, [kept]))
    return lines


def page_size() -> tuple[float, int]:
    """kB of the page's scripts and styles, gzipped, and the number of modules."""

    folder = Path(clearhead.__file__).parent / "server" / "page"
    scripts = sorted(folder.glob("*.js"))
    files = [*scripts, *folder.glob("*.css")]
    return sum(len(gzip.compress(file.read_bytes(), 6)) for file in files) / 1e3, len(scripts)


def report(lines: list[tuple[str, float, list[float]]]) -> str:
    """The result in Markdown."""
    size, modules = page_size()
    rows = [
        f"| {what} | {statistics.median(found):.0f} | {min(found):.0f} - {max(found):.0f} | < {goal:.0f} |"
        for what, goal, found in lines
    ]
    rows.append(f"| JS + CSS, gzipped, kB; modules | {size:.0f}; {modules} | | <= 150; <= 20 |")
    table = "\n".join(rows)
    return f"""
## Looking inside, {date.today()}

{describe_machine("torch", "playwright", threads=1)}.

Chromium, 1440 x 900; medians of {len(lines[0][2])}, least - most.

| what | median | range | goal |
|---|---|---|---|
{table}
"""


def main() -> None:
    """Measure, print, and record if asked."""
    parser = argparse.ArgumentParser(description="How soon the look-inside page answers, in Chromium.")
    parser.add_argument("--quick", action="store_true", help="5 measurements of each")
    parser.add_argument("--record", action="store_true", help="append the result to RESULTS.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = report(measure(5 if options.quick else 15))
    print(text)
    if options.record:
        record(text)


if __name__ == "__main__":
    main()
