"""`StructuredOutput`: the grammar that an output must follow, checked at construction.

Imports neither torch nor llguidance. The text of the grammar is parsed when a request is added (see
`structured/compiler.py`). The limits below bound that work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

from .arguments import Range, check_fields, check_type, from_mapping
from .bounded_repr import bounded_repr
from .errors import RequestError

MAX_SCHEMA_BYTES = 1 << 17
MAX_SCHEMA_DEPTH = 64
MAX_REGEX_CHARS = 1 << 13
MAX_GRAMMAR_BYTES = 1 << 16
MAX_CHOICES = 1024
MAX_CHOICE_CHARS = 1024

_Choice = Annotated[str, Range(1, MAX_CHOICE_CHARS)]
GrammarKind = Literal["json", "regex", "grammar", "choice", "calls", "reasoned"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutput:
    """What an output must be; exactly one field is given. The names are vLLM's.

    Attributes:
        json: a JSON schema, as a mapping, a bool or its text: at most 128 KiB, 64 levels deep. It
            is stored as text.
        regex: a regular expression of 1 to 8192 characters, in the syntax of Rust's `regex`; the
            whole output matches it.
        choice: up to 1024 texts of 1 to 1024 characters; the output is one of them.
        grammar: a context-free grammar in Lark's syntax as llguidance reads it, or in GBNF or
            another EBNF with `::=`: at most 64 KiB.
        json_object: True: any JSON object.

    Raises:
        RequestError: none or several fields are given, or one has a wrong type or is too large.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: Annotated[str, Range(1, MAX_REGEX_CHARS)] | None = None
    choice: Annotated[Sequence[_Choice], Range(1, MAX_CHOICES)] | None = None
    grammar: Annotated[str, Range(1, MAX_GRAMMAR_BYTES)] | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        check_fields(self, RequestError)
        object.__setattr__(self, "json_object", self.json_object or None)
        names = [field.name for field in fields(self)]
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            shown = " and ".join(given) if given else "none"
            raise _error(
                given[1] if given else None,
                f"{shown} given; give exactly one of {', '.join(names)}",
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        for text in (self.regex, self.grammar, *(self.choice or ())):
            if text is not None:
                _check_size(given[0], text)

    @property
    def kind(self) -> GrammarKind:
        """The kind of `source`; a JSON object is a schema."""
        if self.regex is not None:
            return "regex"
        if self.choice is not None:
            return "choice"
        return "json" if self.grammar is None else "grammar"

    @property
    def source(self) -> str:
        """The text that determines the grammar, with `kind`: choices are a list in JSON."""
        if self.choice is not None:
            return json.dumps(self.choice, ensure_ascii=False)
        if self.json_object:
            return '{"type": "object"}'
        text = self.json or self.regex or self.grammar
        assert isinstance(text, str)
        return text

    @classmethod
    def of(cls, value: object) -> StructuredOutput:
        """Return a value of `SamplingParams.structured`, which may be a mapping of the fields."""
        if isinstance(value, StructuredOutput):
            return value
        allowed = "a StructuredOutput, or a mapping with one of its fields"
        given: Any = check_type("structured", value, Mapping, allowed)
        return from_mapping(cls, given, RequestError, "structured")


def _schema_text(schema: object) -> str:
    """Return a schema as JSON; properties appear in its order in the output."""
    allowed = f"a JSON schema of at most {MAX_SCHEMA_BYTES} bytes"
    parsed = schema
    try:
        if isinstance(schema, str):
            if len(schema) > MAX_SCHEMA_BYTES:
                raise _too_large("json", len(schema), "characters", allowed)
            parsed = json.loads(schema)
        if not isinstance(parsed, Mapping | bool):
            raise _refusal("json", schema, f"{allowed}: an object, True or False, or its text")
        text = json.dumps(parsed, ensure_ascii=False, allow_nan=False, default=_as_dict)
        size = len(text.encode())
    except RequestError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        reason = str(error) or type(error).__name__
        raise _error("json", f"json is no JSON: {reason[:200]}; allowed is {allowed}") from error
    if size > MAX_SCHEMA_BYTES:
        raise _too_large("json", size, "bytes", allowed)
    if _is_deep(json.loads(text), MAX_SCHEMA_DEPTH):
        raise _error(
            "json",
            f"json nests deeper than {MAX_SCHEMA_DEPTH} levels; name inner schemas under $defs"
            " and refer to them",
        )
    return text


def _as_dict(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a value of type {type(value).__name__} has no form in JSON")


def _is_deep(value: object, levels: int) -> bool:
    """Whether a value nests deeper than `levels`."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return not levels or any(_is_deep(item, levels - 1) for item in inner)


def _check_size(field: str, text: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:  # a lone surrogate
        raise _refusal(field, text, "a string in valid Unicode") from error
    if field == "grammar" and size > MAX_GRAMMAR_BYTES:
        raise _too_large(field, size, "bytes", f"1 to {MAX_GRAMMAR_BYTES} bytes")


def _error(field: str | None, reason: str) -> RequestError:
    return RequestError(f"StructuredOutput: {reason}", field=field)


def _too_large(field: str, size: int, unit: str, allowed: str) -> RequestError:
    return _error(field, f"{field} has {size} {unit}; allowed is {allowed}")


def _refusal(field: str, value: object, allowed: str) -> RequestError:
    return _error(field, f"{field} is {bounded_repr(value)}; allowed is {allowed}")
