"""Records of timelines that never ran: as told, or any that there can be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from stepgraph.profiling.timeline import StepRecord

PHASE_NS = 100_000
"""What planning, launching and committing take, each."""


def ns(ms: float) -> int:
    return round(1e6 * ms)


def step(
    number: int,
    at_ms: float,
    *,
    rows: int = 1,
    bucket: int = 1,
    prefill_tokens: int = 0,
    wait_ms: float = 0,
    device_ms: float | None = 0.7,
    **fields: Any,
) -> StepRecord:
    """A step that begins at a time; 1 ms long unless told otherwise."""
    return StepRecord(
        number,
        rows,
        bucket,
        prefill_tokens,
        ns(at_ms),
        PHASE_NS,
        PHASE_NS,
        PHASE_NS,
        ns(wait_ms),
        None if device_ms is None else ns(device_ms),
        **fields,
    )


def run_of(
    lengths_ms: Sequence[float],
    *,
    first: int = 0,
    at_ms: float = 0,
    between_ms: float = 0,
    **fields: Sequence[Any],
) -> list[StepRecord]:
    """Steps one after the other, on a device that is the host; `fields` has a value for each."""
    records = []
    for index, length in enumerate(lengths_ms):
        own = {name: values[index] for name, values in fields.items()}
        device_ms = length - 3 * PHASE_NS / 1e6
        records.append(step(first + index, at_ms, device_ms=device_ms, **own))
        at_ms += length + between_ms
    return records


@st.composite
def any_records(draw: st.DrawFn, *, max_size: int = 12) -> list[StepRecord]:
    """Any records: of a run, or of numbers that mean nothing."""
    amounts = st.integers(0, 5) | st.integers(0, 10**9) | st.integers(0, 2**63 - 1)
    is_async_device = draw(st.booleans())
    as_a_run = draw(st.booleans())
    records: list[StepRecord] = []
    now = 0
    for index in range(draw(st.integers(0, max_size))):
        now = records[-1].ended_ns + draw(amounts) if records and as_a_run else now
        records.append(
            StepRecord(
                index if as_a_run else draw(amounts),
                rows=draw(amounts),
                bucket=draw(amounts),
                prefill_tokens=draw(st.just(0) | amounts),
                started_ns=now if as_a_run else draw(st.integers(-(2**63), 2**63 - 1)),
                plan_ns=draw(amounts),
                launch_ns=draw(amounts),
                commit_ns=draw(amounts),
                wait_ns=draw(amounts),
                device_ns=draw(st.none() | amounts),
                steps=draw(st.integers(1, 64)),
                joined=draw(st.just(0) | amounts),
                blocks_in_use=draw(amounts),
                collected_ns=draw(st.just(0) | amounts),
                is_async_device=is_async_device,
            )
        )
    return records
