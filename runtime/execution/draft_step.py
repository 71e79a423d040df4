"""The part of a step that a drafter runs, after the target model has sampled.

Every prefill step lets the drafter follow its chunks. Decode and verify steps run it only if they
propose drafts. What it misses in the others stays as it was when the block was allocated: zeros.
Prefill steps may propose too, for the prompts that end in them.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import torch

from ..kernels import RaggedBatch
from ..kernels.cpu.drafted import drafted_inputs, newest_tokens
from ..models.drafters.drafter import (
    Drafter,
    Drafts,
    FollowedTokens,
    NewestTokens,
    SampledTokens,
)
from ..operation_scopes import operation
from .batches import batch_of_slots, ragged_batch
from .inputs import StepInputs
from .row_state import RowState
from .step_key import StepKey

__all__ = ["DraftStep", "reference_newest_tokens"]


class DraftStep:
    """Runs a drafter over the tokens of steps."""

    def __init__(
        self,
        drafter: Drafter,
        arena: torch.Tensor,
        state: RowState,
        block_size: int,
        *,
        native: bool = False,
    ) -> None:
        """Bind the tensors.

        Args:
            drafter: proposes tokens.
            arena: of the drafter.
            state: of the rows, which a step has advanced when it proposes.
            block_size: slots of a block.
            native: whether the C++ operators of the CPU are loaded.
        """
        self.taps = drafter.taps
        self._drafter, self._arena = drafter, arena
        self._state, self._block_size, self._native = state, block_size, native

    def propose(
        self,
        key: StepKey,
        tokens: FollowedTokens,
        rows_B: torch.Tensor,
        first_B: torch.Tensor,
        stops_B: torch.Tensor,
    ) -> Drafts:
        """Return `key.drafts` tokens that may follow the newest one of each row. Rows keep them.

        Args:
            key: of the step.
            tokens: its tokens, row by row, and those sampled after them.
            rows_B: int64, the rows that get drafts; the null row for padding.
            first_B: int64, index of each row's first token. The state has the position of the row's
                newest token, which follows its accepted ones.
            stops_B: int64, the first position of each row that has no slot.
        """
        positions_R = self._state.positions
        with operation("draft"):
            operator = self._drafter.operator if self._native else None
            if operator is not None:
                sampled = SampledTokens(tokens, rows_B, positions_R, first_B, stops_B)
                drafts = operator(sampled, self._arena, key.drafts)
            else:
                inputs = rows_B, positions_R, first_B, tokens.batch.positions, tokens.token_ids
                find = newest_tokens if self._native else reference_newest_tokens
                sampled_T, newest_B, previous_B, index_B = find(*inputs, tokens.next_ids)
                later = partial(self._batch, rows_B, stops_B, key)
                newest = NewestTokens(newest_B, previous_B, index_B, later)
                tokens = dataclasses.replace(tokens, next_ids=sampled_T)
                drafts = self._drafter.propose(tokens, newest, self._arena, key.drafts)
            self._state.keep_drafts(rows_B, drafts.token_ids)
        return drafts

    def _batch(
        self,
        rows_B: torch.Tensor,
        stops_B: torch.Tensor,
        key: StepKey,
        first: int,
        count: int,
    ) -> RaggedBatch:
        """See `NewestTokens.batch`. Positions without a slot read as the last one that has one."""
        if self._native:
            state, size = self._state, self._block_size
            inputs = drafted_inputs(
                *(rows_B, state.positions, stops_B, state.block_tables, size, first, count)
            )
            return batch_of_slots(
                *(state, size, inputs.positions, inputs.slots, inputs.token_rows, rows_B),
                key.read_blocks,
                tokens_per_row=count,
            )
        newest_B = self._state.positions[rows_B]
        offsets_N = torch.arange(first, first + count, device=rows_B.device)
        positions_BN = newest_B[:, None] + offsets_N
        valid_BN = (positions_BN >= 0) & (positions_BN < stops_B[:, None])
        positions_BN = torch.minimum(positions_BN, stops_B[:, None] - 1).clamp(min=0)
        return ragged_batch(
            self._state,
            self._block_size,
            positions_BN.flatten(),
            rows_B[:, None].expand(-1, count).contiguous().flatten(),
            rows_B,
            key.read_blocks,
            tokens_per_row=count,
            valid_T=valid_BN.flatten(),
        )

    def after_prefill(
        self,
        inputs: StepInputs[torch.Tensor],
        key: StepKey,
        sampled_P: torch.Tensor,
        features_TF: torch.Tensor | None,
        *,
        ragged: bool,
    ) -> Drafts | None:
        """Let the drafter follow the chunks of a prefill step, which has sampled these tokens.

        With `key.drafts`, return drafts of the rows that sample; those of others are 0.
        Where steps are `ragged`, there are none of padding.
        """
        tokens = self._chunks(inputs, key, sampled_P, features_TF)
        if not key.drafts:
            with operation("draft"):
                self._drafter.follow(tokens, self._arena)
            return None
        count = len(inputs.prefill_rows)
        if ragged:
            count = int((inputs.prefill_rows != self._state.null_row).sum())
        first_P = inputs.query_start_loc[:count].clamp(max=key.size - 1)
        rows_P = inputs.sample_rows[:count]
        drafts = self.propose(key, tokens, rows_P, first_P, inputs.draft_stops[:count])
        # Those of the null row depend on which of its tokens was written last.
        unused_P1 = (rows_P == self._state.null_row)[:, None]
        return Drafts(drafts.token_ids.masked_fill(unused_P1, 0), drafts.probabilities)

    def _chunks(
        self,
        inputs: StepInputs[torch.Tensor],
        key: StepKey,
        sampled_P: torch.Tensor,
        features_TF: torch.Tensor | None,
    ) -> FollowedTokens:
        """Return the tokens of a prefill step."""
        with operation("draft"):
            size, ends_P = key.size, inputs.query_start_loc[1:].contiguous()
            samples_P = inputs.sample_rows != self._state.null_row
            after_P = torch.where(samples_P, sampled_P.clamp(min=0), inputs.next_ids)
            index_T = torch.arange(size, device=ends_P.device)
            chunk_T = torch.searchsorted(ends_P, index_T, right=True).clamp(max=len(ends_P) - 1)
            token_ids_T = inputs.token_ids[:size]
            next_ids_T = torch.where(
                index_T + 1 == ends_P[chunk_T], after_P[chunk_T], token_ids_T.roll(-1)
            )
            batch = ragged_batch(
                self._state,
                self._block_size,
                inputs.positions[:size],
                inputs.token_rows[:size],
                inputs.prefill_rows,
                key.read_blocks,
                query_start_loc=inputs.query_start_loc,
            )
            return FollowedTokens(token_ids_T, next_ids_T, features_TF, batch, of_prompts=True)


def reference_newest_tokens(
    rows_B: torch.Tensor,
    positions_R: torch.Tensor,
    first_B: torch.Tensor,
    token_positions_T: torch.Tensor,
    token_ids_T: torch.Tensor,
    next_ids_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `newest_tokens`, on any device."""
    sampled_T = next_ids_T.clamp(min=0)
    # The null row stays at its position.
    last_B = (positions_R[rows_B] - token_positions_T[first_B] - 1).clamp(min=0)
    index_B = first_B + last_B
    return sampled_T, sampled_T[index_B], token_ids_T[index_B], index_B
