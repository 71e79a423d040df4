"""Pool threads for tests: how many operators use, and threads that hardly ever have a core."""

from __future__ import annotations

import multiprocessing
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stepgraph.runtime.kernels import limit_threads


@contextmanager
def kernel_threads(count: int) -> Iterator[None]:
    """Operators use `count` threads in the block, and one afterwards."""
    limit_threads(count)
    try:
        yield
    finally:
        limit_threads(1)


def _spin() -> None:
    while True:
        pass


def _tasks() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def other_threads() -> set[int]:
    """All threads of the process but the calling one."""
    return _tasks() - {threading.get_native_id()}


@contextmanager
def starved(threads: set[int]) -> Iterator[None]:
    """The threads get about a hundredth of a core, in short spells: they stop wherever they are."""
    cpu = min(os.sched_getaffinity(0))
    busy = multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
    busy.start()
    assert busy.pid is not None
    before = {thread: os.sched_getaffinity(thread) for thread in threads}
    try:
        os.sched_setaffinity(busy.pid, {cpu})
        for thread in threads:
            os.sched_setaffinity(thread, {cpu})
            os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        yield
    finally:
        for thread, affinity in before.items():
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
            os.sched_setaffinity(thread, affinity)
        busy.kill()
        busy.join()


def in_child(body: Callable[[], object]) -> None:
    """Assert that a function succeeds in a forked child, which has no threads but its own."""
    child = os.fork()
    if child == 0:
        try:
            body()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def cpu_seconds(threads: set[int]) -> float:
    """The time that threads have been running, to the nanosecond; Linux only."""
    files = (Path(f"/proc/self/task/{thread}/schedstat") for thread in threads)
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


@contextmanager
def new_threads() -> Iterator[set[int]]:
    """Yields a set that holds, after the block, the threads that were started in it."""
    before, started = _tasks(), set[int]()
    yield started
    started |= _tasks() - before
