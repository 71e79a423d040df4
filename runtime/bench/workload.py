"""Cases of decode steps: their requests and repetitions, rooflines, and equality of tokens."""

from __future__ import annotations

import itertools
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ...profiling.stats import Summary
from ...profiling.timeline import StepRecord
from ..engine.engine import Engine
from ..engine.request_output import RequestOutput
from ..errors import StepgraphError
from ..models.config import DecoderConfig
from ..sampling_params import SamplingParams
from ..tools.step_costs import decode_roofline
from .peers import Peer

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


@dataclass(frozen=True, slots=True)
class BenchmarkCase:
    """Sizes of a case: rows, and the tokens of each prompt and output."""

    batch_size: int
    input_len: int
    output_len: int

    def longest_sequence(self, prefill_chunk: int) -> int:
        """Return the tokens of the longest sequence, prompt and output.

        The first prompt gets a token in each step that prefills the others.
        """
        alone = 1 + -(-self.batch_size * self.input_len // prefill_chunk) + self.batch_size
        return self.input_len + self.output_len + alone

    def prefill_speed(self, prefill_ms: Sequence[float]) -> float:
        """Return prompt tokens per second, from the milliseconds of each repetition."""
        return 1e3 * self.batch_size * self.input_len / statistics.median(prefill_ms)


def random_prompts(config: DecoderConfig, count: int, length: int, seed: int) -> list[list[int]]:
    """Return prompts of random token ids, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    prompts: list[list[int]] = torch.randint(
        config.vocab_size, (count, length), generator=generator
    ).tolist()
    return prompts


def greedy(max_tokens: int) -> SamplingParams:
    """Return parameters for exactly `max_tokens` greedy tokens."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True).resolved()


def decode_batch(
    engine: Engine,
    prompts: Sequence[list[int]],
    max_tokens: int,
    steps: int,
    before_step: Callable[[int], None] | None = None,
) -> tuple[list[float], list[RequestOutput]]:
    """Prefill prompts and decode all of them `steps` times, then drop them.

    Args:
        engine: an idle one.
        prompts: token ids of each row.
        max_tokens: of a request, more than it decodes.
        steps: of the whole batch.
        before_step: called before each of these with its number, from 0, and after the last one
            with their count; its time is not counted.

    Returns:
        The milliseconds of each step, and the outputs.

    Raises:
        StepgraphError: a step did not decode all requests.
    """
    params = greedy(max_tokens)
    latest: dict[str, RequestOutput | None] = {
        engine.add_request(prompt, params): None for prompt in prompts
    }
    while None in latest.values():
        latest.update((output.request_id, output) for output in engine.step())
    step_ms: list[float] = []
    before = time.perf_counter()
    for number in range(steps):
        if before_step is not None:
            before_step(number)
            before = time.perf_counter()
        outputs = engine.step()
        ended = time.perf_counter()
        if len(outputs) != len(latest):
            raise StepgraphError(
                f"a step decoded {len(outputs)} of {len(latest)} requests: the cache has too few"
                " blocks for all of them; choose fewer rows, or a shorter --output-len or"
                " --input-len"
            )
        # From the tokens of the step before: a device works on while the caller does this.
        step_ms.append(1e3 * (ended - before))
        before = ended
        latest.update((output.request_id, output) for output in outputs)
    if before_step is not None:
        before_step(steps)
    for request_id in latest:
        engine.abort(request_id)
    while engine.has_unfinished():
        engine.step()
    return step_ms, [output for output in latest.values() if output is not None]


@dataclass(eq=False)
class EngineRun:
    """A case on an idle engine with at least `batch_size` rows, which is repeated."""

    engine: Engine
    case: BenchmarkCase
    prompts: list[list[int]]
    before_step: Callable[[int], None] | None = None
    """Called in repetitions: see `decode_batch`."""
    repetitions: list[list[float]] = field(default_factory=list)
    """Milliseconds of the steps of each repetition."""
    ttft_ms: list[float] = field(default_factory=list)
    prefill_ms: list[float] = field(default_factory=list)
    """Of each repetition, until the last row has its first token."""
    itl_ms: list[float] = field(default_factory=list)
    """Gaps between the tokens of the steps that count."""
    token_ids: list[list[int]] = field(default_factory=list)
    """The first `output_len` tokens of each prompt, of the first repetition."""
    outputs: list[set[tuple[int, ...]]] = field(default_factory=list)
    """The distinct outputs of each prompt over all repetitions."""
    records: list[StepRecord] = field(default_factory=list)
    """All steps of all repetitions, including prefill."""

    def decode(
        self, before_step: Callable[[int], None] | None = None
    ) -> tuple[list[float], list[RequestOutput]]:
        """Run it once without recording; return the milliseconds of its steps and the outputs."""
        longest = self.case.longest_sequence(self.engine.config.user.prefill_chunk)
        most, steps = longest - self.case.input_len, self.case.output_len - 1
        return decode_batch(self.engine, self.prompts, most, steps, before_step)

    def repeat(self) -> None:
        """Run it once more."""
        self.engine.timeline().clear()
        durations, outputs = self.decode(self.before_step)
        self.repetitions.append(durations)
        self.records += self.engine.timeline().records()
        if not self.token_ids:
            self.token_ids = [output.token_ids[: self.case.output_len] for output in outputs]
            self.outputs = [set() for _ in outputs]
        for distinct, output in zip(self.outputs, outputs, strict=True):
            assert output.timing is not None, "every prompt got a token"
            self.ttft_ms.append(output.timing.ttft_ms)
            self.itl_ms += output.timing.itl_ms[-len(durations) :]
            distinct.add(tuple(output.token_ids))
        self.prefill_ms.append(max(self.ttft_ms[-len(outputs) :]))

    def to_json(self, bandwidth: float) -> dict[str, Any]:
        """Return the fields of the case in the JSON that depend on this run alone.

        `bandwidth` is the device's, in bytes per second.
        """
        engine, case, stats = self.engine, self.case, self.engine.stats()
        # On average half of the output is in the context.
        context = case.input_len + case.output_len // 2
        steps = summarize_repetitions(self.repetitions)
        p50 = steps["step_ms"]["p50"]
        contexts = [context] * case.batch_size
        decoding = [r for r in self.records if r.rows == case.batch_size and not r.prefill_tokens]
        return {
            **asdict(case),
            "ttft_ms": Summary.of(self.ttft_ms).to_json(),
            "itl_ms": Summary.of(self.itl_ms).to_json(),
            **steps,
            "host_us": Summary.of(r.host_ns / 1e3 for r in decoding).to_json(),
            "tokens_per_second": 1e3 * case.batch_size / p50,
            "prefill_tokens_per_second": case.prefill_speed(self.prefill_ms),
            "padding": 1 - sum(r.rows for r in decoding) / max(1, sum(r.bucket for r in decoding)),
            "kv_bytes": case.batch_size * engine.kv_bytes_read(context),
            "roofline": decode_roofline(engine, contexts, bandwidth, p50 / 1e3),
            "memory": stats["memory"],
            "captured": stats["prepared"],
            "start": stats["start"],
        }


@dataclass(eq=False)
class PeerRun:
    """A case in another runtime, which is repeated."""

    peer: Peer
    case: BenchmarkCase
    prompts: list[list[int]]
    repetitions: list[list[float]] = field(default_factory=list)
    prefill_ms: list[float] = field(default_factory=list)
    token_ids: list[list[int]] | None = None
    """Of the first repetition; None where the runtime does not report them."""

    def decode(self) -> dict[str, Any]:
        """Run it once without recording."""
        return self.peer.run(self.prompts, self.case.output_len - 1)

    def repeat(self) -> None:
        """Run it once more.

        Raises:
            PeerError: the runtime failed.
        """
        reply = self.decode()
        self.repetitions.append(reply["step_ms"])
        self.prefill_ms.append(reply["prefill_ms"])
        self.token_ids = self.token_ids or reply.get("token_ids")

    def to_json(self, ours: EngineRun) -> dict[str, Any]:
        """Return an entry of `baselines`: `speedup` is the ratio of the medians of the steps."""
        found, own = map(summarize_repetitions, (self.repetitions, ours.repetitions))
        same = None if self.token_ids is None else equal_share(ours.token_ids, self.token_ids)
        speedup = found["step_ms"]["p50"] / own["step_ms"]["p50"]
        return {
            **self.peer.about,
            **found,
            "prefill_tokens_per_second": self.case.prefill_speed(self.prefill_ms),
            "speedup": speedup,
            "tokens_equal": same,
        }


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Run processes that spin, with the niceness and the processors of this process.

    Raises:
        StepgraphError: one of them did not start, or ended too early.
    """
    command = [sys.executable, "-IS", "-c", _SPIN, str(os.getpid())]
    null, pipe = subprocess.DEVNULL, subprocess.PIPE
    with ExitStack() as stack:
        busy = []
        for _ in range(count):
            process = subprocess.Popen(command, stdin=null, stdout=pipe, stderr=null)
            stack.enter_context(process)
            stack.callback(process.kill)
            busy.append(process)
        for process in busy:
            assert process.stdout is not None
            process.stdout.readline()
        yield
        for process in busy:
            if process.poll() is not None:
                raise StepgraphError(
                    f"a busy process ended with status {process.returncode} while steps were timed"
                )


def interleave(
    sides: Sequence[Callable[[], None]], repetitions: int, seconds: float = math.inf
) -> None:
    """Run each side `repetitions` times in rounds; each round reverses the order of the last.

    A slow phase of the machine affects all sides, a drift adds as much to each, and no side always
    follows the same other one.

    Args:
        sides: in the order of the first round.
        repetitions: of each side.
        seconds: a side whose next run would exceed this in total is not run again; each side runs
            at least once.
    """
    total, last = [0.0] * len(sides), [0.0] * len(sides)
    order = range(len(sides))
    for number in range(repetitions):
        for i in order if number % 2 == 0 else reversed(order):
            if total[i] + last[i] <= seconds:
                began = time.perf_counter()
                sides[i]()
                last[i] = time.perf_counter() - began
                total[i] += last[i]


def equal_share(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Return the share of our tokens that equal theirs, position by position.

    Tokens of theirs past the end of ours are ignored.

    Raises:
        ValueError: the numbers of sequences differ, or ours have no token.
    """
    pairs = [
        len(other) > position and other[position] == token
        for one, other in zip(ours, theirs, strict=True)
        for position, token in enumerate(one)
    ]
    if not pairs:
        raise ValueError("no token to compare")
    return sum(pairs) / len(pairs)


def summarize_repetitions(repetitions: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return the fields of the steps of some repetitions in the JSON.

    `spread` is (max - min) / median of the repetitions' medians, None of a single repetition.
    """
    medians = [statistics.median(one) for one in repetitions]
    apart = (max(medians) - min(medians)) / statistics.median(medians)
    samples = list(itertools.chain.from_iterable(repetitions))
    return {
        "samples": {"step_ms": samples},
        "step_ms": Summary.of(samples).to_json(),
        "repetition_ms": medians,
        "spread": apart if len(medians) > 1 else None,
    }
