"""An `AsyncEngine` under open-loop load: latency, goodput and refusals against the arrivals.

First a closed loop that keeps every row busy measures the capacity. Then requests arrive at random,
at multiples of it. The load and its consumers are tasks of one event loop in this process.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from ....profiling.device_state import watch
from ....profiling.stats import Summary
from ...config import EngineConfig
from ...engine.engine import Engine
from ...errors import StepgraphError
from ...service.async_engine import AsyncEngine
from ...service.service_config import ServiceConfig
from ..benchmark_run import BenchmarkRun, ModelKind, StepMode, resolve_engine
from ..load import EngineClient, Outcome, arrival_times, closed_loop, open_loop, summarize
from ..results import describe_engine
from ..workload import random_prompts

__all__ = ["measure"]

NUM_PROMPTS = 256
"""Different prompts; then they repeat."""
SWITCH_INTERVAL = 1e-4
"""Of the interpreter lock, in seconds: what `stepgraph serve` sets."""
SLO_FACTOR = 4.0
"""Objectives that are not given: times the p90 of TTFT, and the p99 of ITL, of the closed loop.
Several prompts may be prefilled in one gap."""
DRAIN_SECONDS = 20.0
"""After the last arrival requests are waited for so long."""


@dataclass(frozen=True, slots=True)
class ServeCase:
    """Requests of `input_len` tokens, `output_len` are decoded, in `batch_size` rows.

    `max_itl_ms` is the latency budget of the engine; None for none.
    """

    batch_size: int
    input_len: int
    output_len: int
    max_itl_ms: float | None


def choose_slo(
    closed: Sequence[Outcome], ttft_ms: float | None, itl_ms: float | None
) -> dict[str, float]:
    """Return the objective in ms: what was given, else multiples of what a closed loop reached."""
    if ttft_ms is None:
        first = Summary.of(o.ttft_ms for o in closed if o.ttft_ms is not None)
        ttft_ms = SLO_FACTOR * (first.max if first.p90 is None else first.p90)
    if itl_ms is None:
        gaps = Summary.of(gap for outcome in closed for gap in outcome.itl_ms)
        itl_ms = SLO_FACTOR * (gaps.max if gaps.p99 is None else gaps.p99)
    return {"slo_ttft_ms": ttft_ms, "slo_itl_ms": itl_ms}


def measure(run: BenchmarkRun, kind: ModelKind, mode: StepMode) -> Iterator[dict[str, Any]]:
    """Yield an entry for each rate of each case."""
    options = run.options
    for sizes in itertools.product(
        options.batch_size, options.input_len, options.output_len, options.max_itl_ms or (None,)
    ):
        case = ServeCase(*sizes)
        config = run.config(
            kind,
            mode,
            freeze_gc=True,
            max_num_seqs=case.batch_size,
            max_model_len=case.input_len + case.output_len,
            max_itl_ms=case.max_itl_ms,
        )
        resolve_engine(kind.model, config)  # refuses before weights are read
        yield from _measure_load(run, kind, config, case)


def _measure_load(
    run: BenchmarkRun, kind: ModelKind, config: EngineConfig, case: ServeCase
) -> Iterator[dict[str, Any]]:
    options, seconds = run.options, run.options.duration
    engines: list[Engine] = []

    def start() -> Engine:
        engines.append(run.start(kind, config, "requests arrive at random"))
        return engines[-1]

    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        service = AsyncEngine(start, ServiceConfig(switch_interval=SWITCH_INTERVAL))
        stack.enter_context(service)
        (engine,) = engines
        prompts = random_prompts(engine.model_config, NUM_PROMPTS, case.input_len, options.seed)
        client = EngineClient(service, prompts, case.output_len)
        run.say("capacity")
        tokens, closed = runner.run(
            closed_loop(client.send, concurrency=case.batch_size, seconds=seconds)
        )
        if not tokens:
            errors = (outcome.error for outcome in closed if outcome.error)
            raise StepgraphError(next(errors, "no request got a token"))
        capacity = tokens / case.output_len
        slo = choose_slo(closed, options.slo_ttft, options.slo_itl)
        client.slo_ttft_ms = slo["slo_ttft_ms"]
        for fraction in options.rates:
            rate = fraction * capacity
            run.say(f"{rate:.2f} requests/s ({fraction:g} of capacity)")
            times = arrival_times(rate, seconds, options.seed)
            read_again = watch(run.monitor)
            outcomes = runner.run(open_loop(client.send, times, drain_seconds=DRAIN_SECONDS))
            yield {
                **describe_engine(engine, kind.model),
                **asdict(case),
                "capacity": capacity,
                "fraction": fraction,
                "rate": rate,
                "seconds": seconds,
                **slo,
                **summarize(outcomes, seconds=seconds, **slo),
                "device_state": read_again(),
            }
