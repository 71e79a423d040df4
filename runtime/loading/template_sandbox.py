"""A jinja2 sandbox for the chat templates of checkpoints, with limits on time and memory.

jinja2's immutable sandbox protects the interpreter and the data given to a template, but not
against endless loops or strings of gigabytes: `template_budget` has the limits that are added here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from .template_budget import (
    TemplateLimitError,
    charge,
    charge_join,
    charge_result,
    charge_text,
    check_bits,
    check_numbers,
    check_widths,
    growth,
)

__all__ = ["BoundedEnvironment"]

_SAFE_VERSION = (3, 1, 6)
"""Templates could escape the sandbox of older versions."""
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
"""Filters that do not convert the containers they are given to text."""

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
            finalize=charge_text,
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
        return self.concat([str(charge_text(value)) for value in values])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an intercepted operator if its result fits the budget."""
        sized = (str, bytes, list, tuple)
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, sized) and isinstance(times, int):
                    charge(len(value) * times)
            if isinstance(left, int) and isinstance(right, int):
                check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            check_bits(left.bit_length() * abs(right))
        elif operator == "+" and isinstance(left, sized) and isinstance(right, sized):
            charge(len(left) + len(right))
        elif operator == "%":
            check_widths(left, right if isinstance(right, tuple) else (right,))
            charge_text(right)
        return charge_result(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function for a template, if its result fits the budget."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, (str, bytes, int, list, tuple)):
            name = getattr(__obj, "__name__", "")
            check_numbers([*args, *kwargs.values()])
            charge(growth(name, owner, args, kwargs))
            if name == "join" and args and isinstance(owner, str):
                args = (list(args[0]), *args[1:])
                charge_join(args[0], len(owner))
        return charge_result(
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
            check_widths(value.__self__, values)
            return charge_result(bounded(*args, **kwargs))

        return checked


def _bounded(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that charges its result."""
    # An attribute marks filters whose first argument is the context or the environment.
    first = 1 if hasattr(call, "jinja_pass_arg") else 0

    @wraps(call)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, arguments = args[first], args[first + 1 :]
        check_numbers([*arguments, *kwargs.values()])
        if name == "format":
            check_widths(value, [*arguments, *kwargs.values()])
        if name == "join":
            value = list(value)
            args = (*args[:first], value, *arguments)
            texts = [len(v) for v in (*arguments, *kwargs.values()) if isinstance(v, str)]
            charge_join(value, max(texts, default=0))
        if name not in _STRUCTURAL_FILTERS:
            charge_text(value)
        charge(growth(name, value, arguments, kwargs))
        return charge_result(call(*args, **kwargs))

    return bounded


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    check_widths(format, ())
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
