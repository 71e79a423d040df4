"""Scenarios other than steady: which function measures each, and their common loop."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from ..benchmark_run import BenchmarkRun, ModelKind, StepMode
from ..results.result_document import write_json
from .interference import run_interference
from .neighbours import run_neighbours
from .serve import run_serve

__all__ = ["SCENARIOS", "ScenarioRun"]

Measure = Callable[[BenchmarkRun, ModelKind, StepMode], Iterator[dict[str, Any]]]

SCENARIOS: dict[str, Measure] = {
    "interference": run_interference,
    "neighbours": run_neighbours,
    "serve": run_serve,
}
"""Each yields the entries of one model, dtypes and mode as they are measured."""


class ScenarioRun(BenchmarkRun):
    """A scenario in the fastest mode, or in those that were given."""

    def run(self) -> None:
        """Measure, and write the document after each entry."""
        measure = SCENARIOS[self.options.scenario]
        entries = self.document[self.options.scenario] = []
        for kind, mode in itertools.product(self.kinds, self.modes):
            for entry in measure(self, kind, mode):
                entries.append(entry)
                write_json(self.options, self.document)
