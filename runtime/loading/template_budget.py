"""The time and size limits of a template that runs: a deadline, and a budget of characters.

A template runs in its own thread, whose trace function ends it at the deadline, whatever Python
code it is in. Operations that make a string or a list larger than their operands are charged to the
budget *before* they run, since a running one cannot be interrupted.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

__all__ = ["TemplateLimitError", "budget", "charge", "run_bounded"]

MAX_CHARS = 1 << 26
"""Characters (and list elements) that all operations of one run may produce together."""
_GRACE_SECONDS = 1.0
T = TypeVar("T")


class TemplateLimitError(BaseException):
    """A template exceeded a limit. Not an `Exception`, so that no filter catches it."""


class _Budget(threading.local):
    left = 0


budget = _Budget()
"""`left`: characters that the run of this thread may still produce."""


def run_bounded(work: Callable[[], T], seconds: float) -> T:
    """Run `work` in a thread with a deadline and a budget; return its result.

    Raises:
        TemplateLimitError: it exceeded the deadline or the budget.
        Exception: from `work`.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    late = TemplateLimitError(f"it ran for more than {seconds:g} s")

    def body() -> None:
        deadline = time.monotonic() + seconds

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            if time.monotonic() > deadline:
                raise late
            return trace

        budget.left = MAX_CHARS
        sys.settrace(trace)  # of this thread
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name="stepgraph-template", daemon=True)
    thread.start()
    thread.join(seconds + _GRACE_SECONDS)  # it ends by itself, unless one operation is long
    if results:
        return results[0]
    raise errors[0] if errors else late


def charge(size: int) -> None:
    """Charge characters to the budget of this run, before they are produced."""
    budget.left -= max(size, 0)
    if budget.left < 0:
        raise TemplateLimitError(f"it produces more than {MAX_CHARS} characters")
