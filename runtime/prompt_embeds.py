"""Prompts with embeddings in the place of some tokens, for instance of an encoded image.

    token_ids    5  9  7  7  7  7  3          any valid ids in the place of embeddings
    spans              [e0 e1 e2 e3]          EmbeddedSpan(position=2, content=...)

They replace the embedded tokens, after scaling in models that scale them. Blocks with embeddings
are shared like others: the content's key is part of their hash.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .arguments import check_type
from .errors import RequestError
from .prompt_ids import type_name

KEY_BYTES = 32


@dataclass(frozen=True, slots=True, eq=False)
class EncodedContent:
    """Embeddings `[tokens, hidden_size]`, on any device, and a key of 32 bytes for them."""

    embeds: torch.Tensor
    key: bytes

    @classmethod
    def of(cls, embeds: torch.Tensor) -> EncodedContent:
        """Return embeddings with a hash of their values as the key.

        Raises `RequestError` if they are not a tensor with values.
        """
        allowed = "a tensor of embeddings [tokens, hidden_size] with values"
        check_type("embeds", embeds, torch.Tensor, allowed)
        try:
            raw = embeds.detach().cpu().contiguous()
        except (RuntimeError, NotImplementedError) as error:  # sparse, or on the meta device
            shown = f"a {embeds.layout} tensor on {embeds.device}"
            raise RequestError(f"embeds must be {allowed}, not {shown}", field="embeds") from error
        content = f"{raw.dtype}{list(raw.shape)}".encode()
        content += raw.flatten().view(torch.uint8).numpy().tobytes()
        return cls(embeds, hashlib.blake2b(content, digest_size=KEY_BYTES).digest())


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedSpan:
    """Embeddings for the positions `position` and following of a prompt."""

    position: int
    content: EncodedContent

    @property
    def stop(self) -> int:
        """The first position after the span; `RequestError` if its content is none."""
        check_type("content", self.content, EncodedContent, "an EncodedContent")
        return self.position + self.content.embeds.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbeds:
    """A prompt of token ids with embeddings at some positions."""

    token_ids: Sequence[int]
    spans: Sequence[EmbeddedSpan] = field(default=())


def _checked_embeds(
    embeds: object, hidden_size: int, dtype: torch.dtype, what: str
) -> torch.Tensor:
    """Return a copy of a user's embeddings in host memory, as float32 `[tokens, hidden_size]`.

    Raises `RequestError`, which begins with `what`, for another shape or type and for values that
    are not finite in the model's `dtype`.
    """
    if not isinstance(embeds, torch.Tensor):
        raise _refusal(f"{what} {type(embeds).__name__}, but a tensor is needed")
    shape = tuple(embeds.shape)
    if len(shape) != 2 or shape[1] != hidden_size or not shape[0]:
        raise _refusal(
            f"{what} embeddings of shape {list(shape)}: "
            f"they must be [tokens, {hidden_size}], the model's hidden size"
        )
    if not embeds.is_floating_point():
        raise _refusal(f"{what} embeddings of {embeds.dtype}: give floating-point numbers")
    copied = embeds.detach().to("cpu", torch.float32, copy=True)
    if not bool(torch.isfinite(copied.to(dtype)).all()):
        raise _refusal(f"{what} embeddings with NaN or infinity, or too large for {dtype}")
    return copied


def _refusal(message: str) -> RequestError:
    return RequestError(message, field="spans")


def check_spans(
    spans: object, num_tokens: int, hidden_size: int, dtype: torch.dtype
) -> tuple[EmbeddedSpan, ...]:
    """Return the spans in order of position, with copies of their embeddings in host memory.

    Raises `RequestError` if a span or content has a wrong type or embeddings that the model cannot
    have, or it is outside of the prompt or overlaps another.
    """
    if isinstance(spans, (str, bytes)) or not isinstance(spans, Sequence):
        raise _refusal(f"spans must be a sequence of EmbeddedSpan, not {type_name(spans)}")
    checked: list[EmbeddedSpan] = []
    for index, span in enumerate(spans):
        if not isinstance(span, EmbeddedSpan) or type(span.position) is not int:
            raise _refusal(
                f"span {index} of the prompt must be an EmbeddedSpan with an integer position,"
                f" not a {type_name(span)}"
            )
        content = span.content
        key = content.key if isinstance(content, EncodedContent) else None
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise _refusal(
                f"span {index} has a content of type {type_name(content)}, or a key that is not"
                f" {KEY_BYTES} bytes: use EncodedContent.of(tensor)"
            )
        embeds = _checked_embeds(content.embeds, hidden_size, dtype, f"span {index} has")
        if not 0 <= span.position <= num_tokens - len(embeds):
            raise _refusal(
                f"span {index} covers positions {span.position} to {span.stop - 1}, "
                f"but the prompt has {num_tokens} tokens"
            )
        checked.append(EmbeddedSpan(span.position, EncodedContent(embeds, content.key)))
    checked.sort(key=lambda span: span.position)
    for before, after in itertools.pairwise(checked):
        if before.stop > after.position:
            raise _refusal(
                f"spans at positions {before.position} and {after.position} overlap: "
                f"the first one ends at {before.stop - 1}"
            )
    return tuple(checked)
