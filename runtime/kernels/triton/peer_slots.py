"""Sizes of the memory that GPUs exchange data in. Imports no triton."""

from __future__ import annotations

import torch

__all__ = ["PROGRAMS", "slot_bytes_for"]

PROGRAMS = 64
"""Programs of a launch at most: fewer than multiprocessors of any GPU with NVLink."""

_MOST_SLOT_BYTES = 256 << 10
"""Longer tensors are exchanged in several launches; both halves of all slots are 32 MiB."""


def slot_bytes_for(
    ranks: int,
    max_tokens: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
) -> int:
    """Return the bytes of a slot: for rows of a step at once, up to a limit.

    Args:
        ranks: of the group.
        max_tokens: of a step.
        hidden_size: of a row.
        vocab_size: of all ranks; a row of a rank's logits has to fit all slots.
        dtype: of the model.
    """
    unit = 4096 * ranks
    row = (1 << (hidden_size - 1).bit_length()) * dtype.itemsize
    step = -(-max_tokens * hidden_size * dtype.itemsize // PROGRAMS)
    logits = -(-(vocab_size // ranks + 1) * dtype.itemsize // PROGRAMS)
    needed = max(row, logits, min(step, _MOST_SLOT_BYTES))
    return -(-needed // unit) * unit
