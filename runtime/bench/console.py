"""The command line of this process, and what it prints: text, tables and errors."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...profiling.atomic_write import WriteError
from ...profiling.kernel_names import NamesFileError
from ...profiling.ranges import NvtxMissingError
from ...profiling.trace import TraceError
from ..errors import ConfigError, MemoryBudgetError, StepgraphError, StepPreparationError

__all__ = [
    "REPORTED_ERRORS",
    "exit_status",
    "print_error",
    "print_text",
    "program_name",
    "rerun_arguments",
    "shown_command_line",
]

REPORTED_ERRORS = (
    *(StepgraphError, MemoryBudgetError, StepPreparationError),
    *(NamesFileError, NvtxMissingError, TraceError, WriteError),
)
"""Errors that a command prints as one line; any other is a defect and keeps its traceback."""
SCRIPT = "bench.py"


def exit_status(error: Exception) -> int:
    """Return the exit status after an error: 2, that of argparse, for a wrong configuration."""
    return 2 if isinstance(error, ConfigError) else 1


def program_name() -> str:
    """Return the name that usage and errors begin with."""
    return SCRIPT if _is_script() else "stepgraph bench"


def shown_command_line() -> list[str]:
    """Return the command line as a user would type it."""
    return ["python", SCRIPT, *sys.argv[1:]] if _is_script() else ["stepgraph", *sys.argv[1:]]


def rerun_arguments() -> list[str]:
    """Return the arguments with which `sys.executable` runs this command line again."""
    return sys.argv if _is_script() else ["-m", "stepgraph", *sys.argv[1:]]


def _is_script() -> bool:
    return Path(sys.argv[0]).name == SCRIPT


def print_text(text: str) -> None:
    """Print to stdout: Markdown tables as they are, or laid out for the terminal.

    A closed pipe (`| head`) is not an error.
    """
    try:
        console = Console(highlight=False)
        if console.is_terminal:
            console.print(_for_terminal(text, console.width))
        else:
            print(text, flush=True)
    except BrokenPipeError:
        # The rest of the buffer would fail again when Python exits.
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)


def _for_terminal(text: str, width: int) -> Group:
    """Return text whose Markdown tables are laid out for a terminal of `width` characters.

    A table with more columns than rows that is too wide is shown with a line for each column.
    """
    shown: list[RenderableType] = []
    for is_table, lines in itertools.groupby(text.splitlines(), lambda line: line.startswith("|")):
        if not is_table:
            shown += map(Text, lines)
            continue
        table = list(lines)
        head, rule, *rows = map(_cells, table)
        if len(table[0]) <= width or len(rows) >= len(head):
            shown.append(_table(head, rows, right=[cell.endswith(":") for cell in rule]))
            continue
        each = 3 + max(len(cell) for row in rows for cell in row)
        at_once = max(1, (width - max(map(len, head)) - 4) // each)
        for first in range(0, len(rows), at_once):
            names, *columns = zip(head, *rows[first : first + at_once], strict=True)
            shown.append(_table(names, columns))
    return Group(*shown)


def _cells(line: str) -> list[str]:
    """Return the cells of a line of a Markdown table."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _table(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool] | None = None
) -> Table:
    table = Table()
    for name, is_right in zip(head, right or [False] * len(head), strict=True):
        justify: Literal["left", "right"] = "right" if is_right else "left"
        table.add_column(Text(name), justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # no markup: a path may have brackets
    return table


def print_error(error: object, name: str | None = None, *, program: str | None = None) -> None:
    """Print an error to stderr: its details first, its message as the last line.

    Args:
        error: the error, or its message.
        name: what cannot be measured, such as a model.
        program: None: the benchmark.
    """
    message, *details = str(error).splitlines() or [type(error).__name__]
    about = "" if name is None else f"{name}: "
    last = f"{program or program_name()}: error: {about}{message}"
    print(*details, last, sep="\n", file=sys.stderr)
