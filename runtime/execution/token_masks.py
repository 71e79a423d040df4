"""Computes token masks while the forward pass runs, on a CPU in a thread of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from ..bounded_repr import bounded_repr
from ..errors import StructuredOutputError
from ..request import Request, RequestStatus
from .mask_state import MaskState
from .outputs import GrammarEnd

__all__ = ["Lane", "TokenMasks"]

Lane: TypeAlias = tuple[int, Request]
"""A row of a step with token masks, and its request."""


class TokenMasks:
    """The masks of all rows, on the host and on the device.

    `begin` needs the tokens of all earlier steps. On a CPU that is so before a step, on a device
    that runs steps asynchronously after the commit of the last one.
    """

    def __init__(self, state: MaskState, *, is_async: bool) -> None:
        """Write the masks of `state`, on a device that runs steps asynchronously by a copy."""
        self._device = state.bits
        self._host = state.bits
        if is_async:
            self._host = torch.full_like(
                state.bits, -1, device="cpu", pin_memory=state.bits.is_cuda
            )
        self._masks: npt.NDArray[np.int32] = self._host.numpy()
        self._restricted: set[int] = set()
        """Rows whose mask may forbid tokens."""
        self.in_thread = not is_async
        """Whether a thread computes the masks; otherwise `finish` does, as after a commit, where
        the host has nothing else to do."""
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Callable[[], list[GrammarEnd]] | None = None

    @property
    def host_nbytes(self) -> int:
        """Bytes of the copy on the host."""
        return 0 if self._host is self._device else self._host.nbytes

    def begin(self, lanes: Iterable[Lane]) -> None:
        """Begin to compute the masks of a step. Of rows without a grammar all tokens are allowed.

        Lanes of requests that have ended are left as they are: their tokens are discarded.
        """
        assert self._pending is None, "the masks of two steps at the same time"
        present = [lane for lane in lanes if lane[1].status is not RequestStatus.FINISHED]
        for row, request in present:
            if request.matcher is None and row in self._restricted:
                self._masks[row].fill(-1)
                self._restricted.discard(row)
        restricted = [lane for lane in present if lane[1].matcher is not None]
        self._restricted.update(row for row, _ in restricted)
        if not self.in_thread:
            self._pending = partial(self._fill, restricted)
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "stepgraph-masks")
        self._pending = self._thread.submit(self._fill, restricted).result

    def finish(self) -> list[GrammarEnd]:
        """Wait for the masks, and issue their copy to the device.

        Returns the requests that end here; the masks of their rows allow all tokens.
        """
        assert self._pending is not None, "no masks are being computed"
        pending, self._pending = self._pending, None
        ends = pending()
        if self._host is not self._device:
            self.copy_to_device()
        return ends

    def copy_to_device(self) -> None:
        """Issue the copy of all masks."""
        self._device.copy_(self._host, non_blocking=True)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _fill(self, lanes: Sequence[Lane]) -> list[GrammarEnd]:
        ends: list[GrammarEnd] = []
        for row, request in lanes:
            assert request.matcher is not None
            try:
                outcome = request.matcher.fill(request, self._masks[row])
            except (KeyboardInterrupt, SystemExit):  # of a signal handler of the application
                raise
            except BaseException as error:  # a panic of llguidance is no Exception
                self._masks[row].fill(-1)
                outcome = StructuredOutputError(
                    f"request {request.id}: its grammar failed after {request.num_output} output"
                    f" tokens: {bounded_repr(error)}. Give another grammar"
                )
            if outcome is not None:
                ends.append((request, None if outcome == "complete" else outcome))
        return ends
