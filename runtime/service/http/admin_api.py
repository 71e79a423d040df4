"""Endpoints for operators: profiles, the timeline, load, the prefix cache, sleep.

Names are vLLM's where it has the endpoint.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from ....profiling.report import Operation as OperationTimes
from ....profiling.report import read_report
from ....profiling.timeline import StepRecord
from ....profiling.trace import timeline_trace
from ..health import Phase
from ..profiler import Profile
from .exchange import Exchange, encode
from .generation import Operation, Service


class ProfileQuery(msgspec.Struct):
    """The time after which a profile ends, unless `/stop_profile` ends it."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=600)] = 10.0


async def start_profile(service: Service, exchange: Exchange) -> None:
    """Record the next steps, and respond with the file that will have them."""
    seconds = exchange.query(ProfileQuery).seconds
    await exchange.respond(await service.profiler.start(seconds))


class StopQuery(msgspec.Struct):
    """Whether `/stop_profile` returns the time of each operation; for profiles of a few seconds."""

    report: bool = False


class EndedProfile(msgspec.Struct, omit_defaults=True):
    """The response of `/stop_profile`."""

    path: str | None  # as of `Profile`
    operations: list[OperationTimes] | None = None  # with `report`, by phase


async def stop_profile(service: Service, exchange: Exchange) -> None:
    """End the profile, and respond once its file is written."""
    reports = exchange.query(StopQuery).report
    profile = EndedProfile((await service.profiler.stop()).path)
    if reports and profile.path is not None:
        report = await asyncio.to_thread(read_report, Path(profile.path))
        profile.operations = report.operations
    await exchange.respond(profile)


class TimelineQuery(msgspec.Struct):
    """What `/timeline` returns: how many steps, in which format."""

    steps: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)] = 1000
    format: Literal["json", "perfetto"] = "json"


class Steps(msgspec.Struct):
    """The response of `/timeline`: the last steps, and now on both clocks, in nanoseconds."""

    clock_ns: int  # as `started_ns`
    unix_ns: int
    steps: list[StepRecord]


async def timeline(service: Service, exchange: Exchange) -> None:
    """Respond with the times of the last steps, as records or as a trace for Perfetto."""
    query = exchange.query(TimelineQuery)
    kept = service.engine.snapshot().timeline

    def body() -> bytes:
        records = [] if kept is None else kept.last(query.steps)
        if query.format == "perfetto":
            return encode(timeline_trace(records))
        return encode(Steps(time.perf_counter_ns(), time.time_ns(), records))

    encoded = await asyncio.to_thread(body)
    await exchange.respond(encoded, content_type=b"application/json")


class Load(msgspec.Struct):
    """The response of `/load`."""

    server_load: int  # requests that have not ended
    running: int  # completions that have a row
    waiting: int  # completions of the engine that wait for a row
    queued: int  # requests that wait before, those being tokenised included
    queued_tokens: int  # their prompt tokens
    kv_cache_usage: float  # share of the cache that requests hold, 0 to 1


async def load(service: Service, exchange: Exchange) -> None:
    """Respond with the requests and the use of the cache at this moment."""
    state = service.engine.snapshot()
    running, waiting, usage = 0, 0, 0.0
    if (gauges := state.gauges) is not None:
        running, waiting = gauges.running, gauges.waiting
        usage = gauges.held_blocks / gauges.usable_blocks
    queue = state.queued_requests, state.queued_tokens
    await exchange.respond(Load(state.open_requests, running, waiting, *queue, usage))


async def reset_prefix_cache(service: Service, exchange: Exchange) -> None:
    """Drop the prefix cache, and respond as `/load`."""
    await service.engine.reset_prefix_cache()
    await load(service, exchange)


class TokenizerInfo(msgspec.Struct):
    """The response of `/tokenizer_info`."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    added_tokens: dict[str, int]
    chat_template: str | None
    chat_templates: dict[str, str]


async def tokenizer_info(service: Service, exchange: Exchange) -> None:
    """Respond with the tokens and the chat templates of the tokenizer."""
    found = service.tokenizer(None)
    templates = found.chat_templates
    info = (found.vocab_size, found.eos_token_ids, found.added_tokens)
    await exchange.respond(TokenizerInfo(*info, templates.get("default"), templates))


class SleepQuery(msgspec.Struct):
    """The seconds after which `/sleep` aborts the requests that are left; None: never."""

    timeout: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None


class Sleeping(msgspec.Struct):
    """Whether the engine has given back its memory."""

    is_sleeping: bool


async def sleep(service: Service, exchange: Exchange) -> None:
    """Complete the requests in progress, at most `timeout` seconds, and free the memory."""
    await service.engine.sleep(exchange.query(SleepQuery).timeout)
    await is_sleeping(service, exchange)


async def wake_up(service: Service, exchange: Exchange) -> None:
    """Load the model again after `/sleep`, and serve."""
    await service.engine.wake()
    await is_sleeping(service, exchange)


async def is_sleeping(service: Service, exchange: Exchange) -> None:
    """Respond with whether the engine sleeps."""
    await exchange.respond(Sleeping(service.engine.health().phase is Phase.ASLEEP))


OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("POST", "/start_profile"): Operation(start_profile, Profile, query=ProfileQuery, admin=True),
    ("POST", "/stop_profile"): Operation(stop_profile, EndedProfile, query=StopQuery, admin=True),
    ("GET", "/timeline"): Operation(timeline, Steps, query=TimelineQuery, admin=True),
    ("POST", "/reset_prefix_cache"): Operation(reset_prefix_cache, Load, admin=True),
    ("GET", "/load"): Operation(load, Load),
    ("GET", "/tokenizer_info"): Operation(tokenizer_info, TokenizerInfo),
    ("POST", "/sleep"): Operation(sleep, Sleeping, query=SleepQuery, admin=True),
    ("POST", "/wake_up"): Operation(wake_up, Sleeping, admin=True),
    ("GET", "/is_sleeping"): Operation(is_sleeping, Sleeping),
}
