"""What the scheduler decides, a decision at a time: rows, chunks, priorities, preemption."""

from __future__ import annotations

import pytest
from stepgraph.runtime.request import RequestStatus

from ..rigs.fake_device import requests_of
from ..rigs.scheduler_rig import Rig


def test_admission_is_by_priority_then_arrival() -> None:
    rig = Rig(max_num_seqs=2)
    late, first, second, urgent = (rig.add(2, priority=p) for p in (1, 0, 0, -1))
    plan = rig.step()
    assert [a.request for a in plan.admitted] == [urgent, first]
    rig.loop.requests.abort(rig.loop.requests.groups["request-4"])
    assert [a.request for a in rig.step().admitted] == [second]
    rig.loop.requests.abort(rig.loop.requests.groups["request-2"])
    assert [a.request for a in rig.step().admitted] == [late]


def test_a_request_of_higher_priority_takes_what_is_free() -> None:
    """Those that are served after it are preempted when they need a block, as in vLLM."""
    rig = Rig(usable_blocks=6, block_size=4, max_num_seqs=4)
    low = [rig.add(5, priority=priority, max_tokens=6) for priority in (1, 2)]
    rig.step(2)
    assert rig.cache.pool.num_free == 2
    equal = rig.add(5, priority=2)
    assert not rig.step().admitted  # the two before it may need a block each
    urgent = rig.add(5, priority=0, max_tokens=6)
    assert [a.request for a in rig.step().admitted] == [urgent]
    rig.finish(*low, equal, urgent)
    assert urgent.num_preemptions == low[0].num_preemptions == 0
    assert low[1].num_preemptions == 1


def test_a_request_that_does_not_fit_holds_back_those_behind_it() -> None:
    """Otherwise short prompts would keep a long one out for ever."""
    rig = Rig(usable_blocks=10, block_size=4)
    rig.add(16)
    rig.step()
    long, short = rig.add(30), rig.add(1)
    rig.step()
    assert long.status is short.status is RequestStatus.WAITING


@pytest.mark.parametrize(("priority", "victim"), [(0, 1), (-1, 0)])
def test_the_request_served_last_is_preempted(priority: int, victim: int) -> None:
    rig = Rig(usable_blocks=4, block_size=2)
    requests = [rig.add(2), rig.add(2, priority=priority)]
    survivor = requests[1 - victim]
    rig.step(3)  # both hold two full blocks
    assert rig.cache.pool.num_free == 0
    plan = rig.step()
    assert requests_of(plan.preempted) == [requests[victim]]
    assert plan.decode == [survivor]
    assert not plan.admitted  # with the block it has just lost
    preempted = plan.preempted[0].request
    assert (preempted.row, preempted.num_computed, preempted.num_preemptions) == (None, 0, 1)
    rig.finish(*requests)


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
    rig.finish(last, later)
