"""Converts token ids of users to plain integers, without calling methods of untrusted objects.

`__len__`, `__iter__`, `__index__`, `__eq__` and `__repr__` of a prompt may raise, or return other
values each time. So only the types below are accepted, and read by methods of the built-in types;
messages name the type of anything else.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Mapping, Sequence, Set
from typing import Any, cast

import numpy as np
import torch

from .errors import RequestError

__all__ = ["plain_batch", "plain_text", "plain_token_ids", "too_long", "type_name"]

ACCEPTED = (
    "text, or token ids as a list, tuple or range of integers, an array.array, or a one-dimensional"
    " NumPy array or CPU tensor of integers"
)
_MAX_NAME_CHARS = 80
_INTEGER_DTYPES = frozenset(
    {
        torch.uint8,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    }
)


def type_name(value: object) -> str:
    """Return the name of a value's type, at most 80 characters."""
    name: str = type.__dict__["__name__"].__get__(type(value))
    return name[:_MAX_NAME_CHARS]


def plain_batch(prompts: object, single: tuple[type, ...]) -> list[object]:
    """Return the prompts of a batch; one prompt is a batch of one.

    One prompt is a value of one of the `single` types, or token ids: a non-empty list or tuple of
    integers, or a one-dimensional value of the other types of token ids.

    Raises:
        RequestError: `prompts` is not a sequence, or cannot be read.
    """
    kind = type(prompts)
    if issubclass(kind, single) or _are_token_ids(prompts):
        return [prompts]
    expected = "prompts must be text, a list of token ids or a list of prompts"
    other = (bytes, bytearray, memoryview, Mapping, Set)
    if issubclass(kind, other) or not hasattr(kind, "__iter__"):
        raise RequestError(f"{expected}, not {type_name(prompts)}", field="prompts")
    try:
        return list(prompts)  # type: ignore[call-overload,no-any-return]
    except Exception as error:
        raise RequestError(
            f"{expected}; reading the {type_name(prompts)} raised {type_name(error)}",
            field="prompts",
        ) from error


def _are_token_ids(prompts: object) -> bool:
    """Whether the prompts of a batch are the token ids of one prompt."""
    kind = type(prompts)
    if kind is range or kind is array:
        return True
    if kind is np.ndarray or kind is np.memmap or kind is torch.Tensor:
        return cast("np.ndarray", prompts).ndim <= 1
    values: Sequence[object] = ()
    if issubclass(kind, list):
        values = list.__getitem__(cast("list[object]", prompts), slice(None))
    elif issubclass(kind, tuple):
        values = tuple.__getitem__(cast("tuple[object, ...]", prompts), slice(None))
    return bool(values) and all(_is_integer(type(value)) for value in values)


def _is_integer(kind: type) -> bool:
    return (issubclass(kind, int) and kind is not bool) or (
        issubclass(kind, np.integer) and kind.__module__ == "numpy"
    )


def plain_text(value: object) -> str | None:
    """Return a string as an exact `str`, None for anything else."""
    return str.__str__(value) if issubclass(type(value), str) else None


def plain_token_ids(prompt: object, vocab_size: int, longest: int) -> list[int]:
    """Return token ids as plain integers.

    Args:
        prompt: from a user.
        vocab_size: ids must be below it.
        longest: a prompt of this many ids or more is refused before any is read.

    Raises:
        RequestError: a wrong type, too many ids, or one outside the vocabulary.
    """
    try:
        values = _values(prompt, longest)
    except RequestError:
        raise
    except Exception as error:  # for example of an array without memory
        raise RequestError(
            f"the prompt of type {type_name(prompt)} cannot be read: {type_name(error)}",
            field="prompt",
        ) from error
    if set(map(type, values)) == {int}:  # the common case, without a call for each
        plain = cast("Sequence[int]", values)
        if min(plain) >= 0 and max(plain) < vocab_size:
            return list(plain)
    token_ids = []
    for position, value in enumerate(values):
        token = _plain_integer(value, position)
        if not 0 <= token < vocab_size:
            shown = token if token.bit_length() < 128 else f"of {token.bit_length()} bits"
            raise RequestError(
                f"token {shown} at position {position} of the prompt is outside the"
                f" vocabulary of {vocab_size}",
                field="prompt",
            )
        token_ids.append(token)
    return token_ids


def _values(prompt: object, longest: int) -> Sequence[object]:
    kind = type(prompt)
    if issubclass(kind, list):  # a subclass may override `__iter__`
        values = cast("list[object]", prompt)
        _check_length(list.__len__(values), longest)
        return list.__getitem__(values, slice(None))
    if issubclass(kind, tuple):
        several = cast("tuple[object, ...]", prompt)
        _check_length(tuple.__len__(several), longest)
        return tuple.__getitem__(several, slice(None))
    if kind is range:
        assert isinstance(prompt, range)
        length = -((prompt.start - prompt.stop) // prompt.step)  # rounded up; `len` may overflow
        _check_length(min(length, sys.maxsize), longest)
        return prompt
    if kind is array:
        assert isinstance(prompt, array)
        if prompt.typecode not in "bBhHiIlLqQ":
            raise _refusal(f"an array.array of type code {prompt.typecode!r}")
        _check_length(len(prompt), longest)
        return prompt.tolist()
    if kind is np.ndarray or kind is np.memmap:
        assert isinstance(prompt, np.ndarray)
        if prompt.dtype.kind not in "iu" or prompt.ndim != 1:
            raise _refusal(f"a NumPy array of {str(prompt.dtype)[:_MAX_NAME_CHARS]}", prompt.shape)
        _check_length(prompt.shape[0], longest)
        return cast("list[object]", prompt.tolist())
    if kind is torch.Tensor:
        assert isinstance(prompt, torch.Tensor)
        return _tensor_values(prompt, longest)
    raise _refusal(type_name(prompt))


def _tensor_values(tensor: torch.Tensor, longest: int) -> Sequence[object]:
    what = f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}"
    if (
        tensor.layout is not torch.strided
        or tensor.device.type != "cpu"
        or tensor.dtype not in _INTEGER_DTYPES
    ):
        raise _refusal(what)
    if tensor.ndim != 1:
        raise _refusal(what, tuple(tensor.shape))
    _check_length(tensor.shape[0], longest)
    last = tensor.storage_offset() + max(tensor.shape[0] - 1, 0) * tensor.stride(0)
    if tensor.shape[0] and tensor.untyped_storage().nbytes() <= last * tensor.element_size():
        raise _refusal(f"{what} without memory")
    values: list[object] = tensor.tolist()
    return values


def _plain_integer(value: object, position: int) -> int:
    kind = type(value)
    if issubclass(kind, int) and kind is not bool:
        return int.__index__(cast(int, value))
    if issubclass(kind, np.integer) and kind.__module__ == "numpy":
        return int(cast("np.integer[Any]", value))
    hint = ": give one prompt a call" if issubclass(kind, (str, list, tuple)) else ""
    raise RequestError(
        f"the prompt must be a sequence of integer token ids, but position {position} holds a"
        f" {type_name(value)}{hint}",
        field="prompt",
    )


def _check_length(length: int, longest: int) -> None:
    if length >= longest:
        raise too_long(f"{length} tokens", longest)


def too_long(tokens: str, longest: int, field: str = "prompt") -> RequestError:
    """Return the error for a prompt of too many tokens."""
    return RequestError(
        f"the prompt has {tokens}, but a sequence may have at most {longest} (max_model_len, or"
        " what the cache holds) and needs room for at least one more: shorten the prompt or raise"
        " max_model_len or the memory budget",
        field=field,
        code="context_length_exceeded",
    )


def _refusal(what: str, shape: tuple[int, ...] | None = None) -> RequestError:
    shown = what if shape is None else f"{what} of shape {str(shape)[:_MAX_NAME_CHARS]}"
    return RequestError(f"the prompt must be {ACCEPTED}, not {shown}", field="prompt")
