"""The command line of this process, and the errors that it prints."""

from __future__ import annotations

import sys
from pathlib import Path

from ...profiling.atomic_write import WriteError
from ...profiling.kernel_names import NamesFileError
from ...profiling.ranges import NvtxMissingError
from ...profiling.trace import TraceError
from ..errors import ConfigError, MemoryBudgetError, StepgraphError, StepPreparationError

__all__ = [
    "REPORTED_ERRORS",
    "exit_status",
    "print_error",
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
    """Return the exit status after an error: 2, as argparse, for a wrong configuration."""
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
