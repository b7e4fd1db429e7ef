"""The pictures of the look-inside page in the README, made from the demo's model.

make demo
python tests/screenshots.py runs/demo docs
"""

import argparse
import io
import shutil
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from clearhead.server.look import look
from clearhead.training.run_folder import load_run

TEXT = "def read_lines(path):\n    with open(path) as file:\n        return file."
FLAGS = [
    "--no-sandbox", "--headless", "--disable-gpu", "--disable-background-networking", "--no-first-run",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def settle(page: Page) -> None:
    """Wait until the picture belongs to the text, and a little for what is fetched after it."""
    deadline = time.monotonic() + 30
    while not page.evaluate("document.documentElement.dataset.ready") and time.monotonic() < deadline:
        page.wait_for_timeout(50)
    page.wait_for_timeout(700)


def take(page: Page, file: Path, selector: str | None = None) -> None:
    """Save what is seen, in few colours: a picture of text needs no more."""
    shot = page.locator(selector).screenshot() if selector else page.screenshot()
    picture = Image.open(io.BytesIO(shot)).convert("RGB").quantize(96, dither=Image.Dither.NONE)
    picture.save(file, optimize=True)
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


def main() -> None:
    """Make all pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("out", type=Path, help="the folder of the pictures")
    options = parser.parse_args()
    model, tokenizer = load_run(options.run)
    with sync_playwright() as playwright, look(model, tokenizer, TEXT, name="demo") as served:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=FLAGS)
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme=scheme)
            page.goto(served.url)
            settle(page)
            take(page, options.out / f"look-map-{scheme}.png")
            page.goto(f"{served.url}#l=2&h=1&k=self&at=decoder.blocks.2.attn.scores@0,1,9,4")
            page.reload()
            settle(page)
            take(page, options.out / f"look-head-{scheme}.png", "#steps")
            take(page, options.out / f"look-number-{scheme}.png", "#number")
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
