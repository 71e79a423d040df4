"""Decode steps while other processes keep the same processors busy, also of other runtimes.

A round prefills the prompts in every runtime. Then, for each number of busy processes, these are
started, every runtime decodes some steps while the others are idle, and the processes are ended.
The next round reverses the order of numbers and runtimes. Prefill is not timed.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

from ....profiling.device_state import watch
from ...config import EngineConfig
from ...errors import StepgraphError
from ...loading.loader import resolve_source
from ..benchmark_run import BenchmarkRun, ModelKind, StepMode, resolve_engine
from ..peers import Peer, PeerError, PeerSpec
from ..results import describe_engine
from ..saved_preset import checkpoint_of
from ..workload import random_prompts, summarize_repetitions
from .steady import BenchmarkCase, EngineBatch

__all__ = ["NeighboursCase", "busy_processes", "measure", "measure_rounds"]

SETTLING_SECONDS = 0.3
"""Pause before the steps of a runtime: threads of another may spin for 0.2 s after a step."""
SETTLING_STEPS = 2
"""Steps after that pause that are not counted."""

_SPIN = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
parent = int(sys.argv[1])
print(flush=True)
while os.getppid() == parent:
    for _ in range(1_000_000):
        pass
"""
"""Spins until its parent kills it or has ended."""


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run processes that spin, with the niceness and the processors of this process.

    Raises:
        StepgraphError: one of them did not start, or ended too early.
    """
    command = [sys.executable, "-IS", "-c", _SPIN, str(os.getpid())]
    busy: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            busy.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            )
        for process in busy:
            assert process.stdout is not None
            process.stdout.readline()
        yield
        for process in busy:
            if process.poll() is not None:
                raise StepgraphError(
                    f"a busy process ended with status {process.returncode} while steps were timed"
                )
    finally:
        for process in busy:
            process.kill()
        for process in busy:
            with process:
                process.wait()


@dataclass(frozen=True, slots=True)
class NeighboursCase:
    """Each round has `steps` timed steps for each number of busy processes."""

    batch_size: int
    input_len: int
    steps: int
    neighbours: tuple[int, ...]

    def longest_sequence(self, prefill_chunk: int) -> int:
        """Return the tokens of the longest sequence, prompt and output."""
        # All steps of a request are of the whole batch, the first one included.
        output_len = 1 + len(self.neighbours) * (SETTLING_STEPS + self.steps)
        case = BenchmarkCase(self.batch_size, self.input_len, output_len)
        return case.longest_sequence(prefill_chunk)


def measure_rounds(
    sides: Sequence[EngineBatch | Peer],
    case: NeighboursCase,
    prompts: Sequence[list[int]],
    max_tokens: int,
    *,
    num_warmup: int,
    num_iters: int,
    say: Callable[[str], None],
) -> list[dict[int, list[list[float]]]]:
    """Run `num_warmup` rounds that are not counted, without busy processes, and `num_iters` rounds.

    Returns, of each runtime and number of busy processes, the milliseconds of each round's steps.

    Args:
        sides: the runtimes.
        case: steps and numbers of busy processes.
        prompts: token ids, one prompt a row.
        max_tokens: of a request, more than it decodes.
        num_warmup: rounds that are not counted.
        num_iters: rounds that are.
        say: reports progress.

    Raises:
        PeerError: a peer failed.
    """
    runs: list[dict[int, list[list[float]]]] = [{} for _ in sides]
    in_order = list(zip(sides, runs, strict=True))
    for number in range(-num_warmup, num_iters):
        order = 1 if number % 2 == 0 else -1
        for side in sides:
            side.prefill(prompts, max_tokens)
        for neighbours in case.neighbours[::order] if number >= 0 else (0,):
            with busy_processes(neighbours):
                for side, step_ms in in_order[::order]:
                    time.sleep(SETTLING_SECONDS)
                    side.steps(SETTLING_STEPS)
                    durations = side.steps(case.steps)
                    if number >= 0:
                        step_ms.setdefault(neighbours, []).append(durations)
        for side in sides:
            side.end()
        if number >= 0:
            say(f"round {number + 1} of {num_iters}")
    return runs


def _summarize(rounds: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the fields of a runtime with one number of busy processes in the JSON."""
    found = summarize_repetitions(rounds)
    p50, p99 = found["step_ms"]["p50"], found["step_ms"]["p99"]
    return {**found, "p99_to_p50": None if p99 is None else p99 / p50}


def _compare(peer: Peer, theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Return an entry of `peers` in the JSON, from the fields of both sides."""
    ratios = {f"ratio_{p}": ours["step_ms"][p] / theirs["step_ms"][p] for p in ("p50", "p90")}
    return {"name": peer.name, "version": peer.version, "dtype": peer.dtype, **theirs, **ratios}


def _start_peers(
    stack: ExitStack, run: BenchmarkRun, model: str, config: EngineConfig, threads: int
) -> list[Peer]:
    """Start the runtimes of `--peer` with the checkpoint and the limits of an engine.

    Raises:
        StepgraphError: a runtime fails, or a preset cannot be saved as a checkpoint.
    """
    specs: Sequence[PeerSpec] = run.options.peer or ()
    if not specs:
        return []
    source = resolve_source(model, config_only=True)
    checkpoint = stack.enter_context(checkpoint_of(model, config.dtype, config.seed))
    assert config.max_model_len is not None
    peers: list[Peer] = []
    for spec in specs:
        run.say(f"loading {model} in {spec.name}")
        peer = Peer(
            spec,
            checkpoint,
            dtype=source.config.torch_dtype if config.dtype == "auto" else config.dtype,
            weight_dtype=config.weight_dtype,
            threads=threads,
            rows=config.max_num_seqs,
            tokens=config.max_model_len,
            batch_tokens=config.prefill_chunk + config.max_num_seqs,
        )
        peers.append(stack.enter_context(closing(peer)))
    return peers


def measure(run: BenchmarkRun, kind: ModelKind, mode: StepMode) -> Iterator[dict[str, Any]]:
    """Yield an entry for each number of busy processes, for each point."""
    options = run.options
    if options.peer and run.device.type != "cpu":
        raise PeerError(f"--peer measures on a CPU, and the device is {str(run.device)!r}")
    cases = [
        NeighboursCase(rows, input_len, options.num_steps, tuple(options.neighbours))
        for input_len, rows in itertools.product(options.input_len, options.batch_size)
    ]
    batch_sizes = tuple(sorted({case.batch_size for case in cases}))
    longest = max(case.longest_sequence(options.prefill_chunk) for case in cases)
    config = run.config(
        kind, mode, max_num_seqs=batch_sizes[-1], buckets=batch_sizes, max_model_len=longest
    )
    threads = resolve_engine(kind.model, config).threads  # refuses before weights are read
    with ExitStack() as stack:
        peers = _start_peers(stack, run, kind.model, config, threads)
        engine = stack.enter_context(run.start(kind, config, "decode steps with busy processes"))
        for case in cases:
            rows, input_len = case.batch_size, case.input_len
            run.say(f"{rows} rows, prompts of {input_len}")
            prompts = random_prompts(engine.model_config, rows, input_len, options.seed)
            read_again = watch(run.monitor)
            ours, *theirs = measure_rounds(
                [EngineBatch(engine), *peers],
                case,
                prompts,
                longest - input_len,
                num_warmup=options.num_warmup,
                num_iters=options.num_iters,
                say=run.say,
            )
            state = read_again()
            for neighbours in case.neighbours:
                measured = _summarize(ours[neighbours])
                yield {
                    **describe_engine(engine, kind.model),
                    **dataclasses.asdict(case),
                    "neighbours": neighbours,
                    **measured,
                    "peers": [
                        _compare(peer, _summarize(step_ms[neighbours]), measured)
                        for peer, step_ms in zip(peers, theirs, strict=True)
                    ],
                    "device_state": state,
                }
