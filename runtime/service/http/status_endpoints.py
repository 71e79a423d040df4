"""The endpoints that describe the service: models, version, health, readiness."""

from __future__ import annotations

import sys

import msgspec

from .exchange import Exchange
from .service import Service

__all__ = ["health", "model", "models", "ready", "version"]


class _Model(msgspec.Struct):
    id: str
    created: int
    max_model_len: int
    object: str = "model"
    owned_by: str = "stepgraph"


class _Models(msgspec.Struct):
    data: list[_Model]
    object: str = "list"


class _Health(msgspec.Struct):
    phase: str
    live: bool
    ready: bool
    step_age: float | None
    reason: str | None


class _Version(msgspec.Struct):
    version: str


async def models(service: Service, exchange: Exchange) -> None:
    """Respond with the names that requests may give as their model."""
    longest = service.engine.max_model_len
    names = [_Model(name, service.created, longest) for name in service.model_names]
    await exchange.respond(_Models(names))


async def model(service: Service, exchange: Exchange) -> None:
    """Respond with one model."""
    name = service.model_name(exchange.scope["path_params"]["name"])
    await exchange.respond(_Model(name, service.created, service.engine.max_model_len))


async def health(service: Service, exchange: Exchange) -> None:
    """Respond with 200 if the engine lives, also while it loads; else with 503."""
    await _respond_health(service, exchange, live=True)


async def ready(service: Service, exchange: Exchange) -> None:
    """Respond with 200 if requests are served now, else with 503 and the reason."""
    await _respond_health(service, exchange, live=False)


async def version(service: Service, exchange: Exchange) -> None:
    """Respond with the version of stepgraph."""
    package = sys.modules[__name__.partition(".")[0]]  # it imports this one, not the reverse
    await exchange.respond(_Version(package.__version__))


async def _respond_health(service: Service, exchange: Exchange, *, live: bool) -> None:
    state = service.engine.health()
    good = state.live if live else state.ready
    body = _Health(state.phase.value, state.live, state.ready, state.step_age, state.reason)
    await exchange.respond(body, status=200 if good else 503)
