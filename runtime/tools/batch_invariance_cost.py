"""Times steps with and without `EngineConfig.batch_invariant`, in turns.

python -m stepgraph.runtime.tools.batch_invariance_cost preset:smollm2-135m --dtype bfloat16
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Sequence

from ...profiling.command_line import CommandParser
from ..config import EngineConfig
from ..engine.engine import Engine
from ..errors import StepgraphError
from ..sampling_params import SamplingParams
from .arguments import positive_int

__all__ = ["main"]

_STEPS = 20
"""Decode steps of a turn."""
_CONTEXT = 32
"""Tokens of the prompts of rows that decode."""
_BATCHES = (1, 8)
_MOST_ID = 90
"""Token ids that every vocabulary has."""


def _token_times(engine: Engine, rows: int, prompt: int, tokens: int) -> list[float]:
    """Return the milliseconds from the arrival of a batch to each token of its first row."""
    rng = random.Random(rows)
    prompts = [[rng.randrange(_MOST_ID) for _ in range(prompt)] for _ in range(rows)]
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True).resolved()
    timing = engine.generate(prompts, params)[0].completions[0].timing
    assert timing is not None
    return [(at - timing.arrival_ns) / 1e6 for at in timing.token_ns]


def _turn(engine: Engine, prefill: int) -> dict[str, list[float]]:
    """Return the times of one turn, in milliseconds, by what was measured."""
    times = {f"prefill of {prefill} tokens": _token_times(engine, 1, prefill, 1)}
    for rows in _BATCHES:
        at = _token_times(engine, rows, _CONTEXT, _STEPS + 2)[-_STEPS - 1 :]
        name = f"decode step, {rows} row" + "s" * (rows > 1)
        times[name] = [after - before for before, after in itertools.pairwise(at)]
    return times


def _measure(model: str, options: argparse.Namespace) -> None:
    engines = {
        invariant: Engine.from_pretrained(
            model,
            EngineConfig(
                device="cpu",
                dtype=options.dtype,
                batch_invariant=invariant,
                max_num_seqs=max(_BATCHES),
                prefill_chunk=options.prefill,
                max_model_len=options.prefill + _CONTEXT + _STEPS,
                prefix_cache=False,
            ),
        )
        for invariant in (True, False)  # the one that may be refused first
    }
    times: dict[bool, dict[str, list[float]]] = {False: {}, True: {}}
    try:
        for number in range(options.rounds + 1):
            for invariant in (False, True) if number % 2 else (True, False):
                found = _turn(engines[invariant], options.prefill)
                if number:  # the first round warms up
                    for name, values in found.items():
                        times[invariant].setdefault(name, []).extend(values)
    finally:
        for engine in engines.values():
            engine.close()
    print("| | without ms | with ms | ratio | n |\n|---|---:|---:|---:|---:|")
    for name, values in times[False].items():
        without, having = statistics.median(values), statistics.median(times[True][name])
        ratio = having / without
        print(f"| {name} | {without:.3g} | {having:.3g} | {ratio:.3f} | {len(values)} |")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = CommandParser(
        prog="python -m stepgraph.runtime.tools.batch_invariance_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="see `Engine.from_pretrained`")
    parser.add_argument("--dtype", default="auto", help="see EngineConfig (default: %(default)s)")
    parser.add_argument(
        "--prefill",
        type=positive_int,
        default=512,
        help="tokens of a long prompt (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=positive_int, default=9, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    try:
        _measure(options.model, options)
    except StepgraphError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
