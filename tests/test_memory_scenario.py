"""`--scenario memory`: the terms, a cache that fills, blocks that run out, and the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from stepgraph.cache.memory.memory_plan import TERMS
from stepgraph.runtime import Engine, EngineConfig
from stepgraph.runtime.bench.results.result_tables import tables
from stepgraph.runtime.bench.scenarios import memory_pressure as memory
from stepgraph.runtime.bench.scenarios.memory_pressure import MemoryCase

from .bench_rig import BANDWIDTH_GB_S, run_bench, schema_errors

CASE = MemoryCase("base", batch_size=4, input_lens=(16, 60), output_len=64, num_steps=30)
CHUNK = 40
SMALL = (
    "--scenario memory --mode eager --batch-size 4 --input-len 60 16 --output-len 48"
    " --num-steps 30 --num-iters 2 --num-warmup 0"
)


@pytest.fixture
def open_for(open_engine: Callable[..., Engine]) -> Callable[..., Engine]:
    """Open an engine for a case: the roomy one, or by how it preempts."""

    def make(variant: str, case: MemoryCase, preemption: str = "none") -> Engine:
        fields: dict[str, Any] = {"device": "cpu", "mode": "eager", "max_num_seqs": case.batch_size}
        fields |= {"prefill_chunk": CHUNK, "prefix_cache": False}
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
    first, last = memory.measure_full_cache(engine, CASE, seed=1)
    assert (first.input_len, last.input_len) == CASE.input_lens
    for measured in (first, last):
        assert len(measured.steps) == CASE.num_steps
        behind = measured.input_len
        contexts = [step.contexts for step in measured.steps]
        # The row that was prefilled last has the fewest tokens: its second is decoded first.
        assert [min(row) for row in contexts] == [behind + 1 + i for i in range(CASE.num_steps)]
        assert all(len(row) == CASE.batch_size for row in contexts)
    usable = engine.memory_plan.usable_blocks
    assert first.blocks_in_use < last.blocks_in_use <= usable
    if variant == "base":  # no layer slides
        assert last.blocks_in_use >= usable - CASE.batch_size
    assert engine.stats()["preemptions"] == 0
    engine.check_integrity()


def test_what_a_full_cache_is_told_by(open_for: Callable[..., Engine]) -> None:
    engine = open_for("base", CASE)
    full = memory.measure_full_cache(engine, CASE, seed=1)
    held = {"before": 1, "started": 2}
    entry = memory.to_json(engine, CASE, full, process_bytes=held, bandwidth=1e10)
    assert set(entry["memory"]) == set(TERMS)
    assert entry["memory"]["cache"]["measured"] == entry["memory"]["cache"]["planned"]
    blocks = entry["usable_blocks"] + 1
    assert entry["memory"]["cache"]["planned"] == blocks * entry["block_bytes"]
    assert entry["process_bytes"].keys() == {"before", "started", "filled"}
    assert entry["process_bytes"]["filled"] > 1 << 20
    for step, measured in zip(entry["steps"], full, strict=True):
        assert step["fill"] == measured.blocks_in_use / engine.memory_plan.usable_blocks
        read = sum(map(engine.kv_bytes_read, measured.steps[-1].contexts))
        assert step["slack"] == pytest.approx(
            1 - read / (measured.blocks_in_use * entry["block_bytes"])
        )
        assert 0 <= step["slack"] < 0.5
        assert step["padding"] == 0.0
        roofline = step["roofline"]
        assert roofline["bytes_per_step"] - engine.weight_bytes_per_step == pytest.approx(
            step["kv_bytes"], abs=1
        )
        assert roofline["fraction"] == pytest.approx(roofline["floor_ms"] / step["step_ms"]["p50"])
    short, long = entry["steps"]
    assert short["mean_context"] < long["mean_context"]
    assert short["kv_bytes"] < long["kv_bytes"]


def test_who_loses_blocks_decodes_the_same_tokens(open_for: Callable[..., Engine]) -> None:
    engines = {name: open_for("base", CASE, name) for name in ("none", "recompute", "swap")}
    runs = memory.measure_scarcity(engines, CASE, num_warmup=1, num_iters=2, seed=3)
    none, recompute, swap = runs.values()
    told = {name: run.to_json(name, none, 1e10) for name, run in runs.items()}
    for name, run in runs.items():
        assert len(run.seconds) == 2
        assert len(run.token_ids) == 2 * CASE.batch_size
        assert len(run.itl_ms) == len(run.token_ids) * (CASE.output_len - 1)
        assert told[name]["tokens_equal"] == 1.0  # in float32
        assert told[name]["blocks_left"] == 0
        assert told[name]["roofline"]["fraction"] > 0
        blocks = run.engine.stats()["blocks"]
        assert blocks["free"] == blocks["usable"]
        assert blocks["host_free"] == blocks["host"]
    assert none.counts == dict.fromkeys(none.counts, 0)
    half = CASE.batch_size // 2 * -(-CASE.scarce_len // 16)
    assert told["recompute"]["usable_blocks"] == told["swap"]["usable_blocks"] == half
    assert recompute.counts["preemptions"] >= 2
    assert recompute.counts["swapped_out"] == recompute.counts["swapped_in"] == 0
    # Whoever was preempted had its prompt at least.
    least = recompute.counts["preemptions"] * CASE.input_lens[0]
    assert recompute.counts["recomputed_tokens"] > least
    assert swap.counts["preemptions"] >= 2
    assert swap.counts["swapped_out"] == swap.counts["swapped_in"] > 0
    # A swapped request goes on with the token that it had not computed yet.
    assert swap.counts["recomputed_tokens"] <= swap.counts["preemptions"]


def test_a_single_row_loses_no_blocks(open_engine: Callable[..., Engine]) -> None:
    case = MemoryCase("base", 1, (16,), 8, 30)
    config = EngineConfig(device="cpu", mode="eager")
    assert case.scarce(config, open_engine("base").model_config) == {}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("memory") / "a.json"
    with pytest.MonkeyPatch.context() as patch:
        assert run_bench(patch, f"{SMALL} --output-json {path}") == 0
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def test_the_document_is_as_the_schema_says(document: dict[str, Any]) -> None:
    (entry,) = document["memory"]
    assert document["cases"] == []
    assert [step["input_len"] for step in entry["steps"]] == [16, 60]
    assert [run["preemption"] for run in entry["scarcity"]] == ["none", "recompute", "swap"]
    for run in entry["scarcity"]:
        assert run["roofline"]["bandwidth_gb_s"] == BANDWIDTH_GB_S
        assert run["repetitions"] == 2
        assert run["blocks_left"] == 0
    assert schema_errors(document) == []


def test_the_tables(document: dict[str, Any]) -> None:
    (_, terms), (_, full), (_, scarcity) = tables(document)
    assert [row["prompt"] for row in full] == ["16", "60"]
    assert [row["out of blocks"] for row in scarcity] == ["never", "compute again", "swap"]
    assert scarcity[0]["of unlimited"] == "100%"
    names = [row["term"] for row in terms]
    assert names[:3] == ["weights", "cache", "static buffers"]
    assert names[-3:] == ["measured terms", "process, started", "process, filled"]
    assert "captured graphs" not in names  # neither planned nor held
    alone = {**document, "memory": [{**document["memory"][0], "scarcity": []}]}
    assert len(list(tables(alone))) == 2


def test_rows_that_the_memory_cannot_hold_are_one_clear_line(
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
