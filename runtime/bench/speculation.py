"""`stepgraph bench --speculate`: what speculation gains and costs.

    bench.py --speculate suffix
    bench.py --speculate suffix:7 ngram:4 --batch-size 1 4 8 --temperature 0 0.8
    bench.py --speculate suffix --llama /path/to/python

Engines with and without speculation decode the same requests in turns, other ones in each turn.
Prompts are source code of this package: `edit` is a text twice and its beginning once more, whose
continuation repeats much of the text; `code` is one text; `free` is a few tokens; `random` are
tokens sampled at a temperature at which all of them are about equally likely, so that drafts are
never right.

`--llama` names a Python with llama-cpp-python: at batch size 1 and temperature 0, llama.cpp decodes
the same prompts with the same weights in the same turns, plainly and with its prompt lookup.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ...profiling.bandwidth import measure_read_bandwidth
from ...profiling.command_line import CommandParser
from ...profiling.stats import Summary
from ..config import EngineConfig
from ..engine.engine import Engine
from ..errors import ConfigError, StepgraphError
from ..loading.loader import resolve_source
from ..sampling_params import SamplingParams
from ..speculation.config import Speculation
from ..tools.arguments import positive_int, speculation_spec
from .console import exit_status, print_error, program_name
from .prompt_texts import KINDS as TEXT_KINDS
from .prompt_texts import prompt_text
from .runtimes.child_process import ChildProcess
from .step_watch import decode_roofline
from .workload import interleave

__all__ = ["main"]

KINDS = (*TEXT_KINDS, "random")
UNIFORM_TEMPERATURE = 100.0
PROMPT_TOKENS = 120
"""Of random prompts."""
MOST_PROMPT_TOKENS = 824
LLAMA_DRAFTS = 10
"""The default of llama-cpp-python's prompt lookup."""
_HEADER = (
    "batch temp kind   drafts      | tokens/s plain   spec  ratio | accepted | ITL us p50 plain"
    "  spec  p99 plain  spec  ratio | floor us/token plain spec | n"
)


class _Run(NamedTuple):
    """One repetition."""

    speed: float
    """Tokens per second, once all prompts are prefilled."""
    itl_us: list[float]
    """Microseconds between tokens of a row; several tokens of a step have 0 between them."""
    tokens: list[list[int]]


@dataclass
class _Side:
    """Something that decodes the same requests as others."""

    name: str
    decode: Callable[[list[list[int]], SamplingParams], _Run]
    engine: Engine | None = None
    runs: list[_Run] = field(default_factory=list)

    def repeat(self, prompts: Callable[[int], list[list[int]]], params: SamplingParams) -> None:
        """Add a repetition, with other prompts and another seed than the ones before."""
        seeded = SamplingParams(
            max_tokens=params.max_tokens, temperature=params.temperature, ignore_eos=True,
            seed=len(self.runs),
        )  # fmt: skip
        self.runs.append(self.decode(prompts(len(self.runs)), seeded))


def _temperature(text: str) -> float:
    try:
        return SamplingParams(temperature=float(text)).temperature
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature: 0 or more") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a line for each case; return the exit status."""
    parser = CommandParser(
        prog=program_name(),
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
    parser.add_argument("--batch-size", type=positive_int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--temperature", type=_temperature, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--kind", choices=KINDS, nargs="+", default=KINDS)
    parser.add_argument("--output-len", type=positive_int, default=200)
    parser.add_argument("--num-iters", type=positive_int, default=6)
    parser.add_argument("--llama", metavar="PYTHON", help="a Python with llama-cpp-python")
    options = parser.parse_args(arguments)
    if options.output_len < 2:
        parser.error("--output-len must be at least 2: times are those between tokens")
    if options.llama is not None and not (1 in options.batch_size and 0.0 in options.temperature):
        parser.error(
            "--llama decodes at --batch-size 1 and --temperature 0, which are not measured"
        )
    try:
        _measure_all(options)
    except (StepgraphError, OSError, ValueError) as error:
        print_error(error)
        return exit_status(error)
    return 0


def _measure_all(options: argparse.Namespace) -> None:
    longest = resolve_source(options.model, config_only=True).config.longest_context
    sizes: dict[str, Any] = {
        "device": options.device,
        "dtype": options.dtype,
        "max_num_seqs": max(options.batch_size),
        "max_model_len": min(MOST_PROMPT_TOKENS + options.output_len, longest),
        "prefix_cache": False,
    }
    with ExitStack() as stack:

        def start(speculation: Speculation | None) -> Engine:
            config = EngineConfig(**sizes, speculation=speculation)
            return stack.enter_context(Engine.from_pretrained(options.model, config))

        plain = start(None)
        engines = {f"{s.method}:{s.num_speculative_tokens}": start(s) for s in options.speculate}
        llama = None
        if options.llama is not None:
            llama = _Llama(options.llama, options.model, plain.config.threads)
            stack.callback(llama.close)
        bandwidth = measure_read_bandwidth(plain.config.device)
        gc.collect()
        gc.freeze()
        print(_HEADER)
        for rows in options.batch_size:
            kinds = [(t, kind) for t in options.temperature for kind in options.kind]
            for temperature, kind in [
                *((t, kind) for t, kind in kinds if kind != "random"),
                *([(UNIFORM_TEMPERATURE, "random")] if "random" in options.kind else []),
            ]:
                sides = [_Side("none", partial(_run, plain), plain)]
                sides += [_Side(name, partial(_run, e), e) for name, e in engines.items()]
                prompts = partial(_prompts, plain, kind, rows)
                if llama is not None and (rows, temperature) == (1, 0.0):
                    sides += [
                        _Side("llama", partial(llama.run, False)),
                        _Side(f"llama:{LLAMA_DRAFTS}", partial(llama.run, True)),
                    ]
                params = SamplingParams(max_tokens=options.output_len, temperature=temperature)
                case = f"{rows:5} {temperature:4g} {kind:6}"
                _measure(sides, prompts, params, options.num_iters, case, bandwidth)


def _measure(
    sides: list[_Side],
    prompts: Callable[[int], list[list[int]]],
    params: SamplingParams,
    num_iters: int,
    case: str,
    bandwidth: float,
) -> None:
    """Run a case in turns, after a run of each side to warm up; print its lines."""
    repeat = [partial(side.repeat, prompts, params) for side in sides]
    interleave(repeat, 1)
    before = [_counts(side.engine) for side in sides]
    for side in sides:
        side.runs.clear()
    interleave(repeat, num_iters)
    base = sides[0]
    for side, counted in zip(sides[1:], before[1:], strict=True):
        _print_line(base, side, counted, prompts, case, bandwidth)
        if side.name == "llama":  # what llama.cpp with drafts is compared with, too
            base = side


def _counts(engine: Engine | None) -> dict[str, int]:
    """Return the counters of an engine that a case changes."""
    stats = {} if engine is None else engine.stats()["speculation"] or {}
    return {name: stats.get(name, 0) for name in ("verify_steps", "verified_rows", "accepted")}


def _print_line(
    base: _Side,
    side: _Side,
    before: dict[str, int],
    prompts: Callable[[int], list[list[int]]],
    case: str,
    bandwidth: float,
) -> None:
    """Print the comparison of a side with its base."""
    accepted, floors = "-", "-"
    if side.engine is not None and base.engine is not None:
        after = _counts(side.engine)
        rows = after["verified_rows"] - before["verified_rows"]
        drafts = after["accepted"] - before["accepted"]
        accepted = f"{1 + drafts / rows:.2f}" if rows else "-"
        # A verify step reads weights and cache once for all tokens of its rows.
        count = sum(len(own) for run in side.runs for own in run.tokens)
        per_step = count / max(count - drafts, 1)
        lengths = [len(own) for number in range(len(side.runs)) for own in prompts(number)]
        num_rows = len(side.runs[0].tokens)
        context = round(statistics.fmean(lengths) + len(side.runs[0].tokens[0]) / 2)
        roofline = decode_roofline(base.engine, [context] * num_rows, bandwidth)
        floor = 1e6 * roofline.floor_seconds / num_rows
        floors = f"{floor:.1f} {floor / per_step:.1f}"
    speeds = [statistics.median(run.speed for run in own.runs) for own in (base, side)]
    pairs = list(zip(base.runs, side.runs, strict=True))
    ratio = statistics.median(b.speed / a.speed for a, b in pairs)
    one, other = (Summary.of(t for run in own.runs for t in run.itl_us) for own in (base, side))
    tails = f"{'-':>10} {'-':>5} {'-':>6}"
    if one.p99 is not None and other.p99 is not None:
        tails = f"{one.p99:10.0f} {other.p99:5.0f} {other.p99 / one.p99:6.3f}"
    same = all(a.tokens == b.tokens for a, b in pairs)
    print(
        f"{case} {side.name:11} | {speeds[0]:14.0f} {speeds[1]:6.0f} {ratio:6.2f} | {accepted:>8} |"
        f" {one.p50:16.0f} {other.p50:5.0f} {tails} | {floors:>25} | {one.n}"
        f" {'same tokens' if same else 'other tokens'}",
        flush=True,
    )


def _prompts(engine: Engine, kind: str, rows: int, repetition: int) -> list[list[int]]:
    """Return the prompts of a repetition, which differ from those of others."""
    if kind == "random":
        rng, vocab = random.Random(repetition), engine.model_config.vocab_size
        return [[rng.randrange(5, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(rows)]
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ConfigError(f"--kind {kind} needs a model with a tokenizer: use --kind random")
    (name,) = (known for known in TEXT_KINDS if known == kind)
    numbers = range(repetition * rows, (repetition + 1) * rows)
    return [tokenizer.encode(prompt_text(name, number)) for number in numbers]


def _run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> _Run:
    """Decode the prompts together."""
    for row, prompt in enumerate(prompts):
        engine.add_request(prompt, params, f"{row}")
    arrived: dict[str, list[float]] = {}
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            (completion,) = output.completions
            times = arrived.setdefault(output.request_id, [])
            times += [time.perf_counter()] * len(completion.delta.token_ids)
            tokens[output.request_id] = completion.token_ids
    return _timed([*arrived.values()], [tokens[name] for name in sorted(tokens)])


def _timed(arrived: list[list[float]], tokens: list[list[int]]) -> _Run:
    """Return the run whose tokens arrived at these seconds."""
    begin = max(times[0] for times in arrived)
    end = max(times[-1] for times in arrived)
    count = sum(t > begin for times in arrived for t in times)
    itl = [1e6 * (b - a) for times in arrived for a, b in pairwise(times) if a >= begin]
    return _Run(count / (end - begin), itl, tokens)


class _Llama:
    """llama.cpp in its own process; see `llama_lookup.py`."""

    def __init__(self, python: str, model: str, threads: int) -> None:
        source = resolve_source(model)
        if source.directory is None:
            raise ConfigError(f"--llama needs a checkpoint, and {model} has random weights")
        script = str(Path(__file__).parent / "runtimes" / "llama_lookup.py")
        command = [python, script, str(source.directory), str(threads), str(LLAMA_DRAFTS)]
        self._process = ChildProcess("llama.cpp", command, os.environ, replies=True)
        print(self._reply()["version"])

    def run(self, drafts: bool, prompts: list[list[int]], params: SamplingParams) -> _Run:
        """Decode one prompt."""
        (prompt,) = prompts
        request = {"prompt": prompt, "max_tokens": params.max_tokens, "drafts": drafts}
        pipe = self._process.process.stdin
        assert pipe is not None
        pipe.write(json.dumps(request).encode() + b"\n")
        pipe.flush()
        reply = self._reply()
        return _timed([reply["seconds"]], [reply["tokens"]])

    def _reply(self) -> dict[str, Any]:
        pipe = self._process.process.stdout
        assert pipe is not None
        line = pipe.readline()
        if not line:
            raise ValueError(f"--llama: the process ended: {self._process.last_words()}")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def close(self) -> None:
        """End the process."""
        self._process.close()


if __name__ == "__main__":
    sys.exit(main())
