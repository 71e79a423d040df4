"""The dictionary of ranges, marks and counters: their names, meanings and payloads.

Pure data, standard library only: reading a trace needs no NVTX. docs/profiling.md has the same
tables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

__all__ = [
    "COUNTERS",
    "DOMAIN",
    "MARKS",
    "RANGES",
    "STEP_NUMBERS",
    "EventInfo",
    "FieldInfo",
]

DOMAIN: Final = "stepgraph"
"""Name of the NVTX domain of all ranges, marks and counters."""

COUNTERS: Final = "step numbers"
"""Name of the counters of `replay`, `verify` and `prefill`, one for each of `STEP_NUMBERS`."""

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

COLLECTION: Final = "collection"
FALLBACK: Final = "fallback"


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """A field of a payload: a signed integer of 64 bits."""

    name: str
    description: str


STEP_NUMBERS: Final = (
    FieldInfo("step", "number of the step"),
    FieldInfo("rows", "decoding rows without padding; 0 for a prefill"),
    FieldInfo(
        "bucket",
        "size that the launch was prepared for: rows of a decode step, tokens of a prefill",
    ),
    FieldInfo("tokens", "computed tokens without padding"),
    FieldInfo("blocks_in_use", "cache blocks held by requests"),
    FieldInfo("padding", "padding tokens that fill the bucket"),
)
"""The payload of every launch on the device. A launch runs (tokens + padding) / bucket decode
steps."""

_COLORS: Final = {
    "step": 0xFF5F6B7A,
    "host": 0xFFE0A030,
    "device": 0xFF3C8DD9,
    "start": 0xFF8A63C9,
    "profile": 0xFF4A9F6E,
}


@dataclass(frozen=True, slots=True)
class EventInfo:
    """A range, or a mark: an event without a duration.

    Attributes:
        name: the message in a profiler. It never contains an id: profilers keep every message.
        parent: the range that directly encloses it; None for top-level ranges and for marks.
        category: "step", "host" (work of the host), "device" (launches on the device), "start" or
            "profile".
        description: what the range covers, or what the mark reports.
        payload: meaning of the payload of a range.
        fields: of the payload in order, if it is not a single integer of a range.
    """

    name: str
    parent: str | None
    category: str
    description: str
    payload: str = ""
    fields: tuple[FieldInfo, ...] = ()

    @property
    def color(self) -> int:
        """Color of the category as 0xAARRGGBB."""
        return _COLORS[self.category]


_NUMBERS: Final = "the step numbers"

_RANGES: Final = (
    EventInfo(STEP, None, "step", "one iteration of the engine loop", "step number"),
    EventInfo(PLAN, STEP, "host", "scheduling: rows, blocks, prefill chunks", "step number"),
    EventInfo(SWAP, STEP, "device", "copy blocks to or from the host cache", "number of blocks"),
    EventInfo(FORK, STEP, "device", "copy blocks before a fork writes to them", "number of blocks"),
    EventInfo(
        LAUNCH,
        STEP,
        "host",
        "start the step on the device",
        "decoding rows, or tokens if no row decodes",
    ),
    EventInfo(
        PREPARE, LAUNCH, "host", "write changed inputs to pinned memory", "rows that join or decode"
    ),
    EventInfo(COPY, LAUNCH, "device", "copy changed inputs to the device", "bytes"),
    EventInfo(REPLAY, LAUNCH, "device", "run a decode step", _NUMBERS, STEP_NUMBERS),
    EventInfo(
        VERIFY,
        LAUNCH,
        "device",
        "run a verify step: tokens less rows are its drafts",
        _NUMBERS,
        STEP_NUMBERS,
    ),
    EventInfo(PREFILL, LAUNCH, "device", "run a prefill chunk", _NUMBERS, STEP_NUMBERS),
    EventInfo(MASK, STEP, "host", "wait for the token masks of grammars", "rows that sample"),
    # With a step in flight the tokens taken in are those of an earlier step than the range around
    # this one launches: nesting alone would name the wrong step.
    EventInfo(COMMIT, STEP, "host", "process the tokens of a finished step", "number of that step"),
    EventInfo(LOAD, None, "start", "read the weights", "bytes"),
    EventInfo(
        WARMUP, None, "start", "prepare every bucket before the first request", "number of buckets"
    ),
    EventInfo(CAPTURE, WARMUP, "start", "warm up or capture one bucket", "bucket"),
    EventInfo(WINDOW, None, "profile", "the profiled window", "always 0"),
)

_MARKS: Final = (
    EventInfo(
        COLLECTION,
        None,
        "host",
        "Python's garbage collector ran",
        fields=(
            FieldInfo("generation", "oldest collected generation"),
            FieldInfo("microseconds", "duration of the collection"),
            FieldInfo("collected", "number of unreachable objects"),
        ),
    ),
    EventInfo(
        FALLBACK,
        None,
        "device",
        "no prepared step fits the launch: a slower one runs",
        fields=(FieldInfo("bucket", "rows (or tokens of a prefill) of the missing step"),),
    ),
)

RANGES: Final[Mapping[str, EventInfo]] = MappingProxyType({info.name: info for info in _RANGES})
"""Every range by name."""

MARKS: Final[Mapping[str, EventInfo]] = MappingProxyType({info.name: info for info in _MARKS})
"""Every mark by name. A payload of one field is a plain integer, of several a struct."""
