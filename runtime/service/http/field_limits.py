"""Types of the fields of requests, with the limits that the OpenAPI document has, and checks."""

from __future__ import annotations

from collections.abc import Sized
from typing import Annotated

from msgspec import Meta

from ...bounded_repr import bounded_repr
from ...sampling_params import (
    MAX_ADDITIVE_PENALTY,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIAS_ENTRIES,
    MAX_LOGPROBS,
    MAX_STOP_STRING_CHARS,
    MAX_TOKEN_ID,
    MAX_TOKENS_LIMIT,
    MAX_TRUNCATED_TOKENS,
)
from ..request_handle import MAX_SECONDS
from .http_errors import HttpError

__all__ = [
    "MAX_MESSAGES",
    "Biases",
    "AllowedTokenIds",
    "BadWords",
    "NumLogprobs",
    "NumTokens",
    "Penalty",
    "Prompts",
    "Seconds",
    "StopString",
    "TokenId",
    "allows",
    "check_count",
    "check_length",
    "LogprobTokenIds",
    "NumTruncated",
]


def allows(**limits: object) -> Meta:
    """Return limits for the OpenAPI document; `SamplingParams` and `RequestOptions` check them."""
    return Meta(extra_json_schema=limits)


NumTokens = Annotated[int, allows(minimum=0, maximum=MAX_TOKENS_LIMIT)]
Penalty = Annotated[float, allows(minimum=-MAX_ADDITIVE_PENALTY, maximum=MAX_ADDITIVE_PENALTY)]
TokenId = Annotated[int, allows(minimum=0, maximum=MAX_TOKEN_ID)]
NumLogprobs = Annotated[int, allows(minimum=0, maximum=MAX_LOGPROBS)]
StopString = Annotated[str, allows(minLength=1, maxLength=MAX_STOP_STRING_CHARS)]
Bias = Annotated[float, allows(minimum=-MAX_LOGIT_BIAS, maximum=MAX_LOGIT_BIAS)]
Biases = Annotated[
    dict[TokenId, Bias],
    allows(maxProperties=MAX_LOGIT_BIAS_ENTRIES, propertyNames={"pattern": "^[0-9]{1,9}$"}),
]
Seconds = Annotated[float, allows(exclusiveMinimum=0, maximum=MAX_SECONDS)]
AllowedTokenIds = Annotated[list[TokenId], allows(minItems=1, maxItems=MAX_ALLOWED_TOKEN_IDS)]
LogprobTokenIds = Annotated[list[TokenId], allows(maxItems=MAX_LOGPROBS)]
BadWords = Annotated[
    list[Annotated[str, allows(minLength=1, maxLength=MAX_BAD_WORD_CHARS)]],
    allows(maxItems=MAX_BAD_WORDS),
]
NumTruncated = Annotated[int, allows(minimum=-1, maximum=MAX_TRUNCATED_TOKENS)]
Prompts = str | list[str | TokenId | list[TokenId]]

MAX_MESSAGES = 1 << 14
"""Also of tools and of documents."""


def check_count(name: str, value: int | None, most: int) -> None:
    """Raise `HttpError` if a number is below 0 or above `most`."""
    if value is not None and not 0 <= value <= most:
        shown = bounded_repr(value)
        raise HttpError(
            400, f"{name} is {shown}; allowed is an integer from 0 to {most}", param=name
        )


def check_length(name: str, value: Sized | None, most: int, unit: str, *, least: int = 0) -> None:
    """Raise `HttpError` if a text or a list is shorter than `least` or longer than `most`."""
    if value is not None and not least <= len(value) <= most:
        raise HttpError(
            400, f"{name} has {len(value)} {unit}; allowed are {least} to {most}", param=name
        )
