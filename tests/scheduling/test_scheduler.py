"""What the scheduler decides, a decision at a time: rows, chunks, priorities, preemption."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from stepgraph.runtime.request import RequestStatus

from ..rigs.fake_device import Windows, oracle, requests_of
from ..rigs.scheduler_rig import Rig, groups_of


def test_admission_is_by_priority_then_arrival() -> None:
    rig = Rig(max_num_seqs=2)
    late, first, second, urgent = (rig.add(2, priority=p) for p in (1, 0, 0, -1))
    plan = rig.step()
    assert [a.request for a in plan.admitted] == [urgent, first]
    rig.loop.requests.abort(rig.loop.requests.groups["request-4"])
    assert [a.request for a in rig.step().admitted] == [second]
    rig.loop.requests.abort(rig.loop.requests.groups["request-2"])
    assert [a.request for a in rig.step().admitted] == [late]


def test_rows_are_given_lowest_first_and_given_back_at_once() -> None:
    rig = Rig(max_num_seqs=3)
    requests = [rig.add(2) for _ in range(4)]
    rig.step()
    assert [request.row for request in requests] == [0, 1, 2, None]
    rig.loop.requests.abort(rig.loop.requests.groups["request-2"])
    assert rig.scheduler.num_running == 2
    rig.step()
    assert [request.row for request in requests] == [0, None, 2, 1]


@pytest.mark.parametrize(("prompt_len", "admitted"), [(32, True), (33, False)])
def test_admission_leaves_every_running_request_a_block(prompt_len: int, admitted: bool) -> None:
    rig = Rig(usable_blocks=10, block_size=4, prefill_chunk=64)
    rig.add(3)
    rig.step()
    assert rig.cache.num_free_blocks == 9
    newcomer = rig.add(prompt_len)  # 8 or 9 blocks, and 1 of headroom
    rig.step()
    assert (newcomer.status is RequestStatus.RUNNING) == admitted


@pytest.mark.parametrize("windows", [(None,), (None, 3), (2, 5)], ids=str)
def test_rows_decode_side_by_side_in_a_pool_of_exactly_their_blocks(windows: Windows) -> None:
    """They hold all that they can need, so nothing is kept free for them."""
    one = sum(group.spec.most_blocks(8, 4, 32) for group in groups_of(windows))
    rig = Rig(windows=windows, usable_blocks=3 * one, block_size=4)
    requests = [rig.add(6, max_tokens=3) for _ in range(3)]  # the last token is never written
    assert [a.request for a in rig.step().admitted] == requests
    assert rig.step().decode == requests
    rig.drain()
    assert rig.loop.counts["preemptions"] == 0


def test_a_request_of_higher_priority_takes_what_is_free() -> None:
    """Those that are served after it are preempted when they need a block, as in vLLM."""
    rig = Rig(usable_blocks=6, block_size=4, max_num_seqs=4)
    low = [rig.add(5, priority=priority, max_tokens=6) for priority in (1, 2)]
    rig.step(2)
    assert rig.cache.num_free_blocks == 2
    equal = rig.add(5, priority=2)
    assert not rig.step().admitted  # the two before it may need a block each
    urgent = rig.add(5, priority=0, max_tokens=6)
    assert [a.request for a in rig.step().admitted] == [urgent]
    rig.drain()
    assert urgent.num_preemptions == low[0].num_preemptions == 0
    assert low[1].num_preemptions == 1
    for request in (*low, equal, urgent):
        assert request.output_ids == oracle(request)[0]


def test_a_lone_request_may_fill_the_cache() -> None:
    rig = Rig(usable_blocks=5, block_size=4, prefill_chunk=64)
    request = rig.add(19)
    assert request.max_tokens == 1
    assert rig.drain()[-1].token_ids == oracle(request)[0]
    request = rig.add(1)
    assert rig.drain()[-1].token_ids == oracle(request)[0]
    assert rig.loop.counts["preemptions"] == 0


def test_a_request_that_does_not_fit_holds_back_those_behind_it() -> None:
    """Otherwise short prompts would keep a long one out for ever."""
    rig = Rig(usable_blocks=10, block_size=4)
    rig.add(16)
    rig.step()
    long, short = rig.add(30), rig.add(1)
    rig.step()
    assert long.status is short.status is RequestStatus.WAITING


def test_a_prompt_is_cut_into_chunks_that_meet() -> None:
    rig = Rig(prefill_chunk=4)
    request = rig.add(10)
    pieces = []
    while not request.output_ids:
        (chunk,) = rig.step().prefill
        pieces.append((chunk.start, chunk.count, *rig.runner.sampling))
    assert pieces == [(0, 4, False), (4, 4, False), (8, 2, True)]
    assert not rig.step().prefill


def test_a_chunk_holds_several_prompts() -> None:
    rig = Rig(prefill_chunk=8)
    requests = [rig.add(length) for length in (3, 2, 5, 4)]
    plan = rig.step()
    assert [(c.request, c.start, c.count) for c in plan.prefill] == [
        (requests[0], 0, 3),
        (requests[1], 0, 2),
        (requests[2], 0, 3),
    ]
    assert rig.runner.sampling == [True, True, False]
    plan = rig.step()
    assert plan.decode == requests[:2]
    assert [(c.request, c.start, c.count) for c in plan.prefill] == [
        (requests[2], 3, 2),
        (requests[3], 0, 4),
    ]


def test_a_chunk_has_at_most_so_many_prompts() -> None:
    rig = Rig(max_prefill_rows=2)
    requests = [rig.add(1) for _ in range(5)]
    assert [c.request for c in rig.step().prefill] == requests[:2]
    assert [c.request for c in rig.step().prefill] == requests[2:4]
    assert [c.request for c in rig.step().prefill] == requests[4:]


def test_decoding_rows_come_out_of_the_token_budget() -> None:
    rig = Rig(max_num_seqs=3, max_batch_tokens=6, prefill_chunk=32)
    rig.add(1), rig.add(1)
    assert rig.step().prefill_tokens == 2
    rig.add(9)
    plan = rig.step()
    assert (len(plan.decode), plan.prefill_tokens) == (2, 4)


def test_decoding_does_not_wait_for_prompts() -> None:
    rig = Rig(prefill_chunk=2)
    decoding = rig.add(2)
    rig.step()
    rig.add(20)
    for _ in range(10):
        plan = rig.step()
        assert plan.decode == [decoding]
        assert plan.prefill_tokens == 2


@pytest.mark.parametrize(("priority", "victim"), [(0, 1), (-1, 0)])
def test_the_request_served_last_is_preempted(priority: int, victim: int) -> None:
    rig = Rig(usable_blocks=4, block_size=2)
    requests = [rig.add(2), rig.add(2, priority=priority)]
    survivor = requests[1 - victim]
    rig.step(3)  # both hold two full blocks
    assert rig.cache.num_free_blocks == 0
    plan = rig.step()
    assert requests_of(plan.preempted) == [requests[victim]]
    assert plan.decode == [survivor]
    assert not plan.admitted  # with the block it has just lost
    preempted = plan.preempted[0].request
    assert (preempted.row, preempted.num_computed, preempted.num_preemptions) == (None, 0, 1)
    rig.drain()
    for request in requests:
        assert request.output_ids == oracle(request)[0]


def test_the_request_served_last_preempts_itself() -> None:
    rig = Rig(usable_blocks=3, block_size=4)
    first, last = rig.add(4), rig.add(3)
    rig.step(2)
    assert (first.num_computed, last.num_computed) == (5, 4)
    plan = rig.step()  # the last one needs a block, the first one does not
    assert (plan.decode, requests_of(plan.preempted)) == ([first], [last])


def test_a_preempted_request_is_served_before_later_ones_and_recomputes_all_it_has() -> None:
    rig = Rig(usable_blocks=4, block_size=2)
    first, last = rig.add(2), rig.add(2)
    later = rig.add(1)
    rig.step(4)
    known = last.prompt_ids + last.output_ids
    assert (last.num_preemptions, len(known)) == (1, 5)
    rig.loop.requests.abort(rig.loop.requests.groups["request-1"])
    plan = rig.step()
    assert first.finish_reason == "abort"
    assert plan.admitted[0].request is last
    chunk = plan.prefill[0]
    assert (chunk.request, chunk.start, chunk.count) == (last, 0, 5)
    rig.drain()
    for request in (last, later):
        assert request.output_ids == oracle(request)[0]


@pytest.mark.parametrize(
    "damage",
    [
        lambda scheduler: scheduler._running.rows.popitem(),
        lambda scheduler: scheduler._running.prefilling.clear(),
        lambda scheduler: scheduler._waiting.push(scheduler._running.last),
        lambda scheduler: scheduler._publisher.leave(scheduler._running.last),
        lambda scheduler: scheduler._reserved.update(scheduler._running.rows.popitem()[0]),
        lambda scheduler: scheduler.cache._allocators[0]._tables.popitem(),
        lambda scheduler: scheduler.cache.host.put("request-1/0", 1, []),
    ],
)
def test_integrity_check_sees_damage(damage: Callable[[Any], object]) -> None:
    rig = Rig()
    rig.add(2), rig.add(2)
    rig.step()
    damage(rig.scheduler)
    with pytest.raises(AssertionError):
        rig.scheduler.check_integrity()
