"""Chained block hashes: two blocks have the same hash if everything up to their end is the same.

    hash of block i = BLAKE2b-256(hash of block i - 1, tokens of block i, other inputs in it)
    hash before block 0 = BLAKE2b-256(salt), personalised, so that it never equals a block's

The hash before block 0 contains a variant too, where equal tokens can have other keys and values.

With 256 bits it is infeasible to construct two prompts with the same hash. Clients that do not know
the salt cannot detect the prompts of others by their time to first token (CVE-2025-46570).
"""

from __future__ import annotations

import copy
import hashlib
from array import array
from collections.abc import Callable, Sequence

__all__ = ["HASH_BYTES", "PrefixHashes"]

HASH_BYTES = 32


class PrefixHashes:
    """The hashes of the full blocks of one growing sequence."""

    def __init__(self, block_size: int, salt: str = "", variant: bytes = b"") -> None:
        """Begin an empty sequence.

        Only sequences with the same `salt` and `variant` have hashes in common.
        """
        self._block_size = block_size
        root = hashlib.blake2b(salt.encode(), digest_size=HASH_BYTES, person=b"salt")
        self._salted = self._root = root.digest()
        if variant:
            self._root = _digest_of_variant(self._salted, variant)
        self._hashes: list[bytes] = []

    def __len__(self) -> int:
        """Full blocks hashed so far."""
        return len(self._hashes)

    def __getitem__(self, block: int) -> bytes:
        """Hash of the sequence up to the end of a block: `HASH_BYTES` bytes."""
        return self._hashes[block]

    def copy(self) -> PrefixHashes:
        """Return a copy that can be continued with other tokens."""
        other = copy.copy(self)
        other._hashes = self._hashes.copy()
        return other

    def restarted(self, variant: bytes) -> PrefixHashes:
        """Return an empty sequence with the same salt and another variant."""
        other = copy.copy(self)
        other._root = _digest_of_variant(self._salted, variant) if variant else self._salted
        other._hashes = []
        return other

    def extend(
        self,
        tokens: Callable[[int, int], Sequence[int]],
        num_tokens: int,
        contents: Callable[[int, int], bytes] | None = None,
    ) -> None:
        """Hash the blocks that `num_tokens` tokens fill and that have no hash yet.

        Args:
            tokens: returns the token ids at positions start to stop - 1, each below 2^63.
            num_tokens: known tokens of the sequence.
            contents: returns bytes that identify other inputs at positions start to stop - 1, such
                as embeddings in the place of tokens; None if there are none.
        """
        size, hashes = self._block_size, self._hashes
        for block in range(len(hashes), num_tokens // size):
            start, stop = block * size, (block + 1) * size
            data = hashes[-1] if hashes else self._root
            data += array("q", tokens(start, stop)).tobytes()
            if contents is not None:
                data += contents(start, stop)
            hashes.append(hashlib.blake2b(data, digest_size=HASH_BYTES).digest())


def _digest_of_variant(salted: bytes, variant: bytes) -> bytes:
    root = hashlib.blake2b(salted + variant, digest_size=HASH_BYTES, person=b"variant")
    return root.digest()
