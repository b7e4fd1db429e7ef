"""Where a chat template runs: Jinja's sandbox, without Python behind it and with bounds.

A template comes with the model, so it is not trusted. It reaches no attribute of Python's, loads no file, and
changes nothing that it is given. What it makes is counted: a turn of a loop or a call is a step, and every
`SIZE` characters or entries of a value are one; with more than `STEPS` of them the template is stopped.
"""

import functools
import json
import re
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

STEPS = 100_000
SIZE = 500
LARGEST = 10_000_000  # characters or entries of one value
WIDEST = 10_000  # a number that says how wide something is to be


class Refusal(TemplateError):
    """What a template raises on purpose."""


class Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox with what published templates expect to find; `begin` before each run."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # nothing is computed before it is counted
            finalize=self.counted,
            extensions=[LoopControlExtension, _Generation],
        )
        self._here = threading.local()
        self.filters["tojson"] = _to_json
        self.filters = {name: self._bounded(function) for name, function in self.filters.items()}
        self.globals = {
            "range": self.globals["range"],
            "dict": lambda *pairs, **names: dict(*pairs, **names),
            "namespace": _Namespace,
            "raise_exception": _refuse,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }

    def begin(self) -> None:
        """A run begins: nothing is counted yet."""
        self._here.steps = 0

    def step(self, cost: int = 1) -> str:
        """Count; SecurityError above the bound."""
        self._here.steps += cost
        if self._here.steps > STEPS:
            raise SecurityError(f"more than {STEPS} steps; does it loop for ever?")
        return ""

    def counted(self, value: Any) -> Any:
        """The value, when its size has been counted."""
        if isinstance(value, str | list | tuple | dict):
            _check_size(len(value))
            self.step(len(value) // SIZE)
        elif isinstance(value, int) and value.bit_length() > WIDEST:
            raise SecurityError("a number of thousands of digits")
        return value

    def joined(self, *parts: Any) -> str:
        """What `~` makes."""
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return self.counted("".join(texts))

    # What the compiled template calls: Jinja's own methods, counting.

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = _Counting().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An entry, or a slice."""
        return self.counted(super().getitem(obj, argument))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A function, method or macro."""
        owner = getattr(__obj, "__self__", None)
        if owner is __self:
            return __obj(*args)
        __self.step()
        if isinstance(owner, str):
            _check_widths(getattr(__obj, "__name__", ""), owner, args, kwargs)
        return __self.counted(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """left operator right."""
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    _check_size(len(value) * times)
        elif operator == "+" and isinstance(left, str | list | tuple):
            _check_size(len(left) + (len(right) if isinstance(right, str | list | tuple) else 0))
        elif operator == "%" and isinstance(left, str):
            _check_form(left, "*")
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_widths("a power", None, (left.bit_length() * right,), {})
        return self.counted(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja's own `format`, which does not let a text reach into its arguments."""
        function = super().wrap_str_format(value)
        if function is not None:
            _check_form(value.__self__)
        return function

    def _bounded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that counts what it makes."""
        hidden = 1 if hasattr(function, "jinja_pass_arg") else 0  # Jinja's own argument, before the value

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.step()
            before, value, rest = args[:hidden], args[hidden], args[hidden + 1 :]
            if function.__name__ in ("sync_do_join", "do_join") and not isinstance(value, str):
                value = list(value)
                between = rest[0] if rest else kwargs.get("d", "")
                _check_join(str(between), value)
            _check_widths(function.__name__, value, rest, kwargs)
            return self.counted(function(*before, value, *rest, **kwargs))

        return run


class _Counting(NodeTransformer):
    """Puts a step into every loop, and makes `~` a call."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        fixed = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        cost = nodes.Const(1 + fixed // SIZE, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(_call("step", [cost], node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        return _call("joined", node.nodes, node.lineno)


def _call(method: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    """A call of a method of the sandbox."""
    function = nodes.EnvironmentAttribute(method, lineno=line)
    return nodes.Call(function, arguments, [], None, None, lineno=line)


# ------------------------------------------------------------------------------------------------- the bounds


def _check_size(size: int) -> None:
    if size > LARGEST:
        raise SecurityError(f"a value of {size} characters or entries; the most is {LARGEST}")


def _check_form(form: str, star: str = "") -> None:
    if re.search(r"\d{5}|\{[^{}]+\{", form) or (star and star in form):
        raise SecurityError(f"a width as in {form[:40]!r}")


def _check_join(between: str, parts: list[Any]) -> None:
    _check_size(sum(len(part) if isinstance(part, str) else 1 for part in parts) + len(between) * len(parts))


def _check_widths(method: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what would make a value far larger than those it is made of."""
    given = [*args, *kwargs.values()]
    if any(isinstance(number, int) and abs(number) > WIDEST for number in given):
        raise SecurityError(f"{method} with a number above {WIDEST}")
    if not isinstance(value, str):
        return
    if "format" in method:
        _check_form(value, "*" if method != "format" else "")
    texts = [text for text in given if isinstance(text, str)]
    if "replace" in method and len(texts) >= 2:
        _check_size(len(value) + value.count(texts[0]) * len(texts[1]))
    elif method == "join" and args and isinstance(args[0], list | tuple):
        _check_join(value, list(args[0]))
    elif method in ("indent", "do_indent") and given:
        _check_size(len(value) + (value.count("\n") + 1) * max(map(len, [*texts, " " * WIDEST]), default=0))


# ------------------------------------------------------------------------------ what templates expect to find


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


def _refuse(message: str) -> None:
    raise Refusal(message)


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
