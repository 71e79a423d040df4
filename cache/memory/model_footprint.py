"""The memory that a model needs, as a function of blocks and batch tokens. All bytes.

All numbers are known before weights are loaded. They are non-decreasing in blocks and batch tokens,
so that a plan can be found by bisection (see `handler.py`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, fields

from ..spec import LayerGroup

__all__ = ["BufferBytes", "ModelFootprint"]

BufferBytes = Callable[[int, int], int]
"""(prompt tokens of the largest step, blocks of the longest row) -> bytes; non-decreasing."""


def _no_bytes(prefill_tokens: int, row_blocks: int) -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class ModelFootprint:
    """The memory terms of a model, and the blocks that its requests use.

    Attributes:
        weight_bytes: all parameters.
        groups: the layer groups; each has its own block table.
        block_size: slots of a block.
        drafter_block_bytes: bytes of a block in the arena of a drafter; 0 without one.
        max_num_seqs: rows of the decode batch.
        max_model_len: tokens of the longest request, unless the cache holds fewer.
        prefill_chunk: maximum prompt tokens of one step.
        activation_bytes_fixed: peak activations that do not depend on the step.
        activation_bytes_per_token: peak activations of a step, per token of the step.
        read_bytes_per_position: copies of the cache that attention gathers, per position of a row;
            0 for kernels that read the blocks in place.
        mask_bytes_per_token_position: masks (and scores, if a kernel stores them), per token of
            the step and position read; 0 for kernels that need none.
        logits_bytes_fixed: memory of sampling that does not depend on the rows.
        logits_bytes_per_row: logits of one row, with the copies that sampling makes.
        static_bytes: static buffers.
        host_buffer_bytes: their host mirrors, and host copies of outputs; 0 on a CPU.
        graph_bytes: memory of captured steps, without their buffers.
        host_blocks: blocks of the host cache.
        host_shared: whether host and device share their memory, so that a budget covers both.

    Raises:
        ValueError: a field is out of range.
    """

    weight_bytes: int
    groups: tuple[LayerGroup, ...]
    block_size: int
    max_num_seqs: int
    max_model_len: int
    prefill_chunk: int
    drafter_block_bytes: int = 0
    activation_bytes_fixed: int = 0
    activation_bytes_per_token: int = 0
    read_bytes_per_position: int = 0
    mask_bytes_per_token_position: int = 0
    logits_bytes_fixed: int = 0
    logits_bytes_per_row: int = 0
    static_bytes: BufferBytes = _no_bytes
    host_buffer_bytes: BufferBytes = _no_bytes
    graph_bytes: int = 0
    host_blocks: int = 0
    host_shared: bool = True

    def __post_init__(self) -> None:
        if not self.groups:
            raise ValueError("a footprint needs at least one layer group, got none")
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int:
                continue
            least = int(
                field.name in ("block_size", "max_num_seqs", "max_model_len", "prefill_chunk")
            )
            if value < least:
                raise ValueError(f"{field.name} must be at least {least}, got {value}")

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers of a layer group; they are the same in every group.

        Those of a drafter are included.
        """
        group = self.groups[0]
        own = group.spec.block_bytes(self.block_size) * len(group.layers)
        return own + self.drafter_block_bytes

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
            group.spec.most_blocks(num_tokens, self.block_size, self.prefill_chunk)
            for group in self.groups
        )

    def longest_request(self, num_blocks: int) -> int:
        """Tokens of the longest request that fits a cache of `num_blocks` if no other runs.

        At most `max_model_len`, the only limit if all layers have a sliding window.
        """
        if self.request_blocks(self.max_model_len) < num_blocks:
            return self.max_model_len
        return self._longest(num_blocks - 1)

    def context_blocks(self, num_tokens: int) -> int:
        """Blocks (with the null block) that hold `num_tokens` tokens of context.

        Counts requests of `max_model_len` tokens, and a shorter one for the rest. With sliding
        windows, the same number of tokens in many short requests takes more blocks.
        """
        whole, rest = divmod(num_tokens, self.max_model_len)
        blocks = whole * self.request_blocks(self.max_model_len)
        return blocks + (self.request_blocks(rest) if rest else 0) + 1

    def context_tokens(self, num_blocks: int) -> int:
        """Maximum tokens of context whose `context_blocks` are at most `num_blocks`."""
        whole, rest = divmod(max(num_blocks - 1, 0), self.request_blocks(self.max_model_len))
        return whole * self.max_model_len + self._longest(rest)

    def terms(self, num_blocks: int, max_batch_tokens: int) -> dict[str, int]:
        """Bytes of each term of a plan except the reserve."""
        prefill_tokens = min(max_batch_tokens, self.prefill_chunk)
        row_blocks = max(1, -(-self.longest_request(num_blocks) // self.block_size))
        positions = row_blocks * self.block_size
        # Decode and prefill are steps of their own, and prefill reads one row at a time.
        prefill = self.activation_bytes_per_token * prefill_tokens
        prefill += self.read_bytes_per_position * positions
        decode = self.activation_bytes_per_token + self.read_bytes_per_position * positions
        most_tokens = max(prefill_tokens, self.max_num_seqs)
        return {
            "weights": self.weight_bytes,
            "cache": self.block_bytes * num_blocks,
            "static_buffers": self.static_bytes(prefill_tokens, row_blocks),
            "activations": self.activation_bytes_fixed + max(prefill, decode * self.max_num_seqs),
            "logits": self.logits_bytes_fixed + self.logits_bytes_per_row * self.max_num_seqs,
            "attention_masks": self.mask_bytes_per_token_position * most_tokens * positions,
            "captured_graphs": self.graph_bytes,
            "host_cache": self.block_bytes * self.host_blocks,
            "host_buffers": self.host_buffer_bytes(prefill_tokens, row_blocks),
        }

    def _longest(self, blocks: int) -> int:
        """Maximum tokens, up to `max_model_len`, of a request with at most `blocks` blocks."""
        tokens = range(1, self.max_model_len + 1)
        return bisect_right(tokens, blocks, key=self.request_blocks)
