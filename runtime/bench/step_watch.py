"""Decode steps of a run: their times, their contexts and their roofline."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ...profiling.roofline import Roofline, step_flops
from ...profiling.timeline import StepRecord
from ..engine.engine import Engine
from ..engine.request_output import RequestOutput
from ..models.layout import weights_per_step
from ..models.plan import plan_of
from ..sampling_params import SamplingParams

__all__ = [
    "MeasuredStep",
    "StepWatch",
    "decode_roofline",
    "decode_whole_batch",
    "mean_roofline",
    "steps_in_flight",
]


def steps_in_flight(engine: Engine) -> int:
    """Return how many launched steps are in flight when `step` returns."""
    return int(engine.config.is_async_device)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step without prefill whose tokens are on the host."""

    record: StepRecord
    ms: float
    """From the tokens of the step before to its own."""
    contexts: tuple[int, ...]
    """Tokens that each row attended to, of the rows whose token was delivered."""


class StepWatch:
    """Steps an engine, and records the contexts of the rows of every step.

    In the `step` that delivers the k-th token of a request with a prompt of p, the row read the
    keys and values of p + k - 1 tokens. Steps of one launch are not distinguished.
    """

    def __init__(self, engine: Engine, lag: int | None = None) -> None:
        """Watch an idle engine; `lag` None: `steps_in_flight` of the engine."""
        self._engine = engine
        self._timeline = engine.timeline()
        self._lag = steps_in_flight(engine) if lag is None else lag
        self._prompt_len: dict[str, int] = {}
        self._num_tokens: dict[str, int] = {}
        self._in_flight: deque[int | None] = deque()
        """Launches since `clear`, by number; None for earlier ones."""
        self._seen: list[tuple[int, float, tuple[int, ...]]] = []
        self._ended = time.perf_counter()
        self.clear()

    def add_request(self, prompt: list[int], params: SamplingParams, *, priority: int = 0) -> str:
        """Queue a prompt, as `Engine.add_request`."""
        request_id = self._engine.add_request(prompt, params, priority=priority)
        self._prompt_len[request_id] = len(prompt)
        self._num_tokens[request_id] = 0
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step, as `Engine.step`."""
        timeline, in_flight = self._timeline, self._in_flight
        recorded = timeline.recorded
        outputs = self._engine.step()
        ended = time.perf_counter()
        took, self._ended = ended - self._ended, ended
        launched = timeline.recorded > recorded
        if launched:
            in_flight.append(self._launched)
            self._launched += 1
        delivered = [in_flight.popleft() for _ in range(len(in_flight) - self._lag * launched)]
        contexts = []
        for output in outputs:
            request_id, num_tokens = output.request_id, output.completions[0].num_tokens
            # An aborted request has an output without a new token.
            if num_tokens > self._num_tokens[request_id]:
                self._num_tokens[request_id] = num_tokens
                contexts.append(self._prompt_len[request_id] + num_tokens - 1)
        if len(delivered) == 1 and delivered[0] is not None:
            self._seen.append((delivered[0], 1e3 * took, tuple(contexts)))
        return outputs

    def clear(self) -> None:
        """Drop the steps so far, here and in the engine's timeline."""
        self._timeline.clear()
        self._launched = 0
        self._in_flight = deque([None] * len(self._in_flight))
        self._seen.clear()

    def decode_steps(self, rows: int | None = None) -> list[MeasuredStep]:
        """Return the steps since `clear` that only decoded, with exactly `rows` rows if given.

        Steps that have left the timeline are omitted.
        """
        records = self._timeline.records()
        forgotten = self._launched - len(records)
        steps = [
            MeasuredStep(records[number - forgotten], ms, contexts)
            for number, ms, contexts in self._seen
            if number >= forgotten
        ]
        return [
            step
            for step in steps
            if step.record.rows
            and not step.record.prefill_tokens
            and (rows is None or step.record.rows == rows)
        ]


def decode_roofline(
    engine: Engine, contexts: Sequence[int], bandwidth: float, *, steps: int = 1
) -> Roofline:
    """Return the roofline of a decode step, or of the mean of several.

    Bytes are those of the weights and the cache as this engine stores them. The ranks of a CPU
    share its bandwidth, so the bytes of all count; elsewhere those of one rank.

    Args:
        engine: that runs the steps.
        contexts: tokens that each row of each step attends to, the newest included.
        bandwidth: bytes per second that the device reads, measured.
        steps: number of steps that the rows belong to.
    """
    config = engine.model_config
    attend = plan_of(config).layers[0].attend
    kv_bytes = sum(map(engine.kv_bytes_read, contexts))
    flops = step_flops(weights_per_step(config), len(contexts), 0, 0, 0, 0) + step_flops(
        0,
        1,
        sum(map(engine.positions_read, contexts)),
        attend.heads,
        attend.head_dim,
        attend.value_dim,
    )
    shared = engine.config.user.tensor_parallel if engine.config.device.type == "cpu" else 1
    return Roofline(
        shared * (engine.weight_bytes_read(len(contexts) / steps) + round(kv_bytes / steps)),
        round(shared * flops / steps),
        bandwidth,
    )


def mean_roofline(
    engine: Engine, steps: Sequence[MeasuredStep], bandwidth: float, *, ms: float | None = None
) -> dict[str, float | int] | None:
    """Return the `roofline` of steps with different contexts for the JSON; None without steps.

    Args:
        engine: that ran the steps.
        steps: whose mean bytes count.
        bandwidth: bytes per second that the device reads, measured.
        ms: time of a step; None: the mean, so that the fraction is the sum of the floors over the
            sum of the times.
    """
    if not steps:
        return None
    contexts = [context for step in steps for context in step.contexts]
    limit = decode_roofline(engine, contexts, bandwidth, steps=len(steps))
    taken = statistics.fmean(step.ms for step in steps) if ms is None else ms
    return limit.to_json(taken / 1e3)


def decode_whole_batch(
    watch: StepWatch, ids: Sequence[str], steps: int
) -> dict[str, RequestOutput]:
    """Run until `steps` steps have decoded all requests and done nothing else.

    Returns the latest output of each request, none of which may end before.
    """
    latest: dict[str, RequestOutput] = {}
    whole = 0
    while whole < steps:
        outputs = watch.step()
        # Every request got a token by this step, and had one before it.
        whole += len(latest) == len(outputs) == len(ids)
        latest.update((output.request_id, output) for output in outputs)
        assert not any(output.finished for output in outputs), "a request ended early"
    return latest
