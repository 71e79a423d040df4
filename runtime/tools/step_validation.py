"""Compares the step model of `replica_model.py` with steps that the benchmark measured.

python -m stepgraph.runtime.tools.step_validation docs/results/cpu-2x-zen5/smollm2-135m.json

Of each model, dtype and mode, the shortest case gives the two unknowns of a device: its bandwidth
(from a decode step) and its operations per second (from the time to the first token). With these,
the others are predicted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...profiling.command_line import CommandParser
from ...profiling.markdown import aligned
from ..errors import StepgraphError
from .replica_model import GPUS, Replica, StepSeconds

__all__ = ["main", "validate"]


def validate(
    cases: Sequence[Mapping[str, Any]], *, overlaps: bool
) -> list[tuple[str, float, float]]:
    """Return what was measured, the milliseconds (p50), and those that are predicted.

    Args:
        cases: of `steady` in the benchmark's JSON, all of one model and mode; one has one row.
        overlaps: whether the device reads memory and computes at the same time.
    """
    replica = Replica(cases[0]["model"], GPUS["H100"], 1)

    def decode(case: Mapping[str, Any]) -> tuple[int, int]:
        rows, context = case["batch_size"], case["input_len"] + case["output_len"] // 2
        return case["roofline"]["bytes_per_step"], replica.flops(rows, context, sampled=rows)

    def prefill(case: Mapping[str, Any]) -> int:
        return replica.flops(case["input_len"], case["input_len"] // 2, sampled=1)

    first = min(cases, key=lambda case: (case["batch_size"], case["input_len"]))
    # Prompts of one row arrive alone, so that the first token is that of one prefill.
    flops = prefill(first) / (first["ttft_ms"]["p50"] / 1e3)
    size, operations = decode(first)
    computing = 0.0 if overlaps else operations / flops
    bandwidth = size / (first["step_ms"]["p50"] / 1e3 - computing)
    found = []
    for case in cases:
        size, operations = decode(case)
        step = StepSeconds(size / bandwidth, operations / flops, 0.0, overlaps)
        rows = case["batch_size"]
        name = f"{rows} {'row' if rows == 1 else 'rows'}, prompts of {case['input_len']}"
        found.append((f"decode, {name}", case["step_ms"]["p50"], step.total * 1e3))
        if rows == 1:
            found.append((f"prefill, {name}", case["ttft_ms"]["p50"], prefill(case) / flops * 1e3))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = CommandParser(prog="step_validation", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="--output-json of `stepgraph bench`, steady")
    options = parser.parse_args(arguments)
    try:
        groups: dict[str, list[Any]] = {}
        for case in json.loads(options.file.read_text())["cases"]:
            words = (case["model"], case["dtype"], case["mode"], case.get("kernels", ""))
            groups.setdefault(" ".join(filter(None, words)), []).append(case)
        tables = [_table(title, cases) for title, cases in groups.items()]
    except (OSError, ValueError, KeyError, StepgraphError) as error:
        print(f"{parser.prog}: error: {options.file}: {error}", file=sys.stderr)
        return 1
    print("\n\n".join(tables))
    return 0


def _table(title: str, cases: Sequence[Mapping[str, Any]]) -> str:
    columns = [validate(cases, overlaps=overlaps) for overlaps in (True, False)]
    head = [f"p50 ms, {title}", "measured", "longer", "error", "sum", "error"]
    cells = [
        [name, f"{ms:.2f}", *(part for p in (a, b) for part in (f"{p:.2f}", f"{p / ms - 1:+.0%}"))]
        for (name, ms, a), (_, _, b) in zip(*columns, strict=True)
    ]
    return "\n".join(aligned(head, cells, 1))


if __name__ == "__main__":
    sys.exit(main())
