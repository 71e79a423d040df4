"""A service under open-loop load: latency, goodput and refusals against the rate of arrivals.

Sides are the engine in this process, `stepgraph serve`, and servers of other runtimes. First the
capacity of each is measured, by a closed loop that keeps every row busy. Then requests arrive at
multiples of it, at each rate in all sides in turn, in reversed order at every second rate.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ....profiling.device_state import watch
from ....profiling.stats import Summary
from ...config import EngineConfig
from ...engine.engine import Engine
from ...kernels import resolve_threads
from ...loading.loader import resolve_source
from ...service.async_engine import AsyncEngine
from ...service.service_config import ServiceConfig
from ..benchmark_run import BenchmarkRun, ModelKind, StepMode, resolve_engine
from ..load.arrivals import arrival_times
from ..load.clients import EngineClient, HttpClient
from ..load.generator import Outcome, closed_loop, open_loop, summarize
from ..load.servers import (
    TEXT_TOKENS,
    Server,
    engine_command,
    peer_command,
    peer_version,
    save_text_tokenizer,
)
from ..results.result_document import describe_engine, num_cpus
from ..runtimes.peers import (
    SERVER_MODULES,
    PeerError,
    PeerSpec,
    choose_peers,
    environment_of,
    save_preset,
)
from ..workload import random_prompts

__all__ = ["run_serve"]

NUM_PROMPTS = 256
"""Different prompts; they repeat after so many requests."""
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

    `max_itl_ms` is the latency budget of our services; None for none.
    """

    batch_size: int
    input_len: int
    output_len: int
    max_itl_ms: float | None

    @property
    def tokens(self) -> int:
        """Tokens of a sequence, prompt and output."""
        return self.input_len + self.output_len


@dataclass(slots=True)
class Side:
    """A service that is measured."""

    runtime: str
    transport: str
    version: str | None
    client: EngineClient | HttpClient
    capacity: float = 0.0
    """Requests per second of the closed loop."""
    closed: list[Outcome] = field(default_factory=list)
    """Requests of the closed loop."""

    def __str__(self) -> str:
        return f"{self.runtime}, {self.transport}"


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
    specs = choose_peers(options.peer, run.device, SERVER_MODULES)
    for sizes in itertools.product(
        options.batch_size, options.input_len, options.output_len, options.max_itl_ms or (None,)
    ):
        case = ServeCase(*sizes)
        config = run.config(
            kind,
            mode,
            threads=options.threads,
            freeze_gc=True,
            max_num_seqs=case.batch_size,
            max_model_len=case.tokens,
            max_itl_ms=case.max_itl_ms,
        )
        resolve_engine(kind.model, config)  # refuses before weights are read
        yield from _measure_load(run, kind, config, case, specs)


def _measure_load(
    run: BenchmarkRun,
    kind: ModelKind,
    config: EngineConfig,
    case: ServeCase,
    specs: Sequence[PeerSpec],
) -> Iterator[dict[str, Any]]:
    """Yield an entry for each arrival process, rate and side."""
    options = run.options
    seconds = options.duration
    with ExitStack() as stack:
        source = resolve_source(kind.model)
        checkpoint = source.directory
        if specs and checkpoint is None:
            run.say(f"saving {kind.model} as a checkpoint")
            checkpoint = save_preset(stack, kind.model, config)
            save_text_tokenizer(source.config.vocab_size, checkpoint)
        served = kind if checkpoint is None else kind._replace(model=str(checkpoint))
        runner = stack.enter_context(_new_runner())
        service, engine = _start_engine(stack, run, served, config, "requests arrive at random")
        prompts = random_prompts(engine.model_config, NUM_PROMPTS, case.input_len, options.seed)
        if specs and source.directory is None:
            prompts = [[token % TEXT_TOKENS for token in prompt] for prompt in prompts]
        sides = [Side("stepgraph", "engine", None, EngineClient(service, prompts, case.output_len))]
        if options.http:
            sides.append(_http_side(stack, run, served, config, prompts, case))
        if specs:
            sides += _peer_sides(stack, run, specs, Path(served.model), engine, prompts, case)
        for side in tuple(sides):
            run.say(f"capacity of {side}")
            tokens, side.closed = runner.run(
                closed_loop(side.client.send, concurrency=case.batch_size, seconds=seconds)
            )
            side.capacity = tokens / case.output_len
            if not tokens:
                error = next((o.error for o in side.closed if o.error is not None), "no token")
                if options.peer or side.runtime == "stepgraph":
                    raise PeerError(f"{side}: {error}")
                run.say(f"left out: {side.runtime}: {error}")
                sides.remove(side)
        slo = choose_slo(sides[0].closed, options.slo_ttft, options.slo_itl)
        for side in sides:
            if side.runtime == "stepgraph":
                side.client.slo_ttft_ms = slo["slo_ttft_ms"]
        turns = enumerate(itertools.product(options.arrivals, options.rates))
        for number, (arrivals, fraction) in turns:
            for side in sides[:: 1 if number % 2 == 0 else -1]:
                rate = fraction * side.capacity
                run.say(f"{side}: {arrivals}, {rate:.2f} requests/s ({fraction:g} of capacity)")
                times = arrival_times(arrivals, rate, seconds, options.seed)
                read_again = watch(run.monitor)
                outcomes = runner.run(
                    open_loop(side.client.send, times, drain_seconds=DRAIN_SECONDS)
                )
                yield {
                    **describe_engine(engine, kind.model),
                    **_cores(engine),
                    **asdict(case),
                    "runtime": side.runtime,
                    "transport": side.transport,
                    "version": side.version,
                    "capacity": side.capacity,
                    "arrivals": arrivals,
                    "fraction": fraction,
                    "rate": rate,
                    "seconds": seconds,
                    **slo,
                    **summarize(outcomes, seconds=seconds, **slo),
                    "device_state": read_again(),
                }


def _start_engine(
    stack: ExitStack, run: BenchmarkRun, kind: ModelKind, config: EngineConfig, what: str
) -> tuple[AsyncEngine, Engine]:
    """Start an engine in this process; also return the engine that it runs."""
    engines: list[Engine] = []

    def start() -> Engine:
        engines.append(run.start(kind, config, what))
        return engines[-1]

    stack.callback(sys.setswitchinterval, sys.getswitchinterval())
    service = AsyncEngine(start, ServiceConfig(switch_interval=SWITCH_INTERVAL))
    return stack.enter_context(service), engines[-1]


def _http_side(
    stack: ExitStack,
    run: BenchmarkRun,
    kind: ModelKind,
    config: EngineConfig,
    prompts: Sequence[list[int]],
    case: ServeCase,
) -> Side:
    """Start `stepgraph serve`; prompts are token ids."""
    run.say(f"{kind} in stepgraph serve")
    command = partial(engine_command, kind.model, config)
    server = stack.enter_context(closing(Server("stepgraph", command, environment_of())))
    bodies = [
        _body(kind.model, prompt, case) | {"ignore_eos": True, "return_token_ids": True}
        for prompt in prompts
    ]
    return Side("stepgraph", "http", None, HttpClient(server.host, server.port, bodies))


def _peer_sides(
    stack: ExitStack,
    run: BenchmarkRun,
    specs: Sequence[PeerSpec],
    checkpoint: Path,
    engine: Engine,
    prompts: Sequence[list[int]],
    case: ServeCase,
) -> Iterator[Side]:
    """Start the servers of other runtimes. Without `--peer`, one that fails is left out."""
    dtype = str(engine.config.dtype).removeprefix("torch.")
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise PeerError(f"{checkpoint} has no tokenizer.json, which servers of other runtimes need")
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    for spec in specs:
        run.say(f"{checkpoint} in the server of {spec.name}")
        try:
            command = peer_command(spec, checkpoint, dtype=dtype, tokens=2 * case.tokens)
            env = environment_of(spec.python)
            server = stack.enter_context(closing(Server(spec.name, command, env)))
        except PeerError as error:
            if run.options.peer:
                raise
            run.say(f"left out: {error}")
            continue
        bodies = [_body(str(checkpoint), text, case) for text in texts]
        client = HttpClient(server.host, server.port, bodies)
        yield Side(spec.name, "http", peer_version(spec), client)


def _body(model: str, prompt: str | list[int], case: ServeCase) -> dict[str, Any]:
    pinned = {"temperature": 0.0, "repetition_penalty": 1.0}  # whatever the model's defaults are
    return {"model": model, "prompt": prompt, "max_tokens": case.output_len, **pinned}


def _new_runner() -> asyncio.Runner:
    """Return a runner with the event loop of `stepgraph serve`: uvloop's, where it is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.Runner()
    return asyncio.Runner(loop_factory=uvloop.new_event_loop)


def _cores(engine: Engine) -> dict[str, int]:
    """Return the threads of our engine, and the processors that all share."""
    return {"threads": resolve_threads(engine.config.user.threads), "cpus": num_cpus()}
