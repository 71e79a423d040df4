"""JSON schemas as llguidance reads them: what it would get wrong or follow for ever is refused.

- A `format` that JSON Schema does not specify, and `"uniqueItems": false` for example, say nothing
  about which texts are valid, and `x-guidance` is an option of llguidance, not of JSON Schema: they
  are left out.
- Names of properties can be written with escapes, such as `"\\u0061"` for `"a"`. llguidance takes
  it for another name. So where other properties are allowed too, `\\u` is not: control characters,
  for which llguidance uses it, are left out.
- Names of additional properties can be repeated, each of which llguidance counts.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, Final, NamedTuple

from ..bounded_repr import bounded_repr

__all__ = ["PreparedSchema", "prepared_schema"]

MAX_FORCED_CHARS: Final = 4096
"""Of a text in `const` or `enum`, or of a name: a step tokenises what is left of a forced text."""
MAX_FACTOR, MAX_DECIMALS = 10_000, 18
"""Of `multipleOf`: its digits, to which the automaton counts, and how many of them are decimals."""

_SPECIFIED: Final = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "idn-email", "hostname"),
        *("idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    )
)
"""Formats of JSON Schema 2020-12, Validation, section 7.3."""
_VALUES: Final = frozenset(("const", "default", "enum", "example", "examples"))
"""Keywords whose values are no schemas."""
_NAMED: Final = frozenset(
    (
        *("properties", "patternProperties", "dependentSchemas", "dependencies"),
        *("definitions", "$defs"),
    )
)
"""Keywords whose values are schemas by name."""
_OPTIONS: Final = "x-guidance"
_DEMANDS_NOTHING: Final[dict[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": (True, {}),
    "unevaluatedProperties": (True, {}),
    "unevaluatedItems": (True, {}),
    **dict.fromkeys(("dependencies", "dependentRequired", "dependentSchemas"), ({},)),
}
"""Keywords that llguidance lacks, and their values that every text follows."""


class PreparedSchema(NamedTuple):
    """A schema to be compiled."""

    text: str
    options: dict[str, Any]
    """Of llguidance."""


def prepared_schema(source: str) -> PreparedSchema:
    """Return a JSON schema for llguidance.

    Raises:
        ValueError: it is no JSON text, or outputs could be invalid or take too long.
    """
    schema = json.loads(source)
    changed, has_open_names = _prepare(schema)
    text = json.dumps(schema, ensure_ascii=False) if changed else source
    return PreparedSchema(text, {"json_allowed_escapes": 'nrbtf\\"'} if has_open_names else {})


def _prepare(schema: Any) -> tuple[bool, bool]:
    """Change a schema or a list of these; return whether it has changed, and has open names.

    It has if objects may have named properties and others.
    """
    if isinstance(schema, list):
        found = [_prepare(item) for item in schema]
        return any(changed for changed, _ in found), any(opens for _, opens in found)
    if not isinstance(schema, dict):
        return False, False
    ignored = [keyword for keyword, value in schema.items() if _is_ignored(keyword, value)]
    for keyword in ignored:
        del schema[keyword]
    changed = bool(ignored)
    is_closed = schema.get("additionalProperties") is False
    named, patterns = schema.get("properties"), schema.get("patternProperties")
    opens = bool(patterns) or (bool(named) and not is_closed)
    _check_counts(schema, is_closed and not patterns)
    for keyword, value in schema.items():
        if keyword in ("const", "enum"):
            _check_texts(keyword, value)
        if keyword in _NAMED and isinstance(value, dict):
            _check_texts(keyword, list(value))
            value = list(value.values())
        if keyword not in _VALUES:
            of_value = _prepare(value)
            changed, opens = changed or of_value[0], opens or of_value[1]
    return changed, opens


def _is_ignored(keyword: str, value: Any) -> bool:
    """Return whether a keyword says nothing about which texts are valid."""
    if keyword == "format":
        return isinstance(value, str) and value not in _SPECIFIED
    return keyword == _OPTIONS or value in _DEMANDS_NOTHING.get(keyword, ())


def _check_counts(schema: dict[str, Any], is_closed: bool) -> None:
    """Refuse numbers that llguidance counts wrongly, or counts to."""
    least, required = schema.get("minProperties"), schema.get("required")
    known = len(required) if isinstance(required, list) else 0
    if isinstance(least, int) and least > max(1, known) and not is_closed:
        raise ValueError(
            f"minProperties is {least}, which repeated names of other properties could reach: list"
            " the names under required, or forbid others with additionalProperties: false"
        )
    factor = schema.get("multipleOf")
    if isinstance(factor, int | float) and not isinstance(factor, bool):
        _, digits, exponent = Decimal(str(factor)).normalize().as_tuple()
        if not isinstance(exponent, int):  # NaN or infinite, which is no JSON
            return
        too_many = len(digits) + max(exponent, 0) > len(str(MAX_FACTOR)) or exponent < -MAX_DECIMALS
        if too_many or int("".join(map(str, digits))) * 10 ** max(exponent, 0) > MAX_FACTOR:
            raise ValueError(
                f"multipleOf is {bounded_repr(factor)}; its digits without the decimal point may be"
                f" at most {MAX_FACTOR}, and {MAX_DECIMALS} of them decimals"
            )


def _check_texts(keyword: str, value: Any) -> None:
    """Refuse texts that are too long to be forced."""
    values = value if isinstance(value, list) else [value]
    longest = max((len(text) for text in values if isinstance(text, str)), default=0)
    if longest > MAX_FORCED_CHARS:
        raise ValueError(
            f"{keyword} has a text of {longest} characters; allowed are {MAX_FORCED_CHARS}"
        )
