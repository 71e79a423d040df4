"""Kernels that are compiled ahead of the steps are those that the steps launch."""

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


def run(part: str, cache: Path) -> dict[str, Any]:
    """Return what a part of `precompile_kernels.py` prints."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parents[1] / "rigs" / "precompile_kernels.py"), part],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture(scope="module")
def triton_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@pytest.fixture(scope="module")
def told(triton_cache: Path) -> dict[str, Any]:
    """What is said of small kernels at a first start."""
    return run("small", triton_cache)


def test_each_specialisation_is_compiled_once_in_a_thread(told: dict[str, Any]) -> None:
    assert Counter(name for name, _ in told["compiled"]) == {"scale": 5, "add": 1}
    assert all(thread.startswith("stepgraph-compile") for _, thread in told["compiled"])
    assert told["threads"] == 2
    assert told["kernels"] == 7, "with the one that does not compile"
    assert not told["imports_dynamo"]


@pytest.mark.slow
def test_another_start_finds_them_on_disk(told: dict[str, Any], triton_cache: Path) -> None:
    assert told["found"] == []
    again = run("small", triton_cache)
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
    told = run("engine", tmp_path)
    assert told["failures"] == []
    assert len(told["compiled"]) == told["kernels"] >= 10
    assert set(told["launched"]) == {name for name, _ in told["compiled"]}
    assert told["compiled_later"] == []
