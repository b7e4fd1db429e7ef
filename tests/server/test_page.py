"""The page in a real browser: every number on it is the recorded one, and every part can be reached.

The tests are named after what must hold; a message on the browser's console or a request to elsewhere fails
any of them.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from browsing import READY, SHOWS, Open, number_shown, settled, trace_id, until
from clearhead.generation.sample import (
    apply_temperature,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_repetition,
)
from clearhead.inspector.provenance import Unknown, explain, recompute
from clearhead.inspector.spelling import spell
from clearhead.inspector.trace import trace
from clearhead.model.transformer import Transformer
from clearhead.text.bpe import train_bpe
from clearhead.text.tokenizer import Tokenizer
from reference.zoo import ZOO, animal
from serving import CORPUS, TEXT, Serve, Served, tiny_decoder

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "src" / "clearhead" / "server" / "page"
IDS = "3 14 15 9 26 5 14 15"
ARRIVED = """import("/page/store.js").then(({ app: { state: { cell } } }) =>
    document.getElementById("cell-name")?.textContent === `${cell.name}[${cell.index.join(", ")}]`)"""
REFUSED = "console: Failed to load resource: the server responded with a status of 400 (Bad Request)"


@pytest.fixture(scope="session")
def zoo(serve: Serve) -> Callable[[str], Served]:
    """One model of the zoo, served, without a tokenizer: its text is ids."""
    there: dict[str, Served] = {}

    def find(name: str) -> Served:
        if name not in there:
            model = animal(name)
            two = isinstance(model, Transformer) and model.config.shape == "encoder-decoder"
            there[name] = serve(model, None, IDS, source="4 9 2 11 7" if two else None, name=name)
        return there[name]

    return find


def go_to(page: Any, name: str, index: list[int]) -> None:
    """Show one number."""
    page.evaluate(
        "([name, index]) => import('/page/store.js').then(({ show }) => show(name, index))", [name, index]
    )
    until(
        page,
        "text => document.getElementById('cell-name')?.textContent === text",
        f"{name}[{', '.join(map(str, index))}]",
    )


# ------------------------------------------------------------------------------------------- what is shipped


def test_nothing_random_and_nothing_foreign_is_shipped() -> None:
    """Invariant 1, invariant 31: no random source, no address of another place, no code that the policy
    forbids.
    """
    for file in PAGE.glob("*"):
        text = file.read_text(encoding="utf-8")
        assert not re.search(r"Math\.random|getRandomValues|randomUUID", text), file
        addresses = set(re.findall(r"https?://[\w.]+", text)) - {"http://www.w3.org"}
        assert not addresses, file
        assert not re.search(r"\beval\(|new Function|innerHTML|document\.write", text), file
    html = (PAGE / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*(src=|application/json))|\son\w+=|\sstyle=", html)


def test_the_page_is_small() -> None:
    """JS and CSS at most 150 kB gzipped, at most 20 modules."""
    import gzip

    files = [*PAGE.glob("*.js"), *PAGE.glob("*.css")]
    assert len(list(PAGE.glob("*.js"))) <= 20
    assert sum(len(gzip.compress(file.read_bytes())) for file in files) <= 150_000


# ----------------------------------------------------------------------------------------------------- truth


@pytest.mark.parametrize("name", [*ZOO, "foreign"])
def test_any_model_opens_and_its_numbers_are_the_recorded_ones(name: str, zoo: Any, open_page: Open) -> None:
    """Invariant 1, invariant 21, invariant 36: 200 random cells a model: the browser's arithmetic, Python's
    and the record agree.
    """
    served = zoo(name)
    seen = trace_of(served)
    page = open_page(served)
    generator = torch.Generator().manual_seed(4)
    explained = [key for key in seen.values if has_rule(seen, key)]
    places = []
    for turn in range(200 if explained else 0):
        key = explained[turn % len(explained)]
        places.append(
            (key, [int(torch.randint(size, (), generator=generator)) for size in seen.values[key].shape])
        )
    answers = page.evaluate(
        """async (places) => {
            const [{ recompute }, api, { app }] = await Promise.all(
                ["ops", "api", "store"].map((name) => import(`/page/${name}.js`)));
            const answers = [];
            for (let k = 0; k < places.length; k += 20) {
                const some = places.slice(k, k + 20);
                const asked = some.map(([name, index]) => api.cell(app.trace.id, name, index));
                for (const cell of await Promise.all(asked)) {
                    answers.push([cell.value, recompute(cell), cell.tolerance]);
                }
            }
            return answers;
        }""",
        places,
    )
    for (key, index), (value, again, tolerance) in zip(places, answers, strict=True):
        recorded = float(seen.values[key][tuple(index)])
        assert value == recorded, (key, index)
        python = recompute(explain(seen, key, index))
        slack = 1e-12 * max(1.0, abs(python))
        assert abs(again - python) <= slack, (key, index)
        assert abs(again - recorded) <= max(tolerance, 1e-6 * abs(recorded)), (key, index)
    assert name == "foreign" or len(explained) > 40
    for key, index in places[:3]:
        go_to(page, key, index)
        page.wait_for_selector("#recorded")
        assert torch.tensor(number_shown(page)) == seen.values[key][tuple(index)].float()


def has_rule(seen: Any, key: str) -> bool:
    """Whether a rule tells how this value was made."""
    try:
        explain(seen, key, [0] * seen.values[key].dim())
    except Unknown:
        return False
    return True


def trace_of(served: Served, text: str = IDS) -> Any:
    """The trace behind the page's first picture, made here."""
    session = served.session
    question = session.question({"text": text, "source": "4 9 2 11 7"})
    source = None if question.source is None else torch.tensor([question.source])
    return trace(served.model, torch.tensor([question.ids]), source=source)


@pytest.mark.parametrize("name", ["experts sigmoid", "encoder-decoder"])
def test_every_value_can_be_opened_by_keyboard(name: str, zoo: Any, open_page: Open) -> None:
    """Invariant 33: from the map down: Enter on a cell, then every button of the layer's values, without a
    mouse.
    """
    page = open_page(zoo(name))
    page.keyboard.press("g")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    page.wait_for_selector("#recorded")
    assert page.evaluate("document.activeElement.id") == "step-grid"
    page.focus("#all-values summary")
    page.keyboard.press("Enter")
    names = page.eval_on_selector_all(
        "#all-values button.value", "all => all.map((one) => one.title.split(' ')[0])"
    )
    assert len(names) >= 20
    for i, value in enumerate(names):
        page.locator("#all-values button.value").nth(i).focus()
        page.keyboard.press("Enter")
        until(
            page,
            "name => document.getElementById('steps-title').textContent.includes(name) "
            "&& document.getElementById('step-grid').getAttribute('aria-label').includes(name)",
            value,
        )


def test_the_table_of_a_picture_holds_the_recorded_numbers(served: Served, open_page: Open) -> None:
    """Invariant 4: `t` turns the picture into a table whose cells are the values, to the last bit."""
    page = open_page(served, "#layer=1&head=3")
    page.wait_for_selector("#row-table")
    page.focus("#step-grid")
    page.keyboard.press("t")
    cells = page.eval_on_selector_all(
        "#slice tbody tr", "rows => rows.map((row) => [...row.cells].slice(1).map((c) => c.textContent))"
    )
    recorded = served.value(trace_id(page), "decoder.blocks.1.attn.weights", at="0,3,:,:")
    shown = torch.tensor([[float(text.replace("−", "-").replace("+", "")) for text in row] for row in cells])
    assert torch.equal(shown, recorded)


def test_a_text_is_the_number_and_not_its_picture(served: Served, open_page: Open) -> None:
    """Invariant 4: where a pixel stands for many cells, what is said of a cell is still its own f32."""
    long = " ".join([TEXT] * 5)
    page = open_page(served, f"#t={long}&pos=63&layer=1&head=0&at=decoder.blocks.1.attn.scores@0,0,63,5")
    page.wait_for_selector("#again")
    values = {
        place: served.value(trace_id(page), "decoder.blocks.1.attn.scores", at=f"0,0,{place}").item()
        for place in ("63,5", "63,6", "63,7")
    }
    assert len(served.session.question({"text": long}).ids) > 64  # its picture is pooled
    page.focus("#step-grid")
    for place, value in values.items():
        until(
            page,
            f"document.getElementById('cell-name')?.textContent.endsWith('[0, 0, {place[:2]}, {place[3:]}]')",
        )
        wanted = page.evaluate("(x) => import('/page/dom.js').then(({ brief }) => brief(x))", value)
        assert page.inner_text("#step-grid-cell").endswith(f": {wanted}")
        page.keyboard.press("ArrowRight")


def test_a_long_text_is_a_window_that_moves(serve: Serve, tokenizer: Tokenizer, open_page: Open) -> None:
    """Invariant 25, invariant 27: of 287 rows 256 stand in the picture, framed in a small one of all; keys
    and a click in the small one lead to any other row, whose numbers are the recorded ones.
    """
    long = serve(tiny_decoder(tokenizer.vocab_size, max_len=400), tokenizer, " ".join([TEXT] * 24)[:1100])
    page = open_page(long, "#layer=1&head=2")
    page.wait_for_selector("#row-table")
    n = page.evaluate("import('/page/store.js').then(({ app }) => app.trace.pieces.length)")
    assert n > 270 and page.get_attribute("#step-grid", "aria-rowcount") == str(n)
    assert f"of {n}" in page.inner_text("#step-rows")
    assert page.get_attribute("#step-grid", "data-row") == str(n - 1)
    page.focus("#step-grid")
    page.keyboard.press("PageUp")
    until(page, "() => document.getElementById('step-grid').dataset.row === '0'")
    page.keyboard.press("Home")
    until(page, "() => document.getElementById('step-grid-cell').textContent.endsWith('100.0%')")
    box = page.locator("#step-grid canvas").bounding_box()
    page.mouse.click(box["x"] + 12, box["y"] + box["height"] - 36)
    until(page, "() => Number(document.getElementById('step-grid').dataset.row) > 200")
    row, column = (int(page.get_attribute("#step-grid", f"data-{axis}")) for axis in ("row", "column"))
    until(page, "row => document.getElementById('cell-name')?.textContent.includes(`, ${row}, `)", row)
    page.wait_for_selector("#again")
    name = "decoder.blocks.1.attn.weights"
    recorded = long.value(trace_id(page), name, at=f"0,2,{row},{column}")
    assert torch.tensor(number_shown(page)) == recorded


def test_ids_and_bytes_are_those_of_the_text(served: Served, open_page: Open) -> None:
    """Invariant 2: the ids on the map are what the model was given, and their bytes are the text's."""
    page = open_page(served)
    pieces = page.evaluate("import('/page/store.js').then(({ app }) => app.trace.pieces)")
    assert served.tokenizer is not None
    assert [piece["id"] for piece in pieces] == served.tokenizer.encode(TEXT)
    assert bytes.fromhex("".join(piece["bytes"] for piece in pieces)) == TEXT.encode()
    page.keyboard.press("g")
    for _ in range(9):
        page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    assert str(pieces[-1]["id"]) in page.inner_text(".facts")


def test_the_embedding_strip_is_the_row_of_the_table(served: Served, open_page: Open) -> None:
    """Invariant 3: embed at position i is row id_i of the weights, bit for bit."""
    page = open_page(served, "#v=embed")
    weight = served.model.get_parameter("embed.weight")
    strip = page.evaluate(
        """async () => {
            const [api, { app }] = await Promise.all(["api", "store"].map((n) => import(`/page/${n}.js`)));
            const x = await api.slice(app.trace.id, "embed", "0,:,:");
            return [app.trace.pieces.map((piece) => piece.id), [...x.data]];
        }"""
    )
    assert torch.equal(torch.tensor(strip[1]), weight[strip[0]].detach().flatten())


def test_the_rows_nearest_to_a_token_are_those_of_the_table(served: Served, open_page: Open) -> None:
    """The token view names the eight tokens whose rows of the embedding point nearest to its own."""
    page = open_page(served, "#v=tokens&pos=1")
    page.wait_for_selector("#near")
    shown = page.eval_on_selector_all(
        "#near .merge", "all => all.map((one) => [Number(one.title), one.lastChild.textContent])"
    )
    table = served.model.get_parameter("embed.weight").detach()
    row = served.session.question({"text": TEXT}).ids[1]
    cosines = torch.cosine_similarity(table, table[row][None])
    cosines[row] = -2
    best = cosines.topk(8)
    assert [id for id, _ in shown] == best.indices.tolist()
    assert [text.strip() for _, text in shown] == [f"{cosine:.2f}" for cosine in best.values.tolist()]


def test_the_last_row_of_the_map_is_what_the_model_says(served: Served, open_page: Open) -> None:
    """Invariant 19, invariant 6: the lens at the last depth is the argmax of the logits; words and
    probabilities are the model's own.
    """
    page = open_page(served)
    ids, p, logits = page.evaluate(
        """import("/page/store.js").then(({ app }) => {
            const { trace } = app;
            const n = trace.pieces.length;
            const last = (name) => [...trace[name].data.slice(-n)];
            return [last("lens.id"), last("lens.p"), [...trace.logits.data]];
        })"""
    )
    with torch.no_grad():
        said = served.model(torch.tensor([served.session.question({"text": TEXT}).ids]))[0]
    assert ids == said.argmax(-1).tolist()
    assert torch.allclose(torch.tensor(p), said.softmax(-1).amax(-1), atol=1e-5)
    assert torch.allclose(torch.tensor(logits), said[-1], atol=1e-4)
    word = spell(served.session.speller.bytes_of(ids[-1]))
    assert word.strip() in page.inner_text("#readout")
    assert float(re.search(r"[\d.e-]+$", page.inner_text("#delta"))[0]) <= 1e-4


# ------------------------------------------------------------------------------------------------- attention


def test_rows_sum_to_one_and_what_is_masked_is_zero(served: Served, open_page: Open) -> None:
    """Invariant 8, invariant 9: the row's sum is on screen; a masked key is exactly 0, hatched, and its
    reason is said.
    """
    page = open_page(served, "#pos=4&head=1")
    page.wait_for_selector("#row-sum")
    assert abs(float(page.inner_text("#row-sum")) - 1) <= 1e-6
    page.focus("#step-grid")
    page.keyboard.press("End")
    assert "causal mask" in page.inner_text("#step-grid-cell")
    page.keyboard.press("Enter")
    page.wait_for_selector("#recorded")
    assert number_shown(page) == 0.0
    weights = served.value(trace_id(page), "decoder.blocks.2.attn.weights", at="0,1,:,:")
    assert torch.all(weights.triu(1) == 0)


def test_a_row_that_is_cut_short_says_how_much_it_shows(served: Served, open_page: Open) -> None:
    """Invariant 27: what the listed keys weigh and what the others weigh is the sum of the row."""
    page = open_page(served, "#pos=12&layer=0&head=1")
    page.wait_for_selector("#row-shown")
    shown, rest, whole = (float(page.inner_text(f"#row-{part}")) for part in ("shown", "rest", "sum"))
    assert abs(shown + rest - whole) < 2e-6
    keys = [
        int(key) for key in page.eval_on_selector_all(
            "#row-table tbody th span", "all => all.map((one) => one.textContent)"
        )
    ]  # fmt: skip
    weights = served.value(trace_id(page), "decoder.blocks.0.attn.weights", at="0,1,12,:").flatten()
    assert 0 < len(keys) < 13 and f"{len(keys)} shown" in page.inner_text("#row-table")
    assert abs(shown - float(weights[keys].double().sum())) < 1e-6
    others = sum(weight for key, weight in enumerate(weights.tolist()) if key not in keys)
    assert abs(rest - others) < 1e-6


def test_a_window_says_so(zoo: Any, open_page: Open) -> None:
    """Invariant 9: the reason a key is hidden for is said."""
    page = open_page(zoo("mqa window"), "#layer=0&head=0")
    page.wait_for_selector("#row-table")
    page.focus("#step-grid")
    page.keyboard.press("Home")
    assert "outside the window" in page.inner_text("#step-grid-cell")
    assert "window of 3" in page.inner_text("#values")


@pytest.mark.parametrize("shape", ["decoder", "encoder", "encoder-decoder"])
def test_padding_is_never_looked_at(shape: str, serve: Serve, open_page: Open, tmp_path: Path) -> None:
    """Invariant 9, invariant 13: padding in a text, and of an encoder-decoder in its source, weighs exactly 0
    in every row; the page says why, and each row of a real token still sums to 1.
    """
    file = tmp_path / "corpus.txt"
    file.write_text(CORPUS, encoding="utf-8")
    tokenizer = Tokenizer(*train_bpe(str(file), 320, ["[PAD]"]), ["[PAD]"])
    head = "masked" if shape == "encoder" else "lm"
    model = tiny_decoder(tokenizer.vocab_size, shape=shape, head=head)
    padded, plain = "the cat[PAD][PAD] sat", "the dog"
    two = shape == "encoder-decoder"
    other = serve(model, tokenizer, plain if two else padded, source=padded if two else None, name=shape)
    page = open_page(other, f"#layer=1&head=2&kind={'cross' if two else 'self'}")
    until(page, "() => document.getElementById('row-hidden')?.textContent.includes('padding')")
    assert "2 keys may not be seen: padding" in page.inner_text("#row-hidden")
    name = f"{'encoder' if head == 'masked' else 'decoder'}.blocks.1.{'cross' if two else 'attn'}.weights"
    weights = other.value(trace_id(page), name, at="0,:,:,:")
    hidden = torch.tensor([token == tokenizer.special_tokens["[PAD]"] for token in tokenizer.encode(padded)])
    assert hidden.sum() == 2 and torch.all(weights[..., hidden] == 0)
    queries = ~hidden if not two else slice(None)
    assert torch.allclose(weights[:, queries].sum(-1), torch.ones(()), atol=1e-6)
    go_to(page, name, [0, 2, 0, int(hidden.nonzero()[0])])
    page.wait_for_selector("text=masked: the key is padding")
    assert number_shown(page) == 0


def test_shared_heads_are_named(zoo: Any, open_page: Open) -> None:
    """Invariant 12: query head h uses key/value head h // G, and the picture says so."""
    page = open_page(zoo("gqa interleaved"), "#layer=0&head=4")
    page.wait_for_selector("#row-table")
    assert "query head 4 uses key/value head 1 (3 share it)" in page.inner_text("#values")


def test_a_score_is_its_query_times_its_key(served: Served, open_page: Open) -> None:
    """Invariant 10, invariant 22: the factors, the formula, the source line and the arithmetic of one score;
    Backspace walks forward.
    """
    page = open_page(served, "#layer=1&head=3&at=decoder.blocks.1.attn.scores@0,3,9,5")
    page.wait_for_selector("#again")
    queries = served.value(trace_id(page), "decoder.blocks.1.attn.queries", at="0,3,9,:").double()
    keys = served.value(trace_id(page), "decoder.blocks.1.attn.keys", at="0,1,5,:").double()
    assert math.isclose(float(page.inner_text("#again")), float(queries @ keys) / 8**0.5, rel_tol=1e-12)
    assert "✓" in page.inner_text("#difference")
    assert page.locator("#formula math").count() == 1
    line = page.inner_text(".line.here")
    assert 'tap("scores"' in line
    file, number = page.inner_text("#source-place").split(":")
    source = Path(__file__).parents[2] / "src" / "clearhead" / file
    assert source.read_text(encoding="utf-8").splitlines()[int(number) - 1].strip() in line
    page.locator("#factors button.factor").first.focus()
    page.keyboard.press("Enter")
    until(page, "document.getElementById('cell-name').textContent.includes('queries')")
    page.keyboard.press("Backspace")
    until(page, "document.getElementById('cell-name').textContent.includes('scores')")


def test_every_number_leads_back_to_embeddings_and_weights(served: Served, open_page: Open) -> None:
    """Invariant 21: taking the first link again and again ends at the embedding."""
    page = open_page(served, "#at=logits@0,3,7")
    for _ in range(60):
        page.wait_for_selector("#again")
        name = page.inner_text("#cell-name")
        links = page.locator("#factors button.factor")
        if links.count() == 0:
            break
        links.first.click()
        until(page, "name => document.getElementById('cell-name').textContent !== name", name)
    assert name.startswith("embed[")


# ------------------------------------------------------------------------------------------------ next token


def test_sampling_is_that_of_generate(served: Served, open_page: Open) -> None:
    """Invariant 20: each step over random logits with ties: which tokens stay, and their probabilities."""
    page = open_page(served)
    generator = torch.Generator().manual_seed(0)
    cases = []
    for k, p, m, heat, rep in [
        (0, 1, 0, 1, 1),
        (5, 1, 0, 0.7, 1),
        (0, 0.6, 0, 1.3, 1),
        (0, 1, 0.2, 1, 1.5),
        (20, 0.9, 0.05, 0.5, 1.2),
        (1, 0.0, 1.0, 2, 0.5),
    ]:
        logits = (torch.randn(300, generator=generator) * 3).mul(8).round() / 8
        settings = {
            "temperature": heat,
            "top_k": k,
            "top_p": p,
            "min_p": m,
            "repetition_penalty": rep,
            "seed": 1,
        }
        cases.append((logits, settings, [3, 7, 7, 20]))
    for logits, settings, seen in cases:
        got = page.evaluate(
            """([logits, settings, seen]) => import("/page/sample.js").then(
                ({ pipeline }) => [...pipeline(logits, settings, seen).after])""",
            [logits.tolist(), settings, seen],
        )
        marked = torch.zeros(1, 300, dtype=torch.bool)
        marked[0, seen] = True
        wanted = penalise_repetition(logits[None].double(), marked, float(settings["repetition_penalty"]))
        wanted = apply_temperature(wanted, float(settings["temperature"]))
        wanted = keep_top_p(keep_top_k(wanted, settings["top_k"]), float(settings["top_p"]))
        wanted = keep_min_p(wanted, float(settings["min_p"]))
        wanted = wanted.softmax(-1)[0]
        found = torch.tensor(got, dtype=torch.float64)
        assert torch.equal(found > 0, wanted > 0), settings
        assert torch.allclose(found, wanted, atol=1e-12)
        assert abs(sum(got) - 1) < 1e-9


def test_the_draw_follows_the_probabilities(served: Served, open_page: Open) -> None:
    """Invariant 20: the exponential race: over 4,000 seeds each token wins about as often as it is likely."""
    page = open_page(served)
    p = [0.5, 0.25, 0.15, 0.1, 0.0]
    wins = page.evaluate(
        """(p) => import("/page/sample.js").then(({ race }) => {
            const wins = p.map(() => 0);
            for (let seed = 0; seed < 4000; seed += 1) wins[race(p, seed, 3).winner] += 1;
            return wins;
        })""",
        p,
    )
    assert wins[4] == 0
    for count, share in zip(wins, p, strict=True):
        assert abs(count / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5 + 1e-9


def test_bars_and_others_sum_to_one(served: Served, open_page: Open) -> None:
    """Invariant 20: what is listed and what is not is everything, at any setting of the sliders."""
    page = open_page(served)
    for knob, value in [("temperature", "0.5"), ("top_k", "12"), ("top_p", "0.8"), ("temperature", "0")]:
        page.locator(f"#knob-{knob}").evaluate(
            "(one, value) => { one.value = value; one.dispatchEvent(new Event('input')); }", value
        )
        page.wait_for_timeout(30)
        shares = page.eval_on_selector_all("#next-body .share", "all => all.map((one) => one.textContent)")
        total = sum(float(text.strip("<%")) for text in shares if text != "cut")
        assert abs(total - 100) < 1.0
    assert "the likeliest" in page.inner_text("#pipeline")


def test_a_forced_token_is_the_next_one(served: Served, open_page: Open) -> None:
    """Invariant 2: click on a word: the model is given that very id, and the address holds it."""
    page = open_page(served)
    before = page.evaluate("import('/page/store.js').then(({ app }) => app.trace.pieces.map((p) => p.id))")
    wanted = int(page.locator("#next-body button.bar").nth(2).get_attribute("data-id"))
    settled(page, lambda: page.locator("#next-body button.bar").nth(2).click())
    after = page.evaluate("import('/page/store.js').then(({ app }) => app.trace.pieces.map((p) => p.id))")
    assert after == [*before, wanted]
    assert f".{wanted}" in page.url


def test_the_server_speaks_as_generate_does(served: Served, open_page: Open) -> None:
    """Invariant 7: "Continue" gives the tokens of `generate` for this text, these settings and this seed."""
    from clearhead.generation.decode import generate

    page = open_page(served, "#T=0.8&seed=11")
    settled(page, lambda: page.locator("#continue").click())
    until(page, "import('/page/store.js').then(({ app }) => app.state.ids?.length > 0 && !app.stale)")
    ids = page.evaluate("import('/page/store.js').then(({ app }) => app.state.ids)")
    open_page.close()  # the model is not for two at once
    prompt = list(served.session.question({"text": TEXT}).ids)
    assert isinstance(served.model, Transformer)
    wanted = generate(served.model, [prompt], max_new_tokens=20, temperature=0.8, seed=11)
    assert ids[len(prompt) :] == list(wanted[0])


# ----------------------------------------------------------------------------------------------------- edits


def test_an_edit_moves_the_numbers_and_switching_it_off_restores_them(
    served: Served, open_page: Open
) -> None:
    """Invariant 23, invariant 24: `x` on a head; the first trace's number comes back, and nothing upstream
    changed.
    """
    page = open_page(served)
    first = trace_id(page)
    page.keyboard.press("h")
    page.keyboard.press("ArrowUp")
    settled(page, lambda: page.keyboard.press("x"))
    edited = trace_id(page)
    assert edited != first
    assert "edits=" in page.url
    mixed = served.value(edited, "decoder.blocks.1.attn.mixed", at="0,:,:,:")
    assert torch.all(mixed[0] == 0) and torch.any(mixed[1] != 0)
    upstream = "decoder.blocks.1.attn.weights"
    assert torch.equal(served.value(edited, upstream), served.value(first, upstream))
    assert "→" in page.inner_text("#effect")
    settled(page, lambda: page.locator("#edit-0").click())
    assert trace_id(page) == first


def test_a_head_can_be_frozen(served: Served, open_page: Open) -> None:
    """`f` on a head: in the tray stands what is kept, and the offered Python keeps it too."""
    page = open_page(served, "#edits=zero:decoder.blocks.0.ff@")
    page.keyboard.press("h")
    settled(page, lambda: page.keyboard.press("f"))
    frozen = page.evaluate("import('/page/store.js').then(({ app }) => app.state.edits.at(-1).name)")
    layer = frozen.split(".")[2]
    assert frozen.endswith(".attn.weights")
    assert f"freeze layer {layer}, head 0" in " ".join(page.locator(".edits li").last.inner_text().split())
    assert page.locator(".edits .where").last.get_attribute("title") == f"{frozen} [:, 0]"
    page.locator("#take summary").click()
    page.locator("#python-open").click()
    program = page.inner_text("#python")
    assert f'Edit("{frozen}", "patch", (None, 0,), plain["{frozen}"])' in program


def test_cross_heads_and_cells_of_the_map_can_be_frozen_too(zoo: Any, open_page: Open) -> None:
    """`f` where a cross head is open keeps its weights; on a cell of the map what was added there."""
    page = open_page(zoo("encoder-decoder"), "#kind=cross&layer=1&head=2&edits=zero:encoder.blocks.0.ff@")
    page.wait_for_selector("#row-table")
    page.focus("#step-grid")
    settled(page, lambda: page.keyboard.press("f"))
    page.keyboard.press("g")
    page.keyboard.press("ArrowUp")
    settled(page, lambda: page.keyboard.press("f"))
    edits = page.evaluate("import('/page/store.js').then(({ app }) => app.state.edits.slice(1))")
    assert [(edit["name"], edit["kind"], edit["at"]) for edit in edits] == [
        ("decoder.blocks.1.cross.weights", "freeze", [None, 2]),
        ("decoder.blocks.1.cross", "freeze", [None, 8]),
    ]


def test_an_edit_that_writes_what_is_there_changes_nothing(served: Served, open_page: Open) -> None:
    """Invariant 23: times one: another trace by name, the same logits to the last bit."""
    page = open_page(served)
    logits = "import('/page/store.js').then(({ app }) => [...app.trace.logits.data])"
    before, first = page.evaluate(logits), trace_id(page)
    edit = {"name": "decoder.blocks.1.ff", "kind": "scale", "at": [], "value": 1, "on": True}
    change = "(edit) => import('/page/store.js').then(({ go }) => { go({ edits: [edit] }); })"
    settled(page, lambda: page.evaluate(change, edit))
    assert trace_id(page) != first
    assert page.evaluate(logits) == before


def test_another_text_can_be_put_in(served: Served, open_page: Open) -> None:
    """The other text's vector at the last row of the last position makes this text say what that one says."""
    text, other = "the cat sat", "the dog sat"
    page = open_page(served, f"#t={text}")
    page.locator("#compare summary").click()
    page.fill("#against", other)
    page.keyboard.press("Enter")
    until(page, "() => document.querySelector('#effect')")
    assert page.input_value("#paint-choice") == "delta"
    page.locator("#map-title").click()
    page.keyboard.press("g")
    settled(page, lambda: page.keyboard.press("p"))
    logits = torch.tensor(
        page.evaluate("import('/page/store.js').then(({ app }) => [...app.trace.logits.data])")
    )
    there, _ = served.trace(text=other)
    assert torch.allclose(logits, there["logits"], atol=1e-5)
    program = page.evaluate("import('/page/takeaway.js').then(({ python }) => python())")
    ids = list(served.session.question({"text": other}).ids)
    assert f"other = trace(model, torch.tensor([{str(ids).replace(' ', '')}])).values" in program
    assert re.search(r'"patch", \(.*\), other\["decoder\.blocks\.\d+"\]\)', program)
    settled(page, lambda: page.locator("#edit-0").click())
    until(page, "() => document.querySelector('#patch-all')")
    page.locator("#patch-all").click()
    until(page, "import('/page/store.js').then(({ app }) => app.patched?.stop === null)")
    n = len(served.session.question({"text": text}).ids)
    assert f"{6 * n} of {6 * n}" in page.inner_text("#patch-note")
    assert "the logit moves by" in page.inner_text("#map-0-cell")


def test_pairs_turn_by_their_angle_and_keep_their_length(served: Served, open_page: Open) -> None:
    """Invariant 11: the pairs of a query at position 9 are turned by 9 theta^(-2m/K); at position 0 by
    nothing.
    """
    for position in (0, 9):
        page = open_page(served, f"#v=decoder.blocks.1.attn.queries&layer=1&lead=0,2&pos={position}")
        page.wait_for_selector(".turns svg")
        labels = page.eval_on_selector_all(
            ".turns svg", "all => all.map((one) => one.getAttribute('aria-label'))"
        )
        assert len(labels) == 4
        for m, label in enumerate(labels):
            angle, length = map(float, re.findall(r"(-?[\d.]+) rad, length ([\d.]+)", label)[0])
            wanted = position * 10000 ** (-2 * m / 8)
            assert abs(math.remainder(angle - wanted, 2 * math.pi)) < 2e-3, label
            assert length > 0


def test_every_head_can_be_tried(served: Served, open_page: Open) -> None:
    """Invariant 30: the sweep over all heads says how far it is and ranks what they change."""
    page = open_page(served)
    page.locator("#sweep").click()
    page.wait_for_selector("text=12 of 12 heads")
    assert page.locator(".ranking li").count() == 5


# -------------------------------------------------------------------------------------- state, speed, safety


def test_state_and_address_are_one_to_one(served: Served, open_page: Open) -> None:
    """Invariant 28: random states, written and read: equal; an address, read and written: the same."""
    page = open_page(served)
    texts = ["", "a b", "ünï 字 ⏎\n#&=;@%2C", "x" * 50, "1.5e3"]
    states = []
    for turn in range(60):
        one = torch.Generator().manual_seed(turn)
        pick = lambda n, one=one: int(torch.randint(n, (), generator=one))  # noqa: E731
        place = {
            "name": f"decoder.blocks.{pick(9)}.attn.scores",
            "index": [0, pick(4), pick(30), pick(30)][: pick(5)],
        }
        edit = {
            "name": "decoder.blocks.0.ff", "kind": ["zero", "scale", "mean"][pick(3)],
            "at": [None, pick(5)][: pick(3)], "value": [None, 0.5, -2.0][pick(3)], "on": bool(pick(2)),
        }  # fmt: skip
        states.append(
            {
                "text": texts[pick(5)], "source": texts[pick(5)], "ids": [None, [3, 1, 4]][pick(2)],
                "stack": pick(2),
                "position": [None, 0, 7][pick(3)], "row": [None, -1, 3][pick(3)], "layer": [None, 2][pick(2)],
                "head": [None, 0, 5][pick(3)], "kind": ["self", "cross"][pick(2)], "lead": [0, 2][: pick(3)],
                "value": [None, "embed"][pick(2)], "cell": [None, place][pick(2)], "trail": [place] * pick(3),
                "edits": [edit] * pick(3), "paint": ["p", "norm"][pick(2)], "wide": bool(pick(2)),
                "guide": pick(10),
                "lang": ["", "zh"][pick(2)], "theme": ["", "dark"][pick(2)],
                "sampling": {
                    "temperature": [1, 0, 0.35][pick(3)], "top_k": pick(9), "top_p": [1, 0.9][pick(2)],
                    "min_p": [0, 0.1][pick(2)], "repetition_penalty": [1, 1.2][pick(2)],
                    "seed": pick(99),
                },
            }
        )  # fmt: skip
    pairs = page.evaluate(
        """(states) => import("/page/state.js").then(({ encode, decode, first }) => states.map((state) => {
            const whole = { ...first(), ...state };
            const address = encode(whole);
            const again = decode("#" + address);
            const texts = [JSON.stringify(whole), JSON.stringify(again.state)];
            return [...texts, address, encode(again.state), again.problems];
        }))""",
        states,
    )
    for state, again, address, once_more, problems in pairs:
        assert json.loads(again) == json.loads(state)
        assert once_more == address
        assert problems == []


def test_back_reload_and_links_restore_what_was_seen(served: Served, open_page: Open) -> None:
    """Invariant 28: the same address gives the same numbers."""
    page = open_page(served, "#layer=1&head=2&at=decoder.blocks.1.attn.weights@0,2,6,3")
    page.wait_for_selector("#again")
    seen = page.inner_text("#recorded")
    page.locator("#factors button.factor").first.click()
    until(page, "document.getElementById('cell-name').textContent.includes('scores')")
    page.go_back()
    until(page, "document.getElementById('cell-name').textContent.includes('weights')")
    until(page, "seen => document.getElementById('recorded')?.textContent === seen", seen)
    page.reload()
    page.wait_for_selector("#again")
    assert page.inner_text("#recorded") == seen


def test_an_address_that_is_not_understood_says_so(served: Served, open_page: Open) -> None:
    """Invariant 28: what an address holds that nobody knows is named."""
    page = open_page(served, "#layer=one&nonsense=1")
    assert page.inner_text("#status-note") == "not understood in the address: layer, nonsense"


def test_the_last_keystroke_wins(served: Served, open_page: Open) -> None:
    """Invariant 29: thirty keys typed fast: the picture belongs to the whole text, and far fewer passes were
    made.
    """
    page = open_page(served)
    answers: list[str] = []
    page.on(
        "requestfinished",
        lambda request: answers.append(request.url) if request.url.endswith("/api/trace") else None,
    )
    more = " and the dog did the cat on a m"
    page.focus("#text")
    page.keyboard.press("End")
    page.keyboard.type(more, delay=10)
    until(page, SHOWS, TEXT + more)
    assert page.input_value("#text") == TEXT + more
    assert len(answers) <= len(more)


def test_a_text_that_is_too_long_is_refused_with_the_limit(zoo: Any, open_page: Open) -> None:
    """Invariant 32, invariant 29: the message names the limit, and the picture of the text before is marked
    as such.
    """
    page = open_page(zoo("mha rotary"))
    page.fill("#text", " ".join(["7"] * 50))
    until(page, "() => document.getElementById('status').classList.contains('problem')")
    assert "40" in page.inner_text("#status")
    assert page.evaluate("document.body.classList.contains('stale')")
    open_page.complaints.remove(REFUSED)


def test_the_page_says_when_the_server_is_gone_and_recovers(served: Served, browser: Any) -> None:
    """Invariant 29: nobody answers: it is said. Somebody answers again: the picture is that of the text in
    the box.
    """
    context = browser.new_context(offline=False)
    page = context.new_page()
    page.goto(served.base_url)
    page.wait_for_selector(READY)
    context.set_offline(True)
    page.fill("#text", "the dog")
    page.wait_for_selector("text=does not answer")
    context.set_offline(False)
    until(page, SHOWS, "the dog")
    until(page, "() => !document.querySelector('#status.problem')")
    assert "does not answer" not in page.inner_text("header")
    context.close()


# ---------------------------------------------------------------------------------------------------- access


@pytest.mark.parametrize("look", ["light", "dark", "forced"])
def test_axe_finds_nothing(look: str, served: Served, open_page: Open) -> None:
    """Invariant 33: no violation in any main state, in light, dark and forced colours."""
    from axe_playwright_python.sync_playwright import Axe

    options = {"light": {}, "dark": {"color_scheme": "dark"}, "forced": {"forced_colors": "active"}}[look]
    fragment = (
        "#q=4&layer=1&head=2&at=decoder.blocks.1.attn.weights@0,2,6,3&edits=scale:decoder.blocks.0.ff@*,2=0.5"
    )
    page = open_page(served, fragment, **options)
    page.wait_for_selector("#again")
    page.locator("#all-values summary").click()
    page.locator("#take summary").click()
    check_axe(Axe(), page)
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("?")
    check_axe(Axe(), page)
    page.keyboard.press("Escape")
    page.evaluate("import('/page/store.js').then(({ go }) => go({ value: 'tokens', cell: null }))")
    page.wait_for_selector(".facts")
    check_axe(Axe(), page)


def check_axe(axe: Any, page: Any) -> None:
    found = axe.run(page).response["violations"]
    assert [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in found] == []


def test_a_journey_by_keyboard_alone(served: Served, open_page: Open) -> None:
    """Invariant 33: text → number → edit → export, with the keyboard and nothing else; the live cell says the
    number.
    """
    page = open_page(served)
    page.keyboard.press("/")
    page.keyboard.press("End")
    settled(page, lambda: page.keyboard.type(" a"))
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") == "map-0"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("h")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "step-grid"
    until(page, "() => document.getElementById('step-grid').getAttribute('aria-label').includes('head 1')")
    page.keyboard.press(" ")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "number"
    until(page, ARRIVED)
    spoken = page.inner_text("#step-grid-cell")
    assert spoken.split(": ")[-1] == page.inner_text("#number-title").split(": ")[-1]
    settled(page, lambda: page.keyboard.press("x"))
    assert page.locator(".edits li").count() == 1
    page.locator("#take summary").focus()
    page.keyboard.press("Enter")
    page.locator("#take-csv").focus()
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    lines = Path(download.value.path()).read_text(encoding="utf-8").splitlines()
    assert lines[0] == "query,key,score,weight"


@pytest.mark.parametrize(("width", "height"), [(1440, 900), (1024, 768), (390, 844)])
def test_nothing_is_cut_off_on_any_screen(width: int, height: int, served: Served, open_page: Open) -> None:
    """No sideways scrolling of the page; every panel is within the screen; the map is drawn, and its selected
    last column is in sight; the row's table and the formula fit.
    """
    page = open_page(served, "#layer=1&head=2&at=decoder.blocks.1.attn.weights@0,2,6,3", width, height)
    page.wait_for_selector("#again")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for panel in ("map", "next", "heads", "steps", "number"):
        box = page.locator(f"#{panel}").bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width, panel
    for part in ("document.querySelector('#row-table').parentElement", "document.querySelector('#formula')"):
        assert page.evaluate(f"{part}.scrollWidth - {part}.clientWidth") <= 1, part
    beyond = "((box) => box.scrollWidth - box.clientWidth - box.scrollLeft)"
    assert page.evaluate(f"{beyond}(document.getElementById('map-0').parentElement)") <= 1
    inked = page.evaluate(
        """() => {
            const canvas = document.querySelector("#map-0 canvas");
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return data.filter((x, i) => i % 4 === 3 && x > 0).length / (canvas.width * canvas.height);
        }"""
    )
    assert inked > 0.2


def test_a_tap_does_what_a_click_does(served: Served, open_page: Open) -> None:
    page = open_page(served, "", 390, 844, has_touch=True)
    box = page.locator("#map-0 canvas").bounding_box()
    page.touchscreen.tap(box["x"] + 130, box["y"] + 78)
    scrolled = page.evaluate("document.getElementById('map-0').parentElement.scrollLeft")
    assert page.get_attribute("#map-0", "data-column") == str(int((130 + scrolled - 92) // 58))


@pytest.mark.parametrize("language", ["en-US", "zh-CN"])
def test_nine_questions_are_answered_with_this_models_numbers(
    language: str, served: Served, open_page: Open
) -> None:
    """Every question has an answer that quotes a number, in both languages, and shows what it speaks of."""
    page = open_page(served, "#q=1", locale=language)
    for question in range(1, 10):
        until(page, "() => !document.getElementById('guide-answer').textContent.includes('…')")
        answer = page.inner_text("#guide-answer")
        assert re.search(r"\d", answer) and not re.search(r"{\w+}", answer), answer
        assert bool(re.search(r"[\u4e00-\u9fff]", answer)) == (language == "zh-CN")
        if question == 8 and language == "en-US":
            assert "direct contributions" in answer
        if question < 9:
            page.locator("#guide-look").click()
            shown = page.evaluate("import('/page/store.js').then(({ app }) => app.state.cell)")
            assert (shown is None) == (question in (1, 6, 7, 8))  # no number of an earlier answer stays
            page.locator("#guide-next").click()
    settled(page, lambda: page.locator("#guide-look").click())
    assert "→" in page.inner_text("#effect")


def test_every_sentence_exists_in_both_languages(served: Served, open_page: Open) -> None:
    """The same keys and the same places for values; no key is used that does not exist."""
    page = open_page(served)
    tables = page.evaluate("import('/page/text.js').then(({ tables }) => tables)")
    assert tables["en"].keys() == tables["zh"].keys()
    for key, text in tables["en"].items():
        assert set(re.findall(r"{(\w+)[|}]", text)) == set(re.findall(r"{(\w+)[|}]", tables["zh"][key])), key
    used = set()
    for file in PAGE.glob("*.js"):
        used |= set(re.findall(r"\bt\(\"([\w.-]+)\"", file.read_text(encoding="utf-8")))
    assert used <= tables["en"].keys()


def test_the_offered_python_prints_the_same_number(served: Served, open_page: Open) -> None:
    """What "copy as Python" shows is a program whose names and index are those on screen."""
    page = open_page(served, "#at=decoder.blocks.1.attn.scores@0,3,9,5")
    page.wait_for_selector("#again")
    seen = number_shown(page)
    page.locator("#take summary").click()
    page.locator("#python-open").click()
    program = page.inner_text("#python")
    open_page.close()  # the model is not for two at once
    tokens = torch.tensor([json.loads(re.search(r"tensor\(\[(\[.*?\])\]\)", program)[1])])
    values = trace(served.model, tokens).values
    printed = eval(
        re.search(r"print\(seen\.values(\[.*\])\.item", program)[1].join(["values", ""]), {"values": values}
    )
    assert torch.tensor(seen) == printed


def test_pictures_can_be_taken_away(served: Served, open_page: Open) -> None:
    """The map as SVG holds the words and is well-formed; the trace's file is safetensors."""
    from xml.etree import ElementTree

    page = open_page(served)
    page.locator("#take summary").click()
    with page.expect_download() as download:
        page.locator("#take-svg").click()
    picture = ElementTree.parse(download.value.path()).getroot()
    words = [one.text for one in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "cat" in words and len(words) > 60


class Quiet(nn.Module):
    """A model whose output is no logits at all."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(61, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens).sum(-1)


def test_what_was_not_recorded_is_said(serve: Serve, open_page: Open) -> None:
    """Invariant 36: a module of which hardly anything is known opens, and says what there is not."""
    page = open_page(serve(Quiet().eval(), None, "1 2 3", name="quiet"))
    assert "No attention was recorded" in page.inner_text("#heads")
