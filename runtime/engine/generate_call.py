"""One call of `generate`: the outputs that it collects, and Ctrl-C that arrives meanwhile."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Self

from .request_output import RequestOutput

_POLL_SECONDS = 0.1
"""How long a call sleeps at most while another call runs its steps."""


class GenerateCall:
    """Collects the last outputs of its requests. As a context manager it defers SIGINT.

    Python runs signal handlers between any two instructions of the main thread, and the default
    handler of SIGINT raises `KeyboardInterrupt` there. Within a step that would leave requests and
    blocks in an undefined state. So in the main thread the context replaces the application's
    handler by one that records the signal, and `check_interrupt` passes it on between two steps.
    """

    def __init__(self) -> None:
        self.request_ids: list[str] = []
        self._last: dict[str, RequestOutput] = {}
        self._wake: SimpleQueue[None] = SimpleQueue()  # reentrant, so a signal handler may put
        self._handler: Callable[[int, FrameType | None], object] | None = None
        self._signal: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                with suppress(ValueError):  # a sub-interpreter
                    self._handler = handler
                    signal.signal(signal.SIGINT, self._record)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the application's handler, and pass a signal on that has not been yet."""
        if self._handler is not None and signal.getsignal(signal.SIGINT) == self._record:
            signal.signal(signal.SIGINT, self._handler)
        self.check_interrupt()

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self._signal = signum, frame
        self.wake()

    @property
    def interrupted(self) -> bool:
        """Whether a signal has arrived that `check_interrupt` has not passed on."""
        return self._signal is not None

    def check_interrupt(self) -> None:
        """Call the application's handler for a signal that arrived; raises what that raises."""
        arrived, self._signal = self._signal, None
        if arrived is not None and self._handler is not None:
            self._handler(*arrived)

    @property
    def complete(self) -> bool:
        """Whether every request so far has ended."""
        return len(self._last) == len(self.request_ids)

    def deliver(self, output: RequestOutput) -> None:
        """Take the last output of a request; wake the call if it was the last one."""
        self._last[output.request_id] = output
        if self.complete:
            self.wake()

    def outputs(self) -> list[RequestOutput]:
        """Return the last outputs so far, in the order of the requests."""
        return [self._last[name] for name in self.request_ids if name in self._last]

    def wake(self) -> None:
        """End the present or the next `wait`. For any thread and for signal handlers."""
        self._wake.put(None)

    def wait(self) -> None:
        """Sleep until `wake` is called, or for a moment."""
        with suppress(Empty):
            self._wake.get(timeout=_POLL_SECONDS)
