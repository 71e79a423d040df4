"""Exclusive access to the loop of an engine: which call holds it, and which calls wait for it.

The call that runs the loop is identified by its frame, put into a dict by `setdefault`: one atomic
operation that acquires the loop and returns its holder. There is no lock that a signal handler or a
callback could deadlock on. If the loop is held, the frame distinguishes three cases:

- it is a caller of this call: a signal handler or a callback re-enters the engine, or a call of
  `generate` runs its own steps;
- it runs in another thread: this call waits, or is refused;
- it has ended: an exception between two instructions kept it from releasing the loop.

Waiting calls sleep until the loop is released. Calls that need it for one operation come first,
then calls of `generate`, which only need the steps to run.
"""

from __future__ import annotations

import sys
import threading
from _queue import SimpleQueue
from _thread import get_ident
from collections import deque
from types import FrameType
from typing import Protocol, TypeAlias

from ..errors import EngineBusyError
from .interrupts import DeferredInterrupt, in_stack

__all__ = ["LoopAccess", "Waiter"]

_LONG = ("step", "score")
"""Calls that a `step` of another thread does not wait for."""


class Waiter(Protocol):
    """A call whose requests may end while it waits for the loop."""

    wake: SimpleQueue[None]
    """Putting an item into it wakes the call."""

    @property
    def complete(self) -> bool:
        """Whether it no longer needs the loop."""


_Turn: TypeAlias = tuple[FrameType, str, int, bool]
"""The frame that holds the loop, the name of the call, its thread, and whether it has claimed the
loop for several critical sections. A plain tuple, since every step makes one."""


class LoopAccess:
    """Lets one call at a time run the loop, and defers SIGINT in critical sections."""

    def __init__(self) -> None:
        self._holder: dict[None, _Turn] = {}  # at most one
        self._section: FrameType | None = None  # the current critical section
        self._operations: deque[SimpleQueue[None]] = deque()
        self._followers: deque[SimpleQueue[None]] = deque()
        self._taking_over = threading.Lock()
        self._interrupt = DeferredInterrupt()

    @property
    def wanted(self) -> bool:
        """Whether a call waits for the loop to run one operation."""
        return bool(self._operations)

    @property
    def held(self) -> bool:
        """Whether a running call holds the loop."""
        holder = self._holder.get(None)
        return holder is not None and _runs(holder)

    def enter(self, name: str) -> bool:
        """Begin a critical section of the calling function; `leave` ends it.

        Returns whether a caller has claimed the loop for it.

        Raises:
            EngineBusyError: a caller of this function is in a critical section, or another thread
                is in `step` and this call is a `step` too.
        """
        frame, thread = sys._getframe(1), get_ident()
        turn = (frame, name, thread, False)
        part = False
        try:
            holder = self._holder.setdefault(None, turn)
            if holder is not turn:
                part = self._may_be_part_of(holder, frame, thread)
                if not part:
                    self._wait(turn, self._operations, None)
            self._section = frame
            if thread == self._interrupt.main_thread:
                self._interrupt.begin(frame)
        except BaseException:
            self._leave(frame)
            raise
        return part

    def try_enter(self, name: str) -> bool:
        """`enter` if the loop is free; return whether it was."""
        frame, thread = sys._getframe(1), get_ident()
        turn = (frame, name, thread, False)
        try:
            if self._holder.setdefault(None, turn) is not turn:
                return False
            self._section = frame
            if thread == self._interrupt.main_thread:
                self._interrupt.begin(frame)
        except BaseException:
            self._leave(frame)
            raise
        return True

    def leave(self) -> None:
        """End the critical section or the claim of the calling function, if it has one.

        Raises what the application's handler raises for a deferred SIGINT.
        """
        self._leave(sys._getframe(1))

    def _leave(self, frame: FrameType) -> None:
        if self._section is frame:
            self._section = None
        holder = self._holder.get(None)
        if holder is not None and holder[0] is frame:
            del self._holder[None]
            if self._operations or self._followers:
                self._wake_next()
        if self._interrupt.frame is frame:
            self._interrupt.end()

    def claim(self, name: str, waiter: Waiter | None = None) -> bool:
        """Acquire the loop for the calling function and the critical sections that it calls.

        SIGINT is not deferred between them. Waits for the loop; with a `waiter`, returns False as
        soon as that is complete.

        Raises:
            EngineBusyError: a caller of this function holds the loop.
        """
        turn = (sys._getframe(1), name, get_ident(), True)
        if self._holder.setdefault(None, turn) is turn:
            return True
        queue = self._operations if waiter is None else self._followers
        return self._wait(turn, queue, waiter)

    def refuse_reentry(self, name: str) -> None:
        """Raise `EngineBusyError` if a caller of this function holds the loop."""
        holder = self._holder.get(None)
        if holder is not None and holder[2] == get_ident():
            self._refuse_reentry(holder, name)

    def _may_be_part_of(self, holder: _Turn, frame: FrameType, thread: int) -> bool:
        """Whether the holder claimed the loop in this thread and is between two sections.

        It may have been interrupted right before it released its claim.
        """
        if not holder[3] or holder[2] != thread or not _runs(holder):
            return False
        return self._section is None or not in_stack(self._section, frame)

    def _refuse_reentry(self, holder: _Turn, name: str) -> None:
        if in_stack(holder[0], sys._getframe(1)):
            raise EngineBusyError(
                f"{name}() was called within {holder[1]}() of the same engine, by a signal"
                " handler or a callback, which may only call add_request, abort, stats and"
                " has_unfinished"
            )

    def _wait(self, turn: _Turn, queue: deque[SimpleQueue[None]], waiter: Waiter | None) -> bool:
        """Wait for the loop and acquire it, or until the waiter is complete."""
        wake: SimpleQueue[None] = SimpleQueue() if waiter is None else waiter.wake
        try:
            # Queued first: if the loop is released before this call finds it held, it is woken;
            # if after, it acquires the loop.
            queue.append(wake)
            while True:
                if waiter is not None and waiter.complete:
                    return False
                holder = self._holder.setdefault(None, turn)
                if holder is turn:
                    return True
                self._refuse_reentry(holder, turn[1])
                if turn[1] == "step" and holder[1] in _LONG and _runs(holder):
                    raise EngineBusyError(
                        f"step() was called while {holder[1]}() runs in another thread:"
                        " call step from one thread, or generate from any number of them"
                    )
                if _runs(holder):
                    wake.get()
                else:
                    self._take_from(holder)
        finally:
            if wake in queue:
                queue.remove(wake)
            if not self._holder:
                self._wake_next()

    def _take_from(self, holder: _Turn) -> None:
        """Release the loop for a call that ended without releasing it."""
        with self._taking_over:
            if self._holder.get(None) is holder:
                del self._holder[None]

    def _wake_next(self) -> None:
        for queue in (self._operations, self._followers):
            try:
                queue[0].put(None)
            except IndexError:
                continue
            return


def _runs(turn: _Turn) -> bool:
    """Whether the call of a turn has not returned.

    `clear` atomically refuses an executing frame. Walking the stack of another thread is no
    alternative: it changes meanwhile, and CPython 3.11 crashes.
    """
    try:
        turn[0].clear()
    except RuntimeError:
        return True
    return False
