"""All errors that users can get. Imports no torch.

All derive from `StepgraphError`, except errors of the packages below this one: `MemoryBudgetError`
(a `ValueError`) and `StepPreparationError` (a `RuntimeError`), which are re-exported here.
"""

from __future__ import annotations

from ..cache.memory.handler import MemoryBudgetError as MemoryBudgetError
from ..graphs.compilation import StepPreparationError as StepPreparationError


class StepgraphError(Exception):
    """Base class of the errors that stepgraph raises for its users."""


class ConfigError(StepgraphError, ValueError):
    """An invalid configuration: the message names the field, the value and the range.

    Attributes:
        field: the field of the configuration that is wrong; None if it is not one field.
        flag: the flag of `stepgraph serve` for this field, such as `--max-num-seqs`.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field

    @property
    def flag(self) -> str | None:
        return None if self.field is None else f"--{self.field.replace('_', '-')}"


class CheckpointError(StepgraphError):
    """A checkpoint that cannot be loaded: missing, truncated, unsupported or inconsistent.

    Attributes:
        code: what was found instead, such as `peft`, `mistral`, `mlx`, `modelopt`,
            `quantized`, `pickle` or `no_config`; for a packaged model that could not be downloaded
            `no_pip`, `download`, `checksum` or `storage`; None for other reasons.
    """

    def __init__(self, message: str = "", *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class KernelBuildError(StepgraphError, RuntimeError):
    """The C++ kernels could not be built; the message ends with the compiler's output."""


class KernelSelfTestError(StepgraphError, RuntimeError):
    """A required native kernel failed its self-test, or a kernel left the device unusable.

    The message names the kernel, the shapes, the error and what to choose instead.
    """


class RequestError(StepgraphError, ValueError):
    """A request that cannot be served. It was not queued; other requests are not affected.

    Attributes:
        field: the parameter that is wrong, as its caller names it; None if it is not one of them.
        code: a name to compare with, such as `context_length_exceeded`; None for most errors.
    """

    def __init__(
        self, message: str = "", *, field: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.field = field
        self.code = code


class GrammarError(RequestError):
    """A grammar that is invalid, unsupported or too complex. The request was not queued."""


class StructuredOutputError(StepgraphError, RuntimeError):
    """The grammar of a request cannot be followed any further, for example because of a limit.

    The request ends with the tokens before it; other requests are not affected.
    """


class NonFiniteLogitsError(StepgraphError, ArithmeticError):
    """The logits of a request contain NaN or +inf, or only -inf, so no token can be sampled.

    The request ends with the tokens before it; other requests are not affected.
    """


class EngineUnavailableError(StepgraphError, RuntimeError):
    """The engine accepts no requests: it starts, drains or sleeps, or it has ended."""


class EngineNotStartedError(EngineUnavailableError):
    """An `AsyncEngine` was used before `start()`, or before it was entered with `async with`."""


class EngineClosedError(EngineUnavailableError):
    """The engine was used after `close()`."""


class EngineForkedError(EngineUnavailableError):
    """The engine was used in a forked child of the process that made it.

    Threads and devices of the parent do not exist there: make a new engine in the child.
    """


class EngineBusyError(StepgraphError, RuntimeError):
    """The call cannot run now, because another call runs the engine. Nothing has changed.

    A signal handler or a callback calls the engine during a call of its own thread, for which it
    cannot wait; or two tasks wait in one stream of an `AsyncEngine`.
    """


class EngineFailedError(StepgraphError, RuntimeError):
    """A step failed or an exception interrupted it: the engine cannot be used any more.

    `__cause__` is the failure.
    """


class RankError(EngineFailedError):
    """A rank of a tensor-parallel group died, did not answer in time or disagrees with the others.

    The message names the rank and the reason. The engine cannot be used any more; all its processes
    end.
    """


class OverloadedError(StepgraphError, RuntimeError):
    """A request was refused, because too many wait already, or too many grammars are compiling.

    Attributes:
        retry_after: predicted seconds until such a request can be queued.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class SendTimeoutError(StepgraphError, TimeoutError):
    """A stream ended because its consumer read nothing for too long while output was waiting.

    Attributes:
        field: the field of `ServiceConfig` that sets the time.
    """

    field = "send_timeout"


class DeadlineUnreachableError(OverloadedError):
    """An `AsyncEngine` refused a request whose first token would come after its deadline.

    `retry_after` is by how many seconds it would be late.
    """
