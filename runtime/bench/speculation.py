"""`stepgraph bench --speculate`: what speculation gains and costs.

    bench.py --speculate suffix
    bench.py --speculate suffix:7 ngram:4 --batch-size 1 4 8 --temperature 0 0.8
    bench.py --speculate suffix --llama /path/to/python
    bench.py --speculate eagle3:5 --same-engine --kind random --num-starts 1 --num-iters 40

Engines with and without speculation decode the same requests in turns, other ones in each turn.
All are started several times, as the speeds of two equal engines can differ by 8 % for as long as
they live. With `--same-engine`, each engine is compared with itself, its speculation switched off
in every other turn. This leaves that difference out, and also what an engine that is prepared for
speculation costs without it.

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
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...profiling.bandwidth import measure_read_bandwidth
from ...profiling.command_line import CommandParser
from ..config import EngineConfig
from ..engine.engine import Engine
from ..errors import ConfigError, StepgraphError
from ..loading.loader import resolve_source
from ..resolved_config import resolve_device
from ..sampling_params import SamplingParams
from ..speculation.config import Speculation
from ..tools.arguments import positive_int, speculation_spec
from .console import exit_status, print_error, program_name
from .prompt_texts import KINDS as TEXT_KINDS
from .prompt_texts import prompt_text
from .results.speculation_lines import HEADER, Case, Measured, Run, comparison_line
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


@dataclass(frozen=True)
class _Side:
    """Something that decodes the same requests as others."""

    name: str
    decode: Callable[[list[list[int]], SamplingParams], Run]
    engine: Engine | None = None
    base: int | None = None
    """The side that it is compared with; None: others are compared with it."""


def _temperature(text: str) -> float:
    try:
        SamplingParams(temperature=float(text))
        return float(text)
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
    parser.add_argument("--num-starts", type=positive_int, default=3, help="of each engine")
    parser.add_argument("--num-iters", type=positive_int, default=3, help="of a case, per start")
    parser.add_argument(
        "--same-engine",
        action="store_true",
        help="compare each engine with itself, its speculation switched off, not with another one",
    )
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
    bandwidth = measure_read_bandwidth(resolve_device(options.device))
    kinds = [(t, kind) for t in options.temperature for kind in options.kind if kind != "random"]
    kinds += [(UNIFORM_TEMPERATURE, kind) for kind in options.kind if kind == "random"]
    cases = [Case(rows, *kind) for rows in options.batch_size for kind in kinds]
    measured: defaultdict[tuple[Case, int], Measured] = defaultdict(Measured)
    for start in range(options.num_starts):
        with ExitStack() as stack:
            sides = _started(options, sizes, stack, start)
            gc.collect()
            gc.freeze()
            stack.callback(gc.unfreeze)
            is_last = start == options.num_starts - 1
            if is_last:
                print(HEADER)
            for case in cases:
                own = sides if case[:2] == (1, 0.0) else [side for side in sides if side.engine]
                _measure(own, case, options, start, measured)
                if is_last:
                    _print_lines(own, case, measured, bandwidth)


def _started(
    options: argparse.Namespace, sizes: dict[str, Any], stack: ExitStack, start: int
) -> list[_Side]:
    """Start all sides, which the stack ends; the first one decodes plainly."""

    def started(speculation: Speculation | None) -> Engine:
        config = EngineConfig(**sizes, speculation=speculation)
        return stack.enter_context(Engine.from_pretrained(options.model, config))

    sides: list[_Side] = []

    def add_plain(engine: Engine) -> None:
        sides.append(_Side("none", partial(_run_plainly, engine), engine))

    if not options.same_engine:
        add_plain(started(None))
    for speculation in options.speculate:
        engine = started(speculation)
        if options.same_engine:
            add_plain(engine)
        name = f"{speculation.method}:{speculation.num_speculative_tokens}"
        base = len(sides) - 1 if options.same_engine else 0
        sides.append(_Side(name, partial(_run, engine), engine, base))
    if options.llama is not None:
        llama = _Llama(options.llama, options.model, engine.config.threads)
        stack.callback(llama.close)
        if start == 0:
            print(llama.version)
        sides += [
            _Side("llama", partial(llama.run, False), base=0),
            _Side(f"llama:{LLAMA_DRAFTS}", partial(llama.run, True), base=len(sides)),
        ]
    return sides


def _measure(
    sides: list[_Side],
    case: Case,
    options: argparse.Namespace,
    start: int,
    measured: dict[tuple[Case, int], Measured],
) -> None:
    """Run a case in turns, after a run of each side to warm up, with other prompts in each turn."""
    plain = sides[0].engine
    assert plain is not None, "it decodes plainly"
    turns = [1 + options.num_iters * start + i for i in range(options.num_iters)]

    def decode(side: _Side, turn: int) -> Run:
        params = SamplingParams(
            max_tokens=options.output_len, temperature=case.temperature, ignore_eos=True, seed=turn
        ).resolved()
        return side.decode(_prompts(plain, case.kind, case.rows, turn), params)

    for side in sides:
        decode(side, 0)
    before = [_counts(side.engine) for side in sides]
    left = [iter(turns) for _ in sides]

    def repeat(index: int) -> None:
        measured[case, index].runs.append(decode(sides[index], next(left[index])))

    interleave([partial(repeat, index) for index in range(len(sides))], options.num_iters)
    for index, (verified_rows, accepted) in enumerate(before):
        own, after = measured[case, index], _counts(sides[index].engine)
        own.verified_rows += after[0] - verified_rows
        own.accepted += after[1] - accepted


def _counts(engine: Engine | None) -> tuple[int, int]:
    """Return the rows that an engine has verified drafts of, and the drafts it has accepted."""
    stats = {} if engine is None else engine.stats()["speculation"] or {}
    return stats.get("verified_rows", 0), stats.get("accepted", 0)


def _print_lines(
    sides: list[_Side],
    case: Case,
    measured: dict[tuple[Case, int], Measured],
    bandwidth: float,
) -> None:
    """Print the comparison of each side with plain decoding, of llama.cpp too with its own."""
    plain = sides[0].engine
    assert plain is not None, "it decodes plainly"
    for index, side in enumerate(sides):
        if side.base is None:
            continue
        base, own, floors = measured[case, side.base], measured[case, index], "-"
        if side.engine is not None:
            count = sum(len(tokens) for run in own.runs for tokens in run.tokens)
            # A verify step reads weights and cache once for all tokens of its rows.
            per_step = count / max(count - own.accepted, 1)
            lengths = [len(prompt) for prompt in _prompts(plain, case.kind, case.rows, 0)]
            context = round(statistics.fmean(lengths) + len(own.runs[0].tokens[0]) / 2)
            roofline = decode_roofline(plain, [context] * case.rows, bandwidth)
            floor = 1e6 * roofline.floor_seconds / case.rows
            floors = f"{floor:.1f} {floor / per_step:.1f}"
        print(comparison_line(base, side.name, own, case, floors), flush=True)


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


def _run(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> Run:
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


def _run_plainly(engine: Engine, prompts: list[list[int]], params: SamplingParams) -> Run:
    """As `_run`, by an engine without speculation, or with its speculation switched off."""
    loop = engine._shared.open_loop
    speculator, loop.speculator = loop.speculator, None
    try:
        return _run(engine, prompts, params)
    finally:
        loop.speculator = speculator


def _timed(arrived: list[list[float]], tokens: list[list[int]]) -> Run:
    """Return the run whose tokens arrived at these seconds."""
    begin = max(times[0] for times in arrived)
    end = max(times[-1] for times in arrived)
    count = sum(t > begin for times in arrived for t in times)
    itl = [1e6 * (b - a) for times in arrived for a, b in pairwise(times) if a >= begin]
    return Run(count / (end - begin), itl, tokens)


class _Llama:
    """llama.cpp in its own process; see `llama_lookup.py`."""

    def __init__(self, python: str, model: str, threads: int) -> None:
        source = resolve_source(model)
        if source.directory is None:
            raise ConfigError(f"--llama needs a checkpoint, and {model} has random weights")
        script = str(Path(__file__).parent / "runtimes" / "llama_lookup.py")
        command = [python, script, str(source.directory), str(threads), str(LLAMA_DRAFTS)]
        self._process = ChildProcess("llama.cpp", command, os.environ, replies=True)
        self.version: str = self._reply()["version"]

    def run(self, drafts: bool, prompts: list[list[int]], params: SamplingParams) -> Run:
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
