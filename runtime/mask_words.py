"""One token mask on the host, written by a matcher."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

MASK_BITS: Final = 32
"""Tokens of a word of a mask: bit i % 32 of word i // 32 is set if token i may be sampled."""


class MaskWords:
    """The words of a mask.

    A memoryview reads and writes elements several times faster than an array.
    """

    __slots__ = ("address", "array", "nbytes", "words")

    def __init__(self, array: npt.NDArray[np.int32]) -> None:
        """Write int32 `[words]`, contiguous."""
        self.array = array
        self.words = array.data
        self.address: int = array.ctypes.data
        self.nbytes = array.nbytes

    def allow_all(self) -> None:
        """Set all bits."""
        self.array.fill(-1)

    def forbid(self, token_ids: Iterable[int]) -> bool:
        """Clear the bits of tokens, unless they are beyond the mask; whether any was set."""
        words, size, found = self.words, len(self.words), False
        for token_id in token_ids:
            index, bit = token_id // MASK_BITS, _BITS[token_id % MASK_BITS]
            if index < size and (word := words[index]) & bit:
                words[index] = word & ~bit
                found = True
        return found


_BITS: Final[tuple[int, ...]] = tuple(
    np.array([1 << i for i in range(MASK_BITS)], dtype=np.uint32).view(np.int32).tolist()
)
