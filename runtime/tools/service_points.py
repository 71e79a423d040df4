"""The most requests that a replica serves within latency objectives, and what limits them.

Requests arrive at random; the lengths of prompts and answers have a standard deviation as large as
their mean. A replica either prefills between its decode steps (mixed) or gets the keys and values
of each prompt from a prefill replica (separate).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from .replica_model import Replica

__all__ = ["Host", "Point", "Service", "best_mixed", "best_separate", "queueing_seconds"]

_ROWS = sorted({round(2 ** (power / 4)) for power in range(45)})
_CHUNKS = [2**power for power in range(5, 14)]


class Service(NamedTuple):
    """Requests, and the objectives for 99 % of them."""

    prompt: int
    """Mean tokens of a prompt."""
    output: int
    """Mean tokens of an answer."""
    ttft_seconds: float
    itl_seconds: float

    @property
    def context(self) -> int:
        """Mean tokens of a row that decodes."""
        return self.prompt + self.output // 2


class Host(NamedTuple):
    """CPU seconds of the process of a replica, and its network."""

    step: float = 10e-6
    """Of a step (docs/results/cpu-2x-zen5/host.json, p50)."""
    row: float = 1.35e-6
    """Of a row of a step (the same)."""
    token: float = 40e-6
    """Of the path of a token to a socket (docs/results/cpu-2x-zen4/serve-cost.json, 64 streams)."""
    network_bytes_per_s: float = 50e9
    """Of the network interface of each GPU: 400 Gb/s, assumed."""

    def plan_seconds(self, rows: int) -> float:
        """Return the time until the next step can be launched."""
        return self.step + rows * self.row


class Point(NamedTuple):
    """A replica, or a prefill and a decode replica, at a load."""

    gpu_requests_per_s: float
    """Requests per second and GPU."""
    rows: int
    """That decode on a replica."""
    chunk: int
    """Prompt tokens of a prefill step; 0: a whole prompt, on another replica."""
    prefill_gpus: float
    """Share of the GPUs that only prefill."""
    ttft_seconds: float
    """99th percentile."""
    itl_seconds: float
    """Of the longest steps, those with a chunk."""
    limits: dict[str, float]
    """Used share of what bounds the number of rows; 1.0 is the bound."""
    used: dict[str, float]
    """Busy share of each part of a GPU, and of the network of a prefill GPU."""
    exceeded: str = ""
    """The bound that more rows would exceed."""

    @property
    def fits(self) -> bool:
        """Whether all bounds hold."""
        return max(self.limits.values()) <= 1


def queueing_seconds(load: float, service_seconds: float) -> float:
    """Return the 99th percentile of the wait in a queue with one server and random arrivals.

    The mean wait is that of Pollaczek and Khinchine for service times whose standard deviation is
    their mean. A share `load` of the requests waits, and their waits are taken as exponential.
    """
    if load >= 1:
        return math.inf
    return max(0.0, service_seconds / (1 - load) * math.log(100 * load)) if load > 0 else 0.0


def best_mixed(replica: Replica, service: Service, host: Host) -> Point | None:
    """Return the point with the most requests of a replica that prefills; None if none fits.

    A step decodes B rows, of which B / output end on average. So B * prompt / (output * chunk) of
    the steps also have a chunk of prompts, whose time comes on top.
    """
    points = []
    for chunk in (chunk for chunk in _CHUNKS if chunk < 2 * service.prompt):
        part = replica.prefill(chunk, max(service.prompt - chunk, 0) // 2)
        for rows in _ROWS:
            chunks = rows * service.prompt / (service.output * chunk)
            decode = replica.decode(rows, service.context)
            step = max(decode.total, host.plan_seconds(rows))
            mean, longest = step + chunks * part.total, step + part.total
            prefill = max(1.0, service.prompt / chunk) * longest
            wait = queueing_seconds(chunks * longest / mean, prefill) if chunks < 1 else math.inf
            limits = _limits(replica, service, host, rows, mean, longest, wait + prefill)
            used = {
                "memory": (decode.memory + chunks * part.memory) / mean,
                "FLOPs": (decode.compute + chunks * part.compute) / mean,
                "link": (decode.link + chunks * part.link) / mean,
            }
            rate = rows / (service.output * mean) / replica.ranks
            points.append(Point(rate, rows, chunk, 0.0, wait + prefill, longest, limits, used))
    return _best(points)


def best_separate(prefill: Replica, decode: Replica, service: Service, host: Host) -> Point | None:
    """Return the point with the most requests where replicas prefill or decode; None if none fits.

    Both kinds serve the same rate. A request waits for its prefill and for the transfer of its keys
    and values, of which each rank sends its own.
    """
    part = prefill.prefill(service.prompt, 0)
    transfer = service.prompt * prefill.kv_bytes / host.network_bytes_per_s
    spare = service.ttft_seconds - part.total - transfer
    loads = (load / 100 for load in range(99, 0, -1))
    load = next((load for load in loads if queueing_seconds(load, part.total) <= spare), None)
    if load is None or prefill.cached_tokens < service.prompt:
        return None
    ttft = queueing_seconds(load, part.total) + part.total + transfer
    prefill_gpus = prefill.ranks * part.total / load  # for each request per second
    points = []
    for rows in _ROWS:
        parts = decode.decode(rows, service.context)
        itl = max(parts.total, host.plan_seconds(rows))
        decode_gpus = decode.ranks * service.output * itl / rows
        share = prefill_gpus / (prefill_gpus + decode_gpus)
        used = {
            "memory": share * load * part.memory / part.total + (1 - share) * parts.memory / itl,
            "FLOPs": share * load * part.compute / part.total + (1 - share) * parts.compute / itl,
            "link": share * load * part.link / part.total + (1 - share) * parts.link / itl,
            "network": load * transfer / part.total,
        }
        limits = _limits(decode, service, host, rows, itl, itl, ttft)
        rate = 1 / (prefill_gpus + decode_gpus)
        points.append(Point(rate, rows, 0, share, ttft, itl, limits, used))
    return _best(points)


def _limits(
    replica: Replica,
    service: Service,
    host: Host,
    rows: int,
    step: float,
    itl: float,
    ttft: float,
) -> dict[str, float]:
    tokens = rows * (service.prompt + service.output)
    room = replica.cached_tokens
    return {
        "ITL": itl / service.itl_seconds,
        "TTFT": ttft / service.ttft_seconds,
        "KV capacity": tokens / room if room > 0 else math.inf,
        "host CPU": (host.plan_seconds(rows) + rows * host.token) / step,
    }


def _best(points: Iterable[Point]) -> Point | None:
    """Return the point that fits and has the highest rate, with the bound that the next exceeds."""
    points = list(points)
    best = max(
        (point for point in points if point.fits),
        key=lambda point: point.gpu_requests_per_s,
        default=None,
    )
    if best is None:
        return None
    more = (p for p in points if p.chunk == best.chunk and p.rows > best.rows and not p.fits)
    after = next(more, best)
    return best._replace(exceeded=max(after.limits, key=lambda name: after.limits[name]))
