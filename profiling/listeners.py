"""Listeners of ranges and marks, and what ranges carry. See `ranges.py`."""

import logging
from collections.abc import Callable
from typing import Any, Final, NamedTuple, Protocol

__all__ = ["NOTHING", "Guarded", "Listener", "Payload", "StepNumbers"]

logger = logging.getLogger("stepgraph.profiling")


class StepNumbers(NamedTuple):
    """The payload of `replay` and `prefill`; `dictionary.STEP_NUMBERS` describes the fields."""

    step: int
    rows: int
    bucket: int
    tokens: int
    blocks_in_use: int
    padding: int


Payload = int | StepNumbers
"""What a range carries: one integer, or the numbers of the step."""


class Listener(Protocol):
    """Receives ranges and marks, from any thread."""

    def push(self, name: str, payload: Payload) -> None:
        """The range `name` began on the calling thread."""

    def pop(self) -> None:
        """The innermost range of the calling thread ended."""

    def mark(self, name: str, payload: tuple[int, ...]) -> None:
        """Something happened: `payload` has the fields of `MARKS[name]`, in order.

        Python's garbage collector may emit its mark during the other methods.
        """


class Guarded:
    """Unsubscribes a listener that raises: no step fails because of a listener."""

    def __init__(self, listener: Listener) -> None:
        self._listener: Listener | None = listener

    def push(self, name: str, payload: Payload) -> None:
        if self._listener is not None:
            self._call(self._listener.push, name, payload)

    def pop(self) -> None:
        if self._listener is not None:
            self._call(self._listener.pop)

    def mark(self, name: str, payload: tuple[int, ...]) -> None:
        if self._listener is not None:
            self._call(self._listener.mark, name, payload)

    def _call(self, method: Callable[..., None], *event: Any) -> None:
        try:
            method(*event)
        except Exception:
            self._listener = None
            logger.exception("a listener of ranges raised and is unsubscribed: %r", method)


class _Nothing:
    """A context manager that does nothing, in half the time of `contextlib.nullcontext`.

    Static methods: `with` calls them without the object, `contextlib.ExitStack` with it, before
    the other arguments.
    """

    __slots__ = ()

    @staticmethod
    def __enter__(_: object = None) -> None:
        pass

    @staticmethod
    def __exit__(_1: object, _2: object, _3: object, _4: object = None) -> None:
        pass


NOTHING: Final = _Nothing()
