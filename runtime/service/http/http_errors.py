"""Errors of the HTTP service: status, headers, and a body in the shape of the OpenAI API."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import msgspec

from ...bounded_repr import bounded_text
from ...errors import (
    EngineClosedError,
    EngineNotStartedError,
    EngineUnavailableError,
    OverloadedError,
    RequestError,
    SendTimeoutError,
    StepgraphError,
    StructuredOutputError,
)

__all__ = ["ErrorBody", "HttpError", "http_error"]

logger = logging.getLogger("stepgraph.runtime")

MAX_MESSAGE_CHARS = 1000
MAX_RETRY_SECONDS = 3600
Headers = tuple[tuple[bytes, bytes], ...]


class ErrorDetails(msgspec.Struct):
    """What is wrong; `param` is a field of the request, `code` a name to compare with."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """The body of an error response, and of an error event within a stream."""

    error: ErrorDetails


class HttpError(Exception):
    """A response other than 200."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Headers = (),
    ) -> None:
        """Describe the response.

        Args:
            status: the HTTP status.
            message: for the client's developer.
            kind: `type` of the error.
            param: the field of the request that is wrong.
            code: a name that clients compare with.
            headers: more headers of the response.
        """
        super().__init__(message)
        self.status = status
        self.headers = headers
        message = bounded_text(message, MAX_MESSAGE_CHARS)
        message = message.encode(errors="backslashreplace").decode()  # it may quote a surrogate
        self.body = ErrorBody(ErrorDetails(message, kind, param, code))


def http_error(
    error: Exception,
    param_of: Callable[[RequestError], str | None] = lambda error: error.field,
) -> HttpError:
    """Return the response to an exception of the engine or of the service itself.

    `param_of` returns the field of the request's body that an error is about.
    """
    match error:
        case HttpError():
            return error
        case RequestError():
            return HttpError(400, str(error), param=param_of(error), code=error.code)
        case StructuredOutputError():
            return HttpError(400, str(error))
        case OverloadedError():
            seconds = math.ceil(min(max(error.retry_after, 1), MAX_RETRY_SECONDS))
            headers = ((b"retry-after", b"%d" % seconds),)
            return _unavailable(error, "overloaded", headers)
        case EngineNotStartedError():
            return _unavailable(error, "not_started")
        case EngineUnavailableError() | EngineClosedError():
            return _unavailable(error, "unavailable")
        case SendTimeoutError():
            return HttpError(408, str(error), kind="timeout_error", code=error.field)
        case StepgraphError():
            return HttpError(500, str(error), kind="server_error")
    logger.error("a request failed", exc_info=error)
    return HttpError(500, "internal error: see the log of the server", kind="server_error")


def _unavailable(error: Exception, code: str, headers: Headers = ()) -> HttpError:
    return HttpError(503, str(error), kind="service_unavailable_error", code=code, headers=headers)
