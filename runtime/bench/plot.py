"""`--plot`: which of the measured steps are drawn, and what the picture says they are."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...profiling.plot import plot_steps
from ...profiling.timeline import StepRecord
from ..engine.engine import Engine

__all__ = ["MeasuredSteps"]

Entry = Mapping[str, Any]


class MeasuredSteps:
    """Keeps the steps of one measurement of a run, for a picture: those and no others are drawn.

    In `steady` they are all repetitions of the case that reads the most bytes a step (the largest
    model, batch and context), in its fastest mode; in other scenarios those of the entry that was
    measured last, which has the time budget where one was measured without and with it.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._num_entries = 0
        self._drawn: tuple[Entry, Sequence[StepRecord]] | None = None

    def add(self, entry: Entry, records: Sequence[StepRecord]) -> None:
        """Take in an entry of the document and the steps that it was measured on."""
        self._num_entries += 1
        if self._options.plot is None:
            return
        steady = self._options.scenario == "steady"
        if self._drawn is None or not steady or _weight(entry) >= _weight(self._drawn[0]):
            self._drawn = (entry, records)

    @contextlib.contextmanager
    def timed(self, *engines: Engine) -> Iterator[None]:
        """Take the device's time of what engines run in this block, if a picture is asked for."""
        with contextlib.ExitStack() as stack:
            if self._options.plot is not None:
                for engine in engines:
                    stack.enter_context(engine.device_timing())
            yield

    def write(self, document: Mapping[str, Any]) -> None:
        """Draw and write the picture, if one is asked for and something was measured.

        Raises:
            PlotError: it cannot be written.
        """
        if self._drawn is None:
            return
        entry, records = self._drawn
        plot_steps(
            records,
            self._options.plot,
            title=self._title(entry, document["environment"]["device"]),
            cases=document["cases"],
            max_itl_ms=entry.get("max_itl_ms"),
            command=document["environment"]["command"],
        )

    def _title(self, entry: Entry, device: str) -> str:
        scenario = self._options.scenario
        dtypes = [entry["dtype"]]
        dtypes += [
            f"{name} {entry[key]}"
            for name, key in (("weights", "weight_dtype"), ("KV", "kv_dtype"))
            if entry[key] != entry["dtype"]
        ]
        engine = ", ".join([entry["model"], *dtypes, entry["mode"], device])
        title = f"{engine}\n{scenario}: {WORKLOADS[scenario](entry)}"
        if self._num_entries == 1:
            return title
        n = self._num_entries
        if scenario == "steady":
            return f"{title} (of {n} cases the largest, in its fastest mode)"
        return f"{title} (the last of {n} runs)"


def _weight(entry: Entry) -> tuple[int, float]:
    """Order cases by size, and those of one size by how fast they are."""
    return entry["roofline"]["bytes_per_step"], -entry["step_ms"]["p50"]


def _steady(entry: Entry) -> str:
    return (
        f"{_rows(entry)}, prompts of {entry['input_len']:,} tokens, {entry['output_len']:,} decoded"
    )


def _interference(entry: Entry) -> str:
    return (
        f"{_rows(entry)}, a prompt of {entry['input_len']:,} tokens every"
        f" {entry['arrival_steps']} steps{_budget(entry)}"
    )


def _churn(entry: Entry) -> str:
    return (
        f"{_rows(entry)}, prompts up to {entry['input_len']:,} tokens, {entry['output_len']:,}"
        f" decoded on average{_budget(entry)}"
    )


def _rows(entry: Entry) -> str:
    return "1 row" if entry["batch_size"] == 1 else f"{entry['batch_size']:,} rows"


def _budget(entry: Entry) -> str:
    max_itl_ms = entry["max_itl_ms"]
    return ", no time budget" if max_itl_ms is None else f", budget {max_itl_ms:g} ms"


WORKLOADS: Mapping[str, Callable[[Entry], str]] = {
    "steady": _steady,
    "interference": _interference,
    "churn": _churn,
}
"""What a measurement did, in the words of its scenario."""
