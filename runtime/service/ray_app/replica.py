"""The processes of the application: `Ingress` reads requests, `EngineReplica` answers them.

An HTTP exchange crosses processes as values: a `RemoteRequest`, and the parts of its response.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, MutableMapping
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from ...errors import EngineFailedError, EngineUnavailableError, OverloadedError
from ..async_engine import AsyncEngine
from ..health import Phase
from ..http.app import app
from ..http.command import api_keys_of_environment
from ..http.exchange import BodyLimits, Endpoint, Exchange, HttpError
from .options import ReplicaOptions

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger("stepgraph.runtime")

STATUS_PATHS = ("/health", "/ready", "/version", "/openapi.json")
"""Paths that a replica serves whatever its engine does."""


CHUNK_BYTES = 64
"""Of a prompt as JSON: about as much as a block of 16 tokens."""
_PROMPT = ("cache_salt", "tools", "messages", "prompt")
"""Fields that determine a prompt, in the order in which templates write them."""


class RemoteRequest(NamedTuple):
    """A request with its whole body."""

    method: str
    path: str
    """Below the root of the application."""
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    query: bytes = b""


class Accepted(NamedTuple):
    """A replica has taken the request: the first part of its answer."""


class NotServed(NamedTuple):
    """The replica cannot serve the request, and has sent no part of the response."""

    reason: str


class Head(NamedTuple):
    """The beginning of the response, all of it unless it is a stream; more of its body follows."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


async def respond(app: ASGIApp, request: RemoteRequest) -> AsyncIterator[Head | bytes]:
    """Run a request in an ASGI application: the head of the response, then parts of its body.

    Parts that are ready together are joined. Closing the iterator disconnects the client.
    """
    parts: asyncio.Queue[Head | bytes | None] = asyncio.Queue()
    unread = [{"type": "http.request", "body": request.body, "more_body": False}]
    heads = []  # until the first part of the body

    async def receive() -> MutableMapping[str, Any]:
        if unread:
            return unread.pop()
        await asyncio.Event().wait()  # until the task is cancelled
        raise AssertionError

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            heads.append((message["status"], tuple(message["headers"])))
            return
        body = message.get("body", b"")
        if heads:
            parts.put_nowait(Head(*heads.pop(), body))
        elif body:
            parts.put_nowait(body)

    async def run() -> None:
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


class EngineReplica:
    """Serves the requests that the router sends here."""

    def __init__(self, options: ReplicaOptions) -> None:
        """Load the model, and wait until it is ready. Raises as `Engine.from_pretrained`."""
        self._options = options
        self._engine = AsyncEngine.from_pretrained(options.model, options.engine, options.service)
        self._engine.start()
        http = asdict(options.http)
        http["model_names"] = http["model_names"] or (options.model,)
        http["api_keys"] = http["api_keys"] or api_keys_of_environment()
        self._app = app(self._engine, **http)

    async def respond(
        self, request: RemoteRequest, prompt: bytes
    ) -> AsyncIterator[Accepted | NotServed | Head | bytes]:
        """Serve one request: `Accepted`, then a head and a body, or `NotServed`.

        `prompt` has the fingerprints of its chunks, which the router reads. Closing the iterator
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

    def _unavailable(self) -> str | None:
        """Return why the engine serves no requests now; None if it does."""
        health = self._engine.health()
        if health.phase is Phase.SERVING:
            return None
        return f"the engine is {health.phase.value}: {health.reason}"


def fingerprints(body: bytes) -> bytes:
    """Return the fingerprints of a request's prompt, 4 bytes for each full chunk.

    Bodies that are not a JSON object, which a replica will refuse, have none.
    """
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return b""
    prompt = b"\0".join(bytes(fields.get(name, b"")) for name in _PROMPT)
    hashed, found = blake2b(digest_size=4), []
    for start in range(0, len(prompt) - CHUNK_BYTES + 1, CHUNK_BYTES):
        hashed.update(prompt[start : start + CHUNK_BYTES])
        found.append(hashed.digest())
    return b"".join(found)


class Ingress:
    """Forwards requests. One that is lost before its response begins is sent to another replica."""

    def __init__(self, options: ReplicaOptions, replicas: DeploymentHandle) -> None:
        """Take the options of `build`, and the handle of its replicas."""
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError

        self._lost = (RayActorError, ReplicaUnavailableError, DeploymentUnavailableError)
        self._options = options
        self._respond = replicas.options(stream=True).respond
        endpoint = Endpoint(self._serve_http, BodyLimits(options.http.max_body_bytes))
        self._app = Starlette(routes=[Route("/{path:path}", endpoint)])

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the ASGI application, for Serve."""
        return self._app

    async def _serve_http(self, exchange: Exchange) -> None:
        if exchange.path == "/metrics":
            raise HttpError(404, "each node exports the metrics of its replicas through Ray")
        async with exchange.body() as body:
            scope = exchange.scope
            headers = tuple((bytes(name), bytes(value)) for name, value in scope["headers"])
            query = bytes(scope["query_string"])
            request = RemoteRequest(scope["method"], exchange.path, headers, bytes(body), query)
            async with exchange.cancelled_on_disconnect():
                async for part in self._forward(request):
                    if isinstance(part, Head):
                        await exchange.start(part.status, part.headers)
                        part = part.body
                    await exchange.send_events(part)
                await exchange.send_events(b"", last=True)

    async def _forward(self, request: RemoteRequest) -> AsyncIterator[Head | bytes]:
        """Yield the head and the body of a response, of the first replica that serves it."""
        prompt = b""
        routing = self._options.routing
        if routing.policy == "prefix" and len(request.body) <= routing.max_prompt_bytes:
            prompt = await asyncio.to_thread(fingerprints, request.body)
        reasons: list[str] = []
        while len(reasons) < self._options.max_attempts:
            begun = False
            async for part in self._attempt(request, prompt):
                if isinstance(part, NotServed):
                    if begun:
                        raise EngineFailedError(f"the response is incomplete: {part.reason}")
                    reasons.append(part.reason)
                    break
                begun = True
                yield part
            else:
                return
            logger.warning("a request is sent to another replica: %s", reasons[-1])
        raise EngineUnavailableError(
            f"{len(reasons)} replicas did not serve the request, the last one because"
            f" {reasons[-1]}: try again later"
        )

    async def _attempt(
        self, request: RemoteRequest, prompt: bytes
    ) -> AsyncIterator[Head | bytes | NotServed]:
        """Yield what one replica responds; `NotServed` last if it is lost."""
        seconds = self._options.route_seconds
        response = self._respond.remote(request, prompt)
        try:
            try:
                async with asyncio.timeout(seconds):
                    accepted = await anext(response)
            except TimeoutError as error:
                raise OverloadedError(
                    f"no replica has accepted the request within {seconds:g} s", retry_after=seconds
                ) from error
            assert isinstance(accepted, Accepted), "a replica accepts a request first"
            async for part in response:
                yield part
        except self._lost as error:
            yield NotServed(f"its replica was lost ({type(error).__name__})")
        finally:
            with suppress(Exception):
                response.cancel()
