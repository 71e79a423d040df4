"""The command line of `stepgraph serve`, and its log on stderr.

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
from types import FrameType

from ...config import EngineConfig
from ...errors import ConfigError
from ...tools.arguments import config_of
from ..service_config import ServiceConfig
from .flags import ENGINE_DEFAULTS, PROGRAM, SERVICE_DEFAULTS, in_flags, make_parser

__all__ = ["ACCESS_LOG", "Serve", "logs_to_stderr", "run"]

ACCESS_LOG = "stepgraph.access"
"""Name of the logger with a record for each request."""

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

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


@contextmanager
def logs_to_stderr(level: str, *, access: bool) -> Iterator[None]:
    """Show records of `stepgraph` from a level on, and warnings of all other libraries.

    Args:
        level: the name of a level in lower case.
        access: whether there is a record for each request.
    """
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


class _Handler(logging.Handler):
    """Writes to the `sys.stderr` of the moment: a progress bar replaces it while it is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)
