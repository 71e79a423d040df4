"""`--scenario memory`: the terms, a cache that fills, blocks that run out, and the command line."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from stepgraph.cache.memory.memory_plan import TERMS
from stepgraph.runtime import Engine, EngineConfig
from stepgraph.runtime.bench import memory
from stepgraph.runtime.bench.memory import MemoryCase
from stepgraph.runtime.bench.memory_rows import FULL_COLUMNS, SCARCITY_COLUMNS, TERM_COLUMNS
from stepgraph.runtime.bench.options import parse_arguments
from stepgraph.runtime.bench.tables import markdown_table, tables
from stepgraph.runtime.bench.terminal import for_terminal

from .bench_rig import BANDWIDTH_GB_S, refusal, run_bench, schema_errors

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
    terms, full, scarcity = tables(document)
    assert terms.columns == TERM_COLUMNS
    assert full.columns == FULL_COLUMNS
    assert scarcity.columns == SCARCITY_COLUMNS
    for table in (terms, full, scarcity):
        assert all(len(row) == len(table.columns) for row in table.rows)
    assert [row[6] for row in full.rows] == ["16", "60"]
    assert [row[8] for row in scarcity.rows] == ["never", "compute again", "swap"]
    assert scarcity.rows[0][SCARCITY_COLUMNS.index("of unlimited")] == "100%"
    names = [row[6] for row in terms.rows]
    assert names[:3] == ["weights", "cache", "static buffers"]
    assert names[-3:] == ["measured terms", "process, started", "process, filled"]
    assert "captured graphs" not in names  # neither planned nor held
    text = markdown_table(document)
    for table in (terms, full, scarcity):
        assert f"{table.title}\n\n| model" in text


def test_a_row_alone_has_no_third_table(document: dict[str, Any]) -> None:
    alone = {**document, "memory": [{**document["memory"][0], "scarcity": []}]}
    assert [table.columns for table in tables(alone)] == [TERM_COLUMNS, FULL_COLUMNS]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--input-len 128 4000", "max_model_len=4"),
        ("--output-len 5000", "max_model_len=5"),
        ("--batch-size 5000", "max_num_seqs must be an integer from 1 to 4096, not 5000"),
    ],
)
def test_what_cannot_run_is_one_clear_line_before_anything_is_measured(
    arguments: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Any,
) -> None:
    arguments = f"--scenario memory --mode eager {arguments}"
    assert message in refusal(monkeypatch, capsys, tmp_path, arguments)


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
    _, line = captured.err.splitlines()
    assert line.startswith("bench.py: error: the available memory of 104857600 bytes")
    assert "Lower the number of blocks, max_batch_tokens or max_num_seqs" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("memory --num-steps 29", "'29' is not an integer of at least 30"),
        ("memory --max-itl-ms 5", "--max-itl-ms: no effect together with --scenario memory"),
        ("memory --input-len 0", "'0' is not an integer of at least 1"),
        ("prefix --num-steps 50", "--num-steps: no effect together with --scenario prefix"),
        ("prefix --output-len 1", "'1' is not an integer of at least 2"),
        ("prefix --steps-per-launch 2", "--steps-per-launch: no effect together with --scen"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments(["--scenario", *arguments.split()])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_defaults_follow_the_scenario() -> None:
    options = parse_arguments(["--scenario", "memory"])
    assert (options.batch_size, options.input_len) == ([8], [128, 512, 1024])
    assert (options.output_len, options.num_steps, options.num_iters) == ([128], 100, 3)
    options = parse_arguments(["--scenario", "prefix", "--num-iters", "5"])
    assert (options.batch_size, options.input_len, options.output_len) == ([8], [512], [32])
    assert (options.num_warmup, options.num_iters) == (1, 5)


def test_a_terminal_shows_all_tables(document: dict[str, Any]) -> None:
    console = Console(width=300, record=True, file=io.StringIO())
    console.print(for_terminal(markdown_table(document), console.width))
    text = console.export_text()
    for name in (*TERM_COLUMNS[6:], *FULL_COLUMNS[6:], *SCARCITY_COLUMNS[6:]):
        assert name in text, name
    for table in tables(document):
        assert table.title is not None
        assert table.title in text
