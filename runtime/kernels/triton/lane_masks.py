"""Token masks inside of kernels that read logits: `mask_logits` in `runtime/kernels/ops/`.

Bit i % 32 of word i // 32 of a mask is set if token i may be sampled.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["forbid", "masked_chunk"]


@triton.jit
def forbid(logits, words, token):  # type: ignore[no-untyped-def]
    """The logits of tokens, -inf for those whose bit is not set. NaN and +inf of these become NaN,
    so that they are still detected. `words` holds the word of each token."""
    return tl.where(((words >> (token & 31)) & 1) != 0, logits, logits + float("-inf"))


@triton.jit
def masked_chunk(logits, words_ptr, chunk, token, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The logits of the BLOCK tokens of a chunk after `forbid`, and whether the mask forbids any.

    Chunks of at least 32 tokens, or the only one. Where all bits are set, as in lanes without a
    grammar, the words are all that is read.
    """
    WORDS: tl.constexpr = (BLOCK + 31) // 32
    word = chunk * WORDS + tl.arange(0, WORDS)
    words = tl.load(words_ptr + word, mask=word < (V + 31) // 32, other=-1)
    restricted = tl.max((words != -1).to(tl.int32), 0)
    if restricted != 0:
        own = tl.load(words_ptr + (token >> 5), mask=token < V, other=-1)
        logits = forbid(logits, own, token)
    return logits, restricted
