"""Prompts with common prefixes, on an engine with a prefix cache and on one without.

Prompts begin with one of several prefixes and end with tokens of their own, as questions after a
system prompt. For each prefix one request runs alone; when it has ended, a wave of requests with
that prefix arrives at once. Both engines serve the same prompts in turns: the waves are warm on the
one with a prefix cache and cold on the other. Prompts are random tokens, decoded greedily until
`output_len` - 1 steps have decoded the whole wave.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ....profiling.device_state import watch
from ....profiling.stats import RequestTiming, Summary
from ...engine.engine import Engine
from ...errors import ConfigError
from ...loading.loader import resolve_source
from ...models.decoder_model import DecoderConfig
from ..benchmark_run import BenchmarkRun, ModelKind, StepMode
from ..engine_memory import pool_for
from ..results.result_document import describe_engine
from ..step_watch import MeasuredStep, StepWatch, decode_whole_batch, mean_roofline
from ..workload import abort_all, equal_share, greedy, interleave, random_prompts, spread
from .steady import BenchmarkCase

__all__ = ["NUM_PREFIXES", "TAIL_TOKENS", "PrefixRun", "measure_prefix", "run_prefix", "to_json"]

NUM_PREFIXES = 5
"""Each with a first request and a wave, in every repetition."""

TAIL_TOKENS = 32
"""Tokens of a prompt after the prefix, different in each."""


Wave = list[list[int]]
"""Prompts with one prefix: that of the first request, then those of the wave."""


@dataclass(slots=True)
class PrefixRun:
    """Observations of one engine over all counted waves; times in milliseconds."""

    engine: Engine
    case: BenchmarkCase
    seed: int
    """Of the first repetition; each further one adds 1."""
    num_repetitions: int = 0
    first_ttft_ms: list[float] = field(default_factory=list)
    """Of the requests that came first with their prefix."""
    ttft_ms: list[float] = field(default_factory=list)
    """Of the requests of the waves, as the following lists."""
    prefill_ms: list[float] = field(default_factory=list)
    """From the arrival of a wave to the last first token."""
    itl_ms: list[float] = field(default_factory=list)
    """Gaps between tokens of the steps that decoded the whole wave."""
    decode_steps: list[MeasuredStep] = field(default_factory=list)
    """Those steps."""
    repetition_ms: list[float] = field(default_factory=list)
    """The median of those of each repetition."""
    found_tokens: int = 0
    """Of the prompts of first requests and waves, by `RequestOutput.cached_tokens`."""
    counted: Counter[str] = field(default_factory=Counter)
    """The same (`hit_tokens`), and all `queried_tokens`, as counted by `Engine.stats`."""
    blocks_in_use: int = 0
    """The most that the requests of a wave held, all of them decoding."""
    token_ids: list[list[int]] = field(default_factory=list)
    """The first `output_len` tokens of each request of a wave."""

    def repeat(self) -> None:
        """Serve prompts of which nothing is cached, and add the observations."""
        self.engine.reset_prefix_cache()
        before = self.engine.stats()["cache"]
        known = len(self.decode_steps)
        waves = _waves(self.engine.model_config, self.case, self.seed + self.num_repetitions)
        for wave in waves:
            _serve(self, wave)
        self.num_repetitions += 1
        self.repetition_ms.append(statistics.median(s.ms for s in self.decode_steps[known:]))
        after = self.engine.stats()["cache"]
        for name in ("queried_tokens", "hit_tokens"):
            self.counted[name] += after[name] - before[name]

    def to_json(self) -> dict[str, Any]:
        """Return the fields that both engines have."""
        wave_tokens = self.case.batch_size * self.case.input_len
        return {
            "computed_tokens": self.counted["queried_tokens"] - self.counted["hit_tokens"],
            "first_ttft_ms": Summary.of(self.first_ttft_ms).to_json(),
            "ttft_ms": Summary.of(self.ttft_ms).to_json(),
            "prompt_tokens_per_second": 1e3 * wave_tokens / Summary.of(self.prefill_ms).p50,
            "itl_ms": Summary.of(self.itl_ms).to_json(),
            "step_ms": Summary.of(step.ms for step in self.decode_steps).to_json(),
            "repetition_ms": self.repetition_ms,
            "spread": spread(self.repetition_ms),
            "blocks_in_use": self.blocks_in_use,
        }


def _serve(run: PrefixRun, wave: Wave) -> None:
    """Serve a first request, then the others of its prefix."""
    engine, case = run.engine, run.case
    watch = StepWatch(engine)
    first, *others = wave
    watch.add_request(first, greedy(1))
    while engine.has_unfinished():
        for output in watch.step():
            assert output.timing is not None, "it ended with its first token"
            run.first_ttft_ms.append(output.timing.ttft_ms)
            run.found_tokens += output.cached_tokens
    watch.clear()
    room = case.longest_sequence(engine.config.user.prefill_chunk) - case.input_len
    ids = [watch.add_request(prompt, greedy(room)) for prompt in others]
    latest = decode_whole_batch(watch, ids, case.output_len - 1)
    blocks = engine.stats()["blocks"]
    run.blocks_in_use = max(run.blocks_in_use, blocks["usable"] - blocks["free"])
    run.decode_steps += watch.decode_steps(case.batch_size)
    abort_all(engine, ids)
    timings: list[RequestTiming] = []
    for request_id in ids:
        output = latest[request_id]
        assert output.timing is not None, "it has decoded"
        timings.append(output.timing)
        run.found_tokens += output.cached_tokens
        run.token_ids.append(output.token_ids[: case.output_len])
    run.ttft_ms += [timing.ttft_ms for timing in timings]
    arrived = min(timing.arrival_ns for timing in timings)
    run.prefill_ms.append((max(timing.token_ns[0] for timing in timings) - arrived) / 1e6)
    run.itl_ms += [gap for timing in timings for gap in timing.itl_ms[1 - case.output_len :]]


def _waves(config: DecoderConfig, case: BenchmarkCase, seed: int) -> list[Wave]:
    """Return the prompts of a repetition, the same for the same seed."""
    each = case.batch_size + 1
    prefixes = random_prompts(config, NUM_PREFIXES, case.input_len - TAIL_TOKENS, 2 * seed)
    tails = random_prompts(config, NUM_PREFIXES * each, TAIL_TOKENS, 2 * seed + 1)
    return [[prefix + tails.pop() for _ in range(each)] for prefix in prefixes]


def measure_prefix(
    unshared: Engine,
    shared: Engine,
    case: BenchmarkCase,
    *,
    num_warmup: int,
    num_iters: int,
    seed: int,
) -> tuple[PrefixRun, PrefixRun]:
    """Run a case on two idle engines, interleaved; the second has a prefix cache.

    Every repetition has new prompts, the same for both, and starts with an empty prefix cache. One
    prefix and its wave are a warm-up.

    Raises:
        RequestError: the sequences do not fit the engines.
    """
    runs = (PrefixRun(unshared, case, seed), PrefixRun(shared, case, seed))
    for run in runs:
        for _ in range(num_warmup):
            warm_up = PrefixRun(run.engine, case, seed)
            _serve(warm_up, _waves(run.engine.model_config, case, seed)[0])
    interleave([run.repeat for run in runs], num_iters)
    return runs


def to_json(
    model: str, unshared: PrefixRun, shared: PrefixRun, *, bandwidth: float
) -> dict[str, Any]:
    """Return an entry of `prefix` in the JSON. `bandwidth` is in bytes per second."""
    case = shared.case
    found, queried = shared.counted["hit_tokens"], shared.counted["queried_tokens"]
    ours, theirs = shared.to_json(), unshared.to_json()
    return {
        **describe_engine(shared.engine, model),
        **dataclasses.asdict(case),
        "prefix_len": case.input_len - TAIL_TOKENS,
        "prefixes": NUM_PREFIXES,
        "prompt_tokens": queried,
        "found_tokens": found,
        "hit_rate": found / queried,
        **ours,
        "interleaved": True,
        "unshared": theirs,
        "ttft_ratio": theirs["ttft_ms"]["p50"] / ours["ttft_ms"]["p50"],
        "saved_tokens_per_second": ours["prompt_tokens_per_second"]
        - theirs["prompt_tokens_per_second"],
        "roofline": mean_roofline(
            shared.engine, shared.decode_steps, bandwidth, ms=ours["step_ms"]["p50"]
        ),
        "tokens_equal": equal_share(shared.token_ids, unshared.token_ids),
    }


def run_prefix(run: BenchmarkRun, kind: ModelKind, mode: StepMode) -> Iterator[dict[str, Any]]:
    """Yield an entry for each point of the grid; all are checked before the first is measured."""
    options = run.options
    source = resolve_source(kind.model, config_only=True).config
    sized = []
    for output_len, input_len, rows in itertools.product(
        options.output_len, options.input_len, options.batch_size
    ):
        case = BenchmarkCase(rows, input_len, output_len)
        longest = case.longest_sequence(options.prefill_chunk)
        config = run.config(kind, mode, max_num_seqs=rows, buckets=(rows,), max_model_len=longest)
        least = config.block_size + TAIL_TOKENS
        if input_len < least:
            raise ConfigError(
                f"input_len={input_len} leaves no block to share: a prompt is a prefix of at least"
                f" one block ({config.block_size} tokens) and {TAIL_TOKENS} tokens of its own,"
                f" {least} at least"
            )
        blocks = pool_for(rows, source, config, longest)
        sized.append((case, dataclasses.replace(config, num_blocks=blocks)))
    for case, config in sized:
        what = f"{case.batch_size} rows, prompts of {case.input_len}"
        sharing = dataclasses.replace(config, prefix_cache=True)
        with run.start(kind, config, what) as unshared, run.start(kind, sharing) as shared:
            read_again = watch(run.monitor)
            how = {name: getattr(options, name) for name in ("num_warmup", "num_iters", "seed")}
            runs = measure_prefix(unshared, shared, case, **how)
            entry = to_json(kind.model, *runs, bandwidth=run.bandwidth)
            yield entry | {"device_state": read_again()}
