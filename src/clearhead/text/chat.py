"""Chat templates: how a conversation becomes the one text that a chat model was trained to continue.

    [{"role": "user", "content": "Hi"}]  ->  "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n"

The template is a Jinja program that comes with the model, so it is not trusted: it runs in a sandbox, on
plain JSON values, and reaches nothing else. What users write is text: a special token spelled in a message
never becomes that token (`ChatTemplate.encode`).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError

from clearhead.text.foreign import AnyTokenizer
from clearhead.text.sandbox import Refusal, Sandbox

Message = Mapping[str, Any]


class ChatTemplate:
    """A chat template, ready to be filled in.

    source: the Jinja text. names: what else the template may mention, as in {"eos_token": "</s>"}.

    >>> source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    >>> template = ChatTemplate(source, {"eos_token": "</s>"})
    >>> template.render([{"role": "user", "content": "Hi"}])
    '<user>Hi</s>'
    """

    def __init__(self, source: str, names: Mapping[str, str] | None = None) -> None:
        self.source, self.names = source, dict(names or {})
        self._sandbox = Sandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"the chat template is broken in line {error.lineno}: {error.message}") from None
        except (TemplateError, RecursionError, ValueError, OverflowError, MemoryError) as error:
            raise ValueError(f"the chat template cannot be read: {error}") from None

    @classmethod
    def of(cls, tokenizer: AnyTokenizer, name: str = "default") -> "ChatTemplate":
        """The template that came with a published tokenizer; ValueError if none did."""
        source = tokenizer.usage.template(name)
        if source is None:
            which = "" if name == "default" else f" {name!r}"
            raise ValueError(f"this tokenizer came without a chat template{which}; it may be no chat model")
        return cls(source, tokenizer.usage.roles())

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the conversation as text.

        messages: each a dictionary with a "role" (system, user, assistant, tool) and a "content".
        add_generation_prompt: end with what opens the model's answer.
        tools, documents, variables: what the template may look at beside the messages.

        ValueError: messages of another form, or a template that refuses them or fails.
        """
        given = _plain({"tools": tools, "documents": documents, **variables})
        self._sandbox.begin()
        try:
            return self._template.render(
                self.names
                | given
                | {"messages": check_messages(messages), "add_generation_prompt": add_generation_prompt}
            )
        except Refusal as error:
            raise ValueError(f"the chat template refuses the conversation: {_line(error)}") from None
        except SecurityError as error:
            raise ValueError(f"the chat template wants what it may not have: {_line(error)}") from None
        except Exception as error:  # it is a program: anything can go wrong in it
            raise ValueError(f"the chat template failed: {type(error).__name__}: {_line(error)}") from None

    def encode(self, messages: Sequence[Message], tokenizer: AnyTokenizer, **options: Any) -> list[int]:
        """Return the conversation as token ids; the options are those of `render`.

        The template's special tokens become their ids, those that stand in a message stay text.
        """
        marked, marks = _mark(messages, tokenizer)
        return _ids(self.render(marked, **options), tokenizer, marks)

    def encode_answers(
        self, messages: Sequence[Message], tokenizer: AnyTokenizer, **options: Any
    ) -> tuple[list[int], list[bool]]:
        """Return the conversation as token ids, and which of them are the assistant's answers.

        An answer is what follows the generation prompt, up to the special token that ends it. Prompt and
        answer are encoded apart, as they are when a model answers. A template that writes what came before
        an answer differently once it is given is a ValueError: no position would be that of a real turn.
        """
        marked, marks = _mark(messages, tokenizer)
        closed = {"add_generation_prompt": False, **options}
        whole, done = self.render(marked, **closed), 0
        ids: list[int] = []
        answers: list[bool] = []

        def add(end: int, answer: bool) -> None:
            nonlocal done
            part = _ids(whole[done:end], tokenizer, marks)
            ids.extend(part)
            answers.extend([answer] * len(part))
            done = end

        for number, message in enumerate(marked):
            if message.get("role") != "assistant" or not number:  # what comes first answers nothing
                continue
            prompt = self.render(marked[:number], **options)
            turn = self.render(marked[: number + 1], **closed)
            if not (turn.startswith(prompt) and whole.startswith(turn) and done <= len(prompt)):
                raise ValueError(
                    f"the chat template writes what comes before messages[{number}] differently once it is "
                    "answered; give a template that only adds"
                )
            add(len(prompt), False)
            ended = len(turn.rstrip())
            special = any(turn[:ended].endswith(text) for text in tokenizer.special_tokens)
            add(ended if special and ended > done else len(turn), True)
        add(len(whole), False)
        return ids, answers


def _mark(messages: Sequence[Message], tokenizer: AnyTokenizer) -> tuple[list[Any], tuple[str, str, str]]:
    """The messages with marks around what would be special tokens; the marks, and a pattern of those."""
    specials = sorted(tokenizer.special_tokens, key=len, reverse=True)
    one_of = "|".join(map(re.escape, specials)) or r"(?!)"
    left, right = _unused(messages)

    def mark(value: Any) -> Any:
        if isinstance(value, str):
            return re.sub(one_of, lambda found: left + found[0] + right, value)
        if isinstance(value, Mapping):
            return {key: mark(part) for key, part in value.items()}
        return [mark(part) for part in value] if isinstance(value, list | tuple) else value

    return mark(list(messages)), (left, right, one_of)


def _ids(text: str, tokenizer: AnyTokenizer, marks: tuple[str, str, str]) -> list[int]:
    """The ids of a rendered conversation: what is marked is text, special tokens elsewhere are themselves."""
    left, right, one_of = marks
    if left not in text and right not in text:
        return tokenizer.encode(text)
    ids: list[int] = []
    ordinary = ""
    for part, token in _cut(text, re.compile(f"(?s){left}(?:{one_of}){right}|({one_of})")):
        ordinary += part
        if token is not None:
            ids += tokenizer.encode(re.sub(f"[{left}{right}]", "", ordinary), specials="text")
            ids.append(tokenizer.special_tokens[token])
            ordinary = ""
    return ids + tokenizer.encode(re.sub(f"[{left}{right}]", "", ordinary), specials="text")


def check_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages as plain values, without fields that are None; ValueError for another form.

    >>> check_messages([{"role": "user", "content": "Hi", "name": None}])
    [{'role': 'user', 'content': 'Hi'}]
    """
    if isinstance(messages, str | bytes | Mapping) or not messages:
        raise ValueError('messages is a list such as [{"role": "user", "content": "Hi"}], and not empty')
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"messages[{number}] should be a dictionary with a role and a content, not {message!r:.80}"
            )
    filled = [{key: value for key, value in message.items() if value is not None} for message in messages]
    return _plain(filled)


def _line(error: Exception) -> str:
    """What an error says, in one line."""
    return f"{' '.join(str(error).split()):.300}"


def _plain(value: Any) -> Any:
    """The value as JSON knows it: a template gets no objects with methods of their own."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"a chat template takes JSON values only: {error}") from None


def _unused(messages: Sequence[Message]) -> tuple[str, str]:
    """Two characters of the private use area that stand in no message."""
    used = set(json.dumps(_plain(list(messages)), ensure_ascii=False))
    free = (chr(code) for code in range(0xE000, 0xF900) if chr(code) not in used)
    return next(free), next(free)


def _cut(text: str, pattern: re.Pattern[str]) -> Iterator[tuple[str, str | None]]:
    """Ordinary text and the special token after it, or None at the end; a marked one is ordinary."""
    start = 0
    for found in pattern.finditer(text):
        if found[1] is not None:
            yield text[start : found.start()], found[1]
            start = found.end()
    yield text[start:], None
