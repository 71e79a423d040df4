"""Solves a memory budget for the number of blocks and of batch tokens. Integers only.

With N blocks and M batch tokens (maximum tokens per step) a model takes `total(N, M)` bytes
(`ModelFootprint.terms`). The cost is linear in blocks, and linear in tokens except for alignment.
Attention masks cost M times the positions of a row, which are limited by N blocks or by the model.
So with M = m N the total is quadratic in N, or linear without masks.

Alignment, contexts shorter than the cache and sliding windows make the function uneven, but it is
non-decreasing. So a plan is found by bisection, exact to the byte.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, fields
from fractions import Fraction

from .memory_plan import HOST_TERMS, MemoryPlan, ReconciledTerm, Reconciliation, format_bytes
from .model_footprint import ModelFootprint

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
    """The memory budget is invalid, or too small for the smallest cache that works.

    Attributes:
        term: the term of the plan that does not fit, one of `TERMS`; None if the budget is invalid
            or the memory ran out at run time.
        field: the field of `EngineConfig` that helps most; None if only more memory helps.
        needed_bytes: what the smallest plan needs, and of it the term; None without a plan.
        term_bytes: see `needed_bytes`.
        limit_bytes: what the plan may use; None without a plan.
    """

    def __init__(
        self,
        message: str,
        *,
        term: str | None = None,
        field: str | None = None,
        needed_bytes: int | None = None,
        term_bytes: int | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.term = term
        self.field = field
        self.needed_bytes = needed_bytes
        self.term_bytes = term_bytes
        self.limit_bytes = limit_bytes


@dataclass(frozen=True, kw_only=True)
class MemoryBudget:
    """The memory that an engine may use, given in exactly one of four ways.

    Attributes:
        fraction: share of the free bytes of the device, above 0 to 1. It covers the weights unless
            they are already loaded.
        bytes: total bytes; they cover the weights, loaded or not.
        context_tokens: tokens of context that the cache holds, in requests of `max_model_len`
            tokens (see `ModelFootprint.context_blocks`).
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
    weights_resident: bool = False,
    num_blocks: int | None = None,
    max_batch_tokens: int | None = None,
    batch_tokens_per_block: int | Fraction = Fraction(1, 8),
    cap_blocks: int | None = None,
    reserve_bytes: int = 0,
) -> MemoryPlan:
    """Solve for the number of blocks and of batch tokens that a budget allows.

    A solved number is maximal: the plan fits, and one more would not. Solved batch tokens are
    between `footprint.least_batch_tokens` and `footprint.most_batch_tokens`.

    Args:
        footprint: the memory that the model needs.
        budget: the memory that it may use. A number of blocks or context tokens determines the
            bytes.
        available_bytes: free bytes of the device now.
        weights_resident: the weights are loaded, so `available_bytes` no longer contains them.
        num_blocks: fixes the blocks, null block included; the batch tokens are solved for.
        max_batch_tokens: fixes the batch tokens; the blocks are solved for.
        batch_tokens_per_block: ratio of batch tokens to blocks, if batch tokens are solved for and
            the blocks are not fixed by `num_blocks`; above 0, rounded up to whole batch tokens.
        cap_blocks: maximum blocks of a solution, usually `footprint.most_blocks`; None: as many as
            the budget allows.
        reserve_bytes: bytes to leave free.

    Raises:
        MemoryBudgetError: an argument is out of range, contradicts the budget, or the budget or
            the device is too small; the message lists every term.
    """
    for name, value, least in (
        ("available_bytes", available_bytes, 0),
        ("num_blocks", num_blocks, _MIN_BLOCKS),
        ("max_batch_tokens", max_batch_tokens, footprint.least_batch_tokens),
        ("cap_blocks", cap_blocks, _MIN_BLOCKS),
        ("reserve_bytes", reserve_bytes, 0),
    ):
        if value is not None and value < least:
            why = ", one token for each of max_num_seqs and one of a prompt"
            raise MemoryBudgetError(
                f"{name} must be at least {least}{why if name == 'max_batch_tokens' else ''}, "
                f"got {value}"
            )
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

    solver = _Solver(footprint, Fraction(batch_tokens_per_block), reserve_bytes)
    blocks_of_budget = budget.num_blocks
    if budget.context_tokens is not None:
        blocks_of_budget = max(
            footprint.context_blocks(budget.context_tokens), footprint.least_blocks
        )
    if blocks_of_budget is not None and num_blocks is not None:
        raise MemoryBudgetError(
            f"num_blocks={num_blocks} and a budget of {blocks_of_budget} blocks both fix the "
            f"cache: give one of them"
        )
    fixed_blocks = num_blocks if blocks_of_budget is None else blocks_of_budget
    if fixed_blocks is not None and fixed_blocks < footprint.least_blocks:
        raise MemoryBudgetError(
            f"num_blocks={fixed_blocks} is too few: the model has {len(footprint.groups)} layer "
            f"groups, and one token takes a block in each of them, besides the null block: give at "
            f"least {footprint.least_blocks}"
        )

    capped = False
    if blocks_of_budget is not None:
        blocks = blocks_of_budget
        tokens = max_batch_tokens or solver.batch_tokens(blocks)
    elif num_blocks is not None:
        blocks = num_blocks
        tokens = max_batch_tokens or solver.most_tokens(ceiling, blocks)
    else:
        tokens_of = solver.batch_tokens if max_batch_tokens is None else lambda _: max_batch_tokens
        blocks = solver.most_blocks(ceiling, tokens_of)
        if cap_blocks is not None and blocks > cap_blocks:
            blocks, capped = cap_blocks, True
        blocks = max(blocks, footprint.least_blocks)
        tokens = tokens_of(blocks)

    plan = MemoryPlan(
        **footprint.terms(blocks, tokens),
        reserve=reserve_bytes,
        host_shared=footprint.host_shared,
        num_blocks=blocks,
        host_blocks=footprint.host_blocks,
        max_batch_tokens=tokens,
        block_size=footprint.block_size,
        context_tokens=footprint.context_tokens(blocks),
        longest_request=footprint.longest_request(blocks),
        budget_bytes=ceiling,
        available_bytes=available_bytes,
        weights_resident=weights_resident,
        capped=capped,
    )
    # A budget of bytes, blocks or context may exceed the memory of the device.
    limit = min(ceiling, available_bytes + credit)
    if plan.total > limit:
        raise _too_small(plan, limit, blocks_given=fixed_blocks is not None)
    return plan


class _Solver:
    """The inverses of `total`.

    A result may be too small to run. The caller then plans the smallest cache that works, so that
    the error shows its terms.
    """

    def __init__(self, footprint: ModelFootprint, ratio: Fraction, reserve_bytes: int) -> None:
        self.footprint = footprint
        self.ratio = ratio
        self.reserve_bytes = reserve_bytes

    def total(self, blocks: int, tokens: int) -> int:
        terms = self.footprint.terms(blocks, tokens)
        on_host = 0
        if not self.footprint.host_shared:
            on_host = sum(terms[name] for name in HOST_TERMS)
        return sum(terms.values()) - on_host + self.reserve_bytes

    def batch_tokens(self, blocks: int) -> int:
        """Batch tokens for a number of blocks, by the ratio."""
        wanted = max(math.ceil(self.ratio * blocks), self.footprint.least_batch_tokens)
        return min(wanted, self.footprint.most_batch_tokens)

    def most_blocks(self, ceiling: int, tokens_of: Callable[[int], int]) -> int:
        """Maximum blocks that fit together with `tokens_of(blocks)` batch tokens."""
        # A block costs at least its own bytes: an upper bound, exact if no other term grows.
        bound = (ceiling - self.total(0, tokens_of(0))) // self.footprint.block_bytes
        return _last(range(bound + 1), ceiling, lambda n: self.total(n, tokens_of(n)))

    def most_tokens(self, ceiling: int, blocks: int) -> int:
        """Maximum batch tokens that fit with `blocks`, or `least_batch_tokens` if none do."""
        least, most = self.footprint.least_batch_tokens, self.footprint.most_batch_tokens
        tokens = range(least, most + 1)
        return least + max(_last(tokens, ceiling, lambda m: self.total(blocks, m)), 0)


def _last(candidates: range, ceiling: int, cost: Callable[[int], int]) -> int:
    """Index of the last candidate whose cost is at most the ceiling, -1 if there is none."""
    return bisect_right(candidates, ceiling, key=cost) - 1


_FIELDS = {
    "cache": ("kv_dtype", "block_size"),
    "static_buffers": ("max_num_seqs", "max_batch_tokens"),
    "activations": ("max_batch_tokens", "prefill_chunk"),
    "logits": ("max_num_seqs",),
    "attention_masks": ("max_batch_tokens", "prefill_chunk"),
    "captured_graphs": ("buckets", "max_num_seqs"),
    "host_cache": ("host_cache_bytes",),
    "host_buffers": ("max_num_seqs", "max_batch_tokens"),
}
"""Fields of a configuration that make a term smaller, the best first."""


def _too_small(plan: MemoryPlan, limit: int, *, blocks_given: bool) -> MemoryBudgetError:
    of_device = plan.available_bytes + (plan.weights if plan.weights_resident else 0)
    what, remedy = (
        ("available memory", "free memory on the device")
        if limit == of_device
        else ("memory budget", "raise the budget")
    )
    loaded = ", loaded weights included" if plan.weights_resident else ""
    budget = f"the {what} of {limit} bytes ({format_bytes(limit)}{loaded}) is too small"
    usable = f"{plan.usable_blocks} block{'s' if plan.usable_blocks > 1 else ''} for tokens"
    counted = {n: b for n, b in plan.terms().items() if plan.host_shared or n not in HOST_TERMS}
    terms = ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in counted.items()
    )
    term = max(counted.keys() - {"weights"}, key=counted.__getitem__)
    alone = plan.weights > limit or plan.reserve <= plan.weights > limit - plan.reserve
    if alone:
        term = "weights"
    fields = _FIELDS.get(term, ())
    if term == "cache" and blocks_given:
        fields = ("num_blocks", "memory_tokens", *fields[:1])
    change = f"change {' or '.join(fields)}, or {remedy}" if fields else remedy
    what_not = (
        f"The weights alone need {plan.weights} bytes"
        if alone
        else f"The largest besides the weights is {term.replace('_', ' ')}: {change}."
    )
    return MemoryBudgetError(
        f"{budget}: the null block and {usable}, with {plan.max_batch_tokens} batch tokens, need "
        f"{plan.total} bytes ({format_bytes(plan.total)}): {terms}. {what_not}",
        term=term,
        field=fields[0] if fields else None,
        needed_bytes=plan.total,
        term_bytes=counted[term],
        limit_bytes=limit,
    )
