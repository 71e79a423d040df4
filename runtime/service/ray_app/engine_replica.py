"""`EngineReplica`: one engine and its HTTP service in an actor of Ray Serve.

An HTTP exchange crosses processes as values: a `RemoteRequest`, and the parts of its response.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, MutableMapping
from typing import Any, NamedTuple

from starlette.types import ASGIApp

from ...errors import EngineFailedError
from ..async_engine import AsyncEngine
from ..health import Phase
from ..http.app import app
from ..http.command import api_keys_of_environment
from .options import ReplicaOptions
from .routing import fingerprints

__all__ = ["Accepted", "EngineReplica", "Head", "NotServed", "RemoteRequest", "respond"]


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

    async def run() -> None:
        try:
            await app(scope, receive, send)
        finally:
            parts.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (part := await parts.get()) is not None:
            while isinstance(part, bytes) and not parts.empty():
                following = parts.get_nowait()
                if following is None:
                    parts.put_nowait(None)  # ends the outer loop
                    break
                assert isinstance(following, bytes), "a response has one head"
                part += following
            yield part
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


STATUS_PATHS = ("/health", "/ready", "/version", "/openapi.json")
"""Paths that a replica serves whatever its engine does."""


class EngineReplica:
    """Serves the requests that the router sends here."""

    def __init__(self, options: ReplicaOptions) -> None:
        """Load the model, and wait until it is ready.

        Raises:
            CheckpointError, ConfigError, MemoryBudgetError, StepPreparationError: as
                `Engine.from_pretrained`.
        """
        self._options = options
        self._engine = AsyncEngine.from_pretrained(options.model, options.engine, options.service)
        self._engine.start()
        http = options.http
        self._app = app(
            self._engine,
            model_names=http.model_names or (options.model,),
            api_keys=http.api_keys or api_keys_of_environment(),
            max_body_bytes=http.max_body_bytes,
            tool_parser=http.tool_parser,
            reasoning_parser=http.reasoning_parser,
        )

    async def respond(
        self, request: RemoteRequest, prompt: bytes
    ) -> AsyncIterator[Accepted | NotServed | Head | bytes]:
        """Serve one request: `Accepted`, then a head and a body, or `NotServed`.

        `prompt` has the fingerprints of its blocks, which the router reads. Closing the iterator
        aborts the request.
        """
        yield Accepted()
        needs_engine = request.path not in STATUS_PATHS
        if needs_engine and (reason := self._unavailable()):
            yield NotServed(reason)
            return
        parts = respond(self._app, request)
        try:
            async for part in parts:
                failed = needs_engine and isinstance(part, Head) and part.status >= 500
                if failed and (reason := self._unavailable()):
                    yield NotServed(reason)
                    return
                yield part
        finally:
            await parts.aclose()  # type: ignore[attr-defined]

    async def check_health(self) -> None:
        """Raise unless the engine lives and its steps end: Serve then restarts the replica."""
        health = self._engine.health()
        if not health.live:
            raise EngineFailedError(f"the engine is {health.phase.value}: {health.reason}")
        limit = self._options.step_seconds
        if health.step_age is not None and health.step_age > limit:
            raise EngineFailedError(
                f"no step has ended for {health.step_age:.0f} s, more than step_seconds={limit:g}"
            )

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the fingerprints of the cached blocks, for the router."""
        most = self._options.routing.report_blocks
        if not most or self._engine.health().phase is not Phase.SERVING:
            return {"blocks": b""}
        return {"blocks": fingerprints(await self._engine.cached_hashes(most))}

    def _unavailable(self) -> str | None:
        """Return why the engine serves no requests now; None if it does."""
        health = self._engine.health()
        if health.phase is Phase.SERVING:
            return None
        return f"the engine is {health.phase.value}: {health.reason}"
