"""Measures starts of an engine: the first, with nothing in any cache, and those that follow.

Each start is a process of its own, and counts from its creation to an engine that is ready. The
kernel library, compiled code and Triton's kernels are kept in a directory that is empty at first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

from ..errors import StepgraphError

__all__ = ["measure_starts"]


def measure_starts(model: str, config: Mapping[str, Any], count: int = 2) -> list[dict[str, Any]]:
    """Start an engine `count` times; return what each start took, the first one first.

    Args:
        model: as `Engine.from_pretrained` takes it.
        config: arguments of `EngineConfig`, those that JSON can hold.
        count: starts, one after the other.

    Returns:
        Of each start `total_seconds` (of the process), `import_seconds` (until the package was
        there), `start` as in `Engine.stats`, and the names of the dtypes.

    Raises:
        StepgraphError: a start failed; with the last line of what it said.
    """
    with tempfile.TemporaryDirectory(prefix="stepgraph-start-") as cache:
        return [_start(model, config, cache) for _ in range(count)]


def _start(model: str, config: Mapping[str, Any], cache: str) -> dict[str, Any]:
    began = time.time()
    result = subprocess.run(
        [sys.executable, "-m", "stepgraph.runtime.bench.start"],
        input=json.dumps({"began": began, "model": model, "config": config}),
        env={
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": cache,
            "TRITON_CACHE_DIR": os.path.join(cache, "triton"),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        raise StepgraphError(f"a start of {model} failed: {_last_line(result.stderr)}")
    measured: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return measured


def _last_line(text: str) -> str:
    """Return what a traceback ends with."""
    lines = text.strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _main() -> None:
    task = json.load(sys.stdin)
    from ..config import EngineConfig  # from here on, so that imports are timed
    from ..engine.engine import Engine
    from .environment import dtype_names

    imported = time.time()
    config: dict[str, Any] = {
        k: tuple(v) if isinstance(v, list) else v for k, v in task["config"].items()
    }
    with Engine.from_pretrained(task["model"], EngineConfig(**config), progress=False) as engine:
        ready = time.time()
        document = {
            "total_seconds": ready - task["began"],
            "import_seconds": imported - task["began"],
            "start": engine.stats()["start"],
            **dtype_names(engine),
        }
    print(json.dumps(document))


if __name__ == "__main__":
    _main()
