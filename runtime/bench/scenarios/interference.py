"""Prompts arrive while other requests decode: the tail of the inter-token latency.

Rows decode steadily, and every ten steps one long prompt arrives, decodes a few tokens and leaves.
Prompts are random tokens, decoded greedily; the prefix cache of the engine should be off.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ....graphs.buckets import Buckets
from ....profiling.stats import Summary
from ....profiling.timeline import StepRecord
from ...engine.engine import Engine
from ...engine.request_output import RequestOutput
from ..benchmark_run import BenchmarkRun, ModelKind, StepMode
from ..step_watch import decode_roofline, steps_in_flight
from ..workload import abort_all, greedy, random_prompts

__all__ = ["InterferenceCase", "measure_interference", "run_interference"]

ARRIVAL_STEPS = 10
"""Steps between two long prompts."""

STEADY_INPUT = 32
"""Prompt tokens of the rows that decode steadily."""

ARRIVING_OUTPUT = 4
"""Tokens that a long prompt decodes before it leaves."""

SETTLING_STEPS = 30
"""Steps of the steady rows alone, before the first long prompt; they count as decode steps."""

EXTRA_ROWS = 4
"""Rows for the long prompts."""

TOLERANCE = 1.1
"""The 99th percentile of the gaps should be within so many times a decode step and one chunk."""

POSITIONS = 256
"""Chunks that begin within so many positions are of one kind."""

AUTOMATIC_BUDGET = 8.0
"""The default budget, in decode steps."""

LEAST_CHUNKS = 3
"""Chunks of one kind whose median counts."""


@dataclass(frozen=True, slots=True)
class InterferenceCase:
    """`batch_size` rows decode for `steps` steps while prompts of `input_len` tokens arrive."""

    batch_size: int
    input_len: int
    steps: int

    @property
    def steady_output(self) -> int:
        """The most tokens of a steady row."""
        prefill = self.batch_size * STEADY_INPUT  # a token a step at the very worst
        return SETTLING_STEPS + self.steps + prefill + 2

    @property
    def max_num_seqs(self) -> int:
        """Rows that the engine needs."""
        return self.batch_size + EXTRA_ROWS

    @property
    def longest_sequence(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return max(STEADY_INPUT + self.steady_output, self.input_len + ARRIVING_OUTPUT)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Time that prefill steps of one bucket, at about the same positions, add to a decode step."""

    start: int
    """First position, rounded down to a multiple of `POSITIONS`."""
    bucket: int
    """Tokens, padding included."""
    tokens: float
    """The median, without padding."""
    n: int
    ms: float
    """The median."""


def chunk_ms(chunks: Sequence[Chunks]) -> float:
    """Return the time that a chunk adds to a decode step, of the kind that adds the most."""
    kinds = [c.ms for c in chunks if c.n >= LEAST_CHUNKS]
    return max(kinds) if kinds else statistics.median([c.ms for c in chunks] or [0.0])


def measure_interference(
    engine: Engine, case: InterferenceCase, *, seed: int, bandwidth: float
) -> dict[str, Any]:
    """Run a case on an idle engine with `case.max_num_seqs` rows.

    Returns the fields of an entry of `interference` in the JSON that depend on the run.

    Raises:
        RequestError: the sequences do not fit the engine.
    """
    config = engine.model_config
    steady_prompts = random_prompts(config, case.batch_size, STEADY_INPUT, seed)
    num_arrivals = -(-case.steps // ARRIVAL_STEPS)
    arriving = random_prompts(config, num_arrivals, case.input_len, seed + 1)
    lag = steps_in_flight(engine)
    params = greedy(case.steady_output)
    steady = [engine.add_request(p, params, priority=-1) for p in steady_prompts]
    latest: dict[str, RequestOutput] = {}

    def step() -> None:
        latest.update((output.request_id, output) for output in engine.step())

    while not all(request_id in latest for request_id in steady):
        step()
    for _ in range(lag):
        step()
    engine.timeline().clear()
    first = {request_id: len(latest[request_id].token_ids) + lag for request_id in steady}
    for _ in range(SETTLING_STEPS):
        step()
    ids: list[str] = []
    for index in range(case.steps):
        if index % ARRIVAL_STEPS == 0:
            ids.append(engine.add_request(arriving[len(ids)], greedy(ARRIVING_OUTPUT)))
        step()
    records = engine.timeline().records()
    for _ in range(lag):
        step()
    # Gap i of a steady row is the one that ends with the token of step i.
    gaps = [
        _itl(latest[request_id])[first[request_id] - 1 :][: len(records)] for request_id in steady
    ]
    abort_all(engine, [*steady, *ids])
    decode_ms, chunks = _chunks(gaps[0], records, case, engine.config.token_buckets)
    timings = [latest[request_id].timing for request_id in ids if request_id in latest]
    itl = Summary.of(max(gap) for gap in zip(*(row[SETTLING_STEPS:] for row in gaps), strict=True))
    ttft_ms = [timing.ttft_ms for timing in timings if timing is not None]
    decode = Summary.of(decode_ms)
    contexts = [STEADY_INPUT + n + len(records) // 2 for n in first.values()]
    bound_ms = TOLERANCE * (decode.p50 + chunk_ms(chunks))
    return {
        "arrival_steps": ARRIVAL_STEPS,
        "arrivals": len(ids),
        "first_tokens": len(ttft_ms),
        "itl_ms": itl.to_json(),
        "decode_step_ms": decode.to_json(),
        "roofline": decode_roofline(engine, contexts, bandwidth).to_json(decode.p50 / 1e3),
        "chunks": [asdict(kind) for kind in chunks],
        "chunk_ms": chunk_ms(chunks),
        "bound_ms": bound_ms,
        "p99_within_bound": None if itl.p99 is None else itl.p99 <= bound_ms,
        "ttft_ms": Summary.of(ttft_ms).to_json() if ttft_ms else None,
    }


def _chunks(
    step_ms: Sequence[float],
    records: Sequence[StepRecord],
    case: InterferenceCase,
    buckets: Buckets,
) -> tuple[list[float], list[Chunks]]:
    """Return the times of decode steps, and the time that chunks added to them, by kind."""
    steps = list(zip(step_ms, records, strict=True))
    decode_ms = [ms for ms, r in steps if r.rows == case.batch_size and not r.prefill_tokens]
    decode = statistics.median(decode_ms)
    added: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
    done = 0  # prompts are prefilled one after the other, and all are equally long
    for ms, record in steps:
        if record.prefill_tokens:
            bucket = buckets.fit(record.prefill_tokens)
            assert bucket is not None
            start = done % case.input_len // POSITIONS * POSITIONS
            added[start, bucket].append((record.prefill_tokens, ms - decode))
            done += record.prefill_tokens
    return decode_ms, [
        Chunks(
            start,
            bucket,
            statistics.median(tokens for tokens, _ in chunks),
            len(chunks),
            statistics.median(ms for _, ms in chunks),
        )
        for (start, bucket), chunks in sorted(added.items())
    ]


def _itl(output: RequestOutput) -> list[float]:
    assert output.timing is not None, "it has a token"
    return output.timing.itl_ms


def run_interference(
    run: BenchmarkRun, kind: ModelKind, mode: StepMode
) -> Iterator[dict[str, Any]]:
    """Yield an entry without a budget, and one for each budget, of each point of the grid.

    Unless budgets are given there is one, of `AUTOMATIC_BUDGET` decode steps.
    """
    options = run.options
    for input_len, rows in itertools.product(options.input_len, options.batch_size):
        case = InterferenceCase(rows, input_len, options.num_steps)
        measure = partial(
            measure_interference, case=case, seed=options.seed, bandwidth=run.bandwidth
        )
        budgets: list[float | None] = [None, *(options.max_itl_ms or ())]
        for max_itl_ms in budgets:
            config = run.config(
                kind,
                mode,
                max_num_seqs=case.max_num_seqs,
                buckets=tuple(range(rows, rows + 3)),  # no step is padded to a far larger bucket
                max_model_len=case.longest_sequence,
                max_itl_ms=max_itl_ms,
            )
            entry = run.measure_budgeted(kind, config, asdict(case), measure)
            if max_itl_ms is None and not options.max_itl_ms:
                budgets.append(round(AUTOMATIC_BUDGET * entry["decode_step_ms"]["p50"], 2))
            automatic = max_itl_ms is not None and not options.max_itl_ms
            yield entry | {"automatic_budget": automatic}
