"""The HTTP app: what it answers, whom it refuses, and how it stands mistakes, excess and slow clients."""

import base64
import json
import logging
import socket
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch

from clearhead.generation.decode import generate
from clearhead.server import guard
from clearhead.server.page_files import PAGE, find_file
from clearhead.text.tokenizer import Tokenizer
from reference.zoo import Foreign, animal
from serving import TEXT, Serve, Served, tiny_decoder, unpack

SECRETS = "my secret diary"


def raw(served: Served, request: bytes, timeout: float = 20) -> bytes:
    """What a request, given byte by byte as it is, gets for an answer."""
    host, port = served.base_url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout) as line:
        line.sendall(request)
        answer = b""
        while part := line.recv(65536):
            answer += part
            if b"\r\n\r\n" in answer and b"connection: close" not in answer.lower():
                break
    return answer


def error_of(answer: httpx.Response) -> str:
    """The error of an answer: one line, in the one form they have."""
    told = answer.json()
    assert list(told) == ["error"]
    assert "\n" not in told["error"] and "Traceback" not in told["error"]
    return told["error"]


# ------------------------------------------------------------------------------------------------ answers


def test_the_page_holds_the_manifest_and_the_first_trace(served: Served) -> None:
    """Nothing else need be asked for the first picture."""
    text = served.client.get("/").text
    held = text.split('<script type="application/json" id="first">')[1].split("</script>")[0]
    first = json.loads(held)
    assert first["manifest"] == served.client.get("/api/model").json()
    tensors, metadata = unpack(base64.b64decode(first["trace"]["data"]))
    assert (first["text"], tensors["lens.id"].shape[1]) == (TEXT, len(metadata["pieces"]))
    assert f'content="{served.token}"' in text


def test_a_trace_has_the_parts_of_the_contract(served: Served) -> None:
    """Names, types and sizes of the tensors, and the metadata."""
    tensors, metadata = served.trace(text=TEXT, seq=1, client="contract")
    length, vocabulary = len(metadata["pieces"]), served.session.config.vocab_size
    sizes = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
    assert sizes == {
        "lens.id": ("int32", (7, length)),
        "lens.p": ("float32", (7, length)),
        "logits": ("float32", (vocabulary,)),
        "norm": ("float32", (7, length)),
        "lines": ("float32", (3, 4, length)),
        "heads": ("uint8", (3, 4, 32, 32)),
        "scores": ("float32", (3, 4, 6)),
    }
    assert len(metadata["rows"]) == 7 and metadata["head"] == "lm"
    assert float(metadata["delta"]) <= 1e-4
    text = b"".join(bytes.fromhex(piece["bytes"]) for piece in metadata["pieces"])
    assert text == TEXT.encode()
    assert {str(i) for i in tensors["lens.id"].unique().tolist()} <= set(metadata["words"])


def test_slices_cells_and_lines_are_the_recorded_numbers(served: Served) -> None:
    """Invariant 1: what is opened below the map is what the trace holds."""
    tensors, metadata = served.trace(text="the dog sat on the mat")
    number, name = metadata["trace"], "decoder.blocks.1.attn.weights"
    weights = served.value(number, name)
    assert torch.equal(served.value(number, name, at="0,2,3,1:3"), weights[0, 2, 3, 1:3])
    last = len(metadata["pieces"]) - 1
    assert torch.equal(tensors["lines"][1], weights[0, :, last])
    other, _ = unpack(served.client.get(f"/api/trace/{number}/lines", params={"at": 3}).content)
    assert torch.equal(other["lines"][1], weights[0, :, 3])
    assert torch.equal(other["logits"], served.value(number, "logits", at="0,3"))
    cell = served.client.get(f"/api/trace/{number}/cell/{name}", params={"at": "0,2,3,1"}).json()
    assert cell["value"] == float(weights[0, 2, 3, 1]) and cell["compute"] == "softmax"
    source = served.client.get(f"/api/source/{cell['source']['key']}").text
    assert '"weights"' in source.splitlines()[cell["source"]["line"] - 1]
    embedding, _ = unpack(served.client.get("/api/w/embed.weight", params={"at": "5"}).content)
    assert torch.equal(embedding["x"], served.model.get_parameter("embed.weight")[5])


def test_embedding_strip_is_the_row_of_the_token(served: Served) -> None:
    """Invariant 3, bitwise."""
    _, metadata = served.trace(text="a cat")
    strip = served.value(metadata["trace"], "embed")
    table = served.model.get_parameter("embed.weight")
    assert torch.equal(strip[0], table[torch.tensor(metadata["ids"])])


def test_edits_change_the_number_and_back(served: Served) -> None:
    """Invariant 23, invariant 24: off again is the first trace; its own value changes nothing; a head off
    does.
    """
    before, first = served.trace(text=TEXT)
    name = "decoder.blocks.1.attn.weights"
    head = {"name": name, "kind": "zero", "at": [None, 2], "value": None}
    edited, other = served.trace(text=TEXT, edits=[head])
    assert other["trace"] != first["trace"] and other["delta"] == ""
    assert not torch.equal(edited["logits"], before["logits"])
    assert float(edited["lines"][1, 2].abs().max()) == 0
    again, third = served.trace(text=TEXT, edits=[])
    assert third["trace"] == first["trace"]
    own = {"name": name, "kind": "patch", "at": [], "value": {"trace": first["trace"]}}
    same, _ = served.trace(text=TEXT, edits=[own])
    assert torch.equal(same["logits"], again["logits"])
    assert torch.equal(same["lens.p"], again["lens.p"])


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        ({"name": "nothing", "kind": "zero"}, "no value"),
        ({"name": "embed", "kind": "explode"}, "explode"),
        ({"name": "embed", "kind": "scale"}, "value"),
        ({"name": "embed", "kind": "zero", "at": [0, 999]}, "fit"),
        ({"name": "embed", "kind": "patch", "value": {"trace": "none"}}, "no trace"),
        ({"name": "embed", "kind": "zero", "at": "0"}, "place"),
        (7, "edit"),
    ],
)
def test_an_edit_that_does_not_fit_is_named(unchecked: None, served: Served, edit: Any, word: str) -> None:
    """4xx and a line that says what is wrong."""
    answer = served.client.post("/api/trace", json={"text": TEXT, "edits": [edit]})
    assert answer.status_code in (400, 404) and word in error_of(answer)


def test_a_frozen_head_looks_where_it_looked(served: Served) -> None:
    """Its weights are bitwise the unedited pass's while another edit moves every other head's."""
    name = "decoder.blocks.1.attn.weights"
    before, first = served.trace(text=TEXT)
    freeze = {"name": name, "kind": "freeze", "at": [None, 1]}
    off = {"name": "decoder.blocks.0.ff", "kind": "zero", "at": []}
    alone, _ = served.trace(text=TEXT, edits=[freeze])
    assert torch.equal(alone["logits"], before["logits"])
    after, edited = served.trace(text=TEXT, edits=[off, freeze])
    was, now = served.value(first["trace"], name), served.value(edited["trace"], name)
    assert torch.equal(now[0, 1], was[0, 1]) and not torch.equal(now[0, 0], was[0, 0])
    unfrozen, _ = served.trace(text=TEXT, edits=[off])
    assert not torch.equal(after["logits"], unfrozen["logits"])


def test_tokens_are_drawn_from_the_logits_that_are_shown(served: Served) -> None:
    """Invariant 5: each event names the trace whose last logits it was drawn from, bitwise the same."""
    _, start = served.trace(text="the cat")
    asked = {"trace": start["trace"], "sampling": {"temperature": 0.9, "seed": 4}, "n": 6}
    answer = served.client.post("/api/generate", json=asked)
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line]
    assert events[-1]["done"] == "length" and len(events) == 7
    ids = list(start["ids"])
    for event in events[:-1]:
        tensors, metadata = served.trace(ids=ids)
        assert metadata["trace"] == event["trace"]
        logs = tensors["logits"].log_softmax(-1)
        assert float(logs[event["id"]]) == event["logprob"]
        assert [a[0] for a in event["alternatives"]] == logs.topk(10).indices.tolist()
        ids.append(event["id"])


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "seed": 1, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.3},
        {"temperature": 1.2, "seed": 2, "min_p": 0.05},
    ],
)
def test_the_page_and_the_library_draw_the_same_tokens(served: Served, sampling: dict[str, Any]) -> None:
    """Invariant 7: same text, settings and seed."""
    ids = served.session.reader.tokens_of("the dog sat").ids
    answer = served.client.post("/api/generate", json={"ids": ids, "sampling": sampling, "n": 8})
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line]
    model: Any = served.model
    wanted = generate(model, list(ids), tokenizer=served.session.tokenizer, max_new_tokens=8, **sampling)
    assert [event["id"] for event in events[:-1]] == wanted


def test_a_sweep_of_heads_is_what_each_edit_does(served: Served) -> None:
    """One event a head: the change of the word's logit, the same as the edit made by hand."""
    base, _ = served.trace(text="the cat sat")
    answer = served.client.post("/api/sweep", json={"text": "the cat sat"})
    first, *events, last = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line]
    word = int(base["logits"].argmax())
    assert (first["word"], first["all"], last["finished"]) == (word, 12, 12)
    assert [event["done"] for event in events] == list(range(1, 13))
    event = events[6]
    edit = {"name": f"{event['path']}.mixed", "kind": "zero", "at": [None, event["head"]]}
    edited, _ = served.trace(text="the cat sat", edits=[edit])
    assert event["logit"] == float(edited["logits"][word])
    plain, _ = served.trace(text="the cat sat")
    assert event["change"] == pytest.approx(float(edited["logits"][word] - plain["logits"][word]), abs=1e-6)


@pytest.mark.slow
def test_a_sweep_of_rows_ends_where_the_other_text_is(served: Served) -> None:
    """The last row of the last position patched gives the other text's answer; texts must fit."""
    other, metadata = served.trace(ids=[5, 8])
    body = {"what": "rows", "ids": [5, 4], "from": metadata["trace"], "word": 3}
    answer = served.client.post("/api/sweep", json=body)
    first, *events, _ = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line]
    assert first["all"] == len(events) == 6 * 2
    assert events[-1]["logit"] == pytest.approx(float(other["logits"][3]), abs=1e-5)
    assert events[0]["change"] == pytest.approx(0, abs=1e-6)  # both begin with the same token
    for wrong in ({"ids": [1, 2, 3]}, {"from": "none"}, {"what": "all"}, {"word": -1}, {"select": 9}):
        refused = served.client.post("/api/sweep", json=body | wrong)
        assert refused.status_code in (400, 404) and error_of(refused)


def test_tokenize_tells_bytes_and_merges(served: Served) -> None:
    """Chips need no pass of the model."""
    told = served.client.post("/api/tokenize", content=json.dumps({"text": "the cat \ud83d\ude00"})).json()
    assert b"".join(bytes.fromhex(p["bytes"]) for p in told["pieces"]) == "the cat 😀".encode()
    assert len(told["merges"]) == len(told["ids"])


def test_exports_hold_the_same_numbers(served: Served, tmp_path: Path) -> None:
    """Safetensors and CSV by value; the Python runs and prints the number."""
    _, metadata = served.trace(text="the cat sat")
    number, name = metadata["trace"], "decoder.blocks.0.attn.scores"
    tensors, _ = unpack(served.client.get(f"/api/export/{number}.safetensors").content)
    assert torch.equal(tensors[name], served.value(number, name))
    table = served.client.get(f"/api/export/{number}.csv", params={"name": name, "at": "0,1,2"}).text
    rows = [line.split(",") for line in table.splitlines()[1:]]
    assert [float(row[-1]) for row in rows] == tensors[name][0, 1, 2].tolist()
    code = served.client.get(f"/api/export/{number}.py", params={"name": name, "at": "0,1,2,1"}).text
    printed: list[Any] = []
    compiled = compile(code.replace("open_model('tiny decoder', 'cpu')", "given"), "export", "exec")
    exec(compiled, {"given": (served.model, None), "print": printed.append})
    assert float(printed[0]) == float(tensors[name][0, 1, 2, 1])
    assert served.client.get(f"/api/export/{number}.exe").status_code == 404


# ----------------------------------------------------------------------------------------- the last one wins


def test_an_older_question_is_stale(served: Served) -> None:
    """Invariant 29: 409 with the one word; another page's count is its own."""
    post = served.client.post
    assert post("/api/trace", json={"text": "the", "seq": 9, "client": "old"}).status_code == 200
    answer = post("/api/trace", json={"text": "the cat", "seq": 8, "client": "old"})
    assert (answer.status_code, error_of(answer)) == (409, "stale")
    assert post("/api/trace", json={"text": "the cat", "seq": 1, "client": "new"}).status_code == 200


def test_fast_typing_ends_with_the_last_text(served: Served) -> None:
    """Invariant 29: questions that come faster than answers: the last is answered, whatever became of the
    others.
    """

    def ask(seq: int) -> httpx.Response:
        return served.client.post("/api/trace", json={"text": TEXT[: seq + 1], "seq": seq, "client": "fast"})

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(1, 31)))
    assert {answer.status_code for answer in answers} <= {200, 409}
    assert answers[-1].status_code == 200
    _, metadata = unpack(answers[-1].content)
    assert b"".join(bytes.fromhex(p["bytes"]) for p in metadata["pieces"]) == TEXT[:31].encode()


# ------------------------------------------------------------------------------------------- who may not ask


@pytest.mark.parametrize(
    "host", ["evil.com", "", ":8000", "[::1]", "127.0.0.1.evil.com", "localhost.evil.com:80"]
)
def test_foreign_hosts_are_refused(served: Served, host: str) -> None:
    """Invariant 32, S7: a name that somebody else's DNS points at this machine."""
    answer = raw(served, f"GET /api/model HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
    assert b" 403 " in answer.split(b"\r\n")[0]


def test_two_hosts_or_none_are_refused(served: Served) -> None:
    """S7: also in the forms that proxies read differently."""
    for head in ("Host: localhost\r\nHost: evil.com\r\n", ""):
        answer = raw(served, f"GET / HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode())
        assert answer.split(b" ")[1] in (b"400", b"403")


@pytest.mark.parametrize(
    "origin", ["http://evil.com", "null", "http://localhost:1", "https://127.0.0.1.evil.com"]
)
def test_foreign_origins_are_refused(served: Served, origin: str) -> None:
    """Invariant 32, S7: and no answer carries a header that would let another site read it."""
    for method in ("GET", "POST", "OPTIONS"):
        answer = served.client.request(method, "/api/model", headers={"origin": origin})
        assert answer.status_code == 403
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_the_pages_own_origin_and_none_are_served(served: Served) -> None:
    """S7: a browser sends its own, a program none."""
    assert served.client.get("/api/model", headers={"origin": served.base_url}).status_code == 200
    assert served.client.get("/api/model").status_code == 200
    assert served.client.get("/api/model", headers={"sec-fetch-site": "cross-site"}).status_code == 403


@pytest.mark.parametrize("path", ["/api/trace", "/api/tokenize", "/api/generate"])
@pytest.mark.parametrize("token", [None, "", "wrong", "é"])
def test_a_post_without_the_token_is_refused(served: Served, path: str, token: str | None) -> None:
    """Invariant 32."""
    headers = {} if token is None else {"x-clearhead-token": token.encode()}
    answer = httpx.post(served.base_url + path, json={"text": "a"}, headers=headers)
    assert answer.status_code == 403 and "token" in error_of(answer)


def test_every_answer_carries_the_policy(served: Served) -> None:
    """Invariant 31: under it a browser loads nothing from elsewhere, and runs nothing inline."""
    for path in ("/", "/api/model", "/nothing", "/page/page.css"):
        policy = served.client.get(path).headers["content-security-policy"]
        assert policy.startswith("default-src 'self';") and "unsafe" not in policy
        assert served.client.get(path).headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "path",
    [
        "/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py", "/page/..\\app.py", "/page/%00",
        "/page//etc/passwd", "/page/" + "a" * 5000, "/page/.", "/page/",
        "/api/source/..%2f..%2fpyproject.toml",
        "/api/source//etc/passwd", "/api/source/server/app.py", "/api/w/..%2f", "/api/trace/..%2f/t/embed",
        "/api/export/..%2f..%2fx.py",
    ],
)  # fmt: skip
def test_paths_that_lead_elsewhere_are_not_found(served: Served, path: str) -> None:
    """S9: files of the page and sources of the model, and no others."""
    answer = raw(served, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    assert answer.split(b" ")[1] in (b"400", b"404"), answer[:200]
    assert b"root:" not in answer and b"import " not in answer


def test_a_link_out_of_the_page_is_not_followed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """S9: a symbolic link in the folder."""
    (tmp_path / "outside.js").write_text("secret", encoding="utf-8")
    root = tmp_path / "page"
    root.mkdir()
    (root / "inside.js").write_text("fine", encoding="utf-8")
    (root / "link.js").symlink_to(tmp_path / "outside.js")
    monkeypatch.setattr("clearhead.server.page_files.PAGE", root)
    assert find_file("inside.js").name == "inside.js"
    with pytest.raises(KeyError):
        find_file("link.js")


@pytest.fixture(scope="module")
def locked(serve: Serve, tokenizer: Tokenizer) -> Served:
    """The same with a key."""
    return serve(tiny_decoder(tokenizer.vocab_size), tokenizer, TEXT, key="open sesame")


def test_every_route_wants_the_key(locked: Served) -> None:
    """S6: 401 without it and with a wrong one, but for /health and the page's files."""
    app = locked.looking.server.config.app
    paths = {route.path for route in app.routes} - {"/health", "/page/{path:path}"}
    assert len(paths) >= 10
    for path in paths:
        path = path.replace(":path", "").replace("{", "").replace("}", "")
        for headers in ({}, {"authorization": "Bearer wrong"}, {"cookie": "clearhead_key=wrong"}):
            for method in ("GET", "POST"):
                token = {"x-clearhead-token": locked.token}
                answer = httpx.request(method, locked.base_url + path, headers=headers | token)
                assert answer.status_code == 401, path
    assert httpx.get(f"{locked.base_url}/health").status_code == 200


def test_the_key_opens(locked: Served) -> None:
    """In the address once, then as a cookie; or as a bearer, under any name of the machine."""
    with httpx.Client(base_url=locked.base_url) as client:
        assert client.get("/?key=wrong key").status_code == 401
        answer = client.get("/", params={"key": "open sesame"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert "HttpOnly" in answer.headers["set-cookie"]
        assert client.get("/api/model").status_code == 200
    bearer = {"authorization": "Bearer open sesame", "host": "my-machine:80"}
    assert httpx.get(f"{locked.base_url}/api/model", headers=bearer).status_code == 200


# ---------------------------------------------------------------------------------------------------- excess


def test_excess_is_refused_at_once_and_keeps_no_memory(served: Served) -> None:
    """Invariant 32, S5: large bodies, endless texts, deep JSON, numbers that are none; 4xx, and the limit is
    named.
    """
    token = {"x-clearhead-token": served.token, "content-type": "application/json"}
    max_len = served.session.reader.max_len
    bodies = {
        b'{"text":"' + b"a" * 10_000_000 + b'"}': "1000000 bytes",
        json.dumps({"text": "a" * 20_001}).encode(): "20000",
        json.dumps({"ids": [1] * 100_000}).encode(): f"{max_len} (max_len)",
        json.dumps({"text": "cat " * 4000}).encode(): f"{max_len} (max_len)",
        b'{"text":' + b"[" * 10_000 + b"]" * 10_000 + b"}": "",
        b"[" * 10_000: "",
        b'{"ids":[NaN]}': "NaN",
        b'{"ids":[-1]}': "vocabulary",
        b'{"ids":[1e400]}': "",
        b'{"ids":[99999999999999999999]}': "vocabulary",
        b'{"ids":[true]}': "ids",
        b'{"text":"a","select":-1}': "position",
        b'{"text":"a","select":99}': "position",
        b'{"text":"a","seq":"x"}': "seq",
        b'{"text":""}': "empty",
        b"{}": "text",
        b"": "JSON",
        b"\xff\xfe": "JSON",
        b"[1]": "object",
        b'{"text":"a","edits":' + b"[1]" * 1 + b"}": "edit",
    }
    before = psutil.Process().memory_info().rss
    for body, word in bodies.items():
        answer = served.client.post("/api/trace", content=body, headers=token)
        assert 400 <= answer.status_code < 500, body[:80]
        assert word in error_of(answer)
    assert psutil.Process().memory_info().rss - before < 50_000_000
    assert served.client.get("/health").text == "ok"


def test_a_body_without_a_length_is_counted(served: Served) -> None:
    """S5: sent in chunks, it ends at the limit."""

    def chunks() -> Any:
        yield b'{"text":"'
        for _ in range(40):
            yield b"a" * 100_000

    try:
        answer = served.client.post("/api/trace", content=chunks())
    except httpx.WriteError:  # the server has hung up while we still wrote
        return
    assert answer.status_code == 413


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"n": 10**6}, "1024"), ({"n": 0}, "n="), ({"n": 127}, "more"), ({"n": "x"}, "n="),
        ({"sampling": {"temperature": -1}}, "temperature"), ({"trace": "none"}, "no trace"),
        ({"sampling": {"top_p": 2, "temperature": 1}}, "top_p"), ({"sampling": {"seed": 1e9}}, "seed"),
        ({"sampling": {"speed": 1}}, "sampling"), ({"sampling": [1]}, "sampling"),
        ({"sampling": {"temperature": 10**400}}, "size"), ({"sampling": {"temperature": True}}, "number"),
    ],
)  # fmt: skip
def test_mistakes_in_generation_are_named(
    unchecked: None, served: Served, change: dict[str, Any], word: str
) -> None:
    """S5: before the first token, as an answer of its own."""
    answer = served.client.post("/api/generate", json={"text": "the cat", "n": 2} | change)
    assert 400 <= answer.status_code < 500 and word in error_of(answer)


def test_heads_of_a_megabyte_are_refused(served: Served) -> None:
    """S5: before they are in memory."""
    request = b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 1_000_000
    try:
        answer = raw(served, request)
    except OSError:  # reset while we still wrote
        answer = b"HTTP/1.1 400 "
    assert answer.split(b" ")[1] in (b"400", b"431")


def test_lone_surrogates_are_text(served: Served) -> None:
    """S5: what a browser may send when a key is typed halfway through a character."""
    answer = served.client.post("/api/trace", content=json.dumps({"text": "a\ud83d"}))
    _, metadata = unpack(answer.content)
    assert b"".join(bytes.fromhex(p["bytes"]) for p in metadata["pieces"]) == "a\ufffd".encode()


def test_slices_are_bounded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 32, S14: nobody gets more than the limit at once; it is named."""
    _, metadata = served.trace(text=TEXT)
    monkeypatch.setattr("clearhead.inspector.views.LARGEST_SLICE", 1000)
    path = f"/api/trace/{metadata['trace']}/t/logits"
    answer = served.client.get(path)
    assert answer.status_code == 400 and "1000" in error_of(answer)
    assert served.client.get(path, params={"at": "0,1"}).status_code == 200
    assert served.client.get(path, params={"level": 4}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/api/trace/none/t/embed", "/api/trace/ID/t/nothing", "/api/trace/ID/t/embed?at=0,999",
        "/api/trace/ID/t/embed?level=99", "/api/trace/ID/t/embed?level=x", "/api/w/nothing",
        "/api/trace/ID/t/embed?reduce=mean",
        "/api/trace/ID/t/embed?dtype=f64", "/api/trace/ID/cell/embed?at=0", "/api/trace/ID/cell/embed?at=a,b",
        "/api/trace/ID/cell/nothing?at=0", "/api/trace/ID/lines?at=999", "/api/trace/ID/lines", "/nothing",
    ],
)  # fmt: skip
def test_what_is_not_there_is_said_in_one_line(served: Served, path: str) -> None:
    """Invariant 32: names and places outside the manifest."""
    _, metadata = served.trace(text="the cat")
    answer = served.client.get(path.replace("ID", metadata["trace"]))
    assert answer.status_code in (400, 404)
    assert error_of(answer)


def test_nothing_typed_is_logged(served: Served, caplog: pytest.LogCaptureFixture, capfd: Any) -> None:
    """Neither what is answered, nor what is refused, nor what goes wrong inside."""
    with caplog.at_level(logging.DEBUG):
        served.trace(text=SECRETS)
        served.client.post("/api/trace", json={"text": SECRETS, "edits": [SECRETS]})
        served.client.get(f"/api/source/{SECRETS}")
        before = served.session.speller.tokenizer
        served.session.tokenizer = None
        served.client.post("/api/trace", json={"text": SECRETS})
        served.session.tokenizer = before
    told = "".join(record.getMessage() for record in caplog.records if not record.name.startswith("httpx"))
    out, err = capfd.readouterr()
    assert SECRETS not in told + out + err


def test_our_own_mistake_is_one_line_and_no_text(
    served: Served, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception that nobody expected: 500, its kind and its place, not its message; and life goes on."""

    def break_down(text: str) -> Any:
        raise TypeError(SECRETS)

    monkeypatch.setattr(served.session, "tokenize", break_down)
    answer = served.client.post("/api/tokenize", json={"text": "a"})
    assert answer.status_code == 500 and "TypeError" in error_of(answer) and SECRETS not in answer.text
    assert "TypeError" in caplog.text and SECRETS not in caplog.text
    assert served.client.get("/health").status_code == 200


# ---------------------------------------------------------------------------------------------- slow clients


def test_half_requests_are_hung_up_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """S4: fifty clients that never finish their request; others are served meanwhile."""
    monkeypatch.setattr(guard, "SECONDS_TO_ARRIVE", 0.5)
    host, port = served.base_url.removeprefix("http://").split(":")
    halves = [
        b"", b"GET / HT", b"GET / HTTP/1.1\r\nHost: localhost\r\n",
        f"POST /api/trace HTTP/1.1\r\nHost: localhost\r\nx-clearhead-token: {served.token}\r\n"
        "content-length: 100\r\n\r\n{".encode(),
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT",
    ]  # fmt: skip
    lines = [socket.create_connection((host, int(port)), 15) for _ in range(50)]
    for number, line in enumerate(lines):
        line.sendall(halves[number % len(halves)])
    assert served.client.get("/health").text == "ok"
    for line in lines:
        try:
            while line.recv(65536):
                pass
        except ConnectionResetError:
            pass
        line.close()
    assert served.client.get("/health").text == "ok"


def test_answers_that_nobody_reads_are_dropped(
    serve: Serve, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S4: clients that ask for a large answer and never read: cut off, while others are served."""
    monkeypatch.setattr(guard, "SECONDS_TO_LEAVE", 0.5)
    wide = serve(tiny_decoder(300_000, d_model=16, n_layers=1), None, "1 2 3", name="wide")
    host, port = wide.base_url.removeprefix("http://").split(":")
    request = b"GET /api/w/embed.weight?at=:200000 HTTP/1.1\r\nHost: localhost\r\n\r\n"
    lines = []
    for _ in range(20):
        line = socket.socket()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        line.connect((host, int(port)))
        line.settimeout(15)
        line.sendall(request)
        lines.append(line)
    deadline = time.monotonic() + 20
    open_ones = wide.looking.server.server_state.connections
    while len(open_ones) > 1 and time.monotonic() < deadline:
        assert wide.client.get("/health").text == "ok"
    assert len(open_ones) <= 1
    for line in lines:
        line.close()


def test_a_stream_that_is_left_ends(served: Served) -> None:
    """Invariant 30, S3: a reader that goes away ends its generation; the next question is answered."""
    asked = {"text": "the cat", "n": 100, "sampling": {"temperature": 1, "seed": 1}}
    for _ in range(5):
        with served.client.stream("POST", "/api/generate", json=asked) as answer:
            next(answer.iter_lines())
    _, metadata = served.trace(text="the end")
    assert metadata["trace"]
    assert served.session.waiting == 0 or served.client.get("/health").text == "ok"


def test_too_many_waiting_are_told_so(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """S14: beyond the limit 503, and what waits is answered."""
    hold, begun = threading.Event(), threading.Event()

    def busy() -> None:
        begun.set()
        hold.wait(20)

    served.session.thread.submit(busy)
    begun.wait(20)
    monkeypatch.setattr("clearhead.server.session.MOST_WAITING", 3)
    with ThreadPoolExecutor(8) as pool:
        asked = {pool.submit(served.client.post, "/api/tokenize", json={"text": "a"}) for _ in range(8)}
        refused: set[Any] = set()
        while len(refused) < 5:
            done, asked = wait(asked, timeout=20, return_when=FIRST_COMPLETED)
            assert done, "nobody was refused"
            refused |= done
        hold.set()
    assert {future.result().status_code for future in refused} == {503}
    assert [future.result().status_code for future in asked] == [200] * 3


# ------------------------------------------------------------------------------------------- other models


@pytest.mark.slow
@pytest.mark.parametrize("name", ["encoder", "classifier", "encoder-decoder", "experts", "embedding"])
def test_other_shapes_are_served(serve: Serve, name: str) -> None:
    """Two maps where there are two stacks, classes where there are no words; numbers without a tokenizer."""
    served = serve(animal(name), None, "5 7 11", name=name)
    body: dict[str, Any] = {"text": "3 1 4 1 5"}
    if name == "encoder-decoder":
        body["source"] = "5 6 7 8"
    tensors, metadata = served.trace(**body)
    manifest = served.client.get("/api/model").json()
    assert len(manifest["stacks"]) == (2 if name == "encoder-decoder" else 1)
    assert ("lens.id" in tensors) == manifest["capabilities"]["lens"]
    if name == "encoder-decoder":
        assert tensors["cross"].shape[-1] == 4 and tensors["source.lines"].shape[-1] == 4
        torch.testing.assert_close(tensors["cross"].sum(-1), torch.ones(tensors["cross"].shape[:2]))
        answer = served.client.post("/api/generate", json=body | {"n": 3})
        assert answer.text.count("data:") == 4
    elif name in ("encoder", "classifier", "embedding"):
        assert served.client.post("/api/generate", json=body | {"n": 3}).status_code == 400
    for value in manifest["values"]:
        assert served.value(metadata["trace"], value["name"]).numel() > 0


def test_a_foreign_module_is_served(serve: Serve) -> None:
    """Invariant 36: no stacks, no lens, but every module's output; ids it cannot take are one line."""
    served = serve(Foreign().eval(), None, "1 2 3", name="foreign")
    tensors, metadata = served.trace(ids=[4, 5, 6])
    assert set(tensors) == {"output"} and served.value(metadata["trace"], "norm").shape == (1, 3, 20)
    answer = served.client.post("/api/trace", json={"ids": [99999]})
    assert answer.status_code == 400 and "cannot take" in error_of(answer)


def test_the_page_folder_is_complete() -> None:
    """index.html has the two places that the server fills in."""
    from clearhead.server.app import FIRST, META

    text = (PAGE / "index.html").read_text(encoding="utf-8")
    assert text.count(META) == 1 and text.count(FIRST) == 1
