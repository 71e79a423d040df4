"""Runs compilations in threads of their own, a few at a time, with stacks for deep grammars."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, TypeVar

from ..bounded_repr import bounded_repr
from ..errors import RequestError

__all__ = ["MAX_COMPILATIONS", "CompilationsBusyError", "NotCompiledError", "compile_until"]

MAX_COMPILATIONS: Final = 4
"""Grammars of this process that compile at the same time, those that were given up included."""
STACK_BYTES: Final = 512 << 20
"""Stack of a compilation; only what is used takes memory. llguidance recurses along references
between rules and schemas, of which there are thousands in the largest text that is accepted. An
overflow would end the process."""

T = TypeVar("T")

_slots = threading.BoundedSemaphore(MAX_COMPILATIONS)
_starting = threading.Lock()


class NotCompiledError(Exception):
    """The deadline has passed."""


class CompilationsBusyError(Exception):
    """As many compilations as may run at the same time took too long."""


def compile_until(work: Callable[[], T], seconds: float) -> T:
    """Return the result of `work`, called in another thread within `seconds`.

    Waiting for a place may take as long before. After the deadline `work` goes on, and counts as
    one of `MAX_COMPILATIONS`, until it returns.

    Raises:
        NotCompiledError: the deadline has passed.
        CompilationsBusyError: others were compiling for `seconds`.
        RequestError: no thread can be started.
        Exception: whatever `work` raises.
    """
    if not _slots.acquire(timeout=seconds):
        raise CompilationsBusyError(
            f"{MAX_COMPILATIONS} others have been compiling for {seconds:g} s"
        )
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except Exception as error:
            result.set_exception(error)
        except BaseException as error:  # a panic of llguidance
            result.set_exception(ValueError(f"llguidance failed: {bounded_repr(error)}"))
        finally:
            _slots.release()

    try:
        _start(run)
    except BaseException as error:
        _slots.release()
        if not isinstance(error, RuntimeError | MemoryError | ValueError):
            raise
        raise RequestError(
            f"the grammar of structured cannot be compiled: no thread with a stack of"
            f" {STACK_BYTES >> 20} MiB can be started ({error}). Raise the limits of threads and"
            " virtual memory of the process, or leave out structured",
            field="structured",
        ) from error
    try:
        return result.result(seconds)
    except TimeoutError:
        raise NotCompiledError(f"it did not compile within {seconds:g} s") from None


def _start(run: Callable[[], None]) -> None:
    """Start a thread with a large stack. Its size is a setting of the process for a moment."""
    thread = threading.Thread(target=run, name="stepgraph-grammar", daemon=True)
    with _starting:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
