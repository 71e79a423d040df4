"""`Ingress`: reads HTTP requests, and passes them to a replica that answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import suppress

from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.routing import Route

from ...errors import EngineFailedError, EngineUnavailableError, OverloadedError
from ..http.exchange import BodyLimits, Endpoint, Exchange, HttpError
from .engine_replica import Accepted, Head, NotServed, RemoteRequest
from .options import ReplicaOptions
from .prompt_blocks import PromptBlocks

__all__ = ["Ingress"]

logger = logging.getLogger("stepgraph.runtime")

EVENT_STREAM = b"text/event-stream"

LOST = (RayActorError, ReplicaUnavailableError, DeploymentUnavailableError)
"""Errors of a call whose replica is gone."""


class Ingress:
    """Forwards requests. One that is lost before its response begins is sent to another replica."""

    def __init__(self, options: ReplicaOptions, replicas: DeploymentHandle) -> None:
        """Load the tokenizer, unless prompts do not matter for the routing.

        Raises:
            CheckpointError, ConfigError: there is no such model.
        """
        self._options = options
        self._respond = replicas.options(stream=True).respond
        self._blocks = PromptBlocks(options) if options.routing.policy == "prefix" else None
        limits = BodyLimits(options.http.max_body_bytes)
        endpoint = Endpoint(self._serve_http, limits)
        self._app = Starlette(routes=[Route("/{path:path}", endpoint)])

    def __serve_build_asgi_app__(self) -> Starlette:
        """Return the ASGI application, for Serve."""
        return self._app

    async def _serve_http(self, exchange: Exchange) -> None:
        if exchange.scope["path"].endswith("/metrics"):
            raise HttpError(404, "each node exports the metrics of its replicas through Ray")
        async with exchange.body() as body:
            request = RemoteRequest.of(exchange.scope, bytes(body))
            async with exchange.cancelled_on_disconnect():
                await self._send(exchange, request)

    async def _send(self, exchange: Exchange, request: RemoteRequest) -> None:
        """Send the response of a replica."""
        async for part in self._forward(request):
            if isinstance(part, Head):
                await exchange.start(part.status, part.headers)
            else:
                await exchange.send_events(part)
        await exchange.send_events(b"", last=True)

    async def _forward(self, request: RemoteRequest) -> AsyncIterator[Head | bytes]:
        """Yield the head and the body of a response.

        Raises:
            EngineUnavailableError: no replica has served the request.
            EngineFailedError: the replica was lost after the response had begun.
        """
        prompt = b""
        if self._blocks is not None:
            prompt = await self._blocks.of(request.path, request.body)
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
        """Yield what one replica responds; `NotServed` last if it is lost.

        A response that is no stream begins when it is complete.
        """
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
            whole: list[Head | bytes | NotServed] = []  # of a response that is no stream
            async for part in response:
                if whole or (isinstance(part, Head) and not _is_stream(part)):
                    whole.append(part)
                else:
                    yield part
            for part in whole:
                yield part
        except LOST as error:
            yield NotServed(f"its replica was lost ({type(error).__name__})")
        finally:
            with suppress(Exception):
                response.cancel()


def _is_stream(head: Head) -> bool:
    """Return whether server-sent events follow."""
    return EVENT_STREAM in dict(head.headers).get(b"content-type", b"")
