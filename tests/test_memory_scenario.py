"""`--scenario memory`: the terms, a cache that fills, and blocks that run out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from stepgraph.cache.memory.memory_plan import TERMS
from stepgraph.runtime import Engine, EngineConfig
from stepgraph.runtime.bench.results.result_tables import tables
from stepgraph.runtime.bench.scenarios import memory_pressure as memory
from stepgraph.runtime.bench.scenarios.memory_pressure import MemoryCase

from .bench_rig import run_bench

CASE = MemoryCase(batch_size=4, input_lens=(16, 60), output_len=64, num_steps=30)


@pytest.fixture
def open_for(open_engine: Callable[..., Engine]) -> Callable[..., Engine]:
    """Open an engine for a case: the roomy one, or by how it preempts."""

    def make(variant: str, case: MemoryCase, preemption: str = "none") -> Engine:
        fields: dict[str, Any] = {"device": "cpu", "mode": "eager", "max_num_seqs": case.batch_size}
        fields |= {"prefill_chunk": 40, "prefix_cache": False}
        model = open_engine(variant, **fields).model_config
        config = EngineConfig(**fields)
        configs = {"none": case.roomy(config, model), **case.scarce(config, model)}
        names = ("num_blocks", "max_model_len", "preemption", "host_cache_bytes")
        fields |= {name: getattr(configs[preemption], name) for name in names}
        return open_engine(variant, **fields)

    return make


@pytest.mark.parametrize("variant", ["base", "gemma2", "deepseek_v2"])
def test_the_last_prompts_fill_the_pool(open_for: Callable[..., Engine], variant: str) -> None:
    engine = open_for(variant, CASE)
    first, last = full = memory.measure_full_cache(engine, CASE, seed=1)
    assert (first.input_len, last.input_len) == CASE.input_lens
    for measured in full:
        contexts = [step.contexts for step in measured.steps]
        # The row that was prefilled last has the fewest tokens: its second is decoded first.
        least = measured.input_len + 1
        assert [min(row) for row in contexts] == [least + i for i in range(CASE.num_steps)]
        assert all(len(row) == CASE.batch_size for row in contexts)
    usable = engine.memory_plan.usable_blocks
    assert first.blocks_in_use < last.blocks_in_use <= usable
    if variant == "base":  # no layer slides
        assert last.blocks_in_use >= usable - CASE.batch_size
    assert engine.stats()["preemptions"] == 0
    engine.check_integrity()

    held = {"before": 1, "started": 2}
    entry = memory.to_json(engine, "tiny", full, held, 1e10)
    assert set(entry["memory"]) == set(TERMS)
    cache = entry["memory"]["cache"]
    assert cache["measured"] == cache["planned"]
    assert cache["planned"] == (entry["usable_blocks"] + 1) * entry["block_bytes"]
    assert entry["process_bytes"]["filled"] > 1 << 20
    for step, measured in zip(entry["steps"], full, strict=True):
        assert step["fill"] == measured.blocks_in_use / usable
        read = sum(map(engine.kv_bytes_read, measured.steps[-1].contexts))
        slack = 1 - read / (measured.blocks_in_use * entry["block_bytes"])
        assert step["slack"] == pytest.approx(slack)
        assert step["padding"] == 0.0
        roofline = step["roofline"]
        assert roofline["bytes_per_step"] - engine.weight_bytes_per_step == pytest.approx(
            step["kv_bytes"], abs=1
        )
        assert roofline["fraction"] == pytest.approx(roofline["floor_ms"] / step["step_ms"]["p50"])
    short, long = entry["steps"]
    assert short["mean_context"] < long["mean_context"]
    assert short["kv_bytes"] < long["kv_bytes"]


def test_preempted_requests_decode_the_same_tokens(open_for: Callable[..., Engine]) -> None:
    engines = {name: open_for("base", CASE, name) for name in ("none", "recompute", "swap")}
    runs = memory.measure_scarcity(engines, CASE, num_warmup=1, num_iters=2, seed=3)
    none, recompute, swap = (run.to_json(name, runs["none"], 1e10) for name, run in runs.items())
    requests = 2 * CASE.batch_size
    for entry in (none, recompute, swap):
        assert entry["repetitions"] == 2
        assert entry["itl_ms"]["n"] == requests * (CASE.output_len - 1)
        assert entry["tokens_equal"] == 1.0  # in float32
        assert entry["blocks_left"] == 0
        assert entry["roofline"]["fraction"] > 0
    for name in ("preemptions", "swapped_out", "swapped_in", "recomputed_tokens"):
        assert none[name] == 0
    half = CASE.batch_size // 2 * -(-CASE.scarce_len // 16)
    assert recompute["usable_blocks"] == swap["usable_blocks"] == half
    assert min(recompute["preemptions"], swap["preemptions"]) >= 2
    assert recompute["swapped_out"] == recompute["swapped_in"] == 0
    # A preempted request had its prompt at least.
    assert recompute["recomputed_tokens"] > recompute["preemptions"] * CASE.input_lens[0]
    assert swap["swapped_out"] == swap["swapped_in"] > 0
    # A swapped request continues with the token that it had not computed yet.
    assert swap["recomputed_tokens"] <= swap["preemptions"]

    held = {"before": 1, "started": 2}
    entry = memory.to_json(engines["none"], "tiny", [], held, 1e10)
    document = {"memory": [entry | {"scarcity": [none, recompute, swap]}]}
    (_, terms), (_, scarcity) = tables(document)
    assert [row["out of blocks"] for row in scarcity] == ["never", "compute again", "swap"]
    assert scarcity[0]["of unlimited"] == "100%"
    names = [row["term"] for row in terms]
    assert names[:3] == ["weights", "cache", "static buffers"]
    assert names[-3:] == ["measured terms", "process, started", "process, filled"]
    assert "captured graphs" not in names  # neither planned nor held


def test_a_single_row_loses_no_blocks(open_engine: Callable[..., Engine]) -> None:
    case = MemoryCase(1, (16,), 8, 30)
    config = EngineConfig(device="cpu", mode="eager")
    assert case.scarce(config, open_engine("base").model_config) == {}


def test_rows_that_the_memory_cannot_hold_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "stepgraph.cache.memory.device_memory.available_bytes", lambda device: 100 << 20
    )
    arguments = "--scenario memory --mode eager --batch-size 64 --input-len 1024"
    assert run_bench(monkeypatch, arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    line = captured.err.splitlines()[-1]
    assert line.startswith("bench.py: error: the available memory of 104857600 bytes")
    assert "Lower the number of blocks, max_batch_tokens or max_num_seqs" in line
