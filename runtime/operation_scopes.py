"""Operation scopes for code that torch may compile; see `profiling.attribution.operation`."""

from __future__ import annotations

import contextlib

from torch.compiler import is_dynamo_compiling

from ..profiling import attribution
from ..profiling.ranges import NOTHING

_NOTHING_COMPILED = contextlib.nullcontext()
"""torch removes this context from compiled code."""


def operation(
    name: str, layer: int | None = None
) -> contextlib.AbstractContextManager[object, bool | None]:
    """As `attribution.operation`, but without effect in code that torch compiles.

    Compiled kernels span operations, so they have the name of the scope around the compiled code,
    which must not depend on whether scopes were recorded during compilation.
    """
    if is_dynamo_compiling():
        return _NOTHING_COMPILED
    listener = attribution.capture_listener.get() or attribution.scope_listener
    return NOTHING if listener is None else attribution.scope(listener, name, layer)
