"""The weight from which top-k and top-p keep tokens, by search: pieces of the sampler's kernels.

Shapes: a run is SUB neighbouring tokens; passes over runs take CAP tokens at a time.

A weight is exp((logit - best) / temperature). Those of a distribution are at most 1, and the bit
patterns of floats that are not negative are ordered like their values. A threshold is found in
three steps, each of which leaves fewer weights to the next: from what is known of each run
(`lower_bound`), in passes over the runs that reach it, and among at most CAP weights that stay in
registers (`highest_that_holds`). A pass settles two bits with three tests.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["finite_or_zero", "highest_that_holds", "keep", "lower_bound", "mass_from", "weigh"]

_ONE = tl.constexpr(0x3F800000)  # the bit pattern of 1.0
# What `lower_bound` knows of the mass of a run is at most this factor too much: sums of 128 weights
# are exact to 1e-6, and their rounding is set against the largest weight, at least 1/128 of them.
_MARGIN = tl.constexpr(1.00025)


@triton.jit
def finite_or_zero(x):  # type: ignore[no-untyped-def]
    """`x`, or 0 where subtracting it would make NaN of infinities."""
    return tl.where((x > float("-inf")) & (x < float("inf")), x, 0.0)


@triton.jit
def weigh(logits, base, divisor):  # type: ignore[no-untyped-def]
    """exp((logits - base) / divisor), and 0 for NaN. The difference comes first: then no
    temperature overflows. The same logit has the same weight wherever it is computed."""
    weights = tl.exp(tl.div_rn(logits - base, tl.zeros_like(logits) + divisor))
    return tl.where(weights == weights, weights, 0.0)


@triton.jit
def lower_bound(  # type: ignore[no-untyped-def]
    highest, masses, top_k, top_p, V, SUB: tl.constexpr
):  # fmt: skip
    """A bit pattern that the threshold of top-k, or of top-p without it, is not below.

    It is the top_k-th of the largest weights of runs, `highest`. For top-p it is a weight w such
    that runs with some weight from w on hold enough: each at least its largest weight, and at least
    its mass less (SUB - 1) w. Of either the upper 16 bits, within 0.2 % of it.
    """
    by_count = top_k < V
    enough = tl.where(by_count, top_k.to(tl.float32), top_p * tl.sum(masses, 0) * _MARGIN)
    bits = tl.full([], 0, tl.int32)
    for step in range(8):
        shift = 28 - 2 * step
        held = tl.full([], 0, tl.int32)
        for digit in tl.static_range(1, 4):
            w = (bits + (digit << shift)).to(tl.float32, bitcast=True)
            amounts = tl.where(by_count, 1.0, tl.maximum(highest, masses - (SUB - 1) * w))
            amount = tl.sum(tl.where(highest >= w, amounts, 0.0), 0)
            held += (amount >= enough).to(tl.int32)
        bits += held << shift
    return tl.minimum(bits, _ONE)


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    start, wanted_ptr, list_ptr, count, base, divisor, SUB: tl.constexpr, CAP: tl.constexpr
):  # fmt: skip
    """Weights of the listed runs from `start` on, `[CAP / SUB, SUB]`, 0 after the last one."""
    q = start + tl.arange(0, CAP // SUB)
    run = tl.load(list_ptr + q, mask=q < count, other=0)
    token = run[:, None] * SUB + tl.arange(0, SUB)[None, :]
    wanted = tl.load(wanted_ptr + token, mask=(q < count)[:, None], other=float("-inf"))
    return weigh(wanted, base, divisor)


@triton.jit
def mass_from(  # type: ignore[no-untyped-def]
    bits, wanted_ptr, list_ptr, count, base, divisor, SUB: tl.constexpr, CAP: tl.constexpr
):  # fmt: skip
    """The mass of the weights of listed runs from a bit pattern on, float64."""
    mass = tl.full([], 0.0, tl.float64)
    for start in range(0, count, CAP // SUB):
        weights = _tile(start, wanted_ptr, list_ptr, count, base, divisor, SUB, CAP)
        mass += tl.sum(tl.where(weights.to(tl.int32, bitcast=True) >= bits, weights, 0.0))
    return mass


@triton.jit
def keep(  # type: ignore[no-untyped-def]
    threshold, wanted_ptr, list_ptr, masses_ptr, count, base, divisor, SUB: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """Write the mass that each listed run has from the threshold on."""
    for start in range(0, count, CAP // SUB):
        weights = _tile(start, wanted_ptr, list_ptr, count, base, divisor, SUB, CAP)
        q = start + tl.arange(0, CAP // SUB)
        kept = tl.sum(tl.where(weights >= threshold, weights, 0.0), 1)
        tl.store(masses_ptr + q, kept, mask=q < count)


@triton.jit
def _amounts(weights, BY_COUNT: tl.constexpr):  # type: ignore[no-untyped-def]
    if BY_COUNT:
        return tl.full(weights.shape, 1.0, tl.float32)
    else:
        return weights


@triton.jit
def _tests(lo, hi):  # type: ignore[no-untyped-def]
    """Three bit patterns that quarter what is between lo and hi, at least two apart."""
    step = tl.maximum((hi - lo) // 4, 1)
    return lo + step, tl.minimum(lo + 2 * step, hi - 1), tl.minimum(lo + 3 * step, hi - 1)


@triton.jit
def _quarter(held, lo, hi, at_1, at_2, at_3):  # type: ignore[no-untyped-def]
    """Of values at lo, at the tests and at hi those around the last test of `held` that hold."""
    below = tl.where(held == 0, lo, tl.where(held == 1, at_1, tl.where(held == 2, at_2, at_3)))
    above = tl.where(held == 0, at_1, tl.where(held == 1, at_2, tl.where(held == 2, at_3, hi)))
    return below, above


@triton.jit
def highest_that_holds(  # type: ignore[no-untyped-def]
    lo, goal, BY_COUNT: tl.constexpr, wanted_ptr, list_ptr, found_ptr, count, base, divisor,
    SUB: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """The highest bit pattern from `lo` to that of 1 from which weights hold `goal`, float64: as
    many, if `BY_COUNT`, else a mass. At `lo` they do, and all of them are in listed runs. At
    `found_ptr` there is room for CAP int32."""
    hi = tl.full([], _ONE + 1, tl.int32)
    number_lo = count * SUB
    number_hi = count * 0
    while (number_lo - number_hi > CAP) & (hi - lo > 1):
        c_1, c_2, c_3 = _tests(lo, hi)
        a_1 = tl.full([], 0.0, tl.float64)
        a_2 = tl.full([], 0.0, tl.float64)
        a_3 = tl.full([], 0.0, tl.float64)
        n_1 = count * 0
        n_2 = count * 0
        n_3 = count * 0
        for start in range(0, count, CAP // SUB):
            weights = _tile(start, wanted_ptr, list_ptr, count, base, divisor, SUB, CAP)
            bits = weights.to(tl.int32, bitcast=True)
            amounts = _amounts(weights, BY_COUNT)
            a_1 += tl.sum(tl.where(bits >= c_1, amounts, 0.0))
            a_2 += tl.sum(tl.where(bits >= c_2, amounts, 0.0))
            a_3 += tl.sum(tl.where(bits >= c_3, amounts, 0.0))
            n_1 += tl.sum((bits >= c_1).to(tl.int32))
            n_2 += tl.sum((bits >= c_2).to(tl.int32))
            n_3 += tl.sum((bits >= c_3).to(tl.int32))
        held = (a_1 >= goal).to(tl.int32) + (a_2 >= goal).to(tl.int32) + (a_3 >= goal).to(tl.int32)
        lo, hi = _quarter(held, lo, hi, c_1, c_2, c_3)
        number_lo, number_hi = _quarter(held, number_lo, number_hi, n_1, n_2, n_3)

    above = tl.full([], 0.0, tl.float64)  # of the weights that no test is above
    found = count * 0
    tl.debug_barrier()
    for start in range(0, count, CAP // SUB):
        weights = _tile(start, wanted_ptr, list_ptr, count, base, divisor, SUB, CAP)
        bits = weights.to(tl.int32, bitcast=True)
        above += tl.sum(tl.where(bits >= hi, _amounts(weights, BY_COUNT), 0.0))
        bits = tl.reshape(bits, [CAP])
        between = ((bits > lo) & (bits < hi)).to(tl.int32)
        at = found + tl.cumsum(between, 0) - 1
        tl.store(found_ptr + at, bits, mask=(between > 0) & (at < CAP))
        found += tl.sum(between, 0)
    tl.debug_barrier()
    i = tl.arange(0, CAP)
    bits = tl.load(found_ptr + i, mask=i < found, other=-1)
    amounts = _amounts(bits.to(tl.float32, bitcast=True), BY_COUNT)
    while hi - lo > 1:
        c_1, c_2, c_3 = _tests(lo, hi)
        a_1 = above + tl.sum(tl.where(bits >= c_1, amounts, 0.0), 0)
        a_2 = above + tl.sum(tl.where(bits >= c_2, amounts, 0.0), 0)
        a_3 = above + tl.sum(tl.where(bits >= c_3, amounts, 0.0), 0)
        held = (a_1 >= goal).to(tl.int32) + (a_2 >= goal).to(tl.int32) + (a_3 >= goal).to(tl.int32)
        lo, hi = _quarter(held, lo, hi, c_1, c_2, c_3)
    return lo
