"""A running engine, heard as nsys hears it: the report tells of it what its timeline tells."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from stepgraph.profiling import capture_window, ranges
from stepgraph.profiling.report import read_report
from stepgraph.runtime import Engine, SamplingParams

from ..rigs.nsys_rig import PUSH_POP, Profile


class Tracer:
    """Writes the ranges of this thread into an export, as they come."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._thread = threading.get_ident()
        self._open: list[tuple[str, int, object]] = []

    def push(self, name: str, payload: object) -> None:
        assert threading.get_ident() == self._thread
        self._open.append((name, time.perf_counter_ns(), payload))

    def pop(self) -> None:
        name, began, payload = self._open.pop()
        value = payload if isinstance(payload, int) else None
        numbers = payload if isinstance(payload, tuple) else None
        self._profile.event(PUSH_POP, name, began, time.perf_counter_ns(), value, numbers)


@pytest.mark.parametrize("chunk", [8, 64])
def test_report_of_an_engine_on_a_cpu(
    tmp_path: Path, open_engine: Callable[..., Engine], chunk: int
) -> None:
    engine = open_engine("base", prefill_chunk=chunk)
    play = Profile()
    with ranges.listening(Tracer(play)), capture_window():
        for length in (5, 20, 33):
            engine.add_request(list(range(1, length)), SamplingParams(max_tokens=9, min_tokens=9))
            engine.step()
        while engine.has_unfinished():
            engine.step()
    report = read_report(play.write(tmp_path / "trace.sqlite"))
    records = engine.timeline().records()
    assert len(report.steps) == len(records) > 9
    for row, record in zip(report.steps, records, strict=True):
        assert (row.step, row.bucket) == (record.step, record.bucket)
        assert (row.rows, row.tokens) == (record.rows, record.rows + record.prefill_tokens)
        phases = ["decode"] * bool(record.rows) + ["prefill"] * bool(record.prefill_tokens)
        assert row.phase == "+".join(phases)
        # The two clocks are read at different places: a range encloses what the timeline times.
        assert row.device_us * 1e3 >= record.device_ns
        assert row.gap_us is None or row.gap_us > 0
    assert {case.phase for case in report.cases} >= {"decode", "prefill", "decode+prefill"}
    assert report.notes[0].startswith("no CUDA in this profile")
