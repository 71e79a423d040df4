"""What encoders made of images, sounds and so on: kept by content, so nothing is encoded twice."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import torch

__all__ = ["EncoderOutputCache", "content_key"]


def content_key(content: bytes, kind: str) -> bytes:
    """Return 32 bytes that stand for a content: its BLAKE2b hash.

    Contents of different kinds (at most 16 bytes of name) never have a key in common, whatever
    their bytes: nobody can pass one off as the other.
    """
    return hashlib.blake2b(content, digest_size=32, person=kind.encode()).digest()


class EncoderOutputCache:
    """Tensors by content key, least recently used out first, bounded by their bytes.

    Whoever got a tensor keeps it: eviction only forgets it here.
    """

    def __init__(self, max_bytes: int) -> None:
        """Keep at most `max_bytes` bytes.

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
        """Tensors that are kept."""
        return len(self._tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes that they take."""
        return self._num_bytes

    def get(self, key: bytes) -> torch.Tensor | None:
        """Return what is kept under `key`, and count a hit or a miss."""
        tensor = self._tensors.get(key)
        if tensor is None:
            self.misses += 1
            return None
        self._tensors.move_to_end(key)
        self.hits += 1
        return tensor

    def put(self, key: bytes, tensor: torch.Tensor) -> bool:
        """Keep a tensor; False, and nothing else is forgotten for it, if it is too large."""
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
        """Forget everything."""
        self._tensors.clear()
        self._num_bytes = 0

    def check_integrity(self) -> None:
        """Assert that the bytes are counted right and within the bound."""
        assert self._num_bytes == sum(tensor.nbytes for tensor in self._tensors.values())
        assert self._num_bytes <= self.max_bytes
