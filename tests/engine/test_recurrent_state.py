"""Recurrent layers in an engine: whatever is shared, forked, swapped, computed again, rejected or
cut into steps, a request gets the tokens and, bit for bit, the log-probabilities that it would get
alone."""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from typing import Any

import pytest
from stepgraph.runtime import ConfigError, Engine, SamplingParams
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
    inexact = seed % 2 or variant.startswith("nemotron")  # whose experts have no C++ operator
    kernels = {"kernels": "torch"} if inexact else EXACT
    seen: Counter[str] = Counter()
    for block_size in (4, 8, 16, 32) if long else (rng.choice([2, 4, 8]), rng.choice([16, 32])):
        expected = alone(variant, block_size, **kernels)
        for _ in range(6 if long else 2):
            config = shape_of(rng, block_size, 64 + 40)
            engine = open_engine(variant, **kernels, **config)
            keep_in_flight(engine, rng.choice([0, 1]))
            count = 25 if expected.exact or long else 10
            run_crowd(engine, expected, rng, count, rng.choice([0.3, 0.9]))
            stats = engine.stats()
            assert stats["fallbacks"] == 0
            assert stats["blocks"]["free"] == stats["blocks"]["usable"]
            seen += Counter({k: int(v) for k, v in stats["cache"].items()})
            seen["preemptions"] += stats["preemptions"]
            engine.close()
    assert seen["hit_tokens"] > 0


# Prefixes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("chunk", [64, 50])
def test_prefixes_begin_from_snapshots(
    open_engine: Open, tiny: Tiny, block_size: int, chunk: int
) -> None:
    """The same prompt, the next turn of a conversation, and half a prompt, in few snapshots."""
    config = {"block_size": block_size, "prefill_chunk": chunk, "snapshot_bytes": 80_000}
    engine = open_engine("lfm2", **config, mode="eager", max_model_len=250)
    (prompt, other, *tails) = tiny("lfm2").prompts(196, 8, 60, 60, 60, seed=3)
    (first,) = engine.generate([prompt], greedy(20))
    assert first.cached_tokens == 0
    (again,) = engine.generate([prompt], greedy(20))
    assert again.completions[0].token_ids == first.completions[0].token_ids
    assert again.cached_tokens == 195 // block_size * block_size
    conversation = prompt + first.completions[0].token_ids + other
    (turn,) = engine.generate([conversation], greedy(20))
    assert turn.cached_tokens >= (len(conversation) - len(other) - 1) // block_size * block_size
    halves = [engine.generate([prompt[:96] + tail], greedy(4))[0].cached_tokens for tail in tails]
    assert halves == [0, 96, 96], "the second one stores what it has in common with the first"
    stats = engine.stats()
    assert stats["cache"]["hit_tokens"] == sum((*halves, again.cached_tokens, turn.cached_tokens))
    assert 0 < stats["snapshots"]["cached"] <= stats["snapshots"]["usable"]
    assert stats["snapshots"]["free"] == stats["snapshots"]["usable"]
    engine.reset_prefix_cache()
    assert engine.stats()["snapshots"]["cached"] == 0
    assert engine.generate([prompt], greedy(20))[0].cached_tokens == 0
    engine.check_integrity()


def test_new_weights_forget_snapshots(open_engine: Open, tiny: Tiny) -> None:
    model = tiny("lfm2")
    engine = open_engine("lfm2", mode="eager")
    (prompt,) = model.prompts(60, seed=3)
    tokens = engine.generate([prompt], greedy())[0].completions[0].token_ids
    engine.reload_weights(model.directory)
    (output,) = engine.generate([prompt], greedy())
    assert output.cached_tokens == 0
    assert output.completions[0].token_ids == tokens


def test_prefixes_need_the_prefix_cache(open_engine: Open, tiny: Tiny) -> None:
    engine = open_engine("lfm2", mode="eager", prefix_cache=False)
    (prompt,) = tiny("lfm2").prompts(60, seed=3)
    for _ in range(2):
        assert engine.generate([prompt], greedy())[0].cached_tokens == 0


@pytest.mark.slow
@pytest.mark.parametrize("host_cache_bytes", [0, 1 << 20])
def test_ranks_copy_their_own_state(open_engine: Open, tiny: Tiny, host_cache_bytes: int) -> None:
    model = tiny("lfm2")
    prompts = model.prompts(40, 17, 3, 9, 30)
    config = {"num_blocks": 10, "block_size": 8, "host_cache_bytes": host_cache_bytes}
    engine = open_engine("lfm2", mode="eager", tensor_parallel=2, threads=1, **config)
    for _ in range(2):
        outputs = engine.generate(prompts, greedy(20, n=2))
        for prompt, output in zip(prompts, outputs, strict=True):
            expected = model.greedy([prompt], 20) * 2
            assert [completion.token_ids for completion in output.completions] == expected
    assert engine.stats()["preemptions"] > 0
    assert (engine.stats()["cache"]["swapped_in"] > 0) == (host_cache_bytes > 0)


# Configurations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {"snapshot_bytes": 0},
        {"snapshot_bytes": 1},
        {"block_size": 1},
        {"block_size": 64},
        {"num_blocks": 6},
        {"num_blocks": 6, "host_cache_bytes": 20_000, "max_num_seqs": 2},
        {"block_size": 2, "speculation": {"num_speculative_tokens": 1}},
        {"max_itl_ms": 0.01},
    ],
    ids=str,
)
def test_small_sizes_change_no_tokens(open_engine: Open, tiny: Tiny, config: Any) -> None:
    model = tiny("lfm2")
    prompts = model.prompts(40, 9, 33, 2)
    engine = open_engine("lfm2", mode="eager", **config)
    for _ in range(2):
        outputs = engine.generate(prompts, greedy(20, n=2))
        for prompt, output in zip(prompts, outputs, strict=True):
            expected = model.greedy([prompt], 20) * 2
            assert [completion.token_ids for completion in output.completions] == expected
    engine.check_integrity()


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_quantised_caches_leave_the_state_alone(
    open_engine: Open, tiny: Tiny, kv_dtype: str
) -> None:
    engine = open_engine("lfm2", mode="eager", kv_dtype=kv_dtype)
    layouts = [open_engine("lfm2", mode="eager"), engine]
    sizes = [own.stats()["memory"] for own in layouts]
    assert sizes[0]["row_state"]["planned"] == sizes[1]["row_state"]["planned"]
    assert sizes[0]["cache"]["planned"] > sizes[1]["cache"]["planned"]
    (prompt,) = tiny("lfm2").prompts(60, seed=3)
    first, again = (engine.generate([prompt], greedy())[0] for _ in range(2))
    assert first.completions[0].token_ids == again.completions[0].token_ids
    assert again.cached_tokens == 48


@pytest.mark.parametrize(
    ("field", "config"),
    [
        ("block_size", {"block_size": 128}),
        ("speculation", {"block_size": 4, "speculation": {"num_speculative_tokens": 4}}),
        ("snapshot_bytes", {"snapshot_bytes": -1}),
        ("host_cache_bytes", {"host_cache_bytes": 1}),
    ],
)
def test_what_recurrent_layers_do_not_support(
    open_engine: Open, field: str, config: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, check=lambda error: error.field == field):
        open_engine("lfm2", **config)
