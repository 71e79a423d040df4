"""Command-line arguments that several tools take."""

from __future__ import annotations

import argparse

__all__ = ["DTYPES", "STORED_DTYPES", "positive_int"]

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
