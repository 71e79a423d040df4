"""Errors of bodies whose fields have wrong types, in the words of JSON."""

from __future__ import annotations

import re

import msgspec

from .http_errors import HttpError

__all__ = ["invalid_body"]

_TYPES = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
}


def invalid_body(error: msgspec.ValidationError) -> HttpError:
    """Return the response to a body that msgspec refuses; `param` is the field that it names."""
    problem, _, where = str(error).partition(" - at ")
    found = re.search(r"`\$\.?([^`]*)`$", where)
    field = found[1] if found else ""
    name = field or "the body"
    if where.startswith("`key` in"):
        name = f"a key of {name}"
    if expected := re.fullmatch(r"Expected `([^`]*)`, got `([^`]*)`", problem):
        types = [_TYPES.get(t, t) for t in expected[1].split(" | ") if t != "null"]
        allowed = " or ".join(filter(None, [", ".join(types[:-1]), types[-1]]))
        message = f"{name} must be {allowed}, not {_TYPES.get(expected[2], expected[2])}"
    elif missing := re.fullmatch(r"Object missing required field `([^`]*)`", problem):
        field = f"{field}.{missing[1]}" if field else missing[1]
        message = f"{field} is missing"
    else:
        message = f"{name}: {problem}"
    return HttpError(400, message, param=field or None)
