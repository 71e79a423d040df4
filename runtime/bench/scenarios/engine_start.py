"""Starts of an engine: the first, with all caches empty, and the following ones.

Each start is a process of its own, timed from its creation until the engine is ready. The kernel
library, compiled code and Triton's kernels are kept in a directory that is empty at first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...errors import StepgraphError

if TYPE_CHECKING:
    from ..benchmark_run import BenchmarkRun, ModelKind, StepMode

__all__ = ["measure_starts", "run_start"]


def measure_starts(model: str, config: Mapping[str, Any], count: int = 2) -> list[dict[str, Any]]:
    """Start an engine `count` times; return what each start took, the first one first.

    Args:
        model: as `Engine.from_pretrained` takes it.
        config: arguments of `EngineConfig`.
        count: starts, one after the other.

    Returns:
        For each start `total_seconds` (of the process), `import_seconds` (until the package is
        imported), `start` as in `Engine.stats`, and the names of the dtypes.

    Raises:
        StepgraphError: a start failed; with the last line of its stderr.
    """
    with tempfile.TemporaryDirectory(prefix="stepgraph-start-") as cache:
        return [_start(model, config, cache) for _ in range(count)]


def _start(model: str, config: Mapping[str, Any], cache: str) -> dict[str, Any]:
    began = time.time()
    result = subprocess.run(
        [sys.executable, "-m", __name__],
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
        lines = result.stderr.strip().splitlines() or ["no message"]
        raise StepgraphError(f"a start of {model} failed: {lines[-1]}")
    measured: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return measured


def run_start(run: BenchmarkRun, kind: ModelKind, mode: StepMode) -> Iterator[dict[str, Any]]:
    """Yield the first start and the second one."""
    from ..benchmark_run import resolve_engine  # not in the process that is timed

    buckets = tuple(sorted(run.options.batch_size))
    config = run.config(kind, mode, max_num_seqs=buckets[-1], buckets=buckets)
    kernels = resolve_engine(kind.model, config).kernels  # refuses before a process is started
    run.say(f"{kind} {mode}: two starts, the first with empty caches")
    for number, measured in enumerate(measure_starts(kind.model, asdict(config)), start=1):
        engine = {"model": kind.model, "mode": mode.mode, "kernels": kernels}
        yield engine | {"buckets": list(buckets), "number": number} | measured


def _main() -> None:
    task = json.load(sys.stdin)
    from ...config import EngineConfig  # imported here to be timed
    from ...engine.engine import Engine
    from ..results.result_document import dtype_names

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
