"""A run that is looked at: every number is that of its log, every step that of its weights."""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from clearhead.inspector.trace import trace
from clearhead.model.transformer import Transformer
from clearhead.server.look import prepare
from clearhead.server.run_view import RunView, Tail
from clearhead.training import probe
from clearhead.training.checkpoint import checkpoints, load_checkpoint, step_of, steps_in
from clearhead.training.loop import train
from clearhead.training.recipe import Recipe
from clearhead.training.report import TIMINGS, JsonLines, Samples, Watcher, read_metrics
from clearhead.training.run_folder import RunFolder
from serving import Served, tiny_decoder
from tiny_run import tiny_recipe, write_corpus

pytestmark = pytest.mark.usefixtures("unchecked")

TEXT = "the cat sees the old tree and the dog"
STEPS = 24
CHROMIUM = Path("/usr/bin/chromium")
Look = Callable[[Path], Served]


def recipe_of(corpus: Path, **more: Any) -> Recipe:
    return tiny_recipe(
        corpus, steps=STEPS, save_every=10, sample_every=8, sample_prompt="the ", probes=8, **more
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("look") / "corpus", documents=7)


@pytest.fixture(scope="module", autouse=True)
def eager() -> Iterator[None]:
    """Every step is worth a probe, whatever it costs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "PAUSE", 0.0)
        patch.setattr(probe, "SHARE", 1e9)
        yield


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has ended."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    return train(recipe_of(corpus), folder, watchers=[JsonLines(), Samples()]).path


@pytest.fixture(scope="module")
def look_at() -> Iterator[Look]:
    """A function that serves a run until the tests end."""
    open_ones: list[Served] = []

    def start(folder: Path) -> Served:
        view = RunView(folder)
        looking = prepare(view.model, view.tokenizer, TEXT, name=folder.name, run=view).start()
        app: Any = looking.server.config.app
        token = app.state.token
        client = httpx.Client(base_url=looking.url, headers={"x-clearhead-token": token}, timeout=30)
        open_ones.append(Served(looking, view.model, view.tokenizer, client))
        return open_ones[-1]

    yield start
    for served in open_ones:
        served.client.close()
        served.looking.close()


@pytest.fixture(scope="module")
def looked(look_at: Look, run: Path) -> Served:
    """The run, served."""
    return look_at(run)


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """A copy of the run's folder, without its data."""
    return Path(shutil.copytree(run, tmp_path / "copy", ignore=shutil.ignore_patterns("data", ".lock")))


def model_at(folder: Path, step: int) -> Transformer:
    """The model that the files of a step make, by another way than the server's."""
    model = Transformer(RunFolder(folder).config(), seed=99)
    places = (folder / part / f"step-{step:08d}" for part in ("probes", "checkpoints"))
    load_checkpoint(next(place for place in places if place.exists()), model)
    return model.eval()


def stories(served: Served, **body: Any) -> list[dict[str, Any]]:
    answer = served.client.post("/api/runs/current/story", json=body)
    assert answer.status_code == 200, answer.text
    return [json.loads(part.removeprefix("data: ")) for part in answer.text.split("\n\n") if part]


def next_event(served: Served, place: str, **headers: str) -> dict[str, Any]:
    """The first thing that the run's events say."""
    with served.client.stream(
        "GET", "/api/runs/current/events", params={"place": place}, headers=headers
    ) as answer:
        return next(json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: "))


# ---------------------------------------------------------------- the log


def test_invariant_35_numbers_of_the_training_view_are_those_of_the_log(looked: Served, run: Path) -> None:
    """Every number, bit for bit; samples and kept steps as they lie in the folder."""
    told = looked.client.get("/api/runs/current").json()
    entries = read_metrics(run / "metrics.jsonl")
    steps = [entry for entry in entries if "loss" in entry]
    assert len(steps) == STEPS and told["every"] == 1 and told["done"] == STEPS == told["steps"]
    for name in ("step", "loss", "lr", "norm", "tokens_per_second"):
        assert told["lines"][name] == [entry[name] for entry in steps]
    assert told["validation"] == [entry for entry in entries if "validation_loss" in entry] != []
    assert [sample["step"] for sample in told["samples"]] == [8, 16, 24]
    assert all(sample["text"].startswith("the ") for sample in told["samples"])
    kept = {step_of(path) for part in ("probes", "checkpoints") for path in steps_in(run / part)}
    assert told["milestones"] == sorted(kept) and told["newest"] == STEPS and 0 in kept
    assert told["cost"]["training_seconds"] > 0


def test_a_long_log_is_drawn_by_some_of_its_lines(copied: Path) -> None:
    """They are lines of the log, the last among them, and the answer says how many there are."""
    lines = [{"step": step, "loss": 5 - step / 5000} for step in range(5003)]
    (copied / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = RunView(copied).summary()
    columns = zip(told["lines"]["step"], told["lines"]["loss"], strict=True)
    drawn = [{"step": step, "loss": loss} for step, loss in columns]
    assert told["every"] == 3 and len(drawn) <= 2001
    assert all(line in lines for line in drawn[:: len(drawn) // 7]) and drawn[-1] == lines[-1]


def test_events_bring_what_is_added(look_at: Look, copied: Path) -> None:
    """A new line comes once, a torn one when it is whole; a log that was cut back is asked for anew."""
    served = look_at(copied)
    place = served.client.get("/api/runs/current").json()["place"]
    log = copied / "metrics.jsonl"
    with log.open("a") as file:
        file.write('{"step": 24, "loss": 1.5}\n{"step": 25, "lo')
    event = next_event(served, place)
    assert event["lines"] == [{"step": 24, "loss": 1.5}]
    assert event["newest"] == STEPS and event["milestones"][0] == 0
    tail = Tail(log, place)
    assert tail.read() == (False, [{"step": 24, "loss": 1.5}])
    with log.open("a") as file:
        file.write('ss": 2.5}\n')
    assert tail.read() == (False, [{"step": 25, "loss": 2.5}]) and tail.read() == (False, [])
    assert next_event(served, "0-0", **{"last-event-id": tail.place}).get("lines") is None
    whole = log.read_text().splitlines(keepends=True)
    log.write_text("".join(whole[:5]))
    assert next_event(served, tail.place)["anew"] is True
    assert tail.read()[0] is True


# ---------------------------------------------------------------- the steps


def test_invariant_35_a_step_is_the_trace_of_its_weights(looked: Served, run: Path) -> None:
    """Of every kept step, in any order: logits, values and weights are those of its files, bit for bit."""
    steps = looked.client.get("/api/runs/current").json()["milestones"]
    ids = looked.tokenizer.encode(TEXT) if looked.tokenizer else []
    name, weight = "decoder.blocks.1.attn.weights", "decoder.blocks.0.attn.q.weight"
    seen = {}
    for step in [*steps[::-1], *steps[:3]]:
        tensors, about = looked.trace(text=TEXT, step=step)
        model = model_at(run, step)
        wanted = trace(model, torch.tensor([ids])).values
        assert about["step"] == str(step)
        assert torch.equal(tensors["logits"], wanted["logits"][0, -1])
        assert torch.equal(looked.value(about["trace"], name), wanted[name])
        answer = looked.client.get(f"/api/w/{weight}", params={"trace": about["trace"], "at": "3,0:5"})
        assert torch.equal(unpacked(answer), model.state_dict()[weight][3, :5])
        assert seen.setdefault(step, about["trace"]) == about["trace"]
    assert len(set(seen.values())) == len(steps)


def unpacked(answer: httpx.Response) -> torch.Tensor:
    from serving import unpack

    return unpack(answer.content)[0]["x"]


def test_a_number_of_an_older_trace_is_explained_with_its_own_weights(looked: Served) -> None:
    """After another step was shown: the arithmetic still gives the recorded value."""
    first = looked.trace(text=TEXT, step=0)[1]["trace"]
    looked.trace(text=TEXT, step=STEPS)
    cell = looked.client.get(
        f"/api/trace/{first}/cell/decoder.blocks.0.attn.q", params={"at": "0,2,5"}
    ).json()
    total = 0.0
    for term in cell["terms"]:
        product = 1.0
        for factor in term["factors"]:
            product *= factor["value"]
        total += product
    assert total * cell["scale"] == pytest.approx(cell["value"], abs=cell["tolerance"])
    assert looked.value(first, "decoder.blocks.0.attn.q", at="0,2,5").item() == pytest.approx(cell["value"])


def test_edits_and_generation_are_of_the_step(looked: Served, run: Path) -> None:
    """An edit at an old step starts from that step; what is generated there is what its model generates."""
    from clearhead.generation.decode import generate

    edit = {"name": "decoder.blocks.0.attn", "kind": "zero", "at": [], "value": None}
    plain, about = looked.trace(text=TEXT, step=0)
    edited, _ = looked.trace(text=TEXT, step=0, edits=[edit])
    assert not torch.equal(plain["logits"], edited["logits"])
    back, again = looked.trace(text=TEXT, step=0)
    assert torch.equal(back["logits"], plain["logits"]) and again["trace"] == about["trace"]
    body = {"text": TEXT, "step": 0, "n": 4, "sampling": {"temperature": 0}}
    answer = looked.client.post("/api/generate", json=body).text
    events = [json.loads(part.removeprefix("data: ")) for part in answer.split("\n\n") if part]
    said = "".join(event.get("text", "") for event in events) + events[-1]["rest"]
    assert said == str(
        generate(
            model_at(run, 0), TEXT, tokenizer=RunFolder(run).tokenizer(), max_new_tokens=4, temperature=0
        )
    )


def test_python_that_is_taken_away_loads_the_step(looked: Served, run: Path) -> None:
    """The program prints the numbers of that step, not of the newest."""
    about = looked.trace(text=TEXT, step=0)[1]
    program = looked.client.get(f"/api/export/{about['trace']}.py", params={"at": "0,8"}).text
    assert f"load_checkpoint({about['weights']!r}, model)  # step 0" in program
    program = program.replace(repr(looked.session.name), repr(str(run)))
    printed: list[torch.Tensor] = []
    exec(compile(program, "taken.py", "exec"), {"print": printed.append})
    assert torch.equal(printed[0], looked.value(about["trace"], "logits", at="0,8"))


def test_the_story_of_a_text_is_that_of_its_traces(looked: Served) -> None:
    """Each chapter: the scores, the next word and the loss that the trace of its step has."""
    chapters = stories(looked, text=TEXT)
    assert [chapter["step"] for chapter in chapters] == looked.client.get("/api/runs/current").json()[
        "milestones"
    ]
    for chapter in chapters[:: len(chapters) - 1]:
        tensors, about = looked.trace(text=TEXT, step=chapter["step"])
        assert chapter["trace"] == about["trace"]
        assert torch.equal(torch.tensor(chapter["scores"]), tensors["scores"])
        assert chapter["id"] == int(tensors["logits"].argmax())
        assert chapter["p"] == pytest.approx(float(tensors["logits"].softmax(-1).max()), rel=1e-5)
    assert chapters[-1]["loss"] < chapters[0]["loss"]
    assert stories(looked, text=TEXT) == chapters
    assert looked.client.post("/api/runs/current/story", json={"text": ""}).status_code == 400


def test_how_far_the_parts_have_come_and_what_lies_idle(looked: Served, run: Path) -> None:
    """Between neighbouring kept steps: |change| / |weights| of every part, from the files; on this text: the
    share of hidden units that no token wakes, from a trace of each step.
    """
    chapters = stories(looked, text=TEXT)
    assert chapters[0]["moved"] == {"since": None, "parts": {}}
    ids = looked.tokenizer.encode(TEXT) if looked.tokenizer else []
    for before, after in ((chapters[0], chapters[1]), (chapters[-2], chapters[-1])):
        old, new = (model_at(run, one["step"]).state_dict() for one in (before, after))
        assert after["moved"]["since"] == before["step"]
        for part, names in {
            "embed": ["embed.weight"],
            "decoder.blocks.1.attn": [name for name in new if name.startswith("decoder.blocks.1.attn.")],
        }.items():
            change, size = (
                torch.cat([x.flatten() for x in xs]).norm()
                for xs in ([new[n] - old[n] for n in names], [new[n] for n in names])
            )
            assert after["moved"]["parts"][part] == pytest.approx(float(change / size), rel=1e-5)
        seen = trace(model_at(run, after["step"]), torch.tensor([ids]))
        hidden = seen.values["decoder.blocks.0.ff.hidden"][0]
        asleep = (hidden.abs() <= 1e-3 * hidden.square().mean().sqrt()).all(0)
        assert after["idle"]["decoder.blocks.0.ff"] == pytest.approx(float(asleep.float().mean()), abs=1e-6)


def test_experts_have_their_load_over_time(corpus: Path, tmp_path: Path, look_at: Look) -> None:
    """Every token goes to as many experts as the router may choose."""
    from clearhead.model.config_parts import ExpertsConfig

    experts = {"experts": ExpertsConfig(n_experts=3, top_k=2, d_ff=16)}
    recipe = recipe_of(corpus, model=experts, norms_every=1)
    folder = train(recipe, tmp_path / "run", watchers=[JsonLines()], stop_after=3).path
    served = look_at(folder)
    assert served.tokenizer is not None
    n_tokens = len(served.tokenizer.encode(TEXT))
    for chapter in stories(served, text=TEXT):
        assert len(chapter["experts"]) == 2
        assert all(len(load) == 3 and sum(load) == 2 * n_tokens for load in chapter["experts"].values())
    noted = served.client.get("/api/runs/current").json()["norms"]
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]
    assert len(noted) == len(lines) == 3
    for told, line in zip(noted, lines, strict=True):
        assert told == {name: value for name, value in line.items() if name == "step" or name in told}
        for name in ("update_norm/embed", "weight_norm/embed", "expert_load/decoder.blocks.0.ff"):
            assert told[name] == line[name]


def test_a_step_that_is_not_kept_is_refused(looked: Served, serve: Any, tokenizer: Any) -> None:
    """The message lists those that are; a model that is no run has none."""
    for step in (7_777, -1, True, "3", 1.5):
        answer = looked.client.post("/api/trace", json={"text": TEXT, "step": step})
        assert answer.status_code == 400 and "there are those of steps 0, " in answer.json()["error"]
    other = serve(tiny_decoder(tokenizer.vocab_size), tokenizer, "the cat")
    answer = other.client.post("/api/trace", json={"text": "the cat", "step": 0})
    assert answer.status_code == 400 and "no steps to go back to" in answer.json()["error"]
    assert other.client.get("/api/runs/current").status_code == 404


def test_a_copied_folder_can_be_looked_at(look_at: Look, copied: Path, run: Path) -> None:
    """Without data and without checkpoints: the probes do. What was dropped stays open while it is shown."""
    shutil.rmtree(copied / "checkpoints")
    served = look_at(copied)
    newest = step_of(steps_in(copied / "probes")[0])
    tensors, about = served.trace(text=TEXT)
    assert about["step"] == str(newest)
    shutil.rmtree(copied / "probes" / f"step-{newest:08d}")
    again, _ = served.trace(text=TEXT, step=newest)
    assert torch.equal(again["logits"], tensors["logits"])


def test_damaged_weights_are_named(look_at: Look, copied: Path) -> None:
    """A flipped bit in a probe is an error in one line; a checkpoint of the same step does as well."""
    served = look_at(copied)
    for path in steps_in(copied / "probes"):
        file = path / "model.safetensors"
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    answer = served.client.post("/api/trace", json={"text": TEXT, "step": 0})
    assert answer.status_code == 400 and "SHA-256" in answer.json()["error"]
    assert served.trace(text=TEXT, step=STEPS)[1]["step"] == str(STEPS)


def test_the_probe_sentence_is_long_enough_to_show_something(copied: Path, run: Path) -> None:
    """The prompt, what the model wrote, or what it never saw; a copy without data has at least the prompt."""
    view = RunView(run)
    assert len(view.tokenizer.encode(view.text())) >= 8
    (copied / "samples.txt").write_text(
        "--- step 8\nthe \ufffd\n--- step 16\nthe cat sees the dog and the bird\n"
    )
    assert RunView(copied).text() == "the cat sees the dog and the bird"
    (copied / "samples.txt").unlink()
    assert RunView(copied).text() == "the "


def test_a_run_without_weights_says_when_they_come(corpus: Path, tmp_path: Path) -> None:
    """Before its first checkpoint, without probes."""
    folder = train(recipe_of(corpus), tmp_path / "run", stop_after=1).path
    shutil.rmtree(folder / "checkpoints")
    shutil.rmtree(folder / "probes")
    with pytest.raises(
        FileNotFoundError, match="holds no weights yet: its first checkpoint comes after step 10"
    ):
        RunView(folder)


# ---------------------------------------------------------------- the run


def outcome(folder: Path) -> dict[str, Any]:
    newest = checkpoints(folder)[0]
    hashes = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(newest.iterdir())}
    log = [
        {name: value for name, value in entry.items() if name not in TIMINGS}
        for entry in read_metrics(folder / "metrics.jsonl")
    ]
    return {"step": newest.name, "log": log, **hashes}


def test_invariant_34_looking_leaves_a_run_unchanged_bit_for_bit(
    corpus: Path, tmp_path: Path, look_at: Look
) -> None:
    """Opened, traced and scrubbed at every step, with dropout; the newest step follows the checkpoints."""
    dropout = {"embed_dropout": 0.1, "attn_dropout": 0.1, "ff_dropout": 0.1}
    alone = train(tiny(corpus, dropout, 0), tmp_path / "alone", watchers=[JsonLines()])
    newest: list[str] = []

    class Looker(Watcher):
        served: Served | None = None

        def on_start(self, run: RunFolder, first_step: int, steps: int) -> None:
            self.folder = run.path

        def on_step(self, step: int, metrics: dict[str, Any]) -> None:
            self.served = self.served or look_at(self.folder)
            client = self.served.client
            told = client.get("/api/runs/current").json()
            assert told["lines"]["loss"][-1] == metrics["loss"] and told["done"] == step + 1
            assert client.get("/").status_code == 200
            newest.append(self.served.trace(text=TEXT)[1]["step"])
            self.served.trace(text=TEXT, step=told["milestones"][step % len(told["milestones"])])
            if step % 6 == 0:
                stories(self.served, text=TEXT)

    seen = train(tiny(corpus, dropout, 8), tmp_path / "seen", watchers=[JsonLines(), Looker()])
    assert outcome(seen.path) == outcome(alone.path)
    assert set(newest[10:20]) == {"10"} and set(newest[20:]) == {"20"}


def tiny(corpus: Path, model: dict[str, Any], probes: int) -> Recipe:
    return tiny_recipe(corpus, steps=STEPS, save_every=10, sample_every=8, model=model, probes=probes)


# ---------------------------------------------------------------- the page


@pytest.mark.slow
def test_the_page_goes_through_the_steps_of_a_run(look_at: Look, copied: Path) -> None:
    """The scrubber by keyboard, the address, numbers of the log, a text over time, news as it comes."""
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}; apt-get install chromium")
    served = look_at(copied)
    with ThreadPoolExecutor(1) as thread:  # of its own: another test of this process may hold a browser open
        thread.submit(walk, served, copied).result()


def walk(served: Served, folder: Path) -> None:
    from playwright.sync_api import sync_playwright

    steps = served.client.get("/api/runs/current").json()["milestones"]
    log = {e["step"]: e for e in read_metrics(folder / "metrics.jsonl") if "loss" in e}
    complaints: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=["--no-sandbox", "--headless", "--disable-gpu"]
        )
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(10_000)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"{served.base_url}/")

        def shows(step: int) -> None:
            """The page is at a step: its trace is that step's, and so are the numbers of the log."""
            wanted = served.trace(text=TEXT, step=step)[1]["trace"]
            page.wait_for_selector(f"html[data-ready='{wanted}']")
            page.wait_for_function(
                "([id, value]) => document.getElementById(id)?.title === value",
                arg=["value-loss", page.evaluate("String", log[max(step, 1) - 1]["loss"])],
            )
            for name in ("lr", "norm", "tokens_per_second"):
                assert (
                    float(page.get_attribute(f"#value-{name}", "title") or "nan")
                    == log[max(step, 1) - 1][name]
                )

        shows(STEPS)
        assert "24 of 24" in page.inner_text("#train-title")
        page.focus("#step")
        page.keyboard.press("Home")
        shows(0)
        assert page.locator("#sample-none").count() == 1  # what was written later is no part of step 0
        assert "(step 1)" in page.inner_text("#caption-loss")  # whose loss that is
        page.keyboard.press("ArrowRight")
        shows(steps[1])
        assert f"step={steps[1]}" in page.url
        assert page.get_attribute("#step", "aria-valuetext") == f"step {steps[1]}"
        page.reload()
        shows(steps[1])
        page.click("#time summary")
        page.wait_for_function(
            "n => [...document.querySelectorAll('#time-table tbody td')].every(td => td.textContent !== '…')"
            " && document.querySelectorAll('#time-table tbody tr').length === n",
            arg=len(steps),
        )
        chapter = stories(served, text=TEXT)[1]
        page.focus("#time-grid")
        value = f"{chapter['scores'][0][0][4]:.3f}"
        page.wait_for_function(
            "text => document.getElementById('time-grid-cell').textContent.endsWith(text)", arg=value
        )
        page.select_option("#time-score", "update")
        page.wait_for_function(
            "() => document.getElementById('time-source')?.textContent.includes('kept weights')"
        )
        page.focus("#time-grid")
        page.keyboard.press("Control+Home")
        page.wait_for_function(
            "x => { const said = document.getElementById('time-grid-cell').textContent;"
            " return said.startsWith('embed, step') && Math.abs(said.split(' ').at(-1).replace('−', '-') - x)"
            " < 1e-3 * x + 5e-5; }",
            arg=chapter["moved"]["parts"]["embed"],
        )
        page.click("#step-pin")
        page.wait_for_function(f"() => location.hash.includes('vs={steps[1]}')")
        page.click("#step-newest")
        shows(STEPS)
        both = (served.trace(text=TEXT, step=step)[0]["logits"] for step in (steps[1], STEPS))
        before, after = (logits.softmax(-1) for logits in both)
        page.wait_for_function(
            "id => document.getElementById('mover')?.dataset.id === id",
            arg=str(int((after - before).abs().argmax())),
        )
        assert page.input_value("#paint-choice") == "delta"
        page.click("#step-pin")
        page.wait_for_function("() => !document.getElementById('mover')")
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(log[STEPS - 1] | {"step": STEPS, "loss": 1.25}) + "\n")
        page.wait_for_function(
            "() => document.getElementById('train-title').textContent.includes('25 of 24')"
        )
        assert complaints == []
        for look in ({"color_scheme": "dark"}, {"forced_colors": "active"}):
            assert violations(browser, served, **look) == []
        browser.close()


def violations(browser: Any, served: Served, **look: Any) -> list[str]:
    """What axe finds wrong with the training view on a phone, all of it open."""
    from axe_playwright_python.sync_playwright import Axe

    context = browser.new_context(viewport={"width": 390, "height": 900}, bypass_csp=True, **look)
    page = context.new_page()
    page.goto(f"{served.base_url}/#time=1")
    page.click("#sample-all summary")
    page.wait_for_selector("#time-table tbody tr")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    found = [violation["id"] for violation in Axe().run(page).response["violations"]]
    context.close()
    return found
