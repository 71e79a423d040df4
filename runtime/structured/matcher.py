"""How far a request's output has come in its grammar, and which tokens may follow."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import numpy.typing as npt

from ..bounded_repr import bounded_text
from ..errors import StructuredOutputError
from ..kernels.ops.token_masks import MASK_BITS

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from ..request import Request

__all__ = ["MASK_SECONDS", "TokenMatcher"]

MASK_SECONDS: Final = 0.05
"""Processor time of a mask, for which all requests of its step wait. What the masks of a request
take beyond it may add up to as much again."""


class TokenMatcher:
    """The grammar of one completion.

    It follows the output tokens of its request, not the row: a request that was preempted continues
    where it was.
    """

    __slots__ = ("_eos_token_ids", "_matcher", "_num_consumed", "_overrun")

    def __init__(self, matcher: LLMatcher, eos_token_ids: Sequence[int]) -> None:
        """Take a matcher at the beginning of the grammar."""
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._num_consumed = 0
        self._overrun = 0.0
        """Seconds of all masks beyond `MASK_SECONDS` each."""

    def fill(
        self, request: Request, mask: npt.NDArray[np.int32]
    ) -> StructuredOutputError | Literal["complete"] | None:
        """Write which tokens may follow the output of the request.

        Args:
            request: of this grammar.
            mask: int32 `[ceil(V / 32)]`, contiguous: bit i % 32 of word i // 32 is that of token i.

        Returns:
            None; or, with all bits set, the error that ends the request, or `complete` if the
            grammar allows only end-of-sequence tokens and the request forbids them.
        """
        matcher, params = self._matcher, request.params
        began = time.thread_time()
        tokens = request.output_slice(self._num_consumed, request.num_output)
        if tokens:
            matcher.consume_tokens(list(tokens))
            self._num_consumed = request.num_output
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            mask.fill(-1)
            return self._error(request, matcher.get_error())
        self._overrun += max(0.0, time.thread_time() - began - MASK_SECONDS)
        if self._overrun > MASK_SECONDS:
            mask.fill(-1)
            return self._error(request, f"masks take more than {1e3 * MASK_SECONDS:g} ms each")
        # In some vocabularies the end-of-sequence token is also a text.
        ends = matcher.is_accepting()
        forbidden = () if ends and not params.ignore_eos else self._eos_token_ids
        if request.num_output < params.min_tokens:  # the sampler forbids these too
            forbidden = (*forbidden, *request.stop_token_ids)
        for token_id in forbidden:
            word = token_id // MASK_BITS
            if word < len(mask):
                mask[word] &= ~_BIT[token_id % MASK_BITS]
        if not forbidden or mask.any():
            return None
        mask.fill(-1)
        if ends:
            return "complete"
        return self._error(request, "every token that it allows ends the output, too early")

    @staticmethod
    def _error(request: Request, reason: str) -> StructuredOutputError:
        shown = bounded_text(reason.removesuffix("<non-verbose/>").strip() or "unknown reason")
        return StructuredOutputError(
            f"request {request.id}: its grammar cannot be followed after {request.num_output}"
            f" output tokens: {shown}. Give a simpler grammar"
        )


_BIT = np.array([1 << i for i in range(MASK_BITS)], dtype=np.uint32).view(np.int32)
