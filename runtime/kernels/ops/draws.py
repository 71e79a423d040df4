"""Selection from a large vocabulary: a random token, or the largest logits.

Shapes: B lanes, V vocabulary, N = ceil(V / C) chunks of C = 128 consecutive tokens. Both functions
select chunks first and then tokens within them, so that running sums and selections process N or a
few times 128 numbers instead of V.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

# The smallest weight that top-k and top-p keep.
#
# Shapes: B lanes, V vocabulary. Weights are probabilities up to a factor, the highest being 1.


def bisect_thresholds(
    weights_BV: torch.Tensor, top_k_B: torch.Tensor, top_p_B: torch.Tensor
) -> torch.Tensor:
    """Return the lowest weight that top-k, then top-p keep in each lane, float32 `[B]`.

    Top-p keeps the most likely tokens until their sum reaches `top_p` of the weight that top-k kept
    (Holtzman et al. 2020, arXiv 1904.09751). `top_k >= V` and `top_p >= 1` are off; with both off
    the result is 0. Weights are float32, 1 for the best token.

    Nothing is sorted: shapes are fixed, and there are 30 reductions. Bit patterns of non-negative
    floats are ordered like their values. So the highest weight w with `count(weights >= w) >= k` is
    found bit by bit, exactly. The threshold of top-p is found in the same way, exact up to the
    rounding of sums. A compiler fuses each pass into one reduction.
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


_CHUNK = 128


def uniform(seed_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """Return a number in [0, 1) for each seed and position, float64 `[B]`, a multiple of 2^-53.

    It is number `position` of a SplitMix64 generator (Steele, Lea, Flood: Fast splittable
    pseudorandom number generators, OOPSLA 2014; constants of Vigna's splitmix64.c). The state of
    that generator is a counter, so any of its numbers can be computed alone. It starts at the hash
    of the seed, so that seeds that differ by a multiple of the increment have different streams.
    """
    start_B = _mix64(seed_B + _GAMMA)
    bits_B = _mix64(start_B + positions_B * _GAMMA)
    return _shift_right(bits_B, 11).double() * 2.0**-53


def draw(weights_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Return a token for each lane, int64 `[B]`, by inverting the distribution function.

    A token of weight 0 is never drawn. A lane with only zeros, or with NaN, gets an arbitrary id of
    the vocabulary. Running sums are in float64: float32 would round away the tail of a vocabulary.
    `weights_BV` are probabilities up to a factor.
    """
    weights_BNC = _chunked(weights_BV, fill=0.0)
    mass_BN = weights_BNC.sum(-1).double()
    until_BN = mass_BN.cumsum(-1)
    target_B = uniform_B * until_BN[:, -1]
    chunk_B = _first_above(until_BN, mass_BN, target_B)
    before_B = (until_BN - mass_BN).gather(1, chunk_B[:, None])[:, 0]
    within_BC = _take_chunks(weights_BNC, chunk_B[:, None])[:, 0].double()
    return chunk_B * _CHUNK + _first_above(within_BC.cumsum(-1), within_BC, target_B - before_B)


def largest(values_BV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and int64 ids `[B, count]` of the `count <= V` largest elements, descending."""
    values_BNC = _chunked(values_BV, fill=float("-inf"))
    # The largest elements are in the chunks with the largest maxima, at most one chunk per element.
    chunks = values_BNC.amax(-1).topk(min(count, values_BNC.shape[1]), dim=-1).indices
    values, at = _take_chunks(values_BNC, chunks).flatten(1).topk(count, dim=-1)
    ids = chunks.gather(1, at // _CHUNK) * _CHUNK + at % _CHUNK
    # Only -inf ties with the padding, so only then can an index exceed the vocabulary.
    return values, ids.clamp(max=values_BV.shape[1] - 1)


def _first_above(
    until_BX: torch.Tensor, mass_BX: torch.Tensor, target_B: torch.Tensor
) -> torch.Tensor:
    """Return the first index of positive weight whose running sum exceeds the target, int64 `[B]`.

    If rounding leaves none, return the last index of positive weight. If no weight is positive, 0.
    """
    count = mass_BX.shape[1]
    index_X = torch.arange(count, device=mass_BX.device)
    possible_BX = mass_BX > 0
    above_BX = possible_BX & (until_BX > target_B[:, None])
    first_B = torch.where(above_BX, index_X, count).amin(-1)
    last_B = torch.where(possible_BX, index_X, 0).amax(-1)
    return torch.minimum(first_B, last_B)


def _chunked(values_BV: torch.Tensor, fill: float) -> torch.Tensor:
    """`[B, V]` as `[B, N, 128]`, padded at the end."""
    padded = F.pad(values_BV, (0, -values_BV.shape[1] % _CHUNK), value=fill)
    chunks: torch.Tensor = padded.unflatten(1, (-1, _CHUNK))
    return chunks


def _take_chunks(values_BNC: torch.Tensor, chunks_BK: torch.Tensor) -> torch.Tensor:
    """The chunks of each lane with these indices, `[B, K, 128]`."""
    return values_BNC.gather(1, chunks_BK[:, :, None].expand(-1, -1, _CHUNK))


# Sums and products of int64 wrap around, and their low 64 bits equal the unsigned results'.
_GAMMA, _MIX_1, _MIX_2 = (
    bits - (1 << 64) for bits in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _mix64(z_B: torch.Tensor) -> torch.Tensor:
    z_B = (z_B ^ _shift_right(z_B, 30)) * _MIX_1
    z_B = (z_B ^ _shift_right(z_B, 27)) * _MIX_2
    return z_B ^ _shift_right(z_B, 31)


def _shift_right(bits_B: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift; `>>` of an int64 is arithmetic."""
    return (bits_B >> count) & ((1 << (64 - count)) - 1)
