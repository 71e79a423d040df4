"""Which web pages may send requests: against forged requests (CSRF) and DNS rebinding."""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import ip_address

from ...bounded_repr import bounded_text
from .exchange import Exchange, HttpError

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing; other origins cannot read their responses."""


def check_origin(exchange: Exchange, allowed: Collection[str], *, needs_key: bool) -> None:
    """Refuse a request that a page of another origin has made a browser send.

    Browsers name the origin of the page in every POST; other clients name none and are not
    checked. Requests of the service's own page have the origin of their `Host`. So does a page
    whose name was rebound to this machine after the page was loaded from another one. That needs a
    service without API keys, a connection over loopback, a name that DNS resolves, and no TLS: no
    certificate would match.

    Args:
        exchange: the request.
        allowed: origins that may send requests; `*` for any.
        needs_key: whether the service has API keys, which other pages do not know.

    Raises:
        HttpError: 403, the origin is not allowed.
    """
    origin = exchange.header(b"origin")
    if origin is None or exchange.scope["method"] in SAFE_METHODS or {"*", origin} & {*allowed}:
        return
    scheme, _, host = origin.lower().partition("://")
    is_own = host != "" and host == (exchange.header(b"host") or "").lower()
    server, _ = exchange.scope.get("server") or ("", None)
    may_be_rebound = not needs_key and scheme == "http" and _is_loopback(server) and _is_name(host)
    if is_own and not may_be_rebound:
        return
    shown = bounded_text(origin)
    allow = f"allow them with --allow-origin {shown} (allow_origins of an embedded app)"
    if origin == "null":
        allow = "serve the page over HTTP (--allow-origin null allows the sandboxed frames of any)"
    raise HttpError(
        403,
        f"pages of the origin {shown} may not send requests to this service: {allow}",
        code="origin_not_allowed",
    )


def _is_loopback(server: str) -> bool:
    try:
        return ip_address(server).is_loopback
    except ValueError:  # the path of a unix socket
        return False


def _is_name(host: str) -> bool:
    """Return whether DNS resolves a host, which may have a port."""
    name = re.sub(r":\d+$", "", host)
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return name != "localhost" and not name.endswith(".localhost")
    return False
