"""The dictionary of ranges, marks and counters: what their names mean and what they carry.

Pure data, standard library only: reading a trace needs no NVTX. `markdown` returns the tables of
docs/profiling.md.
"""

from collections.abc import Iterable, Mapping, Sequence
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
    "markdown",
]

DOMAIN: Final = "stepgraph"
"""The NVTX domain that holds all of this."""

COUNTERS: Final = "step numbers"
"""Name of the counters that `replay` and `prefill` sample, one for each of `STEP_NUMBERS`."""

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
WINDOW: Final = "window"

COLLECTION: Final = "collection"
FALLBACK: Final = "fallback"


@dataclass(frozen=True, slots=True)
class FieldInfo:
    """A field of a payload: a signed integer of 64 bits."""

    name: str
    description: str


STEP_NUMBERS: Final = (
    FieldInfo("step", "number of the step that launches it"),
    FieldInfo("rows", "rows that decode, without padding; 0 in a prefill"),
    FieldInfo("bucket", "rows, or tokens of a prefill, that the launch was prepared for"),
    FieldInfo("tokens", "tokens that it computes, without padding"),
    FieldInfo("blocks_in_use", "blocks of the cache that requests hold"),
    FieldInfo("padding", "padding tokens that it computes to fill the bucket"),
)
"""The payload of every launch on the device. Where a launch is several decode steps (tokens +
padding) / bucket says how many."""

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
        name: the message a profiler shows. It never holds an id: profilers keep every message.
        parent: the range that directly encloses it; None for a range that stands alone, and marks.
        category: "step", "host" (Python at work), "device" (work handed to the device), "start" or
            "profile".
        description: what happens in the range, or what the mark reports.
        payload: what the payload means.
        fields: of the payload in order, where it is not a single integer of a range.
    """

    name: str
    parent: str | None
    category: str
    description: str
    payload: str = ""
    fields: tuple[FieldInfo, ...] = ()

    @property
    def color(self) -> int:
        """0xAARRGGBB, one a category."""
        return _COLORS[self.category]


_NUMBERS: Final = "the step numbers"

_RANGES: Final = (
    EventInfo(STEP, None, "step", "one turn of the engine", "number of the step it launches"),
    EventInfo(
        PLAN, STEP, "host", "choosing rows, blocks and a chunk of prefill", "number of the step"
    ),
    EventInfo(SWAP, STEP, "device", "copying blocks to the host cache or back", "blocks"),
    EventInfo(FORK, STEP, "device", "copying blocks that a fork will write into", "blocks"),
    EventInfo(
        LAUNCH, STEP, "host", "starting the step on the device", "rows that decode, else tokens"
    ),
    EventInfo(
        PREPARE, LAUNCH, "host", "writing what changed for the step", "rows that join or decode"
    ),
    EventInfo(COPY, LAUNCH, "device", "the one copy from mirror to device", "bytes"),
    EventInfo(REPLAY, LAUNCH, "device", "running a decode step", _NUMBERS, STEP_NUMBERS),
    EventInfo(PREFILL, LAUNCH, "device", "running a chunk of prompts", _NUMBERS, STEP_NUMBERS),
    # With a step in flight the tokens taken in are those of an earlier step than the range around
    # this one launches: nesting alone would name the wrong step.
    EventInfo(COMMIT, STEP, "host", "taking in a finished step's tokens", "number of that step"),
    EventInfo(LOAD, None, "start", "reading the weights", "bytes"),
    EventInfo(WARMUP, None, "start", "making every bucket ready for the first request", "buckets"),
    EventInfo(CAPTURE, WARMUP, "start", "warming up or capturing one bucket", "bucket"),
    EventInfo(WINDOW, None, "profile", "what a profile is about, around its steps", "always 0"),
)

_MARKS: Final = (
    EventInfo(
        COLLECTION,
        None,
        "host",
        "Python's garbage collector has run",
        fields=(
            FieldInfo("generation", "the oldest generation that it looked at"),
            FieldInfo("microseconds", "that it took"),
            FieldInfo("collected", "objects that it found unreachable"),
        ),
    ),
    EventInfo(
        FALLBACK,
        None,
        "device",
        "no step was prepared for a launch: it runs as a slower one",
        fields=(FieldInfo("bucket", "rows, or tokens of a prefill, of the step that is missing"),),
    ),
)

RANGES: Final[Mapping[str, EventInfo]] = MappingProxyType({info.name: info for info in _RANGES})
"""Every range by name."""

MARKS: Final[Mapping[str, EventInfo]] = MappingProxyType({info.name: info for info in _MARKS})
"""Every mark by name. A payload of one field is a plain integer, of several a struct."""


def markdown() -> str:
    """Return the dictionary as the tables of the documentation."""
    ranges = [
        (f"`{i.name}`", f"`{i.parent}`" if i.parent else "-", i.category, i.payload, i.description)
        for i in RANGES.values()
    ]
    marks = [(f"`{i.name}`", i.category, _names(i.fields), i.description) for i in MARKS.values()]
    counters = [
        (f"`{COUNTERS}`", _names(STEP_NUMBERS), f"sampled at each `{REPLAY}` and `{PREFILL}`")
    ]
    fields = [(_NUMBERS, f"`{field.name}`", field.description) for field in STEP_NUMBERS]
    fields += [
        (f"`{mark.name}`", f"`{field.name}`", field.description)
        for mark in MARKS.values()
        for field in mark.fields
    ]
    return "\n\n".join(
        (
            _table(("range", "inside", "category", "payload", "what happens"), ranges),
            _table(("mark", "category", "payload", "what has happened"), marks),
            _table(("counters", "one for each of", "when"), counters),
            _table(("payload of", "field", "meaning"), fields),
        )
    )


def _names(fields: Iterable[FieldInfo]) -> str:
    return ", ".join(f"`{field.name}`" for field in fields)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join((lines[0], "|---" * len(head) + "|", *lines[1:]))
