"""Plain PyTorch operations whose results do not depend on the other tokens of a step.

PyTorch's products, sums and vectorised functions take another order, or other code for the last
elements, when the number of tokens changes. Called for one token at a time, on a copy that begins
at the alignment of every allocation, an operation always gets the same shape and so runs the same
code. Operations of one rounding for each element (sums, products, conversions) need no such care.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels import Kernels

__all__ = ["each_token"]


def each_token(kernels: Kernels, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of tensors `[T, ...]` that runs once for each token, in a batch-invariant
    engine; in others, return the function itself."""
    if not kernels.batch_invariant:
        return function

    def run(*tensors: Tensor) -> Tensor:
        return torch.cat(
            [
                function(*(tensor.clone(memory_format=torch.contiguous_format) for tensor in token))
                for token in zip(*(tensor.split(1) for tensor in tensors), strict=True)
            ]
        )

    return run
