"""`AsyncStream`: the deltas of one request, for one task of an event loop."""

from __future__ import annotations

from collections import deque
from types import TracebackType

from ..engine.request_output import RequestOutput
from ..errors import EngineBusyError
from .loop_mailbox import LoopMailbox
from .request_handle import Delta, DeltaReader, HandleState, RequestHandle
from .step_thread import StepThread

__all__ = ["AsyncStream"]


class AsyncStream:
    """An asynchronous iterator of deltas. Read it in the event loop that it was made in.

    One task at a time may wait in it; another one gets `EngineBusyError`.

    The request is aborted, and its row and blocks are free within one step, when the iterator is
    closed (`aclose`, the end of `async with`), or when the task that waits in it is cancelled.
    Dropping the iterator closes nothing: leave an `async for` early only within `async with`.
    A stream that is not read gives up its row, and ends after `ServiceConfig.send_timeout`.
    """

    def __init__(self, handle: RequestHandle, mailbox: LoopMailbox, thread: StepThread) -> None:
        self._handle = handle
        self._mailbox = mailbox
        self._thread = thread
        self._reader = DeltaReader(handle)
        self._deltas: deque[Delta] = deque()
        self._waits = False

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self._handle.id

    @property
    def output(self) -> RequestOutput | None:
        """The newest output; None before the first."""
        return self._handle.output

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt; 0 before it is accepted."""
        return self._handle.num_prompt_tokens

    async def accepted(self) -> None:
        """Wait until the request is queued, or ended.

        Raises:
            RequestError: it can never be served.
            OverloadedError, DeadlineUnreachableError: it was refused for now.
            EngineUnavailableError, EngineFailedError, EngineClosedError: there is no engine.
        """
        while self._handle.state is HandleState.PREPARING:
            await self._news()
        if self._handle.error is not None:
            raise self._handle.error

    async def finish(self) -> RequestOutput:
        """Wait for the last output and return it. Raises as `accepted`."""
        self._handle.num_read = None  # the deltas are not read
        if self._handle.paused:
            self._thread.resume(self._handle)
        while not self._handle.ended:
            await self._news()
        if self._handle.error is not None:
            raise self._handle.error
        assert self._handle.output is not None
        return self._handle.output

    def __aiter__(self) -> AsyncStream:
        return self

    async def __anext__(self) -> Delta:
        """Return the next delta.

        Raises:
            StopAsyncIteration: the request has ended.
            StepgraphError: as `next_deltas`.
        """
        if not self._deltas:
            self._deltas.extend(await self.next_deltas())
        if not self._deltas:
            raise StopAsyncIteration
        return self._deltas.popleft()

    async def next_deltas(self) -> list[Delta]:
        """Return all deltas that are ready, after waiting for one; none if the request has ended.

        Raises:
            NonFiniteLogitsError: it ended with `finish_reason` `error`, the delta before this one.
            SendTimeoutError: the deltas were not read for too long.
            StepgraphError: as `accepted`.
        """
        while True:
            ended = self._handle.ended  # read first: then the deltas below are the last ones
            deltas = self._reader.read()
            if self._handle.paused:
                self._thread.resume(self._handle)
            if deltas:
                return deltas
            if not ended:
                await self._news()
                continue
            if self._handle.error is not None:
                raise self._handle.error
            if self._handle.output is not None and self._handle.output.error is not None:
                raise self._handle.output.error
            return []

    async def aclose(self) -> None:
        """Abort the request, unless it has ended."""
        self._abandon()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._abandon()

    async def _news(self) -> None:
        if self._waits:
            raise EngineBusyError(
                f"another task waits in the stream of request {self._handle.id}: read it in one"
            )
        self._waits = True
        try:
            await self._mailbox.news(self._handle)
        except BaseException:
            self._abandon()
            raise
        finally:
            self._waits = False

    def _abandon(self) -> None:
        if not self._handle.ended:
            self._thread.abort(self._handle)
