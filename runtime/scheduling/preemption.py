"""How a request is preempted: by swapping its blocks to the host, or by recomputation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["PreemptionPolicy"]


@dataclass(frozen=True, slots=True)
class PreemptionPolicy:
    """Selects swapping or recomputation, as configured or by the shorter device time.

    Attributes:
        choice: `swap` (if the host cache has room), `recompute`, or `auto`.
        block_seconds: seconds to copy one block to the host or back, measured.
        token_seconds: seconds to prefill one token, measured.
    """

    choice: Literal["auto", "swap", "recompute"] = "recompute"
    block_seconds: float = 0.0
    token_seconds: float = 0.0

    def swaps(self, num_blocks: int, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` computed tokens in `num_blocks` blocks is swapped.

        A swapped block is copied twice, to the host and back. The estimate for recomputation is the
        speed of a full prefill step with short contexts. It neglects the attention of a long
        prompt, and blocks that the prefix cache may still have.
        """
        if num_tokens == 0 or self.choice == "recompute":
            return False
        if self.choice == "swap":
            return True
        return 2 * num_blocks * self.block_seconds < num_tokens * self.token_seconds
