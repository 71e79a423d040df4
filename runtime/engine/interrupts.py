"""Defers SIGINT (Ctrl-C) in critical sections of the main thread to their end.

Python runs signal handlers between any two instructions of the main thread, and the default handler
of SIGINT raises `KeyboardInterrupt` there. Within a step that would leave requests and blocks in an
undefined state. So a critical section replaces the application's handler by one that only records
the signal; its end restores the application's handler, and calls it if there was a signal. Nothing
stays installed between two sections.

Other signals are not deferred: a handler that raises within a step makes the engine fail.
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
    """Defers SIGINT between `begin` and `end`, as its handler.

    Python calls handlers in the main thread of the main interpreter only, so nothing is deferred
    elsewhere, nor if the application has no handler in Python.
    """

    __slots__ = ("_handler", "_noted", "frame", "main_thread")

    def __init__(self) -> None:
        self.main_thread = threading.main_thread().ident
        """Identifier of the thread that handles signals; None if it is not a thread of Python."""
        self.frame: FrameType | None = None
        """The frame for which SIGINT is deferred; None outside of sections."""
        self._handler: _Handler | None = None  # the application's, while it is replaced
        self._noted: tuple[int, FrameType | None] | None = None

    def begin(self, frame: FrameType) -> None:
        """Defer SIGINT until `end` is called or `frame` has returned. Not nested."""
        handler = _getsignal(_SIGINT)
        if handler is not self:  # else: left by a section that an exception ended without `end`
            if not callable(handler):
                return
            self._handler = handler
        self.frame = frame
        try:
            _signal(_SIGINT, self)
        except ValueError:  # a sub-interpreter, or Python was started by another thread
            self.main_thread = self._handler = self.frame = None

    def end(self) -> None:
        """Restore the application's handler, and call it if there was a signal.

        Raises what that handler raises, by default `KeyboardInterrupt`.
        """
        handler = self._handler
        if handler is None:
            return
        current = _signal(_SIGINT, handler)
        if current is not self:  # installed meanwhile, for instance by another signal's handler
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
        """Record a signal; after a section that ended abnormally, pass it on."""
        if self.frame is not None and in_stack(self.frame, sys._getframe()):
            self._noted = (signum, frame)
            return
        handler, self._handler, self.frame = self._handler, None, None
        if handler is not None:
            _signal(_SIGINT, handler)
            handler(signum, frame)
