"""The server of `stepgraph serve`: loads a model and serves it until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import os
import signal
import socket
import stat
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn, TextIO

import uvicorn
import uvloop

from ...config import EngineConfig
from ...errors import ConfigError, MemoryBudgetError, StepgraphError, StepPreparationError
from ...tools.arguments import in_flags
from ..async_engine import AsyncEngine
from ..health import Phase, ServiceSnapshot
from ..metrics import EngineMetrics
from ..service_config import ServiceConfig
from ..tracing import trace_requests
from .app import app
from .command import PROGRAM
from .connection import LimitedConnection
from .output_parsers import chosen_parsers

logger = logging.getLogger("stepgraph.serve")

KEEP_ALIVE_SECONDS = 75
"""Time that an idle connection stays open: longer than clients keep theirs in a pool."""
CLOSE_SECONDS = 5
"""Time for connections to end after the last request."""
HURRY_SECONDS = 1
"""The same after a second signal, and the time for requests to be aborted."""
TICK_SECONDS = 1
"""Time until a failure of the engine is noticed, and between updates of the header `date`."""

BACKLOG = 2048
SOCKET_MODE = 0o666
"""Every user may connect; the directory of the file restricts access."""
LOG_SECONDS = 10.0
"""Time between two records of the throughput."""

REPORTED_ERRORS = (
    *(StepgraphError, MemoryBudgetError, StepPreparationError),
    *(OSError, ModuleNotFoundError),  # of the address, of an extra
)
"""Any other is a defect and keeps its traceback."""


def serve(options: argparse.Namespace, config: EngineConfig, service_config: ServiceConfig) -> int:
    """Serve until a signal or a failure; return the exit status."""
    try:
        engine = AsyncEngine.from_pretrained(options.model, config, service_config, progress=True)

        async def run() -> int:
            return await _Server(options, engine).run_until_stopped()

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run())
    except REPORTED_ERRORS as error:
        _say(f"error: {in_flags(error)}")
        return 2 if isinstance(error, ConfigError) else 1


class ThroughputLog:
    """Compares the counters of an engine with the last ones."""

    def __init__(
        self, snapshot: Callable[[], ServiceSnapshot], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Count from now on; `clock` returns seconds."""
        self._snapshot = snapshot
        self._clock = clock
        self._counted = snapshot().counters
        self._began = clock()

    def tick(self) -> None:
        """Log the throughput since the last record, if that is due. Call it about every second."""
        now = self._clock()
        seconds = now - self._began
        if seconds < LOG_SECONDS:
            return
        state, before = self._snapshot(), self._counted
        self._counted, self._began = state.counters, now
        prompt = state.counters.prompt_tokens - before.prompt_tokens
        output = state.counters.output_tokens - before.output_tokens
        if state.gauges is None or not (prompt or output or state.open_requests):
            return
        gauges = state.gauges
        logger.info(
            "%d running, %d waiting; %.1f prompt and %.1f output tokens/s; %.1f %% of the KV cache"
            " in use",
            gauges.running,
            gauges.waiting + state.queued_requests,
            prompt / seconds,
            output / seconds,
            100 * gauges.held_blocks / gauges.usable_blocks,
        )


class _Server(uvicorn.Server):
    """The life of the service: load, serve, drain, close."""

    def __init__(self, options: argparse.Namespace, engine: AsyncEngine) -> None:
        super().__init__(_uvicorn_config(options, engine))
        self._options = options
        self._engine = engine
        self._address = ""
        self._loop = asyncio.get_running_loop()
        self._throughput = ThroughputLog(engine.snapshot)
        self._signal = signal.SIGTERM  # the first one that arrived
        self._stopped, self._hurried = asyncio.Event(), asyncio.Event()  # by one, or a second one
        self._failed, self._stopping = asyncio.Event(), asyncio.Event()
        self._failure: str | None = None  # why the engine has failed

    async def main_loop(self) -> None:
        """Tick every second, not every 0.1 s as uvicorn does: an idle server uses no CPU."""
        tenths = 0  # what uvicorn counts
        while not await self.on_tick(tenths):
            tenths += 10
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), TICK_SECONDS)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._note_signal, sig)

    def _note_signal(self, number: int) -> None:
        if self._stopped.is_set():
            self._hurried.set()
            self.force_exit = self.should_exit  # of clients that keep their connections
        else:
            self._signal = signal.Signals(number)
            self._stopped.set()

    async def on_tick(self, counter: int) -> bool:
        health = self._engine.health()
        if health.phase is Phase.FAILED and not self._failed.is_set():
            self._failure = health.reason
            self._failed.set()
        self._throughput.tick()
        return await super().on_tick(counter)

    async def run_until_stopped(self) -> int:
        """Return the exit status, or raise one of `REPORTED_ERRORS`."""
        serving = asyncio.create_task(self.serve([self._listen()]))
        try:
            await self._load(serving)
            options = self._options
            names = options.tool_parser, options.reasoning_parser
            chosen = chosen_parsers(self._engine.tokenizer, *names)
            logger.info(
                "tool parser: %s; reasoning parser: %s", *(each or "none" for each in chosen)
            )
            logger.info("serving %s at %s", options.model, self._address)
            _say(f"ready: {self._address}", sys.stdout)
            await _first(serving, self._stopped.wait(), self._failed.wait())
            if self._stopped.is_set():
                await self._drain()
        finally:
            await self._stop(serving)
            await self._engine.aclose()
        if self._failed.is_set():
            _say(f"error: the engine failed: {self._failure}")
            return 1
        return 0

    def _listen(self) -> socket.socket:
        """Return the listening socket, and note its address."""
        options = self._options
        if options.uds:
            self._address = options.uds
            return listen_unix(options.uds)
        listener = listen_tcp(options.host, options.port)
        scheme = "https" if options.ssl_certfile else "http"
        host = f"[{options.host}]" if ":" in options.host else options.host
        self._address = f"{scheme}://{host}:{listener.getsockname()[1]}"
        return listener

    async def _load(self, serving: asyncio.Task[None]) -> None:
        """Load the model while the socket answers. Ends the process if a signal arrives first."""
        _say(f"loading {self._options.model}; {self._address} answers /health and /ready")
        loading = asyncio.create_task(self._engine.__aenter__())
        await _first(serving, self._stopped.wait(), asyncio.wait({loading}))
        if not loading.done():
            _say(f"ended by {self._signal.name} while the model was loading")
            await self._stop(serving)
            _exit_now(128 + self._signal)  # nothing can interrupt the load
        await loading

    async def _drain(self) -> None:
        """Complete the requests in progress; abort them after the timeout or a second signal."""
        seconds = self._options.drain_timeout
        num_open = self._engine.snapshot().open_requests
        again = "press Ctrl-C again" if self._signal == signal.SIGINT else "signal again"
        _say(f"finishing {_requests(num_open)}, for up to {seconds:g} s; {again} to end now")
        drained = asyncio.create_task(self._engine.drain(seconds))
        hurried = asyncio.create_task(self._hurried.wait())
        tasks = {drained, hurried}
        await asyncio.wait(
            tasks, timeout=seconds + CLOSE_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if hurried.done():
            _say(f"aborting {_requests(self._engine.snapshot().open_requests)}")
            self.config.timeout_graceful_shutdown = HURRY_SECONDS
            drained = asyncio.create_task(self._engine.drain(0))
            await asyncio.wait({drained}, timeout=HURRY_SECONDS)
        hurried.cancel()
        if not drained.done():
            _say("error: a step does not end, and requests are lost")
            _exit_now(1)

    async def _stop(self, serving: asyncio.Task[None]) -> None:
        """End the HTTP server."""
        if self._options.uds:
            with suppress(OSError):
                os.unlink(self._options.uds)  # before another process may replace it
        self.should_exit = True
        self._stopping.set()
        await asyncio.wait({serving})


def _uvicorn_config(options: argparse.Namespace, engine: AsyncEngine) -> uvicorn.Config:
    """Return the configuration of the HTTP server, or raise `OSError` for its certificate."""
    names = options.served_model_name or [options.model]
    metrics = EngineMetrics(engine, model_name=names[0], vllm_names=options.vllm_metric_names)
    if options.trace:
        trace_requests(engine, model_name=names[0])
    config = uvicorn.Config(
        app(
            engine,
            model_names=names,
            api_keys=options.api_key or (),
            max_body_bytes=options.max_body_bytes,
            allow_origins=options.allow_origin,
            metrics=metrics,
            tool_parser=options.tool_parser,
            reasoning_parser=options.reasoning_parser,
            page=options.page,
            admin=bool(options.admin),
            profile_dir=options.profile_dir,
        ),
        http=partial(  # type: ignore[arg-type]  # uvicorn calls it like a class
            LimitedConnection, send_timeout=engine.config.send_timeout
        ),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )
    try:
        config.load()  # reads the certificate
    except OSError as error:  # also SSLError
        raise OSError(
            f"--ssl-certfile {options.ssl_certfile} and --ssl-keyfile {options.ssl_keyfile}"
            f" cannot be used ({error.strerror or error}): both must be PEM files"
        ) from error
    return config


def listen_tcp(host: str, port: int) -> socket.socket:
    """Return a socket that listens on a TCP port, 0 for a free one."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        number = error.errno or 0  # negative if the name is unknown
        reason = os.strerror(number) if number > 0 else error.strerror
        raise OSError(
            f"cannot listen on {host} port {port} ({reason}): choose another --host or --port"
        ) from error


def listen_unix(path: str) -> socket.socket:
    """Return a unix socket that listens at a path; one that a process left there is replaced."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        with suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.lstat(path).st_mode):
                raise FileExistsError("it exists and is not a socket")
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(path) != errno.ECONNREFUSED:
                    raise FileExistsError("another process listens there")
            os.unlink(path)
        # Requests over this socket have its name, and a host has no slash.
        listener.bind(os.path.join(os.curdir, path))
        os.chmod(path, SOCKET_MODE)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = error.strerror or str(error)
        raise OSError(f"cannot listen on --uds {path} ({reason}): choose another path") from error
    return listener


async def _first(serving: asyncio.Task[None], *events: Coroutine[Any, Any, object]) -> None:
    """Wait for any of the events; raise the error of a server that has ended instead."""
    tasks = [asyncio.create_task(event) for event in events]
    await asyncio.wait({serving, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    if serving.done():
        serving.result()


def _exit_now(status: int) -> NoReturn:
    """End the process without waiting for the step thread."""
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # shows the cursor, which a progress bar has hidden
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _say(line: str, file: TextIO | None = None) -> None:
    print(f"{PROGRAM}: {line}", file=sys.stderr if file is None else file, flush=True)


def _requests(number: int) -> str:
    return "1 request" if number == 1 else f"{number} requests"
