"""The page at `/`: its files, the settings it shows, and a live view of the engine.

The files are static and load nothing from elsewhere. A strict Content-Security-Policy lets the
browser run no other script, whatever a model writes.
"""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
import time
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import OverloadedError
from ..health import Phase, ServiceSnapshot
from ..step_reader import Columns, StepReader
from .exchange import Exchange, Headers, event
from .generation import Operation, Service

FOLDER = Path(__file__).parents[1] / "page"
FILES: Mapping[str, Path] = {
    **{f"/page/{path.name}": path for path in FOLDER.glob("*.*")},
    "/": FOLDER / "index.html",
    "/favicon.ico": FOLDER / "icon.svg",
}
"""The files by their paths, which need no API key."""

_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self';"
    b" img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS: Headers = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),  # the ETag is compared each time
)

MAX_VIEWS = 32
"""Live views at a time."""
LIVE_SECONDS = 30.0
"""Time until a live view ends and its page asks for another one: servers that wait for responses
when they stop do not wait longer."""
PERIOD_SECONDS = 1.0
MAX_STEPS = 4096
"""Steps that one event describes, the last ones: copying more would delay the step thread."""

GAP_BOUNDS_MS = tuple(round(0.1 * 2 ** (number / 8), 4) for number in range(129))
"""Upper bounds of the buckets of inter-token latencies, 0.1 ms to 6.5 s."""

PHASES = ("plan", "launch", "device", "wait", "commit")
"""The parts of a step, in order; see `StepRecord`."""


async def send_file(service: Service, exchange: Exchange) -> None:
    """Respond with a file of the page."""
    path = FILES[exchange.path]
    data, tag = _read(path)
    headers = (*_HEADERS, (b"etag", tag))
    if exchange.header(b"if-none-match") == tag.decode():
        await exchange.start(304, headers)
        await exchange.send_events(b"", last=True)
        return
    kind = mimetypes.guess_type(path)[0] or "text/plain"
    await exchange.respond(data, content_type=kind.encode(), headers=headers)


@cache
def _read(path: Path) -> tuple[bytes, bytes]:
    """Return a file and its entity tag."""
    data = path.read_bytes()
    return data, b'"%b"' % hashlib.sha256(data).hexdigest()[:32].encode()


async def settings(service: Service, exchange: Exchange) -> None:
    """Respond with what the page shows of the service before the first request."""
    engine = service.engine
    await exchange.respond(
        {
            "models": service.model_names,
            "max_model_len": engine.max_model_len,
            "has_chat": bool(engine.tokenizer and engine.tokenizer.chat_templates),
            "defaults": asdict(engine.sampling_defaults),
            "gap_bounds_ms": GAP_BOUNDS_MS,
            "may_profile": service.admin,
        }
    )


async def live(service: Service, exchange: Exchange) -> None:
    """Send the state of the engine every second, as server-sent events.

    Ends after `LIVE_SECONDS`, and when the engine will serve no more requests.
    """
    views = service.live_views
    if len(views) >= MAX_VIEWS:
        raise OverloadedError(f"{MAX_VIEWS} live views are open", retry_after=LIVE_SECONDS)
    views.add(exchange)
    try:
        async with exchange.cancelled_on_disconnect():
            await exchange.start_stream()
            view = LiveView(service.engine.snapshot())
            began, last = time.monotonic(), exchange.scope["method"] == "HEAD"
            while True:
                state = service.engine.snapshot()
                last |= state.health.phase in (Phase.FAILED, Phase.CLOSED)
                last |= state.health.phase is Phase.DRAINING and not state.open_requests
                last |= time.monotonic() - began >= LIVE_SECONDS
                await exchange.send_events(event(view.update(state)), last=last)
                if last:
                    return
                await asyncio.sleep(PERIOD_SECONDS)
    finally:
        views.remove(exchange)


class LiveView:
    """Compares states of an engine. It has numbers only, of all requests together."""

    def __init__(self, state: ServiceSnapshot) -> None:
        """Begin at a state."""
        self._began, self._counters = time.monotonic(), state.counters
        self._steps = StepReader()
        self._steps.read(state.timeline, 0)
        self._last_step = self._ended_ns = -2  # its number, and its end

    def update(self, state: ServiceSnapshot) -> dict[str, Any]:
        """Return an event of the live view.

        Returns:
            `phase` and `ready` of `Health`; `gauges`, present values; and what happened in the
            `seconds` since the last event: `counts`, by how much each counter of `EngineCounters`
            has grown; `gaps`, pairs of a bucket of `GAP_BOUNDS_MS` and how often a row waited that
            long for its next tokens; `steps` by kind.
        """
        began, before = self._began, self._counters
        self._began, self._counters = time.monotonic(), state.counters
        columns = self._steps.read(state.timeline, MAX_STEPS)
        gauges = {} if state.gauges is None else state.gauges._asdict()
        queue = {"queued_requests": state.queued_requests, "queued_tokens": state.queued_tokens}
        return {
            "phase": state.health.phase.value,
            "ready": state.health.ready,
            "seconds": self._began - began,
            "gauges": gauges | queue,
            "counts": {
                name: value - getattr(before, name)
                for name, value in state.counters._asdict().items()
                if isinstance(value, int)
            },
            "gaps": self._gaps(columns),
            "steps": _step_times(columns),
        }

    def _gaps(self, column: Columns) -> list[tuple[int, int]]:
        """Return the inter-token latencies: a decoding row had its last token a step before."""
        steps, ended_ns = column["step"], column["started_ns"] + column["taken_ns"]
        if not len(steps):
            return []
        follows = np.diff(steps, prepend=self._last_step) == 1  # no step is missing before it
        gap_ms = np.diff(ended_ns, prepend=self._ended_ns) / 1e6
        self._last_step, self._ended_ns = int(steps[-1]), int(ended_ns[-1])
        buckets = np.searchsorted(GAP_BOUNDS_MS, gap_ms)
        counts = np.bincount(buckets, weights=column["rows"] * follows)
        return [(int(bucket), int(counts[bucket])) for bucket in np.flatnonzero(counts)]


def _step_times(column: Columns) -> dict[str, dict[str, float]]:
    """Return the number of steps of each kind, their rows and tokens, and milliseconds by phase."""
    decodes, prefills = column["rows"] > 0, column["prefill_tokens"] > 0
    kinds = {
        "decode": decodes & ~prefills,
        "prefill": prefills & ~decodes,
        "decode + prefill": decodes & prefills,
    }
    return {
        kind: {
            "steps": int(chosen.sum()),
            "rows": int(column["rows"][chosen].sum()),
            "prefill_tokens": int(column["prefill_tokens"][chosen].sum()),
            **{name: int(column[f"{name}_ns"][chosen].clip(0).sum()) / 1e6 for name in PHASES},
        }
        for kind, chosen in kinds.items()
        if chosen.any()
    }


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    **{("GET", path): Operation(send_file, None) for path in FILES},
    ("GET", "/page/settings"): Operation(settings, None),
    ("GET", "/live"): Operation(live, None),
}
"""They may change with the page, and are not a part of the API."""
