"""Copies of blocks before a step: to the host and back, for forks; and what if they fail."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from stepgraph.runtime.request import Request, RequestStatus

from ..rigs.fake_device import oracle
from ..rigs.scheduler_rig import Rig

WINDOWS = [(None,), (3,), (None, 5)]


def swapping_rig(**options: Any) -> Rig:
    return Rig(
        block_size=2,
        prefill_chunk=8,
        **{"host_blocks": 20, **options},
    )


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


def tight(windows: Any, prompt_len: int) -> dict[str, Any]:
    """Sizes with which two requests begin, and cannot both go on."""
    probe = swapping_rig(windows=windows)
    blocks = 2 * probe.cache.most_blocks(prompt_len) + len(windows)
    return {"windows": windows, "usable_blocks": blocks}


def check_all(rig: Rig, requests: list[Request]) -> None:
    rig.drain()
    for request in requests:
        assert request.output_ids == oracle(request, rig.windows)[0]


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("windows", [(None,), (None, 5)], ids=str)
def test_a_swapped_request_goes_on_where_it_was(windows: Any, in_flight: int) -> None:
    rig = swapping_rig(**tight(windows, 4), in_flight=in_flight)
    requests = [rig.add(4, max_tokens=14), rig.add(4, max_tokens=14)]
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
    check_all(rig, requests)


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("after", [0, 1, 99])
@pytest.mark.parametrize("windows", [(None,), (None, 5)], ids=str)
def test_what_did_not_reach_the_host_is_computed_again(
    windows: Any, after: int, in_flight: int, caplog: pytest.LogCaptureFixture
) -> None:
    rig = swapping_rig(**tight(windows, 4), in_flight=in_flight)
    requests = [rig.add(4, max_tokens=14), rig.add(4, max_tokens=14)]
    fail_once(rig, "swap_out", after)
    last = until_preempted(rig, requests)
    assert rig.runner.plans[-1].decode == [requests[0]], "the other one is not disturbed"
    assert rig.loop.counts["failed_copies"] == 1
    assert "to the host failed" in caplog.text
    assert rig.cache.host.num_free == rig.cache.host.num_blocks
    while last.row is None:
        rig.step()
    assert rig.runner.plans[-1].prefill[0].start == 0
    check_all(rig, requests)


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize("after", [0, 1, 99])
def test_what_did_not_come_back_is_computed_again(after: int, in_flight: int) -> None:
    rig = swapping_rig(**tight((None,), 4), in_flight=in_flight)
    requests = [rig.add(4, max_tokens=14), rig.add(4, max_tokens=14)]
    last = until_preempted(rig, requests)
    fail_once(rig, "copy_in", after)
    while not rig.runner.seen["failures"]:
        rig.step()
    assert (last.status, last.row) == (RequestStatus.WAITING, None)
    assert rig.cache.host.num_free == rig.cache.host.num_blocks
    while last.row is None:
        rig.step()
    assert rig.runner.plans[-1].prefill[0].start == 0
    check_all(rig, requests)
    assert rig.runner.seen["undone"] == 1


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
    check_all(rig, [decoding, first, *children, stranger])
    assert rig.loop.counts["failed_copies"] == 1


def raising(error: BaseException) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit()])
def test_an_interrupt_is_no_failed_copy(error: BaseException) -> None:
    rig = Rig()
    rig.add(3)
    rig.runner.blocks.swap_out = raising(error)  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        rig.loop.step()
    assert rig.loop.counts["failed_copies"] == 0
