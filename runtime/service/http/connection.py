"""A connection of the HTTP server, with what uvicorn's httptools protocol lacks.

Limits of the head of a request; the end of all pipelined requests with their connection; responses
without chunks for HTTP/1.0.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httptools
from starlette.types import Message
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

MAX_HEAD_BYTES = 64 << 10
"""Of the request line and the headers of a request, and of the trailers of its body."""

HEAD_SECONDS = 30.0
"""Time that a client has to send them, also for the rest of a body that was not read."""

GRACE_SECONDS = 5.0
"""Time that a full write buffer may stay full beyond `send_timeout`: a stream ends before it, with
an error of its own."""

UNSENT_BYTES = 16 << 10
"""Of a connection, in the process and in the kernel each, before a stream waits for its client. The
kernel would take megabytes, which is thousands of tokens that a client may never read."""

_UPGRADE = b"upgrade"

_NOTSENT_LOWAT: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)  # Linux and macOS


class LimitedConnection(HttpToolsProtocol):
    """Bounds the size of the head of a request, and the times to send it and to read the response.

    Requests to upgrade to another protocol are served with HTTP/1.1, as RFC 9110 (7.8) allows:
    HTTP/2 clients send them with their first request.
    """

    def __init__(self, *arguments: Any, send_timeout: float = 30.0, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._write_seconds = send_timeout + GRACE_SECONDS
        self._num_unparsed = 0  # bytes since the last end of a head, or piece of a body
        self._reads_head = True
        self._timers: dict[str, asyncio.TimerHandle] = {}  # of a head, and of writing
        self._cycles: list[RequestResponseCycle] = []  # uvicorn forgets those before the last

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=UNSENT_BYTES)
        sock = transport.get_extra_info("socket")
        if sock.family in (socket.AF_INET, socket.AF_INET6) and _NOTSENT_LOWAT is not None:
            sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, UNSENT_BYTES)
        self._abort_after("head", HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel("head")
        self._cancel("write")
        super().connection_lost(exc)
        for cycle in self._cycles:
            cycle.disconnected |= not cycle.response_complete
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._num_unparsed > MAX_HEAD_BYTES:
            self.send_400_response("The headers of the request are too large.")
            return
        self._num_unparsed += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if "head" not in self._timers and (self.cycle is None or self.cycle.response_complete):
            # The rest of a body, or empty lines before a head.
            self._abort_after("head", HEAD_SECONDS)

    def _parse(self, data: memoryview) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                (num_parsed,) = upgrade.args
                data = data[num_parsed:]
                self._parse_head_again()

    def _parse_head_again(self) -> None:
        """Parse the head without its request to upgrade, after which a parser omits the body."""
        version = self.parser.get_http_version().encode()
        head = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        for name, value in self.headers:
            if name == b"connection":
                kept = [token for token in value.split(b",") if token.strip().lower() != _UPGRADE]
                value = b",".join(kept)
            if name != _UPGRADE:
                head.append(b"%b: %b" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.parser.feed_data(b"\r\n".join(head) + b"\r\n\r\n")

    @property
    def _is_upgrade(self) -> bool:
        return self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT"

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reads_head = True
        self._abort_after("head", HEAD_SECONDS)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reads_head:  # trailers are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._cancel("head")
        self._reads_head = False
        self._num_unparsed = 0
        if self._is_upgrade:
            return
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
        if not self._is_upgrade:
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._abort_after("write", self._write_seconds)

    def resume_writing(self) -> None:
        self._cancel("write")
        super().resume_writing()

    def _abort_after(self, name: str, seconds: float) -> None:
        """Start a timer, or start it again, that closes the connection."""
        self._cancel(name)
        self._timers[name] = self.loop.call_later(seconds, self.transport.abort)

    def _cancel(self, name: str) -> None:
        timer = self._timers.pop(name, None)
        if timer is not None:
            timer.cancel()


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
