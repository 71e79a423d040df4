"""The cache of encoder outputs for images and other contents, safe for several threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ...cache.encoder_outputs import EncoderOutputCache, content_key
from ..arguments import check_callable
from ..errors import RequestError
from ..prompt_embeds import EncodedContent, check_embeds
from .access import LoopAccess

__all__ = ["EncodedContents"]

T = TypeVar("T")


class EncodedContents:
    """Runs an encoder for contents that are not cached. Thread-safe."""

    def __init__(self, max_bytes: int, hidden_size: int, dtype: torch.dtype) -> None:
        """Cache at most `max_bytes` bytes of embeddings `[tokens, hidden_size]` of a dtype."""
        self.cache = EncoderOutputCache(max_bytes)
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._access = LoopAccess()

    def encode(self, content: bytes, encoder: Callable[[bytes], torch.Tensor]) -> EncodedContent:
        """Return the embeddings of a content; see `Engine.encode`.

        Raises:
            RequestError: `content` is not bytes, or `encoder` returned no embeddings.
        """
        if not isinstance(content, bytes):
            raise RequestError(
                f"content must be bytes, not {type(content).__name__}", field="content"
            )
        check_callable("encoder", encoder, "bytes that returns embeddings")
        key = content_key(content, "encoded")
        embeds = self._use(lambda cache: cache.get(key))
        if embeds is None:
            encoded = encoder(content)
            made = check_embeds(encoded, self._hidden_size, self._dtype, "the encoder gave")
            self._use(lambda cache: cache.put(key, made))
            embeds = made
        return EncodedContent(embeds, key)

    def clear(self) -> None:
        """Drop what is cached."""
        self._use(EncoderOutputCache.clear)

    def _use(self, operation: Callable[[EncoderOutputCache], T]) -> T:
        """Run an operation on the cache, one thread at a time."""
        try:
            self._access.enter("encode")
            return operation(self.cache)
        except BaseException:
            self.cache.clear()  # an interrupt may have left it inconsistent
            raise
        finally:
            self._access.leave()
