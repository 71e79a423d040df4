"""An `AsyncEngine` under load: latency, goodput and refusals against the arrivals.

First a closed loop that keeps every row busy measures the capacity. Then requests arrive at random,
at multiples of it. The load and its consumers are tasks of one event loop in this process.

The open loop sends each request at its scheduled time, however many are unanswered, and measures
from that time: a service that stalls cannot delay the requests that would show it (coordinated
omission, Tene 2013, "How NOT to Measure Latency").
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import Any, Literal, get_args

from ...profiling.device_state import watch
from ...profiling.stats import Summary
from ..config import EngineConfig
from ..engine.engine import Engine
from ..errors import DeadlineUnreachableError, OverloadedError, StepgraphError
from ..service.async_engine import AsyncEngine
from ..service.service_config import ServiceConfig
from .benchmark_run import BenchmarkRun, resolve_engine
from .results import describe_engine
from .workload import greedy, random_prompts

NUM_PROMPTS = 256
"""Different prompts; then they repeat."""
SWITCH_INTERVAL = 1e-4
"""Of the interpreter lock, in seconds: what `stepgraph serve` sets."""
SLO_FACTOR = 4.0
"""Objectives that are not given: times the p90 of TTFT, and the p99 of ITL, of the closed loop.
Several prompts may be prefilled in one gap."""
DRAIN_SECONDS = 20.0
"""How long to wait for requests after the last arrival."""
LEAST_SECONDS = 1e-9
"""The deadline of a request that is sent after it: the service refuses it."""
MAX_ERROR_CHARS = 300
MAX_LAG_MS = 5.0
"""A generator whose 99th percentile of lag is above this fell behind its own schedule."""
WARM_FRACTION = 0.2
"""Part of a closed loop that is not counted: its rows fill up."""

Status = Literal["completed", "shed", "missed", "failed", "unfinished"]


def arrival_times(rate: float, seconds: float, seed: int) -> list[float]:
    """Return the arrivals of a seeded Poisson process, in seconds from the start, in order.

    `rate` is the mean per second. At least one request arrives, at the start if no other does.
    """
    generator = random.Random(f"{rate!r} {seed}")
    times: list[float] = []
    now = generator.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += generator.expovariate(rate)
    return times or [0.0]


@dataclass(slots=True)
class Outcome:
    """What became of a request. Times are from `time.perf_counter_ns`."""

    scheduled_ns: int
    sent_ns: int = 0
    """When its client began to send it."""
    token_ns: list[int] = field(default_factory=list)
    """When the client received each token."""
    status: Status = "unfinished"
    """`shed`: refused; `missed`: ended by its deadline; `failed`: ended by an error."""
    error: str | None = None

    @property
    def ttft_ms(self) -> float | None:
        """From the scheduled arrival to the first token; None without a token."""
        return (self.token_ns[0] - self.scheduled_ns) / 1e6 if self.token_ns else None

    @property
    def itl_ms(self) -> list[float]:
        """The gaps between tokens, 0 between tokens that arrive together."""
        return [(after - before) / 1e6 for before, after in pairwise(self.token_ns)]

    @property
    def lag_ms(self) -> float:
        """How late it was sent."""
        return (self.sent_ns - self.scheduled_ns) / 1e6

    def is_good(self, slo_ttft_ms: float, slo_itl_ms: float) -> bool:
        """Whether it completed, and its first token and every gap met the objective."""
        return (
            self.status == "completed"
            and self.ttft_ms is not None
            and self.ttft_ms <= slo_ttft_ms
            and max(self.itl_ms, default=0.0) <= slo_itl_ms
        )


Send = Callable[[int, Outcome], Awaitable[None]]
"""Sends the request of a number and fills in `token_ns`, `status` and `error`."""


async def open_loop(
    send: Send, arrivals: Sequence[float], *, drain_seconds: float
) -> list[Outcome]:
    """Send a request at each arrival, in seconds from now; return what became of them.

    Requests that are unanswered `drain_seconds` after the last arrival are cancelled, and stay
    `unfinished`.
    """
    start_ns = time.perf_counter_ns()
    outcomes: list[Outcome] = []
    tasks: list[asyncio.Task[None]] = []
    for number, at in enumerate(arrivals):
        scheduled_ns = start_ns + int(at * 1e9)
        await asyncio.sleep(max(scheduled_ns - time.perf_counter_ns(), 0) / 1e9)
        outcomes.append(Outcome(scheduled_ns))
        tasks.append(asyncio.create_task(_send(send, number, outcomes[-1])))
    await _finish(tasks, drain_seconds)
    return outcomes


async def closed_loop(
    send: Send, *, concurrency: int, seconds: float
) -> tuple[float, list[Outcome]]:
    """Keep `concurrency` requests in the service for some seconds.

    Returns the tokens that it delivered per second after the first part of the run, and what became
    of the requests; those at the end are `unfinished`.
    """
    numbers = count()
    outcomes: list[Outcome] = []
    start_ns = time.perf_counter_ns()
    end_ns = start_ns + int(seconds * 1e9)

    async def work() -> None:
        while time.perf_counter_ns() < end_ns:
            outcomes.append(Outcome(time.perf_counter_ns()))
            await _send(send, next(numbers), outcomes[-1])

    await _finish([asyncio.create_task(work()) for _ in range(concurrency)], seconds)
    first_ns = start_ns + int(WARM_FRACTION * seconds * 1e9)
    tokens = sum(first_ns <= at < end_ns for outcome in outcomes for at in outcome.token_ns)
    return tokens / ((end_ns - first_ns) / 1e9), outcomes


async def _send(send: Send, number: int, outcome: Outcome) -> None:
    outcome.sent_ns = time.perf_counter_ns()
    await send(number, outcome)


async def _finish(tasks: Sequence[asyncio.Task[None]], seconds: float) -> None:
    """Cancel the tasks that do not end in time."""
    _, running = await asyncio.wait(tasks, timeout=seconds)
    for task in running:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def summarize(
    outcomes: Sequence[Outcome], *, seconds: float, slo_ttft_ms: float, slo_itl_ms: float
) -> dict[str, Any]:
    """Return counts, latencies in ms and goodput of an open loop, for the JSON.

    `outcomes` are of all requests, at least one, which arrived over some `seconds`.
    """

    def summary(samples: Sequence[float]) -> dict[str, Any] | None:
        return Summary.of(samples).to_json() if samples else None

    statuses = Counter(outcome.status for outcome in outcomes)
    good = sum(outcome.is_good(slo_ttft_ms, slo_itl_ms) for outcome in outcomes)
    lag = Summary.of(outcome.lag_ms for outcome in outcomes)
    errors = (outcome.error for outcome in outcomes if outcome.error is not None)
    return {
        "requests": len(outcomes),
        **{name: statuses[name] for name in get_args(Status)},
        "good": good,
        "goodput": good / seconds,
        "ttft_ms": summary([o.ttft_ms for o in outcomes if o.ttft_ms is not None]),
        "itl_ms": summary([gap for outcome in outcomes for gap in outcome.itl_ms]),
        "lag_ms": lag.to_json(),
        "generator_behind": (lag.max if lag.p99 is None else lag.p99) > MAX_LAG_MS,
        "error": next(errors, None),
    }


@dataclass
class EngineClient:
    """Streams `output_len` greedy tokens after each prompt, in a cycle, from an engine."""

    engine: AsyncEngine
    prompts: Sequence[list[int]]
    output_len: int
    slo_ttft_ms: float | None = None
    """If given, the deadline of first tokens, from the scheduled arrival."""

    async def send(self, number: int, outcome: Outcome) -> None:
        """Run a request; see `Send`."""
        prompt = self.prompts[number % len(self.prompts)]
        reason = seconds = None
        if self.slo_ttft_ms is not None:
            late_ms = (time.perf_counter_ns() - outcome.scheduled_ns) / 1e6
            seconds = max((self.slo_ttft_ms - late_ms) / 1e3, LEAST_SECONDS)
        try:
            async with self.engine.stream(
                prompt, greedy(self.output_len), first_token_deadline=seconds
            ) as stream:
                async for delta in stream:
                    outcome.token_ns += [time.perf_counter_ns()] * len(delta.token_ids)
                    reason = delta.finish_reason
        except (OverloadedError, DeadlineUnreachableError):
            outcome.status = "shed"
        except StepgraphError as error:
            outcome.status, outcome.error = "failed", f"{error!s:.{MAX_ERROR_CHARS}}"
        else:
            outcome.status = "missed" if reason == "deadline" else "completed"


def measure(run: BenchmarkRun) -> None:
    """Measure each case at each rate, and write the document after each."""
    options = run.options
    entries = run.document["serve"] = []
    engines = ((kind.model, config) for kind in run.kinds for config in kind.configs)
    for (model, config), rows, input_len, output_len, max_itl_ms in itertools.product(
        engines,
        options.batch_size,
        options.input_len,
        options.output_len,
        options.max_itl_ms or [None],
    ):
        config = replace(
            config,
            freeze_gc=True,
            max_num_seqs=rows,
            max_model_len=input_len + output_len,
            max_itl_ms=max_itl_ms,
        )
        resolve_engine(model, config)  # refuses before weights are read
        sizes = {"batch_size": rows, "input_len": input_len, "output_len": output_len}
        for entry in _measure_load(run, model, config, sizes | {"max_itl_ms": max_itl_ms}):
            entries.append(entry)
            run.write()


def _measure_load(
    run: BenchmarkRun, model: str, config: EngineConfig, case: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield an entry for each rate."""
    options, seconds, output_len = run.options, run.options.duration, case["output_len"]
    engines: list[Engine] = []

    def start() -> Engine:
        engines.append(run.start(model, config, "requests arrive at random"))
        return engines[-1]

    with ExitStack() as stack:
        runner = stack.enter_context(asyncio.Runner())
        stack.callback(sys.setswitchinterval, sys.getswitchinterval())
        service = AsyncEngine(start, ServiceConfig(switch_interval=SWITCH_INTERVAL))
        stack.enter_context(service)
        (engine,) = engines
        prompts = random_prompts(engine.model_config, NUM_PROMPTS, case["input_len"], options.seed)
        client = EngineClient(service, prompts, output_len)
        run.say("capacity")
        tokens, closed = runner.run(
            closed_loop(client.send, concurrency=case["batch_size"], seconds=seconds)
        )
        if not tokens:
            errors = (outcome.error for outcome in closed if outcome.error)
            raise StepgraphError(next(errors, "no request got a token"))
        capacity = tokens / output_len
        first = Summary.of(o.ttft_ms for o in closed if o.ttft_ms is not None)
        gaps = Summary.of(gap for outcome in closed for gap in outcome.itl_ms)
        slo = {
            "slo_ttft_ms": options.slo_ttft or SLO_FACTOR * (first.p90 or first.max),
            "slo_itl_ms": options.slo_itl or SLO_FACTOR * (gaps.p99 or gaps.max),
        }
        client.slo_ttft_ms = slo["slo_ttft_ms"]
        for fraction in options.rates:
            rate = fraction * capacity
            run.say(f"{rate:.2f} requests/s ({fraction:g} of capacity)")
            times = arrival_times(rate, seconds, options.seed)
            read_again = watch(run.device)
            outcomes = runner.run(open_loop(client.send, times, drain_seconds=DRAIN_SECONDS))
            yield {
                **describe_engine(engine, model),
                **case,
                "capacity": capacity,
                "fraction": fraction,
                "rate": rate,
                "seconds": seconds,
                **slo,
                **summarize(outcomes, seconds=seconds, **slo),
                "device_state": read_again(),
            }
