"""Another program that a measurement runs, and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["ChildProcess"]


class ChildProcess:
    """A process group with a pipe on its standard input; `close` it at the end."""

    def __init__(
        self, name: str, command: Sequence[str], env: Mapping[str, str], *, replies: bool = False
    ) -> None:
        """Start a program.

        Args:
            name: of the program, for messages.
            command: its path and arguments.
            env: its environment.
            replies: its standard output is a pipe too. Else it is logged, as stderr always is.
        """
        self.name = name
        self.scratch = tempfile.TemporaryDirectory(prefix="stepgraph-child-")
        """A directory that lives as long as the process."""
        self._log = Path(self.scratch.name, "log")
        with self._log.open("wb") as log:
            self.process: subprocess.Popen[bytes] = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if replies else log,
                stderr=log,
                # Ctrl-C is handled here, and `close` kills the whole group. The session stays
                # ours, as the kernel may schedule processors by session.
                process_group=0,
            )

    def close(self) -> None:
        """Kill the process and its children. Idempotent."""
        with suppress(ProcessLookupError):  # it has ended and was waited for
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError), self.process:  # a request that was not read
            self.process.wait()
        self.scratch.cleanup()

    def last_words(self) -> str:
        """Return the last line of the log that is not blank."""
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "without a message"
