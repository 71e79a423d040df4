"""The NVTX ranges of stepgraph.

    with ranges.span(ranges.PLAN, step):
        ...

    with ranges.step_span(ranges.REPLAY, step, rows, bucket, tokens, blocks_in_use, padding):
        ...

docs/profiling.md describes every range and payload. A profiler stores every distinct message, so
names never contain an id: the numbers are in the payload. One integer is enough for most ranges,
because ranges nest (the `step` around a `copy` has the step number).

Without a listener the functions only check the name. NVTX looks for a tool once per process, at the
first use of a domain. Tools such as nsys are loaded before Python starts, so this module looks for
one at import. `listening` adds other listeners at any time. The package `nvtx` carries ranges to a
tool; without it ranges reach no tool.
"""

import contextlib
import logging
import os
import struct
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, Protocol

logger = logging.getLogger("stepgraph.profiling")

DOMAIN: Final = "stepgraph"
"""Name of the NVTX domain of all ranges."""

STEP: Final = "step"
PLAN: Final = "plan"
LAUNCH: Final = "launch"
PREPARE: Final = "prepare"
COPY: Final = "copy"
FORK: Final = "fork"
SWAP: Final = "swap"
REPLAY: Final = "replay"
VERIFY: Final = "verify"
PREFILL: Final = "prefill"
COMMIT: Final = "commit"
CAPTURE: Final = "capture"
LOAD: Final = "load"
MASK: Final = "mask"
WARMUP: Final = "warmup"
WINDOW: Final = "window"

_CATEGORIES: Final = {
    "step": (0xFF5F6B7A, (STEP,)),
    "host": (0xFFE0A030, (PLAN, LAUNCH, PREPARE, MASK, COMMIT)),
    "device": (0xFF3C8DD9, (SWAP, FORK, COPY, REPLAY, VERIFY, PREFILL)),
    "start": (0xFF8A63C9, (LOAD, WARMUP, CAPTURE)),
    "profile": (0xFF4A9F6E, (WINDOW,)),
}
"""Category -> color (0xAARRGGBB) and ranges."""
_STYLES: Final = {
    name: (color, category) for category, (color, names) in _CATEGORIES.items() for name in names
}

STEP_RANGES: Final = frozenset({REPLAY, VERIFY, PREFILL})
"""The ranges whose payload is `StepNumbers`."""

PLAIN_RANGES: Final = frozenset(_STYLES) - STEP_RANGES
"""The ranges whose payload is one integer."""


class StepNumbers(NamedTuple):
    """The payload of `replay`, `verify` and `prefill`."""

    step: int
    rows: int
    """Decoding rows without padding; 0 in the prefill of a step that has a decode step too."""
    bucket: int
    """Size that the launch was prepared for: rows of a decode step, tokens of a prefill."""
    tokens: int
    """Computed tokens without padding."""
    blocks_in_use: int
    padding: int
    """Tokens of padding, which are computed too. Not all launches fill their bucket."""


Payload = int | StepNumbers
"""What a range carries: one integer, or the numbers of the step."""


class Listener(Protocol):
    """Receives ranges, from any thread."""

    def push(self, name: str, payload: Payload) -> None:
        """The range `name` began on the calling thread."""

    def pop(self) -> None:
        """The innermost range of the calling thread ended."""


class _Nothing:
    """A context manager that does nothing, in half the time of `contextlib.nullcontext`.

    Both methods are a C function that takes any arguments and returns a false value, so that ranges
    without a listener enter no Python code.
    """

    __slots__ = ()

    __enter__: Callable[..., Any] = "".format
    __exit__: Callable[..., Any] = "".format


NOTHING: Final = _Nothing()


def span(name: str, payload: int = 0) -> contextlib.AbstractContextManager[None]:
    """Return a context manager for a range of `PLAIN_RANGES`. It ends at any exit of the block.

    Raises:
        ValueError: unknown range. Raised without a listener too.
    """
    if name not in PLAIN_RANGES:  # checked without a listener too, so that tests find wrong names
        raise ValueError(f"{name!r} is not a range whose payload is one integer")
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
    """Return a context manager for a range of `STEP_RANGES`; see `StepNumbers`.

    Raises:
        ValueError: unknown range. Raised without a listener too.
    """
    if name not in STEP_RANGES:
        raise ValueError(f"{name!r} is not a range whose payload is the numbers of a step")
    if not _listeners:
        return NOTHING
    numbers = StepNumbers(step, rows, bucket, tokens, blocks_in_use, padding)
    return _Span(_listeners, name, numbers)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Send all ranges of the process, from every thread, to a listener.

    It receives the ranges that begin inside the block, and their ends even after the block. If the
    listener raises, the error is logged and the listener is unsubscribed.
    """
    guarded = _Guarded(listener)
    _replace((), (guarded,))
    try:
        yield
    finally:
        _replace((guarded,), ())


class _Guarded:
    """Unsubscribes a listener that raises: no step fails because of a listener."""

    def __init__(self, listener: Listener) -> None:
        self._listener: Listener | None = listener

    def push(self, name: str, payload: Payload) -> None:
        self._call("push", name, payload)

    def pop(self) -> None:
        self._call("pop")

    def _call(self, method: str, *event: Any) -> None:
        if self._listener is not None:
            try:
                getattr(self._listener, method)(*event)
            except Exception:
                logger.exception(
                    "a listener of ranges raised and is unsubscribed: %r", self._listener
                )
                self._listener = None


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

    def __exit__(self, *_: object) -> None:
        for listener in reversed(self._listeners):
            listener.pop()


class NvtxMissingError(RuntimeError):
    """The Python package `nvtx` cannot be imported, and a command needs its ranges."""


def require_nvtx(purpose: str) -> None:
    """Check that the package `nvtx` is installed; `purpose` is what needs it.

    Raises:
        NvtxMissingError: it cannot be imported; says how to install it.
    """
    try:
        import nvtx  # noqa: F401
    except ImportError as error:
        raise NvtxMissingError(f"{purpose} needs NVTX ranges: {_missing(error)}") from error


def _missing(error: ImportError) -> str:
    return f"the package nvtx cannot be imported ({error}); pip install 'nvtx>=0.2.16'"


_NUMBERS: Final = struct.Struct(f"@{len(StepNumbers._fields)}q")


class _Events(threading.local):
    """The event attributes of one thread by range, built at its first range.

    Setting the payload and pushing are two calls: threads that shared one object could push each
    other's payload. Step numbers lie at a fixed address, where NVTX reads them at each event.
    """

    def __init__(self, domain: Any) -> None:
        import numpy as np

        fields = np.dtype([(field, np.int64) for field in StepNumbers._fields])
        self.of = {name: domain.get_event_attributes(name, *_STYLES[name]) for name in _STYLES}
        self.numbers = {name: bytearray(_NUMBERS.size) for name in STEP_RANGES}
        for name, numbers in self.numbers.items():
            self.of[name].payload = np.frombuffer(numbers, fields).reshape(())


class NvtxTool:
    """Sends ranges to an `nvtx.Domain`."""

    def __init__(self, domain: Any) -> None:
        self._domain = domain
        self._events = _Events(domain)

    def push(self, name: str, payload: Payload) -> None:
        event = self._events.of[name]
        if isinstance(payload, StepNumbers):
            _NUMBERS.pack_into(self._events.numbers[name], 0, *payload)
        else:
            event.payload = payload
        self._domain.push_range(event)

    def pop(self) -> None:
        self._domain.pop_range()


TOOL_VARIABLES: Final = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
"""Set for a process that an NVTX tool is loaded into: by NVTX's convention, and by nsys."""


def _attached_domain() -> Any:
    """Return the `nvtx.Domain` of stepgraph if a tool receives it, else None.

    nvtx returns a stand-in, not an `nvtx.Domain`, where the tool leaves the domain out.
    `NVTX_DISABLE` in the environment switches ranges off under a tool too. Under a tool but without
    the package `nvtx` a `RuntimeWarning` says that ranges are missing.
    """
    if not any(map(os.environ.get, TOOL_VARIABLES)) or os.environ.get("NVTX_DISABLE"):
        return None  # without loading nvtx, which takes longer than the rest of this package
    try:
        import nvtx
    except ImportError as error:
        warnings.warn(
            f"this process runs under a profiler, and its trace will have no stepgraph ranges:"
            f" {_missing(error)}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    domain = nvtx.get_domain(DOMAIN)
    return domain if nvtx.enabled() and isinstance(domain, nvtx.Domain) else None


_domain: Final = _attached_domain()

attached: Final = _domain is not None
"""Whether an NVTX tool receives the ranges of this process."""

_listeners: tuple[Listener, ...] = () if _domain is None else (NvtxTool(_domain),)
_changing: Final = threading.Lock()


def _replace(old: tuple[Listener, ...], new: tuple[Listener, ...]) -> None:
    global _listeners
    with _changing:
        _listeners = (*(listener for listener in _listeners if listener not in old), *new)
