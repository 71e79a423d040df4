"""Command-line arguments that several commands and tools take. Does not import torch."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError
from ..speculation.config import Speculation

__all__ = ["DTYPES", "STORED_DTYPES", "integer", "parse_bytes", "speculation_spec"]

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Choices of `--dtype`."""

STORED_DTYPES = ("auto", "int8", "fp8")
"""Choices of `--weight-dtype` and `--kv-dtype`."""

_UNITS = {
    unit + suffix: base**power
    for power, unit in enumerate(("", "k", "m", "g", "t"))
    for suffix, base in (("b", 1000), ("ib", 1024))
    if unit or suffix == "b"
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)
_MOST_BYTES = 2**60
"""An exbibyte, more than any address space."""


def parse_bytes(text: str) -> int:
    """Return the bytes of `80GB` (decimal), `40GiB` (binary), `512 MB` or a plain number.

    Raises:
        ValueError: it is none of these, less than a byte, or more than an exbibyte.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get((match[2] or "b").lower()) if match else None
    size = float(match[1]) * unit if match is not None and unit is not None else 0.0
    if not 1 <= size <= _MOST_BYTES:
        raise ValueError(
            f"{text!r:.40} is not an amount of memory: write 80GB, 512MB, 40GiB or bytes"
        )
    return int(size)


def integer(least: int, most: int = 1_000_000_000) -> Callable[[str], int]:
    """Return a flag type: an integer from `least` to `most`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{text!r:.40} is more than {most:,}")
        return value

    return read


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
