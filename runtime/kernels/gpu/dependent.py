"""Whether kernels are launched dependently: a setting of the code that runs, not of the process.

Without Triton, so that steps of any device may set it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

__all__ = ["dependent_launch", "is_dependent_launch_enabled"]

_enabled: ContextVar[bool] = ContextVar("dependent launch", default=True)


@contextmanager
def dependent_launch(enabled: bool) -> Iterator[None]:
    """Let kernels that are launched in this block, in this thread, begin early or not.

    A block inside of one that is not enabled is not enabled either. With programmatic dependent
    launch (compute capability 9.0) a kernel is set up while its predecessor still runs. A capture
    keeps what held when it was made.
    """
    token = _enabled.set(enabled and _enabled.get())
    try:
        yield
    finally:
        _enabled.reset(token)


def is_dependent_launch_enabled() -> bool:
    """Whether `launch` may launch dependently here; True outside of `dependent_launch`."""
    return _enabled.get()
