"""The guided path: what it quotes adds up, and `show me` leads to what was quoted, on any screen."""

import re
from typing import Any

import pytest

from browsing import Open, until
from serving import Served

pytestmark = pytest.mark.slow
STATE = "import('/page/store.js').then(({ app }) => app.state)"
NUMBER = r"[+−]\d+(?:\.\d+)?"


def answer_of(page: Any) -> str:
    """The answer, when it is complete."""
    until(page, "() => !document.getElementById('guide-answer').textContent.includes('…')")
    return page.inner_text("#guide-answer")


def numbers(text: str) -> list[float]:
    """The signed numbers of a sentence."""
    return [float(found.replace("−", "-")) for found in re.findall(NUMBER, text)]


def test_the_first_answer_opens_the_token_it_names(served: Served, open_page: Open) -> None:
    """The first piece, and the row of pieces is in view."""
    page = open_page(served, "#q=1")
    answer_of(page)
    page.locator("#guide-look").click()
    assert page.evaluate(STATE)["position"] == 0
    page.wait_for_timeout(900)
    top = page.evaluate("document.getElementById('map-0').getBoundingClientRect().top")
    guide = page.evaluate("document.getElementById('guide').getBoundingClientRect().bottom")
    assert guide <= top < 600


def test_a_score_is_explained_with_its_scale(served: Served, open_page: Open) -> None:
    """The sum of the products times the scale is the score, which is the number that is then shown."""
    page = open_page(served, "#q=5")
    answer = answer_of(page)
    total, score = numbers(answer)
    scale = float(re.findall(r"Times ([\d.]+)", answer)[0])
    assert total * scale == pytest.approx(score, abs=1e-4)
    page.locator("#guide-look").click()
    until(page, "() => document.getElementById('recorded') !== null")
    assert float(page.inner_text("#recorded")) == pytest.approx(score, abs=1e-4)


def test_the_cells_that_a_layer_changes_are_those_quoted(served: Served, open_page: Open) -> None:
    """`show me` selects the cell after the feed-forward layer, with the probability that was said."""
    page = open_page(served, "#q=7")
    after = re.findall(r"(<?[\d.]+%)", answer_of(page))[-1]
    page.locator("#guide-look").click()
    until(page, "p => document.getElementById('readout').textContent.includes(p)", after)
    assert page.inner_text("#readout").startswith("position")


def test_the_parts_of_a_logit_add_up_as_they_are_quoted(served: Served, open_page: Open) -> None:
    """The largest parts and the rest are the logit; below stand all of them, to the last bit of rounding."""
    page = open_page(served, "#q=8")
    logit, *parts = numbers(answer_of(page))
    assert len(parts) == 4 and sum(parts) == pytest.approx(logit, abs=1e-9)
    page.locator("#guide-look").click()
    page.wait_for_selector("#guide-depths[open]")
    amounts = numbers(" ".join(page.locator("#guide-depths .amount").all_inner_texts()))
    assert sum(amounts) == pytest.approx(logit, abs=0.01 * len(amounts))
    assert amounts[:3] == parts[:3]


@pytest.mark.parametrize("question", [5, 8])
def test_the_guide_stays_in_view_on_a_telephone(question: int, served: Served, open_page: Open) -> None:
    """After `show me` too; a number that is shown takes at most 40 % of the screen."""
    page = open_page(served, f"#q={question}", 390, 844)
    answer_of(page)
    page.locator("#guide-look").click()
    page.wait_for_timeout(900)
    top, bottom = page.evaluate(
        "(({ top, bottom }) => [top, bottom])(document.getElementById('guide').getBoundingClientRect())"
    )
    assert top >= -1 and 60 < bottom <= 0.4 * 844
    if question == 5:
        assert page.evaluate("document.getElementById('number').offsetHeight") <= 0.4 * 844 + 1
