"""Requests arrive and leave at random, some before their end.

Prompts are random tokens, decoded greedily; the prefix cache of the engine should be off.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ....profiling.device_state import watch
from ....profiling.stats import Summary
from ....profiling.timeline import StepRecord
from ...engine.engine import Engine
from ...engine.request_output import RequestOutput
from ...models.config import ModelConfig
from ..benchmark_run import BenchmarkRun, ModelKind, StepMode
from ..results.result_document import describe_budget, describe_engine
from ..step_watch import MeasuredStep, StepWatch, mean_roofline
from ..workload import abort_all, greedy, random_prompts

__all__ = ["ChurnCase", "measure_churn", "run_churn"]

OCCUPANCY = 0.8
"""Share of the rows that decode on average if prompts took no time."""

ABORTED = 0.1
"""Share of the requests that are aborted."""


@dataclass(frozen=True, slots=True)
class ChurnCase:
    """Requests arrive at `batch_size` rows for `num_steps` steps.

    Prompts have from a quarter of `input_len` tokens to all; outputs `output_len` on average and
    four times that at most, distributed exponentially.
    """

    model: str
    batch_size: int
    input_len: int
    output_len: int
    num_steps: int

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return self.input_len + 4 * self.output_len


@dataclass(frozen=True, slots=True)
class Churn:
    """Observations; times in milliseconds."""

    case: ChurnCase
    itl_ms: list[float]
    """All gaps of all requests."""
    ttft_ms: list[float]
    step_ms: list[float]
    num_requests: int
    num_aborted: int
    """Before their end."""
    num_preemptions: int
    records: list[StepRecord]
    decode_steps: list[MeasuredStep]
    """Those without prefill."""

    @property
    def occupancy(self) -> float:
        """Share of the rows that decoded in a step, on average."""
        return statistics.fmean(r.rows for r in self.records) / self.case.batch_size

    @property
    def padding(self) -> float:
        """Share of padding in the rows of decode steps."""
        decoding = [r for r in self.records if r.rows]
        padded_rows = sum(r.bucket for r in decoding)
        return 1 - sum(r.rows for r in decoding) / padded_rows if padded_rows else 0.0


def measure_churn(engine: Engine, case: ChurnCase, *, seed: int) -> Churn:
    """Run a case on an idle engine with `batch_size` rows.

    Raises:
        RequestError: the sequences do not fit the engine.
    """
    schedule = _schedule(engine.model_config, case, seed)
    num_requests = num_aborted = 0
    sooner = 0.0  # steps by which arrivals are brought forward because no request was open
    leaving: dict[str, int] = {}  # request -> the tokens after which it is aborted
    open_ids: set[str] = set()
    latest: dict[str, RequestOutput] = {}
    step_ms: list[float] = []
    preemptions = engine.stats()["preemptions"]
    watch = StepWatch(engine)
    while len(step_ms) < case.num_steps and (num_requests < len(schedule) or open_ids):
        if not open_ids:
            sooner = max(sooner, schedule[num_requests].step - len(step_ms))
        while num_requests < len(schedule) and schedule[num_requests].step <= len(step_ms) + sooner:
            arrival = schedule[num_requests]
            num_requests += 1
            request_id = watch.add_request(arrival.prompt, greedy(arrival.output_len))
            open_ids.add(request_id)
            if arrival.leaves_after is not None:
                leaving[request_id] = arrival.leaves_after
        started = time.perf_counter()
        outputs = watch.step()
        step_ms.append(1e3 * (time.perf_counter() - started))
        for output in outputs:
            request_id = output.request_id
            latest[request_id] = output
            if output.finished:
                open_ids.discard(request_id)
            elif request_id in leaving and len(output.token_ids) >= leaving[request_id]:
                del leaving[request_id]
                num_aborted += engine.abort(request_id)
    records, decode_steps = engine.timeline().records(), watch.decode_steps()
    preemptions = engine.stats()["preemptions"] - preemptions
    abort_all(engine, sorted(open_ids))
    timings = [output.timing for output in latest.values() if output.timing is not None]
    return Churn(
        case=case,
        itl_ms=[gap for timing in timings for gap in timing.itl_ms],
        ttft_ms=[timing.ttft_ms for timing in timings],
        step_ms=step_ms,
        num_requests=num_requests,
        num_aborted=num_aborted,
        num_preemptions=preemptions,
        records=records,
        decode_steps=decode_steps,
    )


@dataclass(frozen=True, slots=True)
class _Arrival:
    step: float
    prompt: list[int]
    output_len: int
    leaves_after: int | None
    """Tokens after which it is aborted."""


def _schedule(config: ModelConfig, case: ChurnCase, seed: int) -> list[_Arrival]:
    """Return the arrivals, a Poisson process; the same for the same seed."""
    rng = random.Random(seed)
    between = case.output_len / (OCCUPANCY * case.batch_size)  # steps
    schedule: list[_Arrival] = []
    step = 0.0
    while step < case.num_steps:
        output_len = min(1 + round(rng.expovariate(1 / case.output_len)), 4 * case.output_len)
        prompt_len = rng.randint(-(-case.input_len // 4), case.input_len)
        (prompt,) = random_prompts(config, 1, prompt_len, rng.getrandbits(32))
        leaves = output_len > 1 and rng.random() < ABORTED
        leaves_after = rng.randrange(1, output_len) if leaves else None
        schedule.append(_Arrival(step, prompt, output_len, leaves_after))
        step += rng.expovariate(1 / between)
    return schedule


def to_json(
    engine: Engine, measured: Churn, max_itl_ms: float | None, bandwidth: float
) -> dict[str, Any]:
    """Return an entry of `churn` in the JSON. `bandwidth` is in bytes per second."""
    case = measured.case
    return {
        **describe_engine(engine, case.model),
        **describe_budget(engine, max_itl_ms),
        "batch_size": case.batch_size,
        "input_len": case.input_len,
        "output_len": case.output_len,
        "steps": case.num_steps,
        "requests": measured.num_requests,
        "aborted": measured.num_aborted,
        "preemptions": measured.num_preemptions,
        "occupancy": measured.occupancy,
        "padding": measured.padding,
        "prefill_tokens": sum(record.prefill_tokens for record in measured.records),
        "itl_ms": Summary.of(measured.itl_ms).to_json() if measured.itl_ms else None,
        "ttft_ms": Summary.of(measured.ttft_ms).to_json() if measured.ttft_ms else None,
        "step_ms": Summary.of(measured.step_ms).to_json(),
        "roofline": mean_roofline(engine, measured.decode_steps, bandwidth),
    }


def run_churn(run: BenchmarkRun, kind: ModelKind, mode: StepMode) -> Iterator[dict[str, Any]]:
    """Yield an entry for each point of the grid and each budget."""
    options = run.options
    for output_len, input_len, rows in itertools.product(
        options.output_len, options.input_len, options.batch_size
    ):
        case = ChurnCase(kind.model, rows, input_len, output_len, options.num_steps)
        for max_itl_ms in options.max_itl_ms or (None,):
            config = run.config(
                kind,
                mode,
                max_num_seqs=rows,
                max_model_len=case.longest_sequence,
                max_itl_ms=max_itl_ms,
            )
            with run.start_budgeted(kind, config, input_len, rows) as engine:
                read_again = watch(run.monitor)
                with run.steps.timed(engine):
                    measured = measure_churn(engine, case, seed=options.seed)
                state = read_again()
                entry = to_json(engine, measured, max_itl_ms, run.bandwidth)
            run.steps.add(entry, measured.records)
            yield entry | {"device_state": state}
