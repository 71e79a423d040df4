"""Converts token ids of users to plain integers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence, Set
from typing import Any, cast

import numpy as np
import torch

from .errors import RequestError

__all__ = ["plain_batch", "plain_token_ids", "too_long", "type_name"]

ACCEPTED = (
    "text, or token ids as a list, tuple or range of integers, an array.array, or a one-dimensional"
    " NumPy array or CPU tensor of integers"
)
_ARRAYS = (np.ndarray, torch.Tensor)
_MAX_NAME_CHARS = 80


def type_name(value: object) -> str:
    """Return the name of a value's type, at most 80 characters."""
    return type(value).__name__[:_MAX_NAME_CHARS]


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
    if issubclass(kind, _ARRAYS):
        return cast("np.ndarray", prompts).ndim <= 1
    if issubclass(kind, (list, tuple)):
        values = cast("Sequence[object]", prompts)
        return bool(values) and all(map(_is_integer, values))
    return kind is range or kind is array


def _is_integer(value: object) -> bool:
    kind = type(value)
    return issubclass(kind, (int, np.integer)) and kind is not bool


def plain_token_ids(prompt: object, vocab_size: int, longest: int) -> list[int]:
    """Return token ids as plain integers.

    Args:
        prompt: from a user.
        vocab_size: ids must be below it.
        longest: a prompt of this many ids or more is refused before any is read.

    Raises:
        RequestError: a wrong type, too many ids, or one outside the vocabulary.
    """
    kind = type(prompt)
    if not issubclass(kind, (list, tuple, range, array, *_ARRAYS)):
        raise RequestError(
            f"the prompt must be {ACCEPTED}, not {type_name(prompt)}", field="prompt"
        )
    sequence = cast("Any", prompt)
    try:
        if issubclass(kind, _ARRAYS) and sequence.ndim != 1:
            shape = str(tuple(sequence.shape))[:_MAX_NAME_CHARS]
            raise RequestError(
                f"the prompt must be {ACCEPTED}, not a {type_name(prompt)} of shape {shape}",
                field="prompt",
            )
        if len(sequence) >= longest:
            raise too_long(f"{len(sequence)} tokens", longest)
        values: list[object] = (
            list(sequence) if issubclass(kind, (list, tuple, range)) else sequence.tolist()
        )
    except RequestError:
        raise
    except Exception as error:  # for example of a sparse tensor
        raise RequestError(
            f"the prompt of type {type_name(prompt)} cannot be read: {type_name(error)}",
            field="prompt",
        ) from error
    if set(map(type, values)) != {int}:
        values = [_plain_integer(value, position) for position, value in enumerate(values)]
    token_ids = cast("list[int]", values)
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        position = next(i for i, token in enumerate(token_ids) if not 0 <= token < vocab_size)
        token = token_ids[position]
        shown = token if token.bit_length() < 128 else f"of {token.bit_length()} bits"
        raise RequestError(
            f"token {shown} at position {position} of the prompt is outside the vocabulary of"
            f" {vocab_size}",
            field="prompt",
        )
    return token_ids


def _plain_integer(value: object, position: int) -> int:
    if _is_integer(value):
        return int(cast("int", value))
    hint = ": give one prompt a call" if issubclass(type(value), (str, list, tuple)) else ""
    raise RequestError(
        f"the prompt must be a sequence of integer token ids, but position {position} holds a"
        f" {type_name(value)}{hint}",
        field="prompt",
    )


def too_long(tokens: str, longest: int, field: str = "prompt") -> RequestError:
    """Return the error for a prompt of too many tokens."""
    return RequestError(
        f"the prompt has {tokens}, but a sequence may have at most {longest} (max_model_len, or"
        " what the cache holds) and needs room for at least one more: shorten the prompt or raise"
        " max_model_len or the memory budget",
        field=field,
        code="context_length_exceeded",
    )
