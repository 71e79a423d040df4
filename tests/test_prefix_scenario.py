"""`--scenario prefix`: who shares what, what is counted of it, and what the command line says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from stepgraph.runtime import Engine, EngineConfig
from stepgraph.runtime.bench.engine_memory import RequestBlocks
from stepgraph.runtime.bench.results.result_tables import tables
from stepgraph.runtime.bench.scenarios import prefix_sharing as prefix
from stepgraph.runtime.bench.scenarios.prefix_sharing import NUM_PREFIXES, TAIL_TOKENS, PrefixRun
from stepgraph.runtime.bench.scenarios.steady import BenchmarkCase, longest_sequence

from .bench_rig import BANDWIDTH_GB_S, run_bench, schema_errors

CASE = BenchmarkCase("base", batch_size=3, input_len=72, output_len=6)
SMALL = "--scenario prefix --mode eager --batch-size 2 --input-len 64 --output-len 4 --num-iters 2"


@pytest.fixture
def open_pair(open_engine: Callable[..., Engine]) -> Callable[..., tuple[Engine, Engine]]:
    """Open an engine without a prefix cache and one with it, with as many blocks as are needed."""

    def make(variant: str, case: BenchmarkCase, **fields: Any) -> tuple[Engine, Engine]:
        config = {"max_num_seqs": case.batch_size, "prefill_chunk": 40} | fields
        longest = longest_sequence(case, config["prefill_chunk"])
        model = open_engine(variant, **config).model_config
        sized = EngineConfig(device="cpu", mode="eager", **config)
        blocks = RequestBlocks.of(model, sized, longest).pool(case.batch_size)
        config |= {"num_blocks": blocks, "max_model_len": longest}
        off, on = (open_engine(variant, **config, prefix_cache=cache) for cache in (False, True))
        return off, on

    return make


@pytest.mark.parametrize("variant", ["base", "qwen3"])  # qwen3: some layers slide
def test_the_waves_find_the_prefix_and_nothing_else(
    open_pair: Callable[..., tuple[Engine, Engine]], variant: str
) -> None:
    off, on = open_pair(variant, CASE)
    runs = prefix.measure_prefix(off, on, CASE, num_warmup=1, num_iters=2, seed=5)
    waves = 2 * NUM_PREFIXES
    requests = waves * (CASE.batch_size + 1)
    shared = (CASE.input_len - TAIL_TOKENS) // 16 * 16
    for run, found in zip(runs, (0, waves * CASE.batch_size * shared), strict=True):
        assert run.counted == {"queried_tokens": requests * CASE.input_len, "hit_tokens": found}
        assert run.found_tokens == found
        assert len(run.first_ttft_ms) == len(run.prefill_ms) == waves
        assert len(run.ttft_ms) == len(run.token_ids) == waves * CASE.batch_size
        assert all(len(tokens) == CASE.output_len for tokens in run.token_ids)
        assert len(run.decode_steps) == waves * (CASE.output_len - 1)
        assert len(run.itl_ms) == len(run.decode_steps) * CASE.batch_size
        assert len(run.repetition_ms) == 2
        run.engine.check_integrity()
        assert not run.engine.has_unfinished()
    document = prefix.to_json(*runs, bandwidth=1e10)
    assert document["tokens_equal"] == 1.0  # in float32
    assert document["hit_rate"] == document["found_tokens"] / document["prompt_tokens"]
    assert document["unshared"]["computed_tokens"] == document["prompt_tokens"]
    assert document["computed_tokens"] + document["found_tokens"] == document["prompt_tokens"]
    in_use = (document["unshared"]["blocks_in_use"], document["blocks_in_use"])
    # The rows hold the prefix once; and where prefill takes longer the first ones get further.
    saved = (CASE.batch_size - 1) * (shared // 16)
    assert saved <= in_use[0] - in_use[1] <= len(on._open_parts().groups) * (saved + 2)
    assert document["ttft_ratio"] > 0
    assert document["roofline"]["bandwidth_gb_s"] == 10.0
    assert document["roofline"]["fraction"] > 0


def test_both_engines_get_the_same_prompts_in_turns(
    open_pair: Callable[..., tuple[Engine, Engine]], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tuple[Engine, list[list[int]]]] = []

    def serve(run: PrefixRun, wave: Any) -> None:
        served.append((run.engine, [wave.first, *wave.prompts]))
        real(run, wave)

    real = prefix._serve
    monkeypatch.setattr(prefix, "_serve", serve)
    off, on = open_pair("base", CASE)
    prefix.measure_prefix(off, on, CASE, num_warmup=2, num_iters=3, seed=0)
    assert [engine for engine, _ in served[:4]] == [off, off, on, on]  # a wave each
    del served[:4]
    turns = [engine for engine, _ in served[::NUM_PREFIXES]]
    assert turns == [off, on, on, off, off, on]
    of_off, of_on = ([w for engine, w in served if engine is which] for which in (off, on))
    assert of_off == of_on
    prompts = [tuple(prompt) for wave in of_off for prompt in wave]
    assert len(set(prompts)) == len(prompts) == 3 * NUM_PREFIXES * (CASE.batch_size + 1)
    beginnings = {prompt[: CASE.input_len - TAIL_TOKENS] for prompt in prompts}
    assert len(beginnings) == 3 * NUM_PREFIXES
    for wave in of_off:
        assert len({tuple(prompt[:-TAIL_TOKENS]) for prompt in wave}) == 1
    config = on.model_config
    assert prefix._waves(config, CASE, 4) == prefix._waves(config, CASE, 4)
    assert prefix._waves(config, CASE, 4) != prefix._waves(config, CASE, 5)


def test_pools_have_room(open_engine: Callable[..., Engine]) -> None:
    """Five rows of a request's length are admitted at once, and none loses its blocks."""
    config = {"max_num_seqs": 5, "prefill_chunk": 40, "prefix_cache": False}
    model = open_engine("gemma2", **config).model_config
    sized = EngineConfig(device="cpu", mode="eager", **config)
    blocks = RequestBlocks.of(model, sized, 90)
    assert (blocks.num_groups, blocks.num_sliding) == (2, 1)
    engine = open_engine("gemma2", **config, num_blocks=blocks.pool(5))
    assert engine.memory_plan.cache == blocks.pool(5) * blocks.block_bytes
    outputs = engine.generate([list(range(n, n + 84)) for n in range(5)])
    assert len(outputs) == 5
    assert engine.stats()["preemptions"] == 0


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("prefix") / "a.json"
    with pytest.MonkeyPatch.context() as patch:
        assert run_bench(patch, f"{SMALL} --output-json {path}") == 0
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_the_document_is_as_the_schema_says(document: dict[str, Any]) -> None:
    (entry,) = document["prefix"]
    assert document["cases"] == []
    assert (entry["prefix_len"], entry["prefixes"], entry["batch_size"]) == (32, NUM_PREFIXES, 2)
    assert entry["ttft_ms"]["n"] == entry["unshared"]["ttft_ms"]["n"] == 2 * NUM_PREFIXES * 2
    assert entry["fallbacks"] == 0
    assert entry["roofline"]["bandwidth_gb_s"] == BANDWIDTH_GB_S
    assert 0 < entry["hit_rate"] < 32 / 64
    assert schema_errors(document) == []


def test_the_table(document: dict[str, Any]) -> None:
    ((_, (row,)),) = tables(document)
    assert (row["prompt"], row["shared"], row["n"]) == ("64", "32", "20")
    assert row["hit rate"] == "33%"  # two of three requests find half of their prompt
    assert row["computed tokens: off / on"] == "1,920 / 1,280"


def test_it_can_be_compared(
    document: dict[str, Any], tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(document))
    document = json.loads(old.read_text())
    document["prefix"][0]["ttft_ms"]["p50"] *= 2
    new.write_text(json.dumps(document))
    with pytest.MonkeyPatch.context() as patch:
        assert run_bench(patch, f"--compare {old} {new} --fail-above 1.5") == 1
    captured = capsys.readouterr()
    assert "2.0" in captured.out
    assert captured.err.startswith("bench.py: error: 1 of 2 ratios")
