"""Ctrl-C waits for the end of a step: SIGINT is held back in critical sections of the main thread.

Python runs signal handlers between any two instructions of the main thread, and the usual handler
of SIGINT raises `KeyboardInterrupt` there. In the middle of a step that would leave requests and
blocks in an undefined state. So a critical section puts a handler of its own in the place of the
application's, which only notes the signal; at its end the application's handler is back, and is
called if a signal came. Nothing stays installed between two sections.

Other signals are not held back: a handler that raises within a step makes the engine fail.
"""

from __future__ import annotations

import signal
import sys
import threading

# The functions of `signal` convert to and from enums, which takes longer than the calls themselves.
from _signal import getsignal as _getsignal  # type: ignore[import-not-found]
from _signal import signal as _signal
from collections.abc import Callable
from types import FrameType
from typing import Final

__all__ = ["DeferredInterrupt", "in_stack"]

_SIGINT: Final = int(signal.SIGINT)

_Handler = Callable[[int, FrameType | None], object]


def in_stack(wanted: FrameType, top: FrameType | None) -> bool:
    """Whether `wanted` is `top` or one of its callers."""
    while top is not None:
        if top is wanted:
            return True
        top = top.f_back
    return False


class DeferredInterrupt:
    """Holds SIGINT back between `begin` and `end`; is itself the handler meanwhile.

    Python calls handlers in the main thread of the main interpreter only: elsewhere there is
    nothing to hold back. Nor is there where the application has no handler in Python.
    """

    __slots__ = ("_handler", "_noted", "frame", "main_thread")

    def __init__(self) -> None:
        self.main_thread = threading.main_thread().ident
        """Identifier of the thread that handles signals; None where it is not Python's."""
        self.frame: FrameType | None = None
        """What runs while SIGINT is held back; None elsewhere."""
        self._handler: _Handler | None = None  # the application's, while this one is in its place
        self._noted: tuple[int, FrameType | None] | None = None

    def begin(self, frame: FrameType) -> None:
        """Hold SIGINT back as long as `frame` runs and `end` has not been called. Not nested."""
        handler = _getsignal(_SIGINT)
        if handler is not self:  # left over where an exception kept `end` from being called
            if not callable(handler):
                return
            self._handler = handler
        self.frame = frame
        try:
            _signal(_SIGINT, self)
        except ValueError:  # a sub-interpreter, or Python was started by another thread
            self.main_thread = self._handler = self.frame = None

    def end(self) -> None:
        """Put the application's handler back, and call it if a signal was held back.

        Raises whatever that handler raises: `KeyboardInterrupt`, usually.
        """
        handler = self._handler
        if handler is None:
            return
        current = _signal(_SIGINT, handler)
        if current is not self:  # installed meanwhile, by a handler of another signal for instance
            _signal(_SIGINT, current)
        self._handler = self.frame = None
        if self._noted is not None:
            (signum, frame), self._noted = self._noted, None
            if current is not self:
                handler = current
            if callable(handler):
                handler(signum, frame)
            else:
                signal.raise_signal(signum)  # the default action, or none

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Note a signal; one that comes after the section ended abnormally is passed on."""
        if self.frame is not None and in_stack(self.frame, sys._getframe()):
            self._noted = (signum, frame)
            return
        handler, self._handler, self.frame = self._handler, None, None
        if handler is not None:
            _signal(_SIGINT, handler)
            handler(signum, frame)
