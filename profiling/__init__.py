"""Where each microsecond of a step goes, and how far that is from the limit.

`ranges` names what the host does for nsys, `timeline` keeps the times of the last steps, `stats`
summarises them with the number of samples they rest on, `roofline` says what a step must move, and
`bandwidth` how fast this device can move it; `attribution` names kernels inside replayed graphs.
`nsys` has the command line of an nsys session and the window of a program in it, `report` reads
what the session leaves, `trace` makes one without nsys, `plot` draws a timeline.

Importing the package imports none of them: `stats`, `roofline`, `timeline`, `attribution` and
`report` need the standard library only, `ranges` loads nvtx where it is installed, `bandwidth` and
`trace` load torch when they measure, `plot` matplotlib.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .nsys import capture_window

__all__ = ["capture_window"]


def __getattr__(name: str) -> Any:
    """Load what the package offers itself when it is asked for."""
    if name == "capture_window":
        from .nsys import capture_window

        return capture_window
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
