"""Profiles of the steps of an `AsyncEngine`, taken while it serves."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ...profiling import capture_window
from ...profiling.nsys import inside_nsys
from ...profiling.trace import SUFFIX, TraceError, trace_recording
from .async_engine import AsyncEngine

POLL_SECONDS = 0.01
"""Time between two looks at whether a profile has reached its number of steps."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile that has begun or ended."""

    path: str | None
    """Of its trace; None under nsys, which writes a report of its own."""
    steps: int = 0
    """That were launched between begin and end."""


class Profiler:
    """Records steps of an engine, one profile at a time: a trace, or the window of nsys."""

    def __init__(self, engine: AsyncEngine, folder: Path | None) -> None:
        """Write traces to a folder, which is made (or `OSError`); None: to a temporary one."""
        self._engine = engine
        self._folder = folder
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._numbers = count(1)
        self._task: asyncio.Task[Profile] | None = None  # ends the profile that was not stopped
        self._stopping = asyncio.Event()

    async def start(self, num_steps: int, seconds: float) -> Profile:
        """Begin between two steps; the profile ends after some steps or seconds, or by `stop`.

        Raises `TraceError` or `CaptureWindowError` if a profile runs in this process.
        """
        if self._task is not None and not self._task.done():
            raise TraceError("a profile is running: POST /stop_profile ends it")
        path = None if inside_nsys() else str(self._new_path())
        recording: AbstractContextManager[Callable[[], None] | None]
        recording = capture_window() if path is None else trace_recording(path)
        scope, stopping = ExitStack(), asyncio.Event()

        def begin() -> tuple[Callable[[], None] | None, int]:
            return scope.enter_context(recording), self._num_steps()

        def end() -> int:
            scope.close()
            return self._num_steps()

        write, first = await asyncio.wrap_future(self._engine.run_between_steps(begin))

        async def finish() -> Profile:
            deadline = time.monotonic() + seconds
            try:
                while not stopping.is_set() and time.monotonic() < deadline:
                    if self._num_steps() - first >= num_steps:
                        break
                    with suppress(TimeoutError):
                        await asyncio.wait_for(stopping.wait(), POLL_SECONDS)
            finally:  # also when the server ends
                last = await asyncio.wrap_future(self._engine.run_between_steps(end))
                if write is not None:
                    await asyncio.to_thread(write)
            return Profile(path, last - first)

        self._stopping, self._task = stopping, asyncio.create_task(finish())
        return Profile(path)

    async def stop(self) -> Profile:
        """End the profile that was started last, unless it has ended, and return it.

        Raises `TraceError` if none was started since the last call, and `WriteError`.
        """
        task, self._task = self._task, None
        if task is None:
            raise TraceError("no profile was started: POST /start_profile starts one")
        self._stopping.set()
        return await task

    def _num_steps(self) -> int:
        return self._engine.snapshot().counters.steps

    def _new_path(self) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="stepgraph-profile-"))
        now = time.strftime("%Y%m%d-%H%M%S")
        name = f"stepgraph-{now}-{os.getpid()}-{next(self._numbers)}.trace{SUFFIX}"
        return self._folder.absolute() / name
