"""The benchmark's command line: defaults by scenario, and one clear line for what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from stepgraph.__main__ import main
from stepgraph.runtime.bench.options import parse_arguments

from ..rigs.bench_rig import run_bench

WRONG_VALUES = [
    ("--batch-size 0", "'0' is not an integer of at least 1"),
    ("--mode fast", "invalid choice: 'fast'"),
    (f"--{'x' * 1000}", "unrecognized arguments: --xxx"),
    ("--batch-siz 1", "unrecognized arguments: --batch-siz 1"),
    ("--output-json=", "it is a directory"),
    ("--prefill-chunk 99999999", "'99999999' is not an integer from 1 to 1048576"),
    ("--scenario serve --max-itl-ms nan", "'nan' is not a positive number of milliseconds"),
    ("--peer cake", "with NAME one of openvino, vllm, llama.cpp, transformers"),
    ("--peer vllm=", "'vllm=' is not NAME or NAME=PYTHON"),
    ("--compare a", "expected 2 arguments"),
    ("--compare a b --fail-above 0.5", "'0.5' is not a ratio of at least 1"),
    ("--speculate", "--speculate: expected at least one argument"),
    ("--speculate guess", "must be one of 'suffix'"),
    ("--speculate suffix:x", "'x' is not a number of drafts"),
    ("--speculate suffix:99", "an integer from 1 to 15, not 99"),
    ("--speculate suffix --output-len 1", "'1' is not an integer of at least 2"),
    ("--speculate suffix --temperature x", "'x'"),
    ("--speculate suffix --scenario serve", "unrecognized arguments: --scenario serve"),
]
WRONG_COMBINATIONS = [
    ("--max-itl-ms 20", "--max-itl-ms: no effect together with --scenario steady"),
    ("--fail-above 1.05", "--fail-above has no effect without --compare"),
    ("--compare a b --scenario serve", "--scenario: no effect together with --compare"),
    ("--html x.html --scenario serve", "--html draws the steps of --scenario steady"),
    ("--from-json x.json", "--from-json has no effect without --html"),
    ("--html x --from-json y --seed 1", "--seed: no effect together with --from-json"),
    ("--graph-trace node", "--graph-trace has no effect without --profile"),
    ("--profile none --profile-output x", "--profile-output has no effect without --profile"),
    ("--profile torch --graph-trace node", "--graph-trace has no effect without --profile nsys"),
    ("--profile torch --batch-size 1 8", "one case: --batch-size has 2 values (1 8)"),
    ("--profile torch --num-iters 2", "a profile is of one repetition: --num-iters is 2"),
    ("--profile torch --baseline compiled", "--baseline cannot go with --profile"),
]
WRONG_FILES = [
    ("--output-json no/x.json", "no is not a directory"),
    ("--html no/x.html", "no is not a directory"),
    ("--output-json file/b.json", "file is not a directory"),
    ("--output-json link.json", "is not a directory"),
    ("--output-json pipe", "it is not a regular file, or is read-only"),
    ("--profile torch --profile-output no/x", "no is not a directory"),
    ("--profile nsys --profile-output taken", "taken.kernels.json: it is a directory"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_VALUES + WRONG_COMBINATIONS + WRONG_FILES)
def test_a_wrong_command_line_is_one_clear_line(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "taken.kernels.json"):
        Path(name).mkdir()
    Path("file").touch()
    Path("link.json").symlink_to("no/b.json")
    os.mkfifo("pipe")
    before = sorted(os.listdir())
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments.split()])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stepgraph bench: error: ")
    assert message in line
    assert len(line) < 500
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", {"batch_size": [1, 8], "input_len": [128, 1024], "output_len": [64], "num_iters": 3}),
        ("--neighbours 0 1 --threads 2", {"neighbours": [0, 1], "threads": 2}),
        ("--scenario serve", {"batch_size": [8], "threads": -1}),
        ("--scenario serve --duration 60", {"output_len": [32], "duration": 60}),
        ("--batch-size 2 1 2", {"batch_size": [2, 1]}),
        ("--scenario serve --max-itl-ms 20 40.5 --seed 0", {"max_itl_ms": [20.0, 40.5]}),
        (
            "--profile torch",
            {"batch_size": [1], "input_len": [1024], "num_iters": 1}
            | {"profile_steps": range(15, 31), "profile_output": Path("stepgraph-profile")},
        ),
    ],
)
def test_defaults_follow_the_scenario(arguments, expected):
    options = parse_arguments(arguments.split())
    assert {name: getattr(options, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("status", "arguments", "message"),
    [
        (1, "--model demo /no/such --mode eager", "no checkpoint at /no/such"),
        (2, "--dtype auto float32 --input-len 4000 --mode eager", "demo: max_model_len"),
        (2, "--mode eager graph --device cpu", "mode='graph' needs a CUDA device"),
        (2, "--batch-size 1 5000 --mode eager", "max_num_seqs must be an integer from 1 to 4096"),
        (2, "--model preset:nothing", "preset"),
        (2, "--model preset:smollm2-135m --tensor-parallel 1 2", "2 does not divide 9 query heads"),
        (2, "--device cuda:x", "cuda:x"),
        (1, "--peer vllm=/no/such", "vllm: cannot run /no/such"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_measured(
    capsys, monkeypatch, tmp_path, status, arguments, message
):
    def start(*_: object, **__: object) -> None:
        raise AssertionError("an engine was started")

    monkeypatch.setattr("stepgraph.runtime.Engine.from_pretrained", start)
    arguments += f" --output-json {tmp_path / 'a.json'}"
    assert run_bench(monkeypatch, arguments) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert last.startswith("stepgraph bench: error: ")
    assert message in last
    assert list(tmp_path.iterdir()) == []
