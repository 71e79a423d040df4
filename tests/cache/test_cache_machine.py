"""Pool, allocators, prefix, swap and fork together, against a model that knows what slots hold.

The model does what the engine does with a plan: it takes tables, copies and swaps from the cache,
changes a memory of its own in the order swap out, copies, swap in, computed tokens, and then reads
with every token computed what attention reads. A slot holds the whole story of what it is of:
(layer group, salt, all tokens up to its position). A block that was handed out anew holds nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from stepgraph.cache.blocks import PrefixHashes
from stepgraph.cache.kv_cache import KVCache
from stepgraph.cache.row_states import Copies

from ..rigs.cache_rig import (
    Job,
    Memory,
    Plan,
    brute_force_match,
    hashes_of,
    layer_group,
    record_allocations,
)
from ..rigs.scheduler_rig import groups_of

MOST_TOKENS = 40
RARELY = st.sampled_from([False] * 5 + [True])


class CacheMachine(RuleBasedStateMachine):
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        windows=st.lists(st.sampled_from([None, None, 1, 2, 3, 5, 8, 12]), min_size=1, max_size=3),
        num_blocks=st.integers(4, 28) | st.integers(20, 60),
        block_size=st.integers(1, 5),
        chunk=st.integers(1, 9),
        host_blocks=st.sampled_from([0, 2, 5, 12]),
    )
    def make(
        self,
        windows: list[int | None],
        num_blocks: int,
        block_size: int,
        chunk: int,
        host_blocks: int,
    ) -> None:
        groups = [layer_group(i, window) for i, window in enumerate(windows)]
        self.windows = windows
        self.cache = KVCache(groups, num_blocks, block_size, chunk=chunk, host_blocks=host_blocks)
        self.longest = max(
            n
            for n in range(MOST_TOKENS + 1)
            if sum(g.most_blocks(n, block_size, chunk) for g in groups) < num_blocks
        )
        assume(self.longest >= 2)
        self.chunk = chunk
        self.size = block_size
        self.memory = Memory(windows, num_blocks, host_blocks, block_size)
        self.tables = self.memory.tables
        self.waiting: list[Job] = []
        self.num_jobs = 0
        self.uncommitted: list[Job] = []  # their last token is known after the next launch
        self.admitting = False
        self.plan = Plan()
        self.fresh = record_allocations(self.cache.pool)

    # Requests ------------------------------------------------------------------------------------

    @rule(
        shared=st.integers(0, 24),
        tail=st.lists(st.integers(0, 1), max_size=4),
        salt=st.sampled_from(["", "", "", "pepper"]),
        count=st.sampled_from([1, 1, 2, 3]),
    )
    def new(self, shared: int, tail: list[int], salt: str, count: int) -> None:
        tokens = ([0] * shared + tail or [1])[: self.longest - 1]
        family: list[Job] = []
        for _ in range(count):
            self.num_jobs += 1
            job = Job(f"r{self.num_jobs}", salt, list(tokens), len(tokens), family, len(tokens))
            job.hashes = PrefixHashes(self.size, salt)
            family.append(job)
        self.waiting += family

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def drop_waiting(self, data: st.DataObject) -> None:
        job = data.draw(st.sampled_from(self.waiting))
        if job in self.plan.preempted:  # ends between steps, not within a plan
            return
        self.cache.host.drop(job.id)
        self.waiting.remove(job)
        job.family.remove(job)

    @precondition(lambda self: self.tables and self.plan == Plan())
    @rule(data=st.data(), publish=st.booleans())
    def finish(self, data: st.DataObject, publish: bool) -> None:
        job = self.pick_running(data)
        if publish:
            self.do_publish(job)
        self.do_finish(job)

    # The plan: first who runs goes on or loses its blocks, then others come ----------------------

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.do_publish(self.pick_running(data))

    @precondition(lambda self: self.tables and not self.admitting)
    @rule(data=st.data(), budget=st.integers(1, 9), swap=st.booleans())
    def advance(self, data: st.DataObject, budget: int, swap: bool) -> None:
        job = self.pick_running(data)
        if job not in self.plan.chunks:
            self.do_advance(job, min(budget, self.chunk), swap)

    @precondition(lambda self: self.tables and not self.admitting)
    @rule(data=st.data(), swap=st.booleans())
    def preempt(self, data: st.DataObject, swap: bool) -> None:
        self.do_preempt(self.pick_running(data), swap)

    @precondition(lambda self: self.waiting)
    @rule(
        data=st.data(),
        budget=st.integers(1, 9),
        headroom=st.sampled_from([0, 0, 0, 2]),
        prefix=st.sampled_from([True, True, True, False]),
    )
    def admit(self, data: st.DataObject, budget: int, headroom: int, prefix: bool) -> None:
        self.do_admit(data.draw(st.sampled_from(self.waiting)), budget, headroom, prefix)

    def do_admit(self, job: Job, budget: int, headroom: int, prefix: bool) -> None:
        if job in self.plan.preempted:
            return
        self.admitting = True
        shared = job.prompt - 1
        siblings = [  # not one admitted just now: what it shall begin with is still to be copied
            (other.id, shared)
            for other in job.family
            if other in self.tables and other.computed >= shared > 0
            if not any(other is admitted for admitted, _ in self.plan.admitted)
        ]
        job.hashes.extend(lambda start, stop: job.tokens[start:stop], job.known)
        expected = brute_force_match(self.cache, self.windows, job) if prefix else 0
        free, alone = self.cache.pool.num_free, not self.tables
        found = self.cache.admit(
            job.id,
            job.known,
            chunk=min(budget, self.chunk),
            headroom=headroom,
            hashes=job.hashes if prefix else None,
            siblings=siblings,
        )
        if found is None:
            assert not alone or headroom, "a lone request that fits was refused"
            assert self.cache.pool.num_free == free
            assert all(self.cache.block_table(job.id, g) == () for g in range(len(self.windows)))
            return
        assert 0 <= found.num_tokens < job.known
        assert self.cache.pool.num_free >= headroom
        if found.source == "prefix":
            assert found.num_tokens == expected
        elif found.source != "swap":
            assert found.num_tokens >= expected
        if found.source == "fork" and found.copies.blocks:
            assert len(found.copies.blocks) == len(self.windows)
        self.seen[found.source] += 1
        self.waiting.remove(job)
        self.tables[job] = [{} for _ in self.windows]
        self.memory.change_tables(job, self.cache.table_of(job.id))
        job.computed = found.num_tokens
        self.plan.admitted.append((job, found))
        count = min(job.known - found.num_tokens, budget, self.chunk)
        self.plan.chunks[job] = count

    # The launch ----------------------------------------------------------------------------------

    @rule(data=st.data(), fail_out=RARELY, fail_in=RARELY)
    def launch(self, data: st.DataObject, fail_out: bool, fail_in: bool) -> None:
        plan, self.plan, self.admitting = self.plan, Plan(), False
        for job, pairs in plan.swap_out:
            if fail_out:
                self.cache.host.drop(job.id)
            else:
                for block, host in pairs:
                    self.memory.host[host] = list(self.memory.blocks[block])
        for block in self.fresh:
            self.memory.blocks[block] = [None] * self.size
        self.fresh.clear()
        if fail_in:
            self.undo(plan)
        self.memory.copy_in(plan.admitted)
        for job, _ in plan.admitted:
            self.memory.check_reads(job, job.computed, job.computed)
        self.memory.write(plan.chunks, self.cache.pool)
        for job, count in plan.chunks.items():
            for position in range(job.computed, job.computed + count):
                self.memory.check_reads(job, position, position + 1)
            job.computed += count
        for job in self.uncommitted:
            job.known = len(job.tokens)
        self.uncommitted = []
        for job in plan.chunks:
            if job.computed == len(job.tokens) == self.longest:
                self.do_finish(job)
            elif job.computed == len(job.tokens):
                job.tokens.append(data.draw(st.integers(0, 1)))
                self.uncommitted.append(job)

    @rule(
        data=st.data(),
        steps=st.integers(1, 6),
        budget=st.integers(1, 9),
        swap=st.booleans(),
        fail=RARELY,
    )
    def run(self, data: st.DataObject, steps: int, budget: int, swap: bool, fail: bool) -> None:
        """Some steps as a scheduler plans them: who came first goes first."""
        for _ in range(steps):
            for job in self.tables:
                self.do_publish(job)
            for job in list(self.tables):
                if not self.admitting and job in self.tables and job not in self.plan.chunks:
                    self.do_advance(job, min(budget, self.chunk), swap)
            for job in self.waiting[:2]:
                self.do_admit(job, budget, 0, True)
            self.launch(data, fail, fail)
            self.cache.check_integrity()

    def undo(self, plan: Plan) -> None:
        """The copies to admitted requests failed half way: those that need them wait again."""
        for job, found in tuple(plan.admitted):
            if found.copies.total or found.swap_in.total:
                plan.admitted.remove((job, found))
                del plan.chunks[job]
                self.cache.release(job.id)
                del self.tables[job]
                job.computed = 0
                self.waiting.append(job)

    # Parts of the rules --------------------------------------------------------------------------

    def pick_running(self, data: st.DataObject) -> Job:
        return data.draw(st.sampled_from(list(self.tables)))

    def do_publish(self, job: Job) -> None:
        if any(job is admitted for admitted, _ in self.plan.admitted):
            return  # nothing of it is there before the launch
        known = min(job.computed, job.known)
        job.hashes.extend(lambda start, stop: job.tokens[start:stop], known)
        self.cache.publish(job.id, job.hashes, known)

    def do_advance(self, job: Job, budget: int, swap: bool) -> None:
        count = min(budget, len(job.tokens) - job.computed)
        if job.computed + count == len(job.tokens) > job.known:
            count = min(count, 1)  # the device's own token: decoding
        if count <= 0:
            return
        slid = self.cache.slide(job.id, job.computed)
        assert all(block == 0 for _, _, block in slid)
        self.memory.change_tables(job, slid)
        while (grown := self.cache.grow(job.id, job.computed + count)) is None:
            victim = list(self.tables)[-1]
            self.do_preempt(victim, swap)
            if victim is job:
                return
        self.memory.change_tables(job, grown)
        self.plan.chunks[job] = count

    def do_finish(self, job: Job) -> None:
        self.cache.release(job.id)
        del self.tables[job]
        job.family.remove(job)

    def do_preempt(self, job: Job, swap: bool) -> None:
        self.do_publish(job)
        pairs = None
        if swap and job.computed:
            before = [list(self.cache.block_table(job.id, g)) for g in range(len(self.windows))]
            pairs = self.cache.swap_out(job.id, job.computed)
            if pairs is None:
                tables = [list(self.cache.block_table(job.id, g)) for g in range(len(before))]
                assert tables == before
        if pairs is None:
            self.cache.release(job.id)
        else:
            self.plan.swap_out.append((job, pairs.blocks))
        self.plan.chunks.pop(job, None)
        self.plan.preempted.append(job)
        del self.tables[job]
        job.computed = 0
        self.waiting.append(job)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "fresh"):
            return
        self.cache.check_integrity()
        for job, tables in self.tables.items():
            for group, table in enumerate(tables):
                expected = list(self.cache.block_table(job.id, group))
                assert [table.get(column, 0) for column in range(len(expected))] == expected

    def teardown(self) -> None:
        if not hasattr(self, "fresh"):
            return
        for job in self.tables:
            self.cache.release(job.id)
        for job in self.waiting:
            self.cache.host.drop(job.id)
        self.cache.check_integrity()
        assert self.cache.pool.num_free == self.cache.usable_blocks
        assert self.cache.host.num_free == self.cache.host.num_blocks
        assert self.cache.pool.num_published <= self.cache.usable_blocks


@pytest.mark.parametrize(
    ("examples", "steps"), [(60, 50), pytest.param(2500, 100, marks=pytest.mark.slow)]
)
def test_every_token_reads_its_own_past(
    examples: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CacheMachine, "seen", Counter())
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    run = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        suppress_health_check=checks,
    )
    run_state_machine_as_test(CacheMachine, settings=run)
    assert CacheMachine.seen.keys() == {"nothing", "prefix", "fork", "swap"}


# The cache as the scheduler sees it ---------------------------------------------------------------


def test_headroom_and_the_peak_of_windows_are_left_free() -> None:
    # Full attention takes 4 blocks at once; the window 1, and 3 when it is widest.
    for num_blocks, headroom, fits in [(8, 0, True), (7, 0, False), (9, 1, True), (8, 1, False)]:
        cache = KVCache(groups_of((None, 6)), num_blocks, 4, chunk=2)
        assert (cache.admit("a", 16, chunk=2, headroom=headroom) is not None) == fits
        assert cache.pool.num_free == num_blocks - 1 - 5 * fits


def test_tails_go_first_and_groups_in_step() -> None:
    cache = KVCache(groups_of((None, None)), 9, 4)
    hashes = hashes_of(range(16), 4)
    cache.admit("a", 16, chunk=1, hashes=hashes)
    cache.publish("a", hashes, 16)
    assert [cache.block_table("a", g) for g in range(2)] == [[1, 2, 3, 4], [5, 6, 7, 8]]
    cache.release("a")
    assert cache.pool.allocate(8) == [4, 8, 3, 7, 2, 6, 1, 5]


def test_room_that_was_not_computed_is_not_swapped() -> None:
    cache = KVCache(groups_of((None,)), 10, 4, host_blocks=8)
    cache.admit("a", 16, chunk=1)
    assert cache.swap_out("a", 5) == Copies([(1, 0), (2, 1)], [], [])
