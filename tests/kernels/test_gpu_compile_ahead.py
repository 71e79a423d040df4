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

from stepgraph.runtime import ConfigError
from stepgraph.runtime.kernels.triton.kernel_calls import INTERPRETED
from stepgraph.runtime.tools.compile_ahead import SHARED_MEMORY_LIMIT, compile_kernel_calls

from ..rigs.tiny_models import VARIANTS, Tiny

RIG = Path(__file__).parents[1] / "rigs" / "precompile_kernels.py"


def run(cache: Path, *arguments: str) -> str:
    """Run Python on the arguments, with kernels compiled and Triton's cache in `cache`."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_kernel(kernel: dict[str, Any]) -> None:
    assert kernel["stack"] == kernel["local"] == 0, kernel
    assert kernel["shared"] <= SHARED_MEMORY_LIMIT[kernel["capability"]], kernel
    if "PDL" in kernel["constants"]:
        assert kernel["waits"] == (kernel["capability"] == 90), kernel
    assert kernel["faults"] == [], kernel


@pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled in this process")
def test_an_interpreting_process_is_told_so() -> None:
    with pytest.raises(ConfigError):
        list(compile_kernel_calls([], 90))


@pytest.fixture(scope="session")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where everything here keeps its compiled kernels."""
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def told(triton_cache: Path) -> dict[str, Any]:
    """What a process of its own says of small kernels at a first start, and of a decode step."""
    document: dict[str, Any] = json.loads(run(triton_cache, str(RIG), "small", "step"))
    return document


def test_the_kernels_of_a_decode_step(told: dict[str, Any]) -> None:
    kernels = told["step"]["kernels"]
    assert {"norm_linear", "decode_attention", "gate_up", "residual_linear"} <= kernels.keys()
    for kernel in kernels.values():
        check_kernel(kernel)


@pytest.mark.slow
def test_the_recurrences_of_models(triton_cache: Path) -> None:
    kernels = json.loads(run(triton_cache, str(RIG), "recurrence"))["recurrence"]
    assert {kernel["name"] for kernel in kernels.values()} == {"_few_tokens", "_many_tokens"}
    for kernel in kernels.values():
        check_kernel(kernel)


def test_partials_are_read_after_their_programs_are_counted(told: dict[str, Any]) -> None:
    """Stores, barrier, count, barrier, and then loads that L1 does not serve."""
    store, *rest = told["step"]["order"]
    assert store.startswith("st.global")
    count = rest.index("atom.global.gpu.acq_rel.add.u32")
    assert set(rest[:count]) == {"bar.sync"}
    assert rest[count + 1] == "bar.sync"
    loads = [opcode for opcode in rest if opcode.startswith("ld.")]
    assert loads
    assert all(opcode.startswith("ld.global.cg.") for opcode in loads)


PRESETS = [
    *("smollm2-135m", "llama-3.2-1b", "llama-3.1-8b", "qwen3-0.6b", "mistral-7b"),
    *("gemma-2-2b", "gemma-3-1b"),
]
EAGLE3 = '{"method": "eagle3", "num_speculative_tokens": 3}'
LOOKUPS = '{"num_speculative_tokens": 3}'
ROWS = [str(1 << power) for power in range(9)]
TOKENS = ["16", "512", "2048"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "settings", "rows", "tokens"),
    [
        ("demo", ["--speculation", EAGLE3, "--structured-output"], ["1", "8"], ["64"]),
        ("olmo2", ["--dtype", "bfloat16"], ["1", "8"], ["16"]),  # norms of all heads together
        *((f"preset:{name}", [], ["1", "8"], ["16", "512"])
          for name in ("lfm2-350m", "qwen3.5-0.8b")),
        ("olmo_hybrid", ["--dtype", "bfloat16", "--speculation", LOOKUPS], ["1", "8"], ["64"]),
        *((f"preset:{name}", ["--weight-dtype", weights], ROWS, TOKENS)
          for name in PRESETS for weights in ("auto", "int8", "fp8")),
        *((f"preset:{name}", ["--weight-dtype", "int4"], ["1", "2", "4", "16"], ["512"])
          for name in ("smollm2-135m", "llama-3.1-8b")),
    ],
    ids=str,
)  # fmt: skip
def test_the_steps_of_models(
    triton_cache: Path, tiny: Tiny, tmp_path: Path, model: str, settings: list[str],
    rows: list[str], tokens: list[str],
) -> None:  # fmt: skip
    """With the sizes that they are launched with where nothing was tuned."""
    file = tmp_path / "kernels.json"
    source = str(tiny(model).directory) if model in VARIANTS else model
    command = ("-m", "stepgraph.runtime.tools.compile_ahead", "--json", str(file))
    command += ("--model", source)
    sizes = ("--capability", "90", "80", "--rows", *rows, "--tokens", *tokens)
    run(triton_cache, *command, *sizes, *settings)
    document = json.loads(file.read_text())
    assert document["faults"] == []
    for kernel in document["kernels"]:
        check_kernel(kernel)
    if model == "demo":
        names = {step["name"] for step in document["steps"]}
        assert {"verify 8x4 sampled drafting 3", "sample 8x4 sampled"} <= names


# Launches ----------------------------------------------------------------------------------------


def test_launches_find_what_was_compiled_once_in_threads(told: dict[str, Any]) -> None:
    small = told["small"]
    assert Counter(name for name, _ in small["compiled"]) == {"scale": 5, "add": 1}
    assert all(thread.startswith("stepgraph-compile") for _, thread in small["compiled"])
    assert small["threads"] >= 1
    assert small["kernels"] == 7, "with the one that does not compile"
    assert not small["imports_dynamo"]
    assert small["compiled_later"] == []
    assert small["launched"] == {"scale": 10, "add": 1}
    assert small["again"] == [6, []]


def test_what_fails_names_itself_and_fails_again_when_it_is_launched(told: dict[str, Any]) -> None:
    step, kernel = told["small"]["failures"]
    assert step == "step lost: MemoryError: no room for 7 bytes"
    assert kernel.startswith("kernel too_wide (num_warps=4 num_stages=1 BLOCK=128): Compil")
    assert "a block of at most 64" in kernel
    assert "a block of at most 64" in told["small"]["refused"]


@pytest.mark.slow
def test_another_start_finds_kernels_on_disk(tmp_path: Path) -> None:
    first, again = (json.loads(run(tmp_path, str(RIG), "small"))["small"] for _ in range(2))
    assert first["found"] == []
    assert sorted(again["found"]) == sorted(name for name, _ in first["compiled"])
    assert again["compiled_later"] == []


@pytest.mark.slow
def test_an_engine_launches_nothing_that_was_not_compiled_ahead(tmp_path: Path) -> None:
    engine = json.loads(run(tmp_path, str(RIG), "engine"))["engine"]
    assert engine["failures"] == []
    assert len(engine["compiled"]) == engine["kernels"] >= 10
    assert set(engine["launched"]) == {name for name, _ in engine["compiled"]}
    assert engine["compiled_later"] == []
