"""Recurrent layers in an engine: whatever is shared, forked, swapped, computed again, rejected or
cut into steps, a request gets the tokens and, bit for bit, the log-probabilities that it would get
alone."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any

import pytest
from stepgraph.runtime import Engine, SamplingParams
from stepgraph.runtime.engine.request_output import CompletionOutput, RequestOutput

from ..rigs.engine_rig import Open, greedy, keep_in_flight
from ..rigs.hybrid_models import HYBRID_VARIANTS
from ..rigs.speculation_rig import guess
from ..rigs.tiny_models import Tiny

pytestmark = pytest.mark.filterwarnings("ignore:no native decoder layers")

MODELS = ["lfm2", *HYBRID_VARIANTS]
EXACT: dict[str, Any] = {"batch_invariant": True, "dtype": "float32"}
"""Kernels of which results can be compared bit by bit."""


def result_of(completion: CompletionOutput, *, exact: bool) -> tuple[Any, ...]:
    logprobs = [entry.logprob for entry in completion.logprobs] if exact else []
    return completion.token_ids, completion.finish_reason, logprobs


class Alone:
    """What requests get from an engine that runs them one by one and keeps nothing."""

    def __init__(self, engine: Engine, prompts: list[list[int]]) -> None:
        self.prompts = prompts
        self.exact = engine.config.user.batch_invariant
        self._engine = engine
        plain = greedy(16, logprobs=0)
        (output,) = engine.generate([prompts[0]], plain)
        inside = output.completions[0].token_ids[5:9]
        self.params = [
            plain,
            SamplingParams(temperature=0.0, max_tokens=40, logprobs=0, stop_token_ids=inside),
            *(
                SamplingParams(
                    temperature=t, max_tokens=n, n=2, seed=n, logprobs=0, ignore_eos=True
                )
                for t, n in ((0.8, 11), (2.0, 19))
            ),
        ]
        self.of = cache(self._compute)

    def _compute(self, prompt: int, params: int) -> list[tuple[Any, ...]]:
        (output,) = self._engine.generate([self.prompts[prompt]], self.params[params])
        return self.results_of(output)

    def results_of(self, output: RequestOutput) -> list[tuple[Any, ...]]:
        return [result_of(own, exact=self.exact) for own in output.completions]


@pytest.fixture
def alone(open_engine: Open, tiny: Tiny) -> Any:
    def make(variant: str, block_size: int, **config: Any) -> Alone:
        stem, middle, tail, other = tiny(variant).prompts(40, 17, 5, 9, seed=7)
        prompts = [stem, stem + middle, stem[:33] + tail, stem + middle + tail, other, [5]]
        settings = {"max_num_seqs": 1, "prefix_cache": False, "block_size": block_size} | config
        return Alone(open_engine(variant, **settings), prompts)

    return make


def run_crowd(engine: Engine, alone: Alone, rng: random.Random, count: int, right: float) -> None:
    """Let requests come at random times, some of which are aborted; compare the results."""
    known: dict[str, list[int]] = {}
    if engine.config.speculation is not None:
        guess(engine, known, right)
    open_requests: dict[str, tuple[int, int]] = {}
    while count or engine.has_unfinished():
        if count and (rng.random() < 0.3 or not engine.has_unfinished()):
            count -= 1
            case = rng.randrange(len(alone.prompts)), rng.randrange(len(alone.params))
            for index, (tokens, *_) in enumerate(alone.of(*case)):
                known[f"{count}/{index}"] = tokens
            prompt, params = alone.prompts[case[0]], alone.params[case[1]]
            engine.add_request(prompt, params, f"{count}", priority=rng.randint(0, 1))
            open_requests[f"{count}"] = case
        if open_requests and rng.random() < 0.02:
            name, _ = open_requests.popitem()
            engine.abort(name)
        for output in engine.step():
            if output.finished and output.request_id in open_requests:
                found = alone.results_of(output)
                assert found == alone.of(*open_requests.pop(output.request_id))
        engine.check_integrity()


def shape_of(rng: random.Random, block_size: int, longest: int) -> dict[str, Any]:
    """Return sizes of an engine: with padding or none, room for all or for little."""
    rows = rng.choice([1, 3, 4])
    config: dict[str, Any] = {
        "block_size": block_size,
        "max_num_seqs": rows,
        "prefill_chunk": rng.choice([3, 7, block_size, 24, 200]),
        "buckets": rng.choice([None, (rows,)]),
        "snapshot_bytes": rng.choice([0, 20_000, 500_000]),
        "host_cache_bytes": rng.choice([0, 1 << 20]),
        "num_blocks": 2 + -(-longest // block_size) * rng.choice([1, 2, 9]),
    }
    if block_size > 1 and rng.random() < 0.6:
        drafts = rng.randint(1, min(4, block_size - 1))
        config["speculation"] = {"num_speculative_tokens": drafts}
    return config


@pytest.mark.sampled(6)
@pytest.mark.parametrize("variant", MODELS)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 3))])
def test_results_are_those_of_a_request_alone(
    open_engine: Open, alone: Any, variant: str, seed: int
) -> None:
    """Bit for bit by the C++ operators; odd seeds compare the tokens by the reference operators."""
    rng, long = random.Random(f"{variant} {seed}"), seed >= 2
    kernels = {"kernels": "torch"} if seed % 2 else EXACT
    seen: Counter[str] = Counter()
    for block_size in (4, 8, 16, 32) if long else (rng.choice([2, 4, 8]), rng.choice([16, 32])):
        expected = alone(variant, block_size, **kernels)
        for _ in range(6 if long else 2):
            config = shape_of(rng, block_size, 64 + 40)
            engine = open_engine(variant, **kernels, **config)
            keep_in_flight(engine, rng.choice([0, 1]))
            run_crowd(engine, expected, rng, 25, rng.choice([0.3, 0.9]))
            stats = engine.stats()
            assert stats["fallbacks"] == 0
            assert stats["blocks"]["free"] == stats["blocks"]["usable"]
            seen += Counter({k: int(v) for k, v in stats["cache"].items()})
            seen["preemptions"] += stats["preemptions"]
            engine.close()
    assert seen["hit_tokens"] > 0
