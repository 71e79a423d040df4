"""Progress of the long phases of a start: a bar on a terminal, a line in the log elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("stepgraph.runtime")

LOG_SECONDS = 10.0
"""Between two records of one phase."""


@contextmanager
def progress_bar(description: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    """Yield the function that takes the finished work and all work, in any unit.

    It draws a bar on stderr if that is `shown` and a terminal. Otherwise the log says every
    `LOG_SECONDS` how much is done.
    """
    if shown and sys.stderr is not None:
        from rich.console import Console  # slow to import
        from rich.progress import Progress

        console = Console(stderr=True)
        if console.is_terminal:
            with Progress(console=console, transient=True) as bar:
                task = bar.add_task(description, total=None)
                yield lambda done, total: bar.update(task, completed=done, total=total)
            return
    due = time.monotonic() + LOG_SECONDS

    def report(done: int, total: int) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + LOG_SECONDS
            logger.info("%s: %d %%", description, 100 * done // max(total, 1))

    yield report
