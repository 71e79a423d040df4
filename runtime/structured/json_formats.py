"""The keyword `format` of JSON schemas, whose values applications may choose freely."""

from __future__ import annotations

import json
from typing import Any, Final

__all__ = ["without_custom_formats"]

_SPECIFIED: Final = frozenset(
    (
        *("date-time", "time", "date", "duration", "email", "idn-email", "hostname"),
        *("idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid"),
        *("uri-template", "json-pointer", "relative-json-pointer", "regex"),
    )
)
"""Those of JSON Schema 2020-12, Validation, section 7.3."""
_VALUES: Final = frozenset(("const", "default", "enum", "example", "examples"))
"""Keywords whose values are no schemas."""
_NAMED: Final = frozenset(
    (
        *("properties", "patternProperties", "dependentSchemas", "dependencies"),
        *("definitions", "$defs"),
    )
)
"""Keywords whose values are schemas by name."""


def without_custom_formats(source: str) -> str:
    """Return a JSON schema without formats that JSON Schema does not specify, such as `int32`.

    They say nothing about which texts are valid, and llguidance refuses them. It refuses too what
    it lacks of the specified ones; these stay.

    Raises:
        ValueError: it is no JSON text.
    """
    if '"format"' not in source:
        return source
    schema = json.loads(source)
    return json.dumps(schema, ensure_ascii=False) if _strip(schema) else source


def _strip(schema: Any) -> bool:
    """Remove custom formats from a schema or a list of these; return whether there were any."""
    if isinstance(schema, list):
        return max(map(_strip, schema), default=False)  # of all of them, not only the first
    if not isinstance(schema, dict):
        return False
    name = schema.get("format")
    found = isinstance(name, str) and name not in _SPECIFIED
    if found:
        del schema["format"]
    for keyword, value in schema.items():
        if keyword in _NAMED and isinstance(value, dict):
            value = list(value.values())
        if keyword not in _VALUES and _strip(value):
            found = True
    return found
