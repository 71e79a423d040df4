"""The computation of a step, as callables over tensors with fixed addresses.

The only host input of a decode step is the list of its rows. Newest tokens, positions and block
tables are state on the device. The step derives the write index from them, and writes the sampled
tokens back.

    decode   rows -> token, position -> slot -> forward -> sample -> token, position + 1
    verify   rows, drafts -> newest token and drafts -> slots -> forward -> sample at each of them
             -> accept the drafts that were sampled too -> token, position + 1 + accepted
             -> with a drafter: new drafts
    prefill  chunk -> slot -> forward -> sample at the last token of each chunk -> token, position

A step with token masks has two parts, so that the host computes masks during the first:

    forward  as decode or prefill, up to logits and positions, which it stores
    sample   stored logits, masks of the rows -> sample -> token, position + 1

Steps with native layers are not compiled: there is nothing to fuse, and compiled code has to check
its guards. Other greedy steps are compiled as a whole: forward pass, head, sampling and token
feedback (see `compiled_parts.py`). Any other step is a greedy one, followed by the full sampler,
whose tokens replace the greedy ones: so both share the compiled forward pass. A plain PyTorch
sampler is compiled, on its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from ..kernels import DecodeResult, DecodeStep, RaggedBatch
from ..kernels.cpu.verify import accept_drafts, verify_inputs
from ..kernels.ops.feedback import Feedback
from ..kernels.triton.dependent import dependent_launch
from ..models.decoder_model import DecoderModel
from ..models.drafters.drafter import Drafts, FollowedTokens
from ..operation_scopes import operation
from ..sampling.sample_output import SampleOutput
from ..sampling.samplers import SAMPLERS, torch_sampler
from .batches import ragged_batch, rope_lengths
from .compiled_parts import CompiledParts
from .draft_step import DraftStep
from .inputs import DraftInputs, EmbedInputs, StepInputs
from .mask_state import MaskState
from .row_state import RowState
from .step_key import StepKey, StepOutput

__all__ = ["StepFunctions", "on_device"]


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


class _Lanes(NamedTuple):
    """The tokens of a verify step, row by row. T: rows times tokens per row."""

    logits: torch.Tensor
    """`[T, vocab_size]`, or those of the rank's own tokens."""
    rows: torch.Tensor
    """int64 `[T]`: the row that samples after each token; the null row for padding."""
    positions: torch.Tensor
    """int64 `[T]`: the positions after which tokens are sampled."""
    token_ids: torch.Tensor
    """int64 `[T]`: these tokens."""
    tokens: torch.Tensor | None
    """int64 `[T]`: greedy tokens; None: not sampled yet."""
    slots: torch.Tensor
    """int64 `[G, T]`: the write index."""
    features: torch.Tensor | None
    """`[T, F]`: those that the drafter reads."""


class StepFunctions:
    """The steps of one model over one arena and one set of buffers."""

    def __init__(
        self,
        model: DecoderModel,
        arena: torch.Tensor,
        block_size: int,
        state: RowState,
        inputs: StepInputs[torch.Tensor],
        embeds: EmbedInputs[torch.Tensor] | None,
        compiled: bool,
        drafts: DraftInputs[torch.Tensor] | None = None,
        hidden: torch.Tensor | None = None,
        drafting: DraftStep | None = None,
    ) -> None:
        """Bind the tensors. With `compiled`, steps are compiled at their first call.

        Prefill steps read `embeds` if prompts may have embeddings, and write their final hidden
        states to `hidden`, at least `[M, hidden_size]`, if it is given. Verify steps read `drafts`.
        `drafting` proposes them on the device.
        """
        self.model = model
        self.arena = arena
        self.block_size = block_size
        self.state = state
        self.inputs = inputs
        self.embeds = embeds
        self.drafts = drafts
        self.hidden = hidden
        self._drafting = drafting
        self._taps = () if drafting is None else drafting.taps
        self._sampler = SAMPLERS[model.kernels.sampler]
        lanes = len(inputs.decode_rows)
        self._no_drafts = inputs.decode_rows.new_zeros((lanes, 0))
        self._ones = inputs.decode_rows.new_ones(lanes)
        static = (arena, *state.tensors().values(), *(() if hidden is None else (hidden,)))
        self._parts = CompiledParts(static)
        if compiled and model.stack is None:
            if model.kernels.sampler == "triton":  # torch.compile cannot trace its launches
                self._sampler = SAMPLERS["torch"]
            self._parts.add(self._decode_parts, few_tokens=True)
            self._parts.add(self._prefill_parts)
            if drafts is not None:
                self._parts.add(self._verify_parts)
        if compiled and self._sampler is torch_sampler:
            self._parts.add(self._sampled)
            if drafts is not None:
                self._parts.add(self._drawn)
            if state.masks is not None:
                self._parts.add(self._masked)

    def bind(self, key: StepKey) -> Callable[[], StepOutput]:
        """Return the step of a key as a callable without arguments."""
        step = self.decode if key.phase == "decode" else self.prefill
        if key.tokens_per_row > 1 or key.drafts:
            step = self.verify
        if key.part != "whole":
            step = self.forward_part if key.part == "forward" else self.sample_part

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
            return self._run_ragged(key, self._no_drafts[: key.size], self._ones[: key.size])[0]
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

    def _greedy(self, part: Callable[..., _Forward | _Lanes], key: StepKey) -> bool:
        """Whether a part samples greedy tokens; compiled ones always do, to be one version."""
        return self._parts.compiles(part) or not (key.full_sampler or key.part == "forward")

    def _forward_output(
        self,
        hidden_BD: torch.Tensor,
        rows_B: torch.Tensor,
        positions_B: torch.Tensor,
        greedy: bool,
    ) -> _Forward:
        """Compute logits, and with `greedy` sample."""
        logits_BV = self.model.own_logits(hidden_BD)
        tokens_B = self._sampled(logits_BV, rows_B, positions_B, False).tokens if greedy else None
        return _Forward(logits_BV, positions_B, tokens_B)

    def _finished(self, result: _Forward, rows_B: torch.Tensor, key: StepKey) -> StepOutput:
        """Sample with the full sampler if the step needs it."""
        if key.full_sampler:
            return self._call(self._sampled, result.logits, rows_B, result.positions, True)
        assert result.tokens is not None
        return StepOutput(result.tokens, result.logits, None)

    def _decode_fused(self, decode_step: DecodeStep, key: StepKey) -> StepOutput:
        """As `_decode_step`, with kernels that read the state and, if greedy, update it."""
        state, rows_B = self.state, self.inputs.decode_rows[: key.size]
        result = self._run_fused(decode_step, key)
        if key.full_sampler:
            rows_B = rows_B if self._sampler.full_step else rows_B.clone()
            return self._call(self._sampled, result.logits, rows_B, result.positions, True)
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

    def forward_part(self, key: StepKey) -> StepOutput:
        """Run a step up to its logits, and store these; `sample_part` continues."""
        masks = self._masks
        if key.phase == "prefill":
            forward, _ = self._prefill_forward(key)
            logits_BV, positions_B = forward.logits, forward.positions
            # The drafter takes the most probable token for the one that the grammar will allow.
            self._follow_prefill(key, logits_BV.argmax(dim=-1), forward)
        elif self.model.decode_step is not None:
            result = self._run_fused(self.model.decode_step, key)
            logits_BV, positions_B = result.logits, result.positions
        else:
            forward, _ = self._decode_forward(key)
            logits_BV, positions_B = forward.logits, forward.positions
        with operation("outputs"):
            masks.store(logits_BV, positions_B)
        return StepOutput(masks.positions[: len(positions_B)], masks.logits[: len(logits_BV)], None)

    def sample_part(self, key: StepKey) -> StepOutput:
        """Sample from the logits of the last forward part, and update the rows' state."""
        masks, inputs, part, lanes = self._masks, self.inputs, self._masked, key.size
        rows = inputs.decode_rows if key.phase == "decode" else inputs.sample_rows
        tensors = self._parts.inputs(
            part, masks.logits[:lanes], rows[:lanes], masks.positions[:lanes]
        )
        return self._call(part, *tensors, key.full_sampler)

    def _masked(
        self,
        logits_BV: torch.Tensor,
        rows_B: torch.Tensor,
        positions_B: torch.Tensor,
        full_sampler: bool,
    ) -> StepOutput:
        """As `_sampled`, without the tokens that the masks of the rows forbid."""
        with operation("mask"):
            logits_BV = self._sampler.mask(logits_BV, self._masks.bits, rows_B)
        return self._sampled(logits_BV, rows_B, positions_B, full_sampler)

    @property
    def _masks(self) -> MaskState:
        assert self.state.masks is not None, "these steps were made without token masks"
        return self.state.masks

    def verify(self, key: StepKey) -> StepOutput:
        """Sample after the newest token of each of `decode_rows`, and after each of its drafts.

        A draft is accepted if all drafts before it are, and if it is the token that is sampled in
        its place. So the accepted tokens, and the one sampled after them, are those that decode
        steps would sample one by one. Each row advances by these.
        """
        assert self.drafts is not None, "these steps were made without room for drafts"
        assert (key.phase, key.steps) == ("decode", 1)
        if self.ragged:
            return self._verify_ragged(key, self.drafts)
        drafts, size, part = self.drafts, key.size, self._verify_parts
        rows_B, drafts_BK, counts_B = self._parts.inputs(
            part,
            self.inputs.decode_rows[:size],
            drafts.token_ids[:size, : key.tokens_per_row - 1],
            drafts.counts[:size],
        )
        greedy = self._greedy(part, key)
        lanes = self._parts.call(part, rows_B, drafts_BK, counts_B, key.read_blocks, greedy)
        shape = size, key.tokens_per_row
        if key.full_sampler:
            token_ids_BN = lanes.token_ids.view(shape)
            output = self._parts.call(
                self._drawn, lanes.logits, lanes.rows, lanes.positions, token_ids_BN
            )
        else:
            assert lanes.tokens is not None
            output = StepOutput(lanes.tokens, lanes.logits, None)
        with operation("accept"):
            tokens_BN = output.tokens.view(shape)
            self._accept(rows_B, drafts_BK, counts_B, tokens_BN)
        batch = RaggedBatch(
            positions=lanes.positions,
            slots=lanes.slots,
            token_rows=rows_B[:, None].expand(-1, key.tokens_per_row).contiguous().flatten(),
            rows=rows_B,
            block_tables=self.state.block_tables,
            read_blocks=key.read_blocks,
            block_size=self.block_size,
            tokens_per_row=key.tokens_per_row,
        )
        tokens = FollowedTokens(lanes.token_ids, output.tokens, lanes.features, batch)
        first_B = torch.arange(key.size, device=rows_B.device) * key.tokens_per_row
        proposed = self._proposed(key, tokens, first_B)
        with operation("outputs"):
            logits_NBV = output.logits.unflatten(0, shape).transpose(0, 1)
            if output.details is None:
                return StepOutput(tokens_BN.T.contiguous(), logits_NBV, None, proposed)
            details = output.details.by_position(*shape)
            if logits_NBV.is_cuda:
                details = details.pack()  # so that one copy transfers them to the host
        return StepOutput(details.tokens, logits_NBV, details, proposed)

    def _verify_parts(
        self,
        rows_B: torch.Tensor,
        drafts_BK: torch.Tensor,
        counts_B: torch.Tensor,
        read_blocks: int,
        greedy: bool,
    ) -> _Lanes:
        """A verify step. `counts_B` tokens of each row are valid: the newest one and its drafts.

        The other tokens, and rows of padding, write to the null block. They have the row's last
        position, so that they read only slots that the row reads.
        """
        state, n = self.state, 1 + drafts_BK.shape[1]
        with operation("inputs"):
            token_ids_BN = torch.cat((state.token_ids[rows_B][:, None], drafts_BK), dim=1)
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
                tokens_T = self._greedy_tokens(logits_TV)
        sampled_rows_T = torch.where(valid_BN, token_rows_BN, state.null_row).flatten()
        return _Lanes(
            logits_TV,
            sampled_rows_T,
            positions_T,
            token_ids_BN.flatten(),
            tokens_T,
            batch.slots,
            features_TF,
        )

    def _verify_ragged(self, key: StepKey, drafts: DraftInputs[torch.Tensor]) -> StepOutput:
        """As `verify`, without padding between rows."""
        size, drafts_BK = key.size, drafts.token_ids[: key.size, : key.tokens_per_row - 1]
        result, lanes_NB = self._run_ragged(key, drafts_BK, drafts.counts[:size])
        if result.details is None:
            return StepOutput(result.tokens[lanes_NB], result.logits, None, result.drafts)
        details = result.details.at(lanes_NB)
        return StepOutput(details.tokens, result.logits, details, result.drafts)

    def _run_ragged(
        self, key: StepKey, drafts_BK: torch.Tensor, counts_B: torch.Tensor
    ) -> tuple[StepOutput, torch.Tensor]:
        """Run a step of the C++ operators; return its output token by token, and the lanes of it by
        position; see `kernels/cpu/verify.py`."""
        state, rows_B = self.state, self.inputs.decode_rows[: key.size]
        with operation("inputs"):
            inputs = verify_inputs(
                *(rows_B, drafts_BK, counts_B, state.token_ids, state.positions),
                *(state.block_tables, self.block_size),
            )
            batch = RaggedBatch(
                positions=inputs.positions,
                slots=inputs.slots,
                token_rows=inputs.token_rows,
                rows=rows_B,
                block_tables=state.block_tables,
                read_blocks=key.read_blocks,
                block_size=self.block_size,
                tokens_per_row=None,
                query_start_loc=inputs.query_start_loc,
                rope_lengths=rope_lengths(state, inputs.positions, inputs.token_rows),
            )
        if key.drafts:
            hidden_TD, features_TF = self._forward_pass(inputs.token_ids, batch)
        else:
            hidden_TD = self.model.decode(self._embedded(inputs.token_ids), self.arena, batch)
            features_TF = None
        logits_TV = self.model.own_logits(hidden_TD)
        if key.full_sampler:
            output = self._drawn(logits_TV, batch.token_rows, batch.positions, inputs.token_ids)
        else:
            with operation("greedy"):
                output = StepOutput(self._greedy_tokens(logits_TV), logits_TV, None)
        with operation("accept"):
            lanes_NB = accept_drafts(
                output.tokens, rows_B, drafts_BK, counts_B, state.token_ids, state.positions
            )
        if key.drafts:
            tokens = FollowedTokens(inputs.token_ids, output.tokens, features_TF, batch)
            proposed = self._proposed(key, tokens, lanes_NB[0])
            output = dataclasses.replace(output, drafts=proposed)
        return output, lanes_NB

    def _proposed(
        self, key: StepKey, tokens: FollowedTokens, first_B: torch.Tensor
    ) -> Drafts | None:
        """Let the drafter continue the rows of a step, if it is to; `first_B`: their first tokens.

        The rows have advanced already.
        """
        if not key.drafts:
            return None
        assert self._drafting is not None, "these steps were made without a drafter"
        assert self.drafts is not None, "a drafter needs room for its drafts"
        return self._drafting.propose(key, tokens, first_B, self.drafts.stops[: key.size])

    @property
    def ragged(self) -> bool:
        """Whether decode and verify steps run on the C++ operators, without padding between rows:
        their sizes are not captured."""
        kernels = self.model.kernels
        return self.model.stack is not None and kernels.library is not None

    @property
    def drafts_with_penalties(self) -> bool:
        """Whether rows with penalties verify drafts; otherwise they must have none."""
        return self._sampler.drafted is not None

    def _drawn(
        self,
        logits_TV: torch.Tensor,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        token_ids_BN: torch.Tensor,
    ) -> StepOutput:
        """Draw the token after each of the tokens of a verify step."""
        with operation("sample"):
            if self.model.vocabulary is not None:
                logits_TV = self.model.vocabulary.gather(logits_TV)
            state = self.state.sampling
            if self._sampler.drafted is None:
                details = self._sampler.full(logits_TV, state, rows_T, positions_T + 1)
            else:
                details = self._sampler.drafted(
                    logits_TV, state, rows_T, positions_T + 1, token_ids_BN
                )
            return StepOutput(details.tokens, logits_TV, details)

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

    def prefill(self, key: StepKey) -> StepOutput:
        """Write the keys and values of the chunks; sample a token for each chunk that samples."""
        forward, rows_P = self._prefill_forward(key)
        output = self._finished(forward, rows_P, key)
        self._follow_prefill(key, output.tokens, forward)
        return output

    def _follow_prefill(self, key: StepKey, tokens_P: torch.Tensor, forward: _Forward) -> None:
        if self._drafting is not None:
            self._drafting.follow_prefill(self.inputs, key, tokens_P, forward.features)

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
        output = self._forward_output(hidden_RD, sample_rows_R, positions_R, greedy)
        return output._replace(features=features_TF)

    def _embeds(self, size: int) -> tuple[torch.Tensor, ...]:
        """Return embeddings and mask of a prefill step, or () without `prompt_embeds`."""
        if self.embeds is None:
            return ()
        return self.embeds.embeds[:size], self.embeds.mask[:size]

    def _call(self, part: Callable[..., StepOutput], *arguments: Any) -> StepOutput:
        output: StepOutput = self._parts.call(part, *arguments)
        if output.details is None or not output.logits.is_cuda:
            return output
        details = output.details.pack()  # so that one copy transfers them to the host
        return StepOutput(details.tokens, output.logits, details)

    @property
    def _batch(self) -> Callable[..., RaggedBatch]:
        return partial(ragged_batch, self.state, self.block_size)

    def _forward_pass(
        self,
        token_ids_T: torch.Tensor,
        batch: RaggedBatch,
        embeds_TD: torch.Tensor | None = None,
        embed_mask_T: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the final hidden states `[T, hidden_size]`, and what a drafter reads of them."""
        x_TD = self._embedded(token_ids_T, embeds_TD, embed_mask_T)
        if not self._taps:
            return self.model.decode(x_TD, self.arena, batch), None
        return self.model.decode_tapped(x_TD, self.arena, batch, self._taps)

    def _embedded(
        self,
        token_ids_T: torch.Tensor,
        embeds_TD: torch.Tensor | None = None,
        embed_mask_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return what the first layer takes, `[T, hidden_size]`."""
        with operation("begin"):
            x_TD = self.model.embed(token_ids_T)
            if embeds_TD is not None and embed_mask_T is not None:
                x_TD = torch.where(embed_mask_T[:, None], embeds_TD.to(x_TD.dtype), x_TD)
        return x_TD

    def _sampled(
        self,
        logits_BV: torch.Tensor,
        rows_B: torch.Tensor,
        positions_B: torch.Tensor,
        full_sampler: bool,
    ) -> StepOutput:
        """Sample the token after each position, and store it as the row's newest."""
        sampler, state, vocabulary = self._sampler, self.state, self.model.vocabulary
        feedback = Feedback(rows_B, positions_B, state.token_ids, state.positions)
        if not full_sampler:
            with operation("greedy"):
                if sampler.greedy_step is not None and vocabulary is None:
                    return StepOutput(sampler.greedy_step(logits_BV, feedback), logits_BV, None)
                tokens_B = self._greedy_tokens(logits_BV)
                feedback.store(tokens_B)
                return StepOutput(tokens_B, logits_BV, None)
        with operation("sample"):
            if vocabulary is not None:
                logits_BV = vocabulary.gather(logits_BV)
            if sampler.full_step is not None:
                details = sampler.full_step(logits_BV, state.sampling, feedback)
            else:
                details = sampler.full(logits_BV, state.sampling, rows_B, positions_B + 1)
                feedback.store(details.tokens)
            return StepOutput(details.tokens, logits_BV, details)

    def _greedy_tokens(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Return the most probable tokens, int64 `[B]`, of logits or of a rank's part of them."""
        sample, vocabulary = self._sampler.greedy, self.model.vocabulary
        return sample(logits_BV) if vocabulary is None else vocabulary.greedy(logits_BV, sample)

    def close(self) -> None:
        """Release compiled code, which references this object."""
        self._parts.close()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a CUDA device current, because Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
