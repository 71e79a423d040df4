"""Notifies engines in forked children, which have none of the threads that they need."""

from __future__ import annotations

import os
from typing import Any
from weakref import WeakSet

_alive: WeakSet[Any] = WeakSet()


def call_in_children(thing: Any) -> None:
    """Call `thing.after_fork()` at the start of each forked child. Holds a weak reference only."""
    _alive.add(thing)


def _after_fork() -> None:
    for thing in list(_alive):
        thing.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_after_fork)
