"""The NVTX ranges of stepgraph: their names, what they enclose, what their payload says.

    ranges.push(ranges.LAUNCH, bucket)
    ...
    ranges.pop()

    with ranges.span(ranges.PLAN, step):
        ...

`RANGES` is the whole dictionary. A profiler keeps every message it has seen for ever, so a name
never holds an id: which step, how many rows, which bucket and how many tokens travel in the
payload. One integer a range is enough, because ranges nest (the `step` around a `replay` says which
step it was), and a scalar lands in a column of its own in the profiler's export.

Free when nobody listens: NVTX looks for a tool once in a process, at the first use of a domain, and
a tool such as nsys is in place before Python starts. So it is asked once, when this module is
imported. Without a tool `push` and `pop` only check the name.
"""

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType, TracebackType
from typing import Any, Final, Protocol

import nvtx

DOMAIN: Final = "stepgraph"
"""The NVTX domain that holds every range of this project."""

STEP: Final = "step"
PLAN: Final = "plan"
LAUNCH: Final = "launch"
PREPARE: Final = "prepare"
COPY: Final = "copy"
FORK: Final = "fork"
SWAP: Final = "swap"
REPLAY: Final = "replay"
PREFILL: Final = "prefill"
COMMIT: Final = "commit"
CAPTURE: Final = "capture"
LOAD: Final = "load"
WARMUP: Final = "warmup"


@dataclass(frozen=True, slots=True)
class RangeInfo:
    """One row of the dictionary of ranges.

    Attributes:
        name: the message a profiler shows.
        parent: the range that directly encloses it, None for a range that stands alone.
        category: "step", "host" (Python at work), "device" (work handed to the device) or "start".
        color: 0xAARRGGBB, one a category.
        description: what happens between push and pop.
        payload: what the integer of the range means.
    """

    name: str
    parent: str | None
    category: str
    color: int
    description: str
    payload: str


_COLORS: Final = {
    "step": 0xFF5F6B7A,
    "host": 0xFFE0A030,
    "device": 0xFF3C8DD9,
    "start": 0xFF8A63C9,
}


def _info(name: str, parent: str | None, category: str, what: str, payload: str) -> RangeInfo:
    return RangeInfo(name, parent, category, _COLORS[category], what, payload)


_TABLE: Final = (
    _info(STEP, None, "step", "one turn of the engine", "number of the step it launches"),
    _info(PLAN, STEP, "host", "choosing rows, blocks and a chunk of prefill", "number of the step"),
    _info(SWAP, STEP, "device", "copying blocks to the host cache or back", "blocks"),
    _info(FORK, STEP, "device", "copying blocks that a fork will write into", "blocks"),
    _info(LAUNCH, STEP, "host", "starting the step on the device", "bucket"),
    _info(PREPARE, LAUNCH, "host", "writing changes into the pinned mirror", "rows that changed"),
    _info(COPY, LAUNCH, "device", "the one copy from mirror to device", "bytes"),
    _info(REPLAY, LAUNCH, "device", "running a decode step", "rows without padding"),
    _info(PREFILL, LAUNCH, "device", "running a chunk of prompts", "tokens without padding"),
    # With a step in flight the tokens taken in are those of an earlier step than the range around
    # this one launches: nesting alone would name the wrong step.
    _info(COMMIT, STEP, "host", "taking in a finished step's tokens", "number of that step"),
    _info(LOAD, None, "start", "reading the weights", "bytes"),
    _info(WARMUP, None, "start", "making every bucket ready for the first request", "buckets"),
    _info(CAPTURE, WARMUP, "start", "warming up and capturing one bucket", "bucket"),
)

_RANGES: Final = {info.name: info for info in _TABLE}

RANGES: Final[Mapping[str, RangeInfo]] = MappingProxyType(_RANGES)
"""Every range there is, by name. Read-only."""


class NvtxDomain(Protocol):
    """What `ranges` needs of an NVTX domain; `nvtx.Domain` has it, and so has a test's recorder."""

    def get_event_attributes(self, message: str, color: int, category: str) -> Any:
        """Register `message` and return an object whose `payload` can be set again and again."""

    def push_range(self, attributes: Any) -> None:
        """Begin a range on the calling thread."""

    def pop_range(self) -> None:
        """End the innermost range of the calling thread."""


class RangeEmitter(Protocol):
    """The face of this module as an object: where ranges go."""

    def push(self, name: str, payload: int = 0) -> None:
        """Begin the range `name` on the calling thread.

        Every push needs its `pop` on the same thread, on the way of an exception too; where that
        is not plain to see, use `span`.

        Args:
            name: a key of `RANGES`.
            payload: the integer that `RANGES[name].payload` describes.

        Raises:
            ValueError: if `name` is not in `RANGES`, whether or not a tool listens.
        """

    def pop(self) -> None:
        """End the innermost range of the calling thread."""

    def span(self, name: str, payload: int = 0) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that pushes on entry and pops on every way out.

        Raises:
            ValueError: if `name` is not in `RANGES`.
        """


def _unknown_range(name: str) -> ValueError:
    return ValueError(f"unknown range {name!r}; the ranges are: {', '.join(_RANGES)}")


class _Silent:
    """Nobody listens. Static methods: a plain function is cheaper to call than a bound method."""

    @staticmethod
    def push(name: str, payload: int = 0) -> None:
        # Checked here too: a misspelt range must fail in every run, not only under a profiler.
        if name not in _RANGES:
            raise _unknown_range(name)

    @staticmethod
    def pop() -> None:
        return

    @staticmethod
    def span(name: str, payload: int = 0) -> contextlib.AbstractContextManager[None]:
        if name not in _RANGES:
            raise _unknown_range(name)
        return _NO_SPAN


_NO_SPAN: Final = contextlib.nullcontext()


class _Events(threading.local):
    """The event attributes of one thread, built at its first range.

    Setting the payload and pushing are two calls: threads that shared one object could push each
    other's payload.
    """

    def __init__(self, domain: NvtxDomain) -> None:
        self.by_name = {
            info.name: domain.get_event_attributes(info.name, info.color, info.category)
            for info in _RANGES.values()
        }


class _Emitting:
    """A tool listens."""

    def __init__(self, domain: NvtxDomain) -> None:
        self._domain = domain
        self._events = _Events(domain)

    def push(self, name: str, payload: int = 0) -> None:
        event = self._events.by_name.get(name)
        if event is None:
            raise _unknown_range(name)
        event.payload = int(payload)  # nvtx takes exactly `int`: no bool, no NumPy integer
        self._domain.push_range(event)

    def pop(self) -> None:
        self._domain.pop_range()

    def span(self, name: str, payload: int = 0) -> contextlib.AbstractContextManager[None]:
        if name not in _RANGES:
            raise _unknown_range(name)
        return _Span(self, name, payload)


class _Span:
    __slots__ = ("_emitter", "_name", "_payload")

    def __init__(self, emitter: _Emitting, name: str, payload: int) -> None:
        self._emitter = emitter
        self._name = name
        self._payload = payload

    def __enter__(self) -> None:
        self._emitter.push(self._name, self._payload)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._emitter.pop()


def connect(domain: NvtxDomain | None) -> RangeEmitter:
    """Return an emitter into `domain`, or one that does nothing where `domain` is None."""
    return _Silent() if domain is None else _Emitting(domain)


def _attached_domain() -> NvtxDomain | None:
    """The project's domain if a tool takes it in, else None.

    nvtx answers with a stand-in that is no `nvtx.Domain` where no tool is attached or the tool
    leaves the domain out. `NVTX_DISABLE` in the environment switches ranges off under a tool too.
    """
    domain = nvtx.get_domain(DOMAIN)
    return domain if nvtx.enabled() and isinstance(domain, nvtx.Domain) else None


_emitter: Final = connect(_attached_domain())

attached: Final = isinstance(_emitter, _Emitting)
"""Whether a tool takes in the ranges of this process."""

push = _emitter.push
pop = _emitter.pop
span = _emitter.span
