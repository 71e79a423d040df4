"""Measures decode steps of rows that follow JSON schemas, against the same steps without grammars.

    python -m stepgraph.runtime.tools.structured_output_cost --rounds 10

Every round decodes the same prompts in three ways, in turns: without grammars; with grammars, and
masks computed in a thread during the forward pass; with masks computed before it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any, Final

import numpy as np

from ...profiling.command_line import CommandParser
from ..config import EngineConfig
from ..engine.engine import Engine
from ..sampling_params import SamplingParams
from .arguments import positive_int

__all__ = ["main"]

SIDES: Final = ("plain", "thread", "inline")
FIRST: Final = 10
"""Steps of a round that are left out: the prefill of the prompts, and the first of decoding."""


def main(arguments: list[str] | None = None) -> None:
    """Print percentiles of the time of a step, in milliseconds, by side."""
    parser = CommandParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="demo", help="as of Engine.from_pretrained")
    parser.add_argument("--rows", type=positive_int, default=8)
    parser.add_argument("--rounds", type=positive_int, default=10)
    parser.add_argument("--output-len", type=positive_int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int)
    given = parser.parse_args(arguments)
    if given.output_len <= FIRST:
        parser.error(f"--output-len must be above {FIRST}: the first steps are left out")
    config = EngineConfig(
        max_num_seqs=given.rows,
        threads=given.threads,
        prefix_cache=False,
        structured_output=True,
    )
    rounds: dict[str, list[list[float]]] = {side: [] for side in SIDES}
    with Engine.from_pretrained(given.model, config) as engine:
        for count in range(given.rounds + 1):
            turn = count % len(SIDES)
            for side in SIDES[turn:] + SIDES[:turn]:
                times = _round(engine, side, given)
                if count:  # the first round warms up
                    rounds[side].append(times)
    plain = np.array(rounds["plain"])
    for side in SIDES:
        steps = np.array(rounds[side])
        p10, p50, p90, p99 = np.percentile(steps, [10, 50, 90, 99])
        ratios = [
            p / q for p, q in zip((p10, p50, p99), np.percentile(plain, [10, 50, 99]), strict=True)
        ]
        by_round = np.median(np.median(steps, axis=1) / np.median(plain, axis=1))
        print(
            f"{side:7} n={steps.size}  p10 {p10:.3f}  p50 {p50:.3f}  p90 {p90:.3f}  p99 {p99:.3f}"
            f" ms; ratios of p10, p50, p99: {', '.join(f'{ratio:.2f}' for ratio in ratios)};"
            f" median over {len(steps)} rounds of that of p50: {by_round:.2f}"
        )


def _round(engine: Engine, side: str, given: argparse.Namespace) -> list[float]:
    """Return the milliseconds of the steps in which all rows decode."""
    masks = engine._open_parts().runner.masks
    assert masks is not None
    masks.in_thread = side == "thread"
    for row in range(given.rows):
        params = SamplingParams(
            max_tokens=given.output_len,
            temperature=given.temperature,
            seed=row,
            ignore_eos=True,
            structured=None if side == "plain" else {"json": _schema(row)},
        ).resolved()
        engine.add_request(f"# {row}\ndef f{row}(", params)
    times = []
    while engine.has_unfinished():
        began = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - began))
    return times[FIRST:-FIRST]


def _schema(row: int) -> dict[str, Any]:
    """A schema of each row, whose texts are longer than the output."""
    item = {
        "type": "object",
        "properties": {
            f"name{row}": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
            "ok": {"type": "boolean"},
        },
        "required": [f"name{row}", "age", "tags", "ok"],
        "additionalProperties": False,
    }
    return {"type": "array", "minItems": 1000, "items": item}


if __name__ == "__main__":
    main()
