"""Times `AsyncEngine.reload` and `wake`, and the memory of a process whose engine sleeps.

python -m stepgraph.runtime.tools.reload_times preset:smollm2-135m --dtype bfloat16
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence

import psutil

from ...profiling.command_line import CommandParser
from ..config import EngineConfig
from ..errors import StepgraphError
from ..service.async_engine import AsyncEngine

__all__ = ["main"]

MIB = 1 << 20


async def _measure(model: str, other: str, config: EngineConfig, rounds: int) -> None:
    process = psutil.Process()

    def resident() -> int:
        return int(process.memory_info().rss)

    before, awake, asleep = resident(), [], []
    seconds: dict[str, list[float]] = {
        "reload in place": [],
        "reload with a new engine": [],
        "wake": [],
    }
    async with AsyncEngine.from_pretrained(model, config) as engine:
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
            awake.append(resident())
            result = await engine.reload(model)
            if not result.in_place:
                raise StepgraphError(f"{model} was not reloaded in place: {result.reason}")
            seconds["reload in place"].append(result.seconds)
            await engine.reload(other)
            result = await engine.reload(model)
            if result.in_place:
                raise StepgraphError(f"{other} has the config of {model}: give another model")
            seconds["reload with a new engine"].append(result.seconds)
            await engine.sleep()
            asleep.append(resident())
            began = time.perf_counter()
            await engine.wake()
            seconds["wake"].append(time.perf_counter() - began)
    print("| | median | range |\n|---|---|---|")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"| `{name}` | {median:.1f} s | {min(times):.1f} to {max(times):.1f} s |")
    print(
        f"\nResident set: {before / MIB:.0f} MiB before the start,"
        f" {min(awake) / MIB:.0f} to {max(awake) / MIB:.0f} MiB awake,"
        f" {min(asleep) / MIB:.0f} to {max(asleep) / MIB:.0f} MiB asleep"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = CommandParser(
        prog="python -m stepgraph.runtime.tools.reload_times",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="see `Engine.from_pretrained`")
    parser.add_argument(
        "--other",
        default="demo",
        help="model of another config, from which the engine returns (default: %(default)s)",
    )
    parser.add_argument("--dtype", default="auto", help="see EngineConfig (default: %(default)s)")
    parser.add_argument("--mode", default="auto", help="see EngineConfig (default: %(default)s)")
    parser.add_argument("--max-num-seqs", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--memory-tokens", type=int, default=16384, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, not {options.rounds}")
    try:
        config = EngineConfig(
            dtype=options.dtype,
            mode=options.mode,
            max_num_seqs=options.max_num_seqs,
            memory_tokens=options.memory_tokens,
        )
        asyncio.run(_measure(options.model, options.other, config, options.rounds))
    except StepgraphError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
