"""Where results and errors go besides files; and whether two paths are one file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.console import Console

from .program import program_name
from .terminal import for_terminal

__all__ = ["print_error", "print_text", "same_file"]


def print_text(text: str) -> None:
    """Print to stdout: Markdown as it is, or as fits the terminal.

    Who stops reading, as `head` does, misses the rest and ends nothing.
    """
    try:
        console = Console(highlight=False)
        if console.is_terminal:
            console.print(for_terminal(text, console.width))
        else:
            print(text, flush=True)
    except BrokenPipeError:
        # What is left in the buffer would fail again when Python exits.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def print_error(error: object, name: str | None = None, *, program: str | None = None) -> None:
    """Print an error of `name` to stderr, its details first: its message is the last line.

    Args:
        error: the error, or its message.
        name: of what cannot be measured, such as a model.
        program: None is the benchmark's.
    """
    message, *details = str(error).splitlines() or [type(error).__name__]
    about = "" if name is None else f"{name}: "
    last = f"{program or program_name()}: error: {about}{message}"
    print(*details, last, sep="\n", file=sys.stderr)


def same_file(one: Path, other: Path) -> bool:
    """Whether two paths lead to the same file, which need not be there yet."""
    if os.path.realpath(one) == os.path.realpath(other):
        return True
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them is not there
        return False
