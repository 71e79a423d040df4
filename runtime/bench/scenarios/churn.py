"""Requests arrive and leave at random, some before their end.

Prompts are random tokens, decoded greedily; the prefix cache of the engine should be off.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ....profiling.stats import Summary
from ...engine.engine import Engine
from ...engine.request_output import RequestOutput
from ...models.decoder_model import DecoderConfig
from ..benchmark_run import BenchmarkRun, ModelKind, StepMode
from ..step_watch import StepWatch, mean_roofline
from ..workload import abort_all, greedy, random_prompts

__all__ = ["ChurnCase", "measure_churn", "run_churn"]

OCCUPANCY = 0.8
"""Share of the rows that decode on average if prompts took no time."""

ABORTED = 0.1
"""Share of the requests that are aborted."""


@dataclass(frozen=True, slots=True)
class ChurnCase:
    """Requests arrive at `batch_size` rows for `steps` steps.

    Prompts have from a quarter of `input_len` tokens to all; outputs `output_len` on average and
    four times that at most, distributed exponentially.
    """

    batch_size: int
    input_len: int
    output_len: int
    steps: int

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return self.input_len + 4 * self.output_len


def measure_churn(
    engine: Engine, case: ChurnCase, *, seed: int, bandwidth: float
) -> dict[str, Any]:
    """Run a case on an idle engine with `batch_size` rows.

    Returns the fields of an entry of `churn` in the JSON that depend on the run.

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
    while len(step_ms) < case.steps and (num_requests < len(schedule) or open_ids):
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
    itl_ms = [gap for timing in timings for gap in timing.itl_ms]
    ttft_ms = [timing.ttft_ms for timing in timings]
    decoding = [record for record in records if record.rows]
    padded_rows = sum(record.bucket for record in decoding)
    return {
        "requests": num_requests,
        "aborted": num_aborted,
        "preemptions": preemptions,
        "occupancy": statistics.fmean(record.rows for record in records) / case.batch_size,
        "padding": 1 - sum(r.rows for r in decoding) / padded_rows if padded_rows else 0.0,
        "prefill_tokens": sum(record.prefill_tokens for record in records),
        "itl_ms": Summary.of(itl_ms).to_json() if itl_ms else None,
        "ttft_ms": Summary.of(ttft_ms).to_json() if ttft_ms else None,
        "step_ms": Summary.of(step_ms).to_json(),
        "roofline": mean_roofline(engine, decode_steps, bandwidth),
    }


@dataclass(frozen=True, slots=True)
class _Arrival:
    step: float
    prompt: list[int]
    output_len: int
    leaves_after: int | None
    """Tokens after which it is aborted."""


def _schedule(config: DecoderConfig, case: ChurnCase, seed: int) -> list[_Arrival]:
    """Return the arrivals, a Poisson process; the same for the same seed."""
    rng = random.Random(seed)
    between = case.output_len / (OCCUPANCY * case.batch_size)  # steps
    schedule: list[_Arrival] = []
    step = 0.0
    while step < case.steps:
        output_len = min(1 + round(rng.expovariate(1 / case.output_len)), 4 * case.output_len)
        prompt_len = rng.randint(-(-case.input_len // 4), case.input_len)
        (prompt,) = random_prompts(config, 1, prompt_len, rng.getrandbits(32))
        leaves = output_len > 1 and rng.random() < ABORTED
        leaves_after = rng.randrange(1, output_len) if leaves else None
        schedule.append(_Arrival(step, prompt, output_len, leaves_after))
        step += rng.expovariate(1 / between)
    return schedule


def run_churn(run: BenchmarkRun, kind: ModelKind, mode: StepMode) -> Iterator[dict[str, Any]]:
    """Yield an entry for each point of the grid and each budget."""
    options = run.options
    for output_len, input_len, rows, max_itl_ms in itertools.product(
        options.output_len, options.input_len, options.batch_size, options.max_itl_ms or (None,)
    ):
        case = ChurnCase(rows, input_len, output_len, options.num_steps)
        config = run.config(
            kind,
            mode,
            max_num_seqs=rows,
            max_model_len=case.longest_sequence,
            max_itl_ms=max_itl_ms,
        )
        measure = partial(measure_churn, case=case, seed=options.seed, bandwidth=run.bandwidth)
        yield run.measure_budgeted(kind, config, asdict(case), measure)
