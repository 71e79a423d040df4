"""A cache of encoder outputs (of images, audio and so on), keyed by content."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import torch

__all__ = ["EncoderOutputCache", "content_key"]


def content_key(content: bytes, kind: str) -> bytes:
    """Return the BLAKE2b-256 hash of a content.

    `kind`, a name of at most 16 bytes, is the hash's personalisation: contents of different kinds
    never have the same key.
    """
    return hashlib.blake2b(content, digest_size=32, person=kind.encode()).digest()


class EncoderOutputCache:
    """An LRU cache of tensors by content key, limited by their bytes.

    Eviction removes only the cache's reference to a tensor.
    """

    def __init__(self, max_bytes: int) -> None:
        """Cache at most `max_bytes` bytes.

        Raises:
            ValueError: `max_bytes` is negative.
        """
        if max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, got {max_bytes}")
        self.max_bytes = max_bytes
        self._tensors: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # oldest use first
        self._num_bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    def __len__(self) -> int:
        """Number of cached tensors."""
        return len(self._tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of the cached tensors."""
        return self._num_bytes

    def get(self, key: bytes) -> torch.Tensor | None:
        """Return the tensor under `key`, or None; count a hit or a miss."""
        tensor = self._tensors.get(key)
        if tensor is None:
            self.misses += 1
            return None
        self._tensors.move_to_end(key)
        self.hits += 1
        return tensor

    def put(self, key: bytes, tensor: torch.Tensor) -> bool:
        """Cache a tensor; return False, without evicting any, if it exceeds `max_bytes`."""
        if tensor.nbytes > self.max_bytes:
            return False
        before = self._tensors.pop(key, None)
        if before is not None:
            self._num_bytes -= before.nbytes
        while self._num_bytes + tensor.nbytes > self.max_bytes:
            _, oldest = self._tensors.popitem(last=False)
            self._num_bytes -= oldest.nbytes
            self.evictions += 1
        self._tensors[key] = tensor
        self._num_bytes += tensor.nbytes
        return True

    def clear(self) -> None:
        """Drop all tensors."""
        self._tensors.clear()
        self._num_bytes = 0

    def check_integrity(self) -> None:
        """Assert that the byte count is correct and within `max_bytes`."""
        assert self._num_bytes == sum(tensor.nbytes for tensor in self._tensors.values())
        assert self._num_bytes <= self.max_bytes
