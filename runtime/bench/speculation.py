"""Measures what speculation gains and costs, on the demo model.

    python -m stepgraph.runtime.bench.speculation --batch-size 1 4 8 --temperature 0 0.8

An engine with and one without speculation decode the same requests in turns. Prompts are source
code of this package: `edit` is a text and its beginning once more, whose continuation repeats much
of the text; `code` is one text; `free` is a few tokens; `random` are tokens sampled at a
temperature at which all of them are about equally likely, so that drafts are never right.

With `--cpu-time` both engines have one thread, and times are its processor time: other processes of
a busy machine disturb them less.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ...profiling.command_line import CommandParser
from ..config import EngineConfig
from ..engine.engine import Engine
from ..engine.intake import Prompt
from ..execution import inputs
from ..sampling_params import SamplingParams
from ..speculation.config import METHODS
from ..tools.arguments import positive_int

__all__ = ["main"]

KINDS = ("edit", "code", "free", "random")
UNIFORM_TEMPERATURE = 100.0
_HEADER = (
    "batch temp kind     tokens/s plain  spec  ratio | accepted length | ITL p50 plain  spec"
    "  p99 plain  spec  ratio | n"
)


class _Run(NamedTuple):
    """One repetition: tokens per second, and seconds between tokens of a row."""

    speed: float
    itl: list[float]
    tokens: list[list[int]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a line for each case; return the exit status."""
    parser = CommandParser(
        prog="python -m stepgraph.runtime.bench.speculation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--speculation", choices=METHODS, default="suffix")
    parser.add_argument("--batch-size", type=positive_int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--output-len", type=positive_int, default=200)
    parser.add_argument("--num-iters", type=positive_int, default=6)
    parser.add_argument("--cpu-time", action="store_true")
    options = parser.parse_args(arguments)
    if options.output_len < 2:
        parser.error("--output-len must be at least 2: times are those between tokens")
    sizes: dict[str, Any] = {
        "max_num_seqs": max(options.batch_size),
        "max_model_len": 1024,
        "prefix_cache": False,
    }
    if options.cpu_time:
        sizes["threads"] = 1
    with (
        Engine.from_pretrained("demo", EngineConfig(**sizes)) as plain,
        Engine.from_pretrained(
            "demo", EngineConfig(**sizes, speculation=options.speculation)
        ) as spec,
    ):
        gc.collect()
        gc.freeze()
        print(_HEADER)
        for rows in options.batch_size:
            for temperature in options.temperature:
                for kind in KINDS:
                    if kind != "random":
                        _measure(plain, spec, options, rows, temperature, kind)
            _measure(plain, spec, options, rows, UNIFORM_TEMPERATURE, "random")
    return 0


def _measure(
    plain: Engine,
    spec: Engine,
    options: argparse.Namespace,
    rows: int,
    temperature: float,
    kind: str,
) -> None:
    """Run a case in turns, and print its line."""
    prompts = _prompts(kind, rows)
    runs: dict[Engine, list[_Run]] = {plain: [], spec: []}
    before = spec.stats()["speculation"]
    for number in range(1 + options.num_iters):
        for engine in (plain, spec) if number % 2 else (spec, plain):
            params = SamplingParams(
                max_tokens=options.output_len, temperature=temperature, ignore_eos=True, seed=number
            )
            run = _run(
                engine, prompts, params, time.thread_time if options.cpu_time else time.perf_counter
            )
            if number:  # the first one is for warming up
                runs[engine].append(run)
    after = spec.stats()["speculation"]
    steps, accepted = (after[name] - before[name] for name in ("verify_steps", "accepted"))
    speeds = [statistics.median(run.speed for run in runs[engine]) for engine in (plain, spec)]
    pairs = zip(runs[plain], runs[spec], strict=True)
    ratio = statistics.median(b.speed / a.speed for a, b in pairs)
    times = [sorted(t for run in runs[engine] for t in run.itl) for engine in (plain, spec)]
    p50, p99 = ([1e6 * own[int(q * (len(own) - 1))] for own in times] for q in (0.5, 0.99))
    same = all(a.tokens == b.tokens for a, b in zip(runs[plain], runs[spec], strict=True))
    length = 1 + accepted / steps / rows if steps else 1.0
    print(
        f"{rows:5} {temperature:4g} {kind:8} {speeds[0]:14.0f} {speeds[1]:5.0f} {ratio:6.2f} |"
        f" {length:15.2f} | {p50[0]:13.0f} {p50[1]:5.0f} {p99[0]:10.0f} {p99[1]:5.0f}"
        f" {p99[1] / p99[0]:6.3f} | {len(times[0])} {'same tokens' if same else 'other tokens'}",
        flush=True,
    )


def _prompts(kind: str, rows: int) -> list[Prompt]:
    if kind == "random":
        rng = random.Random(rows)
        return [[rng.randrange(5, 4096) for _ in range(120)] for _ in range(rows)]
    if kind == "free":
        return [f"def main{row}(" for row in range(rows)]
    source = inspect.getsource(inputs)
    parts = [source[300 * row : 300 * row + 700] for row in range(rows)]
    return [part if kind == "code" else 2 * part + part[:40] for part in parts]


def _run(
    engine: Engine, prompts: list[Prompt], params: SamplingParams, clock: Callable[[], float]
) -> _Run:
    """Decode the prompts together; times count once all of them are prefilled."""
    for row, prompt in enumerate(prompts):
        engine.add_request(prompt, params, f"{row}")
    arrived: dict[str, list[float]] = {}
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            (completion,) = output.completions
            times = arrived.setdefault(output.request_id, [])
            times += [clock()] * len(completion.delta.token_ids)
            tokens[output.request_id] = completion.token_ids
    begin = max(times[0] for times in arrived.values())
    end = max(times[-1] for times in arrived.values())
    count = sum(t > begin for times in arrived.values() for t in times)
    itl = [
        b - a for times in arrived.values() for a, b in pairwise(times)
        if a >= begin
    ]  # fmt: skip
    return _Run(count / (end - begin), itl, [tokens[name] for name in sorted(tokens)])


if __name__ == "__main__":
    sys.exit(main())
