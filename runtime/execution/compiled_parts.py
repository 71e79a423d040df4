"""Compiles the parts of a step with `torch.compile`, at their first call.

All buckets share the compiled code of a part: one version for any number of tokens or rows, and one
for a single one, which torch specialises. So do verify steps with any number of tokens per row.
Inputs are small copies, so that they differ only in length: torch recompiles for views at other
offsets, and for two arguments that are the same tensor.

torch limits the versions of a code object. So no other size that differs between steps may be 1 in
one of them, or reach an operator as an `int`.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any, cast

import torch

from ...graphs.step_errors import StepCompilationError
from ..bounded_repr import bounded_text
from ..operation_scopes import operation

__all__ = ["CompiledParts", "compile_settings"]

_serial = itertools.count()
_FEW_THREADS = 4
_one_at_a_time = threading.RLock()
_OF_SELF = re.compile(r"\bself\b")


class CompiledParts:
    """Compiled code of methods by name; other methods run as they are."""

    def __init__(self, static: Iterable[torch.Tensor]) -> None:
        """`static`: tensors that the parts use and whose addresses and sizes never change."""
        self._static = tuple(static)
        self._options: dict[str, dict[str, Any]] = {}
        """Of the methods that are compiled, by name."""
        self._compiled: dict[str, Callable[..., Any]] = {}

    def add(self, part: Callable[..., Any], *, few_tokens: bool = False) -> None:
        """Compile a bound method at its first call.

        With `few_tokens`, and on a CPU with few threads, its elementwise code runs in the calling
        thread: OpenMP's threads wait for each other after each loop, which takes longer than the
        work of few tokens, and many times as long where another process has their core.
        """
        for tensor in self._static:
            torch._dynamo.mark_static_address(tensor)
            # torch lets the sizes of other inputs vary.
            torch._dynamo.mark_static(tensor)
        few_threads = torch.get_num_threads() <= _FEW_THREADS
        self._options[part.__name__] = {
            "guard_filter_fn": _guards_of_arguments,
            **({"cpp.threads": 1} if few_tokens or few_threads else {}),
        }

    def compiles(self, part: Callable[..., Any]) -> bool:
        """Whether a part is compiled."""
        return part.__name__ in self._options

    def inputs(self, part: Callable[..., Any], *tensors: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the inputs of a part, as copies if it is compiled."""
        if not self.compiles(part):
            return tensors
        with operation("inputs"):
            return [tensor.clone() for tensor in tensors]

    def call(self, part: Callable[..., Any], *arguments: Any) -> Any:
        """Run a part, or its compiled code within one profiler scope.

        Raises:
            StepCompilationError: the code cannot be compiled as one graph; names the line.
        """
        if not self.compiles(part):
            return part(*arguments)
        compiled = self._code(part)
        with operation("compiled"):
            try:
                return compiled(*arguments)
            except RuntimeError as error:
                if not isinstance(error, torch._dynamo.exc.Unsupported):
                    raise
                refusal = _refusal(error)
        raise refusal

    def _code(self, part: Callable[..., Any]) -> Callable[..., Any]:
        name = part.__name__
        code = self._compiled.get(name)
        if code is None:
            code = self._compiled[name] = torch.compile(
                _own_code(part),
                fullgraph=True,
                dynamic=True,
                options=self._options[name],
            )
        return code

    def close(self) -> None:
        """Release compiled code, which references the object of the methods."""
        self._compiled, self._options = {}, {}
        self._static = ()


@contextmanager
def compile_settings() -> Iterator[None]:
    """Set how torch compiles parts: numbers are constants, and equal sizes may become different.

    Numbers of modules, such as the epsilon of a norm, as inputs of the graph would make torch trace
    the step twice: it finds late that the operators need constants. And by default code for 4 rows
    of 4 tokens is specific to as many rows as tokens.

    One thread at a time, as older versions of torch have one setting per process.
    """
    from torch.fx.experimental import _config  # torch.compile imports it, which takes a second

    floats: Any = torch._dynamo.config
    sizes: Any = _config
    with _one_at_a_time:
        before = floats.specialize_float, sizes.use_duck_shape
        floats.specialize_float, sizes.use_duck_shape = True, False
        try:
            yield
        finally:
            floats.specialize_float, sizes.use_duck_shape = before


def _guards_of_arguments(guards: Sequence[Any]) -> list[bool]:
    """Keep the guards on arguments and on torch's global state.

    The object of a method and the modules below it never change once its steps run. Their guards,
    several per module, would be checked at each call.
    """
    return [not (guard.is_global or _OF_SELF.search(guard.name)) for guard in guards]


def _refusal(error: RuntimeError) -> StepCompilationError:
    """Return the error for code that torch.compile cannot put in one graph."""
    stack = getattr(error, "real_stack", None)
    place = f"{stack[-1].filename}:{stack[-1].lineno}" if stack else "an unknown line"
    reason = bounded_text(str(error).partition("\n")[0], 200)
    return StepCompilationError(
        f"torch.compile cannot compile the step as one graph, because of {place}: {reason}. Use"
        " mode='eager'"
    )


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
