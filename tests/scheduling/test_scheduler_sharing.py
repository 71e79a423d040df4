"""What a request finds when it is admitted: a sibling's prompt, blocks of equal contents."""

from __future__ import annotations

from typing import Any

import pytest
from stepgraph.runtime.request import Request, RequestStatus

from ..rigs.scheduler_rig import Rig, groups_of

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
        assert len(admission.found.copies) == copies * len(windows)
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


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_all_that_fit_alone_end(windows: Any, in_flight: int) -> None:
    """Waiting children, prompts that wait for blocks in their middle, preempted ones, priorities:
    the cache holds one longest sequence, and there are as many rows as one likes.
    """
    block_size = prefill_chunk = 2
    rig = Rig(
        windows=windows,
        usable_blocks=sum(g.most_blocks(30, block_size, prefill_chunk) for g in groups_of(windows)),
        block_size=block_size,
        prefill_chunk=prefill_chunk,
        in_flight=in_flight,
    )
    requests = [
        request
        for index in range(10)
        for request in rig.add_group(
            29 - 2 * index, n=1 + index % 3, priority=index % 2, max_tokens=1 + index
        )
    ]
    rig.finish(*requests, limit=rig.work)
    assert rig.loop.counts["preemptions"] > 0 or None not in windows
