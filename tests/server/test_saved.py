"""The page as one file: it works from a disk, shows the same numbers, and loads nothing."""

import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from serving import Served

CELL = ("decoder.blocks.1.attn.weights", "0,2,3,1")


@pytest.fixture(scope="module")
def saved(served: Served, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The file, and the metadata of the trace in it."""
    _, metadata = served.trace(text="the cat sat on the mat")
    cells = {"cells": f"{CELL[0]}@{CELL[1]}"}
    answer = served.client.get(f"/api/export/{metadata['trace']}.html", params=cells)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    assert "attachment" in answer.headers["content-disposition"]
    file = tmp_path_factory.mktemp("saved") / "page.html"
    file.write_bytes(answer.content)
    return file, metadata


def test_the_file_needs_nothing_else(saved: tuple[Path, dict[str, Any]], served: Served) -> None:
    """No address in it leads out, it has no token, and its policy allows only what it holds."""
    text = saved[0].read_text(encoding="utf-8")
    head = re.sub(r'<script type="application/json".*?</script>', "", text, flags=re.DOTALL)
    assert not re.search(r"""(src|href)=["'](?!data:|#)""", head)
    assert served.token not in text
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None and "unsafe" not in policy[1] and "default-src 'none'" in policy[1]


def test_an_edited_pass_and_odd_cells_are_refused(served: Served) -> None:
    """One line says why."""
    edit = {"name": "decoder.blocks.1.ff", "kind": "zero"}
    _, edited = served.trace(text="the cat", edits=[edit])
    answer = served.client.get(f"/api/export/{edited['trace']}.html")
    assert answer.status_code == 400 and "edits" in answer.json()["error"]
    _, plain = served.trace(text="the cat")
    for cells in ("nothing", "a@x", "@"):
        answer = served.client.get(f"/api/export/{plain['trace']}.html", params={"cells": cells})
        assert answer.status_code == 400 and "cells" in answer.json()["error"]


@pytest.mark.slow
def test_from_a_disk_it_shows_the_same_numbers(saved: tuple[Path, dict[str, Any]], served: Served) -> None:
    """In a browser, by file://: no error, no request; map, slices, sums, lines and a number's arithmetic."""
    with ThreadPoolExecutor(1) as thread:  # another test's browser may be open in this one
        assert thread.submit(look_at_the_file, saved, served).result() == []


def look_at_the_file(saved: tuple[Path, dict[str, Any]], served: Served) -> list[str]:
    """Compare its numbers with the server's; what the browser complains of or asks the network for."""
    from playwright.sync_api import sync_playwright

    file, metadata = saved
    number, name = metadata["trace"], CELL[0]
    told: list[str] = []
    with sync_playwright() as playwright:
        chromium = shutil.which("chromium") or shutil.which("chromium-browser")
        browser = playwright.chromium.launch(
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        page = browser.new_page()
        page.on("console", lambda message: told.append(message.text))
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on(
            "request",
            lambda request: (
                None if request.url.startswith(("data:", "file:", "blob:")) else told.append(request.url)
            ),
        )
        page.goto(file.as_uri())
        page.wait_for_function("document.querySelector('#status').textContent.includes('tokens')")
        ask = """([path, kind]) => fetch(path).then(async (answer) => kind === "json" ? answer.json() :
            import("clearhead/api.js").then(async ({ parse }) => {
                const { x, lines, logits } = parse(await answer.arrayBuffer()).tensors;
                return Object.values({ x, lines, logits }).map((t) => t && [t.shape, [...t.data]]);
            }))"""

        def fetch(path: str, kind: str = "tensors") -> Any:
            return page.evaluate(ask, [f"/api/trace/{number}/{path}", kind])

        for query in (
            {"at": "0,2,:,1:4"},
            {"at": "0,1", "level": 1},
            {"at": "0", "level": 1, "reduce": "sum"},
        ):
            there = served.value(number, name, **query)
            address = "&".join(f"{key}={value}" for key, value in query.items())
            shape, numbers = fetch(f"t/{name}?{address}")[0]
            torch.testing.assert_close(torch.tensor(numbers).view(shape), there, rtol=1e-6, atol=1e-7)
        _, lines, logits = fetch("lines?at=3")
        weights = served.value(number, name)
        assert torch.equal(torch.tensor(lines[1]).view(lines[0])[1], weights[0, :, 3])
        assert torch.equal(torch.tensor(logits[1]), served.value(number, "logits", at="0,3"))
        cell = served.client.get(f"/api/trace/{number}/cell/{name}", params={"at": CELL[1]}).json()
        assert fetch(f"cell/{name}?at={CELL[1]}", "json") == cell
        assert "not saved" in fetch(f"cell/{name}?at=0,0,0,0", "json")["error"]
        browser.close()
    return told
