"""Checks of the arguments of public methods. Does not import torch.

Each error has the parameter in `field`, and names it, the value and what is allowed. It is a
`RequestError`, or a `ConfigError` for configurations.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, TypeVar

from .bounded_repr import bounded_repr
from .errors import ConfigError, RequestError

__all__ = [
    "MAX_COUNT",
    "MAX_PRIORITY",
    "check_callable",
    "check_choice",
    "check_config",
    "check_integer",
    "check_number",
    "check_type",
]

T = TypeVar("T")

MAX_PRIORITY = (1 << 63) - 1
MAX_COUNT = 1 << 40
"""Most tokens or rows that a question can be about."""


def check_integer(field: str, value: object, low: int, high: int, why: str = "") -> int:
    """Return an integer, also one of NumPy, from `low` to `high`; `why` explains the range."""
    if not isinstance(value, bool) and isinstance(value, Integral) and low <= int(value) <= high:
        return int(value)
    raise _refusal(field, value, f"an integer from {low} to {high}{why}")


def check_number(field: str, value: object, low: float, high: float) -> float:
    """Return a finite number from `low` to `high`."""
    if not isinstance(value, bool) and isinstance(value, Real):
        number: Any = value  # an integer may exceed a float
        if low <= number <= high:
            return float(number)
    raise _refusal(field, value, f"a number from {low:g} to {high:g}")


def check_type(field: str, value: T, kind: Any, allowed: str) -> T:
    """Return a value of a type, or of one of several; `allowed` describes it."""
    if isinstance(value, kind):
        return value
    raise _refusal(field, value, allowed)


def check_choice(field: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise for a value that is none of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise _refusal(field, value, f"one of {', '.join(map(repr, choices))}")


def check_callable(field: str, value: object, takes: str) -> Callable[..., Any]:
    """Return a function; `takes` describes its argument."""
    if callable(value):
        return value
    raise _refusal(field, value, f"a function of {takes}")


def check_config(field: str, value: object, kind: type) -> None:
    """Raise `ConfigError` for what is neither a configuration of this type nor None."""
    if value is not None and not isinstance(value, kind):
        raise ConfigError(
            f"{field} must be {kind.__name__}(...) or None, not {bounded_repr(value, 100)}",
            field=field,
        )


def _refusal(field: str, value: object, allowed: str) -> RequestError:
    return RequestError(f"{field} must be {allowed}, not {bounded_repr(value, 100)}", field=field)
