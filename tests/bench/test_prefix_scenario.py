"""`--scenario prefix`: which prompts share a prefix, and the counted tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from stepgraph.runtime import Engine, EngineConfig
from stepgraph.runtime.bench.engine_memory import pool_for
from stepgraph.runtime.bench.results.result_tables import table_of
from stepgraph.runtime.bench.scenarios import prefix_sharing as prefix
from stepgraph.runtime.bench.scenarios.prefix_sharing import NUM_PREFIXES, TAIL_TOKENS, PrefixRun
from stepgraph.runtime.bench.scenarios.steady import BenchmarkCase

pytestmark = pytest.mark.native_kernels
CASE = BenchmarkCase(batch_size=3, input_len=72, output_len=6)


@pytest.fixture
def open_pair(open_engine: Callable[..., Engine]) -> Callable[[str], tuple[Engine, Engine]]:
    """Open an engine without a prefix cache and one with it, with as many blocks as are needed."""

    def make(variant: str) -> tuple[Engine, Engine]:
        config: dict[str, Any] = {"max_num_seqs": CASE.batch_size, "prefill_chunk": 40}
        longest = CASE.longest_sequence(40)
        model = open_engine(variant, **config).model_config
        sized = EngineConfig(device="cpu", mode="eager", **config)
        blocks = pool_for(CASE.batch_size, model, sized, longest)
        config |= {"num_blocks": blocks, "max_model_len": longest}
        off, on = (open_engine(variant, **config, prefix_cache=cache) for cache in (False, True))
        return off, on

    return make


@pytest.mark.parametrize("variant", ["base", "qwen3"])  # qwen3: some layers slide
def test_the_waves_find_the_prefix_and_nothing_else(
    open_pair: Callable[[str], tuple[Engine, Engine]], variant: str
) -> None:
    off, on = open_pair(variant)
    runs = prefix.measure_prefix(off, on, CASE, num_warmup=1, num_iters=2, seed=5)
    waves = 2 * NUM_PREFIXES
    tokens = waves * (CASE.batch_size + 1) * CASE.input_len
    shared = (CASE.input_len - TAIL_TOKENS) // 16 * 16
    for run, found in zip(runs, (0, waves * CASE.batch_size * shared), strict=True):
        assert run.counted == {"queried_tokens": tokens, "hit_tokens": found}
        assert run.found_tokens == found
        assert len(run.first_ttft_ms) == len(run.prefill_ms) == waves
        assert len(run.ttft_ms) == len(run.token_ids) == waves * CASE.batch_size
        assert all(len(tokens) == CASE.output_len for tokens in run.token_ids)
        assert len(run.decode_steps) == waves * (CASE.output_len - 1)
        assert len(run.itl_ms) == len(run.decode_steps) * CASE.batch_size
        assert len(run.repetition_ms) == 2
        run.engine.check_integrity()
        assert not run.engine.has_unfinished()
    document = prefix.to_json("tiny", *runs, bandwidth=1e10)
    assert document["tokens_equal"] == 1.0  # in float32
    assert document["hit_rate"] == document["found_tokens"] / document["prompt_tokens"]
    assert document["unshared"]["computed_tokens"] == document["prompt_tokens"]
    assert document["computed_tokens"] + document["found_tokens"] == document["prompt_tokens"]
    in_use = (document["unshared"]["blocks_in_use"], document["blocks_in_use"])
    # The rows hold the prefix once; and where prefill takes longer the first ones get further.
    saved = (CASE.batch_size - 1) * (shared // 16)
    assert saved <= in_use[0] - in_use[1] <= len(on._open_parts().groups) * (saved + 2)
    assert document["roofline"]["fraction"] > 0
    _, (row,) = table_of({"prefix": [document]})
    assert (row["prompt"], row["shared"], row["n"]) == ("72", "40", "30")
    assert row["hit rate"] == f"{document['hit_rate']:.0%}"
    computed = f"2,880 / {document['computed_tokens']:,}"
    assert row["computed tokens: off / on"] == computed


def test_both_engines_get_the_same_prompts_in_turns(
    open_pair: Callable[[str], tuple[Engine, Engine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[Engine, list[list[int]]]] = []

    def serve(run: PrefixRun, wave: list[list[int]]) -> None:
        served.append((run.engine, wave))
        real(run, wave)

    real = prefix._serve
    monkeypatch.setattr(prefix, "_serve", serve)
    off, on = open_pair("base")
    prefix.measure_prefix(off, on, CASE, num_warmup=2, num_iters=3, seed=0)
    assert [engine for engine, _ in served[:4]] == [off, off, on, on]  # a wave each
    del served[:4]
    turns = [engine for engine, _ in served[::NUM_PREFIXES]]
    assert turns == [off, on, on, off, off, on]
    of_off, of_on = ([w for engine, w in served if engine is which] for which in (off, on))
    assert of_off == of_on
    prompts = [tuple(prompt) for wave in of_off for prompt in wave]
    assert len(set(prompts)) == len(prompts) == 3 * NUM_PREFIXES * (CASE.batch_size + 1)
    assert len({prompt[:-TAIL_TOKENS] for prompt in prompts}) == 3 * NUM_PREFIXES
    for wave in of_off:
        assert len({tuple(prompt[:-TAIL_TOKENS]) for prompt in wave}) == 1


def test_pools_have_room(open_engine: Callable[..., Engine]) -> None:
    """Five rows of a request's length are admitted at once, and none loses its blocks."""
    config = {"max_num_seqs": 5, "prefill_chunk": 40, "prefix_cache": False}
    model = open_engine("gemma2", **config).model_config
    sized = EngineConfig(device="cpu", mode="eager", **config)
    engine = open_engine("gemma2", **config, num_blocks=pool_for(5, model, sized, 90))
    outputs = engine.generate([list(range(n, n + 84)) for n in range(5)])
    assert len(outputs) == 5
    assert engine.stats()["preemptions"] == 0
