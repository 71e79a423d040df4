"""The step loop of an engine, safe for several threads, signal handlers and forks.

Any thread may post requests and aborts at any time; the call that runs the loop applies them. One
call at a time runs the loop (see `access.py`): `step`, a call of `generate` for as many steps as it
needs, or an operation between two steps. Calls of `generate` share the batch: one of them runs the
steps for all, and when its own requests have ended another one continues.

If an exception interrupts an operation, the loop is not `intact` any more: it has failed, and every
later call raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch

from ..errors import (
    EngineClosedError,
    EngineFailedError,
    EngineForkedError,
    OverloadedError,
    RankError,
    RequestError,
)
from ..request import AbortReason, RequestGroup
from .access import LoopAccess
from .forks import call_in_children
from .loop import StepLoop
from .request_output import RequestOutput
from .tickets import GenerateCall, Ticket, Tickets

__all__ = ["MakeGroup", "SharedLoop"]

T = TypeVar("T")

MakeGroup = Callable[[str], RequestGroup]
"""Makes the requests of a prompt under an id; raises `RequestError` if it cannot be served."""


class SharedLoop:
    """A `StepLoop` for any number of threads, until it is closed, fails, or the process forks."""

    def __init__(self, loop: StepLoop) -> None:
        self._loop: StepLoop | None = loop
        self._access = LoopAccess()
        self._tickets = Tickets()
        self._failure: BaseException | None = None
        self._ended: EngineClosedError | None = None
        self.forked = False
        """Whether this is a copy in a forked child."""
        call_in_children(self)

    def after_fork(self) -> None:
        """Refuse every use: the threads of the parent do not exist in a child."""
        self.forked = True
        self._ended = EngineForkedError(
            "the engine belongs to the parent of this process, and cannot be used after a fork:"
            " make a new one here, or start processes by spawn"
        )

    @property
    def open_loop(self) -> StepLoop:
        """The loop. Raises `EngineClosedError` or `EngineForkedError`."""
        loop = self._loop  # first: another thread may close it
        if self._ended is not None:
            raise type(self._ended)(*self._ended.args)
        assert loop is not None
        return loop

    @property
    def healthy(self) -> bool:
        """Whether no operation has failed or was interrupted."""
        loop = self._loop
        if self._failure is not None or loop is None or loop.lost_ranks:
            return False
        # An operation may end between the two checks, which looks like an interrupted one: retry.
        return any(loop.intact or self._access.held for _ in range(8))

    def check_usable(self) -> StepLoop:
        """Return the loop, unless it is closed or failed."""
        loop = self._loop
        if loop is None or self._ended is not None:
            return self.open_loop  # which raises
        if self._failure is not None:
            raise EngineFailedError(
                f"the engine failed earlier ({self._failure!r}): close it and make a new one"
            ) from self._failure
        return loop

    def has_unfinished(self) -> bool:
        """Whether `step` has requests to run or outputs to return."""
        loop = self.open_loop
        return bool(self._tickets) or loop.has_unfinished

    def submit(
        self, make_group: MakeGroup, request_id: str | None, call: GenerateCall | None = None
    ) -> str:
        """Queue the requests of a prompt, and return their id: a new one for None.

        Raises:
            RequestError: from `make_group`, or the id is invalid or in use; nothing was queued.
        """
        loop = self.check_usable()
        ticket = Ticket(call)
        group: RequestGroup | None = None
        try:
            if call is not None:
                call.tickets.append(ticket)
            request_id = self._tickets.reserve(ticket, request_id)
            group = make_group(request_id)
            loop.post_add(group)
            ticket.group = group  # it can be aborted from now on
            self._settle("add_request")
            return request_id
        except BaseException:
            if group is not None:
                loop.post_discard(group)
            self._tickets.release(ticket)
            raise

    def abort(self, request_id: str, reason: AbortReason = "abort") -> bool:
        """End a request; see `Engine.abort`."""
        loop = self.open_loop
        ticket = self._tickets.get(request_id)
        if ticket is None or ticket.group is None or ticket.group.finished or ticket.abort_posted:
            return False
        loop.post_abort(ticket.group, reason)
        ticket.abort_posted = True
        self._settle("abort")
        return True

    def pause(self, request_id: str, *, resume: bool = False) -> None:
        """Pause a request, or resume it; see `Engine.pause`."""
        loop = self.check_usable()
        ticket = self._tickets.get(request_id)
        if ticket is not None and ticket.group is not None:
            (loop.post_resume if resume else loop.post_pause)(ticket.group)

    def _settle(self, name: str) -> None:
        """Apply posted changes, unless another call holds the loop and applies them."""
        if self._failure is not None:
            return
        try:
            if self._access.try_enter(name) and self._ended is None:
                self._change(StepLoop.settle)
        finally:
            self._access.leave()

    def step(self) -> list[RequestOutput]:
        """Run one step; see `Engine.step`."""
        loop = self.check_usable()
        requests = loop.requests
        outputs: list[RequestOutput] = []
        try:
            try:
                part_of_generate = self._access.enter("step")
                if self._ended is not None or self._failure is not None or not loop.intact:
                    self._refuse()  # it changed while this call waited
                try:
                    loop.advance()
                except BaseException as error:
                    self._fail(error)
                    raise
                if self._tickets.calls:
                    self._tickets.route(requests.ready)
                if part_of_generate:  # which returns no outputs of others
                    return outputs
                outputs, requests.ready = requests.ready, outputs
                any_finished, requests.any_finished = requests.any_finished, False
            finally:
                self._access.leave()
            if any_finished:
                self._tickets.hand_over(outputs)
            return outputs
        except BaseException:
            if outputs:  # the next step returns them
                self._tickets.take_back(outputs)
                requests.ready[:0] = outputs
                requests.any_finished = True
            self._access.leave()  # if the first one was interrupted
            raise

    def generate(
        self, prompts: Iterable[MakeGroup], step: Callable[[], object]
    ) -> list[RequestOutput]:
        """Decode prompts to their end and return their last outputs, in order.

        Args:
            prompts: if one raises `RequestError`, that is the `error` of its output.
            step: runs a step, by `SharedLoop.step`.
        """
        self.check_usable()
        self._access.refuse_reentry("generate")
        call = GenerateCall()
        try:
            self._tickets.calls.add(call)
            for make_group in prompts:
                self._submit_for(call, make_group)
            while not call.complete:
                self._drive(call, step)
            outputs = call.outputs()
            for ticket in call.tickets:
                self._tickets.release(ticket)
            self._tickets.calls.discard(call)
            return outputs
        except BaseException:
            self._abandon(call)
            raise

    def _submit_for(self, call: GenerateCall, make_group: MakeGroup) -> None:
        """Queue a prompt of a call; if it cannot be served, deliver an output with the error."""
        try:
            self.submit(make_group, None, call)
        except (RequestError, OverloadedError) as error:
            refused = call.tickets[-1].id
            call.deliver(RequestOutput(refused, [], (), True, error=error))

    def _drive(self, call: GenerateCall, step: Callable[[], object]) -> None:
        """Run steps until the call is complete or another one needs the loop; or wait."""
        self.check_usable()
        try:
            if self._access.claim("generate", call):
                while not (call.complete or self._access.wanted):
                    step()
        finally:
            self._access.leave()

    def _abandon(self, call: GenerateCall) -> None:
        """Abort the requests of a call of `generate`; the next `step` returns their outputs."""
        loop = self.open_loop
        for ticket in call.tickets:
            if ticket.group is not None:
                loop.post_abort(ticket.group)
        self._tickets.calls.discard(call)
        for ticket in call.tickets:
            ticket.call = None
        if self._failure is not None:
            return
        try:
            self._access.enter("generate")
            self._change(StepLoop.settle)
            loop.requests.ready += [output for output in call.done.values() if output.error is None]
            loop.requests.any_finished = True
        finally:
            self._access.leave()

    def score(self, make_group: MakeGroup, forced: Sequence[int]) -> torch.Tensor:
        """Return the logits of a single request; see `Engine.score`."""
        loop = self.check_usable()
        ticket = Ticket()
        logits: list[torch.Tensor] = []
        group: RequestGroup | None = None
        try:
            self._access.claim("score")
            self.run("score", StepLoop.settle)
            if self.has_unfinished():
                raise RequestError("score needs an idle engine: finish or abort its requests first")
            group = make_group(self._tickets.reserve(ticket, None))
            (request,) = group.requests
            loop.post_add(group)
            self.run("score", StepLoop.settle)
            while not group.finished:
                self.run("score", lambda loop: loop.score_step(request, forced, logits))
            if request.error is not None:
                raise request.error
            return torch.stack(logits)
        finally:
            try:
                self._tickets.release(ticket)
                if group is not None and self._failure is None:
                    loop.post_discard(group)
                    self.run("score", StepLoop.settle)
            finally:
                self._access.leave()

    def run(self, name: str, change: Callable[[StepLoop], T]) -> T:
        """Run an operation between two steps, once the loop is free; return its result.

        Raises:
            EngineBusyError: a callback called `name` within a call that holds the loop.
        """
        self.check_usable()  # in a fork the holder of the loop never ends
        try:
            self._access.enter(name)
            return self._change(change, name)
        finally:
            self._access.leave()

    def run_idle(self, name: str, change: Callable[[StepLoop], T]) -> T:
        """As `run`, for an operation that needs an engine without unfinished requests.

        Raises:
            RequestError: there are unfinished requests.
        """

        def checked(loop: StepLoop) -> T:
            loop.settle()
            if self.has_unfinished():
                raise RequestError(
                    f"{name} needs an idle engine: finish or abort its requests first"
                )
            return change(loop)

        return self.run(name, checked)

    def _change(self, change: Callable[[StepLoop], T], name: str | None = None) -> T:
        """Run an operation on the loop, which this call holds."""
        loop = self.check_usable()
        if not loop.intact:
            self._refuse()
        try:
            return change(loop)
        except BaseException as error:
            self._fail(error, name)
            raise

    def _refuse(self) -> None:
        """Raise the error of a loop that is closed or failed."""
        loop = self.check_usable()
        if not loop.intact:
            self._failure = EngineFailedError("an exception interrupted an operation")
        self.check_usable()

    def _fail(self, error: BaseException, name: str | None = None) -> None:
        """Record the failure of an operation; raise `EngineFailedError` for an `Exception`.

        `name` is the operation in the message; None for the current step. The failure of a rank is
        a `RankError`, which is raised as it is.
        """
        loop = self.open_loop
        if loop.intact:
            return
        if loop.group is not None:
            error = loop.group.end(error)
        self._failure = error
        if isinstance(error, RankError):
            raise error
        if isinstance(error, Exception):
            failed = name or f"step {loop.num_steps}"
            raise EngineFailedError(f"{failed} failed: {str(error) or repr(error)}") from error

    def close(self, release_memory: Callable[[StepLoop], None]) -> None:
        """Refuse every later use and free the memory of the engine. Idempotent.

        Waits for the current step of another thread. After an interrupt it can be called again.

        Raises:
            EngineBusyError: a callback called it within a call that holds the loop.
        """
        if self.forked:
            return
        try:
            self._access.enter("close")
            if self._loop is not None:
                self._ended = EngineClosedError("the engine is closed: make a new one")
                release_memory(self._loop)
                # The traceback of a failure holds frames, and those the tensors.
                self._failure = self._loop = None
                self._tickets = Tickets()
        finally:
            self._access.leave()
