"""Prompts arrive while other requests decode: the tail of the inter-token latency.

Rows decode steadily, and every ten steps one long prompt arrives, decodes a few tokens and leaves.
Prompts are random tokens, decoded greedily; the prefix cache of the engine should be off.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ....profiling.device_state import watch
from ....profiling.stats import Summary
from ...engine.engine import Engine
from ...engine.request_output import RequestOutput
from ..benchmark_run import BenchmarkRun, ModelKind, StepMode
from ..results import describe_engine
from ..workload import abort_all, decode_roofline, greedy, random_prompts, steps_in_flight

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
AUTOMATIC_BUDGET = 8.0
"""The default budget, in decode steps."""


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
    steps = list(zip(gaps[0], records, strict=True))
    decode = Summary.of(ms for ms, r in steps if r.rows == case.batch_size and not r.prefill_tokens)
    prefill_ms = [ms for ms, r in steps if r.prefill_tokens]
    timings = [latest[request_id].timing for request_id in ids if request_id in latest]
    itl = Summary.of(max(gap) for gap in zip(*(row[SETTLING_STEPS:] for row in gaps), strict=True))
    ttft_ms = [timing.ttft_ms for timing in timings if timing is not None]
    contexts = [STEADY_INPUT + n + len(records) // 2 for n in first.values()]
    return {
        "arrivals": len(ids),
        "first_tokens": len(ttft_ms),
        "itl_ms": itl.to_json(),
        "decode_step_ms": decode.to_json(),
        "prefill_step_ms": Summary.of(prefill_ms).to_json() if prefill_ms else None,
        "chunk_tokens": Summary.of(r.prefill_tokens for r in records if r.prefill_tokens).to_json(),
        "roofline": decode_roofline(engine, contexts, bandwidth, decode.p50 / 1e3),
        "ttft_ms": Summary.of(ttft_ms).to_json() if ttft_ms else None,
    }


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
            budget = "no budget" if max_itl_ms is None else f"{max_itl_ms:g} ms"
            what = f"{rows} rows, prompts of {input_len}, {budget}"
            with run.start(kind, config, what) as engine:
                read_again = watch(run.monitor)
                measured = measure_interference(
                    engine, case, seed=options.seed, bandwidth=run.bandwidth
                )
                yield {
                    **describe_engine(engine, kind.model),
                    "max_itl_ms": max_itl_ms,
                    "automatic_budget": max_itl_ms is not None and not options.max_itl_ms,
                    "step_budget": engine.stats()["step_budget"],
                    **asdict(case),
                    **measured,
                    "device_state": read_again(),
                }
            if max_itl_ms is None and not options.max_itl_ms:
                budgets.append(round(AUTOMATIC_BUDGET * measured["decode_step_ms"]["p50"], 2))
