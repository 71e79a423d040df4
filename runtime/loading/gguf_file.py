"""Parses GGUF files: metadata and headers of tensors, with the data mapped into memory.

The layout is specified in ggml's docs/gguf.md. Files are not trusted: all sizes are checked against
the file before anything is read or allocated, and problems are `CheckpointError`s that name it. The
package gguf has a parser, which trusts sizes and takes seconds for large vocabularies.
"""

from __future__ import annotations

import errno
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from struct import Struct
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch

from ..bounded_repr import bounded_repr, bounded_text
from ..errors import CheckpointError
from ..kernels.weights.gguf import GGUF_TYPES, PLAIN_TYPES, GGUFType, PlainType
from .checkpoint_files import has_file, unmapped

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MOST_HEADER_BYTES = 256 << 20
"""Most bytes of metadata and headers; files with large vocabularies have 10 to 20 MiB."""
_MOST_STRINGS = 1 << 22
"""Most strings in all lists, of which the largest are merges."""
_MOST_DIMENSIONS = 4
_ALIGNMENT = 32
_SPLIT = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE | re.DOTALL)
_SCALARS = dict(enumerate((*"BbHhIif?", None, None, *"Qqd")))
"""The format of `struct` of each type of metadata; strings are 8 and lists are 9."""
_STRING, _LIST = 8, 9
_U32, _U64 = Struct("<I"), Struct("<Q")
_TYPES: dict[int, GGUFType | PlainType] = {**PLAIN_TYPES, **GGUF_TYPES}
T = TypeVar("T")


@dataclass(frozen=True)
class GGUFTensor:
    """The header of a tensor."""

    name: str
    type: GGUFType | PlainType
    shape: tuple[int, ...]
    """With the inputs of a row last, as in torch."""
    file: Path
    data: torch.Tensor
    """Mapped: uint8 `[..., S, B]` if the type has blocks, else the numbers in its shape."""
    scales: torch.Tensor | None = None
    """Factors of the tensor, or of each expert of a stack, float32."""


class GGUFFile:
    """One file. Its data stays mapped as long as this object or one of its tensors exists."""

    def __init__(self, path: Path) -> None:
        if not has_file(path):
            raise CheckpointError(f"{bounded_text(path, 500)} does not exist")
        self.path = path
        self._mapped = _mapped(path)
        self._bytes: memoryview = self._mapped[:_MOST_HEADER_BYTES].numpy().data
        self._at = self._strings = 0
        self._metadata: dict[str, Any] = {}
        if bytes(self._take(4)) != _MAGIC:
            raise self._error("it is not a GGUF file: it does not begin with 'GGUF'")
        version = self._number(_U32)
        if version not in _VERSIONS:
            what = "big-endian, or of" if version >> 16 else "of"
            raise self._error(f"it is {what} version {version}; versions 2 and 3 are read")
        tensors, keys = self._number(_U64), self._number(_U64)
        for _ in range(keys):
            key = self._string("a key of the metadata")
            if key in self._metadata:
                raise self._error(f"the metadata has the key {bounded_repr(key, 80)} twice")
            self._metadata[key] = self._value(key, self._number(_U32))
        self.tensors = {tensor.name: tensor for tensor in self._tensors(tensors)}
        """By name; `open_gguf` adds the tensors of the other parts of a split file."""

    @property
    def keys(self) -> frozenset[str]:
        """The keys of the metadata."""
        return frozenset(self._metadata)

    def get(
        self, key: str, kind: type[T] | tuple[type[T], ...], default: T | None = None
    ) -> T | None:
        """Return a value of the metadata; `default` without the key.

        Args:
            key: of the metadata.
            kind: of the value: str, int, float, bool, list (of strings) or np.ndarray, or several.
            default: returned if the file has no such key.

        Raises:
            CheckpointError: the value is of another type.
        """
        value: T | None = self._metadata.get(key)
        if value is None:
            return default
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if type(value) not in kinds:
            names = " or ".join(each.__name__ for each in kinds)
            raise self._error(f"{key} must be of type {names}, not {bounded_repr(value, 80)}")
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """Return a value as `get`; raise `CheckpointError` without the key."""
        value = self.get(key, kind)
        if value is None:
            raise self._error(f"the metadata has no {key}")
        return value

    def plain(self, key: str) -> Any:
        """Return a value of the metadata as JSON has it: numbers, strings and lists."""
        value = self._metadata.get(key)
        return value.tolist() if isinstance(value, np.ndarray) else value

    def _error(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{bounded_text(self.path, 500)}: {problem}")

    def _take(self, size: int) -> memoryview:
        part = self._bytes[self._at : self._at + size]
        if len(part) < size:
            raise self._error(
                f"it is truncated: {size} bytes at {self._at} are not in its"
                f" {len(self._mapped)} bytes, or its header is longer than {_MOST_HEADER_BYTES}"
            )
        self._at += size
        return part

    def _number(self, layout: Struct) -> Any:
        return layout.unpack(self._take(layout.size))[0]

    def _string(self, what: str) -> str:
        try:
            return str(self._take(self._number(_U64)), "utf-8")
        except UnicodeDecodeError as error:
            raise self._error(f"{bounded_text(what, 80)} is not UTF-8: {error}") from error

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _LIST:
            kind, count = self._number(_U32), self._number(_U64)
            if kind == _STRING:
                self._strings += count
                if self._strings > _MOST_STRINGS:
                    raise self._error(
                        f"its lists up to {bounded_repr(key, 80)} have {self._strings} strings, at"
                        " most 2**22 allowed"
                    )
                return [self._string(key) for _ in range(count)]
            if layout := _SCALARS.get(kind):
                dtype = np.dtype(layout).newbyteorder("<")
                return np.frombuffer(self._take(count * dtype.itemsize), dtype)
        elif layout := _SCALARS.get(kind):
            value = self._number(Struct(f"<{layout}"))
            # The shortest decimal is the number that was converted to float32, such as 1e-5.
            return float(str(np.float32(value))) if layout == "f" else value
        raise self._error(f"{bounded_repr(key, 80)} has a value of the unknown type {kind}")

    def _tensors(self, count: int) -> Iterator[GGUFTensor]:
        headers: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(count):
            name = self._string("the name of a tensor")
            if name in headers:
                raise self._error(f"it holds the tensor {bounded_repr(name, 80)} twice")
            dimensions = self._number(_U32)
            if not 1 <= dimensions <= _MOST_DIMENSIONS:
                raise self._error(f"{bounded_repr(name, 80)} has {dimensions} dimensions")
            shape = tuple(self._number(_U64) for _ in range(dimensions))[::-1]
            headers[name] = shape, self._number(_U32), self._number(_U64)
        alignment = self.get("general.alignment", int, _ALIGNMENT)
        if not alignment or alignment & (alignment - 1):
            raise self._error(f"general.alignment = {alignment} must be a power of two")
        start = -(-self._at // alignment) * alignment
        for name, (shape, kind, offset) in headers.items():
            yield self._tensor(name, shape, kind, start + offset)

    def _tensor(self, name: str, shape: tuple[int, ...], kind: int, start: int) -> GGUFTensor:
        if (found := _TYPES.get(kind)) is None:
            raise self._error(
                f"{bounded_repr(name, 80)} is of type {_type_name(kind)}, supported:"
                f" {', '.join(known.name for known in _TYPES.values())}. Use a file in one of these"
            )
        nbytes, elements = found.nbytes, found.elements
        if shape[-1] % elements:
            raise self._error(
                f"{bounded_repr(name, 80)} has rows of {shape[-1]} elements, which must be a"
                f" multiple of the {elements} of a block of {found.name}"
            )
        size = math.prod(shape) // elements * nbytes
        if start % _ALIGNMENT and start % nbytes:
            raise self._error(f"{bounded_repr(name, 80)} begins at the odd byte {start}")
        if start + size > len(self._mapped) or not size:
            raise self._error(
                f"it is truncated: {bounded_repr(name, 80)} {bounded_repr(list(shape), 80)} is"
                f" {size} bytes from byte {start} on, of {len(self._mapped)}"
            )
        data = self._mapped[start : start + size]
        if isinstance(found, PlainType):
            data = data.view(found.dtype).view(shape)
        else:
            data = data.view(*shape[:-1], shape[-1] // elements, nbytes)
        return GGUFTensor(name, found, shape, self.path, data)


def open_gguf(path: Path) -> GGUFFile:
    """Open a file, or the first part of a split one with the tensors of all.

    Raises:
        CheckpointError: a file is missing or damaged, or the parts do not belong together.
    """
    first = GGUFFile(path)
    for part in parts_of(path)[1:]:
        other = GGUFFile(part)
        if twice := first.tensors.keys() & other.tensors.keys():
            raise CheckpointError(f"{part}: it holds {bounded_repr(min(twice), 80)} again")
        first.tensors |= other.tensors
    expected = first.get("split.tensors.count", int, len(first.tensors))
    if len(first.tensors) != expected:
        raise CheckpointError(
            f"{path}: its parts hold {len(first.tensors)} tensors, and split.tensors.count ="
            f" {expected}: fetch all parts of one model"
        )
    for name in [name for name in first.tensors if name.endswith((".scale", ".input_scale"))]:
        scales = first.tensors.pop(name)  # those of inputs are for products in 4 bits
        weight = first.tensors.get(f"{name.removesuffix('.scale')}.weight")
        if weight is not None and scales.data.dtype == torch.float32:
            first.tensors[weight.name] = replace(weight, scales=scales.data.flatten())
    return first


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model, of which the first one has the metadata."""
    if (split := _SPLIT.fullmatch(path.name)) is None:
        return [path]
    stem, count = split[1], int(split[3])
    parts = [path.with_name(f"{stem}-{i + 1:05}-of-{count:05}{SUFFIX}") for i in range(count)]
    if missing := [part.name for part in parts if not has_file(part)]:
        raise CheckpointError(
            f"{path}: {len(missing)} of {count} parts are missing, such as"
            f" {bounded_text(missing[0], 200)}: fetch all of them into one directory"
        )
    return parts


def is_gguf(path: Path) -> bool:
    """Whether a path is of a GGUF file, by its name."""
    return path.suffix.lower() == SUFFIX and path.is_file()


def find_gguf(place: Path, quantisation: str | None = None) -> Path | None:
    """Return the file of a model, of a split one the first; None if there is none.

    Args:
        place: a file, or a directory with the files of one model.
        quantisation: only files with this in their names, such as `Q4_K_M`, in any case; also in
            directories of the directory.

    Raises:
        CheckpointError: the directory has several models.
    """
    if is_gguf(place):
        return parts_of(place)[0]
    pattern = f"**/*{SUFFIX}" if quantisation else f"*{SUFFIX}"
    found = {parts_of(path)[0] for path in place.glob(pattern) if "mmproj" not in path.name}
    if quantisation:
        named = re.compile(rf"(.*[-._/])?{re.escape(quantisation)}[-./].*", re.IGNORECASE)
        found = {p for p in found if named.fullmatch(p.relative_to(place).as_posix())}
    if len(found) > 1:
        names = ", ".join(sorted(path.name for path in found))
        raise CheckpointError(
            f"{place} has {len(found)} models: {bounded_text(names, 300)}. Give the path of one"
        )
    return found.pop() if found else None


def _mapped(path: Path) -> torch.Tensor:
    """Return the bytes of a file, mapped into memory."""
    try:
        if not (size := path.stat().st_size):
            raise CheckpointError(f"{bounded_text(path, 500)} is empty")
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        if f"({errno.ENOMEM})" in str(error):
            raise unmapped(path, error) from error
        raise CheckpointError(f"{path} cannot be read: {bounded_text(error)}") from error


def gguf_package() -> ModuleType:
    """Return the package gguf, which has the names of tensors in all architectures."""
    try:
        import gguf
    except ImportError as error:
        raise CheckpointError(
            'GGUF files need the package gguf: pip install "stepgraph[gguf]"'
        ) from error
    return gguf


def _type_name(kind: int) -> str:
    try:
        return str(gguf_package().GGMLQuantizationType(kind).name)
    except ValueError:
        return f"{kind}, which is unknown"
