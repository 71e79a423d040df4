"""Which web pages may send requests: against forged requests (CSRF) and DNS rebinding."""

from __future__ import annotations

import re
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address, ip_address

from ...bounded_repr import bounded_text
from .exchange import Exchange, HttpError

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing. Pages of other origins cannot read their responses, except a page
whose name was rebound: its requests have no `Origin`."""


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
    address, name = _address(server), re.sub(r":\d+$", "", host)
    is_loopback = address is not None and address.is_loopback
    is_resolved = _address(name) is None and name.rpartition(".")[2] != "localhost"  # by DNS
    may_be_rebound = not needs_key and scheme == "http" and is_loopback and is_resolved
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


def _address(host: str) -> IPv4Address | IPv6Address | None:
    """Return the address that a host is; None for a name, and the path of a unix socket."""
    try:
        return ip_address(host.strip("[]"))
    except ValueError:
        return None
