"""The ASGI application: its routes, the endpoints that decode nothing, and the OpenAPI document."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import compile_path
from starlette.types import ASGIApp

from ...bounded_repr import bounded_repr, bounded_text
from ...errors import ConfigError
from ...prompt_ids import too_long
from ...sampling_params import MAX_TOKEN_ID
from ..async_engine import AsyncEngine
from ..health import Health
from ..profiler import Profiler
from . import admin_api, chat, completions, messages_api, ollama_api, responses_api
from .exchange import BodyLimits, Endpoint, Exchange, HttpError, invalid
from .generation import Operation, Service
from .origins import check_origin
from .output_parsers import chosen_parsers
from .page import FILES
from .page import OPERATIONS as PAGE_OPERATIONS
from .requests import DetokenizeRequest, TokenizeRequest, UnknownFields, chat_prompt
from .response_store import ResponseStore
from .token_text import TokenTexts

if TYPE_CHECKING:  # it needs prometheus-client
    from ..metrics import EngineMetrics

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
"""Paths that need no API key: load balancers have none."""

_SCHEMAS = "#/components/schemas/{name}"
_Json = dict[str, Any]
_TEXT: _Json = {"text/plain": {}, "application/openmetrics-text": {}}


def package_version() -> str:
    """Return the version of stepgraph."""
    package = sys.modules[__name__.partition(".")[0]]  # it imports this one, not the reverse
    version: str = package.__version__
    return version


class Model(msgspec.Struct):
    """A name that requests may give as `model`, and the longest sequence in tokens."""

    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "stepgraph"


class Models(msgspec.Struct):
    """The response of `/v1/models`."""

    data: list[Model]
    object: str = "list"


class Version(msgspec.Struct):
    """The response of `/version`."""

    version: str


async def models(service: Service, exchange: Exchange) -> None:
    """Respond with the names that requests may give as their model."""
    longest = service.engine.max_model_len
    names = [Model(name, service.created, longest) for name in service.model_names]
    await exchange.respond(Models(names))


async def model(service: Service, exchange: Exchange) -> None:
    """Respond with one model."""
    name = service.model_name(exchange.parameters["name"])
    await exchange.respond(Model(name, service.created, service.engine.max_model_len))


async def health(service: Service, exchange: Exchange) -> None:
    """Respond with 200 if the engine lives, also while it loads; else with 503."""
    state = service.engine.health()
    await exchange.respond(state, status=200 if state.live else 503)


async def ping(service: Service, exchange: Exchange) -> None:
    """Respond as `/health`, for load balancers that expect this name."""
    await health(service, exchange)


async def ready(service: Service, exchange: Exchange) -> None:
    """Respond with 200 if requests are served now, else with 503 and the reason."""
    state = service.engine.health()
    await exchange.respond(state, status=200 if state.ready else 503)


async def version(service: Service, exchange: Exchange) -> None:
    """Respond with the version of stepgraph."""
    await exchange.respond(Version(package_version()))


async def metrics(service: Service, exchange: Exchange) -> None:
    """Respond with the metrics in the format of Prometheus."""
    if service.metrics is None:
        raise HttpError(404, "this service has no metrics")
    accept = exchange.header(b"accept") or ""
    body, content_type = await asyncio.to_thread(service.metrics.exposition, accept)
    await exchange.respond(body, content_type=content_type.encode("latin-1"))


class Tokens(msgspec.Struct):
    """The response of `/tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(msgspec.Struct):
    """The response of `/detokenize`."""

    prompt: str


async def tokenize(service: Service, exchange: Exchange) -> None:
    """Respond with the token ids of a text or of a conversation."""
    request = await exchange.read(TokenizeRequest)
    service.model_name(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise invalid("prompt", "give one of prompt and messages")
    special, prompt = request.add_special_tokens, request.prompt
    if special is None:
        special = prompt is not None  # templates write special tokens themselves
    token_ids = await service.encode(
        chat_prompt(request) if prompt is None else prompt, special=special
    )
    strings, texts = None, TokenTexts(service.engine.tokenizer)
    if request.return_token_strs:
        strings = await service.engine.run_in_pool(lambda: [texts.text(i) for i in token_ids])
    longest = service.engine.max_model_len
    await exchange.respond(Tokens(len(token_ids), longest, token_ids, strings))


async def detokenize(service: Service, exchange: Exchange) -> None:
    """Respond with the text of token ids."""
    request = await exchange.read(DetokenizeRequest)
    service.model_name(request.model)
    longest = service.engine.max_model_len
    if len(request.tokens) > longest:
        raise too_long(f"{len(request.tokens)} tokens", longest, "tokens")
    for index, token_id in enumerate(request.tokens):
        if not 0 <= token_id <= MAX_TOKEN_ID:
            shown = bounded_repr(token_id)
            raise invalid("tokens", f"tokens[{index}] is {shown}; allowed is 0 to {MAX_TOKEN_ID}")
    tokenizer = service.tokenizer("tokens")

    text = await service.engine.run_in_pool(
        lambda: tokenizer.decode(request.tokens, skip_special_tokens=False)
    )
    await exchange.respond(Text(text))


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("GET", "/v1/models"): Operation(models, Models),
    ("GET", "/v1/models/{name:path}"): Operation(model, Model),
    ("GET", "/health"): Operation(health, Health, statuses=(200, 503)),
    ("GET", "/ping"): Operation(ping, Health, statuses=(200, 503)),
    ("GET", "/ready"): Operation(ready, Health, statuses=(200, 503)),
    ("GET", "/metrics"): Operation(metrics, None),
    ("GET", "/version"): Operation(version, Version),
    **completions.OPERATIONS,
    **chat.OPERATIONS,
    **messages_api.OPERATIONS,
    **responses_api.OPERATIONS,
    **admin_api.OPERATIONS,
    **ollama_api.OPERATIONS,
    ("POST", "/tokenize"): Operation(tokenize, Tokens, body=TokenizeRequest),
    ("POST", "/detokenize"): Operation(detokenize, Text, body=DetokenizeRequest),
}
"""The endpoints by method and path, as Starlette writes paths with parameters.

An API in a module of its own adds the `OPERATIONS` there.
"""


def app(
    engine: AsyncEngine,
    *,
    model_names: Sequence[str] = ("stepgraph",),
    api_keys: Sequence[str] = (),
    max_body_bytes: int = 4 << 20,
    allow_origins: Sequence[str] = (),
    metrics: EngineMetrics | None = None,
    tool_parser: str | None = "auto",
    reasoning_parser: str | None = "auto",
    page: bool = False,
    admin: bool = False,
    profile_dir: Path | None = None,
) -> ASGIApp:
    """Return the HTTP service of an engine, to run or to mount.

    The caller starts and closes the engine; until it is ready requests are refused with 503.

    Args:
        engine: decodes the requests.
        model_names: names that requests may give as `model`; the first one is the default.
        api_keys: accepted as `Authorization: Bearer KEY`; none: no key is needed.
        max_body_bytes: a larger body of a request is refused with 413.
        allow_origins: origins whose web pages may call the service (CORS); `*` for any. Others
            are refused, see `check_origin`.
        metrics: what `/metrics` responds with; None: 404.
        tool_parser: name of the format of tool calls, see docs/serving.md; `auto` chooses it by the
            chat template, None or `none` leaves calls in the content.
        reasoning_parser: the same for the format of reasoning.
        page: whether to serve the page at `/`, which needs no API key itself.
        admin: whether every client may use the endpoints for operators, such as `/start_profile`
            and `/sleep`; otherwise only requests over a Unix socket.
        profile_dir: the folder for traces of `/start_profile`; None: a temporary one.

    Raises:
        ConfigError: there is no model name, or one or an API key is empty; or there is no parser of
            a name.
    """
    for name, values in (("model_names", model_names), ("api_keys", api_keys)):
        if isinstance(values, str) or not all(values):
            raise ConfigError(f"{name} must be a sequence of non-empty strings")
    if not model_names:
        raise ConfigError("model_names must have at least one name")
    parser_names = tool_parser, reasoning_parser
    chosen_parsers(None, *parser_names)  # checks the names
    kinds = [each.body for each in OPERATIONS.values() if each.body and each.event]
    fields = UnknownFields(engine.config.unknown_fields, kinds)
    config, profiler = engine.config, Profiler(engine, profile_dir)
    store = ResponseStore(config.max_stored_responses, config.max_stored_bytes)
    settings = fields, metrics, parser_names, profiler, admin, store
    service = Service(engine, tuple(dict.fromkeys(model_names)), *settings)
    document = openapi_document(needs_key=bool(api_keys))
    digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]

    async def describe(service: Service, exchange: Exchange) -> None:
        mounted_at = exchange.scope.get("root_path") or "/"
        await exchange.respond({**document, "servers": [{"url": mounted_at}]})

    operations = {("GET", "/openapi.json"): Operation(describe, None), **OPERATIONS}
    if page:
        operations |= PAGE_OPERATIONS
    open_paths = OPEN_PATHS.union(FILES if page else ())
    paths: dict[str, dict[str, Operation]] = {}
    for (method, path), operation in operations.items():
        paths.setdefault(path, {})[method] = operation
    patterns = {compile_path(path)[0]: methods for path, methods in paths.items() if "{" in path}

    def methods_of(exchange: Exchange) -> dict[str, Operation]:
        """Return the operations of a path by method, and note its parameters."""
        if (methods := paths.get(exchange.path)) is not None:
            return methods
        for pattern, methods in patterns.items():
            if found := pattern.match(exchange.path):
                exchange.parameters = found.groupdict()
                return methods
        return {}

    async def serve(exchange: Exchange) -> None:
        path, method = exchange.path, exchange.scope["method"]
        methods = methods_of(exchange)
        operation = methods.get("GET" if method == "HEAD" else method)
        if found := operation or next(iter(methods.values()), None):
            exchange.dialect = found.dialect
        check_origin(exchange, allow_origins, needs_key=bool(digests))
        if digests and path not in open_paths:
            exchange.key = _check_key(exchange, digests)
        if not methods:
            raise HttpError(404, f"{bounded_text(path)} is not an endpoint")
        if operation is None:
            allowed = ", ".join(methods)
            raise HttpError(
                405,
                f"{path} does not accept {method}: use {allowed}",
                headers=((b"allow", allowed.encode()),),
            )
        host, port = exchange.scope.get("server") or ("", None)
        over_unix_socket = port is None and "/" in host  # a path, not a host without a port
        if operation.admin and not (admin or over_unix_socket):
            raise HttpError(
                403,
                f"{path} is for operators: start the server with --admin (app(admin=True)), or send"
                " the request over a Unix socket (--uds)",
            )
        await operation.handler(service, exchange)

    served: ASGIApp = Endpoint(serve, BodyLimits(max_body_bytes))
    if not allow_origins:
        return served
    return CORSMiddleware(
        served,
        allow_origins=allow_origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "request-id"],
    )


def _check_key(exchange: Exchange, digests: Sequence[bytes]) -> bytes:
    """Return the digest of the API key. Refuse a request without a valid one, in a time that does
    not depend on the keys.
    """
    scheme, _, token = (exchange.header(b"authorization") or "").partition(" ")
    given = [token] if scheme.lower() == "bearer" else []
    given += filter(None, [exchange.header(b"x-api-key")])
    found = [hashlib.sha256(key.strip(" \t").encode("latin-1")).digest() for key in given]
    valid = [key for key in found for known in digests if hmac.compare_digest(key, known)]
    if not valid:
        raise HttpError(
            401,
            "the API key is missing or wrong: send Authorization: Bearer KEY or x-api-key: KEY",
            code="invalid_api_key",
            headers=((b"www-authenticate", b"Bearer"),),
        )
    return valid[0]


def openapi_document(*, needs_key: bool) -> _Json:
    """Return the OpenAPI document of `OPERATIONS`; `needs_key` excepts `OPEN_PATHS`."""
    kinds = {
        kind
        for each in OPERATIONS.values()
        for kind in (each.body, each.response, each.event, each.dialect.error_body)
        if kind is not None
    }
    _, schemas = msgspec.json.schema_components(
        sorted(kinds, key=lambda kind: kind.__name__), ref_template=_SCHEMAS
    )
    paths: dict[str, _Json] = {}
    for (method, path), operation in OPERATIONS.items():
        _, shown, names = compile_path(path)
        made = _operation(operation, names)
        if needs_key and path not in OPEN_PATHS:
            made["security"] = [{"key": []}]
        paths.setdefault(shown, {})[method.lower()] = made
    components: _Json = {"schemas": schemas}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "stepgraph", "version": package_version()},
        "paths": paths,
        "components": components,
    }


def _operation(operation: Operation, path_parameters: Iterable[str]) -> _Json:
    text = {"in": "path", "required": True, "schema": {"type": "string"}}
    parameters: list[_Json] = [{"name": name, **text} for name in path_parameters]
    for field in msgspec.structs.fields(operation.query) if operation.query else ():
        schema = msgspec.json.schema(field.type) | {"default": field.default}
        parameters.append({"name": field.name, "in": "query", "schema": schema})
    content = _TEXT if operation.response is None else _content(operation.response)
    if operation.event is not None:  # its data is JSON, or `[DONE]` in the last one
        event = _ref(operation.event)
        kind = operation.dialect.stream_type.decode().partition(";")[0]
        if kind == "text/event-stream":  # else a JSON object a line
            data = {
                "type": "string",
                "contentMediaType": "application/json",
                "contentSchema": event,
            }
            event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
        content = {**content, kind: {"schema": event}}
    phrases = {str(status): HTTPStatus(status).phrase for status in operation.statuses}
    responses: _Json = {
        status: {"description": phrase, "content": content} for status, phrase in phrases.items()
    }
    error = _content(operation.dialect.error_body)
    responses["default"] = {"description": "Error", "content": error}
    made: _Json = {
        "operationId": operation.handler.__name__,
        "summary": inspect.getdoc(operation.handler),
        "parameters": parameters,
        "responses": responses,
    }
    if operation.body is not None:
        made["requestBody"] = {"required": True, "content": _content(operation.body)}
    return made


def _content(kind: type) -> _Json:
    return {"application/json": {"schema": _ref(kind)}}


def _ref(kind: type) -> _Json:
    return {"$ref": _SCHEMAS.format(name=kind.__name__)}
