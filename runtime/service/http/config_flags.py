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

from ...config import EngineConfig
from ...errors import ConfigError
from ...speculation.config import Speculation
from ...tools.arguments import parse_bytes
from ...tools.configuration_reference import described_fields
from ..service_config import ServiceConfig

__all__ = ["add_config_flags", "config_of", "flag_type", "in_flags"]

Config = TypeVar("Config")

_FLAGS = {
    **{
        field.name: f"--{field.name.replace('_', '-')}"
        for kind in (EngineConfig, ServiceConfig)
        for field in dataclasses.fields(kind)
    },
    **{"model_names": "--served-model-name", "api_keys": "--api-key"},
    **{name: f"--{name.replace('_', '-')}" for name in ("tool_parser", "reasoning_parser")},
}
_FIELD = "|".join(sorted(_FLAGS, key=len, reverse=True))
_LONG_FIELD = "|".join(name for name in _FLAGS if "_" in name)
"""Other names are also words."""
_SETTING = re.compile(
    rf"(?:(?:Engine|Service)Config\()?(?<![\w.\"'-])({_FIELD}) ?= ?('[^']*'|[\w.+-]+)\)?"
    r"(?: in (?:its|the) (?:Engine|Service)Config)?"
)
_NAME = re.compile(
    rf"(?:Engine|Service)Config\.({_FIELD})\b|(?<![\w.'\"/-])({_LONG_FIELD})(?![\w'\"/])"
)


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


def in_flags(error: Exception) -> str:
    """Return the message of an error with flags of `stepgraph serve` for fields of configurations.

    `max_num_seqs must be` becomes `--max-num-seqs must be`, `mode='eager'` becomes `--mode eager`.
    """
    message = str(error).removeprefix("ServiceConfig: ")
    message = _NAME.sub(lambda found: _FLAGS[found[1] or found[2]], _SETTING.sub(_flag_of, message))
    if isinstance(error, ConfigError) and error.flag is not None and error.flag not in message:
        field = error.field
        named = re.compile(rf"(?<![\w'\"-]){field}(?![\w'\"])")
        found = named.search(message) is not None
        return named.sub(error.flag, message, count=1) if found else f"{error.flag}: {message}"
    return message


def _flag_of(found: re.Match[str]) -> str:
    """Return the flag that gives a field a value."""
    flag, value = _FLAGS[found[1]], found[2].strip("'")
    if value in ("True", "False"):
        return flag if value == "True" else f"--no-{flag.removeprefix('--')}"
    return f"{flag} {value}"


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
