"""Where ranges and marks go: to nobody, to one listener or to several. See `ranges.py`."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol

from .dictionary import MARKS, RANGES

__all__ = ["NOTHING", "Emitter", "Guarded", "Listener", "Payload", "StepNumbers", "emitter_to"]

logger = logging.getLogger("stepgraph.profiling")

_PLAIN: Final = frozenset(info.name for info in RANGES.values() if not info.fields)
_OF_STEPS: Final = frozenset(info.name for info in RANGES.values() if info.fields)


class StepNumbers(NamedTuple):
    """The payload of `replay` and `prefill`; `dictionary.STEP_NUMBERS` says what each means."""

    step: int
    rows: int
    bucket: int
    tokens: int
    blocks_in_use: int
    padding: int


Payload = int | StepNumbers
"""What a range carries: one integer, or the numbers of the step."""


class Listener(Protocol):
    """Somebody who hears of ranges and marks; see `listening`. May be called by any thread."""

    def push(self, name: str, payload: Payload) -> None:
        """Hear that the range `name` began on the calling thread."""

    def pop(self) -> None:
        """Hear that the innermost range of the calling thread ended."""

    def mark(self, name: str, payload: tuple[int, ...]) -> None:
        """Hear that something happened: `payload` has the fields of `MARKS[name]`, in order.

        Python's collector tells of itself wherever it happens to run, inside the other methods too.
        """


class Emitter(Protocol):
    """The face of this module as an object: where ranges and marks go."""

    def span(self, name: str, payload: int = 0) -> contextlib.AbstractContextManager[None]:
        """Return the range `name` as a context manager: it ends on every way out.

        Args:
            name: a key of `RANGES` whose payload is one integer.
            payload: the integer that `RANGES[name].payload` describes.

        Raises:
            ValueError: if there is no such range, whether or not a tool listens.
        """

    def step_span(
        self,
        name: str,
        step: int,
        rows: int,
        bucket: int,
        tokens: int,
        blocks_in_use: int,
        padding: int,
    ) -> contextlib.AbstractContextManager[None]:
        """Return a `span` of a range whose payload is the numbers of its step.

        On entry the counters of the same numbers are sampled, where there are counters.

        Raises:
            ValueError: if there is no such range, whether or not a tool listens.
        """

    def mark(self, name: str, *payload: int) -> None:
        """Emit the mark `name`.

        Args:
            name: a key of `MARKS`.
            payload: its fields, in order.

        Raises:
            ValueError: if there is no such mark, or it has other fields; whether or not a tool
                listens.
        """


def emitter_to(listeners: Sequence[Listener]) -> Emitter:
    """Return an emitter that all of them hear; without any it only checks what it is given."""
    if not listeners:
        return _Silent()
    return _Emitting(listeners[0] if len(listeners) == 1 else _Several(tuple(listeners)))


class Guarded:
    """A listener that cannot fail the step it hears of: if it raises, it hears no more."""

    def __init__(self, listener: Listener) -> None:
        self._listener: Listener | None = listener

    def push(self, name: str, payload: Payload) -> None:
        if self._listener is not None:
            self._tell(self._listener.push, name, payload)

    def pop(self) -> None:
        if self._listener is not None:
            self._tell(self._listener.pop)

    def mark(self, name: str, payload: tuple[int, ...]) -> None:
        if self._listener is not None:
            self._tell(self._listener.mark, name, payload)

    def _tell(self, hear: Callable[..., None], *event: Any) -> None:
        try:
            hear(*event)
        except Exception:
            self._listener = None
            logger.exception("a listener failed, and hears of no more ranges: %r", hear)


class _Several:
    """Listeners as one."""

    def __init__(self, listeners: tuple[Listener, ...]) -> None:
        self._listeners = listeners

    def push(self, name: str, payload: Payload) -> None:
        for listener in self._listeners:
            listener.push(name, payload)

    def pop(self) -> None:
        for listener in reversed(self._listeners):
            listener.pop()

    def mark(self, name: str, payload: tuple[int, ...]) -> None:
        for listener in self._listeners:
            listener.mark(name, payload)


def _wrong_range(name: str) -> ValueError:
    if name in _PLAIN:
        return ValueError(f"the payload of range {name!r} is one integer: use span")
    if name in _OF_STEPS:
        return ValueError(f"the payload of range {name!r} is the step's numbers: use step_span")
    return ValueError(f"unknown range {name!r}; the ranges are: {', '.join(RANGES)}")


def _check_mark(name: str, payload: tuple[int, ...]) -> None:
    info = MARKS.get(name)
    if info is None:
        raise ValueError(f"unknown mark {name!r}; the marks are: {', '.join(MARKS)}")
    if len(payload) != len(info.fields):
        fields = ", ".join(field.name for field in info.fields)
        raise ValueError(f"mark {name!r} carries {fields}; got {len(payload)} numbers")


class _Silent:
    """Nobody listens. Static methods: a plain function is cheaper to call than a bound method."""

    @staticmethod
    def span(name: str, payload: int = 0) -> contextlib.AbstractContextManager[None]:
        # Checked here too: a misspelt range must fail in every run, not only under a profiler.
        if name not in _PLAIN:
            raise _wrong_range(name)
        return NOTHING

    @staticmethod
    def step_span(
        name: str,
        step: int,
        rows: int,
        bucket: int,
        tokens: int,
        blocks_in_use: int,
        padding: int,
    ) -> contextlib.AbstractContextManager[None]:
        if name not in _OF_STEPS:
            raise _wrong_range(name)
        return NOTHING

    @staticmethod
    def mark(name: str, *payload: int) -> None:
        _check_mark(name, payload)


class _Nothing:
    """Does nothing, in half of the time that `contextlib.nullcontext` takes for it.

    Static methods, as those of `_Silent`. `with` calls them without the object,
    `contextlib.ExitStack` with it, before the other arguments.
    """

    __slots__ = ()

    @staticmethod
    def __enter__(_: object = None) -> None:
        pass

    @staticmethod
    def __exit__(_1: object, _2: object, _3: object, _4: object = None) -> None:
        pass


NOTHING: Final = _Nothing()
"""What is entered where nobody listens."""


class _Emitting:
    """Somebody listens: checks what is emitted and hands it to a listener."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def span(self, name: str, payload: int = 0) -> contextlib.AbstractContextManager[None]:
        if name not in _PLAIN:
            raise _wrong_range(name)
        return _Span(self._listener, name, int(payload))  # no bool, no NumPy integer

    def step_span(
        self,
        name: str,
        step: int,
        rows: int,
        bucket: int,
        tokens: int,
        blocks_in_use: int,
        padding: int,
    ) -> contextlib.AbstractContextManager[None]:
        if name not in _OF_STEPS:
            raise _wrong_range(name)
        numbers = StepNumbers(step, rows, bucket, tokens, blocks_in_use, padding)
        return _Span(self._listener, name, numbers)

    def mark(self, name: str, *payload: int) -> None:
        _check_mark(name, payload)
        self._listener.mark(name, payload)


class _Span:
    """Ends where it began: a listener that comes or goes in between hears all of it, or nothing."""

    __slots__ = ("_listener", "_name", "_payload")

    def __init__(self, listener: Listener, name: str, payload: Payload) -> None:
        self._listener = listener
        self._name = name
        self._payload = payload

    def __enter__(self) -> None:
        self._listener.push(self._name, self._payload)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listener.pop()
