"""Memory for recurrent state, and batches over it, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from stepgraph.cache.spec import RowState, row_layout
from stepgraph.runtime.kernels.ops.batch import RaggedBatch, RowStates

Span = tuple[int, int, int]
"""Row, first position and number of tokens."""


class StateRig:
    """Rows with places for all of their snapshots and inputs; all memory is poisoned.

    Rows have their entries in random order. The last row is the null row.
    """

    def __init__(
        self,
        states: Sequence[RowState],
        *,
        rows: int,
        columns: int,
        block_size: int,
        itemsize: int,
        generator: torch.Generator,
        device: str = "cpu",
    ) -> None:
        layout = row_layout(states, itemsize)
        self.places, self.block_size, self.columns = layout.places, block_size, columns
        entries = rows * columns + 1

        def memory(size: int) -> torch.Tensor:
            made = torch.full((entries, size), 255, dtype=torch.uint8, device=device)
            made[0] = 0
            return made

        def tables() -> torch.Tensor:
            order = 1 + torch.randperm(rows * columns, generator=generator)
            padded = torch.cat((order.view(rows, columns), torch.zeros(1, columns)))
            return padded.to(device, torch.int32)

        stored = torch.zeros(rows + 1, dtype=torch.int64, device=device)
        snapshots, inputs = memory(layout.snapshot_bytes), memory(block_size * layout.token_bytes)
        self.states = RowStates(snapshots, inputs, tables(), tables(), stored)

    @property
    def null_row(self) -> int:
        """The row of padding."""
        return len(self.states.stored) - 1

    def batch(
        self,
        spans: Sequence[Span],
        *,
        tokens_per_row: int | None = None,
        lanes: int = 0,
        size: int = 0,
    ) -> RaggedBatch:
        """Return the batch of these tokens, padded.

        Args:
            spans: the tokens, row by row.
            tokens_per_row: of a uniform batch; rows with fewer tokens repeat their last position.
            lanes: rows of the batch, padded with the null row.
            size: tokens of a ragged batch, with padding.
        """
        spans = [*spans, *[(self.null_row, 0, 0)] * (lanes - len(spans))]
        positions: list[int] = []
        rows: list[int] = []
        starts = [0]
        for row, start, count in spans:
            wanted = tokens_per_row or count
            positions += [start + min(i, max(count - 1, 0)) for i in range(wanted)]
            rows += [row] * wanted
            starts.append(len(positions))
        padding = max(0, size - len(positions))
        device = self.states.stored.device

        def ints(numbers: Sequence[int]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        table = torch.zeros(1, self.null_row + 1, self.columns, dtype=torch.int32, device=device)
        return RaggedBatch(
            positions=ints([*positions, *[0] * padding]),
            slots=ints([0] * (len(positions) + padding))[None],
            token_rows=ints([*rows, *[self.null_row] * padding]),
            rows=ints([row for row, _, _ in spans]),
            block_tables=table,
            read_blocks=self.columns,
            block_size=self.block_size,
            tokens_per_row=tokens_per_row,
            query_start_loc=None if tokens_per_row else ints(starts),
            states=self.states,
        )

    def advance(self, spans: Sequence[Span], *, decodes: bool) -> None:
        """Note what a step has stored: a decode or verify step up to the block of its first token,
        a prefill step up to the block of its last one."""
        for row, start, count in spans:
            last = start if decodes else start + count - 1
            self.states.stored[row] = last // self.block_size
