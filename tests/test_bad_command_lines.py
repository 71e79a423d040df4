"""Command lines that ask for too much, for nothing, or for the same thing twice."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from stepgraph.runtime import Engine, EngineConfig, StepgraphError
from stepgraph.runtime.bench.options import parse_arguments
from stepgraph.runtime.bench.steady import BenchmarkCase, CaseRun

from .bench_rig import ROOT, run_bench

SMALL = "--mode eager --batch-size 1 --input-len 8 --output-len 3 --num-warmup 0 --num-iters 1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (f"--mode {'eager' * 1000}", "argument --mode: invalid choice: 'eager"),
        (f"--{'x' * 1000}", "unrecognized arguments: --xxx"),
        ("--batch-size 0", "'0' is not an integer of at least 1"),
        ("--batch-siz 1", "unrecognized arguments: --batch-siz 1"),
        ("--comp old.json", "unrecognized arguments: --comp old.json"),
        ("--output-json=", "'' names no file"),
        ("--output-md new.md/", "'new.md/' names no file"),
        ("--plot=", "'' names no file"),
        ("--compare=", "'' names no file"),
        ("--num-iters 1000000000000000", "'1000000000000000' is more than 1,000,000,000"),
        ("--scenario churn --num-steps 9999999999", "is more than 1,000,000,000"),
        ("--seed 9223372036854775808", "is more than 9,223,372,036,854,775,807"),
        ("--explain-memory --device-memory 99999999999TB", "is no amount of memory"),
        (f"--explain-memory --device-memory {'9' * 400}", "is no amount of memory"),
    ],
)
def test_a_wrong_command_line_is_one_clear_line(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "argv", ["bench.py"])
    with pytest.raises(SystemExit) as caught:
        parse_arguments(arguments.split())
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench.py: error: ")
    assert message in line
    assert len(line) < 500


@pytest.mark.parametrize(
    ("status", "arguments", "message"),
    [
        (1, "--model demo /no/such --mode eager", "no checkpoint at /no/such"),
        (2, "--dtype auto float32 --input-len 4000 --mode eager", "demo: max_model_len"),
        (2, "--mode eager graph --device cpu", "mode='graph' needs a CUDA device"),
        (2, "--batch-size 1 5000 --mode eager", "max_num_seqs must be an integer from 1 to 4096"),
        (1, "--scenario churn --model demo /no/such --mode eager", "no checkpoint at /no/such"),
        (2, "--scenario interference --mode eager graph --device cpu", "mode='graph' needs a CUDA"),
        (2, "--scenario start --batch-size 5000", "max_num_seqs must be an integer from 1 to 4096"),
        (2, "--scenario memory --prefill-chunk 99999999", "prefill_chunk must be an integer from"),
        (2, "--scenario neighbours --input-len 4000", "max_model_len"),
        (2, "--model preset:nothing", "preset"),
        (2, "--device toaster", "toaster"),
        (2, "--device cuda:x", "cuda:x"),
        (2, "--explain-memory --batch-size 5000", "max_num_seqs must be an integer from 1 to 4096"),
        (2, "--explain-step --bandwidth-gb-s 100 --input-len 5000", "2048 positions of the model"),
    ],
)
def test_what_cannot_run_is_told_before_anything_is_measured(
    capsys, monkeypatch, tmp_path, status, arguments, message
):
    def start(*_: object, **__: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("stepgraph.runtime.Engine.from_pretrained", start)
    if "--explain" not in arguments:
        arguments += f" --output-json {tmp_path / 'a.json'}"
    assert run_bench(monkeypatch, arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert last.startswith("bench.py: error: ")
    assert message in last
    assert list(tmp_path.iterdir()) == []


def test_what_is_asked_for_twice_is_measured_once(monkeypatch, tmp_path):
    """Two of one case are no result that a later run can be compared with."""
    path = tmp_path / "a.json"
    twice = f"{SMALL} --model demo demo --dtype auto bfloat16".replace(" 8", " 8 8")
    assert run_bench(monkeypatch, f"{twice} --output-json {path}") == 0
    assert len(json.loads(path.read_text())["cases"]) == 1
    assert run_bench(monkeypatch, f"--compare {path} {path}") == 0


def test_who_stops_reading_misses_the_rest_and_no_file(tmp_path):
    """`bench.py ... | true`, which reads nothing: the files are whole, and so is the status."""
    old = tmp_path / "old.json"
    run = [sys.executable, "bench.py"]
    first = subprocess.run(
        [*run, *SMALL.split(), "--output-json", old], cwd=ROOT, capture_output=True, check=True
    )
    assert first.stdout.startswith(b"| model")
    process = subprocess.Popen(
        [*run, "--compare", old, old, "--fail-above", "1", "--output-md", tmp_path / "a.md"],
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
    assert "ratios of times" in (tmp_path / "a.md").read_text()


def test_requests_that_never_decode_side_by_side_are_an_error():
    """Where one has to wait until another ended no step decodes the whole batch, however long."""
    config = EngineConfig(
        mode="eager", device="cpu", prefix_cache=False, max_num_seqs=1, max_model_len=64
    )
    with Engine.from_pretrained("demo", config, progress=False) as engine:
        run = CaseRun(engine, BenchmarkCase("demo", 2, 8, 3), seed=0)
        with pytest.raises(StepgraphError, match="2 requests ended before 2 steps decoded all of"):
            run.warm_up()
