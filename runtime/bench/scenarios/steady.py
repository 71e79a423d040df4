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
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from ....profiling.stats import Summary
from ....profiling.timeline import StepRecord
from ...engine.engine import Engine
from ...engine.request_output import RequestOutput
from ...errors import StepgraphError
from ...sampling_params import SamplingParams
from ..results.result_document import describe_engine
from ..step_watch import decode_roofline
from ..token_check import TokenCheck
from ..workload import abort_all, equal_share, greedy, random_prompts, spread

__all__ = ["BenchmarkCase", "CaseRun", "Reference", "is_reference"]

SCORED_TOKENS = 32
"""Length of the sequence whose logits two modes are compared on, half of it prefilled."""


@dataclass(frozen=True, slots=True)
class BenchmarkCase:
    """Sizes of a case: rows, and the tokens of each prompt and output."""

    batch_size: int
    input_len: int
    output_len: int

    def longest_sequence(self, prefill_chunk: int, steps_per_launch: int = 1) -> int:
        """Return the tokens of the longest sequence, prompt and output.

        The first prompt gets a token in each step that prefills the others. Launches of several
        steps continue to the last one that counts, and one more is in flight.
        """
        alone = 1 + -(-self.batch_size * self.input_len // prefill_chunk) + self.batch_size
        spare = 2 * steps_per_launch if steps_per_launch > 1 else 0
        return self.input_len + self.output_len + alone + spare


class Reference(NamedTuple):
    """Results of a case in eager mode, with which other modes are compared."""

    token_ids: list[list[int]]
    logits: torch.Tensor


class CaseRun:
    """A case on an idle engine with at least `batch_size` rows, which is run repeatedly.

    Attributes:
        ttft_ms, itl_ms: of all repetitions; gaps are those between the tokens of the steps
            that count, and those of one launch arrive together.
        repetitions: milliseconds of the steps of each repetition.
        token_ids: the first `output_len` tokens of each prompt, of the first repetition.
        outputs: the distinct outputs of each prompt over all repetitions.
        records: all steps of all repetitions, including prefill.

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
        longest = case.longest_sequence(config.user.prefill_chunk, config.steps_per_launch)
        self._params = greedy(longest - case.input_len)
        self.ttft_ms: list[float] = []
        self.itl_ms: list[float] = []
        self.repetitions: list[list[float]] = []
        self.token_ids: list[list[int]] = []
        self.outputs: list[set[tuple[int, ...]]] = [set() for _ in self.prompts]
        self.records: list[StepRecord] = []

    @property
    def step_ms(self) -> list[float]:
        """Milliseconds of the steps of all repetitions, in order."""
        return [duration for repetition in self.repetitions for duration in repetition]

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
        self.repetitions.append(durations)
        self.records += engine.timeline().records()
        if not self.token_ids:
            self.token_ids = [output.token_ids[: case.output_len] for output in outputs]
        for distinct, output in zip(self.outputs, outputs, strict=True):
            assert output.timing is not None, "every prompt got a token"
            self.ttft_ms.append(output.timing.ttft_ms)
            self.itl_ms += output.timing.itl_ms[-counted:]
            distinct.add(tuple(output.token_ids))

    def reference(self) -> Reference:
        """Return the tokens, and the logits of a sequence under teacher forcing."""
        scored = self.prompts[0][:SCORED_TOKENS]
        return Reference(self.token_ids, self.engine.score(scored, (len(scored) + 1) // 2))

    def to_json(
        self, model: str, bandwidth: float, eager: Reference | None, check: TokenCheck | None
    ) -> dict[str, Any]:
        """Return the fields of the case in the JSON that depend on this run alone.

        Args:
            model: the name of the engine's model.
            bandwidth: of the device, in bytes per second.
            eager: the same case in eager mode.
            check: scores the sampled tokens; None: they are not checked.
        """
        engine, case, stats = self.engine, self.case, self.engine.stats()
        # On average half of the output is in the context.
        context = case.input_len + case.output_len // 2
        roofline = decode_roofline(engine, [context] * case.batch_size, bandwidth)
        step, medians = Summary.of(self.step_ms), list(map(statistics.median, self.repetitions))
        decoding = [r for r in self.records if r.rows == case.batch_size and not r.prefill_tokens]
        return {
            **describe_engine(engine, model),
            **asdict(case),
            "steps_per_launch": engine.config.steps_per_launch,
            "ttft_ms": Summary.of(self.ttft_ms).to_json(),
            "itl_ms": Summary.of(self.itl_ms).to_json(),
            "step_ms": step.to_json(),
            "repetition_ms": medians,
            "spread": spread(medians),
            "host_us": Summary.of(r.host_ns / 1e3 / r.steps for r in decoding).to_json(),
            "tokens_per_second": 1e3 * case.batch_size / step.p50,
            "padding": 1 - sum(r.rows for r in decoding) / max(1, sum(r.bucket for r in decoding)),
            "kv_bytes": case.batch_size * engine.kv_bytes_read(context),
            "roofline": roofline.to_json(step.p50 / 1e3),
            "memory": stats["memory"],
            "captured": stats["prepared"],
            "start": stats["start"],
            "correct": self._correctness(eager),
            "check": None if check is None else check.check(self.prompts, self.outputs),
            "samples": {"step_ms": self.step_ms},
        }

    def _correctness(self, eager: Reference | None) -> dict[str, float | None]:
        """Return how tokens and logits differ from those of eager mode, if it was measured."""
        if eager is None:
            return {"tokens_equal_eager": None, "max_abs_logit_error": None}
        token_ids, logits = self.reference()
        return {
            "tokens_equal_eager": equal_share(token_ids, eager.token_ids),
            "max_abs_logit_error": float((logits - eager.logits).abs().max()),
        }


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


def is_reference(engine: Engine) -> bool:
    """Return whether an engine runs plain PyTorch, eagerly: the reference of other modes."""
    return engine.config.mode == "eager" and engine.config.kernels != "native"
