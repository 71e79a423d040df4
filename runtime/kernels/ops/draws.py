"""Selection from a large vocabulary: a random token, or the largest logits.

Shapes: B lanes, V vocabulary, N = ceil(V / C) chunks of C = 128 consecutive tokens. Both functions
select chunks first and then tokens within them, so that running sums and selections process N or a
few times 128 numbers instead of V.
"""

import torch
import torch.nn.functional as F

_CHUNK = 128


def uniform(seed_B: torch.Tensor, positions_B: torch.Tensor) -> torch.Tensor:
    """Return a number in [0, 1) for each seed and position, float64 `[B]`, a multiple of 2^-53.

    It is number `position` of a SplitMix64 generator (Steele, Lea, Flood: Fast splittable
    pseudorandom number generators, OOPSLA 2014; constants of Vigna's splitmix64.c). The state of
    that generator is a counter, so any of its numbers can be computed alone. It starts at the hash
    of the seed, so that seeds that differ by a multiple of the increment have different streams.

    Args:
        seed_B: int64, any value.
        positions_B: int64.
    """
    start_B = _mix64(seed_B + _GAMMA)
    bits_B = _mix64(start_B + positions_B * _GAMMA)
    return _shift_right(bits_B, 11).double() * 2.0**-53


def draw(weights_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """Return a token for each lane, int64 `[B]`, by inverting the distribution function.

    A token of weight 0 is never drawn. A lane with only zeros, or with NaN, gets an arbitrary id of
    the vocabulary. Running sums are in float64: float32 would round away the tail of a vocabulary.

    Args:
        weights_BV: float32, at least 0; probabilities up to a factor.
        uniform_B: float64 in [0, 1).
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


def _int64(bits: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number whose highest bit is set."""
    return bits - (1 << 64)


# Sums and products of int64 wrap around, and their low 64 bits are those of the unsigned ones.
_GAMMA = _int64(0x9E3779B97F4A7C15)
_MIX_1 = _int64(0xBF58476D1CE4E5B9)
_MIX_2 = _int64(0x94D049BB133111EB)


def _mix64(z_B: torch.Tensor) -> torch.Tensor:
    z_B = (z_B ^ _shift_right(z_B, 30)) * _MIX_1
    z_B = (z_B ^ _shift_right(z_B, 27)) * _MIX_2
    return z_B ^ _shift_right(z_B, 31)


def _shift_right(bits_B: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift; `>>` of an int64 is arithmetic."""
    return (bits_B >> count) & ((1 << (64 - count)) - 1)
