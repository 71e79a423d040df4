"""Scopes of operations in code that torch may compile; see `profiling.attribution.operation`."""

from __future__ import annotations

import contextlib

from torch.compiler import is_dynamo_compiling

from ..profiling import attribution
from ..profiling.attribution import scope_listener

__all__ = ["operation"]

_NOTHING = contextlib.nullcontext()


def operation(
    name: str, layer: int | None = None
) -> contextlib.AbstractContextManager[object, bool | None]:
    """As `attribution.operation`; nothing in code that torch compiles.

    What is compiled is joined across operations, so its kernels have the name of the scope around
    the compiled code; and that code must not depend on whether somebody recorded when it was made.
    """
    # Asked here already: a call less where nobody listens.
    if is_dynamo_compiling() or scope_listener() is None:
        return _NOTHING
    return attribution.operation(name, layer)
