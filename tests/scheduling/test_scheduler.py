"""What the scheduler decides, a decision at a time: rows, chunks, priorities, preemption.

And what a request finds when it is admitted: a sibling's prompt, blocks of equal contents.
"""

from __future__ import annotations

from typing import Any

import pytest
from stepgraph.runtime.request import Request, RequestStatus

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


# Sharing -----------------------------------------------------------------------------------------

WINDOWS = [(None,), (6,), (None, 6), (6, None, 3)]


def chunk_of(rig: Rig, request: Request) -> tuple[int, int]:
    """(start, count) of the request's chunk in the last plan."""
    (chunk,) = (c for c in rig.runner.plans[-1].prefill if c.request is request)
    return chunk.start, chunk.count


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize(("prompt_len", "copies"), [(12, 1), (13, 0), (14, 1)])
def test_completions_compute_their_prompt_once(windows: Any, prompt_len: int, copies: int) -> None:
    rig = Rig(windows=windows, prefill_chunk=5)
    first, *others = rig.add_group(prompt_len, n=4, max_tokens=9)
    while not first.decoding:
        rig.step()
        assert all(other.status is RequestStatus.WAITING for other in others)
    plan = rig.step()
    assert [admission.request for admission in plan.admitted] == others
    for admission in plan.admitted:
        assert admission.found.source == "fork"
        assert len(admission.found.copies.blocks) == copies * len(windows)
        assert chunk_of(rig, admission.request) == (prompt_len - 1, 1)
    rig.finish(first, *others)


@pytest.mark.parametrize("prefix", [False, True])
def test_what_a_sibling_has_given_back_is_computed_or_found_in_the_cache(prefix: bool) -> None:
    """The second one waits for a row, so long that the window has left the prompt."""
    rig = Rig(windows=(3,), prefix=prefix, max_num_seqs=2)
    rig.add(3, max_tokens=5)
    first, second = rig.add_group(14, n=2, max_tokens=9)
    while second.row is None:
        rig.step()
    assert chunk_of(rig, second) == ((12, 2) if prefix else (0, 14))
    rig.finish(first, second)


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize(
    ("prompt_len", "shared", "cached"),
    [(20, 16, 16), (20, 15, 12), (16, 16, 12), (17, 17, 16), (20, 3, 0)],
)
def test_a_prompt_begins_with_the_full_blocks_of_another(
    windows: Any, prompt_len: int, shared: int, cached: int
) -> None:
    rig = Rig(windows=windows, prefix=True)
    first = rig.add(20, shared=20, max_tokens=4)
    rig.step(2)
    second = rig.add(prompt_len, shared=shared, max_tokens=8)
    rig.step()
    assert chunk_of(rig, second) == (cached, prompt_len - cached)
    outputs = {output.request_id: output for output in rig.drain()}
    assert outputs["request-1"].cached_tokens == 0
    assert outputs["request-2"].cached_tokens == cached
    rig.finish(first, second)


@pytest.mark.parametrize(("salt", "prefix"), [("tenant", True), ("", False)])
def test_without_consent_nothing_is_shared(salt: str, prefix: bool) -> None:
    rig = Rig(prefix=prefix)
    rig.add(20, shared=20)
    rig.step(2)
    other = rig.add(20, shared=20, salt=salt)
    rig.step()
    assert chunk_of(rig, other) == (0, 20)
    assert rig.cache.counts["hit_tokens"] == 0
    if salt:
        same = rig.add(20, shared=20, salt=salt)
        rig.step()
        assert chunk_of(rig, same) == (16, 4)
    rig.drain()
