"""Runs a callable until torch.compile has nothing left to compile in it; the errors of steps.

This module imports no torch.

The settings of torch for this, `fail_on_recompile_limit_hit` and `error_on_recompile`, apply to the
whole process in torch 2.11, so they would fail compilations of other threads. This module changes
no setting. It registers two hooks, which torch calls in the compiling thread when it begins a frame
and when it has compiled one. A context variable holds the counts of the thread. A frame that was
begun but not compiled runs in eager mode from then on: torch has reached its recompile limit, or
cannot compile it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import CodeType


class StepPreparationError(RuntimeError):
    """A step could not be warmed up, compiled or captured. `__cause__` is the failure."""

    def __init__(self, name: str, kind: str, cause: Exception) -> None:
        """Name the step, its kind and the cause."""
        super().__init__(
            f"step {name} could not be prepared (kind {kind!r}): {type(cause).__name__}: {cause}"
        )
        self.name = name
        self.kind = kind


class StepCompilationError(RuntimeError):
    """torch.compile does not compile a part of a step, or compiles it in every run."""


@dataclass(slots=True)
class _Compilations:
    """What torch compiled in one thread during one run."""

    begun: int = 0
    compiled: list[str] = field(default_factory=list)
    """Name, file and line of each frame that has code."""


_watched: ContextVar[_Compilations | None] = ContextVar("watched compilations", default=None)


def run_until_compiled(fn: Callable[[], object]) -> None:
    """Run `fn`; if that compiled anything, run it again and check that nothing compiles.

    Compilations of other threads do not count.

    Raises:
        StepCompilationError: torch runs a part of `fn` in eager mode, or the second run compiled.
        Exception: raised by `fn`; code compiled with `fullgraph=True` raises at its recompile
            limit.
    """
    if "torch._dynamo" not in sys.modules:  # importing it takes a second
        fn()
        if "torch._dynamo" not in sys.modules:
            return
    first = _run_watched(fn)
    if first.begun > len(first.compiled):
        from torch._dynamo import config

        raise StepCompilationError(
            f"torch compiled {len(first.compiled)} of {first.begun} parts and runs the others in "
            f"eager mode: it has reached its recompile limit "
            f"({config.recompile_limit} for the same code, torch._dynamo.config.recompile_limit), "
            "or cannot compile them; TORCH_LOGS=graph_breaks,recompiles shows which"
        )
    if not first.begun:
        return
    second = _run_watched(fn)
    if second.begun:
        raise StepCompilationError(
            f"a second run over the same inputs compiled again: {', '.join(second.compiled)}; "
            "something differs between runs, so requests would trigger compilations: "
            "TORCH_LOGS=recompiles shows what"
        )


def _run_watched(fn: Callable[[], object]) -> _Compilations:
    """Run `fn`; return what torch compiles in this thread meanwhile."""
    _install_hooks()
    compilations = _Compilations()
    token = _watched.set(compilations)
    try:
        fn()
    finally:
        _watched.reset(token)
    return compilations


def _install_hooks() -> None:
    """Register both hooks with torch, once per process; outside `_run_watched` they do nothing."""
    from torch._dynamo import convert_frame, utils

    # torch holds this lock while it compiles: the hooks must not change meanwhile.
    with convert_frame.compile_lock:
        _install_code_hook()
        if _begin not in (utils.get_hook_for_recompile_user_context() or ()):
            utils.register_hook_for_recompile_user_context(_begin)


@functools.cache
def _install_code_hook() -> None:
    from torch._dynamo import convert_frame

    convert_frame.register_bytecode_hook(_end)


def _begin() -> str:
    """Count a frame that torch begins to compile; the result is a label in torch's metrics."""
    compilations = _watched.get()
    if compilations is None:
        return ""
    compilations.begun += 1
    return "preparation of a step"


def _end(code: CodeType, new_code: CodeType) -> CodeType | None:
    """Record a frame that was compiled; None leaves its code unchanged."""
    compilations = _watched.get()
    if compilations is not None:
        place = f"{code.co_filename}:{code.co_firstlineno}"
        compilations.compiled.append(f"{code.co_name} ({place})")
    return None
