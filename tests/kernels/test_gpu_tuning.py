"""What linear kernels are tuned to: the file, who reads and writes it, and what is timed.

Everything but the time itself runs without a device: a timer that looks it up in a table decides.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from stepgraph.runtime.kernels import WeightStorage
from stepgraph.runtime.kernels.triton import tuning
from stepgraph.runtime.kernels.triton.kernel_calls import num_multiprocessors
from stepgraph.runtime.kernels.triton.linear import LIBRARY, LinearConfig
from stepgraph.runtime.kernels.triton.linear_configs import candidate_configs, default_config
from stepgraph.runtime.kernels.triton.tuning import Tuned, TuningKey
from stepgraph.runtime.tools import linear_timing, tune
from stepgraph.runtime.tools.linear_problems import LinearProblem, Operands

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU_FOLDER = Path(tuning.__file__).parent
KEY = TuningKey("gate_up", 4, 8192, 2048, "bfloat16", "int8", "card", "3.6.0", "abc")
TUNED = Tuned(LinearConfig(8, 512, 4, prefetch=8192), 15.6, 17.25)


def new_process() -> None:
    tuning._known.cache_clear()
    tuning._best_config.cache_clear()


def test_what_is_stored_is_found_by_later_processes() -> None:
    assert tuning.lookup(KEY) is None
    path = tuning.store({KEY: TUNED})
    assert path == tuning.tuning_file()
    assert path.parent.name == "stepgraph"
    assert tuning.lookup(KEY) is None, "the file was read before: an engine's choices stay"
    new_process()
    assert tuning.lookup(KEY) == TUNED.config
    (entry,) = json.loads(path.read_text())["entries"]
    assert entry["kernel"] == "gate_up"
    assert entry["config"] == dataclasses.asdict(TUNED.config)
    assert (entry["microseconds"], entry["default_microseconds"]) == (15.6, 17.25)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(TuningKey)])
def test_another_key_is_another_entry(field: str) -> None:
    value = getattr(KEY, field)
    other = dataclasses.replace(KEY, **{field: value + ("x" if isinstance(value, str) else -1)})
    tuning.store({KEY: TUNED})
    new_process()
    assert tuning.lookup(other) is None
    better = dataclasses.replace(TUNED, config=LinearConfig(16, 256, 8))
    tuning.store({other: better})
    new_process()
    assert tuning.lookup(KEY) == TUNED.config
    assert tuning.lookup(other) == better.config
    tuning.store({other: TUNED})
    new_process()
    assert tuning.lookup(other) == TUNED.config


CONFIG = dataclasses.asdict(TUNED.config)


def changed(**changes: Any) -> str:
    entry = {**dataclasses.asdict(KEY), **dataclasses.asdict(TUNED), **changes}
    return json.dumps({"version": tuning.VERSION, "entries": [entry]})


FOREIGN = [
    "",
    "{",
    "[]",
    "null",
    '"text"',
    '{"version": 99, "entries": []}',
    '{"entries": []}',
    '{"version": 1, "entries": 5}',
    '{"version": 1, "entries": [5]}',
    '{"version": 1, "entries": [{}]}',
    changed(rows="4"),
    changed(n=8192.5),
    changed(kernel=None),
    changed(microseconds="fast"),
    changed(microseconds=float("nan")),
    changed(config=5),
    changed(config=None),
    changed(config={"block_n": 8}),
    changed(config=CONFIG | {"block_k": 500}),
    changed(config=CONFIG | {"num_warps": True}),
    changed(config=CONFIG | {"block_n": 0}),
    changed(config=CONFIG | {"block_n": 1 << 40}),
    changed(config=CONFIG | {"splits": -1}),
    changed(config=CONFIG | {"stages": 99}),
    changed(config=CONFIG | {"prefetch": True}),
    changed(config=CONFIG | {"kind": "none"}),
    changed(config=CONFIG | {"kind": ["library"]}),
    changed(config=CONFIG, rows=16),  # of a kernel for few rows
    changed(config=CONFIG | {"kind": "library"}, kernel="combine_output"),
    b"\xff\xfe\x00",
]


@pytest.mark.parametrize("content", FOREIGN, ids=range(len(FOREIGN)))
def test_a_file_that_is_not_understood(
    content: str | bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tuning.tuning_file()
    path.parent.mkdir(parents=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    new_process()
    with caplog.at_level(logging.WARNING, logger="stepgraph.runtime"):
        for _ in range(3):
            assert tuning.lookup(KEY) is None
    (record,) = caplog.records
    assert f"{path} is ignored, kernels run with their defaults" in record.getMessage()
    tuning.store({KEY: TUNED})
    new_process()
    assert tuning.lookup(KEY) == TUNED.config


def test_writers_at_the_same_time_lose_nothing() -> None:
    """Locks of files hold between threads too: each opens the file for itself."""
    keys = [dataclasses.replace(KEY, n=n) for n in range(1, 41)]

    def write(part: Sequence[TuningKey]) -> None:
        for key in part:
            tuning.store({key: TUNED})

    threads = [threading.Thread(target=write, args=(keys[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(tuning.lookup(key) == TUNED.config for key in keys)
    left = {path.name for path in tuning.tuning_file().parent.iterdir()}
    assert left == {"tuned_linear.json", "tuned_linear.lock"}


def test_an_interrupted_write_leaves_the_old_file(monkeypatch: pytest.MonkeyPatch) -> None:
    path = tuning.store({KEY: TUNED})
    before = path.read_bytes()

    def interrupted(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuning.json, "dump", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tuning.store({dataclasses.replace(KEY, n=3): TUNED})
    assert path.read_bytes() == before
    assert {p.name for p in path.parent.iterdir()} == {path.name, "tuned_linear.lock"}


def test_the_source_is_all_that_kernels_are_made_of() -> None:
    """The files with kernels and device functions that operations come to by their imports."""

    def has_kernels(name: str) -> bool:
        return "@triton.jit" in (GPU_FOLDER / name).read_text()

    found: set[str] = set()
    queue = ["head.py", "linear_dispatch.py", "experts.py"]
    for name in queue:
        for node in ast.walk(ast.parse((GPU_FOLDER / name).read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                imported = f"{node.module}.py"
                if imported not in found and has_kernels(imported):
                    found.add(imported)
                    queue.append(imported)
    assert (found | {"head.py"}) - {"kernel_calls.py"} == set(tuning.SOURCES)


def test_the_best_is_what_was_tuned_or_the_default() -> None:
    shape = ("residual_linear", 2, 96, 64, torch.bfloat16, torch.int8, CPU)
    default = default_config("residual_linear", 2, 96, 64, 1, num_multiprocessors(CPU))
    assert tuning.best_config(*shape) == default
    tuning.store({tuning.tuning_key(*shape): TUNED})
    new_process()
    assert TUNED.config != default
    assert tuning.best_config(*shape) == TUNED.config


def problem_of(kernel: str, weights: WeightStorage = "model", **more: Any) -> LinearProblem:
    sizes = {"rows": 2, "n": 20, "k": 32, "dtype": torch.bfloat16, "weights": weights}
    return LinearProblem(kernel, **(sizes | more))


def test_the_fastest_that_runs_is_kept() -> None:
    problem = problem_of("gate_up", n=8192, k=2048)
    configs = candidate_configs("gate_up", 2, 8192, 2048, 2, 132)
    assert len(configs) > 4

    def table(times: dict[int, float | None]) -> linear_timing.Timer:
        def timer(asked: LinearProblem, given: linear_timing.Configs) -> list[float | None]:
            assert (asked, list(given)) == (problem, configs)
            return [times.get(i, 20e-6) for i in range(len(given))]

        return timer

    tuned = linear_timing.tune(problem, table({3: 11e-6, 2: None}), 132)
    assert tuned == Tuned(configs[3], pytest.approx(11.0), pytest.approx(20.0))
    tuned = linear_timing.tune(problem, table({0: None, 1: 9e-6}), 132)
    assert tuned == Tuned(configs[1], pytest.approx(9.0), pytest.approx(9.0))
    assert linear_timing.tune(problem, table({}), 132).config == configs[0]
    nothing = dict.fromkeys(range(len(configs)))
    assert linear_timing.tune(problem, table(nothing), 132) is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("weights", ["model", "int8", "fp8"])
@pytest.mark.parametrize(
    "problem",
    [
        problem_of("norm_linear"),
        problem_of("norm_linear", pending=True, dtype=torch.float32),
        problem_of("gate_up", gelu=True),
        problem_of("residual_linear"),
        problem_of("combine_output", heads=2, splits=3),
        problem_of("head", softcap=30.0),
    ],
    ids=lambda problem: problem.kernel,
)
def test_what_is_timed_is_right(problem: LinearProblem, weights: WeightStorage) -> None:
    problem = dataclasses.replace(problem, weights=weights)
    operands = Operands(problem, DEVICE, copies=3)
    assert len({linear.weight.data_ptr() for linear in operands.linears}) == 3
    assert not operands.error() <= 1, "there is no result yet"
    given = LinearConfig(16, 32, num_warps=4)
    other = given if problem.kernel == "combine_output" else LIBRARY
    for number, config in ((0, given), (4, other), (1, None)):
        operands.poison()
        operands.run(number, config)
        assert operands.error() <= linear_timing.TOLERANCE[problem.dtype]
    operands.out_TN += 0.1 * operands.out_TN.abs().max()
    assert operands.error() > linear_timing.TOLERANCE[problem.dtype]


def test_a_head_with_wrong_maxima_is_out() -> None:
    operands = Operands(problem_of("head"), DEVICE, copies=1)
    operands.run(0, None)
    assert operands.error() <= linear_timing.TOLERANCE[torch.bfloat16]
    assert operands.best is not None
    operands.best[1].add_(1).remainder_(20)
    assert operands.error() == float("inf")


def test_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    asked = []

    def timer(problem: LinearProblem, configs: linear_timing.Configs) -> list[float]:
        asked.append(problem)
        return [2e-5 - i * 1e-7 for i in range(len(configs))]

    arguments = (
        "--model preset:llama-3.2-1b preset:llama-3.2-1b --rows 1 2 --weight-dtype auto int8"
    )
    assert tune.main(arguments.split(), timer=timer, device=CPU) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(lines) == len(asked) == 24, "a shape is tuned once"
    assert last == f"24 choices are in {tuning.tuning_file()}"
    assert lines[3].startswith("gate_up          1 rows, 8192 x 2048 bfloat16: ")
    assert "(default 20.00 µs)" in lines[3]
    for problem in asked:
        assert tuning.lookup(problem.key(CPU)) == problem.configs(num_multiprocessors(CPU))[-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model preset:llama-3.2-1b --rows 1 257", "--rows 257: at most 256"),
        ("--model preset:none", "preset:none: no preset is called 'none'"),
        ("--model preset:mla-small", "preset:mla-small: layers with latent attention"),
        ("--model preset:qwen3-0.6b --rows 1", "runs with none of its configurations"),
    ],
)
def test_what_cannot_be_tuned(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def timer(problem: LinearProblem, configs: linear_timing.Configs) -> list[None]:
        return [None] * len(configs)

    assert tune.main(arguments.split(), timer=timer, device=CPU) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tune: error: ")
    assert message in line
    assert not tuning.tuning_file().exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_there_is_one_clear_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (
        "kernel_calls",
        "linear",
        "linear_problems",
        "linear_timing",
        "tuning",
    ):  # as where there is no Triton
        monkeypatch.setitem(sys.modules, f"stepgraph.runtime.kernels.triton.{name}", None)
    assert tune.main(["--model", "preset:llama-3.2-1b"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line == "tune: error: tuning times kernels on a CUDA device, and torch sees none"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rows", [1, 16])
def test_times_on_a_device(rows: int) -> None:
    """The bytes of the weight say how fast it may be; what cannot run is left out."""
    problem = LinearProblem("gate_up", rows, 8192, 2048, torch.bfloat16, "model")
    configs = candidate_configs("gate_up", rows, 8192, 2048, 2, 132)[:3]
    assert rows == 1 or {config.kind for config in configs} == {"library", "rows"}
    too_large = dataclasses.replace(configs[-1], block_n=512, block_k=4096)
    *times, none = linear_timing.time_on_device(problem, [*configs, too_large], DEVICE)
    assert none is None
    for seconds in times:
        assert seconds is not None
        assert problem.weight_bytes / 8e12 < seconds < 1e-3
