"""What a value of a flag must be; each function reads one, or says in a line why it is none."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from ..config import MAX_SEED
from ..tools.memory_report import parse_bytes

__all__ = [
    "at_least_two",
    "file_path",
    "gigabytes_per_second",
    "memory_size",
    "milliseconds",
    "natural_number",
    "number_of_neighbours",
    "number_of_steps",
    "positive_integer",
    "ratio",
    "seed",
]

LEAST_STEPS = 30
"""Of `--num-steps`."""
MOST_NEIGHBOURS = 256
"""Of `--neighbours`."""
MOST = 1_000_000_000
"""Of what is counted: more is a slip of the keyboard, and would never end."""


def positive_integer(text: str) -> int:
    """Read a number of rows, tokens, steps or repetitions."""
    return _integer(text, 1)


def at_least_two(text: str) -> int:
    """Read the tokens of an output: the prefill makes the first one, a decode step the second."""
    return _integer(text, 2)


def natural_number(text: str) -> int:
    """Read a number of repetitions that may be none."""
    return _integer(text, 0)


def seed(text: str) -> int:
    """Read a seed."""
    return _integer(text, 0, MAX_SEED)


def number_of_steps(text: str) -> int:
    """Read a number of steps, enough of them to see a distribution."""
    return _integer(text, LEAST_STEPS)


def number_of_neighbours(text: str) -> int:
    """Read a number of busy processes."""
    return _integer(text, 0, MOST_NEIGHBOURS)


def milliseconds(text: str) -> float:
    """Read a time budget."""
    return _positive_float(text, "milliseconds")


def gigabytes_per_second(text: str) -> float:
    """Read a bandwidth."""
    return _positive_float(text, "gigabytes per second")


def _positive_float(text: str, unit: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of {unit}")
    return value


def ratio(text: str) -> float:
    """Read a limit of new / old."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a ratio of at least 1, which is what as fast as before has"
        )
    return value


def memory_size(text: str) -> int:
    """Read an amount of memory such as 80GB; returns bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def file_path(text: str) -> Path:
    """Read the name of a file, whatever is there."""
    if not text or text.endswith(("/", "\0")):
        raise argparse.ArgumentTypeError(f"{text!r} names no file")
    return Path(text)


def _integer(text: str, least: int, most: int = MOST) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least {least}")
    if value > most:
        raise argparse.ArgumentTypeError(f"{text!r:.40} is more than {most:,}")
    return value
