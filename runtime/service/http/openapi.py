"""The OpenAPI document of the service, derived from its endpoints and the types of their bodies."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import msgspec

from .exchange import Exchange
from .http_errors import ErrorBody
from .service import Service, package_version

__all__ = ["OPEN_PATHS", "Operation", "Operations", "openapi_document"]

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Paths that need no API key: load balancers have none."""

OPENAPI_VERSION = "3.1.0"
_SCHEMAS = "#/components/schemas/{name}"
_Json = dict[str, Any]
_TEXT: _Json = {"text/plain": {}, "application/openmetrics-text": {}}


@dataclass(frozen=True, slots=True)
class Operation:
    """An endpoint, with the types of what it reads and sends. Its docstring is the summary."""

    handler: Callable[[Service, Exchange], Awaitable[None]]
    response: type[msgspec.Struct] | None
    """None: text in a format of Prometheus."""
    body: type[msgspec.Struct] | None = None
    event: type[msgspec.Struct] | None = None
    """Data of each event, if the response can be a stream."""
    statuses: tuple[int, ...] = (200,)
    """Of a `response`; every other one is an error."""


Operations = Mapping[tuple[str, str], Operation]
"""(method, path) → operation."""


def openapi_document(operations: Operations, *, needs_key: bool) -> _Json:
    """Return the OpenAPI document.

    Args:
        operations: the endpoints.
        needs_key: whether requests need an API key, except those for `OPEN_PATHS`.
    """
    kinds: set[type[msgspec.Struct]] = {ErrorBody}
    for operation in operations.values():
        named = (operation.body, operation.response, operation.event)
        kinds.update(kind for kind in named if kind is not None)
    _, schemas = msgspec.json.schema_components(
        sorted(kinds, key=lambda kind: kind.__name__), ref_template=_SCHEMAS
    )
    paths: dict[str, _Json] = {}
    for (method, route), operation in operations.items():
        path = route.replace(":path}", "}")  # a converter of Starlette
        paths.setdefault(path, {})[method.lower()] = _operation(path, operation, needs_key)
    components: _Json = {"schemas": schemas}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "stepgraph", "version": package_version()},
        "paths": paths,
        "components": components,
    }


def _operation(path: str, operation: Operation, needs_key: bool) -> _Json:
    content = _TEXT if operation.response is None else _content(operation.response)
    if operation.event is not None:
        content = {**content, "text/event-stream": {"schema": _event(operation.event)}}
    responses: _Json = {
        str(status): {"description": HTTPStatus(status).phrase, "content": content}
        for status in operation.statuses
    }
    responses["default"] = {"description": "Error", "content": _content(ErrorBody)}
    made: _Json = {
        "operationId": operation.handler.__name__,
        "summary": inspect.getdoc(operation.handler),
        "responses": responses,
    }
    if "{" in path:
        name = path[path.index("{") + 1 : -1]
        schema = {"type": "string"}
        made["parameters"] = [{"name": name, "in": "path", "required": True, "schema": schema}]
    if operation.body is not None:
        made["requestBody"] = {"required": True, "content": _content(operation.body)}
    if needs_key and path not in OPEN_PATHS:
        made["security"] = [{"key": []}]
    return made


def _content(kind: type[msgspec.Struct]) -> _Json:
    return {"application/json": {"schema": _ref(kind)}}


def _event(kind: type[msgspec.Struct]) -> _Json:
    """The schema of a server-sent event, whose data is JSON, or `[DONE]` in the last one."""
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": _ref(kind),
    }
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _ref(kind: type[msgspec.Struct]) -> _Json:
    return {"$ref": _SCHEMAS.format(name=kind.__name__)}
