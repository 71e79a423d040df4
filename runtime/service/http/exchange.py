"""One HTTP request and its response or error, on the messages of ASGI.

Responses are sent without response objects: a stream of events costs one message for all tokens
that a step has given to a request.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from starlette.types import Receive, Scope, Send

from ....profiling.atomic_write import WriteError
from ....profiling.nsys import CaptureWindowError
from ....profiling.trace import TraceError
from ...bounded_repr import bounded_text
from ...errors import (
    EngineNotStartedError,
    EngineUnavailableError,
    OverloadedError,
    RequestError,
    SendTimeoutError,
    StepgraphError,
    StructuredOutputError,
)
from .command import ACCESS_LOG

logger = logging.getLogger("stepgraph.runtime")

MAX_MESSAGE_CHARS = 1000
MAX_RETRY_SECONDS = 3600
Headers = tuple[tuple[bytes, bytes], ...]


class ErrorDetails(msgspec.Struct):
    """What is wrong; `param` is a field of the request, `code` a name to compare with."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of an error response, and of an error event within a stream."""

    error: ErrorDetails


class HttpError(Exception):
    """A response other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Headers = (),
    ) -> None:
        """Describe the response; `param` is the wrong field, `code` a name to compare with."""
        super().__init__(message)
        self.status = status
        self.headers = headers
        message = bounded_text(message, MAX_MESSAGE_CHARS)
        message = message.encode(errors="backslashreplace").decode()  # it may quote a surrogate
        kind = _KINDS.get(status, "invalid_request_error")
        self.details = ErrorDetails(message, kind, param, code)


_KINDS: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    500: "server_error",
    503: "service_unavailable_error",
}
"""The `type` of errors by their status."""


class Dialect:
    """How an API writes errors and streams. This is OpenAI's; others derive from it."""

    error_body: type[msgspec.Struct] = ErrorBody
    """The type of what `error` returns."""
    stream_type = b"text/event-stream; charset=utf-8"
    ping = b""
    """An event that keeps a stream open while it has no others; empty for none."""
    id_headers: tuple[bytes, ...] = ()
    """Headers of responses that have the id of the request, besides `X-Request-Id`."""
    fields: tuple[tuple[str, str], ...] = ()
    """Regular expressions of fields of `ChatRequest`, and the names of its own."""

    def details(self, error: HttpError) -> ErrorDetails:
        """Return what is wrong, with the names of this API for the wrong field."""
        given, field = error.details, error.details.param
        if not given.param or field is None:
            return given
        for pattern, own in self.fields:
            field = re.sub(rf"^(?:{pattern})", own, field)
        name = rf"(?<!\w){re.escape(given.param)}(?!\w)"
        message = re.sub(name, field.replace("\\", r"\\"), given.message)
        return ErrorDetails(message, given.type, field, given.code)

    def named(self, error: HttpError) -> str:
        """Return a message that begins with the wrong field, for bodies without `param`."""
        details = self.details(error)
        if details.param is None or details.message.startswith(details.param):
            return details.message
        return f"{details.param}: {details.message}"

    def error(self, error: HttpError, request_id: str) -> msgspec.Struct:
        """Return the body of an error response."""
        return ErrorBody(self.details(error))

    def error_event(self, error: HttpError, request_id: str) -> bytes:
        """Return an error that ends a stream, encoded."""
        return event(self.error(error, request_id))


OPENAI = Dialect()


def invalid(param: str, message: str, code: str | None = None) -> HttpError:
    """Return the response to a request whose field `param` is wrong."""
    return HttpError(400, message, param=param, code=code)


def http_error(error: Exception, param_of: Callable[[RequestError], str | None]) -> HttpError:
    """Return the response to an exception; `param_of` names the field that it is about."""
    match error:
        case HttpError():
            return error
        case RequestError():
            return HttpError(400, str(error), param=param_of(error), code=error.code)
        case StructuredOutputError():
            return HttpError(400, str(error))
        case TraceError() | CaptureWindowError():
            return HttpError(409, str(error))
        case OverloadedError():
            seconds = math.ceil(min(max(error.retry_after, 1), MAX_RETRY_SECONDS))
            headers = ((b"retry-after", b"%d" % seconds),)
            return HttpError(503, str(error), code="overloaded", headers=headers)
        case EngineNotStartedError():
            return HttpError(503, str(error), code="not_started")
        case EngineUnavailableError():
            return HttpError(503, str(error), code="unavailable")
        case SendTimeoutError():
            return HttpError(408, str(error), code=error.field)
        case StepgraphError() | WriteError():  # of a trace
            return HttpError(500, str(error))
    logger.error("a request failed", exc_info=error)
    return HttpError(500, "internal error: see the log of the server")


access_logger = logging.getLogger(ACCESS_LOG)

T = TypeVar("T")

MAX_LOGGED_CHARS = 200
"""Of a path or an error in the access log."""
POLLED = ("/health", "/ready", "/metrics", "/ping", "/load", "/live")
"""Paths that monitors request every few seconds: their records have the level DEBUG."""

BODY_SECONDS = 60.0
"""Time that a client has to send the body of its request."""

MAX_BODIES = 64
"""Bodies of the maximum size that are held in memory together."""

LARGE_BODY_BYTES = 1 << 16
"""Larger bodies are decoded in turns, between which the event loop serves other requests."""

MAX_BRACKETS = 1 << 18
"""Opening brackets and braces in a body. Decoding the objects that they begin stops all threads:
0.5 s and 100 MiB for a body of 4 MiB that has nothing else."""

_ID_HEADER = b"x-request-id"
_VALID_ID = re.compile(r"[!-~]{1,128}")
"""Printable, without spaces."""

_ENCODER = msgspec.json.Encoder()
encode: Callable[[object], bytes] = _ENCODER.encode

_JSON = (b"content-type", b"application/json")
_CLOSE = (b"connection", b"close")
_STREAM_HEADERS: Headers = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the tokens back
)


def event(value: object) -> bytes:
    """Return a server-sent event whose data is JSON."""
    return b"data: %b\n\n" % encode(value)


class ClientDisconnected(Exception):  # noqa: N818  # no error
    """The client has closed the connection: there is no one to respond to."""


class BodyLimits:
    """Limits the bodies that are being received: each one, and all of an application together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes  # of one body
        self._num_bytes = 0
        self.turn = asyncio.Lock()
        """Held while a large body waits for the event loop to run once before it is decoded."""

    def take(self, num_bytes: int) -> None:
        """Count bytes of a body, or raise `OverloadedError`; a negative number releases them."""
        self._num_bytes += num_bytes
        if num_bytes > 0 and self._num_bytes > MAX_BODIES * self.max_bytes:
            raise OverloadedError("the server is receiving too many large bodies", retry_after=1.0)


class Exchange:
    """A request and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: BodyLimits) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self._limits = limits
        self.dialect = OPENAI
        self.parameters: dict[str, str] = {}
        """Of the path, by their names in the path of the operation."""
        self.key: bytes | None = None
        """Digest of the API key; None if the service has no keys."""
        self.param_of: Callable[[RequestError], str | None] = lambda error: error.field
        """Returns the field of the body that an error of the engine is about."""
        self._notes: dict[str, object] = {}
        self._status: int | None = None
        self._began = time.perf_counter()
        given = dict(scope["headers"]).get(_ID_HEADER, b"").decode("latin-1")
        self.request_id = given if _VALID_ID.fullmatch(given) else secrets.token_hex(12)
        """The header `X-Request-Id` of the response: the request's, if it is valid."""

    def header(self, name: bytes) -> str | None:
        """Return a header of the request; None without it. `name` is in lower case."""
        value: bytes | None = dict(self.scope["headers"]).get(name)
        return None if value is None else value.decode("latin-1")

    @property
    def path(self) -> str:
        """The path below the prefix that the application is mounted at."""
        path: str = self.scope["path"]
        return path.removeprefix(self.scope.get("root_path", "").rstrip("/"))

    def query(self, kind: type[T]) -> T:
        """Return the query of the path, or raise `HttpError`; its other fields are ignored."""
        given = dict(parse_qsl(self.scope["query_string"].decode("latin-1")))
        try:
            return msgspec.convert(given, kind, strict=False)
        except msgspec.ValidationError as error:
            raise _invalid_body(error) from error

    async def read(
        self, kind: type[T], check: Callable[[bytearray, type], None] | None = None
    ) -> T:
        """Read the body and decode it as JSON; `check` refuses fields that `kind` lacks."""
        async with self.body() as body:
            if len(body) > LARGE_BODY_BYTES:
                async with self._limits.turn:
                    await asyncio.sleep(0)
            request = _decode(body, kind)
            self.param_of = getattr(request, "param_of", self.param_of)
            if check is not None:
                check(body, kind)
            return request

    @asynccontextmanager
    async def body(self) -> AsyncIterator[bytearray]:
        """Read the body, and count its bytes until the block ends. Raises as `read`, except 400."""
        most, body, more = self._limits.max_bytes, bytearray(), True
        length = self.header(b"content-length") or ""
        too_large = HttpError(413, f"the body has more than {most} bytes", headers=(_CLOSE,))
        if length.isdecimal() and (len(length) > 18 or int(length) > most):
            raise too_large
        try:
            try:
                async with asyncio.timeout(BODY_SECONDS):
                    while more:
                        message = await self._receive()
                        if message["type"] == "http.disconnect":
                            raise ClientDisconnected
                        part, more = message.get("body", b""), message.get("more_body", False)
                        body += part
                        self._limits.take(len(part))
                        if len(body) > most:
                            raise too_large
            except TimeoutError as error:
                raise HttpError(
                    408, f"the body did not arrive within {BODY_SECONDS:g} s", headers=(_CLOSE,)
                ) from error
            yield body
        finally:
            self._limits.take(-len(body))

    async def respond(
        self,
        body: object,
        *,
        status: int = 200,
        content_type: bytes | None = None,
        headers: Headers = (),
    ) -> None:
        """Send a whole response: JSON, or bytes of a `content_type`."""
        data = body if isinstance(body, bytes) else encode(body)
        kind = _JSON if content_type is None else (b"content-type", content_type)
        length = (b"content-length", b"%d" % len(data))
        await self.start(status, (kind, length, *headers))
        await self._send({"type": "http.response.body", "body": data})

    def note(self, **notes: object) -> None:
        """Note something for the access log, such as `tokens_out`."""
        self._notes.update(notes)

    async def respond_error(self, error: HttpError) -> None:
        """Send an error: as the response, or as the last event of one that has begun."""
        self._notes.setdefault("request_id", self.request_id)
        self.note(error=error.details.message)
        if self._status is not None:  # the response has begun
            encoded = self.dialect.error_event(error, self.request_id)
            await self.send_events(encoded, last=True)
        else:
            body = self.dialect.error(error, self.request_id)
            await self.respond(body, status=error.status, headers=error.headers)

    async def start_stream(self) -> None:
        """Send the head of a stream; `send_events` sends its events."""
        await self.start(200, ((b"content-type", self.dialect.stream_type), *_STREAM_HEADERS))

    def send_events(self, events: bytes, *, last: bool = False) -> Awaitable[None]:
        """Send encoded events; waits while the client reads too slowly."""
        return self._send({"type": "http.response.body", "body": events, "more_body": not last})

    @asynccontextmanager
    async def cancelled_on_disconnect(self) -> AsyncIterator[None]:
        """Cancel the block when the client disconnects, with `ClientDisconnected`."""
        task = asyncio.current_task()
        assert task is not None

        async def watch() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            task.cancel()

        watcher = asyncio.create_task(watch())
        try:
            yield
        except asyncio.CancelledError:
            if not watcher.done() or task.uncancel():
                raise  # cancelled by someone else
            raise ClientDisconnected from None
        finally:
            watcher.cancel()

    async def start(self, status: int, headers: Headers) -> None:
        """Send the head of a response; `send_events` sends parts of its body."""
        self._status = status
        given = {name for name, _ in headers}
        names = [name for name in (_ID_HEADER, *self.dialect.id_headers) if name not in given]
        headers = (*headers, *[(name, self.request_id.encode()) for name in names])
        start = {"type": "http.response.start", "status": status, "headers": list(headers)}
        await self._send(start)

    def log(self, *, complete: bool) -> None:
        """Write the record of the access log; `complete` is whether the client has the response."""
        level = logging.DEBUG if self.path.endswith(POLLED) else logging.INFO
        if not access_logger.isEnabledFor(level):
            return
        scope, notes = self.scope, self._notes
        path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
        milliseconds = 1e3 * (time.perf_counter() - self._began)
        shown = bounded_text(path, MAX_LOGGED_CHARS)
        parts = [f"{scope['method']} {shown} {self._status or '-'} {milliseconds:.0f} ms"]
        if "tokens_in" in notes:
            parts.append(f"{notes['tokens_in']} tokens in, {notes['tokens_out']} out")
        if "request_id" in notes:
            parts.append(str(notes["request_id"]))
        if "error" in notes:
            parts.append(bounded_text(notes["error"], MAX_LOGGED_CHARS))
        if not complete:
            parts.append("the client disconnected")
        line = ", ".join(parts).encode("unicode_escape").decode()  # stays on one line
        access_logger.log(level, "%s", line)


class Endpoint:
    """An ASGI application: a coroutine that may raise the errors of the engine."""

    def __init__(self, handle: Callable[[Exchange], Awaitable[None]], limits: BodyLimits) -> None:
        self._handle = handle
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        while scope["type"] == "lifespan":
            kind = (await receive())["type"]
            await send({"type": f"{kind}.complete"})
            if kind == "lifespan.shutdown":
                return
        exchange, complete = Exchange(scope, receive, send, self._limits), False
        try:
            await self._handle(exchange)
            complete = True
        except ClientDisconnected:
            pass
        except Exception as error:
            await exchange.respond_error(http_error(error, exchange.param_of))
            complete = True
        finally:
            exchange.log(complete=complete)


_decoder: Any = cache(msgspec.json.Decoder)


def _decode(body: bytearray, kind: type[T]) -> T:
    if body.count(b"{") + body.count(b"[") > MAX_BRACKETS:
        raise HttpError(400, f"the body has more than {MAX_BRACKETS} brackets and braces")
    try:
        decoded: T = _decoder(kind).decode(body)
        return decoded
    except msgspec.ValidationError as error:
        raise _invalid_body(error) from error
    except RecursionError as error:
        raise HttpError(400, "the body is nested too deeply") from error
    except ValueError as error:  # also UnicodeDecodeError
        problem = f"not valid JSON: {error}" if body else "empty: send a JSON object"
        raise HttpError(400, f"the body is {problem}") from error


def _invalid_body(error: msgspec.ValidationError) -> HttpError:
    """Return the response to a body that msgspec refuses; `param` is the field that it names."""
    problem, _, where = str(error).partition(" - at ")
    found = re.search(r"`\$\.?([^`]*)`$", where)
    field = found[1].partition("[...]")[0] if found else ""  # msgspec names no keys of dicts
    missing = re.fullmatch(r"Object missing required field `([^`]*)`", problem)
    if missing:
        field = f"{field}.{missing[1]}" if field else missing[1]
        problem = "it is missing"
    name = f"a key of {field}" if where.startswith("`key` in") else field or "the body"
    return HttpError(400, f"{name}: {problem}", param=field or None)
