"""The dictionary of ranges, marks and counters: what their names mean and what they carry.

Pure data, standard library only: whoever reads a trace needs no NVTX for it. The tables of the
documentation are made of it: `python -m stepgraph.profiling.dictionary` prints them, and with the
path of a page brings that page up to date.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from .whole_files import write_file

__all__ = [
    "COUNTERS",
    "DOMAIN",
    "MARKS",
    "RANGES",
    "STEP_NUMBERS",
    "CounterInfo",
    "FieldInfo",
    "MarkInfo",
    "RangeInfo",
    "markdown",
    "replace_tables",
]

DOMAIN: Final = "stepgraph"
"""The NVTX domain that holds all of this."""

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


@dataclass(frozen=True, slots=True)
class RangeInfo:
    """One row of the dictionary of ranges.

    Attributes:
        name: the message a profiler shows.
        parent: the range that directly encloses it, None for a range that stands alone.
        category: "step", "host" (Python at work), "device" (work handed to the device), "start" or
            "profile".
        color: 0xAARRGGBB, one a category.
        description: what happens between push and pop.
        payload: what the payload means.
        fields: of a payload that is a struct, in order; empty where it is one integer.
    """

    name: str
    parent: str | None
    category: str
    color: int
    description: str
    payload: str
    fields: tuple[FieldInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class MarkInfo:
    """One row of the dictionary of marks, events without a duration.

    Attributes:
        name: the message a profiler shows.
        category: as of a range.
        color: 0xAARRGGBB, one a category.
        description: what has happened.
        fields: of its payload, in order. One alone is sent as a plain integer, several as a struct.
    """

    name: str
    category: str
    color: int
    description: str
    fields: tuple[FieldInfo, ...]


@dataclass(frozen=True, slots=True)
class CounterInfo:
    """A group of counters that are sampled together: one for each field."""

    name: str
    description: str
    fields: tuple[FieldInfo, ...]


STEP_NUMBERS: Final = (
    FieldInfo("step", "number of the step that launches it"),
    FieldInfo("rows", "rows that decode, without padding; 0 in a prefill"),
    FieldInfo("bucket", "rows, or tokens of a prefill, that the launch was prepared for"),
    FieldInfo("tokens", "tokens that it computes, without padding"),
    FieldInfo("blocks_in_use", "blocks of the cache that requests hold"),
    FieldInfo("padding", "tokens that it computes for nobody, to fill the bucket"),
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
_NUMBERS: Final = "the step numbers"


def _range(
    name: str,
    parent: str | None,
    category: str,
    what: str,
    payload: str,
    fields: tuple[FieldInfo, ...] = (),
) -> RangeInfo:
    return RangeInfo(name, parent, category, _COLORS[category], what, payload, fields)


_RANGES: Final = (
    _range(STEP, None, "step", "one turn of the engine", "number of the step it launches"),
    _range(
        PLAN, STEP, "host", "choosing rows, blocks and a chunk of prefill", "number of the step"
    ),
    _range(SWAP, STEP, "device", "copying blocks to the host cache or back", "blocks"),
    _range(FORK, STEP, "device", "copying blocks that a fork will write into", "blocks"),
    _range(
        LAUNCH, STEP, "host", "starting the step on the device", "rows that decode, else tokens"
    ),
    _range(
        PREPARE, LAUNCH, "host", "writing what changed for the step", "rows that join or decode"
    ),
    _range(COPY, LAUNCH, "device", "the one copy from mirror to device", "bytes"),
    _range(REPLAY, LAUNCH, "device", "running a decode step", _NUMBERS, STEP_NUMBERS),
    _range(PREFILL, LAUNCH, "device", "running a chunk of prompts", _NUMBERS, STEP_NUMBERS),
    # With a step in flight the tokens taken in are those of an earlier step than the range around
    # this one launches: nesting alone would name the wrong step.
    _range(COMMIT, STEP, "host", "taking in a finished step's tokens", "number of that step"),
    _range(LOAD, None, "start", "reading the weights", "bytes"),
    _range(WARMUP, None, "start", "making every bucket ready for the first request", "buckets"),
    _range(CAPTURE, WARMUP, "start", "warming up or capturing one bucket", "bucket"),
    _range(WINDOW, None, "profile", "what a profile is about, around its steps", "always 0"),
)

_MARKS: Final = (
    MarkInfo(
        COLLECTION,
        "host",
        _COLORS["host"],
        "Python's garbage collector has run",
        (
            FieldInfo("generation", "the oldest generation that it looked at"),
            FieldInfo("microseconds", "that it took"),
            FieldInfo("collected", "objects that it found unreachable"),
        ),
    ),
    MarkInfo(
        FALLBACK,
        "device",
        _COLORS["device"],
        "no step was prepared for a launch: it runs as a slower one",
        (FieldInfo("bucket", "rows, or tokens of a prefill, of the step that is missing"),),
    ),
)

_COUNTERS: Final = (
    CounterInfo("step numbers", "sampled at each `replay` and `prefill`", STEP_NUMBERS),
)

RANGES: Final[Mapping[str, RangeInfo]] = MappingProxyType({info.name: info for info in _RANGES})
"""Every range there is, by name. Read-only."""

MARKS: Final[Mapping[str, MarkInfo]] = MappingProxyType({info.name: info for info in _MARKS})
"""Every mark there is, by name. Read-only."""

COUNTERS: Final[Mapping[str, CounterInfo]] = MappingProxyType({c.name: c for c in _COUNTERS})
"""Every group of counters there is, by name. Read-only."""

BEGIN: Final = "<!-- dictionary: written by `python -m stepgraph.profiling.dictionary` -->"
END: Final = "<!-- end of the dictionary -->"


def markdown() -> str:
    """Return the dictionary as the tables of the documentation."""
    ranges = [
        (_code(i.name), _code(i.parent) if i.parent else "-", i.category, i.payload, i.description)
        for i in RANGES.values()
    ]
    marks = [(_code(i.name), i.category, _names(i.fields), i.description) for i in MARKS.values()]
    counters = [(_code(i.name), _names(i.fields), i.description) for i in COUNTERS.values()]
    fields = [("the step numbers", _code(f.name), f.description) for f in STEP_NUMBERS]
    fields += [
        (_code(mark.name), _code(field.name), field.description)
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


def replace_tables(page: str) -> str:
    """Return a page with the dictionary between its two marker comments.

    Raises:
        ValueError: the page does not have each marker once, in their order.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end) or BEGIN in rest or END in before + after:
        raise ValueError(f"the page needs one line {BEGIN!r} and behind it one line {END!r}")
    return f"{before}{BEGIN}\n\n{markdown()}\n\n{END}{after}"


def _code(name: str) -> str:
    return f"`{name}`"


def _names(fields: Iterable[FieldInfo]) -> str:
    return ", ".join(_code(field.name) for field in fields)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join((_row(head), "|---" * len(head) + "|", *map(_row, rows)))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _main(arguments: Sequence[str]) -> int:
    """Print the tables, or bring the page of that path up to date; return the exit status."""
    if not arguments:
        print(markdown())
        return 0
    try:
        (path,) = map(Path, arguments)
        page = replace_tables(path.read_text(encoding="utf-8"))
        write_file(path, page)
    except (OSError, ValueError) as error:
        print(f"stepgraph.profiling.dictionary: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
