"""Raises an exception at the n-th line that the package executes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from stepgraph import runtime

PACKAGE = str(Path(runtime.__file__).parent.parent)  # as code objects name it
ROOMS = tuple(f"{PACKAGE}/{room}/" for room in ("runtime", "cache", "graphs", "profiling"))


class LineFault:
    """Counts lines of the package in this thread, and raises `error` at number `at`, once."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.at, self.error = at, error
        self.lines = 0
        self.where = ""

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if event == "call":
            # CPython 3.11 crashes or loops when a trace function raises in a comprehension.
            code = frame.f_code
            traced = code.co_filename.startswith(ROOMS) and not code.co_name.startswith("<")
            return self._trace if traced else None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                code = frame.f_code
                self.where = f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
                raise self.error("injected")
        return self._trace

    def __enter__(self) -> LineFault:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
