"""The numbers of a picture of a timeline: gaps, marks, phases of a step.

Standard library only.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from ..timeline import StepRecord

__all__ = [
    "TokenGap",
    "Mark",
    "MarkKind",
    "PhaseTimes",
    "Series",
    "phase_times",
    "series_of",
]

_NS_PER_S: Final = 1e9
_NS_PER_MS: Final = 1e6

_LONG_PAUSE: Final = 0.02
"""Longer pauses are cut out of the picture: share of the time that steps took."""

_COLLECTION_SHARE: Final = 0.1
"""Share of a gap that Python's collector took, from which on it is the reason for its length.
Collections of the youngest objects are frequent and take microseconds."""

MarkKind = Literal["chunk", "join", "bucket", "collection"]


@dataclass(frozen=True, slots=True)
class TokenGap:
    """The time between two tokens of the rows that decode.

    Attributes:
        seconds: when it ended, on the picture's axis.
        ms: how long it was.
        record: the step whose tokens it ended with.
        collected: whether Python's collector took more than a tenth of it.
    """

    seconds: float
    ms: float
    record: StepRecord
    collected: bool


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that happened in a step.

    Attributes:
        seconds: when that step's tokens arrived, on the picture's axis.
        amount: prompt tokens of a chunk, requests that joined, the new bucket, or the nanoseconds
            of a collection.
    """

    seconds: float
    amount: int


@dataclass(frozen=True, slots=True)
class Series:
    """A timeline on the axis of the picture, which begins with the first step.

    Attributes:
        gaps: in the order of time.
        marks: of each kind, in the order of time.
        pauses: where on the axis a time without steps was cut out, and its seconds.
        seconds: the end of the axis.
    """

    gaps: list[TokenGap]
    marks: dict[MarkKind, list[Mark]]
    pauses: list[tuple[float, float]]
    seconds: float


def series_of(records: Sequence[StepRecord]) -> Series:
    """Return what a picture shows of the records, which are in the order of their steps.

    A gap is the time between the tokens of two consecutive steps, if rows decode in the second:
    each of them had its previous token from the first. There is no gap before a step that only
    prefills, nor between two steps whose numbers do not follow each other.

    On an asynchronous device the tokens of a step arrive at the end of the call that launches the
    next one.
    """
    is_async_device = _is_async_device(records)
    gap_ns = [_gap_ns(records, index, is_async_device) for index in range(len(records))]
    busy_ns = [
        max(0, record.ended_ns - record.started_ns) if gap is None else gap
        for record, gap in zip(records, gap_ns, strict=True)
    ]
    long_pause = _LONG_PAUSE * sum(busy_ns)
    ends: list[float] = []  # of each record on the axis, in seconds
    pauses: list[tuple[float, float]] = []
    now = 0  # on the axis, in nanoseconds
    for index, record in enumerate(records):
        if index and gap_ns[index] is None:
            idle = max(0, record.started_ns - records[index - 1].ended_ns)
            if idle > long_pause:
                pauses.append((now / _NS_PER_S, idle / _NS_PER_S))
            else:
                now += idle
        now += busy_ns[index]
        ends.append(now / _NS_PER_S)
    gaps = [
        TokenGap(
            ends[index],
            gap / _NS_PER_MS,
            records[index - is_async_device],
            records[index].collected_ns > _COLLECTION_SHARE * gap,
        )
        for index, gap in enumerate(gap_ns)
        if gap is not None
    ]
    arrivals = ends[1:] + ends[-1:] if is_async_device else ends
    return Series(gaps, _marks(records, arrivals, ends), pauses, now / _NS_PER_S)


def _is_async_device(records: Iterable[StepRecord]) -> bool:
    """Whether the device is another processor, and one step in flight."""
    return any(record.is_async_device for record in records)


def _gap_ns(records: Sequence[StepRecord], index: int, is_async_device: bool) -> int | None:
    """The gap that ends with the tokens that a call took in; None where no row waited for them."""
    if index == 0:
        return None
    call, before = records[index], records[index - 1]
    if call.step != before.step + 1 or call.ended_ns < before.ended_ns:
        return None
    step = before if is_async_device else call
    # A call that waits for nothing takes nothing in: no step was in flight.
    if step.rows <= 0 or (is_async_device and call.wait_ns <= 0):
        return None
    return call.ended_ns - before.ended_ns


def _marks(
    records: Sequence[StepRecord], arrivals: Sequence[float], ends: Sequence[float]
) -> dict[MarkKind, list[Mark]]:
    marks: dict[MarkKind, list[Mark]] = {kind: [] for kind in get_args(MarkKind)}
    bucket: int | None = None
    for record, arrival, end in zip(records, arrivals, ends, strict=True):
        if record.prefill_tokens > 0:
            marks["chunk"].append(Mark(arrival, record.prefill_tokens))
        if record.joined > 0:
            marks["join"].append(Mark(arrival, record.joined))
        if record.rows > 0:  # else the bucket is one of tokens
            if bucket is not None and record.bucket != bucket:
                marks["bucket"].append(Mark(arrival, record.bucket))
            bucket = record.bucket
        if record.collected_ns > 0:
            marks["collection"].append(Mark(end, record.collected_ns))
    return marks


@dataclass(frozen=True, slots=True)
class PhaseTimes:
    """Where the time of steps of one kind goes: medians, in milliseconds of a step.

    Attributes:
        n: steps.
        phases: one after the other on the host's clock: plan, launch, device (if that is the
            host), commit, wait, and what the caller does before the next step.
        device_ms: time of an asynchronous device; None where there is none, or it was not timed.
    """

    n: int
    phases: dict[str, float]
    device_ms: float | None


def phase_times(records: Sequence[StepRecord], *, prefill: bool) -> PhaseTimes | None:
    """Return where the time of decode steps goes, or of those with a chunk of prompts.

    None if there is no step of that kind.
    """
    is_async_device = _is_async_device(records)
    samples: dict[str, list[float]] = {
        name: [] for name in ("plan", "launch", "device", "commit", "wait", "caller")
    }
    n = 0
    for index, record in enumerate(records):
        if (record.prefill_tokens > 0) != prefill or record.rows + record.prefill_tokens <= 0:
            continue
        n += 1
        per_step = 1 / _NS_PER_MS / max(1, record.steps)
        samples["plan"].append(record.plan_ns * per_step)
        samples["launch"].append(record.launch_ns * per_step)
        if record.device_ns is not None:
            samples["device"].append(record.device_ns * per_step)
        # On an asynchronous device the next call waits for the step and takes it in.
        taken = index + is_async_device
        if taken < len(records):
            samples["commit"].append(records[taken].commit_ns * per_step)
            if is_async_device:
                samples["wait"].append(records[taken].wait_ns * per_step)
        if index and _gap_ns(records, index, is_async_device) is not None:
            idle = record.started_ns - records[index - 1].ended_ns
            samples["caller"].append(max(0, idle) * per_step)
    if not n:
        return None
    medians = {name: statistics.median(values) for name, values in samples.items() if values}
    device_ms = medians.pop("device", None) if is_async_device else None
    return PhaseTimes(n, medians, device_ms)
