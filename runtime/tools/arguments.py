"""Command-line arguments that several tools take."""

from __future__ import annotations

import argparse
from typing import Any

from ..errors import ConfigError
from ..speculation.config import Speculation

__all__ = ["DTYPES", "STORED_DTYPES", "positive_int", "speculation_spec"]

DTYPES = ("auto", "float32", "bfloat16", "float16")
"""Choices of `--dtype`."""

STORED_DTYPES = ("auto", "int8", "fp8")
"""Choices of `--weight-dtype` and `--kv-dtype`."""


def positive_int(text: str) -> int:
    """Return the integer of an argument; raise ArgumentTypeError if it is not at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return value


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
