"""A jinja2 sandbox for the chat templates of checkpoints, with limits on time and memory.

jinja2's immutable sandbox protects the interpreter and the data given to a template, but not
against endless loops or strings of gigabytes. A template runs in its own thread, whose trace
function ends it at the deadline, whatever Python code it is in. As one operation cannot be
interrupted, counts and widths are limited, and so are the sizes of what operators and calls return.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable
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
"""Characters (and elements of lists) that an operation may return, and a run write."""
_MAX_NUMBER = 1 << 20
"""The largest count or width."""
_MAX_INTEGER_BITS = 1 << 14
_GRACE_SECONDS = 1.0
_WIDE = re.compile(r"\d{6,}|:[^{}]*\{|%[^%a-z]*\*")
"""Format strings with a large width, or with one that is an argument."""
_SAFE_VERSION = (3, 1, 6)
"""Templates could escape the sandbox of older versions."""

T = TypeVar("T")

if tuple(int(part) for part in jinja2.__version__.split(".")[:3]) < _SAFE_VERSION:
    raise ImportError(f"jinja2 {jinja2.__version__} is older than 3.1.6")


class TemplateLimitError(BaseException):
    """A template exceeded a limit. Not an `Exception`, so that no filter catches it."""


def run_bounded(work: Callable[[], T], seconds: float) -> T:
    """Run `work` in a thread with a deadline; return its result.

    Raises:
        TemplateLimitError: it exceeded the deadline or another limit.
        Exception: from `work`.
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

        sys.settrace(trace)  # of this thread
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name="stepgraph-template", daemon=True)
    thread.start()
    thread.join(seconds + _GRACE_SECONDS)  # it ends by itself, unless one operation is long
    if results:
        return results[0]
    raise errors[0] if errors else late


class _CodeGenerator(CodeGenerator):
    """Generates code that limits the results of the operator `~`."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concat_values((")
        for argument in node.nodes:
            self.visit(argument, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """The block `{% generation %}`, which marks an assistant's text; rendered as its content."""

    tags = {"generation"}  # noqa: RUF012  as the base class declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _TemplateNamespace(Namespace):
    """A namespace that refuses names with a leading underscore."""

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
    """The environment of transformers' chat templates, with limits. Use it within `run_bounded`.

    Blocks are trimmed. It has `{% break %}`, `{% continue %}`, `{% generation %}`,
    `raise_exception`, `strftime_now`, and a `tojson` that does not escape HTML.
    """

    code_generator_class = _CodeGenerator
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        """Make the environment, which serves any template."""
        # The optimizer would evaluate constants at compile time, outside of a run.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=_check_text,
            optimized=False,
        )
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded(name, call) for name, call in self.filters.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _TemplateNamespace

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join the output of a template, a macro or a block."""
        joined, size = [], 0
        for part in parts:
            _check_size(size := size + len(part))
            joined.append(part)
        return "".join(joined)

    def concat_values(self, values: Iterable[Any]) -> str:
        """The operator `~`."""
        return self.concat([str(_check_text(value)) for value in values])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an intercepted operator if its result is within the limits."""
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, _SIZED) and isinstance(times, int):
                    _check_size(len(value) * times)
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        elif operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
            _check_size(len(left) + len(right))
        elif operator == "%":
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function for a template, within the limits."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes, int, list, tuple)):
            _check_numbers([*args, *kwargs.values()])
        return _check_result(
            ImmutableSandboxedEnvironment.call(__self, __context, __obj, *args, **kwargs)
        )

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the sandboxed `str.format` of a string with limited widths."""
        bounded = super().wrap_str_format(value)
        if bounded is not None:
            _check_format(value.__self__)
        return bounded


_SIZED = (str, bytes, list, tuple)


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise TemplateLimitError(f"it produces more than {MAX_CHARS} characters")


def _check_bits(bits: int) -> None:
    if bits > _MAX_INTEGER_BITS:
        raise TemplateLimitError(f"it produces an integer of more than {_MAX_INTEGER_BITS} bits")


def _check_numbers(values: Iterable[object]) -> None:
    if any(isinstance(value, int) and abs(value) > _MAX_NUMBER for value in values):
        raise TemplateLimitError(f"a width or count is larger than {_MAX_NUMBER}")


def _check_format(text: object) -> None:
    if isinstance(text, str) and _WIDE.search(text):
        raise TemplateLimitError("it formats with a width of many digits, or of an argument")


def _check_result(value: T) -> T:
    if isinstance(value, _SIZED):
        _check_size(len(value))
    return value


def _check_text(value: T) -> T:
    """Check the size of the text of nested containers, which may have a member several times."""
    stack, size = [value] if isinstance(value, (list, tuple, dict)) else [], 0
    while stack:
        part: Any = stack.pop()
        stack.extend(part if isinstance(part, (list, tuple, dict)) else ())
        stack.extend(part.values() if isinstance(part, dict) else ())
        _check_size(size := size + (len(part) if isinstance(part, str) else 2))
    return value


def _bounded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter with limits."""
    # An attribute marks filters whose first argument is the context or the environment.
    first = 1 if hasattr(call, "jinja_pass_arg") else 0

    @wraps(call)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_numbers([*args[first + 1 :], *kwargs.values()])
        if name == "format":
            _check_format(args[first])
        return _check_result(call(*args, **kwargs))

    return bounded


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    _check_format(format)
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
        _check_text(value),
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
