"""Profiles of the steps of an `AsyncEngine`, taken while it serves."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib import import_module
from pathlib import Path

from ...profiling import capture_window
from ...profiling.nsys import inside_nsys
from ...profiling.trace import SUFFIX, TraceError, trace_recording
from ..errors import ConfigError
from .async_engine import AsyncEngine


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile that has begun or ended."""

    path: str | None
    """Of its trace; None under nsys, which writes a report of its own."""


class Profiler:
    """Records steps of an engine, one profile at a time: a trace, or the window of nsys."""

    def __init__(self, engine: AsyncEngine, folder: Path | None) -> None:
        """Write traces to a folder, which is made (or `ConfigError`); None: to a temporary one."""
        self._engine = engine
        self._folder = folder
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                problem = f"profile_dir {folder} cannot be made: {error.strerror}"
                raise ConfigError(problem, field="profile_dir") from error
        self._lock = asyncio.Lock()  # held while a profile begins
        self._task: asyncio.Task[Profile] | None = None  # ends the profile that was not stopped
        self._stopping = asyncio.Event()

    async def start(self, seconds: float) -> Profile:
        """Begin between two steps; the profile ends after some seconds, or by `stop`.

        Raises `TraceError` or `CaptureWindowError` if a profile runs in this process.
        """
        async with self._lock:
            return await self._start(seconds)

    async def _start(self, seconds: float) -> Profile:
        if self._task is not None and not self._task.done():
            raise TraceError("a profile is running: POST /stop_profile ends it")
        path = None if inside_nsys() else self._new_path()
        recording: AbstractContextManager[Callable[[], None] | None]
        recording = capture_window() if path is None else trace_recording(path)
        # torch's profiler imports it at its first start, which would delay a step by a second.
        await asyncio.to_thread(import_module, "torch._inductor.config")
        scope, stopping = ExitStack(), asyncio.Event()
        begin = partial(scope.enter_context, recording)
        write = await asyncio.wrap_future(self._engine.run_between_steps(begin))
        profile = Profile(path)

        async def finish() -> Profile:
            try:
                with suppress(TimeoutError):
                    await asyncio.wait_for(stopping.wait(), seconds)
            finally:  # also when the server ends
                await asyncio.wrap_future(self._engine.run_between_steps(scope.close))
                if write is not None:
                    await asyncio.to_thread(write)
            return profile

        self._stopping, self._task = stopping, asyncio.create_task(finish())
        return profile

    async def stop(self) -> Profile:
        """End the profile that was started last, unless it has ended, and return it.

        Raises `TraceError` if none was started since the last call, and `WriteError`.
        """
        task, self._task = self._task, None
        if task is None:
            raise TraceError("no profile was started: POST /start_profile starts one")
        self._stopping.set()
        return await task

    def _new_path(self) -> str:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="stepgraph-profile-"))
        name = f"stepgraph-{datetime.now():%Y%m%d-%H%M%S-%f}.trace{SUFFIX}"
        return str(self._folder.absolute() / name)
