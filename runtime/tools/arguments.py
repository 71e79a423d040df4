"""Flags of commands: fields of configurations, and values that several commands take. No torch."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from ..arguments import Allowed, allowed_values, described_fields
from ..config import EngineConfig, Speculation
from ..errors import ConfigError

Config = TypeVar("Config")

DTYPES = allowed_values(EngineConfig)["dtype"].choices
STORED_DTYPES = allowed_values(EngineConfig)["weight_dtype"].choices
"""Also of `--kv-dtype`."""

MODEL_HELP = (
    "checkpoint directory, GGUF file, hub id, smollm2 or gemma3-270m (trained models that pip"
    " downloads), preset:NAME (random weights) or demo"
)

_UNITS = {
    unit + suffix: base**power
    for power, unit in enumerate(("", "k", "m", "g", "t"))
    for suffix, base in (("b", 1000), ("ib", 1024))
    if unit or suffix == "b"
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
BYTES = "an amount of memory: write 80GB, 512MB, 40GiB or bytes"
"""What `parse_bytes` reads."""
_MOST_BYTES = 2**60
"""An exbibyte, more than any address space."""


def add_config_flags(
    parser: argparse._ActionsContainer,
    kind: type,
    *,
    defaults: Mapping[str, Any],
    without: Collection[str] = (),
) -> None:
    """Add a flag for each field of a dataclass except those `without`; see `config_of`."""
    texts = described_fields(kind)
    for field in dataclasses.fields(kind):
        if field.name not in without:
            default = defaults.get(field.name, field.default)
            text = _help(texts[field.name], allowed_values(kind).get(field.name), default)
            parser.add_argument(
                f"--{field.name.replace('_', '-')}",
                dest=f"{kind.__name__}.{field.name}",
                default=argparse.SUPPRESS,
                help=text.replace("%", "%%"),
                **flag_settings(kind, field.name),
            )


def config_of(kind: type[Config], options: argparse.Namespace, **defaults: Any) -> Config:
    """Return the configuration that the flags give; `defaults` replace the defaults of the class.

    Raises:
        ConfigError: a value is out of range.
    """
    values = dict(defaults)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        name = f"{kind.__name__}.{field.name}"
        if hasattr(options, name):
            value = getattr(options, name)
            if isinstance(value, list):  # of a tuple, or the pairs of a mapping
                value = dict(value) if isinstance(value[0], tuple) else tuple(value)
            values[field.name] = value
    return kind(**values)


def _help(text: str, allowed: Allowed | None, default: Any) -> str:
    """Return the description of a field, its range and default; None is not a word of a shell."""
    notes = [] if allowed is None or not allowed.limits else [allowed.limits]
    if default is None:
        text = text.replace(". None:", ". Default:").replace("; None:", "; default:")
    elif default is not dataclasses.MISSING:
        text = re.sub(r" None: [^.]*\.$", "", text)
        shown = "yes" if default is True else "no" if default is False else default
        notes.append(f"default: {f'{default:g}' if isinstance(default, float) else shown}")
    return f"{text.removesuffix('.')} ({'; '.join(notes)})" if notes else text


def flag_settings(kind: type, name: str) -> dict[str, Any]:
    """Return the arguments of `add_argument` that read a field of a configuration."""
    allowed = allowed_values(kind).get(name)
    if allowed is None:

        def speculation(text: str) -> Speculation:
            return Speculation.of(json.loads(text) if text.startswith("{") else text)

        return {"type": flag_type(speculation, "a method or a JSON object"), "metavar": "METHOD"}
    if allowed.kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    if allowed.choices:
        return {"choices": allowed.choices}
    if allowed.kind is Mapping:
        pair = "NAME=NUMBER"

        def name_and_number(text: str) -> tuple[str, float]:
            name, _, number = text.rpartition("=")
            return name, float(number)

        return {"nargs": "+", "type": flag_type(name_and_number, pair), "metavar": pair}
    if name.endswith("_bytes"):
        return {"type": flag_type(parse_bytes, "a size such as 512MB"), "metavar": "SIZE"}
    value = allowed.entry or allowed
    metavar = {int: "N", float: "X"}.get(value.kind, "NAME")

    def read(text: str) -> Any:
        return value.check(name, value.kind(text), ConfigError)

    settings = {"type": flag_type(read, str(value)), "metavar": metavar}
    return settings | ({} if allowed.entry is None else {"nargs": "+"})


def flag_type(read: Callable[[str], Any], what: str) -> Callable[[str], Any]:
    """Return a type for argparse whose error says `what` was expected."""

    def convert(text: str) -> Any:
        try:
            return read(text)
        except (ValueError, ConfigError) as error:
            raise argparse.ArgumentTypeError(f"{text!r:.80} is not {what}") from error

    return convert


def non_empty(text: str) -> str:
    """Refuse what an unset variable of a shell gives: an empty host would be every address."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def in_flags(error: Exception) -> str:
    """Return the message of an error, after the flag of the field that it is about."""
    flag = error.flag if isinstance(error, ConfigError) else None
    return str(error) if flag is None else f"{flag}: {error}"


def parse_bytes(text: str) -> int:
    """Return the bytes of `80GB` (decimal), `40GiB` (binary), `512 MB` or a plain number.

    Raises:
        ValueError: it is none of these, less than a byte, or more than an exbibyte.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get((match[2] or "b").lower()) if match else None
    size = float(match[1]) * unit if match is not None and unit is not None else 0.0
    if not 1 <= size <= _MOST_BYTES:
        raise ValueError(f"{text!r:.40} is not {BYTES}")
    return int(size)


def integer(least: int, most: int = 1_000_000_000) -> Callable[[str], int]:
    """Return a flag type: an integer from `least` to `most`."""

    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise ValueError(value)
        if value > most:
            raise argparse.ArgumentTypeError(f"{text!r:.40} is more than {most:,}")
        return value

    return flag_type(read, f"an integer of at least {least}")


def speculation_spec(text: str) -> Speculation:
    """Read METHOD[:K][=PATH], with K drafts at most and the directory of a drafter."""
    name, separator, path = text.partition("=")
    method, colon, count = name.partition(":")
    fields: dict[str, Any] = {"method": method}
    if colon:
        if not count.isdigit():
            raise argparse.ArgumentTypeError(
                f"{text!r}: {count!r} is not a number of drafts; give METHOD or METHOD:K, such as"
                " suffix:7"
            )
        fields["num_speculative_tokens"] = int(count)
    if separator:
        fields["model"] = path
    try:
        return Speculation.of(fields)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
