"""The nsys session: its command line, and the window that a program opens in it.

nsys (NVIDIA Nsight Systems) starts the program, and collects only inside the window: an engine
loads weights, warms up and captures its steps before it, and the profile holds nothing but steps.
`stepgraph report` reads the export (`report.py`).
"""

import contextlib
import os
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

from . import ranges

GraphTrace = Literal["graph", "node"]
"""What nsys records of a CUDA graph: its begin and end, or each of its nodes.

`graph` costs next to nothing and times steps as they are. `node` names what runs inside a replayed
step, and perturbs it: for the operations of a step, not for its time.
"""

_STARTED_VARIABLE: Final = "STEPGRAPH_STARTED_NSYS"
"""Set by `nsys_command`, in case that nsys sets no variable before the window opens."""


class CaptureWindowError(RuntimeError):
    """A capture window was opened while another one was open."""


def nsys_command(
    program: Sequence[str], *, output: str, graph_trace: GraphTrace = "graph", on_cuda: bool = True
) -> str:
    """Return the shell command that profiles `program`, which opens a `capture_window`.

    It writes `output`.nsys-rep, and replaces an earlier one. CPU samples and context switches,
    which would perturb the steps, are left out. CUDA's profiler API opens the window; without CUDA
    the NVTX range `window` does. When it closes, the program runs on to its end.
    """
    name = output.replace("%", "%%")  # nsys puts the process and more in the place of %p...
    if on_cuda:
        what = ["-t", "cuda,nvtx", "-c", "cudaProfilerApi", "--capture-range-end=stop"]
        what.append(f"--cuda-graph-trace={graph_trace}")
    else:
        window = f"{ranges.WINDOW}@{ranges.DOMAIN}"
        what = ["-t", "nvtx", "-c", "nvtx", "-p", window, "--capture-range-end=stop"]
    how = ["--sample=none", "--cpuctxsw=none", "--force-overwrite=true", "-o", name]
    return f"{_STARTED_VARIABLE}=1 {shlex.join(['nsys', 'profile', *what, *how, *program])}"


def export_command(report: Path) -> str:
    """Return the shell command that exports `report` (NAME.nsys-rep) to NAME.sqlite.

    Structured payloads (rows, bucket, tokens of a replay) are exported on demand only.
    """
    how = ["--type=sqlite", "--include-blobs=true", "--force-overwrite=true"]
    output = str(report.with_suffix(".sqlite"))
    return shlex.join(["nsys", "export", *how, "-o", output, str(report)])


def inside_nsys() -> bool:
    """Return whether a tool profiles this process."""
    return any(map(os.environ.get, (*ranges.TOOL_VARIABLES, _STARTED_VARIABLE)))


_window: Final = threading.Lock()
"""Held while a window is open: nsys collects one, and the first end of any would end it."""


@contextlib.contextmanager
def capture_window() -> Iterator[None]:
    """Profile what runs inside, under the nsys of `nsys_command`; without nsys it changes nothing.

    On CUDA the device is synchronised at both ends, so that the window holds the work that was
    started in it. nsys collects the first window of a program only.

    Raises:
        CaptureWindowError: another window is open in this process; it stays open.
    """
    if not _window.acquire(blocking=False):
        raise CaptureWindowError(
            "a capture window is already open in this process; a profile has one window at a time"
        )
    with contextlib.ExitStack() as stack:  # unwinds in reverse order
        stack.callback(_window.release)
        torch = sys.modules.get("torch")
        cuda = torch.cuda if torch is not None and torch.cuda.is_initialized() else None
        if cuda is not None:
            cuda.synchronize()
            cuda.profiler.start()
            stack.callback(cuda.profiler.stop)
        stack.enter_context(ranges.span(ranges.WINDOW))
        if cuda is not None:
            stack.callback(cuda.synchronize)
        yield
