"""Decode steps of a whole batch.

A case prefills `batch_size` random prompts of `input_len` tokens and decodes them greedily, until
`output_len` - 1 steps have decoded the whole batch, `num_iters` times. Only those steps count, each
from one set of tokens on the host to the next: plan, commit and the caller's use of the tokens are
included. If a launch has several steps (`steps_per_launch`), the time of a step is that of the
launch divided by them. Prompts that are prefilled first decode alone for a while; that time is not
counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ....profiling.stats import Summary
from ....profiling.timeline import StepRecord
from ...engine.engine import Engine
from ...engine.request_output import RequestOutput
from ...errors import StepgraphError
from ...sampling_params import SamplingParams
from ..instrumentation import instrumentation_to_json
from ..results.document import dtype_names
from ..step_watch import decode_roofline
from ..workload import abort_all, equal_share, greedy, random_prompts, spread

__all__ = ["BenchmarkCase", "CaseRun", "Measurement", "is_reference", "longest_sequence", "to_json"]

SCORED_TOKENS = 32
"""Length of the sequence whose logits two modes are compared on, half of it prefilled."""


@dataclass(frozen=True, slots=True)
class BenchmarkCase:
    """One row of the table."""

    model: str
    batch_size: int
    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Measurement:
    """Observations of a case; times in milliseconds, host time in microseconds."""

    case: BenchmarkCase
    ttft_ms: list[float]
    itl_ms: list[float]
    """Gaps between the tokens of the steps that count; those of one launch arrive together."""
    step_ms: list[float]
    """Of all repetitions, in order."""
    repetition_ms: list[float]
    """The median step of each repetition."""
    host_us: list[float]
    padding: float
    """Share of padding in the rows of its decode steps."""
    token_ids: list[list[int]]
    """The first `output_len` tokens of each prompt, of the first repetition."""
    outputs: list[set[tuple[int, ...]]]
    """The distinct outputs of each prompt over all repetitions."""
    logits: torch.Tensor
    """float32 `[n, vocab_size]` under teacher forcing, compared between modes."""
    records: list[StepRecord]
    """All steps of all repetitions, including prefill."""


def longest_sequence(case: BenchmarkCase, prefill_chunk: int, steps_per_launch: int = 1) -> int:
    """Return the tokens of the longest sequence of a case, prompt and output.

    The first prompt gets a token in each step that prefills the others. Launches of several steps
    continue to the last one that counts, and one more is in flight.
    """
    alone = 1 + -(-case.batch_size * case.input_len // prefill_chunk) + case.batch_size
    spare = 2 * steps_per_launch if steps_per_launch > 1 else 0
    return case.input_len + case.output_len + alone + spare


class CaseRun:
    """A case on an idle engine with at least `batch_size` rows, which is run repeatedly.

    Raises:
        RequestError: when it runs, if the prompts and their output do not fit the engine.
    """

    def __init__(
        self,
        engine: Engine,
        case: BenchmarkCase,
        *,
        seed: int,
        before_step: Callable[[int], None] | None = None,
    ) -> None:
        """Make the prompts. `before_step` is called in repetitions: see `_run`."""
        self.engine = engine
        self.case = case
        self._before_step = before_step
        self.prompts = random_prompts(engine.model_config, case.batch_size, case.input_len, seed)
        config = engine.config
        longest = longest_sequence(case, config.user.prefill_chunk, config.steps_per_launch)
        self._params = greedy(longest - case.input_len)
        self._ttft_ms: list[float] = []
        self._itl_ms: list[float] = []
        self._step_ms: list[list[float]] = []
        self._host_us: list[float] = []
        self._padded_rows = self._used = 0
        self._token_ids: list[list[int]] = []
        self._outputs: list[set[tuple[int, ...]]] = [set() for _ in self.prompts]
        self._records: list[StepRecord] = []

    def warm_up(self) -> None:
        """Run it once without recording."""
        _run(self.engine, self.prompts, self._params, self.case.output_len - 1)

    def repeat(self) -> None:
        """Run it once more."""
        engine, case = self.engine, self.case
        engine.timeline().clear()
        outputs, durations, counted = _run(
            engine, self.prompts, self._params, case.output_len - 1, self._before_step
        )
        self._step_ms.append(durations)
        for output in outputs:
            assert output.timing is not None, "every prompt got a token"
            self._ttft_ms.append(output.timing.ttft_ms)
            self._itl_ms += output.timing.itl_ms[-counted:]
        records = engine.timeline().records()
        self._records += records
        for record in records:
            if record.rows == case.batch_size and not record.prefill_tokens:
                self._host_us.append(record.host_ns / 1e3 / record.steps)
                self._padded_rows, self._used = (
                    self._padded_rows + record.bucket,
                    self._used + record.rows,
                )
        if not self._token_ids:
            self._token_ids = [output.token_ids[: case.output_len] for output in outputs]
        for distinct, output in zip(self._outputs, outputs, strict=True):
            distinct.add(tuple(output.token_ids))

    def result(self) -> Measurement:
        """Return the observations, with the logits of a scored sequence."""
        scored = self.prompts[0][:SCORED_TOKENS]
        return Measurement(
            case=self.case,
            ttft_ms=self._ttft_ms,
            itl_ms=self._itl_ms,
            step_ms=[duration for repetition in self._step_ms for duration in repetition],
            repetition_ms=[statistics.median(repetition) for repetition in self._step_ms],
            host_us=self._host_us,
            padding=1 - self._used / self._padded_rows if self._padded_rows else 0.0,
            token_ids=self._token_ids,
            outputs=self._outputs,
            logits=self.engine.score(scored, (len(scored) + 1) // 2),
            records=self._records,
        )


def _run(
    engine: Engine,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    steps: int,
    before_step: Callable[[int], None] | None = None,
) -> tuple[list[RequestOutput], list[float], int]:
    """Decode the prompts until `steps` steps have decoded all of them and done nothing else.

    `before_step` is called before each of those steps with its number, from 0, and after the last
    one with their count; its time is not counted.

    Raises:
        StepgraphError: the engine did not decode them all at once.

    Returns the outputs, the milliseconds of a step in each launch of those steps, and how many
    steps those launches had.
    """
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    latest: dict[str, RequestOutput] = {}
    durations: list[float] = []
    decoding: set[str] = set()
    counted = 0
    before = time.perf_counter()
    while counted < steps:
        if before_step is not None and len(decoding) == len(ids):
            before_step(counted)
            before = time.perf_counter()
        outputs = engine.step()
        ended = time.perf_counter()
        if not outputs and not engine.has_unfinished():
            raise StepgraphError(
                f"{len(ids)} requests ended before {steps} steps decoded all of them at once: the"
                " cache has too few blocks for all of them; choose a longer --output-len or"
                " --input-len, or fewer rows"
            )
        # Whole: every request got a token by this step, and had one before it.
        if len(decoding) == len(outputs) == len(ids):
            first = outputs[0]
            new = _num_tokens(first) - _num_tokens(latest[first.request_id])
            # From the tokens of the step before: a device works on while the caller does this.
            durations.append(1e3 * (ended - before) / new)
            counted += new
        before = ended
        for output in outputs:
            decoding.add(output.request_id)
            latest[output.request_id] = output
    if before_step is not None:
        before_step(counted)
    abort_all(engine, ids)
    return [latest[request_id] for request_id in ids], durations, counted


def _num_tokens(output: RequestOutput) -> int:
    return output.completions[0].num_tokens


def to_json(
    engine: Engine,
    measurement: Measurement,
    *,
    bandwidth: float,
    eager: Measurement | None,
    interleaved: bool,
    baselines: Sequence[dict[str, Any]] = (),
    device_state: dict[str, Any] | None = None,
    check: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a case of the JSON.

    Args:
        engine: that ran it.
        measurement: the observations.
        bandwidth: of the device, in bytes per second.
        eager: the same case in eager mode, to compare tokens and logits with.
        interleaved: whether its repetitions were interleaved with those of other modes.
        baselines: results of other runtimes, as `BaselineCase.to_json` returns them.
        device_state: clocks, power and throttling before and after, as `watch` returns them.
        check: as `TokenCheck.check` returns it; None if the tokens were not checked.
    """
    case, stats = measurement.case, engine.stats()
    # On average half of the output is in the context.
    context = case.input_len + case.output_len // 2
    kv_bytes = engine.kv_bytes_read(context)
    roofline = decode_roofline(engine, [context] * case.batch_size, bandwidth)
    step = Summary.of(measurement.step_ms)
    return {
        "model": case.model,
        **dtype_names(engine),
        "mode": engine.config.mode,
        "kernels": engine.config.kernels,
        "device": str(engine.config.device),
        "batch_size": case.batch_size,
        "input_len": case.input_len,
        "output_len": case.output_len,
        "prefill_chunk": engine.config.user.prefill_chunk,
        "steps_per_launch": engine.config.steps_per_launch,
        "ttft_ms": Summary.of(measurement.ttft_ms).to_json(),
        "itl_ms": Summary.of(measurement.itl_ms).to_json(),
        "step_ms": step.to_json(),
        "repetition_ms": measurement.repetition_ms,
        "spread": spread(measurement.repetition_ms),
        "interleaved": interleaved,
        "host_us": Summary.of(measurement.host_us).to_json(),
        "tokens_per_second": 1e3 * case.batch_size / step.p50,
        "padding": measurement.padding,
        "kv_bytes": case.batch_size * kv_bytes,
        "roofline": roofline.to_json(step.p50 / 1e3),
        "memory": stats["memory"],
        "captured": stats["prepared"],
        "start": stats["start"],
        "fallbacks": stats["fallbacks"],
        "correct": _correctness(measurement, eager),
        "check": check,
        "instrumentation": instrumentation_to_json(engine, measurement.step_ms),
        "baselines": list(baselines),
        "device_state": device_state,
        "samples": {"step_ms": measurement.step_ms},
    }


def is_reference(engine: Engine) -> bool:
    """Return whether an engine runs plain PyTorch, eagerly: the reference of other modes."""
    return engine.config.mode == "eager" and engine.config.kernels != "native"


def _correctness(measured: Measurement, eager: Measurement | None) -> dict[str, float | None]:
    """Return how tokens and logits differ from those of eager mode, if it was measured."""
    if eager is None:
        return {"tokens_equal_eager": None, "max_abs_logit_error": None}
    return {
        "tokens_equal_eager": equal_share(measured.token_ids, eager.token_ids),
        "max_abs_logit_error": float((measured.logits - eager.logits).abs().max()),
    }
