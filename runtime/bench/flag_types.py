"""The types of the values of flags; each raises `argparse.ArgumentTypeError`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from ..tools.arguments import parse_bytes
from .validate_args import StepRange

__all__ = ["file_path", "integer", "memory_size", "number", "step_range"]

_MOST = 1_000_000_000
"""Largest count; larger values are typing errors."""


def integer(least: int, most: int = _MOST) -> Callable[[str], int]:
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


def number(what: str, *, at_least: float = 0.0) -> Callable[[str], float]:
    """Return a flag type: a finite number that is positive and at least `at_least`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (0 < value < math.inf and value >= at_least):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return read


def memory_size(text: str) -> int:
    """Read an amount of memory such as 80GB; return bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def file_path(text: str) -> Path:
    """Read a file name. The file need not exist."""
    if not text or text.endswith(("/", "\0")):
        raise argparse.ArgumentTypeError(f"{text!r} names no file")
    return Path(text)


def step_range(text: str) -> StepRange:
    """Read steps `A:B`, half open."""
    first, colon, end = text.partition(":")
    if not (colon and first.isdecimal() and end.isdecimal() and text.isascii()):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not of the form A:B, two numbers of steps such as 8:24"
        )
    if int(first) >= int(end):
        raise argparse.ArgumentTypeError(
            f"{text!r} has no steps: B must be larger than A, as in 8:24"
        )
    return StepRange(int(first), int(end))
