"""The argument parser of all commands, their output, and the exit status after an interrupt."""

from __future__ import annotations

import argparse
import io
import os
import sys
from typing import Any, NoReturn

__all__ = ["INTERRUPTED", "CommandParser", "print_text"]

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
        # The rest of the buffer would fail again when Python exits.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
