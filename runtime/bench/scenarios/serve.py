"""A service under open-loop load: latency, goodput and refusals against the rate of arrivals.

The services are the engine in this process and `stepgraph serve`. First the capacity of each is
measured, by a closed loop that keeps every row busy. Then requests arrive at multiples of it, at
each rate in both in turn, in reversed order at every second rate.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from ....profiling.device_state import watch
from ....profiling.stats import Summary
from ...config import EngineConfig
from ...engine.engine import Engine
from ...service.async_engine import AsyncEngine
from ...service.service_config import ServiceConfig
from ..benchmark_run import BenchmarkRun, ModelKind, StepMode, resolve_engine
from ..load import (
    EngineClient,
    HttpClient,
    Outcome,
    Server,
    arrival_times,
    closed_loop,
    engine_command,
    open_loop,
    summarize,
)
from ..peers import PeerError
from ..results import describe_engine, num_cpus
from ..workload import random_prompts

__all__ = ["run_serve"]

NUM_PROMPTS = 256
"""Different prompts; then they repeat."""
SWITCH_INTERVAL = 1e-4
"""Of the interpreter lock, in seconds: what `stepgraph serve` sets."""
SLO_FACTOR = 4.0
"""Objectives that are not given: times the p90 of TTFT, and the p99 of ITL, of the closed loop of
the engine in this process. Several prompts may be prefilled in one gap."""
DRAIN_SECONDS = 20.0
"""After the last arrival requests are waited for so long."""


@dataclass(frozen=True, slots=True)
class ServeCase:
    """Requests of `input_len` tokens, `output_len` are decoded, in `batch_size` rows.

    `max_itl_ms` is the latency budget of the services; None for none.
    """

    batch_size: int
    input_len: int
    output_len: int
    max_itl_ms: float | None


@dataclass(slots=True)
class Side:
    """A service that is measured."""

    transport: str
    client: EngineClient | HttpClient
    capacity: float = 0.0
    """Requests per second of the closed loop."""
    closed: list[Outcome] = field(default_factory=list)
    """Requests of the closed loop."""


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


def run_serve(run: BenchmarkRun, kind: ModelKind, mode: StepMode) -> Iterator[dict[str, Any]]:
    """Yield an entry for each rate and side of each case."""
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
    """Yield an entry for each rate and side."""
    options = run.options
    seconds = options.duration
    with ExitStack() as stack:
        runner = stack.enter_context(_new_runner())
        service, engine = _start_engine(stack, run, kind, config)
        prompts = random_prompts(engine.model_config, NUM_PROMPTS, case.input_len, options.seed)
        sides = [Side("engine", EngineClient(service, prompts, case.output_len))]
        if options.http:
            run.say(f"{kind} in stepgraph serve")
            command = partial(engine_command, kind.model, config)
            server = stack.enter_context(closing(Server(command)))
            bodies = [_body(kind.model, prompt, case) for prompt in prompts]
            sides.append(Side("http", HttpClient(server.port, bodies)))
        for side in sides:
            run.say(f"capacity, {side.transport}")
            tokens, side.closed = runner.run(
                closed_loop(side.client.send, concurrency=case.batch_size, seconds=seconds)
            )
            side.capacity = tokens / case.output_len
            if not tokens:
                error = next((o.error for o in side.closed if o.error is not None), "no token")
                raise PeerError(f"stepgraph, {side.transport}: {error}")
        slo = choose_slo(sides[0].closed, options.slo_ttft, options.slo_itl)
        for side in sides:
            side.client.slo_ttft_ms = slo["slo_ttft_ms"]
        for number, fraction in enumerate(options.rates):
            for side in sides[:: 1 if number % 2 == 0 else -1]:
                rate = fraction * side.capacity
                run.say(f"{side.transport}: {rate:.2f} requests/s ({fraction:g} of capacity)")
                times = arrival_times(rate, seconds, options.seed)
                read_again = watch(run.monitor)
                outcomes = runner.run(
                    open_loop(side.client.send, times, drain_seconds=DRAIN_SECONDS)
                )
                yield {
                    **describe_engine(engine, kind.model),
                    "threads": engine.config.threads,
                    "cpus": num_cpus(),
                    **asdict(case),
                    "transport": side.transport,
                    "capacity": side.capacity,
                    "fraction": fraction,
                    "rate": rate,
                    "seconds": seconds,
                    **slo,
                    **summarize(outcomes, seconds=seconds, **slo),
                    "device_state": read_again(),
                }


def _start_engine(
    stack: ExitStack, run: BenchmarkRun, kind: ModelKind, config: EngineConfig
) -> tuple[AsyncEngine, Engine]:
    """Start an engine in this process; also return the engine that it runs."""
    engines: list[Engine] = []

    def start() -> Engine:
        engines.append(run.start(kind, config, "requests arrive at random"))
        return engines[-1]

    stack.callback(sys.setswitchinterval, sys.getswitchinterval())
    service = AsyncEngine(start, ServiceConfig(switch_interval=SWITCH_INTERVAL))
    return stack.enter_context(service), engines[-1]


def _body(model: str, prompt: list[int], case: ServeCase) -> dict[str, Any]:
    pinned = {"temperature": 0.0, "repetition_penalty": 1.0, "ignore_eos": True}
    output = {"max_tokens": case.output_len, "return_token_ids": True}
    return {"model": model, "prompt": prompt, **output, **pinned}


def _new_runner() -> asyncio.Runner:
    """Return a runner with the event loop of `stepgraph serve`: uvloop's, where it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)
