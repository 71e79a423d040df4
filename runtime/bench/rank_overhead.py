"""Measures the host time that a tensor-parallel group adds to a decode step of rank 0.

python -m stepgraph.runtime.bench.rank_overhead --rows 1 16 64

Two loops over a model that computes nothing take turns: one alone, one that sends its commands to
another process, which reads them. Rows begin blocks at different steps, so that messages other than
keys of steps are among the commands.
"""

from __future__ import annotations

import argparse
import gc
import os
from functools import partial

from ...profiling.command_line import CommandParser
from ...profiling.stats import Summary
from ..distributed.rank_group import RankGroup
from ..distributed.rank_processes import RankProcess
from ..distributed.segment import SharedSegment, open_shared, shared_memory
from ..execution.rank_commands import Command, CommandSender
from .scenarios.host_overhead import TURN, WARMUP_STEPS, HostRig
from .workload import interleave

__all__ = ["main", "measure_overhead"]

_MODULE = __spec__.name if __name__ == "__main__" else __name__


def measure_overhead(rows: int, steps: int, blocks: int = 20_000) -> tuple[Summary, Summary]:
    """Return the microseconds of a step of `rows` rows, without and with another rank."""
    memory, descriptor = shared_memory(SharedSegment.nbytes_for(2))
    child = RankProcess(1, ["--reader", str(os.getpid()), str(descriptor)], module=_MODULE)
    group = RankGroup(memory, 0, 2, [child])
    try:
        group.exchange(None)
        os.close(descriptor)
        commands = CommandSender(group)
        rigs = [
            HostRig(rows, 0, blocks, num_steps=steps + WARMUP_STEPS, commands=sender)
            for sender in (None, commands)
        ]
        for rig in rigs:
            rig.run(WARMUP_STEPS)
        gc.collect()
        times: list[list[int]] = [[], []]
        interleave([partial(_turn, *pair) for pair in zip(rigs, times, strict=True)], steps // TURN)
        commands.close()
    finally:
        group.close()
    alone, sent = (Summary.of(t / 1e3 for t in ns) for ns in times)
    return alone, sent


def _turn(rig: HostRig, times: list[int]) -> None:
    times += rig.run(TURN)


def _read(process: int, descriptor: int) -> None:
    """Read commands until the last one."""
    memory = open_shared(process, descriptor, SharedSegment.nbytes_for(2))
    group = RankGroup(memory, 1, 2)
    group.watch.on_abort = partial(os._exit, 1)
    group.exchange(None)
    while group.reader.receive()[0] != Command.CLOSE:
        pass
    group.close()


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = CommandParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--reader", nargs=2, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.reader:
        _read(*options.reader)
        return
    for rows in options.rows:
        alone, sent = measure_overhead(rows, options.steps)
        print(
            f"{rows} rows: {alone.p50:.1f} µs alone, {sent.p50:.1f} µs with another rank (medians"
            f" of {alone.n} steps each); minima {alone.min:.1f} and {sent.min:.1f} µs"
        )


if __name__ == "__main__":
    main()
