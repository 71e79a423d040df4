"""Command-line flags for the fields of a configuration class, with the help of its docstring."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from ...errors import ConfigError
from ...speculation.config import Speculation
from ...tools.configuration_reference import described_fields
from ...tools.memory_report import parse_bytes

__all__ = ["add_config_flags", "config_of", "flag_type"]

Config = TypeVar("Config")


def add_config_flags(
    parser: argparse._ActionsContainer,
    kind: type,
    *,
    defaults: Mapping[str, Any],
    without: Collection[str] = (),
) -> None:
    """Add a flag for each field of a dataclass except those `without`.

    Flags that are not given leave no attribute in the result of the parser; see `config_of`, which
    has the same `defaults`.
    """
    hints = typing.get_type_hints(kind)
    texts = described_fields(kind)
    for field in dataclasses.fields(kind):
        if field.name not in without:
            text = _help(texts[field.name], defaults.get(field.name, field.default))
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                dest=_attribute(kind, field.name),
                default=argparse.SUPPRESS,
                help=text.replace("%", "%%"),
                **_settings(field.name, hints[field.name]),
            )


def config_of(kind: type[Config], options: argparse.Namespace, **defaults: Any) -> Config:
    """Return the configuration that the flags give; `defaults` differ from those of the class.

    Raises:
        ConfigError: a value is out of range.
    """
    values = dict(defaults)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        name = _attribute(kind, field.name)
        if hasattr(options, name):
            value = getattr(options, name)
            if isinstance(value, list):  # of a tuple, or the pairs of a mapping
                value = dict(value) if isinstance(value[0], tuple) else tuple(value)
            values[field.name] = value
    return kind(**values)


def flag_type(read: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    """Return a type for argparse whose error says `what` was expected."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, ConfigError) as error:
            raise argparse.ArgumentTypeError(f"{text!r:.80} is not {what}") from error

    return convert


def _help(text: str, default: Any) -> str:
    """Return the description of a field with its default; `None` is no word of a shell."""
    if default is None:
        return text.replace(". None:", ". Default:").replace("; None:", "; default:")
    if default is dataclasses.MISSING:
        return text
    text = re.sub(r" None: [^.]*\.$", "", text).removesuffix(".")
    shown = "yes" if default is True else "no" if default is False else default
    if isinstance(default, float):
        shown = f"{default:g}"
    return f"{text} (default: {shown})"


def _attribute(kind: type, field: str) -> str:
    return f"{kind.__name__}.{field}"


def _settings(name: str, hint: Any) -> dict[str, Any]:
    """Return the settings of the flag of a field: one of the types of the configurations."""
    arguments = [a for a in typing.get_args(hint) if a is not types.NoneType]
    if isinstance(hint, types.UnionType) and len(arguments) == 1:
        hint = arguments[0]  # None is the default
    origin = typing.get_origin(hint)
    if Speculation in arguments:
        return {"type": flag_type(_speculation, "a method or a JSON object"), "metavar": "METHOD"}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    if origin is typing.Literal:
        return {"choices": typing.get_args(hint)}
    if origin is tuple:
        return {"nargs": "+", "type": flag_type(int, "an integer"), "metavar": "N"}
    if origin is Mapping:
        pair = "NAME=NUMBER"
        return {"nargs": "+", "type": flag_type(_name_and_number, pair), "metavar": pair}
    if name.endswith("_bytes"):
        return {"type": flag_type(parse_bytes, "a size such as 512MB"), "metavar": "SIZE"}
    if hint is int:
        return {"type": flag_type(int, "an integer"), "metavar": "N"}
    if hint is float:
        return {"type": flag_type(float, "a number"), "metavar": "X"}
    assert hint is str, f"no flag for {name}: {hint}"
    return {"metavar": "NAME"}


def _speculation(text: str) -> Speculation:
    return Speculation.of(json.loads(text) if text.startswith("{") else text)


def _name_and_number(text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    return name, float(number)
