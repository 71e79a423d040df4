"""What to do with a request that loses its blocks: keep them on the host, or compute them again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["PreemptionPolicy"]


@dataclass(frozen=True, slots=True)
class PreemptionPolicy:
    """Swap or recompute, by choice or by which takes less of the device's time.

    Attributes:
        choice: `swap` wherever the host has room, `recompute`, or `auto`.
        block_seconds: seconds to copy one block to the host or back, measured.
        token_seconds: seconds to prefill one token, measured.
    """

    choice: Literal["auto", "swap", "recompute"] = "recompute"
    block_seconds: float = 0.0
    token_seconds: float = 0.0

    def swaps(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` computed tokens in `num_blocks` blocks is swapped.

        A swapped block crosses the bus twice. Recomputation is priced at the speed of a full
        prefill step of short contexts, the best there is: the attention of a long prompt, and
        what would be found in the prefix cache again, are left out.
        """
        if num_tokens == 0 or self.choice == "recompute":
            return False
        if self.choice == "swap":
            return True
        return 2 * num_blocks * self.block_seconds < num_tokens * self.token_seconds
