"""The argument parser of all commands, their output and tables, and the status of an interrupt."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

INTERRUPTED = 130
"""Exit status after SIGINT: 128 + 2, as in a shell."""


MAX_MESSAGE = 400
"""Characters of a usage error, which may quote arguments of any length."""


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` whose usage errors are one line, without abbreviated flags.

    An abbreviation changes its meaning when a flag is added.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        """Print the message without the usage, which `--help` prints; exit with 2."""
        line = " ".join(message.split())
        if len(line) > MAX_MESSAGE:
            line = f"{line[:MAX_MESSAGE]} ..."
        self.exit(2, f"{self.prog}: error: {line}\n")


def print_text(text: str) -> None:
    """Print to stdout. A closed pipe (`| head`) is not an error."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # its encoding may lack µ, or a path's bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard_stdout()


def discard_stdout() -> None:
    """Drop the rest of the output to a closed pipe, which would fail again when Python exits."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def aligned(head: Sequence[str], cells: Sequence[Sequence[str]], text_columns: int) -> list[str]:
    """Return the lines of a table in Markdown that reads as plain text too.

    The first `text_columns` are aligned to the left. A cell is one line, whatever is in it.
    """
    escaped = [[" ".join(cell.replace("|", "\\|").splitlines()) for cell in row] for row in cells]
    # Not all readers of Markdown take a rule of less than three characters.
    widths = [max(3, *map(len, column)) for column in zip(head, *escaped, strict=True)]

    def line(row: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i < text_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return "| " + " | ".join(padded) + " |"

    rule = ["-" * w if i < text_columns else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    return [line(row) for row in (head, rule, *escaped)]
