"""The processes of ranks 1 and up, started by rank 0 as its children."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from ..errors import ConfigError

__all__ = ["GROUP_ENDED", "WORKER", "RankProcess"]

logger = logging.getLogger("stepgraph.runtime")

GROUP_ENDED = 1
"""Status of a rank that ends because of a failure of the group, its own included."""
WORKER = "stepgraph.runtime.engine.startup"
_KEPT_OUTPUT = 2000
"""Characters of a child's output that an error shows."""


class RankProcess:
    """One child. Its output is read by `drain`, which must be called regularly."""

    def __init__(
        self,
        rank: int,
        arguments: Sequence[str],
        cores: Sequence[int] | None = None,
        module: str = WORKER,
    ) -> None:
        """Start a child with the import path of this process.

        Args:
            rank: of the child.
            arguments: of the worker.
            cores: CPUs that it may use; None: all of this process.
            module: the program.

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
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        except OSError as error:
            raise ConfigError(
                f"the process of rank {rank} cannot be started: {error}. tensor_parallel needs one"
                " for each rank"
            ) from error
        assert self._popen.stdout is not None
        os.set_blocking(self._popen.stdout.fileno(), False)
        self._last = b""
        if cores is not None:
            try:
                os.sched_setaffinity(self._popen.pid, cores)
            except OSError as error:
                logger.info("rank %d has no cores of its own: %s", rank, error)

    def drain(self) -> None:
        """Read and log what the child has printed, and keep the end of it."""
        assert self._popen.stdout is not None
        while not self._popen.stdout.closed:
            try:
                read = os.read(self._popen.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not read:
                return
            self._last = (self._last + read)[-_KEPT_OUTPUT:]
            logger.info("rank %d: %s", self.rank, read.decode(errors="replace").rstrip())

    def failure(self) -> str | None:
        """Return how the child ended, with the end of its output; None while it runs."""
        status = self._popen.poll()
        if status is None:
            return None
        self.drain()
        if status < 0:
            try:
                ended = f"was ended by {signal.Signals(-status).name}"
            except ValueError:
                ended = f"was ended by signal {-status}"
        else:
            ended = f"ended with status {status}"
        output = self._last.decode(errors="replace").strip()
        return f"process {self._popen.pid} {ended}" + (f"; it printed:\n{output}" if output else "")

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
        """Kill the child if it runs, reap it and close its output. Idempotent."""
        if self._popen.poll() is None:
            self._popen.kill()
            self._popen.wait()
        self.drain()
        assert self._popen.stdout is not None
        self._popen.stdout.close()
