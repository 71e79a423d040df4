"""The log of `stepgraph serve`: records of this package and of its libraries, on stderr."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["ACCESS_LOG", "logs_to_stderr"]

ACCESS_LOG = "stepgraph.access"
"""Name of the logger with a record for each request."""

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_COLOURS = {"DEBUG": 2, "WARNING": 33, "ERROR": 31, "CRITICAL": 31}
"""Codes of ANSI escapes (dim, yellow, red) by level."""


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
    handler.setFormatter(_Formatter(_FORMAT))
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


class _Formatter(logging.Formatter):
    """Colours the level on a terminal."""

    default_msec_format = "%s.%03d"

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # of the base class
        colour = _COLOURS.get(record.levelname)
        if colour is None or os.environ.get("NO_COLOR") or not sys.stderr.isatty():
            return super().formatMessage(record)
        name = record.levelname
        record.levelname = f"\x1b[{colour}m{name}\x1b[0m"
        try:
            return super().formatMessage(record)
        finally:
            record.levelname = name
