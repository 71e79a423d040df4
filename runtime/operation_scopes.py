"""Scopes of operations in code that torch may compile; see `profiling.attribution.operation`."""

from __future__ import annotations

import contextlib

from torch.compiler import is_dynamo_compiling

from ..profiling import attribution
from ..profiling.listeners import NOTHING

__all__ = ["operation"]

_NOTHING_COMPILED = contextlib.nullcontext()
"""What torch knows to be nothing: none of it is left in the compiled code."""


def operation(
    name: str, layer: int | None = None
) -> contextlib.AbstractContextManager[object, bool | None]:
    """As `attribution.operation`; nothing in code that torch compiles.

    What is compiled is joined across operations, so its kernels have the name of the scope around
    the compiled code; and that code must not depend on whether somebody recorded when it was made.
    """
    if is_dynamo_compiling():
        return _NOTHING_COMPILED
    if attribution.scope_listener() is None:  # asked here already: a call less where nobody listens
        return NOTHING
    return attribution.operation(name, layer)
