"""Results of the benchmark that tests of comparisons make up."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from stepgraph.profiling.stats import Summary
from stepgraph.runtime.bench.results.result_comparison import COMPARED, compare

ENVIRONMENT = {"device": "a card", "torch": "2.13.0", "threads": 2, "commit": "abc"}


def steady_case(repeated: list[list[float]], **changes: Any) -> dict[str, Any]:
    samples = [sample for repetition in repeated for sample in repetition]
    return {
        "model": "demo",
        "dtype": "bfloat16",
        "weight_dtype": "bfloat16",
        "kv_dtype": "int8",
        "mode": "eager",
        "kernels": "torch",
        "model_impl": "native",
        "tensor_parallel": 1,
        "device": "cpu",
        "batch_size": 1,
        "input_len": 128,
        "output_len": 64,
        "prefill_chunk": 512,
        "steps_per_launch": 1,
        "step_ms": Summary.of(samples).to_json(),
        "repetition_ms": [statistics.median(repetition) for repetition in repeated],
        "samples": {"step_ms": samples},
        **changes,
    }


def gaps_case(scenario: str, itl: list[float], **changes: Any) -> dict[str, Any]:
    case = steady_case([[1.0]], itl_ms=Summary.of(itl).to_json(), steps=200, max_itl_ms=None)
    entry = {k: case[k] for k in (*COMPARED[scenario].keys, "itl_ms")}
    return {**entry, "automatic_budget": False, **changes}


def document(*cases: dict[str, Any], name: str = "cases", **environment: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"schema_version": 1, "environment": ENVIRONMENT | environment}
    return {**made, "cases": [], name: list(cases)}


def compared(
    old: dict[str, Any],
    new: dict[str, Any],
    scenario: str = "steady",
    fail_above: float | None = None,
) -> dict[str, Any]:
    return compare(
        old, new, scenario=scenario, old_name="old.json", new_name=None, fail_above=fail_above
    )


def write(path: Path, *cases: dict[str, Any], **environment: Any) -> Path:
    path.write_text(json.dumps(document(*cases, **environment)))
    return path
