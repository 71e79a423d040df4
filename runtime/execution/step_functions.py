"""The computation of a step, as callables over tensors with fixed addresses.

The only host input of a decode step is the list of its rows. Newest tokens, positions and block
tables are state on the device. The step derives the write index from them, and writes the sampled
tokens back.

    decode   rows -> token, position -> slot -> forward -> sample -> token, position + 1
    verify   rows, drafts -> newest token and drafts -> slots -> forward -> sample at each of them
             -> accept the drafts that were sampled too -> token, position + 1 + accepted
             -> with a drafter: new drafts
    prefill  chunk -> slot -> forward -> sample at the last token of each chunk -> token, position

A step with token masks waits for these before it samples: the host computes them during the
forward pass. On a device that runs asynchronously it has two parts, between which the host copies
the masks:

    forward  as decode, verify or prefill, up to logits and positions, which it stores
    sample   stored logits, masks of the rows -> sample -> as above

Steps with native layers are not compiled: there is nothing to fuse, and compiled code has to check
its guards. Other greedy steps are compiled as a whole: forward pass, head, sampling and token
feedback (see `compiled_parts.py`). Any other step is a greedy one, followed by the full sampler,
whose tokens replace the greedy ones: so both share the compiled forward pass. A plain PyTorch
sampler is compiled, on its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..kernels import DecodeResult, DecodeStep
from ..kernels.triton.dependent import dependent_launch
from ..models.drafters.drafter import Drafts
from ..operation_scopes import operation
from ..sampling.sample_output import SampleOutput
from ..sampling.samplers import torch_sampler
from .ragged_steps import RaggedSteps
from .step_key import StepKey, StepOutput
from .step_parts import on_device

__all__ = ["StepFunctions"]


class _Forward(NamedTuple):
    """A forward pass with its logits, and perhaps greedy tokens. B: tokens to sample."""

    logits: torch.Tensor
    """`[B, vocab_size]`, or those of the rank's own tokens."""
    positions: torch.Tensor
    """int64 `[B]`: the positions after which tokens are sampled."""
    tokens: torch.Tensor | None
    """int64 `[B]`: greedy tokens, which are stored; None: not sampled yet."""
    features: torch.Tensor | None = None
    """`[T, F]`: those that the drafter reads, of all tokens of a prefill step."""


class StepFunctions(RaggedSteps):
    """The steps of one model over one arena and one set of buffers."""

    def _compile_parts(self, compiled: bool) -> None:
        if compiled and self.model.stack is None:
            self._parts.add(self._decode_parts, few_tokens=True)
            self._parts.add(self._prefill_parts)
            if self.drafts is not None:
                self._parts.add(self._verify_parts)
        if compiled and self._sampler is torch_sampler:
            self._parts.add(self._sampled if self.drafts is None else self._drawn_lanes)
            if self.state.masks is not None:
                for part in (self._masked_logits, self._greedy_step, self._largest):
                    self._parts.add(part)

    def bind(self, key: StepKey) -> Callable[[], StepOutput]:
        """Return the step of a key as a callable without arguments."""
        step = self.decode if key.phase == "decode" else self.prefill
        if key.phase == "decode" and (key.tokens_per_row > 1 or key.drafts):
            step = self.verify
        if key.masked:
            step = self.sample_part if key.part == "sample" else self.masked
        elif key.part == "forward":
            step = self.forward_part

        def run() -> StepOutput:
            with (
                on_device(self.arena.device),
                dependent_launch(self.model.kernels.dependent_launch),
                torch.inference_mode(False),
                torch.no_grad(),
            ):
                return step(key)

        return run

    def decode(self, key: StepKey) -> StepOutput:
        """Decode `key.steps` tokens, one after the other, for each of `decode_rows`.

        The rows are the only host input of a step, so several steps in one launch compute the same
        as several launches.
        """
        if key.steps == 1:
            return self._decode_step(key)
        tokens: list[torch.Tensor] = []
        details: list[SampleOutput] = []
        for _ in range(key.steps):
            output = self._decode_step(key)
            tokens.append(output.tokens)
            if output.details is not None:
                details.append(output.details)
        with operation("outputs"):
            stacked = SampleOutput.stack(details) if details else None
            if stacked is None:
                return StepOutput(torch.stack(tokens), output.logits, None)
            return StepOutput(stacked.tokens, output.logits, stacked)

    def _decode_step(self, key: StepKey) -> StepOutput:
        if self.model.decode_step is not None:
            return self._decode_fused(self.model.decode_step, key)
        if self.ragged:
            return self._decode_ragged(key)
        return self._finished(*self._decode_forward(key), key)

    def _decode_forward(self, key: StepKey) -> tuple[_Forward, torch.Tensor]:
        """Run a decode step up to the logits, or to greedy tokens; return it with its rows."""
        part, rows_B = self._decode_parts, self.inputs.decode_rows[: key.size]
        (rows_B,) = self._parts.inputs(part, rows_B)
        return self._parts.call(part, rows_B, key.read_blocks, self._greedy(part, key)), rows_B

    def _decode_parts(self, rows_B: torch.Tensor, read_blocks: int, greedy: bool) -> _Forward:
        """A decode step of the rows `[B]`, int64; with `greedy`, it samples."""
        with operation("inputs"):
            positions_B, token_ids_B = self.state.positions[rows_B], self.state.token_ids[rows_B]
        batch = self._batch(positions_B, rows_B, rows_B, read_blocks, tokens_per_row=1)
        hidden_BD = self.model.decode(self._embedded(token_ids_B), self.arena, batch)
        return self._forward_output(hidden_BD, rows_B, positions_B, greedy)

    def _forward_output(
        self,
        hidden_BD: torch.Tensor,
        rows_B: torch.Tensor,
        positions_B: torch.Tensor,
        greedy: bool,
        features_TF: torch.Tensor | None = None,
    ) -> _Forward:
        """Compute logits, and with `greedy` sample."""
        logits_BV = self.model.own_logits(hidden_BD)
        tokens_B, lanes = None, (logits_BV, rows_B, positions_B)
        if greedy:
            tokens_B = self._greedy_step(*lanes, self.model.vocabulary)
        return _Forward(logits_BV, positions_B, tokens_B, features_TF)

    def _finished(self, result: _Forward, rows_B: torch.Tensor, key: StepKey) -> StepOutput:
        """Sample with the full sampler if the step needs it."""
        if key.full_sampler:
            logits_BV = self._gathered(result.logits)
            return self._call(self._sampled, logits_BV, rows_B, result.positions)
        assert result.tokens is not None
        return StepOutput(result.tokens, result.logits, None)

    def _decode_fused(self, decode_step: DecodeStep, key: StepKey) -> StepOutput:
        """As `_decode_step`, with kernels that read the state and, if greedy, update it."""
        state, rows_B = self.state, self.inputs.decode_rows[: key.size]
        result = self._run_fused(decode_step, key)
        if key.full_sampler:
            rows_B = rows_B if self._sampler.full_step else rows_B.clone()
            logits_BV = self._gathered(result.logits)
            return self._call(self._sampled, logits_BV, rows_B, result.positions)
        tokens = decode_step.pick(result, rows_B, state.token_ids, state.positions)
        return StepOutput(tokens, result.logits, None)

    def _run_fused(self, decode_step: DecodeStep, key: StepKey) -> DecodeResult:
        state = self.state
        return decode_step.run(
            self.inputs.decode_rows[: key.size],
            state.token_ids,
            state.positions,
            state.block_tables,
            self.arena,
            key.read_blocks,
            self.block_size,
        )

    def masked(self, key: StepKey) -> StepOutput:
        """Run a step, and sample the tokens that the masks of its rows allow."""
        if self.ragged and key.phase == "decode":
            return self._verify_ragged(key) if key.tokens_per_row > 1 else self._decode_ragged(key)
        if self._masks_thread is not None and self.model.stack is None:
            self._masks_thread.start()
        forward = self._forward(key)
        self._wait_for_masks()
        output = self._sample_masked(forward.logits, forward.positions, key)
        if key.phase == "prefill":
            self._follow_prefill(key, output.tokens, forward)
        return output

    def forward_part(self, key: StepKey) -> StepOutput:
        """Run a step up to its logits, and store these; `sample_part` continues."""
        masks, forward = self._masks, self._forward(key)
        if key.phase == "prefill" and self._drafting is not None:
            # The drafter takes the most probable token for the one that the grammar will allow.
            likely_P = self._greedy_tokens(forward.logits, self.model.vocabulary)
            self._follow_prefill(key, likely_P, forward)
        with operation("outputs"):
            masks.store(forward.logits, forward.positions)
        count = len(forward.positions)
        return StepOutput(masks.positions[:count], masks.logits[:count], None)

    def sample_part(self, key: StepKey) -> StepOutput:
        """Sample from the logits of the last forward part, and update the rows' state."""
        lanes, masks, part = key.size * key.tokens_per_row, self._masks, self._masked_logits
        (logits_TV,) = self._parts.inputs(part, masks.logits[:lanes])
        return self._sample_masked(logits_TV, masks.positions[:lanes], key)

    def _forward(self, key: StepKey) -> _Forward:
        """Run a step up to its logits, those of a verify step row by row."""
        if key.phase == "prefill":
            return self._prefill_forward(key)[0]
        if key.tokens_per_row > 1:
            lanes = self._verify_forward(key)
            return _Forward(lanes.logits, lanes.positions, None)
        if self.model.decode_step is not None:
            result = self._run_fused(self.model.decode_step, key)
            return _Forward(result.logits, result.positions, None)
        return self._decode_forward(key)[0]

    def _sample_masked(
        self, logits_TV: torch.Tensor, positions_T: torch.Tensor, key: StepKey
    ) -> StepOutput:
        """Sample from the logits of a step with the masks of its rows, which are ready."""
        if key.tokens_per_row > 1:
            return self._verify_masked(logits_TV, positions_T, key)
        rows_T = self.inputs.decode_rows if key.phase == "decode" else self.inputs.sample_rows
        rows_T = rows_T[: len(positions_T)]
        logits_TV, masks = self._apply(logits_TV, rows_T)
        rows_T, positions_T = self._parts.inputs(self._masked_logits, rows_T, positions_T)
        if key.full_sampler:
            return self._call(self._sampled, logits_TV, rows_T, positions_T, masks)
        lanes = logits_TV, rows_T, positions_T
        tokens_T = self._parts.call(self._greedy_step, *lanes, None, masks)
        return StepOutput(tokens_T, logits_TV, None)

    def _verify_masked(
        self, logits_TV: torch.Tensor, positions_T: torch.Tensor, key: StepKey
    ) -> StepOutput:
        """As `_sample_masked`, for a verify step."""
        with operation("inputs"):
            rows_B, drafts_BK, counts_B = self._drafts(key)
            step_N = torch.arange(key.tokens_per_row, device=rows_B.device)
            mask_rows_T = (rows_B[:, None] + self.state.token_ids.shape[0] * step_N).flatten()
            valid_BN = step_N < counts_B[:, None]
            rows_T = torch.where(valid_BN, rows_B[:, None], self.state.null_row).flatten()
        logits_TV, masks = self._apply(logits_TV, mask_rows_T)
        if key.full_sampler:
            token_ids_BN = self._with_newest(rows_B, drafts_BK)
            (positions_T,) = self._parts.inputs(self._drawn_lanes, positions_T)
            lanes = logits_TV, rows_T, positions_T, token_ids_BN
            return self._accepted(self._drawn(*lanes, masks), key)
        return self._accepted(self._parts.call(self._largest, logits_TV, masks), key)

    def prefill(self, key: StepKey) -> StepOutput:
        """Write the keys and values of the chunks; sample a token for each chunk that samples."""
        forward, rows_P = self._prefill_forward(key)
        output = self._finished(forward, rows_P, key)
        drafts = self._follow_prefill(key, output.tokens, forward)
        return dataclasses.replace(output, drafts=drafts) if key.drafts else output

    def _follow_prefill(
        self, key: StepKey, tokens_P: torch.Tensor, forward: _Forward
    ) -> Drafts | None:
        if self._drafting is None:
            return None
        return self._drafting.after_prefill(
            self.inputs, key, tokens_P, forward.features, ragged=self.ragged
        )

    def _prefill_forward(self, key: StepKey) -> tuple[_Forward, torch.Tensor]:
        """As `_decode_forward`, for a prefill step."""
        inputs, size, part = self.inputs, key.size, self._prefill_parts
        tensors = self._parts.inputs(
            part,
            inputs.token_ids[:size],
            inputs.positions[:size],
            inputs.token_rows[:size],
            inputs.prefill_rows,
            inputs.query_start_loc,
            inputs.sample_rows,
        )
        embeds = self._parts.inputs(part, *self._embeds(size))
        constants = key.read_blocks, self._greedy(part, key)
        return self._parts.call(part, *tensors, *constants, *embeds), tensors[-1]

    def _prefill_parts(
        self,
        token_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        token_rows_T: torch.Tensor,
        rows_R: torch.Tensor,
        query_start_loc: torch.Tensor,
        sample_rows_R: torch.Tensor,
        read_blocks: int,
        greedy: bool,
        *embeds: torch.Tensor,
    ) -> _Forward:
        """A prefill step; with `greedy`, it samples after the last token of each chunk."""
        batch = self._batch(
            positions_T, token_rows_T, rows_R, read_blocks, query_start_loc=query_start_loc
        )
        hidden_TD, features_TF = self._forward_pass(token_ids_T, batch, *embeds)
        with operation("last_tokens"):
            if self.hidden is not None:
                self.hidden[: hidden_TD.shape[0]].copy_(hidden_TD)
            # Rows of padding have no tokens; clamp their index, which can be -1.
            last_R = (query_start_loc[1:] - 1).clamp(min=0)
            hidden_RD, positions_R = hidden_TD[last_R], positions_T[last_R]
        return self._forward_output(hidden_RD, sample_rows_R, positions_R, greedy, features_TF)

    def _embeds(self, size: int) -> tuple[torch.Tensor, ...]:
        """Return embeddings and mask of a prefill step, or () without `prompt_embeds`."""
        if self.embeds is None:
            return ()
        return self.embeds.embeds[:size], self.embeds.mask[:size]
