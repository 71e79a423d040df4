"""Where each microsecond of a step goes, and how far that is from the limit.

`ranges` emits the NVTX ranges, `timeline` keeps the times of the last steps, `stats` summarises
times, `bandwidth` measures how fast this device reads; `attribution` names kernels inside replayed
graphs. `nsys` has the command line of an nsys session and the window of a program in it, `trace`
records a trace without nsys, and `report` reads both.

torch is loaded when `bandwidth` and `trace` measure.
"""

from .nsys import capture_window

__all__ = ["capture_window"]
