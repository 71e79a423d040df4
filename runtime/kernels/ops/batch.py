"""The tokens of one forward pass: the argument that every kernel receives.

Shapes: T tokens, R rows, G layer groups. The tokens of a row are contiguous in T and have
consecutive positions. A decode step is a uniform batch of 1 token per row, a verify step a uniform
batch of 1 + k, and a prefill step is ragged. `tokens_per_row` distinguishes them; sizes do not.

    ragged, rows 4 (positions 0-2) and 1 (positions 7-8), 3 tokens of padding, null row 9

        positions         0  1  2  7  8  0  0  0
        token_rows        4  4  4  1  1  9  9  9
        rows              4  1  9  9
        query_start_loc   0  3  5  5  5              tokens from the last entry on are padding

    uniform, 2 tokens per row, rows 4 (positions 7-8) and 1 (positions 3-4), one row of padding

        positions         7  8  3  4  0  0
        token_rows        4  4  1  1  9  9
        rows              4  1  9
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

# Token feedback: a step writes its sampled tokens to the row state on the device.

NON_FINITE = -1
"""Token that samplers return for logits with NaN or +inf, or with only -inf, before or after the
sampling parameters are applied. The device continues with token 0, which is a valid index; the host
ends the request."""


class Feedback(NamedTuple):
    """Row state that a step updates with its sampled tokens; B lanes, R rows of the state.

    A sampled token becomes the newest token of its row, one position after the last input.
    `NON_FINITE` is stored as token 0. The null row, the last row of the state, remains at position
    0.
    """

    rows: Tensor
    """int64 `[B]`: the row of each lane."""
    positions: Tensor
    """int64 `[B]`: position of each lane's last input."""
    token_ids: Tensor
    """int64 `[R]` of the state, written."""
    state_positions: Tensor
    """int64 `[R]` of the state, written."""

    def store(self, tokens: Tensor) -> None:
        """Store the sampled tokens, int64 `[B]`, as the newest of their rows, in plain PyTorch."""
        null_row = self.token_ids.shape[0] - 1
        positions = torch.where(self.rows == null_row, 0, self.positions + 1)
        self.token_ids.index_put_((self.rows,), tokens.clamp(min=0))
        self.state_positions.index_put_((self.rows,), positions)


class LayerPlace(NamedTuple):
    """The place of a layer in the cache."""

    group: int
    """Its layer group: the first coordinate of block tables and slots."""
    position: int
    """Its position in the group: the first coordinate of the arena's tensor."""
    layout: int = 0
    """Which of the arena's tensors holds it."""


class RowStates(NamedTuple):
    """The memory of recurrent state, and which of it each row of the state on the device has.

    Column c of a row's tables is about block c of its tokens, positions c * block_size to
    (c + 1) * block_size - 1: its snapshot is the state before that block, its inputs are of the
    tokens of the block. Entry 0, the null block, means that nothing is kept there; the state before
    block 0 is zero. See `cache.spec.RowState` and `ops/row_states.py`.
    """

    snapshots: Tensor
    """uint8 `[snapshots, bytes]`; entry 0 is zero and never written."""
    inputs: Tensor
    """uint8 `[blocks, bytes]`: inputs of one block of tokens each."""
    snapshot_tables: Tensor
    """int32 `[R, max_blocks_per_row]`."""
    input_tables: Tensor
    """int32 `[R, max_blocks_per_row]`."""
    stored: Tensor
    """int64 `[R]`: the last column whose snapshot is stored. A step that begins in a later block
    stores the snapshot of that block first, from the inputs of the block before it."""


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Positions of the tokens of one forward pass, and the slots of their keys and values."""

    positions: Tensor
    """int64 `[T]`: position of each token in its sequence; 0 for padding."""
    slots: Tensor
    """int64 `[G, T]`, the write index: slot of each token in each layer group; padding writes to
    the null block."""
    token_rows: Tensor
    """int64 `[T]`: row of each token; the null row for padding."""
    rows: Tensor
    """int64 `[R]`: the rows of the batch in the order of their tokens, padded with the null row."""
    block_tables: Tensor
    """int32 `[G, max_num_seqs + 1, max_blocks_per_row]`: the read index of every row."""
    read_blocks: int
    """The read width: columns of the block tables that attention may read. They contain all
    positions of the batch."""
    block_size: int
    """Slots of a block."""
    tokens_per_row: int | None
    """Tokens of each row of a uniform batch, so that T = R * tokens_per_row; None: ragged."""
    query_start_loc: Tensor | None = None
    """int64 `[R + 1]`: the tokens of row i are `query_start_loc[i]` to `query_start_loc[i + 1]` - 1
    of a ragged batch; None where the batch is uniform."""
    rope_lengths: Tensor | None = None
    """int64 `[T]`: the sequence length whose rotary parameters each token has (see
    `rope_lengths.py`); None where they do not depend on it."""
    states: RowStates | None = None
    """Recurrent state; None if no layer has any."""
    token_ids: Tensor | None = None
    """int64 `[T]`: the tokens, for layers that read embeddings of their own (`LayerInputs`). Token
    0 where a prompt has embeddings; None: not known, as in drafters."""

    @property
    def live_tokens(self) -> Tensor:
        """bool `[T]`: false for padding."""
        null_row = self.block_tables.shape[-2] - 1
        return self.token_rows != null_row
