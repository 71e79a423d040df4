"""The structured payload of an NVTX range in an export of nsys: as JSON, or as bytes.

JSON is an object, alone or inside others. Bytes are what `nsys export --include-blobs=true` adds: a
head of four 64-bit numbers (domain, schema, bytes of the payload, and a last one that differs
between versions), and the struct, whose fields are rows of NVTX_PAYLOAD_SCHEMA_ENTRIES. Numbers of
a type are those of NVTX (nvToolsExtPayload.h). Standard library only.
"""

import json
import struct
from collections.abc import Iterable
from typing import Any, Final

__all__ = ["PayloadReader"]

_HEAD: Final = struct.Struct("<QQQQ")

_FORMATS: Final = {
    3: "<h", 4: "<H", 5: "<i", 6: "<I", 7: "<q", 8: "<Q", 9: "<q", 10: "<Q", 11: "<b", 12: "<B",
    13: "<h", 14: "<H", 15: "<i", 16: "<I", 17: "<q", 18: "<Q", 22: "<Q",
}  # fmt: skip
"""NVTX_PAYLOAD_ENTRY_TYPE_* of whole numbers: of the C types on 64-bit Linux, of fixed sizes from
11 on, and `size_t`."""

_MOST_BITS: Final = 64
"""Of a number of NVTX; one of JSON may have thousands of digits."""

_MOST_NESTED: Final = 8
"""Objects in objects of JSON that are looked into: a hostile file may have a million."""


class PayloadReader:
    """Decodes payloads by the schemas of one export.

    Args:
        entries: rows (domainId, schemaId, idx, type, name, offset), in the order of `idx`.
    """

    def __init__(self, entries: Iterable[tuple[Any, ...]]) -> None:
        self._schemas: dict[tuple[Any, Any], list[tuple[str, str, int]]] = {}
        behind: dict[tuple[Any, Any], int] = {}
        for domain, schema, _, kind, name, offset in entries:
            key = domain, schema
            layout = _FORMATS.get(kind) if isinstance(kind, int) else None
            at = offset if isinstance(offset, int) and offset >= 0 else behind.get(key, 0)
            if layout is None:
                continue
            self._schemas.setdefault(key, []).append((str(name), layout, at))
            behind[key] = at + struct.calcsize(layout)

    def numbers(self, text: str | None, binary: object) -> dict[str, int]:
        """Return the whole numbers of a payload by name; empty where there is none to be read."""
        if text is not None:
            return _of_json(text)
        if isinstance(binary, bytes):
            return self._of_bytes(binary)
        return {}

    def _of_bytes(self, binary: bytes) -> dict[str, int]:
        if len(binary) < _HEAD.size:
            return {}
        domain, schema, size, _ = _HEAD.unpack_from(binary)
        payload = binary[_HEAD.size : _HEAD.size + size]
        return {
            name: struct.unpack_from(layout, payload, at)[0]
            for name, layout, at in self._schemas.get((domain, schema), ())
            if at + struct.calcsize(layout) <= len(payload)
        }


def _of_json(text: str) -> dict[str, int]:
    """The whole numbers of the first object that has any, an outer one before an inner one."""
    try:
        level: list[Any] = [json.loads(text)]
    except (ValueError, RecursionError):
        return {}
    for _ in range(_MOST_NESTED):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                numbers = {
                    name: n
                    for name, n in value.items()
                    if type(n) is int and n.bit_length() <= _MOST_BITS
                }
                if numbers:
                    return numbers
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
        level = inner
    return {}
