"""Raises an exception at the n-th line that the package executes.

Never where a `with` block ends, just before `__exit__`: no signal is handled there, and a lock that
is left locked would stop later tests. Never where a generator is made, for the same reason, and
because CPython 3.11 then crashes. Never in a callback of the garbage collector, whose exceptions
reach no code, and which may run within a comprehension, where CPython 3.11 crashes. Never at a line
that does nothing, such as `try`: CPython 3.11 does not count it as part of a `with` block around
it.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from stepgraph import runtime

PACKAGE = str(Path(runtime.__file__).parent.parent)  # as code objects name it
ROOMS = tuple(f"{PACKAGE}/{room}/" for room in ("runtime", "cache", "graphs", "profiling"))
COLLECTOR = f"{PACKAGE}/profiling/collector.py"


_WITH_ENDS: dict[int, tuple[CodeType, frozenset[int]]] = {}  # by id: hashing code takes long


def with_ends(code: CodeType) -> frozenset[int]:
    """Return the offsets at which calls of `__exit__` begin, and those that do nothing."""
    known = _WITH_ENDS.get(id(code))
    if known is not None:
        return known[1]
    found = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "PRECALL")]
    ends = {i.offset for i in found if i.opname == "NOP"}
    for before, *some in zip(found, found[1:], found[2:], found[3:], found[4:], strict=False):
        names = [i.opname for i in some]
        if all(i.opname == "LOAD_CONST" and i.argval is None for i in some[:3]):
            if names[3] == "CALL":
                ends.add(some[0].offset)
                if before.opname == "SWAP":  # below a value that is returned
                    ends.add(before.offset)
        elif names[:2] == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]:
            ends.add(some[0].offset)
    _WITH_ENDS[id(code)] = code, frozenset(ends)
    return _WITH_ENDS[id(code)][1]


def _is_excluded(frame: FrameType) -> bool:
    """Whether no signal is handled where a frame is."""
    code, at = frame.f_code, frame.f_lasti
    makes_generator = bool(code.co_flags & CO_GENERATOR) and at <= _offset_of_resume(code)
    return makes_generator or at in with_ends(code)


@functools.cache
def _offset_of_resume(code: CodeType) -> int:
    return next(i.offset for i in dis.get_instructions(code) if i.opname == "RESUME")


class LineFault:
    """Counts lines of the package in this thread, and raises `error` at number `at`, once."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        self.at, self.error = at, error
        self.lines = 0
        self.where = ""

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if event == "call":
            # CPython 3.11 crashes or loops when a trace function raises in a comprehension.
            code = frame.f_code
            traced = (
                code.co_filename.startswith(ROOMS)
                and code.co_filename != COLLECTOR
                and not code.co_name.startswith("<")
            )
            return self._trace if traced else None
        if event == "line" and not _is_excluded(frame):
            self.lines += 1
            if self.lines == self.at:
                code = frame.f_code
                self.where = f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
                raise self.error("injected")
        return self._trace

    def __enter__(self) -> LineFault:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
