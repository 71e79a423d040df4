"""`AsyncEngine`: an engine in a thread of its own, for any thread and any event loop."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Unpack

from ..arguments import check_callable, check_type
from ..engine.engine import Engine
from ..engine.intake import Prompt
from ..engine.request_output import RequestOutput
from ..errors import (
    EngineClosedError,
    EngineFailedError,
    EngineUnavailableError,
    RequestError,
    StepgraphError,
)
from ..loading.chat_template import ChatPrompt, Message
from ..request import RequestGroup
from ..sampling_params import SamplingParams
from ..structured_output import StructuredOutput
from .callbacks import FutureConsumer
from .loop_mailbox import LoopMailbox
from .managed_engine import ManagedEngine
from .request_handle import Delta, Mailbox, RequestHandle
from .request_options import RequestOptions, make_handle
from .service_config import ServiceConfig
from .streams import AsyncStream

__all__ = ["AsyncEngine", "RequestOptions"]


INLINE_TOKENS = 1024
"""Prompts of at most this many token ids are checked by the caller: it takes microseconds."""


class AsyncEngine(ManagedEngine):
    """Serves requests of any thread and any event loop, in this process, from one step thread.

    Use it as a context manager, with `with` or `async with`: entering waits until the model is
    loaded, leaving closes it. Requests beyond the limits of `ServiceConfig` are refused at once.

    Times are in seconds from the call. A request with a `first_token_deadline` or `deadline` that
    its predicted first token would miss is refused with `DeadlineUnreachableError`. One that passes
    it ends with `finish_reason` `deadline` and the tokens it has; in the queue it is never
    prefilled.

    Handlers installed with `signal.signal` must not call its methods; those of an event loop may.
    """

    def __init__(
        self, start_engine: Callable[[], Engine], config: ServiceConfig | None = None
    ) -> None:
        """Prepare to run an engine; see `from_pretrained`.

        Args:
            start_engine: makes the engine. The step thread calls it at the start, after `sleep` and
                for restarts.
            config: limits and policies; None for the defaults.
        """
        super().__init__(start_engine, config)
        self._ids = _request_ids()
        self._loops: dict[asyncio.AbstractEventLoop, LoopMailbox] = {}

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncStream:
        """Queue a prompt and return an iterator of its deltas. Call it within an event loop.

        Args:
            prompt: text, token ids, or a `ChatPrompt` (see `Prompt`).
            params: how tokens are chosen; None for the defaults.
            options: see `RequestOptions`.

        Raises:
            RequestError: an option is invalid. Errors of the prompt come from the iterator.
            OverloadedError: too many requests wait.
            EngineUnavailableError, EngineFailedError, EngineClosedError: there is no engine.
        """
        return self._stream(prompt, params, options, streams=True)

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Decode a prompt to its end and return its output. Cancelling the task aborts it.

        Arguments and errors are those of `stream` and `AsyncStream.accepted`.
        """
        return await self._stream(prompt, params, options, streams=False).finish()

    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[RequestOptions],
    ) -> RequestOutput:
        """Decode the answer to a conversation and return its output.

        For tools and other variables of the template, and to stream, give a `ChatPrompt` to
        `generate` or `stream`.
        """
        return await self.generate(ChatPrompt(messages), params, **options)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        callback: Callable[[Delta], None] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Future[RequestOutput]:
        """Queue a prompt from any thread, without an event loop, and return its future.

        The result is the last output; `cancel` aborts the request. One thread of this engine calls
        all callbacks, one after the other. If a callback raises, its request is aborted and the
        future has the exception.

        Arguments and errors are those of `stream`; errors of the prompt come from the future.
        """
        streams = callback is not None
        if streams:
            check_callable("callback", callback, "a Delta")
        handle = self._make_handle(self._callbacks, params, options, streams=streams)
        future: Future[RequestOutput] = Future()
        consumer = FutureConsumer(handle, future, callback, self._thread)
        self._callbacks.register(handle, consumer)
        try:
            self._submit(handle, prompt, params, options)
        except BaseException:
            self._callbacks.discard(handle)
            raise
        return future

    def abort(self, request_id: str) -> bool:
        """End a request within one step, with `finish_reason` `abort`. Any thread may call it.

        Returns False if there is no unfinished request of this id.
        """
        check_type("request_id", request_id, str, "a string")
        handle = self._thread.dispatcher.handles.get(request_id)
        if handle is None or self._forked:
            return False
        self._thread.abort(handle)
        return True

    def after_fork(self) -> None:
        """See `ManagedEngine`; children that start the engine do not share ids of requests."""
        super().after_fork()
        self._ids = _request_ids()

    def _stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions,
        *,
        streams: bool,
    ) -> AsyncStream:
        mailbox = self._mailbox()
        handle = self._make_handle(mailbox, params, options, streams=streams)
        handle.num_read = 0 if streams else None
        self._submit(handle, prompt, params, options)
        return AsyncStream(handle, mailbox, self._thread)

    def _make_handle(
        self,
        mailbox: Mailbox,
        params: SamplingParams | None,
        options: RequestOptions,
        *,
        streams: bool,
    ) -> RequestHandle:
        self._check_process()
        now = time.perf_counter_ns()
        handle = make_handle(next(self._ids), mailbox, params, options, streams=streams, now_ns=now)
        with self._reports_refusal(handle):
            self._supervisor.check_serving()
        return handle

    @contextmanager
    def _reports_refusal(self, handle: RequestHandle) -> Iterator[None]:
        """Pass a request that is refused within this context to the listeners."""
        try:
            yield
        except RequestError:  # its id is that of another request
            raise
        except StepgraphError as error:
            handle.error = error
            self._callbacks.report(handle)
            raise

    def _submit(
        self,
        handle: RequestHandle,
        prompt: Prompt,
        params: SamplingParams | None,
        options: RequestOptions,
    ) -> None:
        """Count a request and prepare it: short lists of tokens now, others in a thread.

        Those whose grammar has to be compiled have threads of their own, for which no other prompt
        waits.
        """
        requests = self._thread.dispatcher
        try:
            handle.is_chat = isinstance(prompt, ChatPrompt)
            with self._reports_refusal(handle):
                requests.register(handle)
            if handle.deadline_ns is not None or handle.first_token_deadline_ns is not None:
                self._thread.watch(handle)
            prepare = partial(self._prepare, handle, prompt, params, options.get("cache_salt"))
            has_grammar = getattr(params, "structured", None) is not None
            if isinstance(prompt, list) and len(prompt) <= INLINE_TOKENS and not has_grammar:
                prepare()
                return
            try:
                (self._grammar_pool if self._compiles(params) else self._pool).submit(prepare)
            except RuntimeError as error:  # closed meanwhile, or no thread can be started
                refusal = EngineUnavailableError(f"the prompt cannot be prepared: {error}")
                self._prepared(handle, refusal)
        except BaseException as error:  # such as KeyboardInterrupt
            if requests.handles.get(handle.id) is handle:
                self._thread.abort(handle)
                self._prepared(handle, error)
            raise

    def _compiles(self, params: SamplingParams | None) -> bool:
        """Whether the grammar of a request has to be compiled."""
        structured = None if params is None else params.structured
        if not isinstance(structured, StructuredOutput):
            return False
        engine = self._supervisor.engine
        return engine is None or not engine.has_compiled(structured)

    def _prepare(
        self,
        handle: RequestHandle,
        prompt: Prompt,
        params: SamplingParams | None,
        cache_salt: str | None,
    ) -> None:
        """Check and tokenise a prompt, and pass it to the step thread."""
        if handle.ended:  # aborted or expired meanwhile
            self._thread.admit(handle)
            return
        try:
            group = self._supervisor.check_started().prepare(
                prompt, params, handle.id, priority=handle.priority, cache_salt=cache_salt
            )
            self._thread.dispatcher.limits.add_tokens(handle, len(group.prompt_ids))
            self._prepared(handle, group)
        except (EngineClosedError, EngineFailedError):  # of an engine that has just been replaced
            self._prepared(handle, self._supervisor.refusal())
        except BaseException as error:
            self._prepared(handle, error)
            if not isinstance(error, Exception):
                raise

    def _prepared(self, handle: RequestHandle, result: RequestGroup | BaseException) -> None:
        """Pass a request to the step thread, or the error of its preparation."""
        if handle.prepared is None:
            handle.prepared = result
        self._thread.admit(handle)

    def _mailbox(self) -> LoopMailbox:
        """Return the mailbox of the running event loop."""
        loop = asyncio.get_running_loop()
        mailbox = self._loops.get(loop)
        if mailbox is None:
            for other in tuple(self._loops):
                if other.is_closed():
                    self._loops.pop(other, None)
            mailbox = self._loops.setdefault(loop, LoopMailbox(loop))
        return mailbox


def _request_ids() -> Iterator[str]:
    """Return ids for the requests of one process."""
    return map(f"req-{secrets.token_hex(4)}-{{}}".format, count(1))
