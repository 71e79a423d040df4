"""The command line of `stepgraph serve`. Imports neither torch nor the libraries of the server."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from ...config import EngineConfig
from ...errors import ConfigError
from ..service_config import ServiceConfig
from .config_flags import config_of, in_flags
from .server_flags import ENGINE_DEFAULTS, PROGRAM, SERVICE_DEFAULTS, make_parser
from .stderr_log import logs_to_stderr

__all__ = ["Serve", "run"]

Serve = Callable[[argparse.Namespace, EngineConfig, ServiceConfig], int]


def run(arguments: Sequence[str] | None, serve: Serve) -> int:
    """Check a command line, then serve; return the exit status.

    Args:
        arguments: None for the arguments of the process.
        serve: serves with the flags and the configurations, and returns the exit status. Until it
            handles signals, they end the process.
    """
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
    """End the process at the first SIGINT or SIGTERM, until the server handles them.

    Not by an exception, which an import or a library may catch.
    """

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
