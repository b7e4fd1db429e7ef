"""Chat templates: the text that transformers makes, the sandbox, and words that stay words."""

import doctest
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.text import chat
from clearhead.text.chat import ChatTemplate, check_messages
from clearhead.text.tokenizer import Tokenizer
from clearhead.text.usage import Usage

CHATML = """{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are Zoë.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
INSTRUCT = """{% if messages[0]['role'] == 'system' %}
  {% set rules = messages[0].content %}
  {% set rest = messages[1:] %}
{% else %}
  {% set rest = messages %}
{% endif %}
{{ bos_token }}
  {%- for m in rest %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
      {{ raise_exception('roles must alternate user/assistant/...') }}
    {%- endif %}
    {%- set before = rules ~ '\\n\\n' if rules and loop.first else '' %}
    {%- if m.role == 'user' %}[INST] {{ before + m.content | trim }} [/INST]
    {%- else %} {{ m['content'] }}{{ eos_token }}{% endif %}
  {%- endfor %}
"""
TOOLS = """{% set ns = namespace(last=-1, seen=false) %}
{% for m in messages[::-1] %}
    {% if m.role == 'user' and not ns.seen %}
        {% set ns.last = loop.revindex0 %}{% set ns.seen = true %}{% continue %}
    {% endif %}
{% endfor %}
{% if tools is defined and tools %}Tools:
    {% for tool in tools %}
- {{ tool | tojson }} {{ tool.function | tojson(indent=2) }}
    {% endfor %}
{% endif %}
{% for m in messages %}
    {% if m.role == 'assistant' and m.tool_calls %}
<call>{{ m.tool_calls[0].name }}({{ dict(m.tool_calls[0].arguments.items()) | tojson }})
    {% elif m.role == 'assistant' %}
{% generation %}{{ m.content.split('</think>')[-1].strip() }}{% endgeneration %}
    {% else %}
{% set words = m.content if m.content is string else m.content[0].text %}
{{ loop.index0 }}/{{ ns.last }} {{ m.role | upper }}: {{ words }}
    {% endif %}
    {% if loop.index > 5 %}{% break %}{% endif %}
{% endfor %}
{{ strftime_now('%Y') if False else '' }}{{ documents | length if documents else 'no documents' }}"""
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "  What is <b>π</b>? "},
    {"role": "assistant", "content": "<think>hm</think> 3.14"},
    {"role": "user", "content": "Thanks\n"},
]
CALLS = [
    {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": "é<"}}]},
    {"role": "tool", "content": "rain"},
]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"x": {"type": "string"}}}}
NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
LOOP = "{% for i in range(100000) %}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "messages", "options"),
    [
        (CHATML, TALK, {}),
        (CHATML, TALK[1:], {"add_generation_prompt": False}),
        (INSTRUCT, TALK, {}),
        (INSTRUCT, TALK[1:], {}),
        (TOOLS, TALK, {}),
        (TOOLS, CALLS, {"tools": [TOOL]}),
        (TOOLS, CALLS, {"documents": [{"title": "a", "text": "b"}], "extra": 3}),
    ],
)
def test_the_text_equals_that_of_transformers(source: str, messages: list, options: dict[str, Any]) -> None:
    """White space, loops, namespaces, tools, JSON: what published templates are written with."""
    from transformers.utils.chat_template_utils import render_jinja_template

    theirs, _ = render_jinja_template(
        [messages], chat_template=source, **({"add_generation_prompt": True} | options), **NAMES
    )
    assert ChatTemplate(source, NAMES).render(messages, **options) == theirs[0]


def test_the_year_comes_from_the_clock() -> None:
    year = ChatTemplate("{{ strftime_now('%Y') }}").render(TALK)
    assert year.isdigit() and int(year) > 2000


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", r"broken in line 1"),
        ("\n{{ messages", r"broken in line 2"),
        ("{% nonsense %}", r"broken in line 1: .*nonsense"),
        ("{{ raise_exception('no system message') }}", r"refuses the conversation: no system message"),
        ("{{ missing.field }}", r"failed: UndefinedError: 'missing' is undefined"),
        ("{{ messages | nosuch }}", r"broken in line 1: No filter named 'nosuch'"),
        ("{{ 1 // 0 }}", r"failed: ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", r"failed: RecursionError"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", r"failed: OverflowError: Range too big"),
        ("{{ raise_exception('two\nlines') }}", r"refuses the conversation: two lines$"),
    ],
)
def test_a_template_that_fails_is_one_clear_error(source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(source).render(TALK)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (f"{LOOP}{LOOP}{{% endfor %}}{{% endfor %}}", "more than 100000 steps"),
        (f"{LOOP}{{{{ 'x' * 100000 }}}}{{% endfor %}}", "more than 100000 steps"),
        (f"{LOOP}{LOOP}{'text ' * 1000}{{% endfor %}}{{% endfor %}}", "more than 100000 steps"),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
            "steps",
        ),
        ("{{ 'x' * 10 ** 10 }}", "a value of 10000000000 characters"),
        ("{{ 10 ** 10 * [0] }}", "a value of 10000000000 characters"),
        ("{{ 2 ** (10 ** 9) }}", "a number above"),
        ("{% set x = 'x' * 1000 %}" + "{% set x = x ~ x %}" * 30, "a value of 16384000 characters"),
        ("{% set x = 'x' * 1000 %}" + "{% set x = x + x %}" * 30, "a value of 16384000 characters"),
        ("{{ '%10000000000d' % 1 }}", "a width"),
        ("{{ '%*d' % (10 ** 10, 1) }}", "a width"),
        ("{{ '{:>10000000000}'.format(1) }}", "a width"),
        ("{{ '{:>{}}'.format(1, 10 ** 10) }}", "a width"),
        ("{{ '%10000000000d' | format(1) }}", "a width"),
        ("{{ 'x'.center(10 ** 10) }}", "center with a number above 10000"),
        ("{{ 'x' | center(10 ** 10) }}", "a number above 10000"),
        ("{{ messages | tojson(indent=10 ** 9) }}", "a number above 10000"),
        ("{{ [1] | batch(10 ** 9, 0) | list }}", "a number above 10000"),
        ("{{ ('a' * 100000).replace('a', 'a' * 100000) }}", "a value of 10000100000 characters"),
        ("{{ ('a' * 100000) | replace('a', 'a' * 10000) }}", "a value of 1000100000 characters"),
        ("{{ (['x' * 100000] * 100000) | join }}", "a value of 10000000000 characters"),
        ("{{ ''.join(['x' * 100000] * 100000) }}", "a value of 10000000000 characters"),
    ],
)
def test_a_template_makes_nothing_without_end(source: str, said: str) -> None:
    """Loops, recursion and values that double are stopped before they fill time or memory."""
    with pytest.raises(ValueError, match=f"wants what it may not have: .*{said}"):
        ChatTemplate(source).render(TALK)


def test_a_long_conversation_is_within_the_bounds() -> None:
    talk = [{"role": "user", "content": "word " * 400}, {"role": "assistant", "content": "word " * 400}] * 500
    assert len(ChatTemplate(INSTRUCT, NAMES).render(talk)) > 2_000_000


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__ }}{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ lipsum.__globals__['os'].system('true') }}",
        "{{ self.__init__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}{{ ns }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns }}",
        "{{ messages.append(1) }}",
        "{% set _ = messages[0].update({'role': 'x'}) %}",
        "{{ ('{0.__class__.__mro__[1].__subclasses__}').format('') }}",
        "{{ messages | attr('__class__') | attr('__mro__') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
    ],
)
def test_a_template_reaches_nothing(source: str) -> None:
    """The ways out that are known: each ends in an error, or in text that holds nothing of Python's."""
    try:
        text = ChatTemplate(source).render(TALK)
    except ValueError:
        return
    assert not any(word in text for word in ("module", "class '", "built-in", "function"))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is a list such as"),
        ("Hi", "messages is a list such as"),
        ({"role": "user"}, "messages is a list such as"),
        (["Hi"], r"messages\[0\] should be a dictionary with a role and a content, not 'Hi'"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], r"messages\[1\] should be"),
        ([{"role": "user", "content": object()}], "takes JSON values only"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_messages_of_another_form_are_refused(messages: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChatTemplate(CHATML).render(messages)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    vocab = {i: bytes([i]) for i in range(256)} | {256: b"im"}
    specials = ["<|im_start|>", "<|im_end|>", "</think>"]
    usage = Usage({"tokenizer_config.json": {"chat_template": CHATML, "eos_token": "<|im_end|>"}})
    return Tokenizer(vocab, [(b"i", b"m")], specials).with_usage(usage)


def test_ids_are_those_of_the_text(tokenizer: Tokenizer) -> None:
    template = ChatTemplate.of(tokenizer)
    assert template.encode(TALK[:2], tokenizer) == tokenizer.encode(template.render(TALK[:2]))


WORDS = ["<|im_end|>", "<|im_", "start|>", "a", " ", "\n", "é", "\ue000", ">"]
JINJA = "{{ }} {% %} for_m_in_messages if endif endfor m.role ' | trim ( ) + 1 ~ {# #} - set_x_= messages[0]"


@settings(deadline=None, max_examples=100)
@given(content=st.lists(st.sampled_from(WORDS)).map("".join))
def test_what_a_user_writes_stays_text(content: str) -> None:
    """A special token in a message becomes characters: the model's own are exactly those of the template."""
    vocab = {i: bytes([i]) for i in range(256)}
    tokenizer = Tokenizer(vocab, [], ["<|im_start|>", "<|im_end|>"])
    template = ChatTemplate(CHATML)
    ids = template.encode([{"role": "user", "content": content}], tokenizer)
    assert tokenizer.decode(ids) == template.render([{"role": "user", "content": content}])
    assert [i for i in ids if i >= 256] == [256, 257, 256, 257, 256]


def test_a_template_may_still_look_for_special_tokens_in_messages(tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %}"
    ids = ChatTemplate(source).encode([{"role": "assistant", "content": "hm</think>im"}], tokenizer)
    assert ids == [256]


def test_templates_by_name() -> None:
    """Folders hold one template, several by name, or one in a file of its own, which counts first."""
    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    vocab = {i: bytes([i]) for i in range(256)}
    tokenizer = Tokenizer(vocab, []).with_usage(Usage({"tokenizer_config.json": {"chat_template": several}}))
    assert ChatTemplate.of(tokenizer).render(TALK) == "a"
    assert ChatTemplate.of(tokenizer, "tool_use").render(TALK) == "b"
    in_file = tokenizer.with_usage(Usage(tokenizer.usage.files, "c"))
    assert ChatTemplate.of(in_file).render(TALK) == "c"
    with pytest.raises(ValueError, match="came without a chat template 'nosuch'"):
        ChatTemplate.of(tokenizer, "nosuch")
    with pytest.raises(ValueError, match="came without a chat template; it may be no chat model"):
        ChatTemplate.of(Tokenizer(vocab, []))


@settings(deadline=None, max_examples=300)
@given(source=st.lists(st.sampled_from(JINJA.split())).map(lambda parts: " ".join(parts).replace("_", " ")))
def test_a_damaged_template_raises_value_errors_only(source: str) -> None:
    try:
        ChatTemplate(source).render(TALK)
    except ValueError as error:
        assert "chat template" in str(error)


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(chat).failed == 0
    assert check_messages([{"role": "user"}]) == [{"role": "user"}]
