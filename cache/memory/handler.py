"""Solves a memory budget for the number of blocks and of batch tokens. Integers only.

With N blocks and M batch tokens (maximum tokens per step) a model takes `total(N, M)` bytes
(`ModelFootprint.terms`). The cost is linear in blocks, and linear in tokens except for alignment.
Attention masks cost M times the positions of a row, which are limited by N blocks or by the model.
So with M = m N the total is quadratic in N, or linear without masks.

Alignment, contexts shorter than the cache and sliding windows make the function uneven, but it is
non-decreasing. So a plan is found by bisection, exact to the byte.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..spec import LayerGroup

# The memory plan, term by term, and its comparison with measurements. All bytes.

HOST_TERMS = ("host_cache", "host_buffers")
"""The terms in host memory, whatever the device."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The sizes that `plan_memory` chose, and the bytes of each term, in the order of display.

    | term | |
    |---|---|
    | weights | parameters of the model, loaded already or not |
    | cache | the arena, null block included |
    | row_state | recurrent state of `max_num_seqs` rows, if layers have any |
    | snapshots | cached snapshots of recurrent state |
    | static_buffers | inputs, outputs and tables, allocated for the lifetime of the engine |
    | activations | peak of the intermediate results of a step |
    | logits | logits of `max_num_seqs` rows and the float32 copies that sampling makes |
    | attention_masks | masks, and scores if a kernel stores them; 0 for kernels that need none |
    | captured_graphs | memory of captured steps, without their buffers |
    | reserve | left free, for fragmentation and other processes |
    | host_cache | blocks in host memory for swapped requests |
    | host_buffers | host mirrors of static buffers, and host copies of outputs |

    Attributes:
        terms: bytes of each term.
        host_shared: whether the host's memory is the device's, so that `total` counts it.
        num_blocks: blocks of the cache, null block included.
        host_blocks: blocks of the host cache.
        max_batch_tokens: maximum tokens of one step.
        block_size: slots of a block.
        context_tokens: tokens of context that the cache holds in requests of `max_model_len`, see
            `ModelFootprint.context_blocks`.
        longest_request: tokens of the longest request that fits if no other runs.
        budget_bytes: upper limit of `total`.
        available_bytes: free bytes of the device when the plan was made.
        capped: whether more blocks would fit than `max_num_seqs` full requests can use.
    """

    terms: Mapping[str, int]
    host_shared: bool
    num_blocks: int
    host_blocks: int
    max_batch_tokens: int
    block_size: int
    context_tokens: int
    longest_request: int
    budget_bytes: int
    available_bytes: int
    capped: bool

    @property
    def total(self) -> int:
        """Sum of all terms in bytes; without the host terms if host and device memory differ."""
        return sum(_on_device(self.terms, self.host_shared).values())

    @property
    def host_total(self) -> int:
        """Sum of the terms in host memory."""
        return sum(self.terms[name] for name in HOST_TERMS)

    @property
    def usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - 1

    def summary(self) -> str:
        """The plan on one line: its terms, and what the cache holds."""
        terms = ", ".join(
            f"{self._label(name)} {format_bytes(size)}" for name, size in self.terms.items() if size
        )
        return (
            f"{terms}; {format_bytes(self.total)} of a budget of {format_bytes(self.budget_bytes)};"
            f" {self.usable_blocks:,} blocks of {self.block_size} tokens"
        )

    def format(self) -> str:
        """The plan as an aligned table in plain text, without a trailing newline."""
        rows = {self._label(name): format_bytes(size) for name, size in self.terms.items()}
        rows["total"] = format_bytes(self.total)
        rows["budget"] = format_bytes(self.budget_bytes)
        rows["available"] = format_bytes(self.available_bytes)
        labels, values = (max(map(len, column)) for column in (rows, rows.values()))
        lines = [f"{label:<{labels}}  {value:>{values}}" for label, value in rows.items()]
        blocks = (
            f"{self.num_blocks:,} blocks of {self.block_size} slots"
            f"{', limited by max_num_seqs and max_model_len' if self.capped else ''}: "
            f"{self.context_tokens:,} tokens of context, {self.longest_request:,} in one request; "
            f"{self.max_batch_tokens:,} tokens per step"
        )
        return "\n".join([*lines, blocks])

    def _label(self, name: str) -> str:
        label = name.replace("_", " ")
        if name in HOST_TERMS and not self.host_shared:
            return f"{label} (not in the total)"
        return label


def _on_device(terms: Mapping[str, int], host_shared: bool) -> dict[str, int]:
    """Return the terms that a budget covers."""
    return {name: size for name, size in terms.items() if host_shared or name not in HOST_TERMS}


def format_bytes(size: int) -> str:
    """Format bytes in the largest binary unit not larger than `size`: `1536` is `1.50 KiB`."""
    if abs(size) < 1024:
        return f"{size} B"
    value = float(size)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if abs(value) < 1024:
            return f"{value:.2f} {unit}"
    return f"{value / 1024:.2f} TiB"


# The memory that a model needs, as a function of blocks and batch tokens. All bytes.
#
# All numbers are known before weights are loaded. They are non-decreasing in blocks and batch
# tokens, so that a plan can be found by bisection.

BufferBytes = Callable[[int, int], tuple[int, int]]
"""(prompt tokens of the largest step, blocks of the longest row) -> bytes on the device and of
their mirrors on the host; non-decreasing."""


@dataclass(frozen=True, kw_only=True)
class ModelFootprint:
    """The memory terms of a model, and the blocks that its requests use.

    Attributes:
        weight_bytes: all parameters.
        groups: the layer groups; each has its own block table.
        block_size: slots of a block.
        block_bytes: bytes of a block over all layers of a layer group, a drafter's included.
        row_state_bytes: recurrent state of all rows, 0 without recurrent layers.
        snapshot_bytes: cached snapshots of recurrent state.
        max_num_seqs: rows of the decode batch.
        max_model_len: tokens of the longest request, unless the cache holds fewer.
        prefill_chunk: maximum prompt tokens of one step.
        mixed_rows: maximum decoding rows that one forward pass computes together with prompt
            tokens; 0 if decode and prefill are steps of their own.
        activation_bytes_fixed: peak activations that do not depend on the step.
        activation_bytes_per_token: peak activations of a step, per token of the step.
        read_bytes_per_position: copies of the cache that attention gathers, per position of a row;
            0 for kernels that read the blocks in place.
        mask_bytes_per_token_position: masks (and scores, if a kernel stores them), per token of
            the step and position read; 0 for kernels that need none.
        logits_bytes_fixed: memory of sampling that does not depend on the rows.
        logits_bytes_per_row: logits of one row, with the copies that sampling makes.
        buffer_bytes: static buffers; and their host mirrors and host copies of outputs, 0 on a CPU.
        graph_bytes: memory of captured steps, without their buffers.
        reserve_bytes: bytes to leave free.
        host_blocks: blocks of the host cache.
        host_state_bytes: recurrent state of swapped requests on the host.
        host_shared: whether host and device share their memory, so that a budget covers both.
    """

    weight_bytes: int
    groups: tuple[LayerGroup, ...]
    block_size: int
    block_bytes: int
    max_num_seqs: int
    max_model_len: int
    prefill_chunk: int
    mixed_rows: int = 0
    row_state_bytes: int = 0
    snapshot_bytes: int = 0
    activation_bytes_fixed: int = 0
    activation_bytes_per_token: int = 0
    read_bytes_per_position: int = 0
    mask_bytes_per_token_position: int = 0
    logits_bytes_fixed: int = 0
    logits_bytes_per_row: int = 0
    buffer_bytes: BufferBytes = lambda _tokens, _blocks: (0, 0)
    graph_bytes: int = 0
    reserve_bytes: int = 0
    host_blocks: int = 0
    host_state_bytes: int = 0
    host_shared: bool = True

    @property
    def least_batch_tokens(self) -> int:
        """Minimum of the batch tokens: every row decodes, and one prompt token is computed."""
        return self.max_num_seqs + 1

    @property
    def most_batch_tokens(self) -> int:
        """Maximum tokens of one step: every row decodes, and a whole chunk is computed."""
        return self.max_num_seqs + self.prefill_chunk

    @property
    def least_blocks(self) -> int:
        """Blocks of the smallest cache: one token in every group, and the null block."""
        return self.request_blocks(1) + 1

    @property
    def most_blocks(self) -> int:
        """Blocks that the context of a full batch can use, and the null block."""
        return self.max_num_seqs * self.request_blocks(self.max_model_len) + 1

    def request_blocks(self, num_tokens: int) -> int:
        """Maximum blocks that a request of `num_tokens` tokens holds at once, over all groups.

        In a sliding group these are at most the blocks of its window and a chunk.
        """
        return sum(
            group.most_blocks(num_tokens, self.block_size, self.prefill_chunk)
            for group in self.groups
        )

    def longest_request(self, num_blocks: int) -> int:
        """Tokens of the longest request that fits a cache of `num_blocks` if no other runs.

        At most `max_model_len`, the only limit if all layers have a sliding window.
        """
        tokens = range(1, self.max_model_len + 1)
        return bisect_right(tokens, num_blocks - 1, key=self.request_blocks)

    def context_blocks(self, num_tokens: int) -> int:
        """Blocks (with the null block) that hold `num_tokens` tokens of context.

        Counts requests of `max_model_len` tokens, and a shorter one for the rest. With sliding
        windows, the same number of tokens in many short requests takes more blocks.
        """
        whole, rest = divmod(num_tokens, self.max_model_len)
        return whole * self.request_blocks(self.max_model_len) + self.request_blocks(rest) + 1

    def context_tokens(self, num_blocks: int) -> int:
        """Maximum tokens of context whose `context_blocks` are at most `num_blocks`."""
        whole, rest = divmod(max(num_blocks - 1, 0), self.request_blocks(self.max_model_len))
        return whole * self.max_model_len + self.longest_request(rest + 1)

    def terms(self, num_blocks: int, max_batch_tokens: int) -> dict[str, int]:
        """Bytes of each term of a `MemoryPlan`."""
        chunk = min(max_batch_tokens, self.prefill_chunk)
        prefill_tokens = chunk + self.mixed_rows
        row_blocks = max(1, -(-self.longest_request(num_blocks) // self.block_size))
        positions = row_blocks * self.block_size
        # Prefill reads one row at a time.
        prefill = self.activation_bytes_per_token * prefill_tokens
        prefill += self.read_bytes_per_position * positions
        decode = self.activation_bytes_per_token + self.read_bytes_per_position * positions
        most_tokens = max(prefill_tokens, self.max_num_seqs)
        static_buffers, host_buffers = self.buffer_bytes(chunk, row_blocks)
        states = {"row_state": self.row_state_bytes, "snapshots": self.snapshot_bytes}
        return {
            "weights": self.weight_bytes,
            "cache": self.block_bytes * num_blocks,
            **(states if self.row_state_bytes else {}),
            "static_buffers": static_buffers,
            "activations": self.activation_bytes_fixed + max(prefill, decode * self.max_num_seqs),
            "logits": self.logits_bytes_fixed + self.logits_bytes_per_row * self.max_num_seqs,
            "attention_masks": self.mask_bytes_per_token_position * most_tokens * positions,
            "captured_graphs": self.graph_bytes,
            "reserve": self.reserve_bytes,
            "host_cache": self.block_bytes * self.host_blocks + self.host_state_bytes,
            "host_buffers": host_buffers,
        }

    def total(self, num_blocks: int, max_batch_tokens: int) -> int:
        """Bytes of a plan on the device."""
        terms = self.terms(num_blocks, max_batch_tokens)
        return sum(_on_device(terms, self.host_shared).values())

    def batch_tokens(self, num_blocks: int) -> int:
        """Batch tokens of a cache: as many as slots, but no more than a step can use."""
        wanted = max(num_blocks * self.block_size, self.least_batch_tokens)
        return min(wanted, self.most_batch_tokens)


class MemoryBudgetError(ValueError):
    """The memory budget is invalid, or too small for the smallest cache that works.

    Attributes:
        term: the term of the `MemoryPlan` that does not fit; None if the budget is invalid or the
            memory ran out at run time.
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


def plan_memory(
    footprint: ModelFootprint,
    *,
    available_bytes: int,
    budget_bytes: int | None = None,
    context_tokens: int | None = None,
    num_blocks: int | None = None,
    max_batch_tokens: int | None = None,
    capped: bool = False,
) -> MemoryPlan:
    """Solve for the number of blocks and of batch tokens that a budget allows.

    What is None is solved for. A solved number is maximal: the plan fits, and one more would not.
    With bytes and blocks, batch tokens are between `footprint.least_batch_tokens` and
    `footprint.most_batch_tokens`. Otherwise they are `footprint.batch_tokens`.

    Args:
        footprint: the memory that the model needs.
        available_bytes: free bytes of the device now.
        budget_bytes: bytes that the engine may use, its weights included, loaded or not; None: all
            free bytes.
        context_tokens: tokens of context that the cache holds, in requests of `max_model_len`
            tokens (see `ModelFootprint.context_blocks`).
        num_blocks: blocks of the cache, null block included, at least 2.
        max_batch_tokens: maximum tokens of a step.
        capped: whether a solution has at most `footprint.most_blocks`, whatever the budget allows.

    Raises:
        MemoryBudgetError: the batch tokens or blocks are too few, or the budget or the device is
            too small; the message lists every term.
    """
    least = footprint.least_batch_tokens
    if max_batch_tokens is not None and max_batch_tokens < least:
        raise MemoryBudgetError(
            f"max_batch_tokens must be at least {least}, one token for each of max_num_seqs and one"
            f" of a prompt, got {max_batch_tokens}"
        )

    ceiling = available_bytes if budget_bytes is None else budget_bytes
    if context_tokens is not None:
        num_blocks = max(footprint.context_blocks(context_tokens), footprint.least_blocks)
    if num_blocks is not None and num_blocks < footprint.least_blocks:
        raise MemoryBudgetError(
            f"num_blocks={num_blocks} is too few: the model has {len(footprint.groups)} layer "
            f"groups, and one token takes a block in each of them, besides the null block: give at "
            f"least {footprint.least_blocks}"
        )

    # Where nothing fits, the smallest cache that works is planned, so that the error has its terms.
    tokens_of = footprint.batch_tokens if max_batch_tokens is None else lambda _: max_batch_tokens
    exceeds = False
    if num_blocks is None:
        # A block costs at least its own bytes: an upper bound, exact if no other term grows.
        bound = (ceiling - footprint.total(0, tokens_of(0))) // footprint.block_bytes
        blocks = _last(range(bound + 1), ceiling, lambda n: footprint.total(n, tokens_of(n)))
        exceeds = capped and blocks > footprint.most_blocks
        blocks = max(footprint.most_blocks if exceeds else blocks, footprint.least_blocks)
    else:
        blocks = num_blocks
    tokens = tokens_of(blocks)
    if budget_bytes is not None and num_blocks is not None and max_batch_tokens is None:
        candidates = range(least, footprint.most_batch_tokens + 1)
        tokens = least + max(_last(candidates, ceiling, lambda m: footprint.total(blocks, m)), 0)

    plan = MemoryPlan(
        terms=footprint.terms(blocks, tokens),
        host_shared=footprint.host_shared,
        num_blocks=blocks,
        host_blocks=footprint.host_blocks,
        max_batch_tokens=tokens,
        block_size=footprint.block_size,
        context_tokens=footprint.context_tokens(blocks),
        longest_request=footprint.longest_request(blocks),
        budget_bytes=ceiling,
        available_bytes=available_bytes,
        capped=exceeds,
    )
    # A budget of bytes, blocks or context may exceed the memory of the device.
    limit = min(ceiling, available_bytes)
    if plan.total > limit:
        raise _too_small(plan, limit, blocks_given=num_blocks is not None)
    return plan


def _last(candidates: range, ceiling: int, cost: Callable[[int], int]) -> int:
    """Index of the last candidate whose cost is at most the ceiling, -1 if there is none."""
    return bisect_right(candidates, ceiling, key=cost) - 1


_FIELDS = {
    "cache": ("kv_dtype", "block_size"),
    "row_state": ("max_num_seqs",),
    "snapshots": ("snapshot_bytes", "max_num_seqs"),
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
    what, remedy = (
        ("available memory", "free memory on the device")
        if limit == plan.available_bytes
        else ("memory budget", "raise the budget")
    )
    budget = f"the {what} of {limit} bytes ({format_bytes(limit)}) is too small"
    usable = f"{plan.usable_blocks} block{'s' if plan.usable_blocks > 1 else ''} for tokens"
    counted, weights = _on_device(plan.terms, plan.host_shared), plan.terms["weights"]
    terms = ", ".join(
        f"{name.replace('_', ' ')} {format_bytes(size)}" for name, size in counted.items()
    )
    term = max(counted.keys() - {"weights"}, key=counted.__getitem__)
    reserve = plan.terms["reserve"]
    alone = weights > limit or reserve <= weights > limit - reserve
    if alone:
        term = "weights"
    fields = _FIELDS.get(term, ())
    if term == "cache" and blocks_given:
        fields = ("num_blocks", "memory_tokens", *fields[:1])
    change = f"change {' or '.join(fields)}, or {remedy}" if fields else remedy
    what_not = (
        f"The weights alone need {weights} bytes"
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
