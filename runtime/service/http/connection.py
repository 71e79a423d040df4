"""A connection of the HTTP server, with limits that uvicorn's httptools protocol lacks."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

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

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

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
        super().on_headers_complete()

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
