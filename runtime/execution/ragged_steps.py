"""Decode and verify steps on the C++ operators of a CPU, without padding between rows."""

from __future__ import annotations

import torch

from ..kernels.cpu.verify import VerifyInputs, accept_drafts, verify_inputs
from ..models.drafters.drafter import FollowedTokens
from ..operation_scopes import operation
from .batches import batch_of_slots
from .step_key import StepKey, StepOutput
from .verify_steps import VerifySteps

__all__ = ["RaggedSteps"]

_NO_TOKEN = -2
"""Differs from every token, and from `NON_FINITE`."""


class RaggedSteps(VerifySteps):
    """Steps whose rows have as many tokens as drafts they verify, and one more."""

    def verify(self, key: StepKey) -> StepOutput:
        """See `VerifySteps.verify`."""
        return self._verify_ragged(key) if self.ragged else super().verify(key)

    def _decode_ragged(self, key: StepKey) -> StepOutput:
        """As `_decode_step`, on the C++ operators."""
        return self._run_ragged(key, self._no_drafts[: key.size], self._ones[: key.size])[0]

    def _verify_ragged(self, key: StepKey) -> StepOutput:
        """As `verify`, without padding between rows."""
        _, drafts_BK, counts_B = self._drafts(key)
        result, lanes_NB = self._run_ragged(key, drafts_BK, counts_B)
        if result.details is None:
            return StepOutput(result.tokens.take(lanes_NB), result.logits, None, result.drafts)
        details = result.details.at(lanes_NB)
        return StepOutput(details.tokens, result.logits, details, result.drafts)

    def _run_ragged(
        self, key: StepKey, drafts_BK: torch.Tensor, counts_B: torch.Tensor
    ) -> tuple[StepOutput, torch.Tensor]:
        """Run a step of the C++ operators; return its output token by token, and the lanes of it by
        position; see `kernels/cpu/verify.py`."""
        state, rows_B, kept_B = self.state, self.inputs.decode_rows[: key.size], counts_B
        if key.masked:
            counts_B = counts_B.clone()  # waiting for masks may take drafts out of the inputs
        with operation("inputs"):
            inputs = verify_inputs(
                *(rows_B, drafts_BK, counts_B, state.token_ids, state.positions),
                *(state.block_tables, self.block_size),
            )
            batch = batch_of_slots(
                *(state, self.block_size, inputs.positions, inputs.slots, inputs.token_rows),
                *(rows_B, key.read_blocks),
                query_start_loc=inputs.query_start_loc,
            )
        if key.drafts:
            hidden_TD, features_TF = self._forward_pass(inputs.token_ids, batch)
        else:
            hidden_TD = self.model.decode(self._embedded(inputs.token_ids), self.arena, batch)
            features_TF = None
        logits_TV = self.model.own_logits(hidden_TD)
        rows_T, mask_rows_T, masks = inputs.token_rows, None, None
        if key.masked:
            self._wait_for_masks()
            with operation("inputs"):
                rows_T, drafts_BK, mask_rows_T = self._masked_lanes(
                    inputs, counts_B, kept_B, drafts_BK
                )
        vocabulary = self.model.vocabulary
        if key.full_sampler or key.masked:
            (logits_TV, masks), vocabulary = self._apply(logits_TV, mask_rows_T), None
        if key.full_sampler:
            output = self._drawn(logits_TV, rows_T, inputs.positions, inputs.token_ids, masks)
        else:
            output = self._largest(logits_TV, masks, vocabulary)
        with operation("accept"):
            lanes_NB = accept_drafts(
                output.tokens, rows_B, drafts_BK, counts_B, state.token_ids, state.positions
            )
        if key.drafts:
            tokens = FollowedTokens(inputs.token_ids, output.tokens, features_TF, batch)
            proposed = self._proposed(key, tokens, lanes_NB[0])
            output = StepOutput(output.tokens, output.logits, output.details, proposed)
        return output, lanes_NB

    def _masked_lanes(
        self,
        inputs: VerifyInputs,
        counts_B: torch.Tensor,
        kept_B: torch.Tensor,
        drafts_BK: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rows that sample after the tokens of a step, its drafts, and rows of masks.

        Of `counts_B` tokens of each row `kept_B` are left. After the others the null row samples,
        and no token is equal to their drafts.
        """
        rows_T = inputs.token_rows
        if not drafts_BK.shape[1]:
            return rows_T, drafts_BK, rows_T
        first_T = inputs.query_start_loc[:-1].repeat_interleave(counts_B)
        step_T = torch.arange(len(rows_T)) - first_T
        mask_rows_T = rows_T + self.state.token_ids.shape[0] * step_T
        kept_T = step_T < kept_B.repeat_interleave(counts_B)
        number_K = torch.arange(1, 1 + drafts_BK.shape[1])
        drafts_BK = torch.where(number_K < kept_B[:, None], drafts_BK, _NO_TOKEN)
        return torch.where(kept_T, rows_T, self.state.null_row), drafts_BK, mask_rows_T
