"""Computes token masks while the forward pass runs, on a CPU in a thread of their own."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Final, NamedTuple

from ...profiling import ranges
from ..bounded_repr import bounded_repr
from ..errors import StructuredOutputError
from ..request import Request, RequestStatus
from ..scheduling.plan import StepPlan
from .helper_thread import HelperThread
from .host_masks import HostMasks
from .outputs import GrammarEnd
from .rank_commands import CommandSender

__all__ = ["TokenMasks"]

STEP_SECONDS: Final = 0.05
"""Processor time of all masks of a step, for which every request of the step waits. A request may
be the cause of as much again over all of its steps, before it is ended."""
FREE_SECONDS: Final = 0.001
"""Processor time of a mask that is not counted: many rows may have grammars that are not slow."""


class _Lane(NamedTuple):
    """A row with a grammar in a step."""

    place: int | None
    """Among the decoding rows of the plan; None: the row of a chunk."""
    row: int
    request: Request
    drafts: Sequence[int]


class TokenMasks:
    """Computes the masks of all rows, and brings them to the devices.

    A step's masks are computed from `start` on, in a thread of their own, and at the latest in
    `wait`, in that of the caller. They need the tokens of all earlier steps: on a CPU these are
    known before a step, on a device that runs steps asynchronously after the commit of the last
    one, where the host has nothing else to do.
    """

    def __init__(
        self,
        masks: HostMasks,
        rewrite_drafts: Callable[[Sequence[Sequence[int]]], None],
        commands: CommandSender | None = None,
        *,
        in_thread: bool,
    ) -> None:
        """Write `masks`.

        Args:
            masks: of all rows.
            rewrite_drafts: replaces the drafts of the step that is running.
            commands: sends the masks to the other ranks; see `Runner`.
            in_thread: whether `start` leaves the work to a thread: on a device that runs steps
                asynchronously the host waits for it.
        """
        self._masks, self._commands = masks, commands
        self._rewrite_drafts = rewrite_drafts
        self._restricted: set[int] = set()
        """Rows whose masks may forbid tokens."""
        self.in_thread = in_thread
        """Whether `start` leaves the work to a thread."""
        self._thread: HelperThread[_Lane] | None = None
        self._plan: StepPlan | None = None
        self._lanes: list[_Lane] = []
        """Of the step, until they are being computed."""
        self._cuts: list[tuple[int, int]] = []
        """Decoding rows and how many of their drafts are kept."""
        self.ends: list[GrammarEnd] = []
        """Requests that end before the tokens of the step, whose masks allow all tokens."""
        self._allowed: list[int] = []
        """Rows that this step has let sample any token."""
        self._written: list[tuple[int, int]] = []
        """Rows and how many masks of each the step writes."""
        self._costs: list[tuple[float, _Lane]] = []
        """Counted processor time of the masks of the step."""

    @property
    def pending(self) -> bool:
        """Whether a step has masks that have not been waited for."""
        return self._plan is not None

    def prepare(self, plan: StepPlan) -> None:
        """Take a plan. Of rows without a grammar all tokens are allowed.

        Lanes of requests that have ended are left as they are: their tokens are discarded.
        """
        assert self._plan is None, "the masks of two steps at the same time"
        self._plan, self.ends, self._cuts = plan, [], []
        self._allowed, self._written, self._costs = [], [], []
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
            self._written.append((row, 1 + len(drafts)))
            self._restricted.add(row)
        elif row in self._restricted:
            self._restricted.discard(row)
            self._masks.allow_all(row)
            self._allowed.append(row)

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
        """Wait for the masks of the step, if it has any; bring them to the devices of all ranks.

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
            self._end_slowest()
        if self._cuts:
            drafts = list(plan.drafts)
            for index, kept in self._cuts:
                drafts[index] = drafts[index][:kept]
            plan.drafts = drafts
            self._rewrite_drafts(drafts)
        tokens_per_row = 1 + max(map(len, plan.drafts), default=0)
        if self._commands is not None:
            masks = self._masks
            written = [row + n * masks.rows for row, count in self._written for n in range(count)]
            self._commands.masks(self._allowed, written, masks.array, tokens_per_row)
        self._masks.copy_to_device(tokens_per_row)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None

    def _fill(self, lane: _Lane) -> None:
        place, row, request, drafts = lane
        masks = self._masks.of_row[row]
        assert request.matcher is not None
        began = time.thread_time()
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
            self._end(lane, None if outcome == "complete" else outcome)
            return
        if kept < len(drafts):
            assert place is not None
            self._cuts.append((place, kept))
        seconds = time.thread_time() - began - FREE_SECONDS * (1 + len(drafts))
        if seconds > 0:
            self._costs.append((seconds, lane))

    def _end_slowest(self) -> None:
        """End requests whose masks make steps too long, the slowest first.

        The slowest one is charged with all of the time that the step took too long, the next one
        with what would have been left of it without the first, and so on.
        """
        if not self._costs:
            return
        tokens = 1 + max(len(lane.drafts) for _, lane in self._costs)
        total = sum(seconds for seconds, _ in self._costs)
        over = total - STEP_SECONDS * tokens
        for seconds, lane in sorted(self._costs, key=lambda cost: -cost[0]):
            if over <= 0:
                break
            request = lane.request
            assert request.matcher is not None
            request.matcher.overrun += over
            over -= seconds
            if request.matcher.overrun > STEP_SECONDS:
                error = StructuredOutputError(
                    f"request {request.id}: its grammar is too slow after {request.num_output}"
                    f" output tokens: the token masks of a step take {1e3 * total:.0f} ms of"
                    f" processor time, {1e3 * seconds:.0f} ms of it for this request, and"
                    f" {1e3 * STEP_SECONDS * tokens:.0f} ms are allowed for all requests. Give a"
                    " simpler grammar"
                )
                self._end(lane, error)

    def _end(self, lane: _Lane, error: StructuredOutputError | None) -> None:
        """End a request before the tokens of the step; None: its output is complete."""
        for mask in self._masks.of_row[lane.row][: 1 + len(lane.drafts)]:
            mask.allow_all()
        self.ends.append((lane.request, error))
