"""One thing beside another: two models, two steps, branches of a text, followed words, edits by hand."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor, nn

from browsing import Open, settled, trace_id, until
from clearhead.inspector.trace import Edit, trace
from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer
from clearhead.published.models import save
from clearhead.server.look import look
from clearhead.text.tokenizer import Tokenizer
from reference.zoo import animal
from serving import TEXT, Serve, Served, lively, tiny_decoder, unpack

STATE = "import('/page/store.js').then(({ app }) => app.state)"
LENGTH = "n => import('/page/store.js').then(({ app }) => !app.stale && app.trace.pieces.length === n)"
IDS = "import('/page/store.js').then(({ app }) => app.trace.pieces.map((piece) => piece.id))"


def other_decoder(vocab_size: int, **choices: Any) -> Transformer:
    """The tiny decoder with other weights."""
    return lively(Transformer(tiny_decoder(vocab_size, **choices).config, seed=11))


@pytest.fixture(scope="module")
def two(serve: Serve, tokenizer: Tokenizer) -> tuple[Served, Transformer]:
    """A model that is served with another one beside it, and that other one."""
    other = other_decoder(tokenizer.vocab_size)
    return serve(tiny_decoder(tokenizer.vocab_size), tokenizer, TEXT, name="one", compare=other), other


def ids_of(served: Served, text: str = TEXT) -> list[int]:
    return list(served.session.question({"text": text}).ids)


def said_by(model: nn.Module, ids: list[int], edits: tuple[Edit, ...] = ()) -> dict[str, Tensor]:
    """All values of a pass, made here."""
    return trace(model, torch.tensor([ids]), edits=edits).values


def reading(page: Any) -> str:
    """What the map says of the live cell."""
    return page.inner_text("#map-0-cell")


def change_of(page: Any, token: int) -> float:
    """How the logit of a token moved, as the panel of edits says."""
    text = page.inner_text(f"#effect [data-id='{token}']")
    return float(text.rpartition("logit ")[2].rstrip(")").replace("−", "-"))


# ---------------------------------------------------------------------------------------------- two models


def test_the_model_beside_answers_with_its_own_numbers(two: tuple[Served, Transformer]) -> None:
    """Its traces, slices, cells and files are those of its weights; both are known by their numbers alone."""
    served, other = two
    ids = ids_of(served)
    ours, about = served.trace(text=TEXT)
    theirs, told = served.trace(text=TEXT, model="beside")
    wanted = said_by(other, ids)
    assert about["trace"] != told["trace"] and about["of"].split(".")[1] != told["of"].split(".")[1]
    assert torch.equal(theirs["logits"], wanted["logits"][0, -1])
    assert not torch.equal(theirs["logits"], ours["logits"])
    name = "decoder.blocks.1.attn.scores"
    assert torch.equal(served.value(told["trace"], name), wanted[name])
    assert torch.equal(served.value(about["trace"], name), said_by(served.model, ids)[name])
    cell = served.client.get(f"/api/trace/{told['trace']}/cell/{name}", params={"at": "0,1,5,2"}).json()
    assert cell["value"] == float(wanted[name][0, 1, 5, 2])
    weight = "decoder.blocks.0.attn.q.weight"
    answer = served.client.get(f"/api/w/{weight}", params={"trace": told["trace"], "at": "3,0:5"})
    assert torch.equal(unpack(answer.content)[0]["x"], other.state_dict()[weight][3, :5])
    edit = {"name": "decoder.blocks.1.ff", "kind": "patch", "at": [], "value": {"trace": told["trace"]}}
    mixed, _ = served.trace(text=TEXT, edits=[edit])
    put = Edit("decoder.blocks.1.ff", "patch", (), wanted["decoder.blocks.1.ff"])
    assert torch.equal(mixed["logits"], said_by(served.model, ids, (put,))["logits"][0, -1])


@pytest.mark.parametrize("name", ["experts sigmoid", "encoder-decoder"])
def test_any_two_of_a_kind_stand_side_by_side(name: str) -> None:
    """Experts come with the summary, chosen and weighted as recorded; the source goes to both models."""
    one, two = animal(name), animal(name)
    with torch.no_grad():
        for parameter in two.parameters():
            parameter.mul_(1.1)
    question: dict[str, Any] = {"ids": [3, 14, 15, 9, 26]}
    options: dict[str, Any] = {}
    if name == "encoder-decoder":
        question["source_ids"], options["source"] = [4, 9, 2], torch.tensor([[4, 9, 2]])
    with look(one, None, "3 14 15 9 26", source="4 9 2", compare=two) as seen:
        app: Any = seen.server.config.app
        headers = {"x-clearhead-token": app.state.token}
        for model, body in ((one, question), (two, {**question, "model": "beside"})):
            answer = httpx.post(f"{seen.url}api/trace", json=body, headers=headers)
            tensors, about = unpack(answer.content)
            values = trace(model, torch.tensor([question["ids"]]), **options).values
            assert torch.equal(tensors["logits"], values["logits"][0, -1])
            routed = [path.removesuffix(".chosen") for path in values if path.endswith(".chosen")]
            assert about["experts"] == routed and bool(routed) == (name == "experts sigmoid")
            for number, path in enumerate(routed):
                assert torch.equal(tensors["experts.chosen"][number], values[f"{path}.chosen"][0].int())
                assert torch.equal(tensors["experts.weights"][number], values[f"{path}.weights"][0])


def test_a_model_that_is_not_there_is_refused(served: Served, two: tuple[Served, Transformer]) -> None:
    """The message says how to have one; tokens are only drawn from the model that is looked at."""
    answer = served.client.post("/api/trace", json={"text": TEXT, "model": "beside"})
    assert answer.status_code == 400 and "--compare" in answer.json()["error"]
    answer = served.client.post("/api/trace", json={"text": TEXT, "model": 3})
    assert answer.status_code == 400 and "model=3 is unknown" in answer.json()["error"]
    _, told = two[0].trace(text=TEXT, model="beside")
    for path, body in (("/api/generate", {"trace": told["trace"]}),):
        answer = two[0].client.post(path, json=body)
        assert answer.status_code == 400 and "not from the one beside it" in answer.json()["error"]
    answer = two[0].client.get(f"/api/export/{told['trace']}.html")
    assert answer.status_code == 400 and "not the one beside it" in answer.json()["error"]


@pytest.mark.parametrize(
    ("choices", "names"),
    [
        ({"n_layers": 2}, "n_layers 3 and 2"),
        ({"d_model": 48}, "d_model 32 and 48, d_head 8 and 12, d_ff 64 and 128"),
        ({"n_kv_heads": 4, "n_layers": 4}, "n_layers 3 and 4, n_kv_heads 2 and 4"),
        ({"window": 5}, "window None and 5"),
    ],
)
def test_models_with_other_manifests_are_refused_by_what_differs(
    tokenizer: Tokenizer, choices: dict[str, Any], names: str
) -> None:
    """One line with the fields of the configs and both values."""
    model, other = tiny_decoder(tokenizer.vocab_size), tiny_decoder(tokenizer.vocab_size, **choices)
    with pytest.raises(ValueError, match=f"cannot be compared with one: {names}"):
        look(model, tokenizer, TEXT, name="one", compare=other)


class Foreign(nn.Module):
    """A module that is no Transformer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = nn.Embedding(400, 4)
        self.out = nn.Linear(4, size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.table(tokens))


def test_foreign_modules_are_compared_by_their_values(tokenizer: Tokenizer) -> None:
    """The value whose shape differs is named; alike ones stand side by side."""
    with pytest.raises(ValueError, match="cannot be compared with model: the value out, the value logits"):
        look(Foreign(5), tokenizer, TEXT, compare=Foreign(6))
    with look(Foreign(5), tokenizer, TEXT, compare=Foreign(5)) as seen:
        assert seen.session.theirs is not None


@pytest.mark.slow
def test_the_command_refuses_other_tokenizers_in_one_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """`clearhead look ONE --compare TWO`: as many tokens, but they mean other bytes; exit code 2."""
    vocab = dict(tokenizer.vocab)
    one, two = list(vocab)[-3:-1]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    other = Tokenizer(vocab, tokenizer.merges, ["<|endoftext|>"])
    config = ModelConfig(vocab_size=tokenizer.vocab_size, d_model=16, n_layers=1, n_heads=2, max_len=64)
    for name, each in (("one", tokenizer), ("two", other)):
        save(Transformer(config, seed=1), each, tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-m", "clearhead.cli", "look", "one", "--compare", "two", "--text", "the"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "two cannot be compared with one: their tokenizers" in done.stderr


@pytest.mark.slow
def test_two_models_on_one_map(two: tuple[Served, Transformer], open_page: Open) -> None:
    """`c` lays the other model beside this one: signed changes, both words, one selection, in the address;
    the word that moved most is named, and the number on screen stands beside its twin.
    """
    served, other = two
    ids = ids_of(served)
    ours, theirs = said_by(served.model, ids), said_by(other, ids)
    name = "decoder.blocks.1.attn.scores"
    page = open_page(served, f"#at={name}@0,1,6,2")
    first = trace_id(page)
    page.keyboard.press("g")
    page.keyboard.press("c")
    until(page, "() => document.querySelector('#mover')")
    state = page.evaluate(STATE)
    assert (state["versus"], state["paint"]) == ("beside", "delta")
    assert "vs=beside" in page.url and trace_id(page) == first
    for position in (len(ids) - 1, 5):
        if position == 5:
            for _ in range(len(ids) - 1 - position):
                page.keyboard.press("ArrowLeft")
        p, q = (x["logits"][0, position].softmax(-1) for x in (ours, theirs))
        until(page, "n => document.getElementById('map-0').dataset.column === n", str(position))
        mover = int((p - q).abs().argmax())
        until(page, "n => document.getElementById('mover')?.dataset.id === n", str(mover))
        moved = float((ours["logits"] - theirs["logits"])[0, position, mover])
        until(page, "() => !document.querySelector('#effect').textContent.includes('#')")
        assert abs(change_of(page, mover) - moved) < 6e-4
        assert f"{100 * float(q.max()):.1f}%" in reading(page).split("there", 1)[1]
    both = [served.trace(text=TEXT)[0]["lens.p"], served.trace(text=TEXT, model="beside")[0]["lens.p"]]
    largest = float((both[0] - both[1])[1:].abs().max())
    assert f"Strongest colour: a change of {100 * largest:.1f}%" in page.inner_text("#map-note")
    values = [float(x[name][0, 1, 6, 2]) for x in (theirs, ours)]
    until(page, "() => document.querySelector('#number-there')")
    told = page.inner_text("#number-there").replace("−", "-").replace("+", "")
    assert f"{values[0]:.4f} there → {values[1]:.4f} here" in told
    page.locator("#map-title").click()
    page.keyboard.press("g")
    page.keyboard.press("End")
    settled(page, lambda: page.keyboard.press("p"))
    logits = page.evaluate("import('/page/store.js').then(({ app }) => [...app.trace.logits.data])")
    row = page.evaluate(STATE)["edits"][0]["name"]
    put = Edit(row, "patch", (None, len(ids) - 1), theirs[row])
    assert torch.equal(torch.tensor(logits), said_by(served.model, ids, (put,))["logits"][0, -1])
    program = page.evaluate("import('/page/takeaway.js').then(({ python }) => python())")
    assert 'beside, _ = open_model("the other model", "cpu")' in program
    assert "other = trace(beside, torch.tensor([[" in program
    settled(page, lambda: page.locator("#edit-0").click())
    page.reload()
    until(page, "() => document.querySelector('#mover')")
    assert page.evaluate("import('/page/store.js').then(({ app }) => app.baseline.id !== app.trace.id)")
    assert page.inner_text("#status-note") == ""
    page.keyboard.press("c")
    until(page, "import('/page/store.js').then(({ app }) => app.state.paint === 'p')")
    page.select_option("#versus", "")
    until(page, "() => !document.querySelector('#effect')")


@pytest.mark.slow
def test_an_address_of_other_weights_names_what_differs(
    served: Served, two: tuple[Served, Transformer], tokenizer: Tokenizer, serve: Serve, open_page: Open
) -> None:
    """Invariant 28: the same address on the same weights gives the same numbers and says nothing; on other
    weights, another architecture, or without the model beside, it says which of these it is.
    """
    page = open_page(served, "#layer=1&head=2&at=decoder.blocks.1.attn.weights@0,2,6,3")
    page.wait_for_selector("#again")
    seen = page.inner_text("#recorded")
    fragment = "#" + page.url.partition("#")[2]
    assert "of=" in fragment
    same = open_page(served, fragment)
    same.wait_for_selector("#again")
    assert same.inner_text("#recorded") == seen and same.inner_text("#status-note") == ""
    assert same.url.endswith(fragment)
    weights = serve(other_decoder(tokenizer.vocab_size), tokenizer, TEXT)
    page = open_page(weights, fragment)
    page.wait_for_selector("#again")
    assert "made with other weights; the numbers" in page.inner_text("#status-note")
    assert page.inner_text("#recorded") != seen
    page.keyboard.press("g")
    settled(page, lambda: page.keyboard.press("x"))
    assert page.inner_text("#status-note") == ""  # what is seen is the reader's own now
    wider = serve(tiny_decoder(tokenizer.vocab_size, d_ff=48), tokenizer, TEXT)
    page = open_page(wider, fragment)
    page.wait_for_selector("#again")
    assert "made with other architecture, weights;" in page.inner_text("#status-note")
    both = open_page(two[0], "#vs=beside&paint=delta")
    until(both, "() => document.querySelector('#mover')")
    until(both, "() => /of=[^&]+\\.[^&]+\\.[^&]+\\.[^&]+\\.[^&]+/.test(location.hash)")
    alone = open_page(served, "#" + both.url.partition("#")[2])
    assert "start the page with --compare" in alone.inner_text("#status-note")


# ------------------------------------------------------------------------------------------------- branches


@pytest.mark.slow
def test_texts_branch_and_one_comes_back(served: Served, open_page: Open) -> None:
    """Taking a word, another one, and letting the server write: a tree above the text. A click, or `b` and
    Enter, goes back to the very trace; the address restores it all.
    """
    page = open_page(served)
    page.keyboard.press("g")
    page.keyboard.press("c")  # nothing is compared yet and nothing stands beside: the box is opened
    assert page.evaluate("document.activeElement.id") == "against"
    first, start = trace_id(page), ids_of(served)
    assert page.locator("#branches").is_hidden()
    words = [int(page.locator("#next-body button.bar").nth(n).get_attribute("data-id")) for n in (0, 3)]
    settled(page, lambda: page.locator("#next-body button.bar").nth(0).click())
    one = trace_id(page)
    assert page.locator("#branches li button[aria-current]").get_attribute("id") == "branch-1"
    settled(page, lambda: page.locator("#branch-0").click())
    assert trace_id(page) == first and page.input_value("#text") == TEXT
    settled(page, lambda: page.locator(f"#next-body button.bar[data-id='{words[1]}']").click())
    assert page.evaluate(IDS) == [*start, words[1]]
    assert page.locator("#branches ul ul > li").count() == 2
    settled(page, lambda: page.locator("#continue").click())
    until(page, LENGTH, len(start) + 21)
    assert page.locator("#branches ul ul ul > li").count() == 1
    written = served.tokenizer.decode(page.evaluate(IDS)) if served.tokenizer else ""
    assert page.input_value("#text") == written
    page.keyboard.press("Escape")
    page.locator("#map-title").click()
    page.keyboard.press("b")
    assert page.evaluate("document.activeElement.id") == "branch-3"
    for _ in range(2):
        page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.id") == "branch-1"
    settled(page, lambda: page.keyboard.press("Enter"))
    assert trace_id(page) == one
    page.reload()
    until(page, "id => document.documentElement.dataset.ready === id", one)
    assert page.locator("#branches li button").count() == 4
    assert page.locator("#branch-1").get_attribute("aria-current") == "true"
    page.go_back()
    until(page, LENGTH, len(start) + 21)
    page.locator("#branch-forget").click()
    until(page, "() => document.getElementById('branches').hidden")


@pytest.mark.slow
def test_a_tree_keeps_what_is_seen_and_drops_the_oldest_leaf(served: Served, open_page: Open) -> None:
    """Tokens hang where they part; a tree that is full loses leaves, never what one stands on; the address
    holds a tree one to one.
    """
    page = open_page(served)
    tree, kept, address, again = page.evaluate(
        """async () => {
            const [{ grown, pruned, tokensOf }, { encode, decode, first }] = await Promise.all(
                ["next", "state"].map((name) => import(`/page/${name}.js`)));
            let tree = [];
            for (const ids of ["123", "1234", "1235", "129", "12", "7", "12346"]) {
                tree = grown(tree, [...ids].map(Number));
            }
            const all = tree.map((_, i) => tokensOf(tree, i));
            const less = pruned(tree, [1, 2, 3, 5]);
            const address = encode({ ...first(), tree });
            return [[tree, all], less.map((_, i) => tokensOf(less, i)), address, decode(address).state.tree];
        }"""
    )
    nodes, texts = tree
    assert texts == [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 9], [1, 2], [7], [1, 2, 3, 4, 6]]
    assert [node["of"] for node in nodes] == [-1, 0, 0, 0, 0, -1, 1]
    assert kept == [[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 5], [1, 2], [7], [1, 2, 3, 4, 6]]
    assert again == nodes and address == "tree=:1.2.3;0,3:4;0,3:5;0,2:9;0,2:;:7;1,4:6"


# ------------------------------------------------------------------------------------------- followed words


@pytest.mark.slow
def test_followed_words_have_their_logits_everywhere(
    two: tuple[Served, Transformer], open_page: Open
) -> None:
    """A star in the list or `w` on the map: logit, share and rank; on the map its probability at every depth;
    an edit and the model beside show how its logit moved.
    """
    served, other = two
    ids = ids_of(served)
    ours = said_by(served.model, ids)
    page = open_page(served)
    star = page.locator("#next-body .bars .star").nth(2)
    token = int(star.get_attribute("data-watch"))
    star.click()
    row = page.locator(f"#watched tr[data-id='{token}']")
    row.wait_for()
    logits = ours["logits"][0, -1]
    cells = row.locator("td").all_inner_texts()
    assert abs(float(cells[0].replace("−", "-")) - float(logits[token])) < 6e-4
    assert cells[1] == f"{100 * float(logits.softmax(-1)[token]):.1f}%" and cells[2] == "3"
    assert f"watch={token}" in page.url or page.wait_for_timeout(200) is None
    _, about = served.trace(text=TEXT)
    answer = served.client.get(f"/api/trace/{about['trace']}/watch", params={"ids": str(token)})
    followed, _ = unpack(answer.content)
    rows = [ours[name][0] for name in about["rows"][:-1]]
    model: Any = served.model
    with torch.no_grad():
        wanted = torch.stack([model.head(model.stack.norm(x)[None])[0] for x in rows] + [ours["logits"][0]])
    assert torch.equal(followed["logit"][0], wanted[..., token])
    assert torch.allclose(followed["p"][0], wanted.softmax(-1)[..., token], atol=1e-7)
    page.keyboard.press("g")
    page.keyboard.press("ArrowUp")
    page.select_option("#paint-choice", "watch")
    share = f"{100 * float(followed['p'][0, -2, -1]):.1f}%"
    until(page, "text => document.getElementById('map-0-cell').textContent.includes(text)", share)
    page.locator("#map-title").click()
    page.keyboard.press("g")
    settled(page, lambda: page.keyboard.press("x"))
    off = Edit("decoder.blocks.2.attn", "zero", (None, len(ids) - 1))
    moved = said_by(served.model, ids, (off,))["logits"][0, -1] - logits
    assert abs(float(row.locator(".delta").get_attribute("title")) - float(moved[token])) < 1e-5
    assert abs(change_of(page, token) - float(moved[token])) < 6e-4
    settled(page, lambda: page.locator("#edit-0").click())
    page.keyboard.press("g")
    page.keyboard.press("w")
    until(page, "() => document.querySelectorAll('#watched tbody tr').length === 2")
    page.locator("#map-title").click()
    page.keyboard.press("c")
    until(page, "() => document.querySelector('#watched .delta')")
    beside = logits - said_by(other, ids)["logits"][0, -1]
    cell = "document.querySelector(`#watched tr[data-id='${id}'] .delta`)"
    until(page, f"([id, x]) => Math.abs({cell}?.title - x) < 1e-4", [token, float(beside[token])])
    for at in ("", "1.99999", "x"):
        bad = served.client.get(f"/api/trace/{about['trace']}/watch", params={"ids": at})
        assert bad.status_code == 400


# ------------------------------------------------------------------------------------------- edits by hand


@pytest.mark.slow
def test_a_vector_is_scaled_by_pulling_it_or_by_keys(served: Served, open_page: Open) -> None:
    """+ and - on a cell, or the mouse: one edit of that cell; times one is none; the numbers are those of the
    edit.
    """
    page = open_page(served)
    first, ids = trace_id(page), ids_of(served)
    page.keyboard.press("g")
    page.keyboard.press("ArrowUp")
    settled(page, lambda: page.keyboard.press("+"))
    settled(page, lambda: page.keyboard.press("+"))
    place = (None, len(ids) - 1)
    edits = page.evaluate(STATE)["edits"]
    assert [(e["name"], e["kind"], tuple(e["at"]), e["value"]) for e in edits] == [
        ("decoder.blocks.2.middle", "scale", place, 1.5)
    ]
    wanted = said_by(served.model, ids, (Edit("decoder.blocks.2.middle", "scale", place, 1.5),))
    logits = page.evaluate("import('/page/store.js').then(({ app }) => [...app.trace.logits.data])")
    assert torch.equal(torch.tensor(logits), wanted["logits"][0, -1])
    settled(page, lambda: page.keyboard.press("-"))
    settled(page, lambda: page.keyboard.press("-"))
    assert trace_id(page) == first and page.evaluate(STATE)["edits"] == []
    box = page.locator("#map-0 canvas").bounding_box()
    x, y = box["x"] + box["width"] - 40, box["y"] + box["height"] - 50
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x, y - 20)
    page.mouse.move(x, y - 50)
    page.mouse.up()
    until(page, "import('/page/store.js').then(({ app }) => app.state.edits[0]?.value === 2 && !app.stale)")
    edit = page.evaluate(STATE)["edits"][0]
    assert edit["kind"] == "scale" and edit["at"] == list(place) and trace_id(page) != first
    assert "Moved most:" in page.inner_text("#mover")
    assert page.get_attribute("#scale-0", "value") == "2"


@pytest.mark.slow
def test_sweeps_go_on_from_patches(served: Served, open_page: Open) -> None:
    """Every head off, while another text's vector is put in: the server is told which vector."""
    text, other = "the cat sat", "the dog sat"
    page = open_page(served, f"#t={text}&b={other}")
    until(page, "() => document.querySelector('#effect')")
    page.keyboard.press("g")
    page.keyboard.press("ArrowUp")
    settled(page, lambda: page.keyboard.press("p"))
    page.locator("#sweep").click()
    page.wait_for_selector("text=12 of 12 heads")
    assert page.locator("#status.problem").count() == 0
    event = page.evaluate("document.querySelector('.ranking li').textContent")
    ids, there = ids_of(served, text), said_by(served.model, ids_of(served, other))
    row = page.evaluate(STATE)["edits"][0]["name"]
    put = Edit(row, "patch", (None, len(ids) - 1), there[row])
    base = said_by(served.model, ids, (put,))["logits"][0, -1]
    word = int(base.argmax())
    changes = []
    for layer in range(3):
        for head in range(4):
            off = Edit(f"decoder.blocks.{layer}.attn.mixed", "zero", (None, head))
            changes.append(float((said_by(served.model, ids, (put, off))["logits"][0, -1] - base)[word]))
    biggest = max(changes, key=abs)
    assert event.endswith(f"{'−' if biggest < 0 else '+'}{abs(biggest):.3f}")


@pytest.mark.slow
def test_a_sweep_says_at_once_how_far_it_is_and_can_be_stopped(
    served: Served, open_page: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant 30: its progress stands on the page one frame after the click, before the server has worked
    anything out; after "stop" the server makes no more passes than the one that runs.
    """
    from threading import Event

    page = open_page(served)
    passes, go_on, calls = served.session.passes, Event(), []
    says = passes.says

    def held(*args: Any) -> Any:
        calls.append(args)
        assert go_on.wait(60)
        return says(*args)

    monkeypatch.setattr(passes, "says", held)
    page.locator("#sweep").click()
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    assert page.inner_text("#sweep") == "stop" and "0 of" in page.inner_text(".sweep")
    until(page, "() => document.getElementById('sweep').textContent === 'stop'")
    page.locator("#sweep").click()
    until(page, "() => document.getElementById('sweep').textContent !== 'stop'")
    go_on.set()
    for _ in range(3):  # the model's thread is free again: whatever was still asked of it is done
        assert served.client.get("/api/vocab").status_code == 200
    assert len(calls) <= 2
    monkeypatch.undo()
    page.locator("#sweep").click()
    page.wait_for_selector("text=12 of 12 heads")


@pytest.mark.slow
@pytest.mark.parametrize("look", ["light", "dark", "forced"])
def test_axe_finds_nothing_where_things_are_compared(
    look: str, two: tuple[Served, Transformer], open_page: Open
) -> None:
    """Invariant 33: branches, followed words, another model beside, a scaled vector; on a phone nothing is
    cut off.
    """
    from axe_playwright_python.sync_playwright import Axe

    options = {"light": {}, "dark": {"color_scheme": "dark"}, "forced": {"forced_colors": "active"}}[look]
    ids = ids_of(two[0])
    tree = f"tree=:{'.'.join(map(str, ids))};0,{len(ids)}:7;0,{len(ids)}:9.12;1,{len(ids) + 1}:20"
    edit = "edits=scale:decoder.blocks.1@*,4=1.5"
    width = 390 if look == "light" else 1280
    page = open_page(two[0], f"#{tree}&watch=7.9&vs=beside&paint=watch&{edit}", width, 900, **options)
    until(page, "() => document.querySelector('#mover') && document.querySelector('#watched .delta')")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    found = Axe().run(page).response["violations"]
    assert [(one["id"], [node["html"][:120] for node in one["nodes"]]) for one in found] == []
