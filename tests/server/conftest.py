"""What the server's tests share: models that are being served on a port of their own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from torch import nn

from browsing import CHROMIUM, FLAGS, Open
from clearhead.text.bpe import train_bpe
from clearhead.text.foreign import AnyTokenizer
from clearhead.text.tokenizer import Tokenizer
from serving import CORPUS, TEXT, Serve, Served, tiny_decoder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A small byte-level BPE with the words of TEXT."""
    file = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    file.write_text(CORPUS, encoding="utf-8")
    vocab, merges = train_bpe(str(file), 320, ["<|endoftext|>"])
    return Tokenizer(vocab, merges, ["<|endoftext|>"])


@pytest.fixture(scope="session")
def serve() -> Iterator[Serve]:
    """A function that serves a model until the tests end."""
    from clearhead.server.look import look

    open_ones: list[Served] = []

    def start(
        model: nn.Module, tokenizer: AnyTokenizer | None = None, text: str | None = None, **options: Any
    ) -> Served:
        looking = look(model, tokenizer, text, **options)
        app: Any = looking.server.config.app
        token = app.state.token
        client = httpx.Client(base_url=looking.url, headers={"x-clearhead-token": token}, timeout=60)
        open_ones.append(Served(looking, model, tokenizer, client))
        return open_ones[-1]

    yield start
    for served in open_ones:
        served.client.close()
        served.looking.close()


@pytest.fixture(scope="session")
def served(serve: Serve, tokenizer: Tokenizer) -> Served:
    """A tiny decoder that is being served: `served.base_url`."""
    return serve(tiny_decoder(tokenizer.vocab_size), tokenizer, TEXT, name="tiny decoder")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium, once."""
    if not Path(CHROMIUM).exists():
        pytest.skip(f"there is no {CHROMIUM}; apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield (chromium := playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS))
        chromium.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """A way to open pages. What they complain about fails the test at its end."""
    opener = Open(browser)
    yield opener
    opener.close()
    assert opener.complaints == []
