"""What kernels are tuned to: the file, and the tuner."""

from __future__ import annotations

import ast
import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from stepgraph.runtime.kernels.triton import expert_tiles, tuning
from stepgraph.runtime.kernels.triton.kernel_calls import num_multiprocessors
from stepgraph.runtime.kernels.triton.linear import LinearConfig, default_config
from stepgraph.runtime.kernels.triton.tuning import Tuned, TuningKey
from stepgraph.runtime.tools import tune

from ..rigs.tiny_models import Tiny

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
GPU_FOLDER = Path(tuning.__file__).parent
KEY = TuningKey("gate_up", 4, 8192, 2048, "bfloat16", "int8", "card", "3.6.0", "abc")
TUNED = Tuned(LinearConfig(8, 512, 4, prefetch=8192), 15.6, 17.25)


def test_what_is_stored_is_found_by_later_processes() -> None:
    assert tuning.lookup(KEY, list) is None
    path = tuning.store({KEY: TUNED})
    assert path == tuning.tuning_file()
    assert path.parent.name == "stepgraph"
    assert tuning.lookup(KEY, list) is None, "the file was read before: an engine's choices stay"
    tuning.reload()
    assert tuning.lookup(KEY, list) == TUNED.config
    (entry,) = json.loads(path.read_text())["entries"]
    assert entry["kernel"] == "gate_up"
    assert entry["config"] == dataclasses.asdict(TUNED.config)
    assert (entry["microseconds"], entry["default_microseconds"]) == (15.6, 17.25)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(TuningKey)])
def test_another_key_is_another_entry(field: str) -> None:
    value = getattr(KEY, field)
    other = dataclasses.replace(KEY, **{field: value + ("x" if isinstance(value, str) else -1)})
    tuning.store({KEY: TUNED})
    tuning.reload()
    assert tuning.lookup(other, list) is None
    better = dataclasses.replace(TUNED, config=LinearConfig(16, 256, 8))
    tuning.store({other: better})
    tuning.reload()
    assert tuning.lookup(KEY, list) == TUNED.config
    assert tuning.lookup(other, list) == better.config
    tuning.store({other: TUNED})
    tuning.reload()
    assert tuning.lookup(other, list) == TUNED.config


def changed(**changes: Any) -> str:
    entry = {**dataclasses.asdict(KEY), **dataclasses.asdict(TUNED), **changes}
    return json.dumps({"version": tuning.VERSION, "entries": [entry]})


FOREIGN = [
    "{",
    '{"version": 99, "entries": []}',
    f'{{"version": {tuning.VERSION}, "entries": [5]}}',
    changed(microseconds=None),
    changed(config={"block_m": 8}),
]


@pytest.mark.parametrize("content", FOREIGN, ids=range(len(FOREIGN)))
def test_a_file_that_is_not_understood(content: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tuning.tuning_file()
    path.parent.mkdir(parents=True)
    path.write_text(content)
    tuning.reload()
    with caplog.at_level(logging.WARNING, logger="stepgraph.runtime"):
        for _ in range(3):
            assert tuning.lookup(KEY, list) is None
    (record,) = caplog.records
    assert f"{path} is ignored, kernels run with their defaults" in record.getMessage()
    tuning.store({KEY: TUNED})
    tuning.reload()
    assert tuning.lookup(KEY, list) == TUNED.config


def test_the_source_is_all_that_kernels_are_made_of() -> None:
    """The files with kernels and device functions that operations come to by their imports."""

    def has_kernels(name: str) -> bool:
        return "@triton.jit" in (GPU_FOLDER / name).read_text()

    found: set[str] = set()
    queue = ["linear_kernels.py", "experts.py"]
    for name in queue:
        for node in ast.walk(ast.parse((GPU_FOLDER / name).read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
                imported = f"{node.module}.py"
                if imported not in found and has_kernels(imported):
                    found.add(imported)
                    queue.append(imported)
    assert (found | set(queue[:2])) - {"kernel_calls.py"} == set(tuning.SOURCES)


def test_the_best_is_what_was_tuned_or_the_default() -> None:
    shape = ("residual_linear", 2, 96, 64, torch.bfloat16, torch.int8, CPU)
    default = default_config("residual_linear", 2, 96, 64, 1, num_multiprocessors(CPU))
    assert tuning.best_config(*shape) == default
    tuning.store({tuning.tuning_key(*shape): TUNED})
    tuning.reload()
    assert TUNED.config != default
    assert tuning.best_config(*shape) == TUNED.config


@pytest.fixture(name="small_steps")
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that an interpreter runs in little time, and few candidates."""
    monkeypatch.setattr(tune, "CONTEXT", 20)
    monkeypatch.setattr(tune, "LAYERS", 1)
    candidates, tiles = tuning.candidate_configs, expert_tiles.candidate_tiles
    monkeypatch.setattr(tuning, "candidate_configs", lambda *a, **k: candidates(*a, **k)[:4:3])
    monkeypatch.setattr(expert_tiles, "candidate_tiles", lambda *a, **k: tiles(*a, **k)[:4:3])


def last_is_fastest(
    steps: Sequence[Callable[[], torch.Tensor]], reset: Callable[[], None]
) -> list[float | None]:
    return [20.0 - i for i in range(len(steps))]


@pytest.mark.parametrize(("variant", "rows"), [("base", 2), ("mixtral", 2)])
def test_tuner_stores_the_fastest_configuration_of_each_product(
    tiny: Tiny, small_steps: None, variant: str, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(tiny(variant).directory), "--rows", str(rows)]
    assert tune.main(arguments, timer=last_is_fastest, device=DEVICE) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"{len(lines)} choices are in {tuning.tuning_file()}"
    entries = json.loads(tuning.tuning_file().read_text())["entries"]
    tuned = {entry["kernel"]: entry for entry in entries}
    expected = {"norm_linear", "residual_linear"}
    expected |= {"expert_gate_up", "expert_down"} if variant == "mixtral" else {"gate_up"}
    assert expected <= set(tuned)
    assert all(entry["microseconds"] < entry["default_microseconds"] for entry in entries)


def test_tuner_rejects_configurations_with_wrong_results(
    tiny: Tiny,
    small_steps: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def wrong(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        return torch.tensor(float("nan"))

    monkeypatch.setattr(tune, "relative_error", wrong)
    arguments = ["--model", str(tiny("base").directory), "--rows", "1"]
    assert tune.main(arguments, timer=last_is_fastest, device=DEVICE) == 0
    assert capsys.readouterr().out.startswith("0 choices")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model preset:llama-3.2-1b --rows 1 257", "--rows 257: at most 256"),
        ("--model preset:none", "preset:none: no preset is called 'none'"),
        ("--model preset:mla-small", "preset:mla-small: layers with latent attention"),
    ],
)
def test_what_cannot_be_tuned(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune.main(arguments.split(), timer=last_is_fastest, device=CPU) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tune: error: ")
    assert message in line
    assert not tuning.tuning_file().exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tuner_times_captured_steps_on_a_device(small_steps: None) -> None:
    assert tune.main(["--model", "demo", "--rows", "1", "8"]) == 0
    for entry in json.loads(tuning.tuning_file().read_text())["entries"]:
        assert 1 < entry["microseconds"] <= entry["default_microseconds"] < 1e4
