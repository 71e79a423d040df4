"""Converts token ids of users to plain integers."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Set
from contextlib import suppress
from typing import Any, cast

import numpy as np
import torch

from .bounded_repr import bounded_repr
from .errors import RequestError

ACCEPTED = (
    "text, or token ids as a list, tuple or range of integers, an array.array, or a one-dimensional"
    " NumPy array or CPU tensor of integers"
)
_ARRAYS = (np.ndarray, torch.Tensor)
_MAX_NAME_CHARS = 80


def type_name(value: object) -> str:
    """Return the name of a value's type, at most 80 characters."""
    return type(value).__name__[:_MAX_NAME_CHARS]


def plain_batch(prompts: Any, single: tuple[type, ...]) -> list[object]:
    """Return the prompts of a batch; one prompt is a batch of one.

    One prompt is a value of one of the `single` types, or token ids: a non-empty list or tuple of
    integers, or a one-dimensional value of the other types of token ids. Raises `RequestError` if
    `prompts` is not a sequence.
    """
    if isinstance(prompts, _ARRAYS):
        one = prompts.ndim <= 1
    elif isinstance(prompts, list | tuple):
        one = bool(prompts) and all(map(_is_integer, prompts))
    else:
        one = isinstance(prompts, (*single, range, array))
    if one:
        return [prompts]
    if not isinstance(prompts, (bytes, bytearray, memoryview, Mapping, Set)):
        with suppress(Exception):  # of an object of the user
            return list(prompts)
    raise RequestError(
        f"prompts must be text, a list of token ids or a list of prompts, not {type_name(prompts)}",
        field="prompts",
    )


def _is_integer(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def plain_token_ids(prompt: Any, vocab_size: int, longest: int) -> list[int]:
    """Return token ids of a user as plain integers.

    Ids must be below `vocab_size`. A prompt of `longest` ids or more is refused before any is read.
    Raises `RequestError` for these, for too many ids, and for another type.
    """
    is_list = isinstance(prompt, list | tuple | range)
    if not is_list and not isinstance(prompt, (array, *_ARRAYS)):
        raise RequestError(
            f"the prompt must be {ACCEPTED}, not {type_name(prompt)}", field="prompt"
        )
    if isinstance(prompt, _ARRAYS) and prompt.ndim != 1:
        shape = bounded_repr(tuple(prompt.shape), _MAX_NAME_CHARS)
        raise RequestError(
            f"the prompt must be {ACCEPTED}, not a {type_name(prompt)} of shape {shape}",
            field="prompt",
        )
    try:
        count = len(prompt)
        values = prompt if count >= longest else list(prompt) if is_list else prompt.tolist()
    except Exception as error:  # for example of a sparse tensor
        raise RequestError(
            f"the prompt of type {type_name(prompt)} cannot be read: {type_name(error)}",
            field="prompt",
        ) from error
    if count >= longest:
        raise too_long(f"{count} tokens", longest)
    if set(map(type, values)) != {int}:
        for position, value in enumerate(values):
            if not _is_integer(value):
                hint = ": give one prompt a call" if isinstance(value, str | list | tuple) else ""
                raise RequestError(
                    "the prompt must be a sequence of integer token ids, but position"
                    f" {position} holds a {type_name(value)}{hint}",
                    field="prompt",
                )
        values = list(map(int, values))
    if values and not (min(values) >= 0 and max(values) < vocab_size):
        position = next(i for i, token in enumerate(values) if not 0 <= token < vocab_size)
        raise RequestError(
            f"token {bounded_repr(values[position])} at position {position} of the prompt is"
            f" outside the vocabulary of {vocab_size}",
            field="prompt",
        )
    return cast("list[int]", values)


def too_long(tokens: str, longest: int, field: str = "prompt") -> RequestError:
    """Return the error for a prompt of too many tokens."""
    return RequestError(
        f"the prompt has {tokens}, but a sequence may have at most {longest} (max_model_len, or"
        " what the cache holds) and needs room for at least one more: shorten the prompt or raise"
        " max_model_len or the memory budget",
        field=field,
        code="context_length_exceeded",
    )
