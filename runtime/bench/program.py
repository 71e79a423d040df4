"""The command line of this process: the script bench.py or the installed command `stepgraph`."""

from __future__ import annotations

import sys
from pathlib import Path

from ...profiling.atomic_write import WriteError
from ...profiling.kernel_names import NamesFileError
from ...profiling.nvtx_tool import NvtxMissingError
from ...profiling.plot import PlotError
from ...profiling.trace import TraceError
from ..errors import ConfigError, MemoryBudgetError, StepgraphError, StepPreparationError

__all__ = ["REPORTED_ERRORS", "program_name", "shown_command_line", "status_of", "to_run_again"]

REPORTED_ERRORS = (
    *(StepgraphError, MemoryBudgetError, StepPreparationError),
    *(NamesFileError, NvtxMissingError, PlotError, TraceError, WriteError),
)
"""Errors that a command prints as one line; any other is a defect and keeps its traceback."""
SCRIPT = "bench.py"


def status_of(error: Exception) -> int:
    """Return the exit status after an error: 2, that of argparse, for a wrong configuration."""
    return 2 if isinstance(error, ConfigError) else 1


def program_name() -> str:
    """Return the name that usage and errors begin with."""
    return SCRIPT if _is_script() else "stepgraph bench"


def shown_command_line() -> list[str]:
    """Return the command line as a user would type it."""
    if _is_script():
        return ["python", SCRIPT, *sys.argv[1:]]
    return ["stepgraph", *sys.argv[1:]]


def to_run_again() -> list[str]:
    """Return the arguments that make `sys.executable` run this command line again."""
    return sys.argv if _is_script() else ["-m", "stepgraph", *sys.argv[1:]]


def _is_script() -> bool:
    return Path(sys.argv[0]).name == SCRIPT
