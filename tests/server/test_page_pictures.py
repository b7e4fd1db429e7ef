"""The page looks as it did: at three sizes at most half a percent of its pixels differ from a stored one."""

import json

import pytest

from browsing import Open
from pictures import FOLDER, MADE_WITH, SIZES, STATE, difference, stored, take
from serving import Served

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_the_page_looks_as_it_did(width: int, height: int, served: Served, open_page: Open) -> None:
    """Where fonts and browser are those of the stored picture; `python tests/pictures.py` makes it again."""
    page = open_page(served, STATE, width, height)
    page.wait_for_selector("#source-place")
    wanted, here = (
        json.loads((FOLDER / "made_with.json").read_text(encoding="utf-8")),
        page.evaluate(MADE_WITH),
    )
    if wanted != here:
        pytest.skip(f"the pictures were made with {wanted}, here is {here}: letters look different")
    assert (FOLDER / f"page-{width}.webp").stat().st_size < 60_000
    page.wait_for_timeout(500)
    assert difference(take(page), stored(width)) <= 0.005


def test_a_difference_would_be_seen() -> None:
    """A panel that moves by its own width changes far more than half a percent."""
    picture = stored(1440)
    moved = picture.copy()
    moved.paste(picture.crop((0, 100, 1100, 800)), (60, 100))
    assert difference(picture, picture) == 0 and difference(picture, moved) > 0.02
