"""The NVTX ranges and marks of stepgraph.

    with ranges.span(ranges.PLAN, step):
        ...

    with ranges.step_span(ranges.REPLAY, step, rows, bucket, tokens, blocks_in_use, padding):
        ...

    ranges.mark(ranges.FALLBACK, bucket)

`RANGES` and `MARKS` are the whole dictionary (see `dictionary.py`). A profiler keeps every message
for ever, so a name never holds an id: the step, the rows, the bucket and the tokens are in the
payload. One integer is enough for most ranges, because ranges nest (the `step` around a `copy` has
its number), and profilers export an integer in a column of its own. What runs on the device,
`replay` and `prefill`, carries all numbers of its step.

Without a listener the functions only check the name. NVTX looks for a tool once in a process, at
the first use of a domain, and a tool such as nsys is loaded before Python starts: so this module
looks for one when it is imported. `listening` adds other listeners at any time.
"""

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Final

from .dictionary import (
    CAPTURE,
    COLLECTION,
    COMMIT,
    COPY,
    DOMAIN,
    FALLBACK,
    FORK,
    LAUNCH,
    LOAD,
    MARKS,
    PLAN,
    PREFILL,
    PREPARE,
    RANGES,
    REPLAY,
    STEP,
    SWAP,
    WARMUP,
    WINDOW,
)
from .listeners import NOTHING, Guarded, Listener, Payload, StepNumbers
from .nvtx_tool import NvtxTool, attached_domain

__all__ = [
    "CAPTURE",
    "COLLECTION",
    "COMMIT",
    "COPY",
    "DOMAIN",
    "FALLBACK",
    "FORK",
    "LAUNCH",
    "LOAD",
    "MARKS",
    "PLAN",
    "PREFILL",
    "PREPARE",
    "RANGES",
    "REPLAY",
    "STEP",
    "SWAP",
    "WARMUP",
    "WINDOW",
    "Listener",
    "Payload",
    "StepNumbers",
    "attached",
    "in_domain",
    "listening",
    "mark",
    "span",
    "step_span",
]

_PLAIN: Final = frozenset(info.name for info in RANGES.values() if not info.fields)
_OF_STEPS: Final = frozenset(info.name for info in RANGES.values() if info.fields)

_domain: Final = attached_domain()

attached: Final = _domain is not None
"""Whether an NVTX tool receives the ranges of this process."""

_listeners: tuple[Listener, ...] = () if _domain is None else (NvtxTool(_domain),)
_changing: Final = threading.Lock()


def span(name: str, payload: int = 0) -> contextlib.AbstractContextManager[None]:
    """Return the range `name` as a context manager: it ends on every way out.

    Args:
        name: a key of `RANGES` whose payload is one integer.
        payload: the integer that `RANGES[name].payload` describes.

    Raises:
        ValueError: there is no such range, with or without a listener.
    """
    if name not in _PLAIN:  # always: a misspelt range must not fail only under a profiler
        raise _wrong_range(name)
    return _Span(_listeners, name, int(payload)) if _listeners else NOTHING


def step_span(
    name: str,
    step: int,
    rows: int,
    bucket: int,
    tokens: int,
    blocks_in_use: int,
    padding: int,
) -> contextlib.AbstractContextManager[None]:
    """Return a `span` of a range whose payload is the numbers of its step.

    On entry an NVTX tool also samples them as counters.

    Raises:
        ValueError: there is no such range, with or without a listener.
    """
    if name not in _OF_STEPS:
        raise _wrong_range(name)
    if not _listeners:
        return NOTHING
    numbers = StepNumbers(step, rows, bucket, tokens, blocks_in_use, padding)
    return _Span(_listeners, name, numbers)


def mark(name: str, *payload: int) -> None:
    """Emit the mark `name`.

    Args:
        name: a key of `MARKS`.
        payload: its fields, in order.

    Raises:
        ValueError: there is no such mark, or it has other fields; with or without a listener.
    """
    info = MARKS.get(name)
    if info is None:
        raise ValueError(f"unknown mark {name!r}; the marks are: {', '.join(MARKS)}")
    if len(payload) != len(info.fields):
        fields = ", ".join(field.name for field in info.fields)
        raise ValueError(f"mark {name!r} carries {fields}; got {len(payload)} numbers")
    for listener in _listeners:
        listener.mark(name, payload)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Let a listener receive all ranges and marks of the process, from every thread.

    It receives the ranges that begin inside the block, and their ends even after it. A listener
    that raises is logged and unsubscribed.
    """
    guarded = Guarded(listener)
    _replace((), (guarded,))
    try:
        yield
    finally:
        _replace((guarded,), ())


@contextlib.contextmanager
def in_domain(name: str) -> Iterator[None]:
    """Send the ranges of the process to another NVTX domain of the tool, if one is attached."""
    domain = attached_domain(name) if attached else None
    if domain is None:
        yield
        return
    usual = tuple(listener for listener in _listeners if isinstance(listener, NvtxTool))
    other = (NvtxTool(domain),)
    _replace(usual, other)
    try:
        yield
    finally:
        _replace(other, usual)


def _replace(old: tuple[Listener, ...], new: tuple[Listener, ...]) -> None:
    global _listeners
    with _changing:
        _listeners = (*(listener for listener in _listeners if listener not in old), *new)


def _wrong_range(name: str) -> ValueError:
    if name in _PLAIN:
        return ValueError(f"the payload of range {name!r} is one integer: use span")
    if name in _OF_STEPS:
        return ValueError(f"the payload of range {name!r} is the step's numbers: use step_span")
    return ValueError(f"unknown range {name!r}; the ranges are: {', '.join(RANGES)}")


class _Span:
    """Begins and ends for the same listeners, whichever come or go in between."""

    __slots__ = ("_listeners", "_name", "_payload")

    def __init__(self, listeners: tuple[Listener, ...], name: str, payload: Payload) -> None:
        self._listeners = listeners
        self._name = name
        self._payload = payload

    def __enter__(self) -> None:
        for listener in self._listeners:
            listener.push(self._name, self._payload)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for listener in reversed(self._listeners):
            listener.pop()
