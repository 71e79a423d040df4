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

    __slots__ = ("_eos_token_ids", "_last_bits", "_matcher", "_num_consumed", "_overrun", "_wide")

    def __init__(
        self,
        matcher: LLMatcher,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        matcher_vocab_size: int,
    ) -> None:
        """Take a matcher at the beginning of the grammar.

        Args:
            matcher: of the grammar.
            eos_token_ids: tokens that end the model's output.
            vocab_size: of the model.
            matcher_vocab_size: of the matcher: that of the model, or more.
        """
        self._matcher = matcher
        self._wide: npt.NDArray[np.int32] | None = None
        """The mask of a matcher with tokens that the model lacks."""
        if matcher_vocab_size > vocab_size:
            self._wide = np.zeros(-(-matcher_vocab_size // MASK_BITS), dtype=np.int32)
        self._last_bits = _UP_TO_BIT[(vocab_size - 1) % MASK_BITS]
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
            written = mask if self._wide is None else self._wide
            matcher.unsafe_compute_mask_ptr(written.ctypes.data, written.nbytes)
        if matcher.is_error():
            mask.fill(-1)
            return self._error(request, matcher.get_error())
        self._overrun += max(0.0, time.thread_time() - began - MASK_SECONDS)
        if self._overrun > MASK_SECONDS:
            mask.fill(-1)
            return self._error(request, f"masks take more than {1e3 * MASK_SECONDS:g} ms each")
        if self._wide is not None:
            mask[:] = self._wide[: len(mask)]
            mask[-1] &= self._last_bits
        # In some vocabularies the end-of-sequence token is also a text.
        ends = matcher.is_accepting()
        forbidden = () if ends and not params.ignore_eos else self._eos_token_ids
        if request.num_output < params.min_tokens:  # the sampler forbids these too
            forbidden = (*forbidden, *request.stop_token_ids)
        for token_id in forbidden:
            word = token_id // MASK_BITS
            if word < len(mask):
                mask[word] &= ~_BIT[token_id % MASK_BITS]
        if (not forbidden and self._wide is None) or mask.any():
            return None
        mask.fill(-1)
        if ends:
            return "complete"
        lacks = " or is unknown to the model" if self._wide is not None else ""
        return self._error(request, f"every token that it allows ends the output, too early{lacks}")

    @staticmethod
    def _error(request: Request, reason: str) -> StructuredOutputError:
        shown = bounded_text(reason.removesuffix("<non-verbose/>").strip() or "unknown reason")
        return StructuredOutputError(
            f"request {request.id}: its grammar cannot be followed after {request.num_output}"
            f" output tokens: {shown}. Give a simpler grammar"
        )


_BIT = np.array([1 << i for i in range(MASK_BITS)], dtype=np.uint32).view(np.int32)
_UP_TO_BIT = np.array([(2 << i) - 1 for i in range(MASK_BITS)], dtype=np.uint32).view(np.int32)
