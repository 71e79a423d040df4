"""The smallest weight that top-k and top-p keep, with and without sorting.

Shapes: B lanes, V vocabulary. Weights are probabilities up to a factor, the highest being 1.
"""

from collections.abc import Callable

import torch


def reference_thresholds(
    weights_BV: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor
) -> torch.Tensor:
    """Return the lowest weight that top-k, then top-p keep in each lane, float32 `[B]`, by sorting.

    Top-p keeps the most likely tokens until their sum reaches `top_p` of the weight that top-k kept
    (Holtzman et al. 2020, arXiv 1904.09751). `top_k >= V` and `top_p >= 1` are off; with both off
    the result is 0.

    Args:
        weights_BV: float32, at least 0, 1 for the best token.
        top_k_B: int64, at least 1.
        top_p_B: float32, at least 0.
    """
    vocab_size = weights_BV.shape[1]
    sorted_BV = weights_BV.sort(dim=-1, descending=True).values
    kth_B1 = sorted_BV.gather(1, top_k_B.clamp(max=vocab_size)[:, None] - 1)
    kth_B1 = torch.where(top_k_B[:, None] < vocab_size, kth_B1, 0.0)
    until_BV = torch.where(sorted_BV >= kth_B1, sorted_BV, 0.0).cumsum(-1, dtype=torch.float64)
    missing_BV = until_BV < top_p_B[:, None] * until_BV[:, -1:]
    last_B1 = sorted_BV.gather(1, missing_BV.sum(-1, keepdim=True).clamp(max=vocab_size - 1))
    return torch.where(top_p_B < 1.0, torch.maximum(last_B1, kth_B1)[:, 0], kth_B1[:, 0])


def bisect_thresholds(
    weights_BV: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor
) -> torch.Tensor:
    """`reference_thresholds` without sorting, with fixed shapes and 30 reductions.

    Bit patterns of non-negative floats are ordered like their values. So the highest weight w with
    `count(weights >= w) >= k` is found bit by bit, exactly. The threshold of top-p is found in the
    same way, exact up to the rounding of sums. A compiler fuses each pass into one reduction.
    """

    def holds_k(at_least_BX1: torch.Tensor) -> torch.Tensor:
        counts_BX = (weights_BV[:, None] >= at_least_BX1).sum(-1, dtype=torch.int32)
        return counts_BX >= top_k_B[:, None]

    def mass(at_least_BX1: torch.Tensor) -> torch.Tensor:
        weights_B1V = weights_BV[:, None]
        return torch.where(weights_B1V >= at_least_BX1, weights_B1V, 0.0).sum(-1)

    kth_B = _highest_weight(holds_k, like=top_p_B)
    kth_B = torch.where(top_k_B < weights_BV.shape[1], kth_B, 0.0)
    enough_B1 = top_p_B[:, None] * mass(kth_B[:, None, None])
    last_B = _highest_weight(lambda at_least: mass(at_least) >= enough_B1, like=top_p_B)
    last_B = torch.where(top_p_B < 1.0, last_B, 0.0)
    # Any weight is high enough for a top_p of 0, but the best token always stays.
    return torch.maximum(kth_B, last_B).clamp(max=1.0)


def _highest_weight(
    holds: Callable[[torch.Tensor], torch.Tensor], like: torch.Tensor
) -> torch.Tensor:
    """Return the highest float32 in [0, 2) for which `holds`, for each lane, `[B]`.

    `holds` maps `[B, X, 1]` to bool `[B, X]`; it is true for 0, and false above where it is false.
    Each pass determines two of the 30 bits with three tests. More bits per pass need more tests in
    total, fewer bits need more passes.
    """
    bits_B = torch.zeros_like(like, dtype=torch.int32)
    steps_X = torch.arange(1, 4, dtype=torch.int32, device=like.device)
    for shift in range(28, -2, -2):
        candidates_BX = (bits_B[:, None] + (steps_X << shift)).view(torch.float32)
        held_B = holds(candidates_BX[:, :, None]).sum(-1, dtype=torch.int32)
        bits_B = bits_B + (held_B << shift)
    return bits_B.view(torch.float32)
