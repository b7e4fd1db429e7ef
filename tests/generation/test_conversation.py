"""A conversation: every turn sees what was said before; what no longer fits is forgotten, oldest first."""

from typing import Any

import pytest
import torch

from clearhead import ModelConfig, Tokenizer, Transformer, generate
from clearhead.generation.conversation import Conversation
from clearhead.text.chat import ChatTemplate

TEMPLATE = ChatTemplate("{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token for every byte, and one that ends."""
    return Tokenizer({i: bytes([i]) for i in range(256)} | {256: b"<e>"}, [], special_tokens=["<e>"])


@pytest.fixture(scope="module")
def model() -> Transformer:
    """It says letters, and never ends by itself."""
    sizes = {"vocab_size": 257, "max_len": 64, "d_model": 16, "n_layers": 1, "n_heads": 2}
    made = Transformer(ModelConfig(**sizes, head_bias=True), seed=2).eval()
    with torch.no_grad():
        made.head.bias.fill_(-1e4)[ord("a") : ord("z") + 1] = 0
    return made


def talk(model: Transformer, tokenizer: Tokenizer, **options: Any) -> Conversation:
    return Conversation(model, tokenizer, template=TEMPLATE, **options)


def test_a_turn_sees_the_whole_conversation(model: Transformer, tokenizer: Tokenizer) -> None:
    """The answer is that to the filled-in template; both then belong to the conversation."""
    chat = talk(model, tokenizer, system="be")
    first = "".join(chat.say("hi", max_new_tokens=5))
    wanted = generate(model, "s:be;u:hi;a:", tokenizer=tokenizer, max_new_tokens=5)
    assert first == wanted and len(first) == 5
    second = "".join(chat.say("no", max_new_tokens=5))
    said = f"s:be;u:hi;a:{first};u:no;a:"
    assert second == generate(model, said, tokenizer=tokenizer, max_new_tokens=5)
    roles = [message["role"] for message in chat.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in chat.messages] == ["be", "hi", first, "no", second] and chat.forgotten == 0


def test_the_oldest_turns_are_forgotten_never_the_system(model: Transformer, tokenizer: Tokenizer) -> None:
    """A question goes together with its answer; 64 positions hold the system's words and two such turns."""
    chat = talk(model, tokenizer, system="be kind")
    for text in ("one", "two", "three", "four", "five"):
        answer = "".join(chat.say(text, max_new_tokens=10))
        assert len(TEMPLATE.encode(chat.messages, tokenizer)) <= 64 + len(";a:")
    contents = [message["content"] for message in chat.messages]
    assert contents[0] == "be kind" and contents[-2:] == ["five", answer]
    assert "one" not in contents and chat.forgotten == 2 * (5 - len(contents[1::2]))


def test_a_broken_off_answer_is_forgotten_with_its_question(model: Transformer, tokenizer: Tokenizer) -> None:
    chat = talk(model, tokenizer)
    "".join(chat.say("hi", max_new_tokens=3))
    before = list(chat.messages)
    pieces = chat.say("again", max_new_tokens=8)
    next(pieces)
    assert chat.messages == before
    pieces.close()
    assert chat.messages == before


def test_what_cannot_be_said_is_named(model: Transformer, tokenizer: Tokenizer) -> None:
    """Before anything is said, and the conversation stays as it was."""
    chat = talk(model, tokenizer, system="be")
    with pytest.raises(ValueError, match=r"takes 59 tokens and the answer up to 10; .* room for 64"):
        chat.say("x" * 49, max_new_tokens=10)
    assert len(chat.messages) == 1
    with pytest.raises(ValueError, match="came without a chat template"):
        Conversation(model, tokenizer)
