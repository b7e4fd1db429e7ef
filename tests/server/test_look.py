"""look(): a page that is served from this process, and the verb `clearhead look`."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import clearhead
from clearhead.published.models import save
from clearhead.server.look import Looking, check_place, free_port, listen, look, prepare, url_of
from clearhead.text.tokenizer import Tokenizer
from serving import TEXT, Serve, Served, tiny_decoder


@pytest.fixture
def tiny(tokenizer: Tokenizer) -> tuple[Any, Tokenizer]:
    return tiny_decoder(tokenizer.vocab_size, n_layers=1), tokenizer


def test_a_served_model_answers_at_its_url(served: Served) -> None:
    """The page is there, and so is the manifest."""
    assert served.client.get("/").status_code == 200
    assert served.client.get("/api/model").json()["name"] == "tiny decoder"


def test_look_is_a_public_name(tiny: tuple[Any, Tokenizer]) -> None:
    """It returns at once, serves on this machine only, and ends without a trace of itself."""
    threads = {thread.name for thread in threading.enumerate()}
    n_threads = torch.get_num_threads()
    with clearhead.look(*tiny, "the cat") as seen:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", seen.url)
        assert httpx.get(seen.url).status_code == 200
        html = seen._repr_html_()
        assert f'<iframe src="{seen.url}"' in html and "title=" in html
        policy = httpx.get(seen.url).headers["content-security-policy"]
        assert "frame-ancestors 'self' http://localhost:*" in policy  # a notebook shows it
    with pytest.raises(httpx.ConnectError):
        httpx.get(seen.url)
    left = {thread.name for thread in threading.enumerate()} - threads
    assert not {name for name in left if name.startswith("clearhead")}
    assert torch.get_num_threads() == n_threads


def test_what_is_shown_in_a_notebook_is_no_script(tiny: tuple[Any, Tokenizer]) -> None:
    """A name is text, whatever it holds."""
    with look(*tiny, "the", name='"><script>alert(1)</script>') as seen:
        assert "<script>" not in seen._repr_html_()
        first = httpx.get(seen.url).text
        assert "<script>alert" not in first and "\\u003cscript\\u003e" in first


def test_the_model_is_left_as_it_was(tiny: tuple[Any, Tokenizer]) -> None:
    """In training mode, with its random numbers, without hooks."""
    model, tokenizer = tiny
    model.train()
    state = torch.random.get_rng_state()
    with look(model, tokenizer, "the cat") as seen:
        app: Any = seen.server.config.app
        token = {"x-clearhead-token": app.state.token}
        httpx.post(f"{seen.url}api/trace", json={"text": "the cat sat"}, headers=token)
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("text", ["x " * 400, "a" * 30_000])
def test_a_text_that_does_not_fit_is_said_before_anything_is_served(
    tiny: tuple[Any, Tokenizer], text: str
) -> None:
    """And the port is free again."""
    port = free_of_use()
    with pytest.raises(ValueError, match="at most"):
        look(*tiny, text, port=port)
    listen("127.0.0.1", port).close()


def free_of_use() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org"])
def test_other_addresses_need_a_key(host: str) -> None:
    """Nothing listens before that is clear."""
    with pytest.raises(ValueError, match="key"):
        check_place(host, None)
    check_place(host, "a good long key")


def test_keys_and_ports_that_make_no_sense(tiny: tuple[Any, Tokenizer]) -> None:
    """A short key, a port out of range, a port that is taken."""
    with pytest.raises(ValueError, match="8 characters"):
        check_place("127.0.0.1", "short")
    with pytest.raises(ValueError, match="65535"):
        listen("127.0.0.1", 70000)
    with listen("127.0.0.1", 0) as taken, pytest.raises(OSError, match="cannot listen"):
        look(*tiny, "the", port=taken.getsockname()[1])


def test_the_usual_port_or_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second page finds a port of its own."""
    with listen("127.0.0.1", 0) as taken:
        monkeypatch.setattr("clearhead.server.look.PORT", taken.getsockname()[1])
        assert free_port("127.0.0.1") == 0
    assert free_port("127.0.0.1") > 0
    with listen("127.0.0.1", 0) as sock:
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}/"


def test_two_models_at_once(serve: Serve, tiny: tuple[Any, Tokenizer], served: Served) -> None:
    """Each has its own page, token and passes."""
    other = serve(*tiny, "the dog")
    assert other.base_url != served.base_url and other.token != served.token
    answer = httpx.post(
        f"{other.base_url}/api/trace", json={"text": "a"}, headers={"x-clearhead-token": served.token}
    )
    assert answer.status_code == 403
    _, metadata = other.trace(text=TEXT)
    assert len(metadata["rows"]) == 3


def test_what_was_prepared_and_never_served_can_be_closed(tiny: tuple[Any, Tokenizer]) -> None:
    """The verb makes it first and serves it in its own thread."""
    prepared = prepare(*tiny, "the")
    assert isinstance(prepared, Looking) and "127.0.0.1" in repr(prepared)
    prepared.close()
    prepared.close()


@pytest.mark.slow
def test_the_verb_serves_until_ctrl_c(tiny: tuple[Any, Tokenizer], tmp_path: Path) -> None:
    """It says where, serves, prints nothing that is asked, and ends well."""
    save(*tiny, tmp_path / "model")
    words = ["look", str(tmp_path / "model"), "--text", "the cat", "--port", "0"]
    command = [sys.executable, "-m", "clearhead.cli", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as running:
        assert running.stdout is not None and running.stderr is not None
        line = running.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/", line)
        if found is None:
            running.kill()
            pytest.fail(line + running.stderr.read())
        assert "the cat" in httpx.get(found[0]).text
        assert httpx.get(f"{found[0]}api/model").json()["name"] == "model"
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=30)
        assert (running.returncode, out, err) == (0, "", "")


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["look", "nowhere"], "nowhere"),
        (["look", "model", "--host", "0.0.0.0"], "key"),
        (["look", "nowhere", "--port", "x"], "port"),
    ],
)
def test_mistakes_on_the_command_line_are_one_line(
    words: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 2, and what would work."""
    from clearhead.cli import main

    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(words)
    err = capsys.readouterr().err
    assert ended.value.code == 2 and reason in err and err.count("\n") == 1
