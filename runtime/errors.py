"""Every error a user can get.

All derive from `StepgraphError`, except those of rooms that do not know this one:
`MemoryBudgetError` (a `ValueError`) and `StepPreparationError` (a `RuntimeError`). They are named
here so that there is one place to import errors from. No torch: the scheduler reads this file.
"""

from __future__ import annotations

from ..cache.memory.handler import MemoryBudgetError
from ..graphs.step_errors import StepPreparationError

__all__ = [
    "StepgraphError",
    "CheckpointError",
    "ConfigError",
    "EngineBusyError",
    "EngineClosedError",
    "EngineFailedError",
    "EngineForkedError",
    "KernelBuildError",
    "KernelSelfTestError",
    "MemoryBudgetError",
    "NonFiniteLogitsError",
    "RequestError",
    "StepPreparationError",
]


class StepgraphError(Exception):
    """Base class of the errors that stepgraph raises for its users."""


class ConfigError(StepgraphError, ValueError):
    """A configuration that cannot work: the message names the field, the value and the range."""


class CheckpointError(StepgraphError):
    """A checkpoint that cannot be loaded: missing, truncated, unknown or self-contradictory."""


class KernelBuildError(StepgraphError, RuntimeError):
    """The C++ kernels could not be built; the message ends with what the compiler said."""


class KernelSelfTestError(StepgraphError, RuntimeError):
    """A native kernel failed its self-test where nothing may replace it, or took the device down.

    The message names the kernel, the shapes, the error and what to choose instead.
    """


class RequestError(StepgraphError, ValueError):
    """A request that cannot be served. It was not queued; other requests are not affected."""


class NonFiniteLogitsError(StepgraphError, ArithmeticError):
    """The logits of one request hold NaN or +inf, or nothing but -inf: no token can be chosen.

    It ended the request, with the tokens before it; other requests are not affected.
    """


class EngineClosedError(StepgraphError, RuntimeError):
    """The engine was used after `close()`."""


class EngineForkedError(EngineClosedError):
    """The engine was used in a forked child of the process that made it.

    Threads and devices of the parent do not exist there. The child makes an engine of its own, or
    asks the parent.
    """


class EngineBusyError(StepgraphError, RuntimeError):
    """The call cannot run now: another call has the engine. Nothing was changed.

    Either two threads call `step`, or a signal handler or a callback calls the engine from within
    a call of the same thread, which cannot wait for itself.
    """


class EngineFailedError(StepgraphError, RuntimeError):
    """A step failed or was cut short by an exception: the engine serves nothing more.

    `__cause__` is what it failed on.
    """
