"""Captions, edits and what is taken away say nothing that is not so now."""

from typing import Any

import pytest

from browsing import SHOWS, Open, settled, until
from serving import Served

pytestmark = pytest.mark.slow

SCORES = "#pos=5&layer=1&head=3&at=decoder.blocks.1.attn.scores@0,3,5,2"


def brief_of(page: Any, value: float) -> str:
    """A number as the page writes it."""
    return page.evaluate("(x) => import('/page/dom.js').then(({ brief }) => brief(x))", value)


def number_there(served: Served, page: Any, name: str, at: str) -> str:
    """The recorded number of the pass on screen, as the page writes it."""
    trace = page.evaluate("import('/page/store.js').then(({ app }) => app.trace.id)")
    return brief_of(page, served.value(trace, name, at=at).item())


def test_a_caption_is_of_what_is_on_screen(served: Served, open_page: Open) -> None:
    """Invariant 33: after an edit, and after another text, the caption and the live region hold the number
    of now; a view that is gone has no caption.
    """
    page = open_page(served, SCORES)
    page.wait_for_selector("#row-table")
    page.focus("#step-grid")
    page.keyboard.press("ArrowRight")
    name, place = "decoder.blocks.1.attn.scores", "0,3,5,3"
    first = number_there(served, page, name, place)
    ends = "([id, x]) => document.getElementById(id).textContent.endsWith(`: ${x}`)"
    until(page, ends, ["step-note", first])
    until(page, "document.getElementById('live').textContent !== ''")
    said = page.inner_text("#live")
    zero = "import('/page/store.js').then(({ go }) => { go({ edits: [EDIT] }); })".replace(
        "EDIT", "{ name: 'decoder.blocks.0.ff', kind: 'zero', at: [], value: null, on: true }"
    )
    settled(page, lambda: page.evaluate(zero))
    second = number_there(served, page, name, place)
    assert second != first
    until(page, ends, ["step-note", second])
    assert page.inner_text("#live") != said
    page.fill("#text", "the dog sat on a mat")
    until(page, SHOWS, "the dog sat on a mat")
    until(page, "document.getElementById('live').textContent === ''")
    page.focus("#map-0")
    page.keyboard.press("PageUp")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('step-grid').hidden")
    assert page.inner_text("#step-note") == ""


def test_an_edit_whose_place_is_not_there_waits(served: Served, open_page: Open) -> None:
    """Invariant 29: a cell at position 5 is off, and the text becomes two tokens long: the page shows that
    text as it is, says what waits and compares nothing; with the long text the edit is back.
    """
    page = open_page(served, "#edits=zero:decoder.blocks.1.ff@*,5")
    assert page.locator(".waits").count() == 0
    plain = served.trace(text="a cat")[1]
    assert len(plain["pieces"]) <= 5
    page.fill("#text", "a cat")
    until(page, SHOWS, "a cat")
    assert page.get_attribute("html", "data-ready") == plain["trace"]
    assert page.inner_text(".waits").strip() == f"waits: the text has only {len(plain['pieces'])} tokens"
    assert page.locator("#effect").count() == 0 and "problem" not in page.get_attribute("#status", "class")
    settled(page, lambda: page.fill("#text", "the cat sat on the mat and the dog"))
    until(page, SHOWS, "the cat sat on the mat and the dog")
    assert page.locator(".waits").count() == 0 and page.locator("#effect").count() == 1


def test_x_twice_leaves_no_edit(served: Served, open_page: Open) -> None:
    """Heads and cells: the second `x` takes the first back, and the first numbers are there again."""
    page = open_page(served)
    first = page.get_attribute("html", "data-ready")
    for place in ("h", "g"):
        page.keyboard.press(place)
        page.keyboard.press("ArrowUp")
        settled(page, lambda: page.keyboard.press("x"))
        assert page.locator(".edits li").count() == 1
        settled(page, lambda: page.keyboard.press("x"))
        assert page.locator(".edits li").count() == 0
        assert page.get_attribute("html", "data-ready") == first


def test_where_nothing_moved_that_is_said(served: Served, open_page: Open) -> None:
    """Times one changes nothing: no word is named as moved most."""
    page = open_page(served, "#edits=scale:decoder.blocks.1.ff@=1")
    assert page.inner_text("#still").startswith("Nothing moved")
    assert page.locator("#mover").count() == 0


def test_the_offline_page_of_an_edited_text_is_of_the_text_without_edits(
    served: Served, open_page: Open
) -> None:
    """What comes is a file, and its name on the page says that it is without the edits; where another text
    is compared it says that the edits must go; a refusal of the server stands on the page.
    """
    page = open_page(served, "#edits=zero:decoder.blocks.1.ff@")
    page.locator("#take summary").click()
    assert page.inner_text("#take-page") == "offline page (HTML), without the edits"
    with page.expect_download() as download:
        page.locator("#take-page").click()
    assert download.value.suggested_filename.endswith(".html")
    assert "held" in download.value.path().read_text(encoding="utf-8")
    other = open_page(served, "#edits=zero:decoder.blocks.1.ff@&b=a cat sat on")
    other.locator("#take summary").click()
    assert other.inner_text("#take-page") == "offline page: switch the edits off first"


def test_keys_lead_where_they_say(served: Served, open_page: Open) -> None:
    """`t` on the map is the map's table of words, `b` without branches says so, `c` is in the other text's
    field.
    """
    page = open_page(served)
    page.focus("#map-0")
    page.keyboard.press("t")
    words = page.eval_on_selector_all(
        "#map-table tbody tr:last-child td", "all => all.map((x) => x.textContent)"
    )
    said = page.evaluate("""import("/page/map.js").then(({ lensAt, wordOf }) => import("/page/store.js").then(
        ({ app, rowsOf, stackAt }) => wordOf(lensAt(app.trace, rowsOf(stackAt(0)).at(-1), 0).id).trim()))""")
    assert words[0].startswith(said) and words[0].endswith("%")
    page.keyboard.press("Escape")
    page.focus("#map-0")
    page.keyboard.press("b")
    assert page.inner_text("#status-note").startswith("No branches yet")
    page.keyboard.press("c")
    assert page.evaluate("document.activeElement.id") == "against"


def test_one_and_none_are_said_as_such(served: Served, open_page: Open) -> None:
    """English has a form for one, and says nothing of none."""
    page = open_page(served)
    say = "([key, values]) => import('/page/text.js').then(({ t }) => t(key, values))"
    assert "into 1 piece," in page.evaluate(say, ["guide.1", {"n": 1}])
    assert "into 7 pieces," in page.evaluate(say, ["guide.1", {"n": 7}])
    hidden = [page.evaluate(say, ["guide.6.causal", {"n": 3, "hidden": n}]) for n in (0, 1, 2)]
    for text, part in zip(
        hidden, ("nothing comes", "the 1 after it weighs", "the 2 after it weigh "), strict=True
    ):
        assert part in text


def test_what_the_guide_switched_off_comes_back(served: Served, open_page: Open) -> None:
    """The ninth question's head is on again when the guide closes, and the page says so; other edits stay."""
    page = open_page(served, "#q=9&edits=scale:decoder.blocks.0.ff@=0.5")
    first = page.get_attribute("html", "data-ready")
    settled(page, lambda: page.locator("#guide-look").click())
    assert page.locator(".edits li").count() == 2
    settled(page, lambda: page.locator("#guide-close").click())
    assert page.get_attribute("html", "data-ready") == first
    assert page.locator(".edits li").count() == 1
    assert "is on again" in page.inner_text("#status-note")
