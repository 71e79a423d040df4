"""How the rotary parameters of a model depend on the length of a sequence. No torch.

With `longrope` and `dynamic` ropes, a token at position p of a request with a prompt of n tokens is
rotated with the parameters for length max(p + 1, n), as in transformers' `generate` with a cache.
n is the rope length of the request. Keys of a prompt thus depend on its length, so requests share
cached blocks only if their rope lengths have the same parameters.

    original context 4, n = 3:   positions 0 1 2 3 4 5     lengths 3 3 3 4 5 6     short until 4
    original context 4, n = 5:   positions 0 1 2 3 4 5     lengths 5 5 5 5 5 6     all long
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

UNLIMITED = sys.maxsize
"""A length that no sequence reaches."""


@dataclass(frozen=True)
class RopeLengths:
    """The lengths at which the rotary parameters of a model change."""

    switches: tuple[int, ...] = ()
    """Lengths beyond which a rotation has its other parameters (`longrope`)."""
    grows: tuple[int, ...] = ()
    """Lengths beyond which the parameters of a rotation change with every token (`dynamic`)."""
    recompute_above: int = UNLIMITED
    """A sequence that outgrows this length is computed again with the parameters for its length, as
    Phi-3 of transformers does."""

    def variant(self, length: int) -> bytes:
        """Return bytes that are the same for rope lengths whose keys and values can be shared.

        Empty for lengths within the context of the first training.
        """
        above = [length if length > limit else 0 for limit in self.grows]
        above += [int(length > limit) for limit in self.switches]
        return repr(above).encode() if any(above) else b""

    def outgrown_at(self, rope_length: int) -> int:
        """Return the position whose token is computed only after all others are recomputed."""
        return self.recompute_above if rope_length <= self.recompute_above else UNLIMITED
