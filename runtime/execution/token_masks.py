"""Computes token masks while the forward pass runs, on a CPU in a thread of their own."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from queue import SimpleQueue
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ...profiling import ranges
from ..bounded_repr import bounded_repr
from ..distributed.rank_group import RankGroup
from ..errors import RankError, StructuredOutputError
from ..mask_words import MaskWords
from ..request import Request, RequestStatus
from ..scheduling.plan import StepPlan
from .inputs import MaskState

GrammarEnd: TypeAlias = tuple[Request, StructuredOutputError | None]
"""A request that ends before its next token: with an error, or None if its grammar is complete."""


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

    Rank 0 of a tensor-parallel group computes them and sends them to the others.
    """

    def __init__(
        self,
        state: MaskState,
        rows: int,
        rewrite_drafts: Callable[[Sequence[int], Sequence[Sequence[int]]], None],
        group: RankGroup | None = None,
        *,
        is_async: bool,
    ) -> None:
        """Write the masks of a state of this many rows, the null row included.

        `rewrite_drafts` replaces the drafts of the step that is running, given the tokens and the
        drafts of each row. If the device runs steps asynchronously (`is_async`), masks are written
        to a pinned copy; on a CPU steps read those that are written.
        """
        self._device = self._host = state.bits
        if is_async:
            self._host = torch.full_like(
                state.bits, -1, device="cpu", pin_memory=state.bits.is_cuda
            )
        self._rows = rows
        self._array: npt.NDArray[np.int32] = self._host.numpy()  # in the order of `MaskState.bits`
        words = [MaskWords(mask) for mask in self._array]
        self._of_row = [words[row::rows] for row in range(rows)]
        """Of each row: the mask after its newest token, after that and a draft, and so on."""
        self._group = group
        self._rewrite_drafts = rewrite_drafts
        self._restricted: set[int] = set()
        """Rows whose masks may forbid tokens."""
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        """For the thread; None ends it."""
        self._thread: threading.Thread | None = None
        """Runs from the first mask on."""
        self._filling = threading.Lock()
        """Held by the thread while it computes masks."""
        self._failure: BaseException | None = None
        """A bug that ended the thread's part of a step."""
        self._plan: StepPlan | None = None
        self._lanes: deque[_Lane] = deque()
        """Of the step, until they are being computed."""
        self._cuts: list[tuple[int, int]] = []
        """Decoding rows and how many of their drafts are kept."""
        self.ends: list[GrammarEnd] = []
        """Requests that end before the tokens of the step, whose masks allow all tokens."""
        self._written: list[tuple[int, int]] = []
        """Rows and how many masks of each the step writes, for the other ranks."""
        self._costs: list[tuple[float, _Lane]] = []
        """Counted processor time of the masks of the step."""

    @property
    def nbytes(self) -> int:
        """Bytes of the pinned copy; 0 without one."""
        return 0 if self._host is self._device else self._host.nbytes

    def copy_to_device(self, tokens_per_row: int) -> None:
        """Issue the copy of masks of each row's first tokens, if the device has its own."""
        if self._host is not self._device:
            end = tokens_per_row * self._rows
            self._device[:end].copy_(self._host[:end], non_blocking=True)

    def prepare(self, plan: StepPlan) -> None:
        """Take a plan. Of rows without a grammar all tokens are allowed.

        Lanes of requests that have ended are left as they are: their tokens are discarded.
        """
        assert self._plan is None, "the masks of two steps at the same time"
        self._plan, self.ends, self._cuts = plan, [], []
        self._written, self._costs = [], []
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
            if self._group is not None:
                self._written.append((row, 1 + len(drafts)))
        elif row in self._restricted:
            self._restricted.discard(row)
            for mask in self._of_row[row]:
                mask.allow_all()
            self._written.append((row, len(self._of_row[row])))

    def start(self) -> None:
        """Start to compute the masks of the step in the thread, if it has any."""
        if self._lanes:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_run_calls, args=[self._calls], name="stepgraph-masks", daemon=True
                )
                self._thread.start()
                weakref.finalize(self, self._calls.put, None)
            self._calls.put(self._help)

    def wait(self) -> None:
        """Wait for the masks of the step, if it has any; bring them to the devices of all ranks.

        Drafts after which an output ends are taken out of the step.
        """
        plan, self._plan = self._plan, None
        if plan is None:  # of a warm-up, or another part of the step has waited
            return
        if self._group is not None and self._group.rank:
            *_, (name, *update) = self._group.receive()
            if name != "write_masks":
                raise RankError(
                    f"rank {self._group.rank} awaits token masks, and rank 0 sent {name!r}"
                )
            self.write(*update)
            return
        sampling = len(plan.decode) + sum(chunk.samples for chunk in plan.prefill)
        with ranges.span(ranges.MASK, sampling):
            # What the thread has not begun: on a busy machine it may wait for a processor for long.
            self._fill_all()
            with self._filling:
                pass
            if self._failure is not None:
                raise self._failure
            if self._costs:
                self._end_slowest()
        if self._cuts:
            drafts = list(plan.drafts)
            for index, kept in self._cuts:
                drafts[index] = drafts[index][:kept]
            plan.drafts = drafts
            self._rewrite_drafts([1 + len(own) for own in drafts], drafts)
        tokens_per_row = 1 + max(map(len, plan.drafts), default=0)
        if self._group is not None:
            written = [row + n * self._rows for row, count in self._written for n in range(count)]
            cut = plan.drafts if self._cuts else None
            self._group.send("write_masks", tokens_per_row, written, self._array[written], cut)
        self.copy_to_device(tokens_per_row)

    def write(
        self,
        tokens_per_row: int,
        written: Sequence[int],
        values: npt.NDArray[np.int32],
        drafts: Sequence[Sequence[int]] | None,
    ) -> None:
        """Write what rank 0 has sent, and copy it to the device. Earlier copies have been made.

        Args:
            tokens_per_row: masks of each row that are copied.
            written: indices of the masks that change.
            values: these masks.
            drafts: the drafts of the step, if some were taken out.
        """
        if drafts is not None:
            self._rewrite_drafts([1 + len(own) for own in drafts], drafts)
        self._array[written] = values
        self.copy_to_device(tokens_per_row)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()

    def _help(self) -> None:
        """Compute masks in the thread; a late one may find none, or the masks of the next step."""
        with self._filling:
            try:
                self._fill_all()
            except BaseException as error:
                self._failure = error

    def _fill_all(self) -> None:
        """Compute the masks of lanes that neither thread has begun."""
        if not self._lanes:
            return
        # The processor time is a system call, which takes a tenth of the time of a mask: it is read
        # again only after a mask that took long. Others cannot have used more than their own time.
        used, began = time.thread_time(), time.perf_counter()
        while True:
            try:
                lane = self._lanes.popleft()
            except IndexError:
                return
            continues = self._fill(lane)
            ended, free = time.perf_counter(), FREE_SECONDS * (1 + len(lane.drafts))
            if ended - began > free:
                before, used = used, time.thread_time()
                if continues and used - before > free:
                    self._costs.append((used - before - free, lane))
            else:
                used += ended - began
            began = ended

    def _fill(self, lane: _Lane) -> bool:
        """Compute the masks of a lane; return whether its request continues."""
        place, row, request, drafts = lane
        masks = self._of_row[row]
        assert request.matcher is not None
        try:
            outcome, kept = request.matcher.fill(request, masks, drafts)
        except (KeyboardInterrupt, SystemExit):  # of a signal handler of the application
            raise
        except BaseException as error:  # a panic of llguidance is not an Exception
            outcome, kept = (
                StructuredOutputError(
                    f"request {request.id}: its grammar failed after {request.num_output} output"
                    f" tokens: {bounded_repr(error)}. Give another grammar"
                ),
                len(drafts),
            )
        if outcome is not None:
            self._end(lane, None if outcome == "complete" else outcome)
            return False
        if kept < len(drafts):
            assert place is not None
            self._cuts.append((place, kept))
        return True

    def _end_slowest(self) -> None:
        """End requests whose masks make steps too long, the slowest first.

        The slowest one is charged with all of the time that the step took too long, the next one
        with what would have been left of it without the first, and so on.
        """
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
        for mask in self._of_row[lane.row][: 1 + len(lane.drafts)]:
            mask.allow_all()
        self.ends.append((lane.request, error))


def _run_calls(calls: SimpleQueue[Callable[[], object] | None]) -> None:
    """Run calls until None."""
    for call in iter(calls.get, None):
        call()
        del call  # which keeps the masks alive
