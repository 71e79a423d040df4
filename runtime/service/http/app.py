"""The ASGI application: routes, API keys, CORS."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ...errors import ConfigError
from ..async_engine import AsyncEngine
from . import status_endpoints, text_endpoints
from .chat import chat
from .completions import complete
from .exchange import BodyLimits, Endpoint, Exchange, RequestIds, encode
from .http_errors import HttpError
from .openapi import OPEN_PATHS, Operation, Operations, openapi_document
from .output_parsers import make_output_parser
from .requests import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from .responses import Chat, ChatChunk, Completion
from .service import Metrics, Service
from .unknown_fields import UnknownFields

__all__ = ["app"]

OPERATIONS: Operations = {
    ("GET", "/v1/models"): Operation(status_endpoints.models, status_endpoints.Models),
    ("GET", "/v1/models/{name:path}"): Operation(status_endpoints.model, status_endpoints.Model),
    ("GET", "/health"): Operation(
        status_endpoints.health, status_endpoints.Health, statuses=(200, 503)
    ),
    ("GET", "/ready"): Operation(
        status_endpoints.ready, status_endpoints.Health, statuses=(200, 503)
    ),
    ("GET", "/metrics"): Operation(status_endpoints.metrics, None),
    ("GET", "/version"): Operation(status_endpoints.version, status_endpoints.Version),
    ("POST", "/v1/completions"): Operation(
        complete, Completion, body=CompletionRequest, event=Completion
    ),
    ("POST", "/v1/chat/completions"): Operation(chat, Chat, body=ChatRequest, event=ChatChunk),
    ("POST", "/tokenize"): Operation(
        text_endpoints.tokenize, text_endpoints.Tokens, body=TokenizeRequest
    ),
    ("POST", "/detokenize"): Operation(
        text_endpoints.detokenize, text_endpoints.Text, body=DetokenizeRequest
    ),
}


def app(
    engine: AsyncEngine,
    *,
    model_names: Sequence[str] = ("stepgraph",),
    api_keys: Sequence[str] = (),
    max_body_bytes: int = 4 << 20,
    allow_origins: Sequence[str] = (),
    metrics: Metrics | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> Starlette:
    """Return the OpenAI-compatible HTTP service of an engine, to run or to mount.

    The caller starts and closes the engine; until it is ready requests are refused with 503.

    Args:
        engine: decodes the requests.
        model_names: names that requests may give as `model`; the first one is the default.
        api_keys: accepted as `Authorization: Bearer KEY`; none: no key is needed.
        max_body_bytes: a larger body of a request is refused with 413.
        allow_origins: origins whose web pages may call the service (CORS); `*` for any.
        metrics: what `/metrics` responds with, for example `EngineMetrics`; None: 404.
        tool_parser: finds tool calls in answers, see `make_output_parser`; None leaves them in the
            content.
        reasoning_parser: separates reasoning from answers, in the same way.

    Raises:
        ConfigError: there is no model name, or one or an API key is empty; or there is no parser of
            a name.
    """
    for name, values in (("model_names", model_names), ("api_keys", api_keys)):
        if isinstance(values, str) or not all(values):
            raise ConfigError(f"{name} must be a sequence of non-empty strings")
    if not model_names:
        raise ConfigError("model_names must have at least one name")
    make_output_parser(tool_parser, reasoning_parser)  # checks the names
    service = Service(
        engine=engine,
        model_names=tuple(model_names),
        metrics=metrics,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        fields=UnknownFields(engine.config.unknown_fields, (ChatRequest, CompletionRequest)),
    )

    document = openapi_document(OPERATIONS, needs_key=bool(api_keys))

    async def describe(exchange: Exchange) -> None:
        mounted_at = exchange.scope.get("root_path") or "/"
        await exchange.respond({**document, "servers": [{"url": mounted_at}]})

    limits = BodyLimits(max_body_bytes)
    routes = [
        Route(path, _endpoint(service, operation, limits), methods=[method])
        for (method, path), operation in OPERATIONS.items()
    ]
    routes.append(Route("/openapi.json", Endpoint(describe, limits), methods=["GET"]))
    middleware = [Middleware(RequestIds)]
    if allow_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(allow_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id"],
            )
        )
    if api_keys:
        middleware.append(Middleware(_ApiKeys, keys=api_keys))
    return Starlette(
        routes=routes, middleware=middleware, exception_handlers={HTTPException: _respond}
    )


def _endpoint(service: Service, operation: Operation, limits: BodyLimits) -> Endpoint:
    return Endpoint(lambda exchange: operation.handler(service, exchange), limits)


class _ApiKeys:
    """Refuses requests without a valid API key, in a time that does not depend on the keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _path(scope) not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not self._is_valid(given):
                error = HttpError(
                    401,
                    "the API key is missing or wrong: send it as Authorization: Bearer KEY",
                    kind="authentication_error",
                    code="invalid_api_key",
                    headers=((b"www-authenticate", b"Bearer"),),
                )
                await Exchange(scope, receive, send, BodyLimits(0)).respond_error(error)
                return
        await self._app(scope, receive, send)

    def _is_valid(self, given: bytes) -> bool:
        scheme, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return scheme.lower() == b"bearer" and any(matches)


def _path(scope: Scope) -> str:
    """Return the path below the prefix that the application is mounted at."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


async def _respond(request: Request, error: Exception) -> Response:
    """Return the response to an unknown path or method."""
    assert isinstance(error, HTTPException)
    kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
    message = f"there is no {request.url.path}"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        message = f"{request.url.path} does not accept {request.method}: use {allowed}"
    body = HttpError(error.status_code, message, kind=kind).body
    return Response(encode(body), error.status_code, error.headers, "application/json")
