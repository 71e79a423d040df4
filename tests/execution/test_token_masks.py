"""The time of the token masks of a step: a bound for all of its rows together."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from stepgraph.runtime.errors import StructuredOutputError
from stepgraph.runtime.execution import token_masks
from stepgraph.runtime.execution.inputs import MaskState
from stepgraph.runtime.execution.token_masks import TokenMasks
from stepgraph.runtime.request import Request
from stepgraph.runtime.scheduling.plan import StepPlan

from ..rigs.scheduler_rig import make_request

ROWS = 12


class BusyMatcher:
    """A grammar whose masks take a given processor time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.overrun = 0.0

    def fill(self, request: Request, masks: Sequence[Any], drafts: Sequence[int] = ()) -> Any:
        began = time.thread_time()
        masks[0].forbid([3])
        while time.thread_time() - began < self.seconds:
            pass
        return None, len(drafts)


def run_steps(seconds: Sequence[float], in_thread: bool, num_steps: int) -> list[list[int]]:
    """Return the rows that each step ended, of rows whose masks take these times."""
    bits = torch.full((ROWS + 1, 2), -1, dtype=torch.int32)
    state = MaskState(bits, *torch.empty(3, 0))
    masks = TokenMasks(state, ROWS + 1, lambda drafts: None, is_async=not in_thread)
    requests = []
    for row, own in enumerate(seconds):
        requests.append(make_request([1], id=str(row), matcher=BusyMatcher(own)))
        requests[-1].row = row
    ended = []
    for _ in range(num_steps):
        masks.prepare(StepPlan(decode=list(requests)))
        if in_thread:
            masks.start()
        masks.wait()
        for request, error in masks.ends:
            assert isinstance(error, StructuredOutputError)
            assert request.row is not None
            assert bool((state.bits[request.row] == -1).all())  # its last token is not restricted
            requests.remove(request)
        ended.append([int(request.id) for request, _ in masks.ends])
    masks.close()
    return ended


@pytest.fixture(autouse=True)
def short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_masks, "STEP_SECONDS", 0.01)


@pytest.mark.parametrize("in_thread", [True, False])
def test_masks_of_a_step_are_bounded_together(in_thread: bool) -> None:
    """Eight rows, none of which is too slow alone, end until the rest is fast enough."""
    ended = run_steps([0.0] + [0.005] * 8, in_thread, 40)
    assert len(ended[0]) >= 4  # at once, not one in each step
    rows = list(chain(*ended))
    assert 0 not in rows
    assert 5 <= len(rows) <= 7
    assert not any(ended[-5:])


def test_slowest_masks_end_first_and_many_that_are_not_slow_never() -> None:
    assert run_steps([0.001, 0.03, 0.004, 0.02], False, 1) == [[1, 3]]
    assert not any(run_steps([0.0009] * ROWS, False, 20))
