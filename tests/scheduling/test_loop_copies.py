"""Copies of blocks before a step: to the host and back, for forks; and what if they fail."""

from __future__ import annotations

from typing import Any

import pytest
from stepgraph.runtime.request import Request, RequestStatus

from ..rigs.scheduler_rig import Rig, groups_of

WINDOWS = [(None,), (3,), (None, 5)]


def two_requests(windows: Any, in_flight: int) -> tuple[Rig, list[Request]]:
    """Requests that begin together in a cache in which they cannot both go on."""
    sizes: dict[str, Any] = {"windows": windows, "block_size": 2, "prefill_chunk": 8}
    blocks = 2 * sum(group.most_blocks(4, 2, 8) for group in groups_of(windows)) + len(windows)
    rig = Rig(**sizes, host_blocks=20, usable_blocks=blocks, in_flight=in_flight)
    return rig, [rig.add(4, max_tokens=14), rig.add(4, max_tokens=14)]


def until_preempted(rig: Rig, requests: list[Request]) -> Request:
    """Step until somebody is preempted, and return who."""
    for _ in range(40):
        rig.step()
        for request in requests:
            if request.num_preemptions:
                return request
    raise AssertionError("nobody was preempted")


def fail_once(rig: Rig, name: str, after: int) -> None:
    """Let the next copies of that name fail, after so many of them."""

    def fail_after(called: str, count: int) -> int | None:
        if called != name:
            return None
        rig.runner.fail_after = lambda called, count: None
        return min(after, count)

    rig.runner.fail_after = fail_after


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("windows", [(None,), (None, 5)], ids=str)
def test_a_swapped_request_goes_on_where_it_was(windows: Any, in_flight: int) -> None:
    rig, requests = two_requests(windows, in_flight)
    last = until_preempted(rig, requests)
    assert last is requests[1]
    computed = rig.cache.host.find(last.id)
    assert computed is not None
    assert last.num_computed == 0
    while last.row is None:
        rig.step()
    (chunk,) = rig.runner.plans[-1].prefill
    assert (chunk.start, chunk.count) == (computed.num_tokens, 1)
    assert rig.cache.host.find(last.id) is None
    assert last.num_cached_tokens == 0  # what it found when it was new
    rig.finish(*requests)


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("after", [0, 1, 99])
@pytest.mark.parametrize("copy", ["swap_out", "copy_in"])
@pytest.mark.parametrize("windows", [(None,), (None, 5)], ids=str)
def test_what_was_not_copied_is_computed_again(
    windows: Any, copy: str, after: int, in_flight: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig, requests = two_requests(windows, in_flight)
    if copy == "swap_out":
        fail_once(rig, copy, after)
        last = until_preempted(rig, requests)
        assert rig.runner.plans[-1].decode == [requests[0]], "the other one is not disturbed"
        assert "to the host failed" in caplog.text
    else:
        last = until_preempted(rig, requests)
        fail_once(rig, copy, after)
        while not rig.runner.seen["failures"]:
            rig.step()
        assert (last.status, last.row) == (RequestStatus.WAITING, None)
    assert rig.loop.counts["failed_copies"] == 1
    assert rig.cache.host.num_free == rig.cache.host.num_blocks
    while last.row is None:
        rig.step()
    assert rig.runner.plans[-1].prefill[0].start == 0
    rig.finish(*requests)
    assert rig.runner.seen["undone"] == (copy == "copy_in")


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("after", [0, 1, 99])
def test_a_fork_that_fails_disturbs_nobody_else(
    windows: Any, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Two children and a stranger are admitted together; one other request decodes."""
    rig = Rig(windows=windows)
    decoding = rig.add(3)
    rig.step()
    first, *children = rig.add_group(14, n=3, max_tokens=6)
    rig.step()
    stranger = rig.add(5)
    fail_once(rig, "copy_in", after)
    plan = rig.step()
    assert plan.decode == [decoding, first]
    assert [admission.request for admission in plan.admitted] == [stranger]
    assert [chunk.request for chunk in plan.prefill] == [stranger]
    assert all(child.status is RequestStatus.WAITING for child in children)
    assert "to admitted requests failed" in caplog.text
    plan = rig.step()
    assert [admission.request for admission in plan.admitted] == children
    assert [chunk.start for chunk in plan.prefill] == [0, 0], "no second attempt"
    assert [child.num_cached_tokens for child in children] == [0, 0]
    rig.finish(decoding, first, *children, stranger)
    assert rig.loop.counts["failed_copies"] == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()])
def test_an_interrupt_is_no_failed_copy(error: BaseException) -> None:
    def fail(*_: object) -> None:
        raise error

    rig = Rig()
    rig.add(3)
    rig.runner.blocks.swap_out = fail  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        rig.loop.step()
    assert rig.loop.counts["failed_copies"] == 0
