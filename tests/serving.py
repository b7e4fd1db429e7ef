"""A model that is being served, for tests: its client, its traces, tiny models."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import torch
from safetensors.torch import load
from torch import Tensor, nn

from clearhead.model.config import ModelConfig
from clearhead.model.transformer import Transformer
from clearhead.text.foreign import AnyTokenizer

TEXT = "the cat sat on the mat and the dog sat on the log"
CORPUS = (
    f"{TEXT}. a cat and a dog sat on a mat; the log is on the mat. who sat on the cat? the dog did.\n" * 3
    + "def train(text, vocab_size):\n    return merges\n<|endoftext|>\n"
)


@dataclass
class Served:
    """A model that is being served, with a client that has the page's token."""

    looking: Any
    model: nn.Module
    tokenizer: AnyTokenizer | None
    client: httpx.Client

    @property
    def base_url(self) -> str:
        """Where the page is."""
        return self.looking.url.rstrip("/")

    @property
    def token(self) -> str:
        """What every POST carries."""
        return self.looking.server.config.app.state.token

    @property
    def session(self) -> Any:
        """What the server knows of the model."""
        return self.looking.session

    def trace(self, **body: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The tensors and the metadata of a trace."""
        answer = self.client.post("/api/trace", json=body)
        assert answer.status_code == 200, answer.text
        return unpack(answer.content)

    def value(self, trace: str, name: str, **query: Any) -> Tensor:
        """A slice of a value."""
        answer = self.client.get(f"/api/trace/{trace}/t/{name}", params=query)
        assert answer.status_code == 200, answer.text
        return unpack(answer.content)[0]["x"]


def unpack(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of safetensors bytes; texts that are JSON are read."""
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    read = {key: json.loads(text) if text[:1] in "[{" and text else text for key, text in metadata.items()}
    return load(content), read


def lively(model: Transformer) -> Transformer:
    """The model with sharper attention, as training makes it: weights that differ from one another."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".q.weight", ".k.weight")):
                parameter.mul_(3)
            elif parameter.dim() == 1:
                parameter.add_(torch.linspace(-0.1, 0.1, len(parameter)))
    return model.eval()


def tiny_decoder(vocab_size: int, **choices: Any) -> Transformer:
    """Three layers of four heads on two key/value heads, gated, rotary."""
    sizes: dict[str, Any] = {"d_model": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "max_len": 128}
    return lively(Transformer(ModelConfig(vocab_size=vocab_size, **sizes | choices), seed=3))


Serve = Callable[..., Served]
