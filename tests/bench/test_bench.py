"""bench.py from its command line to its JSON and its table."""

from __future__ import annotations

import gc
import mmap
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import get_args
from unittest.mock import Mock

import pytest
import torch
from stepgraph.profiling import atomic_write, ranges
from stepgraph.profiling.atomic_write import check_writable, write_file
from stepgraph.runtime import Engine, StepgraphError
from stepgraph.runtime.bench import cli, workload
from stepgraph.runtime.bench.benchmark_run import SAMPLE_SECONDS, StartMemory
from stepgraph.runtime.bench.results import report, table_rows
from stepgraph.runtime.bench.serve import Status
from stepgraph.runtime.bench.workload import (
    BenchmarkCase,
    EngineRun,
    decode_batch,
    equal_share,
)
from stepgraph.runtime.kernels.cpu.features import cpu_features
from stepgraph.runtime.tools.step_costs import decode_roofline

from ..rigs.bench_rig import ROOT, measured, run_bench
from ..rigs.engine_rig import opened, parts_of
from ..rigs.tiny_models import TinyModel

SMALL = "--batch-size 1 2 --input-len 24 --output-len 12 --num-warmup 0 --num-iters 1"
ONE = "--mode eager --batch-size 1 --input-len 8 --output-len 3 --num-warmup 0 --num-iters 1"


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    """A real run of the demo model, eager, as `--output-json` leaves it.

    A model that is named twice is measured once.
    """
    folder = tmp_path_factory.mktemp("bench")
    twice = f"{SMALL} --model demo demo --dtype auto bfloat16 --mode eager --kernels torch"
    with pytest.MonkeyPatch.context() as patch:
        found = measured(patch, folder, twice)
        assert run_bench(patch, f"--compare {folder}/a.json {folder}/a.json") == 0
    return found


@pytest.mark.skipif("avx512vnni" not in cpu_features(), reason="needs AVX512-VNNI")
def test_each_dtype_of_activations_is_measured(monkeypatch, tmp_path):
    flags = f"{SMALL} --batch-size 1 --weight-dtype int4 --activation-dtype auto int8"
    found = measured(monkeypatch, tmp_path, flags)
    assert [case["activation_dtype"] for case in found["cases"]] == ["bfloat16", "int8"]
    _, rows = table_rows(found)
    assert [row["activations"] for row in rows] == ["bfloat16", "int8"]
    plain, rounded = (case["instruction_sets"] for case in found["cases"])
    assert plain.items() <= rounded.items()
    assert rounded["int8 inputs"] == "avx512vnni"
    assert f"codes {plain['codes']}, attention" in report(found)


def test_a_case_is_what_was_measured(document):
    assert document["environment"]["command"].startswith("stepgraph bench --batch-size 1 2")
    assert document["environment"]["driver"] is None
    one, two = document["cases"]
    assert (one["batch_size"], two["batch_size"]) == (1, 2)
    for case in document["cases"]:
        assert [case[name] for name in ("dtype", "weight_dtype", "kv_dtype")] == ["bfloat16"] * 3
        assert case["tokens_equal_eager"] == 1.0
        assert (case["fallbacks"], case["device_state"]) == (0, None)
        # Only steps that decode the whole batch count; the prefill step makes token 0.
        assert len(case["samples"]["step_ms"]) == case["step_ms"]["n"] == case["output_len"] - 1
        assert case["ttft_ms"]["n"] == case["batch_size"]
        assert case["itl_ms"]["n"] == case["batch_size"] * (case["output_len"] - 1)
        assert case["padding"] == 0.0
        assert case["start"]["peak_bytes"] > 0 <= case["start"]["load_peak_bytes"]
        # 11 samples support p90.
        assert (case["step_ms"]["p90"] is None, case["step_ms"]["p99"]) == (False, None)
    _, rows = table_rows(document)
    assert rows[0]["step ms p50 / p90 / p99"].endswith(" / -")
    kv_bytes_per_token = 2 * 6 * 2 * 32 * 2  # k and v, layers, kv heads, head_dim, bf16
    assert one["kv_bytes"] == (24 + 12 // 2) * kv_bytes_per_token
    assert two["kv_bytes"] == 2 * one["kv_bytes"]
    assert two["roofline"]["bytes_per_step"] - one["roofline"]["bytes_per_step"] == one["kv_bytes"]


def test_start_memory_is_what_the_process_alone_holds(tmp_path):
    """64 MB of a mapped file are left out; 32 MB are held while loading, 32 MB before."""

    def hold() -> mmap.mmap:
        # Own pages: an allocator may answer with memory that an earlier test has left resident.
        held = mmap.mmap(-1, 32_000_000, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for _ in range(32):
            held.write(b"x" * 1_000_000)
        return held

    path = tmp_path / "weights"
    path.write_bytes(bytes(64_000_000))
    gc.collect()  # else what earlier tests left is freed between two samples
    memory = StartMemory()
    with memory.sampling(), hold(), path.open("rb") as file, ranges.span(ranges.LOAD):
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        assert mapped.find(b"x") == -1
        with hold():
            time.sleep(20 * SAMPLE_SECONDS)
    assert memory.peaks["load_peak_bytes"] == pytest.approx(32e6, rel=0.1)
    assert memory.peaks["peak_bytes"] == pytest.approx(64e6, rel=0.1)


def test_a_step_lasts_until_the_next_tokens(monkeypatch):
    """What the caller does between two steps is in the time of the second one."""
    clock = [0.0]

    class Output:
        @property
        def request_id(self):
            clock[0] += 0.5e-3  # a caller that takes its time
            return "a"

    def step():
        clock[0] += 4e-3
        return [Output()]

    monkeypatch.setattr(workload.time, "perf_counter", lambda: clock[0])
    engine = SimpleNamespace(
        add_request=lambda *_: "a", step=step, abort=lambda _: None, has_unfinished=lambda: False
    )
    assert decode_batch(engine, [[1]], 9, 3)[0] == pytest.approx([4.0, 4.5, 4.5])


def test_a_file_is_written_whole_and_nothing_else_is_left(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    check_writable(path)
    assert os.listdir(tmp_path) == []
    write_file(path, "one µ\n")
    path.chmod(0o640)
    check_writable(path)
    assert path.read_text(encoding="utf-8") == "one µ\n"
    write_file(path, "two\n")
    assert path.stat().st_mode & 0o777 == 0o640
    with monkeypatch.context() as patched:
        patched.setattr(atomic_write.os, "replace", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_file(path, "after")
    assert path.read_text() == "two\n"
    assert os.listdir(tmp_path) == ["a.json"]


def test_what_was_measured_before_an_interrupt_is_kept(monkeypatch, tmp_path, capsys):
    def repeat(run: EngineRun) -> None:
        if run.case.batch_size == 2:
            raise KeyboardInterrupt
        real(run)

    real = EngineRun.repeat
    monkeypatch.setattr(EngineRun, "repeat", repeat)
    arguments = ONE.replace("--batch-size 1", "--batch-size 1 2")
    (case,) = measured(monkeypatch, tmp_path, arguments, 130)["cases"]
    assert case["batch_size"] == 1
    captured = capsys.readouterr()
    assert captured.err.splitlines()[-1].startswith("stepgraph bench: interrupted")
    assert "Traceback" not in captured.err
    assert re.search(r"^\| +1 \| +8 \|", captured.out, re.MULTILINE)
    assert os.listdir(tmp_path) == ["a.json"]


def test_load_is_offered_at_each_rate(monkeypatch, tmp_path, capsys):
    flags = "--scenario serve --mode eager --batch-size 2 --input-len 8 --output-len 4"
    document = measured(monkeypatch, tmp_path, f"{flags} --rates 0.5 0.1 --duration 0.5")
    assert capsys.readouterr().out == report(document) + "\n"
    for entry, fraction in zip(document["serve"], (0.5, 0.1), strict=True):
        assert entry["rate"] == fraction * entry["capacity"] > 0
        assert entry["requests"] == sum(entry[status] for status in get_args(Status)) > 0
        assert entry["completed"] > 0
        assert entry["slo_ttft_ms"] > 0 < entry["slo_itl_ms"]


@pytest.mark.slow
def test_ranks_are_measured_in_turn(monkeypatch, tmp_path):
    """All ranks of a CPU read from one memory, so their bytes are added."""
    one, two = measured(monkeypatch, tmp_path, f"{ONE} --tensor-parallel 1 2")["cases"]
    assert (one["tensor_parallel"], two["tensor_parallel"]) == (1, 2)
    assert one["interleaved"]
    assert two["interleaved"]
    read = [case["roofline"]["bytes_per_step"] for case in (one, two)]
    assert read[0] < read[1] < 1.2 * read[0]


def test_a_closed_pipe_is_no_error():
    """`bench.py ... | true`, which reads nothing."""
    old = ROOT / "docs" / "results" / "cpu-2x-zen4" / "ranks.json"
    process = subprocess.Popen(
        [sys.executable, "bench.py", "--compare", old, old, "--fail-above", "1"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 0


def test_requests_that_never_decode_together_are_an_error():
    """If one request waits until another ends, no step decodes the whole batch."""
    with opened("demo", prefix_cache=False, max_num_seqs=1, max_model_len=64) as engine:
        run = EngineRun(engine, BenchmarkCase(2, 8, 3), [[1] * 8] * 2)
        with pytest.raises(StepgraphError):
            run.decode()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("weight_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("variant", ["odd", "qwen3", "deepseek_v2"])
def test_bytes_are_those_that_are_stored(
    open_engine: Callable[..., Engine], variant: str, kv_dtype: str, weight_dtype: str
) -> None:
    """Scales of cache and weights included; `odd` has an embedding that is only gathered from."""
    engine = open_engine(variant, kv_dtype=kv_dtype, weight_dtype=weight_dtype)
    parts = parts_of(engine)
    arena = parts.runner.arena.tensor
    of_slot = arena.nbytes / (arena.shape[2] * engine.config.user.block_size)  # in one group
    assert engine.kv_bytes_read(1) == of_slot * len(parts.groups)
    weights = {p.data_ptr(): p.untyped_storage().nbytes() for p in parts.model.parameters()}
    gathered = 0
    if not engine.model_config.tie_word_embeddings:
        embedding = parts.model.embed_tokens.parameters()
        gathered = sum(p.untyped_storage().nbytes() for p in embedding)
    assert engine.weight_bytes_read(1) == sum(weights.values()) - gathered
    if weight_dtype != "auto":
        stored = {p.dtype for p in parts.model.parameters()}
        assert stored & {torch.int8, torch.float8_e4m3fn, torch.uint8}
    limit = decode_roofline(engine, [1, 1, 1], 1e9, 0.1)
    read = engine.weight_bytes_read(1) + 3 * engine.kv_bytes_read(1)
    assert (limit["bytes_per_step"], limit["floor_ms"]) == (read, pytest.approx(read / 1e6))
    assert limit["fraction"] == pytest.approx(read / 1e8)


def test_a_window_is_read_and_no_more(open_engine: Callable[..., Engine]) -> None:
    engine = open_engine("mistral")  # all layers slide over 13 tokens
    assert engine.kv_bytes_read(13) == engine.kv_bytes_read(200) == 13 * engine.kv_bytes_read(1)


def test_the_share_of_equal_tokens() -> None:
    assert equal_share([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == 0.75
    assert equal_share([[1, 2]], [[1]]) == 0.5
    with pytest.raises(ValueError, match="shorter"):
        equal_share([[1, 2]], [])
    with pytest.raises(ValueError, match="no token"):
        equal_share([], [])


# Speculation --------------------------------------------------------------------------------------


def test_run_compares_proposers(
    base: TinyModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two proposers of one name, as two heads have."""
    monkeypatch.setattr("stepgraph.runtime.bench.speculation.PROMPT_TOKENS", 20)
    flags = ["--speculate", "suffix:1", "suffix:1", "ngram:2", "--model", str(base.directory)]
    small = "--batch-size 2 --kind random --num-iters 2 --output-len 4 --num-starts 2"
    small += " --device cpu --dtype float32"
    assert cli.main([*flags, *small.split()]) == 0
    _, _, *lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert [row[3] for row in cells] == ["suffix:1", "suffix:1", "ngram:2"]
    assert all(row[-1] == "same" and 20 <= int(row[-2]) <= 24 for row in cells)  # 3 of 8 rows


def test_model_without_a_tokenizer_is_refused(base: TinyModel) -> None:
    flags = ["--speculate", "suffix", "--model", str(base.directory), "--kind", "edit"]
    assert cli.main([*flags, "--batch-size", "1", "--output-len", "4"]) == 2
