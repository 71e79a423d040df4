"""`--plot`: selects the measured steps that are plotted, and writes the title."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....profiling.plot import plot_steps
from ....profiling.timeline import StepRecord
from ...engine.engine import Engine

__all__ = ["MeasuredSteps"]

Entry = Mapping[str, Any]


class MeasuredSteps:
    """Keeps the steps of one measurement of a run, which are plotted.

    In `steady` these are all repetitions of the case that reads the most bytes a step (the largest
    model, batch and context), in its fastest mode; in other scenarios those of the last entry,
    which has the time budget if entries were measured without and with one.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._num_entries = 0
        self._plotted: tuple[Entry, Sequence[StepRecord]] | None = None

    def add(self, entry: Entry, records: Sequence[StepRecord]) -> None:
        """Add an entry of the document with its steps."""
        self._num_entries += 1
        if self._options.plot is None:
            return
        steady = self._options.scenario == "steady"
        if self._plotted is None or not steady or _weight(entry) >= _weight(self._plotted[0]):
            self._plotted = (entry, records)

    @contextlib.contextmanager
    def timed(self, *engines: Engine) -> Iterator[None]:
        """Record the device time of the engines' steps in this block, if they are plotted."""
        with contextlib.ExitStack() as stack:
            if self._options.plot is not None:
                for engine in engines:
                    stack.enter_context(engine.device_timing())
            yield

    def write(self, document: Mapping[str, Any]) -> None:
        """Write the plot, if `--plot` was given and something was measured.

        Raises:
            PlotError: it cannot be written.
        """
        if self._plotted is None:
            return
        entry, records = self._plotted
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
        title = f"{engine}\n{scenario}: {_workload(scenario, entry)}"
        if self._num_entries == 1:
            return title
        n = self._num_entries
        if scenario == "steady":
            return f"{title} (the largest of {n} cases, in its fastest mode)"
        return f"{title} (the last of {n} runs)"


def _weight(entry: Entry) -> tuple[int, float]:
    """Order cases by size, and those of one size by speed."""
    return entry["roofline"]["bytes_per_step"], -entry["step_ms"]["p50"]


def _workload(scenario: str, entry: Entry) -> str:
    rows = "1 row" if entry["batch_size"] == 1 else f"{entry['batch_size']:,} rows"
    prompt = f"{entry['input_len']:,} tokens"
    if scenario == "steady":
        return f"{rows}, prompts of {prompt}, {entry['output_len']:,} decoded"
    max_itl_ms = entry["max_itl_ms"]
    budget = "no time budget" if max_itl_ms is None else f"budget {max_itl_ms:g} ms"
    if scenario == "interference":
        return f"{rows}, a prompt of {prompt} every {entry['arrival_steps']} steps, {budget}"
    decoded = f"{entry['output_len']:,} decoded on average"
    return f"{rows}, prompts up to {prompt}, {decoded}, {budget}"
