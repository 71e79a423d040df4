"""`stepgraph bench --speculate`: what speculation gains and costs.

    bench.py --speculate suffix
    bench.py --speculate suffix:7 ngram:4 --batch-size 1 4 8 --temperature 0 0.8

Engines with and without speculation decode the same requests in turns, other ones in each turn. All
are started several times, as the speeds of two equal engines can differ by 8 % for as long as they
live.

Prompts are source code of this package: `edit` is a text twice and its beginning once more, whose
continuation repeats much of the text; `code` is one text; `free` is a few tokens; `random` are
tokens sampled at a temperature at which all of them are about equally likely, so that drafts are
never right.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, pairwise
from typing import NamedTuple

from ...profiling.command_line import CommandParser, aligned, print_text
from ...profiling.stats import Summary
from .. import request
from ..config import EngineConfig
from ..engine.engine import Engine
from ..errors import ConfigError, StepgraphError
from ..execution import inputs
from ..loading.loader import resolve_source
from ..sampling_params import SamplingParams
from ..tools.arguments import integer, speculation_spec
from .options import PROGRAM, print_error
from .workload import interleave

KINDS = ("edit", "code", "free", "random")
UNIFORM_TEMPERATURE = 100.0
PROMPT_TOKENS = 120
"""Of random prompts."""
MOST_PROMPT_TOKENS = 824
REPEATED = 40
"""Characters of the beginning that an `edit` prompt has once more."""
_LENGTH, _STRIDE = 700, 300
_BEGINNINGS = (
    "def main(",
    "class Stack:\n    def __init__(",
    "import os\nimport ",
    "for name in ",
    "with open(path) as ",
    "try:\n    ",
    "    if self.",
    "    return ",
)
_HEAD = ["batch", "temperature", "kind", "drafts", "tok/s plain", "tok/s", "ratio (quartiles)"]
_HEAD += ["tokens a verified row", "ITL µs p50 plain", "p50", "p99 plain", "p99", "n", "tokens"]


Case = tuple[int, float, str]
"""What all engines decode: rows, temperature and kind of the prompts."""


class Run(NamedTuple):
    """One repetition."""

    speed: float
    """Tokens per second, once all prompts are prefilled."""
    itl_us: list[float]
    """Microseconds between tokens of a row; several tokens of a step have 0 between them."""
    tokens: list[list[int]]


@dataclass
class Measured:
    """The repetitions of a case by the engines of one configuration, and what their drafts did."""

    runs: list[Run] = field(default_factory=list)
    verified_rows: int = 0
    """Rows whose drafts were verified."""
    accepted: int = 0
    """Drafts that were accepted."""

    def count(self, engine: Engine, sign: int) -> None:
        """Add what an engine counted since its start, or subtract it."""
        stats = engine.stats()["speculation"] or {}
        self.verified_rows += sign * stats.get("verified_rows", 0)
        self.accepted += sign * stats.get("accepted", 0)


def prompt_text(kind: str, index: int) -> str:
    """Return the text with a number, which begins again after some dozens of texts."""
    if kind == "free":
        return _BEGINNINGS[index % len(_BEGINNINGS)]
    source = inspect.getsource(inputs) + inspect.getsource(request)
    begin = index * _STRIDE % (len(source) - _LENGTH)
    text = source[begin : begin + _LENGTH]
    return text if kind == "code" else 2 * text + text[:REPEATED]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a line for each case; return the exit status."""
    parser = CommandParser(
        prog=PROGRAM,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--speculate",
        type=speculation_spec,
        nargs="+",
        required=True,
        metavar="METHOD[:K]",
        help="proposers with at most K drafts per row and step, each compared with no speculation",
    )
    parser.add_argument("--model", default="demo", help="a checkpoint with a tokenizer")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"))
    parser.add_argument("--threads", type=int, help="as `EngineConfig.threads`")
    parser.add_argument("--batch-size", type=integer(1), nargs="+", default=[1, 4, 8])
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--output-len", type=integer(2), default=200)
    parser.add_argument("--num-starts", type=integer(1), default=3, help="of each engine")
    parser.add_argument("--num-iters", type=integer(1), default=3, help="of a case, per start")
    options = parser.parse_args(arguments)
    try:
        _measure_all(options)
    except (StepgraphError, OSError, ValueError) as error:
        return print_error(error)
    return 0


def _measure_all(options: argparse.Namespace) -> None:
    longest = resolve_source(options.model, config_only=True).config.longest_context
    shared = EngineConfig(
        device=options.device,
        dtype=options.dtype,
        threads=options.threads,
        max_num_seqs=max(options.batch_size),
        max_model_len=min(MOST_PROMPT_TOKENS + options.output_len, longest),
        prefix_cache=False,
    )
    kinds = [(t, kind) for t in options.temperature for kind in options.kind if kind != "random"]
    kinds += [(UNIFORM_TEMPERATURE, kind) for kind in options.kind if kind == "random"]
    cases: list[Case] = [(rows, *kind) for rows in options.batch_size for kind in kinds]
    configs = [replace(shared, speculation=one) for one in (None, *options.speculate)]
    measured: defaultdict[tuple[Case, int], Measured] = defaultdict(Measured)
    for start in range(options.num_starts):
        with ExitStack() as stack:
            engines = [
                stack.enter_context(Engine.from_pretrained(options.model, config))
                for config in configs
            ]
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)
            for case in cases:
                sides = [measured[case, index] for index in range(len(engines))]
                _measure(engines, case, options, start, sides)
    names = [f"{s.method}:{s.num_speculative_tokens}" for s in options.speculate]
    cells = [
        _cells(case, name, measured[case, 0], measured[case, index])
        for case in cases
        for index, name in enumerate(names, 1)
    ]
    print_text("\n".join(aligned(_HEAD, cells, 0)))


def _measure(
    engines: Sequence[Engine],
    case: Case,
    options: argparse.Namespace,
    start: int,
    measured: Sequence[Measured],
) -> None:
    """Run a case in turns, after a run of each engine to warm up, with other prompts each turn."""

    def decode(engine: Engine, turn: int) -> Run:
        params = SamplingParams(
            max_tokens=options.output_len, temperature=case[1], ignore_eos=True, seed=turn
        ).resolved()
        return _run(engine, _prompts(engine, case, turn), params)

    def repeat(engine: Engine, found: Measured, turns: Iterator[int]) -> None:
        found.runs.append(decode(engine, next(turns)))

    sides = []
    for engine, found in zip(engines, measured, strict=True):
        decode(engine, 0)
        found.count(engine, -1)
        sides.append(partial(repeat, engine, found, count(1 + options.num_iters * start)))
    interleave(sides, options.num_iters)
    for engine, found in zip(engines, measured, strict=True):
        found.count(engine, 1)


def _prompts(engine: Engine, case: Case, repetition: int) -> list[list[int]]:
    """Return the prompts of a repetition, which differ from all others."""
    rows, _, kind = case
    if kind == "random":
        rng, vocab = random.Random(repetition), engine.model_config.vocab_size
        return [[rng.randrange(5, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(rows)]
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ConfigError(f"--kind {kind} needs a model with a tokenizer: use --kind random")
    numbers = range(repetition * rows, (repetition + 1) * rows)
    return [tokenizer.encode(prompt_text(kind, number)) for number in numbers]


def _run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> Run:
    """Decode the prompts together."""
    outputs = engine.generate(prompts, params)
    times = [output.timing.token_ns for output in outputs if output.timing is not None]
    begin, end = max(row[0] for row in times), max(row[-1] for row in times)
    after = sum(time > begin for row in times for time in row)
    itl = [(b - a) / 1e3 for row in times for a, b in pairwise(row) if a >= begin]
    return Run(1e9 * after / (end - begin), itl, [output.token_ids for output in outputs])


def _cells(case: Case, name: str, base: Measured, own: Measured) -> list[str]:
    """Return a row of the table: an engine with drafts, compared with the one without."""
    tokens = f"{1 + own.accepted / own.verified_rows:.2f}" if own.verified_rows else "-"
    speeds = [statistics.median(run.speed for run in side.runs) for side in (base, own)]
    ratios = [b.speed / a.speed for a, b in zip(base.runs, own.runs, strict=True)]
    if len(ratios) == 1:  # which has no quartiles of its own
        ratios *= 2
    low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
    one, other = (Summary.of(t for run in side.runs for t in run.itl_us) for side in (base, own))
    same = all(a.tokens == b.tokens for a, b in zip(base.runs, own.runs, strict=True))
    return [
        *(str(case[0]), f"{case[1]:g}", case[2], name),
        *(f"{speed:.0f}" for speed in speeds),
        *(f"{ratio:.2f} ({low:.2f} - {high:.2f})", tokens),
        *(f"{side.p50:.0f}" for side in (one, other)),
        *("-" if side.p99 is None else f"{side.p99:.0f}" for side in (one, other)),
        *(str(one.n), "same" if same else "other"),
    ]
