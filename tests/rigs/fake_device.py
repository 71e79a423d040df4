"""A device without tensors, on which any mistake of the scheduler or the loop changes the tokens.

It keeps what a real one keeps: block tables, newest tokens, positions and sampling state by row,
keys and values by slot, and a host arena. Nothing on it is ever cleaned up, but a block loses its
contents when it is handed out afresh: who reads a slot of it before writing it, or copying it,
fails. The values written for a token depend on all that the windows of the layer groups show before
it, and so does the sampled token, and on the row's seed. A wrong or lost block, a stale row, a copy
at the wrong time, a token too many or a missed recomputation shows as another output than that of
`oracle`, which knows no rows and no blocks.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from types import SimpleNamespace

import numpy as np
from stepgraph.cache.blocks import NULL_BLOCK
from stepgraph.cache.row_states import Copies
from stepgraph.runtime.execution.outputs import Sampled, Score
from stepgraph.runtime.kernels.ops.batch import NON_FINITE
from stepgraph.runtime.request import Request
from stepgraph.runtime.rope_lengths import RopeLengths
from stepgraph.runtime.scheduling.plan import Preemption, Proposed, StepPlan
from stepgraph.runtime.scheduling.scheduler import Scheduler

from .cache_rig import is_published, record_allocations

VOCAB = 11

Windows = tuple[int | None, ...]
"""The window of each layer group; None: full attention."""

NAN = None
"""The value of a token that is in `nan_tokens`, and of every token that sees such a value."""

Contents = dict[int, int | None]
"""Of a block: offset -> value. What was never written is not there."""

Copy = tuple[tuple[int, int], dict[int, Contents], dict[int, Contents]]
"""Source and destination, and of what memories they are."""

NO_TOKENS: frozenset[int] = frozenset()
NO_ROPES = RopeLengths()
"""Rotations that do not depend on the length."""


class InjectedError(Exception):
    """A copy of blocks that fails because a test wants it to."""


def digest(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())


Seen = Sequence[Sequence[int | None]]


def values_of(
    seen: Seen, token: int, nan_tokens: frozenset[int], variant: bytes = b""
) -> list[int | None]:
    """What each group caches for a token: depends on all that the windows show before it, and on
    the variant of the length with which it is rotated."""
    if token in nan_tokens or any(NAN in values for values in seen):
        return [NAN] * len(seen)
    return [digest(group, token, seen, variant) for group in range(len(seen))]


def state_after(state: int | None, new: int | None) -> int | None:
    """Recurrent state after one more token, of which it takes a value."""
    return NAN if NAN in (state, new) else digest(state, new)


def next_token(seed: int, seen: Seen) -> int:
    return NON_FINITE if any(NAN in values for values in seen) else digest(seed, seen) % VOCAB


def begin_of(window: int | None, position: int) -> int:
    """First position that the token at `position` attends to."""
    return 0 if window is None else max(0, position - window + 1)


@lru_cache(4096)
def oracle(
    request: Request,
    windows: Windows = (None,),
    nan_tokens: frozenset[int] = NO_TOKENS,
    ropes: RopeLengths = NO_ROPES,
    recurrent: bool = False,
) -> tuple[list[int], str]:
    """The output of a request that runs alone, and why it ends."""
    values: list[list[int | None]] = [[] for _ in windows]
    states: list[int | None] = [0]
    output: list[int] = []
    rope_length = len(request.prompt_ids)

    def seen(position: int) -> list[list[int | None]]:
        shown = zip(values, windows, strict=True)
        return [v[begin_of(w, position) :] for v, w in shown] + [states[-1:]] * recurrent

    def write(token: int) -> None:
        nonlocal rope_length
        position = len(values[0])
        if position == ropes.recompute_above and rope_length <= position:
            rope_length = position + 1
            for group in values:
                group.clear()
            states[:] = [0]
            for earlier in (*request.prompt_ids, *output)[:position]:
                write(earlier)
        variant = ropes.variant(max(position + 1, rope_length))
        new = values_of(seen(position), token, nan_tokens, variant)
        states.append(state_after(states[-1], new[-1]))
        for group, value in zip(values, new, strict=False):
            group.append(value)

    for token in request.prompt_ids:
        write(token)
    while True:
        token = next_token(request.seed, seen(len(values[0]) - 1))
        if token == NON_FINITE:
            return output, "error"
        output.append(token)
        if output[-1] in request.stop_token_ids and len(output) > request.params.min_tokens:
            return output, "stop"
        if len(output) == request.max_tokens:
            return output, "length"
        write(output[-1])


class FakeDevice:
    """Row state, arena and host arena, as steps see them."""

    def __init__(
        self,
        windows: Windows,
        max_num_seqs: int,
        block_size: int,
        nan_tokens: frozenset[int],
        ropes: RopeLengths,
        recurrent: bool,
    ) -> None:
        self.windows = windows
        self.recurrent = recurrent
        self.ropes = ropes
        self.rope_lengths = [0] * max_num_seqs
        self.nan_tokens = nan_tokens
        self.block_size = block_size
        self.blocks: dict[int, Contents] = {}
        self.snapshots: dict[int, Contents] = {}
        self.inputs: dict[int, Contents] = {}
        self.host: tuple[dict[int, Contents], ...] = ({}, {}, {})
        """Of blocks, snapshots and inputs."""
        self.tables: list[list[dict[int, int]]] = [
            [{} for _ in range(max_num_seqs)] for _ in (*windows, *(0, 0) * recurrent)
        ]
        self.stored = [0] * max_num_seqs
        self._states: dict[int, tuple[int, int | None, Contents]] = {}
        """Of the row that computes: column, state before it, and the inputs of its tokens."""
        self.seeds = [-1] * max_num_seqs
        self.tokens = [-1] * max_num_seqs
        self.positions = [-1] * max_num_seqs
        self.drafts: list[list[int]] = [[] for _ in range(max_num_seqs)]
        """Of each row, if the last step with it has proposed any."""
        self.written: dict[tuple[int, int], int] = {}  # (block, offset) -> row, in this launch

    def slot(self, group: int, row: int, position: int) -> tuple[int, int]:
        column, offset = divmod(position, self.block_size)
        block = self.tables[group][row][column]
        assert block != NULL_BLOCK, f"row {row} uses the null block for position {position}"
        return block, offset

    def read(self, group: int, row: int, position: int) -> int | None:
        block, offset = slot = self.slot(group, row, position)
        assert self.written.get(slot, row) == row, "one row reads what another is just writing"
        return self.blocks[block][offset]

    def seen(self, row: int, position: int, stop: int) -> list[list[int | None]]:
        """What the token at `position` finds before `stop`."""
        found = [
            [self.read(g, row, p) for p in range(begin_of(window, position), stop)]
            for g, window in enumerate(self.windows)
        ]
        return [*found, [self.state(row, stop)]] if self.recurrent else found

    # Recurrent state is kept as `ops/row_states.py` does it.

    def begin(self, row: int, position: int) -> None:
        """Read the state of a row whose first token in a step is at `position`."""
        if not self.recurrent:
            return
        column, known = position // self.block_size, self.stored[row]
        assert known >= column - 1, f"row {row} reads a snapshot that no step has stored"
        before = column - (known < column)
        state = self.snapshots[self._entry(0, row, before)][0] if before else 0
        for own in range(before, column):
            inputs = self.inputs[self._entry(1, row, own)]
            state = self._replayed(row, own + 1, state, inputs)
        offset = position % self.block_size
        inputs = self.inputs[self._entry(1, row, column)] if offset else {}
        self._states[row] = column, state, {p: inputs[p] for p in range(offset)}

    def state(self, row: int, stop: int) -> int | None:
        """State after the tokens before `stop`."""
        column, state, inputs = self._states[row]
        for offset in range(stop - column * self.block_size):
            state = state_after(state, inputs[offset])
        return state

    def add_input(self, row: int, position: int, value: int | None) -> None:
        column, offset = divmod(position, self.block_size)
        before, state, inputs = self._states[row]
        if column != before:
            state, inputs = self._replayed(row, column, state, inputs), {}
        inputs[offset] = value
        self._states[row] = column, state, inputs
        if entry := self.tables[-1][row].get(column, 0):
            self.inputs.setdefault(entry, {})[offset] = value

    def _replayed(self, row: int, column: int, state: int | None, inputs: Contents) -> int | None:
        for offset in range(self.block_size):
            state = state_after(state, inputs[offset])
        if entry := self.tables[-2][row].get(column, 0):
            self.on_snapshot(entry, state)
            self.snapshots[entry] = {0: state}
        return state

    def _entry(self, table: int, row: int, column: int) -> int:
        entry = self.tables[table - 2][row].get(column, 0)
        assert entry, f"row {row} reads state of column {column}, which it does not hold"
        return entry

    def on_snapshot(self, entry: int, state: int | None) -> None:
        """Called before a snapshot is stored."""

    def write(self, row: int, position: int, token: int) -> None:
        variant = self.ropes.variant(max(position + 1, self.rope_lengths[row]))
        values = values_of(self.seen(row, position, position), token, self.nan_tokens, variant)
        if self.recurrent:
            self.add_input(row, position, values.pop())
        for group, value in enumerate(values):
            block, offset = slot = self.slot(group, row, position)
            self.blocks.setdefault(block, {})[offset] = value
            assert self.written.setdefault(slot, row) == row, "two rows write to one slot"

    def sample(self, row: int, position: int) -> int:
        token = next_token(self.seeds[row], self.seen(row, position, position + 1))
        self.tokens[row], self.positions[row] = max(token, 0), position + 1
        return token


@dataclass(frozen=True)
class FakeLaunchedStep:
    number: int
    plan: StepPlan
    bucket: int
    arrived: object
    device_ns: int
    sampled: list[Sampled]  # seen by the host when it reads the launch, not before
    advanced: list[int] | None  # likewise
    proposed: Sequence[Proposed] = ()  # likewise
    unfinished: None = None
    ends: tuple[()] = ()
    began: None = None


class FakeRunner:
    """Carries out plans on the fake device, and checks each of them on the way.

    `fail_after(name, count)` says after how many of the `count` copies of `swap_out` or `copy_in`
    the device fails, if it does.
    """

    masks = None
    drafter = SimpleNamespace(group=0)
    group = None

    def __init__(
        self,
        scheduler: Scheduler,
        in_flight: int,
        windows: Windows,
        nan_tokens: frozenset[int] = NO_TOKENS,
        ropes: RopeLengths = NO_ROPES,
    ) -> None:
        self.scheduler = scheduler
        self.in_flight = in_flight
        block_size = scheduler.cache.block_size
        states = scheduler.cache.states
        self.device = FakeDevice(
            *(windows, scheduler.max_num_seqs, block_size, nan_tokens, ropes, states is not None)
        )
        self.device.on_snapshot = self._check_snapshot  # type: ignore[method-assign]
        self.fail_after: Callable[[str, int], int | None] = lambda name, count: None
        self.draft: Callable[[Request, int, int], list[int]] = lambda request, at, count: []
        """Drafts that may follow so many output tokens of a request."""
        self.unread: deque[FakeLaunchedStep] = deque()
        self.plans: list[StepPlan] = []
        self.sampling: list[bool] = []  # for each chunk of the last plan
        self.launched = 0
        self.seen: Counter[str] = Counter()  # what has happened, so that tests are not empty
        self._stages: list[str] = []  # of the step under way
        # Blocks handed out since contents were last forgotten, with what they are of.
        device, pools = self.device, [scheduler.cache.pool]
        pools += [] if states is None else [states.snapshots, states.inputs]
        memories = device.blocks, device.snapshots, device.inputs
        self._fresh = [
            (record_allocations(pool), memory)
            for pool, memory in zip(pools, memories, strict=False)
        ]

    @property
    def blocks(self) -> FakeRunner:
        """Copies blocks itself."""
        return self

    def swap_out(self, plan: StepPlan) -> None:
        self._stages = ["swap_out"]
        for preemption in plan.preempted:
            self.seen["recomputed" if preemption.swap_out is None else "swapped"] += 1
        try:
            copies = [each.swap_out for each in plan.preempted if each.swap_out is not None]
            self._copy("swap_out", [copy for own in copies for copy in self._copies(own, "out")])
        finally:
            self._empty_fresh()  # now, because what was in them has just been copied

    def _empty_fresh(self) -> None:
        for fresh, memory in self._fresh:
            for block in fresh:
                memory.pop(block, None)
            fresh.clear()

    def _copies(self, copies: Copies, to: str) -> list[Copy]:
        device = self.device
        memories = device.blocks, device.snapshots, device.inputs
        sources = device.host if to == "in" else memories
        targets = device.host if to == "out" else memories
        kinds = zip(copies, sources, targets, strict=True)
        return [(pair, source, target) for pairs, source, target in kinds for pair in pairs]

    def copy_in(self, plan: StepPlan) -> None:
        assert self._stages == ["swap_out"]
        self._stages.append("copy_in")
        found = [admission.found for admission in plan.admitted]
        copies = [copy for f in found for copy in self._copies(f.copies, "within")]
        copies += [copy for f in found for copy in self._copies(f.swap_in, "in")]
        try:
            self._copy("copy_in", copies)
        except InjectedError:
            self.seen["undone"] += sum(bool(f.copies.total or f.swap_in.total) for f in found)
            raise
        cache, groups = self.scheduler.cache, range(len(self.device.windows))
        for request, at in ((admission.request.id, admission.found) for admission in plan.admitted):
            self.seen[at.source] += 1
            self.seen["fork with a copy"] += at.source == "fork" and len(at.copies.blocks) > 0
            behind = any(NULL_BLOCK in cache.block_table(request, group) for group in groups)
            self.seen["prefix behind a window"] += at.source == "prefix" and behind
            self.seen["prefix with state"] += at.source == "prefix" and at.stored > 0

    def _copy(
        self,
        name: str,
        copies: list[Copy],
    ) -> None:
        """Make copies in any order: all read what was there before."""
        limit = self.fail_after(name, len(copies)) if copies else None
        destinations = [(id(into), pair[1]) for pair, _, into in copies]
        assert len(set(destinations)) == len(destinations), "two copies into one block"
        before = [dict(out_of[pair[0]]) for pair, out_of, _ in copies[:limit]]
        for (pair, _, into), contents in zip(copies, before, strict=False):
            into[pair[1]] = contents
        if limit is not None:
            self.seen["failures"] += 1
            raise InjectedError(name)

    def launch(self, number: int, plan: StepPlan) -> FakeLaunchedStep:
        assert number == self.launched
        if plan.preempted or plan.admitted:
            assert self._stages == ["swap_out", "copy_in"]
        else:
            self._empty_fresh()
        assert len(self.unread) <= self.in_flight
        self._stages = []
        self.launched += 1
        self.plans.append(plan)
        self.sampling = [chunk.samples for chunk in plan.prefill]  # true of the plan at launch only
        device = self.device
        for admission in plan.admitted:
            device.seeds[admission.row] = admission.request.seed
            device.rope_lengths[admission.row] = admission.request.rope_length
            device.drafts[admission.row] = []
            device.stored[admission.row] = admission.found.stored
            for tables in device.tables[len(device.windows) :]:
                tables[admission.row].clear()
        for update in plan.table_updates:
            device.tables[update.group][update.row][update.column] = update.block
        check_plan(plan, self.scheduler)
        cache = self.scheduler.cache
        for request, row in rows_of(self.scheduler).items():
            for group, column, block in cache.table_of(request.id):
                assert device.tables[group][row][column] == block, "the device has another table"
            state_entries = sum(
                entry > 0
                for tables in device.tables[len(device.windows) :]
                for entry in tables[row].values()
            )
            own = () if cache.states is None else cache.states.table_of(request.id)
            assert state_entries == len(own), "the device has entries that the request has lost"
        sampled, advanced = [], None
        if plan.decode_counts:
            device.written.clear()
            rows = zip_longest(plan.decode, plan.decode_counts, plan.drafts)
            verified = [self._verify(*row) for row in rows]
            advanced = [len(tokens) for tokens in verified]
            sampled += [
                (request, token, None)
                for request, tokens in zip(plan.decode, verified, strict=True)
                for token in tokens
            ]
        else:
            device.written.clear()
            for request in plan.decode:
                row = request.row
                assert row is not None
                position = device.positions[row]
                device.begin(row, position)
                device.stored[row] = position // device.block_size
                self._write(row, position, device.tokens[row])
                sampled.append((request, device.sample(row, position), None))
        proposed = [
            self._propose(request, plan.proposes, stop)
            for request, stop in zip_longest(plan.decode, plan.draft_stops, fillvalue=0)
        ]
        device.written.clear()
        for chunk in plan.prefill:
            stop = chunk.start + chunk.count
            device.begin(chunk.row, chunk.start)
            device.stored[chunk.row] = (stop - 1) // device.block_size
            for position, token in enumerate(chunk.request.tokens(chunk.start, stop), chunk.start):
                self._write(chunk.row, position, token)
            if chunk.samples:
                sampled.append((chunk.request, device.sample(chunk.row, stop - 1), None))
        for chunk in plan.prefill:
            if chunk.samples:
                own = self._propose(chunk.request, plan.prompt_drafts, chunk.draft_stop)
                proposed.append(own)
                self.seen["prompts with drafts"] += plan.prompt_drafts > 0
        proposed = [own for own in proposed if own is not None]
        launch = FakeLaunchedStep(
            number, plan, len(plan.decode), object(), 0, sampled, advanced, proposed
        )
        self.unread.append(launch)
        return launch

    def _verify(self, request: Request, count: int, drafts: Sequence[int] | None) -> list[int]:
        """Compute the newest token and drafts, None: the row's; return what is accepted."""
        device, row = self.device, request.row
        assert row is not None
        if drafts is None:
            drafts = device.drafts[row][: count - 1]
            assert len(drafts) == count - 1, "drafts of an earlier step, or of another request"
            self.seen["own drafts"] += count > 1
            self.seen["own drafts in flight"] += len(self.unread) if count > 1 else 0
        assert len(drafts) == count - 1
        first, token = device.positions[row], device.tokens[row]
        device.begin(row, first)
        device.stored[row] = first // device.block_size
        accepted: list[int] = []
        right = True
        for position, draft in enumerate((*drafts, None), first):
            self._write(row, position, token)
            seen = device.seen(row, position, position + 1)
            sampled = next_token(device.seeds[row], seen)
            if right:
                accepted.append(sampled)
            right = right and draft == sampled
            token = draft if draft is not None else token
        self.seen["rejected"] += len(accepted) < count
        self.seen["accepted"] += len(accepted) > 1
        device.tokens[row], device.positions[row] = max(accepted[-1], 0), first + len(accepted)
        return accepted

    def _propose(self, request: Request, count: int, stop: int) -> Proposed | None:
        """Keep new drafts for a row; no other row may read the slots of their keys."""
        row = rows_of(self.scheduler)[request]
        self.device.drafts[row] = []
        if not count:
            return None
        newest = self.device.positions[row]
        for position in range(newest, min(newest + count, stop)):
            self._check_own(row, position, (self.drafter.group,))
        drafts = self.draft(request, newest + 1 - len(request.prompt_ids), count)
        assert len(drafts) == count
        self.device.drafts[row] = drafts
        return Proposed(request, stop, drafts, [0.5] * count)

    def _check_own(self, row: int, position: int, groups: Iterable[int]) -> None:
        """Assert that no other row reads the slots of a position."""
        pool = self.scheduler.cache.pool
        for group in groups:
            block, _ = self.device.slot(group, row, position)
            assert pool.ref_count(block) == 1, f"block {block} is written, and shared"
            assert not is_published(pool, block), f"block {block} is written, and cached"

    def _check_snapshot(self, entry: int, state: int | None) -> None:
        """Assert that no one else reads a snapshot that is stored, unless it stays the same."""
        states = self.scheduler.cache.states
        assert states is not None
        if self.device.snapshots.get(entry) != {0: state}:
            assert states.snapshots.ref_count(entry) == 1, "a shared snapshot changes"
            assert not is_published(states.snapshots, entry), "a cached snapshot changes"

    def _write(self, row: int, position: int, token: int) -> None:
        """Write a token to slots that no other row reads, now or later."""
        (request,) = [r for r, own in rows_of(self.scheduler).items() if own == row]
        assert position < self.scheduler.cache._held[request.id].room, "a token without a block"
        self._check_own(row, position, range(len(self.device.windows)))
        self.device.write(row, position, token)

    def read(self, launch: FakeLaunchedStep) -> list[Sampled]:
        assert launch is self.unread.popleft(), "launches are read in their order, once"
        return launch.sampled

    def read_drafts(self, launch: FakeLaunchedStep) -> Sequence[Proposed]:
        return launch.proposed

    def read_scores(self, launch: FakeLaunchedStep) -> Iterator[Score]:
        """The score of a position is its negative."""
        for chunk in launch.plan.prefill:
            assert chunk.start <= chunk.scored.start or not chunk.scored
            assert chunk.scored.stop <= chunk.start + chunk.count or not chunk.scored
            if chunk.scored:
                scores = -np.array(chunk.scored, np.float32)
                none = len(scores), 0
                yield chunk.request, chunk.scored, scores, np.empty(none, int), np.empty(none)

    def check_integrity(self) -> None:
        assert len(self.unread) <= self.in_flight


def rows_of(scheduler: Scheduler) -> dict[Request, int]:
    """The rows of the running requests."""
    return scheduler._running.rows


def check_plan(plan: StepPlan, scheduler: Scheduler) -> None:
    """What every plan promises; requests are as the step finds them."""
    assert plan.prefill or plan.decode
    prefilled = [chunk.request for chunk in plan.prefill]
    taking_part = plan.decode + prefilled
    assert len(set(taking_part)) == len(taking_part), "nobody takes part twice"
    rows = [request.row for request in taking_part]
    assert len(set(rows)) == len(rows)
    assert set(rows) <= set(range(scheduler.max_num_seqs))
    assert all(chunk.row == chunk.request.row for chunk in plan.prefill)
    assert all(chunk.count >= 1 for chunk in plan.prefill)
    assert all(chunk.start == chunk.request.num_computed for chunk in plan.prefill)

    assert plan.prefill_tokens == sum(chunk.count for chunk in plan.prefill)
    assert plan.prefill_tokens <= scheduler.prefill_chunk
    assert plan.prefill_tokens + plan.decode_tokens <= scheduler.max_batch_tokens
    assert all(count >= 1 for count in plan.decode_counts)
    assert max(plan.decode_counts, default=2) > 1
    assert len(plan.prefill) <= scheduler.max_prefill_rows

    assert {preemption.request for preemption in plan.preempted}.isdisjoint(taking_part)
    chunks = [a.request for a in plan.admitted if a.request in prefilled]
    assert chunks == prefilled[len(prefilled) - len(chunks) :]
    # Without time for its chunk the last one admitted waits in its row.
    assert len(plan.admitted) - len(chunks) <= (scheduler._step_budget is not None)
    assert not (plan.admitted and plan.preempted)
    assert sorted(plan.decode, key=lambda request: request.order) == plan.decode
    places = [(update.group, update.row, update.column) for update in plan.table_updates]
    assert len(set(places)) == len(places)
    if not plan.preempted:  # they may have got blocks before they lost them
        assert {row for _, row, _ in places} <= set(rows_of(scheduler).values())


def requests_of(preempted: list[Preemption]) -> list[Request]:
    return [preemption.request for preemption in preempted]
