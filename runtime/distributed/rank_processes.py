"""The processes of ranks 1 and up, started by rank 0 as its children."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

from ..errors import ConfigError

__all__ = ["GROUP_ENDED", "WORKER", "RankProcess"]

logger = logging.getLogger("stepgraph.runtime")

GROUP_ENDED = 1
"""Status of a rank that ends because of a failure of the group, its own included."""
WORKER = "stepgraph.runtime.engine.startup"
_STDERR = 2


class RankProcess:
    """One child. It writes to the stderr of this process."""

    def __init__(
        self, rank: int, arguments: Sequence[str], cores: Sequence[int] | None = None
    ) -> None:
        """Start a child with the import path of this process.

        Args:
            rank: of the child.
            arguments: of the worker.
            cores: CPUs that it may use; None: all of this process.

        Raises:
            ConfigError: this process has no Python executable that could be started, or the system
                starts no more processes.
        """
        if not sys.executable:
            raise ConfigError(
                "tensor_parallel starts processes of sys.executable, which is not set here"
            )
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)
        }
        self.rank = rank
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", WORKER, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                stderr=_STDERR,
                env=environment,
            )
        except OSError as error:
            raise ConfigError(
                f"the process of rank {rank} cannot be started: {error}. tensor_parallel needs one"
                " for each rank"
            ) from error
        if cores is not None:
            try:
                os.sched_setaffinity(self._popen.pid, cores)
            except OSError as error:
                logger.info("rank %d has no cores of its own: %s", rank, error)

    def failure(self) -> str | None:
        """Return how the child ended; None while it runs."""
        status = self._popen.poll()
        if status is None:
            return None
        ended = f"ended with status {status}"
        if status < 0:
            ended = f"was ended by signal {-status}"
            with suppress(ValueError):
                ended = f"was ended by {signal.Signals(-status).name}"
        return f"process {self._popen.pid} {ended}"

    @property
    def ended_by_itself(self) -> bool:
        """Whether the child has ended with the status of a rank whose group has ended."""
        return self._popen.returncode == GROUP_ENDED

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the child; return whether it has ended."""
        try:
            self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def end(self) -> None:
        """Kill the child if it runs, and reap it. Idempotent."""
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()
