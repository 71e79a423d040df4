"""What the commands have in common: the parser, and the exit status after an interrupt."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

__all__ = ["INTERRUPTED", "CommandParser"]

INTERRUPTED = 130
"""Exit status after SIGINT: 128 + 2, as in a shell."""


class CommandParser(argparse.ArgumentParser):
    """An `ArgumentParser` without abbreviated flags, whose usage errors are one line, exit 2."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        """Print the message without the usage, which `--help` prints; exit with 2."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.splitlines())}\n")
