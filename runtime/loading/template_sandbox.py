"""Chat templates are programs from a checkpoint: run them with bounds on time and memory.

jinja2's immutable sandbox keeps a template from the interpreter and from the data it is given, but
not from endless loops or strings of gigabytes. Here

- a template runs in a thread of its own, whose trace function ends it at a deadline, whatever
  Python code it is in;
- every operation that makes a string or a list larger than its operands counts against a budget
  *before* it runs, since nothing can interrupt one that has begun.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from types import FrameType
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

__all__ = ["BoundedEnvironment", "TemplateLimitError", "run_bounded"]

MAX_CHARS = 1 << 26
"""Characters (and list elements) that all operations of one run may make together."""
_MAX_INTEGER_BITS = 1 << 14
_SAFE_VERSION = (3, 1, 6)
"""Templates got out of the sandbox of older ones."""
_GRACE_SECONDS = 1.0
_WIDE = re.compile(r"\d{7,}")
_NESTED_SPEC = re.compile(r":[^{}]*\{")

_STRUCTURAL_FILTERS = frozenset(
    [
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "groupby",
        "items",
        "last",
        "length",
        "list",
        "map",
        "max",
        "min",
        "random",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "slice",
        "sort",
        "sum",
        "unique",
    ]
)
"""Filters that make no text of the containers they are given."""

T = TypeVar("T")

if tuple(int(part) for part in jinja2.__version__.split(".")[:3]) < _SAFE_VERSION:
    raise ImportError(f"jinja2 {jinja2.__version__} is older than 3.1.6")


class TemplateLimitError(BaseException):
    """A template took too long or made too much. No `except Exception` of a filter stops it."""


class _Budget(threading.local):
    left = 0


_budget = _Budget()


def run_bounded(work: Callable[[], T], seconds: float) -> T:
    """Run `work` in a thread with a deadline and a budget; return its result.

    Raises:
        TemplateLimitError: it took too long, or made too much.
        Exception: what `work` raised.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    late = TemplateLimitError(f"it ran for more than {seconds:g} s")

    def body() -> None:
        deadline = time.monotonic() + seconds

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            if time.monotonic() > deadline:
                raise late
            return trace

        _budget.left = MAX_CHARS
        sys.settrace(trace)  # of this thread
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name="stepgraph-template", daemon=True)
    thread.start()
    thread.join(seconds + _GRACE_SECONDS)  # the thread ends by itself, but for a long operation
    if results:
        return results[0]
    raise errors[0] if errors else late


def charge(size: int) -> None:
    """Take from the budget of this run before so much is made."""
    _budget.left -= max(size, 0)
    if _budget.left < 0:
        raise TemplateLimitError(f"it makes more than {MAX_CHARS} characters")


def _check_bits(bits: int) -> None:
    if bits > _MAX_INTEGER_BITS:
        raise TemplateLimitError(f"it makes an integer of more than {_MAX_INTEGER_BITS} bits")


def _charge_result(value: T) -> T:
    if isinstance(value, (str, bytes, list, tuple, dict)):
        charge(len(value))
    return value


def _check_widths(text: object, arguments: Iterable[object]) -> None:
    """Refuse a format string with a width that the budget has no room for."""
    if not isinstance(text, str):
        return
    values = list(arguments)
    if _NESTED_SPEC.search(text):
        text = " ".join([text, *(value for value in values if isinstance(value, str))])
    if _WIDE.search(text):
        raise TemplateLimitError("it formats with a width of more than 6 digits")
    for value in values:
        if isinstance(value, (tuple, list)):
            _check_numbers(value)
    _check_numbers(values)


def _check_numbers(values: Iterable[object]) -> None:
    """Refuse integers that, as a width or a count, would make more than the budget."""
    for value in values:
        if isinstance(value, int) and abs(value) > _budget.left:
            raise TemplateLimitError(f"a width or count is larger than {_budget.left}")


def _growth(name: str, text: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    """Return an upper bound of the size of what a method or filter of that name makes."""
    values = [*arguments, *named.values()]
    texts = [len(value) for value in values if isinstance(value, str)]
    numbers = [value for value in values if isinstance(value, int)]
    size = len(text) if isinstance(text, (str, list, tuple)) else 0
    if name == "replace" and isinstance(text, str):
        old = arguments[0] if arguments else named.get("old", "")
        new = arguments[1] if len(arguments) > 1 else named.get("new", "")
        return size + text.count(str(old)) * len(str(new))
    if name in ("indent", "expandtabs") and isinstance(text, str):
        lines = text.count("\n") + text.count("\t") + 1
        return size + lines * max([8, *texts, *numbers])
    if name == "wordwrap":
        return size + size * max([1, *texts])
    if name == "translate":
        return size * max([1, *(len(str(v)) for d in values for v in dict(d).values())])
    return 0


def _charge_join(parts: Sequence[Any], separator: int) -> None:
    charge(sum(len(part) for part in parts if isinstance(part, str)) + separator * len(parts))


def _charge_text(value: T) -> T:
    """Take from the budget what `str` makes of nested containers, which may share their parts."""
    stack: list[Any] = [value] if isinstance(value, (list, tuple, dict)) else []
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            stack.extend(part)
            stack.extend(part.values())
        elif isinstance(part, (list, tuple)):
            stack.extend(part)
        charge(len(part) if isinstance(part, str) else 2)
    return value


class _CodeGenerator(CodeGenerator):
    """Generates code that counts what the operator `~` makes."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat_values((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """The block `{% generation %}`, which marks what an assistant said: its content, here."""

    tags = {"generation"}  # noqa: RUF012  as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _TemplateNamespace(Namespace):
    """A namespace that stores no names with an underscore at their beginning."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot store {name[:40]!r}")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """What transformers renders chat templates with, bounded. Use it within `run_bounded`.

    Blocks are trimmed; `{% break %}`, `{% continue %}` and `{% generation %}` are known, as are
    `raise_exception`, `strftime_now` and a `tojson` that escapes no HTML.
    """

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        """Make the environment; nothing of it depends on a template."""
        # Without the optimizer nothing is computed before a run begins.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_charge_text,
            optimized=False,
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded(name, call) for name, call in self.filters.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _TemplateNamespace

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join what a template, a macro or a block has made."""
        joined = []
        for part in parts:
            charge(len(part))
            joined.append(part)
        return "".join(joined)

    def concat_values(self, values: Iterable[Any]) -> str:
        """The operator `~`."""
        return self.concat([str(_charge_text(value)) for value in values])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an intercepted operator to operands whose result is small enough."""
        sized = (str, bytes, list, tuple)
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, sized) and isinstance(times, int):
                    charge(len(value) * times)
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        elif operator == "+" and isinstance(left, sized) and isinstance(right, sized):
            charge(len(left) + len(right))
        elif operator == "%":
            _check_widths(left, right if isinstance(right, tuple) else (right,))
            _charge_text(right)
        return _charge_result(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call what a template calls, if what it makes is small enough."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes, int, list, tuple)):
            name = getattr(__obj, "__name__", "")
            _check_numbers([*args, *kwargs.values()])
            charge(_growth(name, owner, args, kwargs))
            if name == "join" and args and isinstance(owner, str):
                args = (list(args[0]), *args[1:])
                _charge_join(args[0], len(owner))
        return _charge_result(
            ImmutableSandboxedEnvironment.call(__self, __context, __obj, *args, **kwargs)
        )

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a bounded `str.format` for one that a template takes from a string."""
        bounded = super().wrap_str_format(value)
        if bounded is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            values = [*args, *kwargs.values()]
            for mapping in [value for value in values if isinstance(value, Mapping)]:
                values.extend(mapping.values())
            _check_widths(value.__self__, values)
            return _charge_result(bounded(*args, **kwargs))

        return checked


def _bounded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts what it makes."""
    # Filters may take the context or the environment first, marked by an attribute.
    first = 1 if hasattr(call, "jinja_pass_arg") else 0

    @wraps(call)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, arguments = args[first], args[first + 1 :]
        _check_numbers([*arguments, *kwargs.values()])
        if name == "format":
            _check_widths(value, [*arguments, *kwargs.values()])
        if name == "join":
            value = list(value)
            args = (*args[:first], value, *arguments)
            texts = [len(v) for v in (*arguments, *kwargs.values()) if isinstance(v, str)]
            _charge_join(value, max(texts, default=0))
        if name not in _STRUCTURAL_FILTERS:
            _charge_text(value)
        charge(_growth(name, value, arguments, kwargs))
        return _charge_result(call(*args, **kwargs))

    return bounded


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    _check_widths(format, ())
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is not None and (indent if isinstance(indent, int) else len(indent)) > 64:
        raise TemplateLimitError("tojson indents by more than 64")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
