"""The command `stepgraph serve`: checks its arguments, then loads the server.

Imports neither torch nor the server's libraries before the arguments are right.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from ...config import EngineConfig
from ...errors import ConfigError
from ..service_config import ServiceConfig
from .config_flags import config_of, in_flags
from .server_flags import ENGINE_DEFAULTS, PROGRAM, SERVICE_DEFAULTS, make_parser
from .stderr_log import logs_to_stderr

if TYPE_CHECKING:
    from .server import MakeEngine

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None, make_engine: MakeEngine | None = None) -> int:
    """Run the command line; return the exit status.

    Args:
        arguments: None: those of the process.
        make_engine: returns what is served; None: `AsyncEngine.from_pretrained`.
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
        try:
            from .server import serve
        except ModuleNotFoundError as error:
            needed = f'{error.name}: pip install "stepgraph[server]"'
            print(f"{PROGRAM}: error: the HTTP service needs {needed}", file=sys.stderr)
            return 1
        return serve(options, engine_config, service_config, make_engine)


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
