"""Where results go besides files: stdout; and whether two paths are one file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["print_text", "same_file"]


def print_text(text: str) -> None:
    """Print to stdout; who stops reading, as `head` does, misses the rest and ends nothing."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is left in the buffer would fail again when Python exits.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to the same file, which need not be there yet."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is not there
        return False
