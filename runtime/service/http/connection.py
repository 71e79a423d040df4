"""A connection of the HTTP server, with what uvicorn's httptools protocol lacks.

Limits of the head of a request; the end of all pipelined requests with their connection; responses
without chunks for HTTP/1.0.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

__all__ = ["LimitedConnection"]

MAX_HEAD_BYTES = 64 << 10
"""Of the request line and the headers of a request, and of the trailers of its body."""

HEAD_SECONDS = 30.0
"""Time that a client has to send them."""


class LimitedConnection(HttpToolsProtocol):
    """Bounds the size of the head of a request and the time in which it must arrive."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._num_unparsed = 0  # bytes since the last end of a head, or piece of a body
        self._reads_head = True
        self._head_timer: asyncio.TimerHandle | None = None
        self._cycles: list[RequestResponseCycle] = []  # uvicorn forgets those before the last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        for cycle in self._cycles:
            cycle.disconnected |= not cycle.response_complete
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._num_unparsed > MAX_HEAD_BYTES:
            self.send_400_response("The headers of the request are too large.")
            return
        self._num_unparsed += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reads_head = True
        self._start_timer()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reads_head:  # trailers are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._reads_head = False
        self._num_unparsed = 0
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is not before:
            self.cycle.__class__ = _Exchange  # uvicorn has no hook to make it
            self._cycles = [c for c in self._cycles if not c.response_complete] + [self.cycle]

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_unparsed = 0
        super().on_message_complete()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Exchange(RequestResponseCycle):
    """A request and its response."""

    async def send(self, message: Message) -> None:  # type: ignore[override]
        """Send a message of the response; drop it if the connection is closed."""
        if self.scope["http_version"] == "1.0":  # no chunks: a body may end with the connection
            self.chunked_encoding = False
            self.expected_content_length = len(message.get("body", b""))
        try:
            await super().send(message)  # type: ignore[arg-type]
        except RuntimeError:  # of uvloop, before it reports that the connection is lost
            if not self.transport.is_closing():
                raise
