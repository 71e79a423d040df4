"""`EngineReplica`: one engine and its HTTP service in an actor of Ray Serve."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

from ...errors import EngineFailedError
from ..async_engine import AsyncEngine
from ..health import Phase
from ..http.app import app
from ..http.command import API_KEY_VARIABLE
from .options import ReplicaOptions
from .remote_call import Accepted, Head, NotServed, RemoteRequest, respond
from .routing import fingerprints

__all__ = ["EngineReplica"]

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
        http, key = options.http, os.environ.get(API_KEY_VARIABLE)
        self._app = app(
            self._engine,
            model_names=http.model_names or (options.model,),
            api_keys=http.api_keys or ([key] if key else ()),
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
