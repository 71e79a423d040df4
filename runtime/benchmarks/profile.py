"""A profile of some decode steps of one case, by nsys or by torch's profiler.

Warm-up, compilation and captures come before the window, which opens before a step of the whole
batch in the one repetition that is measured, and closes before another.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch

from ...profiling import attribution, nsys
from ...profiling.kernel_costs import kernel_costs
from ...profiling.kernel_names import KernelNames, OperationCost
from ...profiling.trace import torch_trace, trace_operations
from ..config import EngineConfig
from ..engine import Engine
from ..errors import ConfigError
from ..kernels.gpu.splits import choose_splits
from ..step_report import MULTIPROCESSORS, decoder_shape
from .document import modes_of
from .profile_options import StepRange, kernels_path, trace_path
from .run_steady import SteadyRun

__all__ = ["ProfileRun", "StepWindow", "run_nsys"]


def run_nsys(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Print the command that profiles this command line, and run it where there is nsys.

    Args:
        options: the checked command line.
        arguments: the command line as it was given, the program first.

    Returns:
        The exit status of nsys; 0 where the PATH has none.
    """
    form = _form(options.device)
    command = nsys.nsys_command(
        [sys.executable, *arguments],
        output=options.profile_output,
        graph_trace=options.graph_trace,
        device=form,
    )
    print(shlex.join(command), flush=True)
    found = nsys.find_nsys()
    if found is None:
        print("bench.py: nsys was not found on the PATH: nothing was run", file=sys.stderr)
        return 0
    status = _run([found, *command[1:]])
    if status == 0:
        report = Path(f"{options.profile_output}.nsys-rep")
        status = _run(nsys.export_command(report))
    if status == 0:
        read = ["python", "-m", "stepgraph.profiling.report", f"{options.profile_output}.sqlite"]
        print(f"to read it: {shlex.join(read)}", file=sys.stderr)
    return status


def _form(device: str) -> Literal["cuda", "cpu"]:
    """Return which form of the command a `--device` asks for, here or on another machine."""
    if device != "auto":
        return "cpu" if device == "cpu" else "cuda"
    return "cuda" if torch.cuda.is_available() or nsys.find_nsys() is None else "cpu"


def _run(command: Sequence[str]) -> int:
    """Run a command; return its exit status, of one that a signal ended as a shell tells it."""
    status = subprocess.run(command, check=False).returncode
    return status if status >= 0 else 128 - status


class StepWindow:
    """Opens a context before one step of the whole batch, and closes it before another.

    Args:
        steps: those inside.
        open_: makes the context.
    """

    def __init__(
        self, steps: StepRange, open_: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> None:
        self._steps = steps
        self._open = open_
        self._stack = contextlib.ExitStack()
        self._is_open = False

    def before_step(self, step: int) -> None:
        """Hear that step `step` comes next, or that there is none behind the one before it."""
        if step == self._steps.first and not self._is_open:
            self._stack.enter_context(self._open())
            self._is_open = True
        elif step == self._steps.end:
            self._stack.close()

    def __enter__(self) -> StepWindow:
        return self

    def __exit__(self, *error: object) -> None:
        """Close what is open; where an error ends the run the context hears of it."""
        self._stack.__exit__(*error)  # type: ignore[arg-type]


class ProfileRun(SteadyRun):
    """One case, in one mode, with a profile of some of its steps."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.names = KernelNames()
        self.modes = options.mode or [modes_of(self.device)[-1]]
