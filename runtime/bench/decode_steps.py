"""Which steps of a run only decode, how long they took, and what they had to read at least."""

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
from ..sampling_params import SamplingParams

__all__ = [
    "DecodeStep",
    "StepWatch",
    "decode_roofline",
    "decode_whole_batch",
    "mean_roofline",
    "steps_under_way",
]


def steps_under_way(engine: Engine) -> int:
    """Return how many steps are launched when `step` returns and have not told their tokens."""
    return int(engine.config.is_async_device)


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step without prefill whose tokens have reached the host."""

    record: StepRecord
    ms: float
    """From the tokens of the step before to its own."""
    contexts: tuple[int, ...]
    """Tokens that each row attended to, of those whose token somebody got."""


class StepWatch:
    """Runs an engine, and notes of every step what its rows had to read.

    In the `step` that takes in the k-th token of a request with a prompt of p, the row read the
    keys and values of p + k - 1 tokens. Launches of several steps are not told apart.
    """

    def __init__(self, engine: Engine, lag: int | None = None) -> None:
        """Watch an idle engine; `lag` is `steps_under_way`, None: as the engine says."""
        self._engine = engine
        self._timeline = engine.timeline()
        self._lag = steps_under_way(engine) if lag is None else lag
        self._prompt_len: dict[str, int] = {}
        self._num_tokens: dict[str, int] = {}
        self._under_way: deque[int | None] = deque()
        """Launches since `clear`, by number; None for one before it."""
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
        timeline, under_way = self._timeline, self._under_way
        recorded = timeline.recorded
        outputs = self._engine.step()
        ended = time.perf_counter()
        took, self._ended = ended - self._ended, ended
        launched = timeline.recorded > recorded
        if launched:
            under_way.append(self._launched)
            self._launched += 1
        taken_in = [under_way.popleft() for _ in range(len(under_way) - self._lag * launched)]
        contexts = []
        for output in outputs:
            request_id, num_tokens = output.request_id, output.completions[0].num_tokens
            # One that was aborted is among them, too, without a new token.
            if num_tokens > self._num_tokens[request_id]:
                self._num_tokens[request_id] = num_tokens
                contexts.append(self._prompt_len[request_id] + num_tokens - 1)
        if len(taken_in) == 1 and taken_in[0] is not None:
            self._seen.append((taken_in[0], 1e3 * took, tuple(contexts)))
        return outputs

    def clear(self) -> None:
        """Forget the steps so far, here and in the engine's timeline."""
        self._timeline.clear()
        self._launched = 0
        self._under_way = deque([None] * len(self._under_way))
        self._seen.clear()

    def decode_steps(self, rows: int | None = None) -> list[DecodeStep]:
        """Return the steps since `clear` that only decoded, as many `rows` if that is given.

        Steps that the timeline has forgotten again are left out.
        """
        records = self._timeline.records()
        forgotten = self._launched - len(records)
        steps = [
            DecodeStep(records[number - forgotten], ms, contexts)
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
    """Return the limit of a decode step, or of the mean of several.

    Bytes are those of the weights and the cache as this engine has stored them.

    Args:
        engine: what the steps run on.
        contexts: tokens that each row of each step attends to, the newest included.
        bandwidth: bytes per second that the device reads, measured.
        steps: how many steps those rows are of.
    """
    config = engine.model_config
    kv_bytes = sum(map(engine.kv_bytes_read, contexts))
    flops = step_flops(weights_per_step(config), len(contexts), 0, 0, 0, 0) + step_flops(
        0,
        1,
        sum(map(engine.positions_read, contexts)),
        config.num_heads,
        config.head_dim,
        config.value_dim,
    )
    return Roofline(
        engine.weight_bytes_per_step + round(kv_bytes / steps), round(flops / steps), bandwidth
    )


def mean_roofline(
    engine: Engine, steps: Sequence[DecodeStep], bandwidth: float, *, ms: float | None = None
) -> dict[str, float | int] | None:
    """Return the `roofline` of the benchmark's JSON for steps that differ; None if there is none.

    Args:
        engine: what they ran on.
        steps: their bytes are told by the mean.
        bandwidth: bytes per second that the device reads, measured.
        ms: what one of them took; None: the mean, so that the fraction is that of all floors over
            the time of all steps.
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

    Returns the latest output of each request. They must have tokens to go until then.
    """
    latest: dict[str, RequestOutput] = {}
    whole = 0
    while whole < steps:
        outputs = watch.step()
        # Every request got a token by this step, and had one before it.
        whole += len(latest) == len(outputs) == len(ids)
        latest.update((output.request_id, output) for output in outputs)
        assert not any(output.finished for output in outputs), "it was to have tokens to go"
    return latest
