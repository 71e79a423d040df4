"""Where each microsecond of a step goes, and how far that is from the limit.

`ranges` emits the NVTX ranges, `timeline` keeps the times of the last steps, `stats` summarises
times, `bandwidth` measures how fast this device reads; `attribution` names kernels inside replayed
graphs. `nsys` has the command line of an nsys session and the window of a program in it, `report`
reads its export; `trace` records a trace without nsys.

Importing the package imports none of them. torch is loaded when `bandwidth` and `trace` measure.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .nsys import capture_window

__all__ = ["capture_window"]


def __getattr__(name: str) -> Any:
    """Import the names of the package on first access."""
    if name == "capture_window":
        from .nsys import capture_window

        return capture_window
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
