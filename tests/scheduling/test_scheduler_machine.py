"""Scheduler, cache and loop under any load: every output is that of the plain sequence."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from stepgraph.runtime.engine.request_output import CompletionOutput, RequestOutput
from stepgraph.runtime.request import Request, RequestGroup, RequestStatus
from stepgraph.runtime.rope_lengths import RopeLengths

from ..rigs.fake_device import VOCAB, Windows
from ..rigs.scheduler_rig import Rig, groups_of

WINDOWS: list[Windows] = [(None,), (3,), (None, 3), (None, 1, 6), (2, 5), (4, None, 4)]
ROPES = [
    *(RopeLengths(),) * 3,
    RopeLengths(switches=(6,), grows=(9,)),
    RopeLengths(grows=(4,)),
    *(RopeLengths(switches=(n,), recompute_above=n) for n in (3, 7, 12)),
]
pytestmark = pytest.mark.usefixtures("no_tracebacks")


def fail_sometimes(rng: random.Random, name: str, count: int) -> int | None:
    """Let a third of the copies fail, before the first one or after any of them."""
    return rng.randint(0, count) if rng.random() < 0.3 else None


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, share, fork, run, are preempted and aborted; copies fail."""

    @initialize(
        windows=st.sampled_from(WINDOWS),
        usable_blocks=st.integers(2, 14),
        host_blocks=st.just(0) | st.integers(0, 12),
        block_size=st.integers(1, 4),
        max_num_seqs=st.integers(1, 4),
        spare_tokens=st.integers(1, 8),
        prefill_chunk=st.integers(1, 9),
        max_prefill_rows=st.integers(1, 3),
        in_flight=st.integers(0, 1),
        tokens_per_row=st.sampled_from([1, 1, 2, 3, 5]),
        drafter=st.booleans(),
        prefix=st.booleans(),
        faults=st.none() | st.integers(0, 1000),
        nan_tokens=st.sampled_from([frozenset(), frozenset({VOCAB - 1})]),
        ropes=st.sampled_from(ROPES),
        snapshots=st.none() | st.integers(0, 6),
    )
    def make(
        self,
        max_num_seqs: int,
        spare_tokens: int,
        tokens_per_row: int,
        faults: int | None,
        **sizes: Any,
    ) -> None:
        self.rig = Rig(
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_num_seqs + spare_tokens,
            tokens_per_row=tokens_per_row,
            **sizes,
        )
        self.ended_early = False
        if faults is not None:
            self.rig.runner.fail_after = partial(fail_sometimes, random.Random(faults))
        self.unfinished: dict[str, RequestGroup] = {}
        self.aborted: set[str] = set()
        self.seen: dict[str, list[int]] = {}  # output tokens of each completion, when last shown

    @rule(
        prompt=st.integers(0, 30),
        priority=st.integers(-1, 1),
        max_tokens=st.integers(1, 20),
        min_tokens=st.integers(0, 3),
        stop=st.sets(st.integers(0, VOCAB - 1), max_size=2),
        n=st.integers(1, 3),
        topic=st.integers(0, 1),
        shared=st.integers(0, 30),
        salt=st.sampled_from(["", "", "tenant"]),
        scored=st.booleans(),
    )
    def add(self, prompt: int, **options: Any) -> None:
        # Few names: they come back, and find nothing that their last owner left.
        free = (name for name in "abcdefghijklmnop" if name not in self.unfinished)
        if (name := next(free, None)) is not None:
            prompt_len = 1 + prompt % (self.rig.capacity - 1)
            group = self.rig.group(prompt_len, name=name, **options)
            self.rig.loop.requests.add(group)
            self.unfinished[name] = group
            self.seen[name] = [-1] * len(group.requests)

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            for output in self.rig.loop.step():
                self.check_output(output)
            self.rig.loop.check_integrity()
            self.rig.cached_nan()
            assert set(self.rig.loop.requests.groups) == set(self.unfinished)

    @precondition(lambda self: self.unfinished)
    @rule(index=st.integers(0, 100))
    def abort(self, index: int) -> None:
        name = list(self.unfinished)[index % len(self.unfinished)]
        self.rig.loop.requests.abort(self.unfinished[name])
        self.ended_early = True
        self.aborted.add(name)

    @precondition(lambda self: self.unfinished)
    @rule(index=st.integers(0, 100), resumes=st.booleans())
    def pause(self, index: int, resumes: bool) -> None:
        group = self.unfinished[list(self.unfinished)[index % len(self.unfinished)]]
        self.rig.loop.requests.set_paused(group, not resumes)

    def check_output(self, output: RequestOutput) -> None:
        name = output.request_id
        group = self.unfinished[name]  # a finished one is shown once
        assert output.prompt_token_ids == group.prompt_ids
        assert output.cached_tokens < len(group.prompt_ids)
        assert output.finished == all(c.finish_reason for c in output.completions)
        for completion, request in zip(output.completions, group.requests, strict=True):
            self.check_completion(completion, request, name in self.aborted)
        if group.requests[0].prompt_logprobs is not None and any(
            completion.token_ids for completion in output.completions
        ):
            positions = range(len(group.prompt_ids) - 1)
            scores = [entry.logprob for entry in output.prompt_logprobs if entry is not None]
            assert scores == [-position for position in positions]
        lengths = [len(completion.token_ids) for completion in output.completions]
        for completion, before in zip(output.completions, self.seen[name], strict=True):
            assert list(completion.delta.token_ids) == completion.token_ids[max(before, 0) :]
        ended = name in self.aborted or output.error is not None
        assert lengths != self.seen[name] or ended, "nothing changed"
        self.seen[name] = lengths
        if output.finished:
            del self.unfinished[name]
            self.aborted.discard(name)

    def check_completion(
        self, completion: CompletionOutput, request: Request, aborted: bool
    ) -> None:
        expected, reason = self.rig.oracle(request)
        if completion.finish_reason in ("stop", "length", "error"):
            assert (completion.token_ids, completion.finish_reason) == (expected, reason)
        else:
            assert completion.finish_reason is None or aborted
            assert completion.token_ids == expected[: len(completion.token_ids)]
            assert len(completion.token_ids) < len(expected) or reason == "error"

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "rig"):
            self.rig.loop.check_integrity()
            requests = [r for group in self.unfinished.values() for r in group.requests]
            states = Counter(request.status for request in requests)
            assert states[RequestStatus.RUNNING] == self.rig.scheduler.num_running
            waiting = [r for r in requests if r.status is RequestStatus.WAITING and not r.paused]
            assert len(waiting) == self.rig.scheduler.num_waiting
            held = [request.row for request in requests if request.row is not None]
            assert len(set(held)) == len(held) == states[RequestStatus.RUNNING]

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            for group in self.unfinished.values():
                self.rig.loop.requests.set_paused(group, False)
            for output in self.rig.drain():
                self.check_output(output)
            assert not self.unfinished
            # The logits of an aborted request were not all seen; what it left is not verified.
            assert self.ended_early or not self.rig.cached_nan()


SchedulerMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None
)
TestSchedulerAndLoop = SchedulerMachine.TestCase


@pytest.mark.slow
class TestLongSchedulerAndLoop(TestSchedulerAndLoop):  # type: ignore[misc, valid-type]
    """The same, for longer."""

    settings = settings(max_examples=500, stateful_step_count=60, deadline=None)


def crowd(rig: Rig, seed: int, count: int) -> Iterator[RequestGroup]:
    """Requests for more than the cache holds, many of which begin alike."""
    rng = random.Random(seed)
    for _ in range(count):
        yield rig.group(
            1 + rng.randrange(min(18, rig.capacity - 1)),
            priority=rng.randint(0, 2),
            max_tokens=rng.randint(1, 18),
            stop=rng.sample(range(VOCAB), rng.randint(0, 1)),
            n=rng.choice([1, 1, 2, 4]),
            topic=rng.randint(0, 2),
            shared=rng.randint(0, 18),
            salt=rng.choice(["", "", "tenant"]),
        )


def run_crowd(rig: Rig, seed: int, count: int) -> None:
    """Run a crowd that comes a request a step; each output is that of the oracle."""
    groups, outputs = [], []
    for group in crowd(rig, seed, count):
        rig.loop.requests.add(group)
        groups.append(group)
        outputs += rig.loop.step()
        rig.loop.check_integrity()
    outputs += rig.drain()
    finished = {output.request_id: output for output in outputs if output.finished}
    for group in groups:
        rig.check_output(finished[group.id], group.requests)
    assert rig.loop.counts["preemptions"] == sum(o.num_preemptions for o in finished.values())
    seen = rig.runner.seen
    assert rig.loop.counts["preemptions"] == seen["swapped"] + seen["recomputed"]


def crowded_rig(seed: int, windows: Windows, **options: Any) -> Rig:
    """Room for about two requests, at a time when five have a row."""
    rng = random.Random(seed)
    block_size, chunk = rng.randint(1, 4), rng.randint(2, 6)
    one = sum(g.most_blocks(20, block_size, chunk) for g in groups_of(windows))
    return Rig(
        windows=windows,
        usable_blocks=int(one * rng.uniform(1.2, 2.2)),
        block_size=block_size,
        max_num_seqs=5,
        max_batch_tokens=rng.randint(6, 16) + 10 * (options.get("tokens_per_row", 1) > 1),
        prefill_chunk=chunk,
        max_prefill_rows=rng.randint(1, 3),
        **options,
    )


CROWDS = [
    (WINDOWS[::2], False, 0, "decode", False),
    (WINDOWS[1::2], False, 1, "decode", False),
    (WINDOWS[::2], False, 1, "drafts of the host", True),
    (WINDOWS[1::2], True, 1, "of a drafter", False),
]
"""Every value, and NaN with rejected drafts."""


@pytest.mark.parametrize(("all_windows", "prefix", "in_flight", "several", "nan"), CROWDS)
def test_outputs_in_a_crowd(
    all_windows: list[Windows], prefix: bool, in_flight: int, several: str, nan: bool
) -> None:
    """The machine above may choose to be idle; here all that can happen does."""
    count = 14
    verify = (2, 3, 5, 3) if "of" in several else (1, 1, 1, 1)
    seen: Counter[str] = Counter()
    for windows, seed in itertools.product(all_windows, range(4)):
        rig = crowded_rig(
            seed,
            windows,
            in_flight=in_flight,
            prefix=prefix,
            host_blocks=(40, 8, 12, 40)[seed],
            tokens_per_row=verify[seed],
            drafter=several == "of a drafter",
            nan_tokens=frozenset({VOCAB - 1} if nan else ()),
            ropes=ROPES[2 * seed + 1],
            snapshots=(None, 4, 0, 20)[seed],
        )
        if seed >= 2:
            rig.runner.fail_after = partial(fail_sometimes, random.Random(seed))
        run_crowd(rig, seed, count)
        seen += rig.runner.seen
        seen["ended"] += rig.loop.counts["non_finite"]
        assert not rig.cached_nan()
    enough = 4 * count * len(all_windows) // len(WINDOWS)
    if nan:  # hardly anything is left to run out of blocks
        assert seen["ended"] >= 5 * enough
        return
    for event in ("fork", "fork with a copy", "swapped", "swap", "recomputed", "undone"):
        assert seen[event] >= enough / 10, event
    for event in ("rejected", "accepted"):
        assert (seen[event] >= enough) == (max(verify) > 1), event
    in_flight_drafts = in_flight and several == "of a drafter"
    assert (seen["own drafts in flight"] >= enough) == bool(in_flight_drafts)
    assert seen["own drafts"] == seen["own drafts in flight"], "they are sent if they are known"
    for event in ("prefix", "prefix behind a window", "prefix with state"):
        assert seen[event] >= enough / 4 or not prefix, event
