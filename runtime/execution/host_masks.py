"""Token masks of all rows on the host, and on ranks above 0 their source."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from ..kernels.ops.mask_words import MaskWords
from .mask_state import MaskState

__all__ = ["FollowedMasks", "HostMasks"]


class HostMasks:
    """The masks of `MaskState` as the host writes them; see `MaskState.bits` for their order.

    On a CPU they are those that steps read. For a device that runs asynchronously they are a pinned
    copy.
    """

    def __init__(self, state: MaskState, rows: int, *, is_async: bool) -> None:
        """Write the masks of a state.

        Args:
            state: the masks on the device.
            rows: those of the state, the null row included.
            is_async: whether the device runs steps asynchronously.
        """
        self._device = self._host = state.bits
        if is_async:
            self._host = torch.full_like(
                state.bits, -1, device="cpu", pin_memory=state.bits.is_cuda
            )
        self.rows = rows
        self.array: npt.NDArray[np.int32] = self._host.numpy()
        words = [MaskWords(mask) for mask in self.array]
        self.of_row = [words[row::rows] for row in range(rows)]
        """Of each row: the mask after its newest token, after that and a draft, and so on."""

    @property
    def nbytes(self) -> int:
        """Bytes of the copy; 0 without one."""
        return 0 if self._host is self._device else self._host.nbytes

    def allow_all(self, row: int) -> None:
        """Let a row sample any token."""
        for mask in self.of_row[row]:
            mask.allow_all()

    def copy_to_device(self, tokens_per_row: int) -> None:
        """Issue the copy of the masks of so many tokens of each row, if the device has its own."""
        if self._host is not self._device:
            end = tokens_per_row * self.rows
            self._device[:end].copy_(self._host[:end], non_blocking=True)


class FollowedMasks:
    """The masks of a rank above 0, which rank 0 computes and sends."""

    def __init__(self, masks: HostMasks) -> None:
        """Write these masks."""
        self._masks = masks
        self.receive: Callable[[], None] | None = None
        """Waits for the masks of the step that is about to run; None: it needs no new ones."""

    def start(self) -> None:
        """See `MasksThread.start`; rank 0 computes them."""

    def wait(self) -> None:
        """See `MasksThread.wait`."""
        receive, self.receive = self.receive, None
        if receive is not None:
            receive()

    def write(
        self,
        allowed_A: npt.NDArray[np.uint32],
        index_M: npt.NDArray[np.uint32],
        masks_MW: npt.NDArray[np.int32],
        tokens_per_row: int,
    ) -> None:
        """Write what rank 0 has sent, and copy it to the device; see `CommandSender.masks`.

        Earlier copies have been made.
        """
        for row in allowed_A.tolist():
            self._masks.allow_all(row)
        self._masks.array[index_M] = masks_MW
        self._masks.copy_to_device(tokens_per_row)
