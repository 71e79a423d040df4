"""The NVTX ranges and marks of stepgraph.

    with ranges.span(ranges.PLAN, step):
        ...

    with ranges.step_span(ranges.REPLAY, step, rows, bucket, tokens, blocks_in_use, padding):
        ...

    ranges.mark(ranges.FALLBACK, bucket)

`RANGES` and `MARKS` list all names (see `dictionary.py`). A profiler stores every distinct message,
so names never contain an id: the step, the rows, the bucket and the tokens are in the payload. One
integer is enough for most ranges, because ranges nest (the `step` around a `copy` has the step
number), and profilers export an integer payload as a column. The launches on the device, `replay`,
`verify` and `prefill`, have all numbers of their step as payload.

Without a listener the functions only check the name. NVTX looks for a tool once per process, at the
first use of a domain. Tools such as nsys are loaded before Python starts, so this module looks for
one at import. `listening` adds other listeners at any time.
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
    MASK,
    PLAN,
    PREFILL,
    PREPARE,
    RANGES,
    REPLAY,
    STEP,
    SWAP,
    VERIFY,
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
    "MASK",
    "PLAN",
    "PREFILL",
    "PREPARE",
    "RANGES",
    "REPLAY",
    "STEP",
    "SWAP",
    "VERIFY",
    "WARMUP",
    "WINDOW",
    "Listener",
    "Payload",
    "StepNumbers",
    "attached",
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
    """Return a context manager for the range `name`, which ends at any exit from the block.

    Args:
        name: a key of `RANGES` whose payload is one integer.
        payload: the integer that `RANGES[name].payload` describes.

    Raises:
        ValueError: there is no such range. Raised without a listener too.
    """
    if name not in _PLAIN:  # checked without a listener too, so that tests find wrong names
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
    """Return a context manager for a range whose payload is the numbers of its step.

    An NVTX tool also samples the numbers as counters when the range begins.

    Raises:
        ValueError: there is no such range. Raised without a listener too.
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
        ValueError: there is no such mark, or the number of fields is wrong. Raised without a
            listener too.
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
    """Send all ranges and marks of the process, from every thread, to a listener.

    It receives the ranges that begin inside the block, and their ends even after the block. If the
    listener raises, the error is logged and the listener is unsubscribed.
    """
    guarded = Guarded(listener)
    _replace((), (guarded,))
    try:
        yield
    finally:
        _replace((guarded,), ())


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
    """A range. It ends for the listeners for which it began, even if others were added since."""

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
