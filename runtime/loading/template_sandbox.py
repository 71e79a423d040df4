"""A jinja2 sandbox for the chat templates of checkpoints, with limits on time and memory.

jinja2's immutable sandbox protects the interpreter and the data given to a template, but not
against endless loops or strings of gigabytes: `template_budget` has the limits that are added here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .template_budget import TemplateLimitError, budget, charge

__all__ = ["BoundedEnvironment"]

_SAFE_VERSION = (3, 1, 6)
"""Templates could escape the sandbox of older versions."""
_STRUCTURAL_FILTERS = frozenset(
    (
        *("attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items"),
        *("last", "length", "list", "map", "max", "min", "random", "reject", "rejectattr"),
        *("reverse", "select", "selectattr", "slice", "sort", "sum", "unique"),
    )
)
"""Filters that do not convert the containers they are given to text."""
_MAX_INTEGER_BITS = 1 << 14
_WIDE = re.compile(r"\d{7,}")
_NESTED_SPEC = re.compile(r":[^{}]*\{")
T = TypeVar("T")

if tuple(int(part) for part in jinja2.__version__.split(".")[:3]) < _SAFE_VERSION:
    raise ImportError(f"jinja2 {jinja2.__version__} is older than 3.1.6")


class _CodeGenerator(CodeGenerator):
    """Generates code that charges the results of the operator `~`."""

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
        """Join the output of a template, a macro or a block."""
        joined = []
        for part in parts:
            charge(len(part))
            joined.append(part)
        return "".join(joined)

    def concat_values(self, values: Iterable[Any]) -> str:
        """The operator `~`."""
        return self.concat([str(_charge_text(value)) for value in values])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an intercepted operator if its result fits the budget."""
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
        """Call a function for a template, if its result fits the budget."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes, int, list, tuple)):
            name = getattr(__obj, "__name__", "")
            _charge_call(name, owner, args, kwargs)
            if name == "join" and args and isinstance(owner, str):
                args = (list(args[0]), *args[1:])
                _charge_join(args[0], len(owner))
        return _charge_result(
            ImmutableSandboxedEnvironment.call(__self, __context, __obj, *args, **kwargs)
        )

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a bounded `str.format` in the place of a string's own."""
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
    """Return a filter that charges its result."""
    # An attribute marks filters whose first argument is the context or the environment.
    first = 1 if hasattr(call, "jinja_pass_arg") else 0

    @wraps(call)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, arguments = args[first], args[first + 1 :]
        _charge_call(name, value, arguments, kwargs)
        if name == "format":
            _check_widths(value, [*arguments, *kwargs.values()])
        if name == "join":
            value = list(value)
            args = (*args[:first], value, *arguments)
            texts = [len(v) for v in (*arguments, *kwargs.values()) if isinstance(v, str)]
            _charge_join(value, max(texts, default=0))
        if name not in _STRUCTURAL_FILTERS:
            _charge_text(value)
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


def _check_bits(bits: int) -> None:
    if bits > _MAX_INTEGER_BITS:
        raise TemplateLimitError(f"it produces an integer of more than {_MAX_INTEGER_BITS} bits")


def _charge_result(value: T) -> T:
    if isinstance(value, (str, bytes, list, tuple, dict)):
        charge(len(value))
    return value


def _check_widths(text: object, arguments: Iterable[object]) -> None:
    """Refuse a format string with a width that exceeds the budget."""
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
    """Refuse integers that exceed the budget as a width or a count."""
    for value in values:
        if isinstance(value, int) and abs(value) > budget.left:
            raise TemplateLimitError(f"a width or count is larger than {budget.left}")


def _charge_call(
    name: str, text: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> None:
    """Charge an upper bound of the size of the result of a method or filter."""
    values = [*arguments, *named.values()]
    _check_numbers(values)
    texts = [len(value) for value in values if isinstance(value, str)]
    numbers = [value for value in values if isinstance(value, int)]
    size = len(text) if isinstance(text, (str, list, tuple)) else 0
    if name == "replace" and isinstance(text, str):
        old = arguments[0] if arguments else named.get("old", "")
        new = arguments[1] if len(arguments) > 1 else named.get("new", "")
        charge(size + text.count(str(old)) * len(str(new)))
    elif name in ("indent", "expandtabs") and isinstance(text, str):
        lines = text.count("\n") + text.count("\t") + 1
        charge(size + lines * max([8, *texts, *numbers]))
    elif name == "wordwrap":
        charge(size + size * max([1, *texts]))
    elif name == "translate":
        charge(size * max([1, *(len(str(v)) for d in values for v in dict(d).values())]))


def _charge_join(parts: Sequence[Any], separator: int) -> None:
    charge(sum(len(part) for part in parts if isinstance(part, str)) + separator * len(parts))


def _charge_text(value: T) -> T:
    """Charge the text of nested containers, which may contain a part several times."""
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
