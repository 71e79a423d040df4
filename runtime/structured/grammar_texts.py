"""Grammars of all kinds as texts that llguidance compiles.

llguidance computes all forced text at once. A rule that refers to itself after a literal forces
text without an end, so nothing is forced in grammars of users, nor in schemas with references. This
does not change which texts they allow. Other JSON schemas force little at once, as a space may
follow each `:` and `,`, and `chat_grammars.py` bounds what tool calls force.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Final

from ..exact_json import decode_at, dumps, loads
from .json_schemas import COMPACT, PreparedSchema, prepared_schema

__all__ = ["grammar_text"]

MAX_EBNF_BYTES: Final = 1 << 14
"""Of a grammar with `::=`, whose conversion takes time quadratic in its size."""

_UNFORCED: Final = '\n%llguidance {"no_forcing": true}'
"""At the end of a grammar, where it takes the place of an option before it."""
_IS_LARK: Final = re.compile(r"^[ \t]*(?:%llguidance\b|[?!]?start\b[^:\n]*:(?!:=))", re.MULTILINE)
_TOKEN: Final = re.compile(
    r"%(?P<keyword>json|llguidance|regex)\b\s*"
    r'|"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/|(?P<token><[^<>\s]+>)',
    re.DOTALL,
)
"""Keywords in a grammar that JSON follows, names of tokens, and what may contain a text that looks
like either: a string, a comment, a regular expression."""
_OPTIONS: Final = "x-guidance"
_ESCAPE: Final = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_REASONED: Final = r"""start: reasoning space @content
reasoning[lazy]: /(?s:.*)TAG/
space: /[ \t\r\n]{0,8}/"""


def grammar_text(kind: str, source: str, token_ids: Mapping[str, int] | None = None) -> str:
    """Return a grammar of a kind of `StructuredOutput` for llguidance.

    `token_ids` are the ids of added tokens, which grammars in Lark may name, as `<think>`.

    Raises:
        ValueError: it is invalid, or outputs could take too long.
    """
    from llguidance import LLMatcher  # an optional package

    if kind == "json":
        if source in ("true", "false"):  # which have no room for options
            if source == "false":
                raise ValueError("the schema false allows no text")
            source = "{}"
        schema = prepared_schema(source)
        return _of_lark(f"start: {_embedded(schema)}" + _UNFORCED * ('"$ref"' in schema.text))
    if kind == "regex":
        if (len(source) - len(source.rstrip("\\"))) % 2:
            raise ValueError("it ends with a backslash, which escapes nothing")
        return LLMatcher.grammar_from_regex(source)
    if kind == "choice":
        texts = dict.fromkeys(json.loads(source))
        quoted = (
            json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # not read otherwise
            for text in texts
        )
        return _of_lark("start: " + " | ".join(quoted))
    if kind == "calls":
        return _of_lark(_prepared(source, {}))
    if kind == "reasoned":
        tag, kind, source = json.loads(source)
        return _reasoned(tag, grammar_text(kind, source, token_ids))
    return _of_lark(_prepared(_as_lark(source), token_ids or {}) + _UNFORCED)


def _of_lark(lark: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": lark}]})


def _reasoned(tag: str, content: str) -> str:
    """Return a grammar of any text up to a tag, and of a content after it."""
    grammars = json.loads(content)["grammars"]
    grammars[0]["name"] = "content"
    pattern = re.escape(tag).replace("/", r"\/")
    lark = _REASONED.replace("TAG", pattern)
    return json.dumps({"grammars": [{"lark_grammar": lark}, *grammars]})


def _as_lark(source: str) -> str:
    """Return a grammar in Lark, or one with `::=`, in Lark."""
    if _IS_LARK.search(source):
        return source
    size = len(source.encode())
    if size > MAX_EBNF_BYTES:
        raise ValueError(
            f"it has no rule named start, and is read as EBNF with ::=, of which {MAX_EBNF_BYTES}"
            f" bytes are allowed, not {size}"
        )
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        lark: str = gbnf_to_lark(_ESCAPE.sub(_character, source))
    except Exception as error:
        raise ValueError(
            f"it has no rule named start, and is no EBNF with ::= either: {error}"
        ) from error
    return lark


def _prepared(lark: str, token_ids: Mapping[str, int]) -> str:
    """Return a grammar in which schemas are as `prepared_schema` returns them.

    Ids take the place of names of added tokens: llguidance knows no names of text.

    Raises:
        ValueError: a schema is not JSON, or is refused.
    """
    parts: list[str] = []
    start = 0
    while found := _TOKEN.search(lark, start):
        end = found.end()
        parts.append(lark[start : found.start()])
        if found["keyword"] is None:
            token_id = token_ids.get(found["token"])
            parts.append(found[0] if token_id is None else f"<[{token_id}]>")
        else:
            try:
                value, end = decode_at(lark, end)
            except ValueError as error:
                raise ValueError(
                    f"%{found['keyword']} is followed by no valid JSON: {error}"
                ) from error
            if found["keyword"] == "json" and isinstance(value, dict):
                options = value.get(_OPTIONS)
                layout = COMPACT | options if isinstance(options, dict) else COMPACT
                parts.append(_embedded(prepared_schema(dumps(value), layout)))
            else:
                parts.append(lark[found.start() : end])
        start = end
    return "".join((*parts, lark[start:]))


def _embedded(schema: PreparedSchema) -> str:
    """Return a schema as a part of a rule."""
    text = dumps(loads(schema.text) | {_OPTIONS: schema.options})
    return "%json " + text.replace("\x7f", "\\u007f")  # not read otherwise


def _character(escape: re.Match[str]) -> str:
    """Return the character of an escape beyond ASCII, which the conversion gets wrong."""
    code = int(escape[1] or "0", 16)
    is_text = code >= 0x80 and not 0xD800 <= code < 0xE000
    return chr(code) if is_text else escape[0]
