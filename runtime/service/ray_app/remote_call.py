"""One HTTP exchange as values that cross processes: a request, and the parts of its response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, MutableMapping
from typing import Any, NamedTuple

from starlette.types import ASGIApp

__all__ = ["Accepted", "Head", "NotServed", "RemoteRequest", "respond"]


class RemoteRequest(NamedTuple):
    """A request with its whole body."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes

    @classmethod
    def of(cls, scope: Mapping[str, Any], body: bytes) -> RemoteRequest:
        """Return the request of an ASGI scope. The path is that below the application's root."""
        root, path = scope.get("root_path", ""), scope["path"]
        path = path.removeprefix(root) if root != "/" else path
        headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
        return cls(scope["method"], path, scope.get("query_string", b""), headers, body)


class Accepted(NamedTuple):
    """A replica has taken the request: the first part of its answer."""


class NotServed(NamedTuple):
    """The replica cannot serve the request, and has sent no part of the response."""

    reason: str


class Head(NamedTuple):
    """Status and headers of the response; its body follows as bytes."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


async def respond(app: ASGIApp, request: RemoteRequest) -> AsyncIterator[Head | bytes]:
    """Run a request in an ASGI application: the head of the response, then parts of its body.

    Parts that are ready together are joined. Closing the iterator disconnects the client.
    """
    parts: asyncio.Queue[Head | bytes | None] = asyncio.Queue()
    unread = [{"type": "http.request", "body": request.body, "more_body": False}]

    async def receive() -> MutableMapping[str, Any]:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()  # until the task is cancelled
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            parts.put_nowait(Head(message["status"], tuple(message["headers"])))
        elif body := message.get("body", b""):
            parts.put_nowait(body)

    task = asyncio.create_task(_run(app, request, receive, send, parts))
    try:
        while (part := await parts.get()) is not None:
            ended = False
            while isinstance(part, bytes) and not parts.empty():
                following = parts.get_nowait()
                if following is None:
                    ended = True
                    break
                assert isinstance(following, bytes), "a response has one head"
                part += following
            yield part
            if ended:
                break
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _run(
    app: ASGIApp,
    request: RemoteRequest,
    receive: Any,
    send: Any,
    parts: asyncio.Queue[Head | bytes | None],
) -> None:
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.path,
        "raw_path": request.path.encode(),
        "query_string": request.query,
        "root_path": "",
        "headers": list(request.headers),
    }
    try:
        await app(scope, receive, send)
    finally:
        parts.put_nowait(None)
