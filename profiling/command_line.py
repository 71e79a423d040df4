"""The argument parser of all commands, and the exit status after an interrupt."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

__all__ = ["INTERRUPTED", "CommandParser"]

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
