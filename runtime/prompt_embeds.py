"""Prompts with embeddings in the place of tokens: what an encoder made of an image, for instance.

    token_ids    5  9  7  7  7  7  3          any valid ids stand where embeddings go
    spans              [e0 e1 e2 e3]          EmbeddedSpan(position=2, content=...)

The embeddings take the place of the embedded (and, where a model does that, scaled) tokens. Blocks
that show them are shared like others: the content's key is part of their hash.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..cache.encoder_outputs import content_key
from .errors import RequestError

__all__ = ["EmbeddedSpan", "EncodedContent", "PromptEmbeds", "check_spans"]


@dataclass(frozen=True, slots=True, eq=False)
class EncodedContent:
    """Embeddings `[tokens, hidden_size]`, on any device, and 32 bytes that stand for them."""

    embeds: torch.Tensor
    key: bytes

    @classmethod
    def of(cls, embeds: torch.Tensor) -> EncodedContent:
        """Take embeddings that come from nowhere known: their own bytes are what they stand for."""
        raw = embeds.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        return cls(embeds, content_key(raw))


@dataclass(frozen=True, slots=True, eq=False)
class EmbeddedSpan:
    """Embeddings for the positions `position` and following of a prompt."""

    position: int
    content: EncodedContent

    @property
    def stop(self) -> int:
        """The first position behind the span."""
        return self.position + self.content.embeds.shape[0]


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbeds:
    """A prompt of token ids, some of whose positions hold embeddings instead."""

    token_ids: Sequence[int]
    spans: Sequence[EmbeddedSpan] = field(default=())


def check_spans(
    spans: Sequence[EmbeddedSpan], num_tokens: int, hidden_size: int
) -> tuple[EmbeddedSpan, ...]:
    """Return the spans in order of position, with embeddings in host memory.

    Raises:
        RequestError: embeddings of another shape or type, not all finite, outside the prompt, or
            overlapping.
    """
    checked: list[EmbeddedSpan] = []
    for index, span in enumerate(spans):
        if not isinstance(span, EmbeddedSpan) or not isinstance(span.position, int):
            raise RequestError(f"span {index} of the prompt must be an EmbeddedSpan, not {span!r}")
        embeds = span.content.embeds
        shape = tuple(embeds.shape)
        if len(shape) != 2 or shape[1] != hidden_size or not shape[0]:
            raise RequestError(
                f"span {index} has embeddings of shape {list(shape)}: "
                f"they must be [tokens, {hidden_size}], the model's hidden size"
            )
        if not embeds.is_floating_point():
            raise RequestError(
                f"span {index} has embeddings of {embeds.dtype}: give floating-point numbers"
            )
        if not bool(torch.isfinite(embeds).all()):
            raise RequestError(f"span {index} has embeddings with NaN or infinity")
        if not 0 <= span.position <= num_tokens - shape[0]:
            raise RequestError(
                f"span {index} covers positions {span.position} to {span.stop - 1}, "
                f"but the prompt has {num_tokens} tokens"
            )
        content = EncodedContent(embeds.detach().to("cpu"), span.content.key)
        checked.append(EmbeddedSpan(span.position, content))
    checked.sort(key=lambda span: span.position)
    for before, after in itertools.pairwise(checked):
        if before.stop > after.position:
            raise RequestError(
                f"spans at positions {before.position} and {after.position} overlap: "
                f"the first one ends at {before.stop - 1}"
            )
    return tuple(checked)
