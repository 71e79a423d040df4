"""Measures the time without a kernel between two decode steps of a CUDA device.

python -m stepgraph.runtime.bench.idle --model preset:llama-3.2-1b --input-len 1024

One row decodes under torch's profiler, which records when each kernel began and ended. The profiler
slows the host, so without it the gaps are no longer than these.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...profiling.stats import Summary
from ..config import EngineConfig
from ..engine.engine import Engine
from ..errors import StepgraphError
from .workload import abort_all, greedy, random_prompts

__all__ = ["main", "measure_idle", "uncovered_us"]

FIRST_KERNEL = "begin_decode"
"""Part of the name of the kernel that begins a step."""

SETTLING_STEPS = 5
"""Steps that are ignored, before the profiler starts and after."""

Trace = Callable[[Callable[[], None]], Sequence[Mapping[str, Any]]]
"""Runs a function; returns the events of its Chrome trace."""


def measure_idle(
    engine: Engine, *, input_len: int, num_steps: int, seed: int, trace: Trace | None = None
) -> list[float]:
    """Return the microseconds without a kernel before each of `num_steps` decode steps of one row.

    Args:
        engine: idle, with room for a sequence of `longest_sequence` tokens.
        input_len: tokens of the prompt, which are random.
        num_steps: gaps that are returned.
        seed: of the prompt.
        trace: None: torch's profiler.

    Raises:
        StepgraphError: fewer steps than these began with `FIRST_KERNEL`.
    """
    (prompt,) = random_prompts(engine.model_config, 1, input_len, seed)
    tokens = longest_sequence(input_len, num_steps) - input_len
    request_id = engine.add_request(prompt, greedy(tokens))
    decoded = 0
    while decoded < SETTLING_STEPS:
        decoded += len(engine.step())

    def decode() -> None:
        # One more than gaps, and one in flight when the profiler stops.
        for _ in range(SETTLING_STEPS + num_steps + 2):
            engine.step()

    events = (trace or _trace)(decode)
    abort_all(engine, [request_id])
    found = uncovered_us(events)[SETTLING_STEPS:]
    if len(found) < num_steps:
        raise StepgraphError(
            f"the profiler saw {len(found)} gaps between steps that begin with {FIRST_KERNEL},"
            f" not {num_steps}"
        )
    return found[:num_steps]


def longest_sequence(input_len: int, num_steps: int) -> int:
    """Return the tokens of a sequence longer than any measurement."""
    return input_len + num_steps + 2 * SETTLING_STEPS + 8


def uncovered_us(events: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the microseconds without a kernel before each step but the first.

    Args:
        events: of a Chrome trace as torch's profiler writes it; those of other categories than
            `kernel` (copies, the host) cover nothing.
    """
    kernels = sorted(
        (event["ts"], event["dur"], event["name"])
        for event in events
        if event.get("cat") == "kernel"
    )
    gaps: list[float] = []
    ended = None
    for began, lasted, name in kernels:
        if ended is not None and FIRST_KERNEL in name:
            gaps.append(max(0.0, began - ended))  # a dependent launch begins before the end
        ended = began + lasted if ended is None else max(ended, began + lasted)
    return gaps


def _trace(run: Callable[[], None]) -> Sequence[Mapping[str, Any]]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(file))
        events: list[dict[str, Any]] = json.loads(file.read_text())["traceEvents"]
    return events


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line of JSON: the distribution of the gaps in microseconds."""
    parser = argparse.ArgumentParser(
        prog="python -m stepgraph.runtime.bench.idle",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", default="preset:llama-3.2-1b", help="as of bench.py")
    parser.add_argument("--input-len", type=int, default=1024)
    parser.add_argument("--num-steps", type=int, default=50, help="gaps to measure")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("idle: error: there is no CUDA device", file=sys.stderr)
        return 1
    config = EngineConfig(
        device="cuda",
        mode="graph",
        prefix_cache=False,
        max_num_seqs=1,
        buckets=(1,),
        max_model_len=longest_sequence(options.input_len, options.num_steps),
    )
    try:
        with Engine.from_pretrained(options.model, config, progress=False) as engine:
            gaps = measure_idle(
                engine, input_len=options.input_len, num_steps=options.num_steps, seed=0
            )
    except StepgraphError as error:
        print(f"idle: error: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"model": options.model, "uncovered_us": Summary.of(gaps).to_json()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
