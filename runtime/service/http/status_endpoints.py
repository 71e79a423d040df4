"""The endpoints that describe the service: models, version, health, readiness."""

from __future__ import annotations

import asyncio

import msgspec

from .exchange import Exchange
from .http_errors import HttpError
from .service import Service, package_version

__all__ = [
    "Health",
    "Model",
    "Models",
    "Version",
    "health",
    "metrics",
    "model",
    "models",
    "ready",
    "version",
]


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


class Health(msgspec.Struct):
    """The response of `/health` and `/ready`; `step_age` is in seconds."""

    phase: str
    live: bool
    ready: bool
    step_age: float | None
    reason: str | None


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
    name = service.model_name(exchange.scope["path_params"]["name"])
    await exchange.respond(Model(name, service.created, service.engine.max_model_len))


async def health(service: Service, exchange: Exchange) -> None:
    """Respond with 200 if the engine lives, also while it loads; else with 503."""
    await _respond_health(service, exchange, live=True)


async def ready(service: Service, exchange: Exchange) -> None:
    """Respond with 200 if requests are served now, else with 503 and the reason."""
    await _respond_health(service, exchange, live=False)


async def version(service: Service, exchange: Exchange) -> None:
    """Respond with the version of stepgraph."""
    await exchange.respond(Version(package_version()))


async def metrics(service: Service, exchange: Exchange) -> None:
    """Respond with the metrics in the format of Prometheus."""
    if service.metrics is None:
        raise HttpError(404, "this service has no metrics", kind="not_found_error")
    accept = exchange.header(b"accept") or ""
    body, content_type = await asyncio.to_thread(service.metrics.exposition, accept)
    await exchange.respond(body, content_type=content_type.encode("latin-1"))


async def _respond_health(service: Service, exchange: Exchange, *, live: bool) -> None:
    state = service.engine.health()
    good = state.live if live else state.ready
    body = Health(state.phase.value, state.live, state.ready, state.step_age, state.reason)
    await exchange.respond(body, status=200 if good else 503)
