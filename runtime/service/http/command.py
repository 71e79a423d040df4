"""The command line of `stepgraph serve`: its flags, its log on stderr, and signals.

Imports neither torch nor the libraries of the server.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from ....profiling.command_line import CommandParser
from ...arguments import check_number
from ...config import EngineConfig
from ...errors import ConfigError
from ...tools.arguments import (
    MODEL_HELP,
    add_config_flags,
    config_of,
    flag_type,
    in_flags,
    integer,
    non_empty,
    parse_bytes,
)
from ..service_config import ServiceConfig

API_KEY_VARIABLE = "STEPGRAPH_API_KEY"
OTHER_VARIABLES = ("COMMIT", "KERNEL_DIR", "QUIET", "STARTED_NSYS")
"""Variables `STEPGRAPH_...` that are read elsewhere."""
PROGRAM = "stepgraph serve"
LOG_LEVELS = ("debug", "info", "warning", "error")
ENGINE_DEFAULTS: dict[str, Any] = {"freeze_gc": True}
SERVICE_DEFAULTS: dict[str, Any] = {"switch_interval": 1e-4}
"""Settings of the whole process, which belongs to this command."""
WITHOUT_FLAG = ("prompt_embeds",)
"""What HTTP requests cannot use."""

_DESCRIPTION = """\
Serve a model over HTTP: a page at /, and the APIs of OpenAI, Anthropic and Ollama.

%(prog)s demo
%(prog)s path/to/checkpoint --dtype bfloat16 --port 8000 --threads -1
curl localhost:8000/v1/completions -d '{"prompt": "def main(", "max_tokens": 32}'
"""
_EPILOG = """\
SIGTERM and SIGINT complete the requests in progress for up to --drain-timeout seconds; a second
signal aborts them. Exit status: 0 after that; 143 and 130 if the signal arrives before the model is
loaded; 1 if the model cannot be loaded, the address cannot be used or the engine fails; 2 for a
wrong command line or configuration. See docs/serving.md
"""
ACCESS_LOG = "stepgraph.access"
"""Name of the logger with a record for each request."""

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

Serve = Callable[[argparse.Namespace, EngineConfig, ServiceConfig], int]


def run(arguments: Sequence[str] | None, serve: Serve) -> int:
    """Check a command line, then serve. Until `serve` handles signals, they end the process."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if bool(options.ssl_certfile) != bool(options.ssl_keyfile):
        parser.error("--ssl-certfile needs --ssl-keyfile, and the reverse: give both")
    try:
        engine_config = config_of(EngineConfig, options, **ENGINE_DEFAULTS)
        service_config = config_of(ServiceConfig, options, **SERVICE_DEFAULTS)
    except ConfigError as error:
        parser.error(in_flags(error))
    with _ends_at_signals(), logs_to_stderr(options.log_level, access=options.access_log):
        return serve(options, engine_config, service_config)


@contextmanager
def _ends_at_signals() -> Iterator[None]:
    """End the process at a signal, not by an exception, which an import or a library may catch."""

    def end(number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        os.write(2, f"{PROGRAM}: ended by {name}\n".encode())
        os._exit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def logs_to_stderr(level: str, *, access: bool) -> Iterator[None]:
    """Show records of `stepgraph` from a level on, and warnings of all other libraries."""
    root, own = logging.getLogger(), logging.getLogger("stepgraph")
    uvicorn, requests = logging.getLogger("uvicorn"), logging.getLogger(ACCESS_LOG)
    loggers = (own, uvicorn, requests)
    before = [logger.level for logger in loggers]
    handler = _Handler()
    formatter = logging.Formatter(_FORMAT)
    formatter.default_msec_format = "%s.%03d"
    handler.setFormatter(formatter)
    root.addHandler(handler)
    own.setLevel(level.upper())
    uvicorn.setLevel(logging.DEBUG if level == "debug" else logging.WARNING)
    if not access:
        requests.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # Fallbacks are logged too.
        warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"stepgraph\.")
        logging.captureWarnings(True)
        try:
            yield
        finally:
            logging.captureWarnings(False)
            for logger, previous in zip(loggers, before, strict=True):
                logger.setLevel(previous)
            root.removeHandler(handler)


class _Handler(logging.StreamHandler[Any]):
    """Writes to the `sys.stderr` of the moment: a progress bar replaces it while it is drawn."""

    stream = property(lambda self: sys.stderr, lambda self, stream: None)


def make_parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        config_file=True,
        other_variables=OTHER_VARIABLES,
        prog=PROGRAM,
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=non_empty, help=MODEL_HELP)
    http = parser.add_argument_group("HTTP")
    text = partial(http.add_argument, type=non_empty)
    shown = "(default: %(default)s)"
    text("--host", default="127.0.0.1", help=f"address to listen on, 0.0.0.0 for all {shown}")
    port = integer(0, 65535)
    http.add_argument(
        "--port", type=port, default=8000, metavar="N", help=f"TCP port, 0 for a free one {shown}"
    )
    text("--uds", metavar="PATH", help="listen on a unix socket instead")
    keys = f"keys that requests must present (default: {API_KEY_VARIABLE}; without it, none)"
    text("--api-key", nargs="+", metavar="KEY", help=keys)
    names = "names that requests may give as model (default: MODEL as given here)"
    text("--served-model-name", nargs="+", metavar="NAME", help=names)
    http.add_argument(
        "--max-body-bytes",
        type=flag_type(parse_bytes, "a size such as 4MB"),
        default=4 << 20,
        metavar="SIZE",
        help="maximum size of the body of a request (default: 4MiB)",
    )
    origins = "other origins whose web pages may call the service (CORS; default: none)"
    text("--allow-origin", nargs="+", default=(), metavar="ORIGIN", help=origins)
    auto = "auto (by the chat template, default), none, or a name in docs/serving.md"
    for kind, finds in (("tool", "tool calls of chats"), ("reasoning", "reasoning before answers")):
        text(f"--{kind}-parser", default="auto", metavar="NAME", help=f"format of {finds}: {auto}")
    # With --no-..., which turns off what a configuration file has turned on.
    flag = partial(http.add_argument, action=argparse.BooleanOptionalAction)
    flag("--page", default=True, help="serve a page with a chat at / (default: yes)")
    flag("--vllm-metric-names", help="repeat metrics under vLLM's names, for its dashboards")
    flag("--trace", help="make OpenTelemetry spans; run with opentelemetry-instrument")
    flag("--admin", help="let clients profile, reset the prefix cache and put the engine to sleep")
    traces = "folder for traces of POST /start_profile (default: a temporary one)"
    http.add_argument("--profile-dir", type=Path, metavar="DIR", help=traces)
    text("--ssl-certfile", metavar="FILE", help="certificate, for TLS")
    text("--ssl-keyfile", metavar="FILE", help="private key of the certificate")

    def seconds(text: str) -> float:
        return check_number("drain_timeout", float(text), 0, 1e9)

    http.add_argument(
        "--drain-timeout",
        type=flag_type(seconds, "a number of seconds, 0 to 10^9"),
        default=30.0,
        metavar="SECONDS",
        help="time for requests in progress after SIGTERM (default: %(default)g)",
    )
    log = parser.add_argument_group("log", "Lines on stderr.")
    level = f"least severe messages that are shown {shown}"
    log.add_argument("--log-level", choices=LOG_LEVELS, default="info", help=level)
    log.add_argument(
        "--access-log",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="a line for each request (default: yes)",
    )
    service = parser.add_argument_group("service", "Fields of ServiceConfig.")
    add_config_flags(service, ServiceConfig, defaults=SERVICE_DEFAULTS)
    engine = parser.add_argument_group("engine", "Fields of EngineConfig.")
    add_config_flags(engine, EngineConfig, defaults=ENGINE_DEFAULTS, without=WITHOUT_FLAG)
    return parser


def api_keys_of_environment() -> list[str]:
    """Return the key in `API_KEY_VARIABLE`, if there is one."""
    key = os.environ.get(API_KEY_VARIABLE)
    return [key] if key else []
