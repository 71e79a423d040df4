"""The time and size limits of a template that runs: a deadline, and a budget of characters.

A template runs in its own thread, whose trace function ends it at the deadline, whatever Python
code it is in. Operations that make a string or a list larger than their operands are charged to the
budget *before* they run, since a running one cannot be interrupted.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar

__all__ = [
    "TemplateLimitError",
    "charge",
    "charge_join",
    "charge_result",
    "charge_text",
    "check_bits",
    "check_numbers",
    "check_widths",
    "growth",
    "run_bounded",
]

MAX_CHARS = 1 << 26
"""Characters (and list elements) that all operations of one run may produce together."""
_MAX_INTEGER_BITS = 1 << 14
_GRACE_SECONDS = 1.0
_WIDE = re.compile(r"\d{7,}")
_NESTED_SPEC = re.compile(r":[^{}]*\{")

T = TypeVar("T")


class TemplateLimitError(BaseException):
    """A template exceeded a limit. Not an `Exception`, so that no filter catches it."""


class _Budget(threading.local):
    left = 0


_budget = _Budget()


def run_bounded(work: Callable[[], T], seconds: float) -> T:
    """Run `work` in a thread with a deadline and a budget; return its result.

    Raises:
        TemplateLimitError: it exceeded the deadline or the budget.
        Exception: from `work`.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    late = TemplateLimitError(f"it ran for more than {seconds:g} s")

    def body() -> None:
        deadline = time.monotonic() + seconds

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            if time.monotonic() > deadline:
                raise late
            return trace

        _budget.left = MAX_CHARS
        sys.settrace(trace)  # of this thread
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name="stepgraph-template", daemon=True)
    thread.start()
    thread.join(seconds + _GRACE_SECONDS)  # it ends by itself, unless one operation is long
    if results:
        return results[0]
    raise errors[0] if errors else late


def charge(size: int) -> None:
    """Charge characters to the budget of this run, before they are produced."""
    _budget.left -= max(size, 0)
    if _budget.left < 0:
        raise TemplateLimitError(f"it produces more than {MAX_CHARS} characters")


def check_bits(bits: int) -> None:
    if bits > _MAX_INTEGER_BITS:
        raise TemplateLimitError(f"it produces an integer of more than {_MAX_INTEGER_BITS} bits")


def charge_result(value: T) -> T:
    if isinstance(value, (str, bytes, list, tuple, dict)):
        charge(len(value))
    return value


def check_widths(text: object, arguments: Iterable[object]) -> None:
    """Refuse a format string with a width that exceeds the budget."""
    if not isinstance(text, str):
        return
    values = list(arguments)
    if _NESTED_SPEC.search(text):
        text = " ".join([text, *(value for value in values if isinstance(value, str))])
    if _WIDE.search(text):
        raise TemplateLimitError("it formats with a width of more than 6 digits")
    for value in values:
        if isinstance(value, (tuple, list)):
            check_numbers(value)
    check_numbers(values)


def check_numbers(values: Iterable[object]) -> None:
    """Refuse integers that exceed the budget as a width or a count."""
    for value in values:
        if isinstance(value, int) and abs(value) > _budget.left:
            raise TemplateLimitError(f"a width or count is larger than {_budget.left}")


def growth(name: str, text: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    """Return an upper bound of the size of the result of a method or filter."""
    values = [*arguments, *named.values()]
    texts = [len(value) for value in values if isinstance(value, str)]
    numbers = [value for value in values if isinstance(value, int)]
    size = len(text) if isinstance(text, (str, list, tuple)) else 0
    if name == "replace" and isinstance(text, str):
        old = arguments[0] if arguments else named.get("old", "")
        new = arguments[1] if len(arguments) > 1 else named.get("new", "")
        return size + text.count(str(old)) * len(str(new))
    if name in ("indent", "expandtabs") and isinstance(text, str):
        lines = text.count("\n") + text.count("\t") + 1
        return size + lines * max([8, *texts, *numbers])
    if name == "wordwrap":
        return size + size * max([1, *texts])
    if name == "translate":
        return size * max([1, *(len(str(v)) for d in values for v in dict(d).values())])
    return 0


def charge_join(parts: Sequence[Any], separator: int) -> None:
    charge(sum(len(part) for part in parts if isinstance(part, str)) + separator * len(parts))


def charge_text(value: T) -> T:
    """Charge the text of nested containers, which may contain a part several times."""
    stack: list[Any] = [value] if isinstance(value, (list, tuple, dict)) else []
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            stack.extend(part)
            stack.extend(part.values())
        elif isinstance(part, (list, tuple)):
            stack.extend(part)
        charge(len(part) if isinstance(part, str) else 2)
    return value
