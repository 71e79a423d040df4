"""Programmatic dependent launch on or off: a setting of the current thread and context.

Does not import Triton, so that steps of any device may set it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_enabled: ContextVar[bool] = ContextVar("dependent launch", default=True)


@contextmanager
def dependent_launch(enabled: bool) -> Iterator[None]:
    """Enable or disable dependent launch of the kernels that are launched in this block.

    Inside a block that disables it, it stays disabled. With programmatic dependent launch (compute
    capability 9.0) a kernel is set up while its predecessor still runs. A captured graph keeps the
    setting that it was captured with.
    """
    token = _enabled.set(enabled and _enabled.get())
    try:
        yield
    finally:
        _enabled.reset(token)


def is_dependent_launch_enabled() -> bool:
    """Whether `launch` may launch dependently here; True outside of `dependent_launch`."""
    return _enabled.get()
