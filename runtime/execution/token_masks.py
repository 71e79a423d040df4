"""Computes token masks while the forward pass runs, on a CPU in a thread of their own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple

import torch

from ...profiling import ranges
from ..bounded_repr import bounded_repr
from ..errors import StructuredOutputError
from ..kernels.ops.mask_words import MaskWords
from ..request import Request, RequestStatus
from ..scheduling.plan import StepPlan
from .helper_thread import HelperThread
from .mask_state import MaskState
from .outputs import GrammarEnd

__all__ = ["TokenMasks"]


class _Lane(NamedTuple):
    """A row with a grammar in a step."""

    place: int | None
    """Among the decoding rows of the plan; None: the row of a chunk."""
    row: int
    request: Request
    drafts: Sequence[int]


class TokenMasks:
    """The masks of all rows, on the host and on the device.

    A step's masks are computed from `start` on, in a thread of their own, and at the latest in
    `wait`, in that of the caller. They need the tokens of all earlier steps: on a CPU these are
    known before a step, on a device that runs steps asynchronously after the commit of the last
    one, where the host has nothing else to do.
    """

    def __init__(
        self,
        state: MaskState,
        rows: int,
        rewrite_drafts: Callable[[Sequence[Sequence[int]]], None],
        *,
        is_async: bool,
    ) -> None:
        """Write the masks of `state`, on a device that runs steps asynchronously by a copy.

        Args:
            state: the masks on the device.
            rows: those of the state, the null row included.
            rewrite_drafts: replaces the drafts of the step that is running.
            is_async: whether the device runs steps asynchronously.
        """
        self._device = state.bits
        self._host = state.bits
        if is_async:
            self._host = torch.full_like(
                state.bits, -1, device="cpu", pin_memory=state.bits.is_cuda
            )
        array = self._host.numpy()
        words = [MaskWords(array[index]) for index in range(len(array))]
        self._of_row = [words[row::rows] for row in range(rows)]
        self._rows, self._rewrite_drafts = rows, rewrite_drafts
        self._restricted: set[int] = set()
        """Rows whose masks may forbid tokens."""
        self.in_thread = not is_async
        """Whether `start` leaves the work to a thread."""
        self._thread: HelperThread[_Lane] | None = None
        self._plan: StepPlan | None = None
        self._lanes: list[_Lane] = []
        """Of the step, until they are being computed."""
        self._cuts: list[tuple[int, int]] = []
        """Decoding rows and how many of their drafts are kept."""
        self.ends: list[GrammarEnd] = []
        """Requests that end before the tokens of the step, whose masks allow all tokens."""

    @property
    def host_nbytes(self) -> int:
        """Bytes of the copy on the host."""
        return 0 if self._host is self._device else self._host.nbytes

    def prepare(self, plan: StepPlan) -> None:
        """Take a plan. Of rows without a grammar all tokens are allowed.

        Lanes of requests that have ended are left as they are: their tokens are discarded.
        """
        assert self._plan is None, "the masks of two steps at the same time"
        self._plan, self.ends, self._cuts = plan, [], []
        drafts = plan.drafts or repeat(())
        for index, (request, of_row) in enumerate(zip(plan.decode, drafts, strict=False)):
            self._add(index, request.row, request, of_row)
        for chunk in plan.prefill:
            if chunk.samples:
                self._add(None, chunk.row, chunk.request, ())

    def _add(
        self, index: int | None, row: int | None, request: Request, drafts: Sequence[int]
    ) -> None:
        if row is None or request.status is RequestStatus.FINISHED:
            return
        if request.matcher is not None:
            self._lanes.append(_Lane(index, row, request, drafts))
            self._restricted.add(row)
        elif row in self._restricted:
            self._restricted.discard(row)
            for mask in self._of_row[row]:
                mask.allow_all()

    def start(self) -> None:
        """Start to compute the masks of the step, if it has any."""
        lanes, self._lanes = self._lanes, []
        if not lanes:
            return
        if not self.in_thread:
            for lane in lanes:
                self._fill(lane)
            return
        if self._thread is None:
            self._thread = HelperThread("stepgraph-masks")
            weakref.finalize(self, self._thread.stop)
        self._thread.begin(self._fill, lanes)

    def wait(self) -> None:
        """Wait for the masks of the step, if it has any, and issue their copy to the device.

        Drafts after which an output ends are taken out of the step.
        """
        plan, self._plan = self._plan, None
        if plan is None:  # of a warm-up, or another part of the step has waited
            return
        sampling = len(plan.decode) + sum(chunk.samples for chunk in plan.prefill)
        with ranges.span(ranges.MASK, sampling):
            for lane in self._lanes:
                self._fill(lane)
            self._lanes = []
            if self._thread is not None:
                self._thread.finish()
        if self._cuts:
            drafts = list(plan.drafts)
            for index, kept in self._cuts:
                drafts[index] = drafts[index][:kept]
            plan.drafts = drafts
            self._rewrite_drafts(drafts)
        if self._host is not self._device:
            self.copy_to_device(1 + max(map(len, plan.drafts), default=0))

    def copy_to_device(self, tokens_per_row: int) -> None:
        """Issue the copy of the masks of so many tokens of each row."""
        end = tokens_per_row * self._rows
        self._device[:end].copy_(self._host[:end], non_blocking=True)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def _fill(self, lane: _Lane) -> None:
        place, row, request, drafts = lane
        masks = self._of_row[row]
        assert request.matcher is not None
        try:
            outcome, kept = request.matcher.fill(request, masks, drafts)
        except (KeyboardInterrupt, SystemExit):  # of a signal handler of the application
            raise
        except BaseException as error:  # a panic of llguidance is no Exception
            outcome, kept = (
                StructuredOutputError(
                    f"request {request.id}: its grammar failed after {request.num_output} output"
                    f" tokens: {bounded_repr(error)}. Give another grammar"
                ),
                len(drafts),
            )
        if outcome is not None:
            for mask in masks[: 1 + len(drafts)]:
                mask.allow_all()
            self.ends.append((request, None if outcome == "complete" else outcome))
        elif kept < len(drafts):
            assert place is not None
            self._cuts.append((place, kept))
