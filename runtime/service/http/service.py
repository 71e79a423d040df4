"""`Service`: what the endpoints of one application share."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Protocol

from ...bounded_repr import bounded_repr
from ..async_engine import AsyncEngine
from .http_errors import HttpError
from .unknown_fields import UnknownFields

__all__ = ["Metrics", "Service", "package_version"]


class Metrics(Protocol):
    """What `/metrics` responds with."""

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return a body and its content type, for a header `Accept`. A thread calls it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """An engine and the settings of its HTTP service."""

    engine: AsyncEngine
    model_names: tuple[str, ...]
    """Names that requests may give; responses without one have the first."""
    metrics: Metrics | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    """Names for `make_output_parser`."""
    fields: UnknownFields
    """Checks the fields of requests."""
    created: int = field(default_factory=lambda: int(time.time()))

    def model_name(self, given: str | None) -> str:
        """Return the name of the model for the response.

        Raises:
            HttpError: 404, there is no model of this name.
        """
        if given is None:
            return self.model_names[0]
        if given not in self.model_names:
            names = " or ".join(self.model_names)
            raise HttpError(
                404,
                f"the model {bounded_repr(given)} is not served: give {names}, or leave model out",
                kind="not_found_error",
                param="model",
                code="model_not_found",
            )
        return given


def package_version() -> str:
    """Return the version of stepgraph."""
    package = sys.modules[__name__.partition(".")[0]]  # it imports this one, not the reverse
    version: str = package.__version__
    return version
