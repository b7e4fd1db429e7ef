"""Pictures of the page at three sizes, kept beside the tests, and how far a page is from them.

    python tests/pictures.py    makes them again

Letters look different in other fonts and other browsers, and a picture says nothing there. So the pictures
say what they were made with, and are compared where that is the same; elsewhere the comparison is left out,
and the tests of boxes and contents in test_page.py stand alone.
"""

import io
import json
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops
from playwright.sync_api import sync_playwright

from browsing import CHROMIUM, FLAGS, READY
from clearhead.server.look import look
from clearhead.text.bpe import train_bpe
from clearhead.text.tokenizer import Tokenizer
from serving import CORPUS, TEXT, tiny_decoder

FOLDER = Path(__file__).parent / "stored_pictures"
SIZES = [(1440, 900), (1024, 768), (390, 844)]
STATE = "#layer=1&head=2&lang=en&theme=light&at=decoder.blocks.1.attn.scores@0,2,6,3"
COLOURS = 64
APART = 40  # of 255: colours that are nearer count as the same

# What a text measures in the fonts of the page, and which browser says so.
MADE_WITH = """() => {
  const context = document.createElement("canvas").getContext("2d");
  const width = (family) => {
    context.font = `20px ${family}`;
    return Math.round(100 * context.measureText("Hamburgefonstiv 0123456789 ▸ ⏎ ‖ ∑").width) / 100;
  };
  const families = [getComputedStyle(document.documentElement).fontFamily, "ui-monospace, monospace", "math"];
  return { browser: navigator.userAgent.match(/Chrom\\w*\\/(\\d+)/)?.[1] ?? "", widths: families.map(width) };
}"""

# Times, and digits that depend on the order in which a processor adds, stand still.
STILL = """() => {
  for (const id of ["status", "delta", "again", "recorded", "difference"]) {
    const element = document.getElementById(id);
    if (element) element.textContent = "…";
  }
}"""


def stored(width: int) -> Image.Image:
    """The picture of this width."""
    with Image.open(FOLDER / f"page-{width}.webp") as picture:
        return picture.convert("RGB")


def take(page: Any) -> Image.Image:
    """What is seen, in few colours."""
    page.evaluate(STILL)
    shot = Image.open(io.BytesIO(page.screenshot(animations="disabled"))).convert("RGB")
    return shot.quantize(COLOURS, dither=Image.Dither.NONE)


def difference(one: Image.Image, other: Image.Image) -> float:
    """The share of pixels that differ."""
    if one.size != other.size:
        return 1.0
    apart = ImageChops.difference(one.convert("RGB"), other.convert("RGB")).convert("L")
    return sum(apart.histogram()[APART:]) / (one.width * one.height)


def main() -> None:
    """Make all pictures again."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "corpus.txt"
        file.write_text(CORPUS, encoding="utf-8")
        vocab, merges = train_bpe(str(file), 320, ["<|endoftext|>"])
    tokenizer = Tokenizer(vocab, merges, ["<|endoftext|>"])
    model = tiny_decoder(tokenizer.vocab_size)
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright, look(model, tokenizer, TEXT, name="tiny decoder") as served:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        for width, height in SIZES:
            page = browser.new_page(viewport={"width": width, "height": height})
            page.goto(served.url + STATE)
            page.wait_for_selector(READY)
            page.wait_for_selector("#source-place")
            page.wait_for_timeout(500)
            path = FOLDER / f"page-{width}.webp"
            take(page).convert("RGB").save(path, lossless=True, method=6)
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
            told = page.evaluate(MADE_WITH)
        (FOLDER / "made_with.json").write_text(json.dumps(told) + "\n", encoding="utf-8")
        browser.close()


if __name__ == "__main__":
    main()
