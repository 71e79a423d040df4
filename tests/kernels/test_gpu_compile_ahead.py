"""Kernels compile for GPUs that are not here, and fit them; steps launch what was compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from stepgraph.runtime.kernels.triton.kernel_calls import INTERPRETED
from stepgraph.runtime.tools.compile_ahead import (
    SHARED_MEMORY_LIMIT,
    CompileAheadError,
    compile_kernel_calls,
)

COMMAND = ("-m", "stepgraph.runtime.tools.compile_ahead")
BOTH = ["90", "80"]
RIGS = Path(__file__).parents[1] / "rigs"


def run(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python on the arguments, with kernels compiled and Triton's cache in `cache`."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=900
    )


@pytest.fixture(scope="session")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where everything here keeps its compiled kernels."""
    return tmp_path_factory.mktemp("triton")


@pytest.mark.slow
def test_partials_are_read_after_their_programs_are_counted(triton_cache: Path) -> None:
    """Stores, barrier, count, barrier, and then loads that L1 does not serve."""
    done = run(triton_cache, str(RIGS / "compile_ahead_kernels.py"))
    assert done.returncode == 0, done.stderr
    for store, *rest in json.loads(done.stdout).values():
        assert store.startswith("st.global")
        count = rest.index("atom.global.gpu.acq_rel.add.u32")
        assert set(rest[:count]) == {"bar.sync"}
        assert rest[count + 1] == "bar.sync"
        loads = [opcode for opcode in rest if opcode.startswith("ld.")]
        assert loads
        assert all(opcode.startswith("ld.global.cg.") for opcode in loads)


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled in this process")
def test_an_interpreting_process_is_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CompileAheadError):
        list(compile_kernel_calls([], 90))


def check(triton_cache: Path, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """Compile the steps of a model; every kernel is without fault."""
    file = tmp_path / "kernels.json"
    done = run(triton_cache, *COMMAND, "--json", str(file), *arguments)
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(file.read_text())
    for kernel in document["kernels"]:
        assert kernel["stack"] == kernel["local"] == 0, kernel
        assert kernel["shared"] <= SHARED_MEMORY_LIMIT[kernel["capability"]], kernel
        if "PDL" in kernel["constants"]:
            assert kernel["waits"] == (kernel["capability"] == 90), kernel
        assert kernel["faults"] == [], kernel
    return document


@pytest.mark.parametrize(
    ("capabilities", "rows"),
    [(["90"], ["1"]), pytest.param(BOTH, ["1", "8"], marks=pytest.mark.slow)],
)
def test_the_steps_of_the_demo_model(
    triton_cache: Path, tmp_path: Path, capabilities: list[str], rows: list[str]
) -> None:
    settings = ["--capability", *capabilities, "--rows", *rows, "--tokens", "64"]
    document = check(triton_cache, tmp_path, "--model", "demo", *settings)
    assert document["faults"] == []
    names = {kernel["constants"].get("NAME", kernel["name"]) for kernel in document["kernels"]}
    assert {"norm_linear", "gate_up", "residual_linear"} <= names


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "smollm2-135m",
        "llama-3.2-1b",
        "llama-3.1-8b",
        "qwen3-0.6b",
        "mistral-7b",
        "gemma-2-2b",
        "gemma-3-1b",
    ],
)
@pytest.mark.parametrize("weights", ["auto", "int8", "fp8"])
def test_the_steps_of_presets(triton_cache: Path, tmp_path: Path, model: str, weights: str) -> None:
    """With the sizes that they are launched with where nothing was tuned."""
    rows = [str(1 << power) for power in range(9)]
    check(
        triton_cache,
        tmp_path,
        *("--model", f"preset:{model}", "--weight-dtype", weights),
        *("--capability", *BOTH, "--rows", *rows, "--tokens", "16", "512", "2048"),
    )


@pytest.mark.slow
def test_steps_with_a_head_and_masks(triton_cache: Path, tmp_path: Path) -> None:
    document = check(
        triton_cache,
        tmp_path,
        *("--model", "demo", "--rows", "1", "8", "--tokens", "64"),
        *("--speculate", "eagle3:3", "--structured-output"),
    )
    assert document["faults"] == []
    names = {step["name"] for step in document["steps"]}
    assert {"verify 8x4 sampled drafting 3", "verify 8x4 sampled masked"} <= names


# Launches ----------------------------------------------------------------------------------------


def launched(part: str, cache: Path) -> dict[str, Any]:
    """Return what a part of `precompile_kernels.py` prints."""
    done = run(cache, str(RIGS / "precompile_kernels.py"), part)
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture(scope="module")
def told(triton_cache: Path) -> dict[str, Any]:
    """What is said of small kernels at a first start."""
    return launched("small", triton_cache)


def test_each_specialisation_is_compiled_once_in_a_thread(told: dict[str, Any]) -> None:
    assert Counter(name for name, _ in told["compiled"]) == {"scale": 5, "add": 1}
    assert all(thread.startswith("stepgraph-compile") for _, thread in told["compiled"])
    assert told["threads"] == 2
    assert told["kernels"] == 7, "with the one that does not compile"
    assert not told["imports_dynamo"]


@pytest.mark.slow
def test_another_start_finds_them_on_disk(told: dict[str, Any], triton_cache: Path) -> None:
    assert told["found"] == []
    again = launched("small", triton_cache)
    assert sorted(again["found"]) == sorted(name for name, _ in told["compiled"])
    assert again["compiled_later"] == []


def test_launches_find_what_was_compiled(told: dict[str, Any]) -> None:
    assert told["compiled_later"] == []
    assert told["launched"] == {"scale": 10, "add": 1}
    assert told["again"] == [6, []]


def test_what_fails_names_itself_and_fails_again_when_it_is_launched(told: dict[str, Any]) -> None:
    step, kernel = told["failures"]
    assert step == "step lost: MemoryError: no room for 7 bytes"
    assert kernel.startswith("kernel too_wide (num_warps=4 num_stages=1 BLOCK=128): Compil")
    assert "a block of at most 64" in kernel
    assert "a block of at most 64" in told["refused"]


@pytest.mark.slow
def test_an_engine_launches_nothing_that_was_not_compiled_ahead(tmp_path: Path) -> None:
    told = launched("engine", tmp_path)
    assert told["failures"] == []
    assert len(told["compiled"]) == told["kernels"] >= 10
    assert set(told["launched"]) == {name for name, _ in told["compiled"]}
    assert told["compiled_later"] == []
