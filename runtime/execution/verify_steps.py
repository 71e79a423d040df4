"""Verify steps with as many tokens for each row; see `step_functions.py`."""

from __future__ import annotations

import torch

from ..models.drafters.drafter import Drafts, FollowedTokens
from ..operation_scopes import operation
from .batches import batch_of_slots
from .step_key import StepKey, StepOutput
from .step_parts import Lanes, StepParts

__all__ = ["VerifySteps"]


class VerifySteps(StepParts):
    """Steps that verify drafts, and accept those that were sampled too."""

    def verify(self, key: StepKey) -> StepOutput:
        """Sample after the newest token of each of `decode_rows`, and after each of its drafts.

        A draft is accepted if all drafts before it are, and if it is the token that is sampled in
        its place. So the accepted tokens, and the one sampled after them, are those that decode
        steps would sample one by one. Each row advances by these.
        """
        lanes, shape = self._verify_forward(key), (key.size, key.tokens_per_row)
        if key.full_sampler:
            token_ids_BN, logits_TV = lanes.token_ids.view(shape), self._gathered(lanes.logits)
            output = self._drawn(logits_TV, lanes.rows, lanes.positions, token_ids_BN)
        else:
            assert lanes.tokens is not None
            output = StepOutput(lanes.tokens, lanes.logits, None)
        return self._accepted(output, key, lanes)

    def _drafts(
        self, key: StepKey, drafts_BK: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rows of a verify step, their drafts and how many tokens are valid.

        The drafts are given once the step has chosen them.
        """
        assert self.drafts is not None, "these steps were made without room for drafts"
        assert (key.phase, key.steps) == ("decode", 1)
        size, drafts = key.size, self.drafts
        rows_B = self.inputs.decode_rows[:size]
        if drafts_BK is None:
            with operation("inputs"):
                sent_BK = drafts.token_ids[:size, : key.tokens_per_row - 1]
                drafts_BK = self.state.chosen_drafts(rows_B, sent_BK)
        return rows_B, drafts_BK, drafts.counts[:size]

    def _verify_forward(self, key: StepKey) -> Lanes:
        """Run a verify step up to the logits, or to greedy tokens."""
        part = self._verify_parts
        rows_B, drafts_BK, counts_B = self._drafts(key)
        token_ids_BN = self._with_newest(rows_B, drafts_BK)
        rows_B, counts_B = self._parts.inputs(part, rows_B, counts_B)
        constants = key.read_blocks, self._greedy(part, key)
        lanes: Lanes = self._parts.call(part, rows_B, token_ids_BN, counts_B, *constants)
        return lanes

    def _with_newest(self, rows_B: torch.Tensor, drafts_BK: torch.Tensor) -> torch.Tensor:
        """Return the tokens `[B, 1 + K]` of a verify step: the newest of each row and its drafts.

        Compiled parts get these rather than drafts: torch has a version for each size of 1, and so
        for a single draft.
        """
        with operation("inputs"):
            return torch.cat((self.state.token_ids[rows_B][:, None], drafts_BK), dim=1)

    def _accepted(self, output: StepOutput, key: StepKey, lanes: Lanes | None = None) -> StepOutput:
        """Accept drafts, and return the output by position. With lanes, new drafts may follow."""
        shape = key.size, key.tokens_per_row
        drafts_BK = None if lanes is None else lanes.token_ids.view(shape)[:, 1:]
        inputs = self._drafts(key, drafts_BK)
        with operation("accept"):
            tokens_BN = output.tokens.view(shape)
            self._accept(*inputs, tokens_BN)
        proposed = None if lanes is None else self._proposed_after(key, lanes, output.tokens)
        with operation("outputs"):
            logits_NBV = output.logits.unflatten(0, shape).transpose(0, 1)
            if output.details is None:
                return StepOutput(tokens_BN.T.contiguous(), logits_NBV, None, proposed)
            details = output.details.by_position(*shape)
            if logits_NBV.is_cuda:
                details = details.pack()  # so that one copy transfers them to the host
        return StepOutput(details.tokens, logits_NBV, details, proposed)

    def _proposed_after(self, key: StepKey, lanes: Lanes, tokens_T: torch.Tensor) -> Drafts | None:
        """As `_proposed`, after a verify step with padding."""
        rows_B = self.inputs.decode_rows[: key.size]
        token_rows_T = rows_B[:, None].expand(-1, key.tokens_per_row).contiguous().flatten()
        batch = batch_of_slots(
            *(self.state, self.block_size, lanes.positions, lanes.slots, token_rows_T, rows_B),
            key.read_blocks,
            tokens_per_row=key.tokens_per_row,
        )
        tokens = FollowedTokens(lanes.token_ids, tokens_T, lanes.features, batch)
        first_B = torch.arange(key.size, device=rows_B.device) * key.tokens_per_row
        return self._proposed(key, tokens, first_B)

    def _verify_parts(
        self,
        rows_B: torch.Tensor,
        token_ids_BN: torch.Tensor,
        counts_B: torch.Tensor,
        read_blocks: int,
        greedy: bool,
    ) -> Lanes:
        """A verify step. `counts_B` tokens of each row are valid: the newest one and its drafts.

        The other tokens, and rows of padding, write to the null block. They have the row's last
        position, so that they read only slots that the row reads.
        """
        state, n = self.state, token_ids_BN.shape[1]
        with operation("inputs"):
            step_N = torch.arange(n, device=rows_B.device)
            valid_BN = step_N < counts_B[:, None]
            steps_BN = torch.minimum(step_N, counts_B[:, None] - 1)
            positions_T = (state.positions[rows_B][:, None] + steps_BN).flatten()
            token_rows_BN = rows_B[:, None].expand(-1, n).contiguous()
        batch = self._batch(
            positions_T,
            token_rows_BN.flatten(),
            rows_B,
            read_blocks,
            tokens_per_row=n,
            valid_T=valid_BN.flatten(),
        )
        hidden_TD, features_TF = self._forward_pass(token_ids_BN.flatten(), batch)
        logits_TV = self.model.own_logits(hidden_TD)
        tokens_T = None
        if greedy:
            with operation("greedy"):
                tokens_T = self._greedy_tokens(logits_TV, self.model.vocabulary)
        sampled_rows_T = torch.where(valid_BN, token_rows_BN, state.null_row).flatten()
        return Lanes(
            logits_TV,
            sampled_rows_T,
            positions_T,
            token_ids_BN.flatten(),
            tokens_T,
            batch.slots,
            features_TF,
        )

    def _accept(
        self,
        rows_B: torch.Tensor,
        drafts_BK: torch.Tensor,
        counts_B: torch.Tensor,
        tokens_BN: torch.Tensor,
    ) -> None:
        """Advance each row by its accepted drafts and the token after them."""
        number_K = torch.arange(1, 1 + drafts_BK.shape[1], device=rows_B.device)
        equal_BK = (tokens_BN[:, :-1] == drafts_BK) & (number_K < counts_B[:, None])
        accepted_B = 1 + equal_BK.cumprod(dim=1).sum(dim=1)
        self.state.accept(rows_B, tokens_BN, accepted_B)
