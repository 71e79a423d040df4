"""A thread that shares lists of tasks with the thread that made it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, TypeVar

__all__ = ["HelperThread"]

T = TypeVar("T")


class HelperThread(Generic[T]):
    """Helps its owner with lists of tasks, one list at a time.

    The owner gives a list with `begin`, does other work, and does with `finish` itself what the
    thread has not begun: on a busy machine it may wait for a processor for milliseconds. Between
    two lists the thread references nothing of its owner.
    """

    def __init__(self, name: str) -> None:
        """Start the thread, a daemon."""
        self._work: Callable[[], None] | None = None
        self._stopped = False
        self._given, self._helping = threading.Lock(), threading.Lock()
        self._given.acquire()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def begin(self, do: Callable[[T], object], tasks: Iterable[T]) -> None:
        """Share tasks; those of the last call are finished. `do` does one and raises nothing."""
        self._work = partial(_do_all, do, deque(tasks))
        self._wake()

    def finish(self) -> None:
        """Do the tasks that are left, and wait for the one that the thread is doing."""
        if self._work is not None:
            self._work()
            with self._helping:
                self._work = None

    def stop(self) -> None:
        """Let the thread end."""
        self._stopped = True
        self._wake()

    def close(self) -> None:
        """End the thread."""
        self.stop()
        self._thread.join()

    def _wake(self) -> None:
        if self._given.locked():  # otherwise the thread is waking up
            self._given.release()

    def _run(self) -> None:
        while True:
            self._given.acquire()
            if self._stopped:
                return
            with self._helping:
                work = self._work
                if work is not None:
                    work()
                del work


def _do_all(do: Callable[[T], object], tasks: deque[T]) -> None:
    while True:
        try:
            task = tasks.popleft()
        except IndexError:
            return
        do(task)
