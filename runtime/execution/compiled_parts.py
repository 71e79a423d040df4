"""Compiles the parts of a step with `torch.compile`, at their first call.

All buckets share the compiled code of a part and a sampler: one version for any number of tokens,
and one for a single token, which torch specialises. Inputs are small copies, so that they differ
only in length: torch recompiles for views at other offsets, and for two arguments that are the same
tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, MethodType
from typing import Any, cast

import torch

from ..operation_scopes import operation

__all__ = ["CompiledParts"]

_serial = itertools.count()


class CompiledParts:
    """Compiled code of methods by name; other methods run as they are."""

    def __init__(self, static: Iterable[torch.Tensor]) -> None:
        """`static`: tensors that the parts use and whose addresses never change."""
        self._static = tuple(static)
        self._compiled: dict[str, Callable[..., Any]] = {}

    def add(self, part: Callable[..., Any]) -> None:
        """Compile a bound method at its first call."""
        for tensor in self._static:
            torch._dynamo.mark_static_address(tensor)
        code = torch.compile(_own_code(part), fullgraph=True, dynamic=True)
        self._compiled[part.__name__] = code

    def inputs(self, part: Callable[..., Any], *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the inputs of a part, as copies if it is compiled."""
        if part.__name__ not in self._compiled:
            return tensors
        with operation("inputs"):
            return [tensor.clone() for tensor in tensors]

    def call(self, part: Callable[..., Any], *arguments: Any) -> Any:
        """Run a part, or its compiled code within one profiler scope."""
        compiled = self._compiled.get(part.__name__)
        if compiled is None:
            return part(*arguments)
        with operation("compiled"):
            return compiled(*arguments)

    def close(self) -> None:
        """Release compiled code, which references the object of the methods."""
        self._compiled = {}
        self._static = ()


def _own_code(bound: Callable[..., Any]) -> MethodType:
    """Return the method with a code object of its own.

    torch stores compiled code with the code object, and limits recompilations per code object.
    Without copies, engines of a process would share this limit and keep each other's code alive.
    """
    method = cast(MethodType, bound)
    function = method.__func__
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_serial)}")
    own = FunctionType(
        code, function.__globals__, argdefs=function.__defaults__, closure=function.__closure__
    )
    return MethodType(own, method.__self__)
