"""The command `stepgraph serve`: loads a model and serves it over HTTP until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn, TextIO

import uvicorn
import uvloop

from ....profiling.command_line import CommandParser
from ...config import EngineConfig
from ...errors import ConfigError, MemoryBudgetError, StepgraphError, StepPreparationError
from ...tools.memory_report import parse_bytes
from ..async_engine import AsyncEngine
from ..health import Phase
from ..metrics import EngineMetrics
from ..service_config import ServiceConfig
from ..tracing import trace_requests
from .app import app
from .config_flags import add_config_flags, config_of, flag_type
from .connection import LimitedConnection
from .listeners import listen_tcp, listen_unix, remove_socket

__all__ = ["main"]

MakeEngine = Callable[[str, EngineConfig, ServiceConfig], AsyncEngine]
API_KEY_VARIABLE = "STEPGRAPH_API_KEY"
PROGRAM = "stepgraph serve"
MAX_SECONDS = 1e9
KEEP_ALIVE_SECONDS = 75
"""Time that an idle connection stays open: longer than clients keep theirs in a pool."""
CLOSE_SECONDS = 5
"""Time for connections to end after the last request."""
TICK_SECONDS = 1
"""Time until a failure of the engine is noticed, and between updates of the header `date`."""
ENGINE_DEFAULTS = {"freeze_gc": True}
SERVICE_DEFAULTS = {"switch_interval": 1e-4}
"""Settings of the whole process, which belongs to this command."""
WITHOUT_FLAG = ("prompt_embeds", "encoder_cache_bytes")
"""What HTTP requests cannot use."""

REPORTED_ERRORS = (
    *(StepgraphError, MemoryBudgetError, StepPreparationError),
    *(OSError, ModuleNotFoundError),  # of the address, of an extra
)
"""Any other is a defect and keeps its traceback."""

_DESCRIPTION = """\
Serve a model over HTTP with the API of OpenAI.

%(prog)s demo
%(prog)s path/to/checkpoint --dtype bfloat16 --port 8000 --threads -1
curl localhost:8000/v1/completions -d '{"prompt": "def main(", "max_tokens": 32}'
"""
_EPILOG = """\
SIGTERM and SIGINT complete the requests in progress for up to --drain-timeout seconds; a second
signal aborts them. Exit status: 0 after that; 1 if the model cannot be loaded, the address cannot
be used or the engine fails; 2 for a wrong command line or configuration. See docs/serving.md
"""


def main(
    arguments: Sequence[str] | None = None,
    make_engine: MakeEngine = AsyncEngine.from_pretrained,
) -> int:
    """Run the command line; return the exit status. `make_engine` returns what is served."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        if bool(options.ssl_certfile) != bool(options.ssl_keyfile):
            parser.error("--ssl-certfile needs --ssl-keyfile, and the reverse: give both")
        engine = make_engine(
            options.model,
            config_of(EngineConfig, options, **ENGINE_DEFAULTS),
            config_of(ServiceConfig, options, **SERVICE_DEFAULTS),
        )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Command(options, engine).run())
    except REPORTED_ERRORS as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


class _Server(uvicorn.Server):
    """Reports signals and a failed engine, and leaves it to the command to stop."""

    def __init__(self, config: uvicorn.Config, engine: AsyncEngine) -> None:
        super().__init__(config)
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self.stopped = asyncio.Event()
        """A signal has arrived."""
        self.hurried = asyncio.Event()
        """A second signal has arrived."""
        self.failed = asyncio.Event()
        self.failure: str | None = None
        """Why the engine has failed."""
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """End `serve`."""
        self.should_exit = True
        self._stopping.set()

    async def main_loop(self) -> None:
        """Tick every second, not every 0.1 s as uvicorn does: an idle server uses no CPU."""
        tenths = 0  # what uvicorn counts
        while not await self.on_tick(tenths):
            tenths += 10
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), TICK_SECONDS)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._loop.call_soon_threadsafe(self._note_signal)

    def _note_signal(self) -> None:
        (self.hurried if self.stopped.is_set() else self.stopped).set()

    async def on_tick(self, counter: int) -> bool:
        health = self._engine.health()
        if health.phase is Phase.FAILED and not self.failed.is_set():
            self.failure = health.reason
            self.failed.set()
        return await super().on_tick(counter)


class _Command:
    """The life of the service: load, serve, drain, close."""

    def __init__(self, options: argparse.Namespace, engine: AsyncEngine) -> None:
        self._options = options
        self._engine = engine
        self._address = ""
        self._socket_file: os.stat_result | None = None

    async def run(self) -> int:
        """Return the exit status.

        Raises:
            StepgraphError: the model cannot be loaded.
            OSError: the address or a file of the certificate cannot be used.
        """
        server = _Server(self._uvicorn_config(), self._engine)
        serving = asyncio.create_task(server.serve([self._listen()]))
        try:
            await self._load(server, serving)
            _say(f"ready: {self._address}", sys.stdout)
            await _first(serving, server.stopped.wait(), server.failed.wait())
            if server.stopped.is_set():
                await self._drain(server)
        finally:
            await self._stop(server, serving)
            await self._engine.aclose()
        if server.failed.is_set():
            _say(f"error: the engine failed: {server.failure}")
            return 1
        return 0

    def _uvicorn_config(self) -> uvicorn.Config:
        options, engine = self._options, self._engine
        names = options.served_model_name or [options.model]
        if options.trace:
            trace_requests(engine, model_name=names[0])
        config = uvicorn.Config(
            app(
                engine,
                model_names=names,
                api_keys=options.api_key or _api_keys_of_environment(),
                max_body_bytes=options.max_body_bytes,
                allow_origins=options.allow_origin,
                metrics=EngineMetrics(
                    engine, model_name=names[0], vllm_names=options.vllm_metric_names
                ),
                tool_parser=options.tool_parser,
                reasoning_parser=options.reasoning_parser,
            ),
            http=LimitedConnection,
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

    def _listen(self) -> socket.socket:
        """Return the listening socket, and note its address."""
        options = self._options
        if options.uds:
            self._address = options.uds
            listener = listen_unix(options.uds)
            self._socket_file = os.lstat(options.uds)
            return listener
        listener = listen_tcp(options.host, options.port)
        scheme = "https" if options.ssl_certfile else "http"
        host = f"[{options.host}]" if ":" in options.host else options.host
        self._address = f"{scheme}://{host}:{listener.getsockname()[1]}"
        return listener

    async def _load(self, server: _Server, serving: asyncio.Task[None]) -> None:
        """Load the model while the socket answers. Exits with 0 if a signal arrives first."""
        _say(f"loading {self._options.model}; {self._address} answers /health and /ready")
        loading = asyncio.create_task(self._engine.__aenter__())
        await _first(serving, server.stopped.wait(), asyncio.wait({loading}))
        if not loading.done():
            await self._stop(server, serving)
            _exit_now(0)  # nothing can interrupt the load
        await loading

    async def _drain(self, server: _Server) -> None:
        """Complete the requests in progress; abort them after the timeout or a second signal."""
        seconds = self._options.drain_timeout
        _say(f"completing the requests in progress, for up to {seconds:g} s")
        drained = asyncio.create_task(self._engine.drain(seconds))
        hurried = asyncio.create_task(server.hurried.wait())
        tasks = {drained, hurried}
        await asyncio.wait(
            tasks, timeout=seconds + CLOSE_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if hurried.done():
            drained = asyncio.create_task(self._engine.drain(0))
            await asyncio.wait({drained}, timeout=CLOSE_SECONDS)
        hurried.cancel()
        if not drained.done():
            _say("error: a step does not end, and requests are lost")
            _exit_now(1)

    async def _stop(self, server: _Server, serving: asyncio.Task[None]) -> None:
        """End the HTTP server."""
        server.stop()
        await asyncio.wait({serving})
        if self._socket_file is not None:
            remove_socket(self._options.uds, self._socket_file)


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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _say(line: str, file: TextIO | None = None) -> None:
    print(f"{PROGRAM}: {line}", file=sys.stderr if file is None else file, flush=True)


def _api_keys_of_environment() -> list[str]:
    key = os.environ.get(API_KEY_VARIABLE)
    return [key] if key else []


def _parser() -> CommandParser:
    parser = CommandParser(
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        type=_non_empty,
        help="checkpoint directory, hub id, preset:NAME (random weights) or demo",
    )
    http = parser.add_argument_group("HTTP")
    http.add_argument(
        "--host",
        type=_non_empty,
        default="127.0.0.1",
        help="address to listen on, 0.0.0.0 for all (default: %(default)s)",
    )
    http.add_argument(
        "--port",
        type=flag_type(_port, "a port, 0 to 65535"),
        default=8000,
        metavar="N",
        help="TCP port, 0 for a free one (default: %(default)s)",
    )
    http.add_argument(
        "--uds", type=_non_empty, metavar="PATH", help="listen on a unix socket instead"
    )
    http.add_argument(
        "--api-key",
        nargs="+",
        type=_non_empty,
        metavar="KEY",
        help=f"keys that requests must present (default: {API_KEY_VARIABLE}; without it, none)",
    )
    http.add_argument(
        "--served-model-name",
        nargs="+",
        type=_non_empty,
        metavar="NAME",
        help="names that requests may give as model (default: MODEL as given here)",
    )
    http.add_argument(
        "--max-body-bytes",
        type=flag_type(parse_bytes, "a size such as 4MB"),
        default=4 << 20,
        metavar="SIZE",
        help="maximum size of the body of a request (default: 4MiB)",
    )
    http.add_argument(
        "--allow-origin",
        nargs="+",
        default=(),
        metavar="ORIGIN",
        help="origins whose web pages may call the service (CORS; default: none)",
    )
    http.add_argument(
        "--tool-parser",
        metavar="NAME",
        help="find tool calls in chats: hermes (also Qwen), llama3_json, or of an entry point",
    )
    http.add_argument(
        "--reasoning-parser",
        metavar="NAME",
        help="separate reasoning from answers in chats: think, or of an entry point",
    )
    http.add_argument(
        "--vllm-metric-names",
        action="store_true",
        help="repeat metrics under vLLM's names, for its dashboards",
    )
    http.add_argument(
        "--trace",
        action="store_true",
        help="make OpenTelemetry spans; run the command with opentelemetry-instrument",
    )
    http.add_argument("--ssl-certfile", metavar="FILE", help="certificate, for TLS")
    http.add_argument("--ssl-keyfile", metavar="FILE", help="private key of the certificate")
    http.add_argument(
        "--drain-timeout",
        type=flag_type(_seconds, "a number of seconds, 0 to 10^9"),
        default=30.0,
        metavar="SECONDS",
        help="time for requests in progress after SIGTERM (default: %(default)g)",
    )
    add_config_flags(
        parser.add_argument_group("service", "Fields of ServiceConfig."),
        ServiceConfig,
        defaults=SERVICE_DEFAULTS,
    )
    add_config_flags(
        parser.add_argument_group("engine", "Fields of EngineConfig."),
        EngineConfig,
        defaults=ENGINE_DEFAULTS,
        without=WITHOUT_FLAG,
    )
    return parser


def _non_empty(text: str) -> str:
    """Refuse what an unset variable of a shell gives: an empty host would be every address."""
    if not text:
        raise argparse.ArgumentTypeError("it is empty")
    return text


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port < 1 << 16:
        raise ValueError
    return port


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= MAX_SECONDS:
        raise ValueError
    return seconds
