"""Scopes of operations in code that torch may compile; see `profiling.attribution.operation`."""

from __future__ import annotations

import contextlib

import torch

from ..profiling import attribution

__all__ = ["operation"]

_NOTHING = contextlib.nullcontext()


def operation(
    name: str, layer: int | None = None
) -> contextlib.AbstractContextManager[object, bool | None]:
    """As `attribution.operation`; nothing in code that torch compiles.

    What is compiled is joined across operations, so its kernels have the name of the scope around
    the compiled code; and that code must not depend on whether somebody recorded when it was made.
    """
    if torch.compiler.is_dynamo_compiling():
        return _NOTHING
    return attribution.operation(name, layer)
