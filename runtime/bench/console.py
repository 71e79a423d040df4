"""The errors that the benchmark and `stepgraph explain` print."""

from __future__ import annotations

import sys

from ...profiling.atomic_write import WriteError
from ...profiling.kernel_names import NamesFileError
from ...profiling.ranges import NvtxMissingError
from ...profiling.trace import TraceError
from ..errors import ConfigError, MemoryBudgetError, StepgraphError, StepPreparationError

__all__ = ["PROGRAM", "REPORTED_ERRORS", "print_error"]

REPORTED_ERRORS = (
    *(StepgraphError, MemoryBudgetError, StepPreparationError),
    *(NamesFileError, NvtxMissingError, TraceError, WriteError),
)
"""Errors that a command prints as one line; any other is a defect and keeps its traceback."""
PROGRAM = "stepgraph bench"
"""What usage and errors begin with."""


def print_error(error: object, name: str | None = None, *, program: str = PROGRAM) -> int:
    """Print an error to stderr: its details first, its message as the last line.

    Return the exit status: 2, as argparse, for a wrong configuration.

    Args:
        error: the error, or its message.
        name: what cannot be measured, such as a model.
        program: that the line begins with.
    """
    message, *details = str(error).splitlines() or [type(error).__name__]
    about = "" if name is None else f"{name}: "
    last = f"{program}: error: {about}{message}"
    print(*details, last, sep="\n", file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1
