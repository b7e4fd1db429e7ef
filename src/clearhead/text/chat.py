"""Chat templates: how a conversation becomes the one text that a chat model was trained to continue.

    [{"role": "user", "content": "Hi"}]  ->  "<|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n"

The template is a Jinja program that comes with the model, so it is not trusted: it runs in Jinja's sandbox,
on plain JSON values, and reaches nothing else. What users write is text: a special token spelled in a message
never becomes that token (`ChatTemplate.encode`).
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from clearhead.text.foreign import AnyTokenizer

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
        try:
            self._template = _environment().from_string(source)
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
        try:
            return self._template.render(
                self.names
                | given
                | {"messages": check_messages(messages), "add_generation_prompt": add_generation_prompt}
            )
        except _Refusal as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from None
        except SecurityError as error:
            raise ValueError(f"the chat template wants what it may not have: {error}") from None
        except Exception as error:  # it is a program: anything can go wrong in it
            raise ValueError(f"the chat template failed: {type(error).__name__}: {error}") from None

    def encode(self, messages: Sequence[Message], tokenizer: AnyTokenizer, **options: Any) -> list[int]:
        """Return the conversation as token ids; the options are those of `render`.

        The template's special tokens become their ids, those that stand in a message stay text.
        """
        specials = sorted(tokenizer.special_tokens, key=len, reverse=True)
        one_of = "|".join(map(re.escape, specials)) or r"(?!)"
        left, right = _unused(messages)

        def mark(value: Any) -> Any:
            if isinstance(value, str):
                return re.sub(one_of, lambda found: left + found[0] + right, value)
            if isinstance(value, Mapping):
                return {key: mark(part) for key, part in value.items()}
            return [mark(part) for part in value] if isinstance(value, list | tuple) else value

        text = self.render(mark(list(messages)), **options)
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


# ------------------------------------------------------------------------------------------------ the sandbox


class _Refusal(TemplateError):
    """What a template raises on purpose."""


class _Generation(Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's words for training; here it shows them."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The body in place of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """Jinja's namespace without names that begin with an underscore: those reach into Python."""

    def __init__(*args: Any, **names: Any) -> None:
        for name in [name for part in args[1:] for name in dict(part)] + list(names):
            _check_name(name)
        Namespace.__init__(*args, **names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace takes no name with an underscore in front, as in {name!r:.60}")


def _environment() -> ImmutableSandboxedEnvironment:
    """The sandbox with what published templates expect to find."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals = {
        "range": environment.globals["range"],
        "dict": lambda *pairs, **names: dict(*pairs, **names),
        "namespace": _Namespace,
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
    }
    return environment


def _refuse(message: str) -> None:
    raise _Refusal(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as Python writes it: Jinja's own filter would also spell < and > for HTML pages."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
