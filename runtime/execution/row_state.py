"""State of each row of the decode batch on the device. The host never reads it back."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from ..request import OWN_DRAFT
from ..sampling.sampling_state import SamplingState
from .mask_state import MaskSizes, MaskState

__all__ = ["RowState"]


@dataclass(frozen=True, slots=True)
class RowState:
    """Device tensors that steps read and update; R = max_num_seqs + 1.

    The last row is the null row, which padded lanes use. Its block table contains only the null
    block, its position remains 0, and its sampled tokens are never read.
    """

    token_ids: torch.Tensor
    """int64 `[R]`: the newest token, whose keys and values the next decode step computes."""
    positions: torch.Tensor
    """int64 `[R]`: its position in the sequence."""
    block_tables: torch.Tensor
    """int32 `[groups, R, max_blocks_per_row]`. Columns before a row's window and after its blocks
    may contain blocks of other rows. They are never read, because reads begin with the window and
    end at the row's position."""
    sampling: SamplingState
    rope_lengths: torch.Tensor | None = None
    """int64 `[R]`: rope length of each row's request (see `rope_lengths.py`); None where rotations
    do not depend on the length."""
    masks: MaskState | None = None
    """Token masks of rows whose output follows a grammar; None without structured output."""
    drafts: torch.Tensor | None = None
    """int64 `[R, K]`: what a drafter proposed last to follow the newest token; `OWN_DRAFT` where a
    row has none. None without a drafter, or if the host always sends the drafts."""

    @classmethod
    def allocate(
        cls,
        max_num_seqs: int,
        num_groups: int,
        max_blocks_per_row: int,
        vocab_size: int,
        device: torch.device,
        *,
        rope_by_length: bool = False,
        masked: MaskSizes | None = None,
        drafts: int = 0,
    ) -> RowState:
        """Allocate the state of `max_num_seqs` rows and the null row.

        `masked`: the sizes of token masks, if steps may have any. `drafts`: those that a row keeps.
        """
        rows = max_num_seqs + 1
        rope_lengths = None
        if rope_by_length:
            rope_lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(
            token_ids=torch.zeros(rows, dtype=torch.int64, device=device),
            positions=torch.zeros(rows, dtype=torch.int64, device=device),
            block_tables=torch.zeros(
                num_groups, rows, max_blocks_per_row, dtype=torch.int32, device=device
            ),
            sampling=SamplingState.allocate(max_num_seqs, vocab_size, device),
            rope_lengths=rope_lengths,
            masks=None if masked is None else MaskState.allocate(masked, device),
            drafts=torch.full((rows, drafts), OWN_DRAFT, device=device) if drafts else None,
        )

    @property
    def null_row(self) -> int:
        """Index of the null row."""
        return self.token_ids.shape[0] - 1

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @staticmethod
    def bytes_for(
        max_num_seqs: int,
        num_groups: int,
        max_blocks_per_row: int,
        vocab_size: int,
        *,
        rope_by_length: bool = False,
        masked: MaskSizes | None = None,
        drafts: int = 0,
    ) -> int:
        """Bytes that `allocate` will allocate."""
        per_row = 8 + 8 + 4 * num_groups * max_blocks_per_row + 8 * (rope_by_length + drafts)
        own = (max_num_seqs + 1) * per_row
        if masked is not None:
            own += masked.nbytes
        return own + SamplingState.bytes_for(max_num_seqs, vocab_size)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by name."""
        own = {name: getattr(self, name) for name in ("token_ids", "positions", "block_tables")}
        if self.rope_lengths is not None:
            own["rope_lengths"] = self.rope_lengths
        if self.drafts is not None:
            own["drafts"] = self.drafts
        if self.masks is not None:
            own |= {f"masks.{f.name}": getattr(self.masks, f.name) for f in fields(self.masks)}
        sampling = {f.name: getattr(self.sampling, f.name) for f in fields(self.sampling)}
        return own | {f"sampling.{name}": tensor for name, tensor in sampling.items()}

    def addresses(self) -> dict[str, int]:
        """Return the device address of each tensor, which must never change."""
        return {name: tensor.data_ptr() for name, tensor in self.tensors().items()}

    def accept(
        self, rows_B: torch.Tensor, tokens_BN: torch.Tensor, accepted_B: torch.Tensor
    ) -> None:
        """Advance each row by the first `accepted_B` tokens of a verify step.

        Rows and counts are int64; counts are at least 1. The null row remains at position 0.
        """
        last_B = tokens_BN.gather(1, accepted_B[:, None] - 1)[:, 0]
        positions_B = self.positions[rows_B] + accepted_B
        self.token_ids.index_put_((rows_B,), last_B.clamp(min=0))
        self.positions.index_put_((rows_B,), torch.where(rows_B == self.null_row, 0, positions_B))

    def chosen_drafts(self, rows_B: torch.Tensor, given_BK: torch.Tensor) -> torch.Tensor:
        """Return the drafts that a step verifies, int64 `[B, K]`.

        The given ones, and where these are `OWN_DRAFT`, those of the rows. A row without any gets
        token 0.
        """
        if self.drafts is None:
            return given_BK
        own_BK = self.drafts[rows_B, : given_BK.shape[1]]
        return torch.where(given_BK == OWN_DRAFT, own_BK, given_BK).clamp(min=0)

    def keep_drafts(self, rows_B: torch.Tensor, drafts_BK: torch.Tensor) -> None:
        """Keep what a drafter has proposed for rows, if rows keep drafts."""
        if self.drafts is not None:
            self.drafts[:, : drafts_BK.shape[1]].index_put_((rows_B,), drafts_BK)

    def forget_drafts(self, row: int) -> None:
        """Remove the drafts of a row's last request."""
        if self.drafts is not None:
            self.drafts[row].fill_(OWN_DRAFT)

    def update_tables(self, updates_U4: torch.Tensor) -> None:
        """Write (group, row, column, block) entries into the block tables."""
        group, row, column, block = updates_U4.unbind(1)
        self.block_tables.index_put_((group, row, column), block.to(torch.int32))
