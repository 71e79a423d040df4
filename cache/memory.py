"""The memory handler: a budget in, the number of blocks and of batch tokens out. Integers only.

With N blocks and M batch tokens a model takes

    total(N, M) = constant + per_block N + per_token M + per_block_token N M   bytes,

the last term being attention masks of M rows over all slots. One of N and M fixed leaves a linear
inequality in the other. With both free M follows N at a given ratio m, and `total(N, m N)` is a
quadratic in N, or linear without masks. Everything is computed in integers, so a plan is tight to
the byte on devices of any size.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, fields
from fractions import Fraction

from .memory_plan import MemoryPlan, ModelFootprint, ReconciledTerm, Reconciliation, format_bytes

__all__ = [
    "MemoryBudget",
    "MemoryBudgetError",
    "MemoryPlan",
    "ModelFootprint",
    "ReconciledTerm",
    "Reconciliation",
    "plan_memory",
]

_MIN_BLOCKS = 2  # the null block and one for tokens


class MemoryBudgetError(ValueError):
    """The memory budget is malformed, or too small for the smallest cache the model can run on."""


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """How much the engine may take, in exactly one of four ways.

    Attributes:
        fraction: of the free bytes of the device, `0 < fraction <= 1`. Asked before the weights
            are loaded it covers them; afterwards it is a share of what they left.
        bytes: of everything, weights included, whether they are loaded or not.
        context_tokens: tokens of context that the cache holds over all requests.
        num_blocks: blocks of the cache, null block included, at least 2.

    Raises:
        MemoryBudgetError: none or several are given, or the value is out of range.
    """

    fraction: float | None = None
    bytes: int | None = None
    context_tokens: int | None = None
    num_blocks: int | None = None

    def __post_init__(self) -> None:
        given = {
            f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None
        }
        if len(given) != 1:
            raise MemoryBudgetError(
                f"a memory budget is one of fraction, bytes, context_tokens and num_blocks, "
                f"got {' and '.join(given) or 'none'}"
            )
        if self.fraction is not None and not 0 < self.fraction <= 1:
            raise MemoryBudgetError(f"fraction must be above 0 and at most 1, got {self.fraction}")
        for name, least in (("bytes", 1), ("context_tokens", 1), ("num_blocks", _MIN_BLOCKS)):
            if given.get(name, least) < least:
                raise MemoryBudgetError(f"{name} must be at least {least}, got {given[name]}")


def plan_memory(
    footprint: ModelFootprint,
    budget: MemoryBudget,
    *,
    available_bytes: int,
    block_size: int,
    weights_resident: bool = False,
    num_blocks: int | None = None,
    max_batch_tokens: int | None = None,
    batch_tokens_per_block: int | Fraction = Fraction(1, 8),
    cap_blocks: int | None = None,
    reserve_bytes: int = 0,
) -> MemoryPlan:
    """Solve for the number of blocks and of batch tokens that a budget allows.

    A solved number is tight: the plan fits, and one more would not. Solved batch tokens stay
    between `max_rows` (a decode step) and `footprint.most_batch_tokens`.

    Args:
        footprint: what the model needs.
        budget: what it may take. If it is a number of blocks or of context tokens, the bytes
            follow from it.
        available_bytes: free bytes of the device now.
        block_size: slots of a block.
        weights_resident: the weights are loaded, so `available_bytes` no longer contains them.
        num_blocks: fixes the blocks, null block included; the batch tokens are solved for.
        max_batch_tokens: fixes the batch tokens; the blocks are solved for.
        batch_tokens_per_block: the ratio where both are free, or the blocks follow from the
            budget and the batch tokens are free; above 0, rounded up to whole batch tokens.
        cap_blocks: the most blocks that a solution takes, usually `footprint.most_blocks(...)` on
            memory shared with the operating system; `None` to take what the budget allows.
        reserve_bytes: to be left alone.

    Raises:
        MemoryBudgetError: an argument is out of range, contradicts the budget, or the budget or
            the device is too small; the message lists every term.
    """
    for name, value, least in (
        ("available_bytes", available_bytes, 0),
        ("block_size", block_size, 1),
        ("num_blocks", num_blocks, _MIN_BLOCKS),
        ("max_batch_tokens", max_batch_tokens, footprint.max_rows),
        ("cap_blocks", cap_blocks, _MIN_BLOCKS),
        ("reserve_bytes", reserve_bytes, 0),
    ):
        if value is not None and value < least:
            why = ", one token for each of max_rows" if name == "max_batch_tokens" else ""
            raise MemoryBudgetError(f"{name} must be at least {least}{why}, got {value}")
    if batch_tokens_per_block <= 0:
        raise MemoryBudgetError(
            f"batch_tokens_per_block must be above 0, got {batch_tokens_per_block}"
        )

    # Bytes that `available_bytes` no longer contains but `total` does.
    credit = footprint.weight_bytes if weights_resident else 0
    ceiling = available_bytes + credit
    if budget.fraction is not None:
        ceiling = math.floor(Fraction(budget.fraction) * available_bytes) + credit
    elif budget.bytes is not None:
        ceiling = budget.bytes

    solver = _Solver(footprint, block_size, Fraction(batch_tokens_per_block), reserve_bytes)
    blocks_of_budget = budget.num_blocks
    if budget.context_tokens is not None:
        blocks_of_budget = -(-budget.context_tokens // block_size) + 1
    if blocks_of_budget is not None and num_blocks is not None:
        raise MemoryBudgetError(
            f"num_blocks={num_blocks} is given beside a budget that means {blocks_of_budget} "
            f"blocks; give one of them"
        )

    capped = False
    if blocks_of_budget is not None:
        blocks = blocks_of_budget
        tokens = max_batch_tokens or solver.batch_tokens(blocks)
    elif num_blocks is not None:
        blocks = num_blocks
        tokens = max_batch_tokens or max(solver.most_tokens(ceiling, blocks), footprint.max_rows)
    else:
        if max_batch_tokens is not None:
            blocks = solver.most_blocks(ceiling, max_batch_tokens)
        else:
            blocks = solver.most_blocks_and_tokens(ceiling)
        if cap_blocks is not None and blocks > cap_blocks:
            blocks, capped = cap_blocks, True
        blocks = max(blocks, _MIN_BLOCKS)
        tokens = max_batch_tokens or solver.batch_tokens(blocks)

    plan = MemoryPlan(
        **footprint.terms(blocks, tokens, block_size),
        reserve=reserve_bytes,
        num_blocks=blocks,
        max_batch_tokens=tokens,
        block_size=block_size,
        budget_bytes=ceiling,
        available_bytes=available_bytes,
        weights_resident=weights_resident,
        capped=capped,
    )
    # A budget of bytes, blocks or context may ask for more than there is.
    limit = min(ceiling, available_bytes + credit)
    if plan.total > limit:
        raise MemoryBudgetError(_too_small(plan, limit))
    return plan


class _Solver:
    """`total` as coefficients, and its inverses.

    A result too small to run on is no error here: the caller raises it to the least that works,
    so that the error can show what that would take.
    """

    def __init__(
        self, footprint: ModelFootprint, block_size: int, ratio: Fraction, reserve_bytes: int
    ) -> None:
        self.footprint = footprint
        self.ratio = ratio
        self.constant = sum(footprint.terms(0, 0, block_size).values()) + reserve_bytes
        self.per_block = footprint.block_bytes + footprint.static_bytes_per_block
        self.per_token = (
            footprint.activation_bytes_per_token + footprint.static_bytes_per_batch_token
        )
        self.per_block_token = footprint.masks * footprint.mask_bytes_per_token_slot * block_size

    def total(self, blocks: int, tokens: int) -> int:
        return (
            self.constant
            + self.per_block * blocks
            + self.per_token * tokens
            + self.per_block_token * blocks * tokens
        )

    def batch_tokens(self, blocks: int) -> int:
        """Batch tokens that go with `blocks` where nothing else decides."""
        tokens = max(math.ceil(self.ratio * blocks), self.footprint.max_rows)
        return min(tokens, self.footprint.most_batch_tokens)

    def most_blocks(self, ceiling: int, tokens: int) -> int:
        room = ceiling - self.total(0, tokens)
        return room // (self.per_block + self.per_block_token * tokens)

    def most_tokens(self, ceiling: int, blocks: int) -> int:
        room = ceiling - self.total(blocks, 0)
        slope = self.per_token + self.per_block_token * blocks
        most = self.footprint.most_batch_tokens
        return min(room // slope, most) if slope else most

    def most_blocks_and_tokens(self, ceiling: int) -> int:
        """The most blocks that fit together with `batch_tokens(blocks)`.

        A solution either has the most batch tokens there can be, or at least `ratio` of them a
        block: the larger of the two closed forms is an upper bound. It is exact but for the
        rounding and the limits of `batch_tokens`, which a bisection below it settles.
        """
        p, q = self.ratio.as_integer_ratio()
        room = q * (ceiling - self.constant)
        if room < 0:
            return 0
        # q total(N, p N / q) <= q ceiling   is   square N^2 + slope N <= room.
        square = self.per_block_token * p
        slope = self.per_block * q + self.per_token * p
        if square:
            # The floor of the positive root: isqrt rounds down, and so does //.
            bound = (math.isqrt(slope * slope + 4 * square * room) - slope) // (2 * square)
        else:
            bound = room // slope
        bound = max(bound, self.most_blocks(ceiling, self.footprint.most_batch_tokens))
        return (
            bisect_right(
                range(bound + 1), ceiling, key=lambda n: self.total(n, self.batch_tokens(n))
            )
            - 1
        )


def _too_small(plan: MemoryPlan, limit: int) -> str:
    of_device = plan.available_bytes + (plan.weights if plan.weights_resident else 0)
    what, remedy = (
        ("available memory", "free memory on the device")
        if limit == of_device
        else ("memory budget", "raise the budget")
    )
    loaded = ", loaded weights included" if plan.weights_resident else ""
    usable = f"{plan.usable_blocks} block{'s' if plan.usable_blocks > 1 else ''} for tokens"
    terms = ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in plan.terms().items()
    )
    return (
        f"the {what} of {limit} bytes ({format_bytes(limit)}{loaded}) is too small: the null block "
        f"and {usable}, with {plan.max_batch_tokens} batch tokens, need {plan.total} bytes "
        f"({format_bytes(plan.total)}): {terms}. Lower the number of blocks, max_batch_tokens or "
        f"max_rows, or {remedy}."
    )
