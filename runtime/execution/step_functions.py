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

import contextlib
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from ..kernels import DecodeResult, DecodeStep, RaggedBatch
from ..kernels.cpu.verify import VerifyInputs, accept_drafts, verify_inputs
from ..kernels.ops.feedback import Feedback
from ..kernels.ops.token_masks import LaneMasks, mask_logits
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

_NO_TOKEN = -2
"""Differs from every token, and from `NON_FINITE`."""


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
    """The tokens of a verify step row by row. T: rows times tokens per row."""

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


class MasksThread(Protocol):
    """Computes the token masks of a step while it runs, on a CPU."""

    def start(self) -> None:
        """Start to compute the masks, if the step has any and they have not been started."""

    def wait(self) -> None:
        """Wait for the masks."""


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
        masks_thread: MasksThread | None = None,
    ) -> None:
        """Bind the tensors. With `compiled`, steps are compiled at their first call.

        Prefill steps read `embeds` if prompts may have embeddings, and write their final hidden
        states to `hidden`, at least `[M, hidden_size]`, if it is given. Verify steps read `drafts`.
        `drafting` proposes them on the device. Whole steps with token masks let `masks_thread`
        compute these.
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
        self._masks_thread = masks_thread
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
                self._parts.add(self._masked_tokens)

    def bind(self, key: StepKey) -> Callable[[], StepOutput]:
        """Return the step of a key as a callable without arguments."""
        step = self.decode if key.phase == "decode" else self.prefill
        if key.tokens_per_row > 1 or key.drafts:
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

    def _greedy(self, part: Callable[..., _Forward | _Lanes], key: StepKey) -> bool:
        """Whether a part samples greedy tokens; compiled ones always do, to be one version."""
        later = key.full_sampler or key.masked or key.part == "forward"
        return self._parts.compiles(part) or not later

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

    def _wait_for_masks(self) -> None:
        if self._masks_thread is not None:
            self._masks_thread.wait()

    def forward_part(self, key: StepKey) -> StepOutput:
        """Run a step up to its logits, and store these; `sample_part` continues."""
        masks, forward = self._masks, self._forward(key)
        if key.phase == "prefill":
            # The drafter takes the most probable token for the one that the grammar will allow.
            self._follow_prefill(key, forward.logits.argmax(dim=-1), forward)
        with operation("outputs"):
            masks.store(forward.logits, forward.positions)
        count = len(forward.positions)
        return StepOutput(masks.positions[:count], masks.logits[:count], None)

    def sample_part(self, key: StepKey) -> StepOutput:
        """Sample from the logits of the last forward part, and update the rows' state."""
        lanes = key.size * key.tokens_per_row
        return self._sample_masked(self._masks.logits[:lanes], self._masks.positions[:lanes], key)

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
        part, inputs = self._masked_tokens, self.inputs
        rows_T = inputs.decode_rows if key.phase == "decode" else inputs.sample_rows
        rows_T = mask_rows_T = rows_T[: len(positions_T) // key.tokens_per_row]
        verified: tuple[torch.Tensor, ...] = ()
        if key.tokens_per_row > 1:
            with operation("inputs"):
                rows_B, drafts_BK, counts_B = self._drafts(key)
                step_N = torch.arange(key.tokens_per_row, device=rows_B.device)
                mask_rows_T = (rows_B[:, None] + self.state.token_ids.shape[0] * step_N).flatten()
                valid_BN = step_N < counts_B[:, None]
                rows_T = torch.where(valid_BN, rows_B[:, None], self.state.null_row).flatten()
                newest_B1 = self.state.token_ids[rows_B][:, None]
                verified = (torch.cat((newest_B1, drafts_BK), dim=1),)
        tensors = self._parts.inputs(part, logits_TV, rows_T, positions_T, mask_rows_T, *verified)
        output = self._call(part, *tensors[:4], key.full_sampler, *tensors[4:])
        return self._accepted(output, key) if verified else output

    def _masked_tokens(
        self,
        logits_TV: torch.Tensor,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        mask_rows_T: torch.Tensor,
        full_sampler: bool,
        token_ids_BN: torch.Tensor | None = None,
    ) -> StepOutput:
        """As `_sampled`, or with the tokens of a verify step as `_drawn`, with these masks."""
        masks = LaneMasks(self._masks.bits, mask_rows_T)
        if token_ids_BN is None:
            return self._sampled(logits_TV, rows_T, positions_T, full_sampler, masks)
        if full_sampler:
            return self._drawn(logits_TV, rows_T, positions_T, token_ids_BN, masks)
        return self._largest(logits_TV, masks)

    def _largest(self, logits_TV: torch.Tensor, masks: LaneMasks | None) -> StepOutput:
        """Take the most probable token after each of the tokens of a verify step."""
        logits_TV, *own = self._apply(masks, logits_TV)
        with operation("greedy"):
            return StepOutput(self._greedy_tokens(logits_TV, *own), logits_TV, None)

    def _apply(
        self, masks: LaneMasks | None, logits_BV: torch.Tensor
    ) -> tuple[torch.Tensor, *tuple[LaneMasks, ...]]:
        """Return the arguments of a sampler for masked logits: masks, if it applies them."""
        if masks is None:
            return (logits_BV,)
        if self._sampler.takes_masks:
            return logits_BV, masks
        with operation("mask"):
            return (mask_logits(logits_BV, masks),)

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
        if self.ragged:
            return self._verify_ragged(key)
        lanes, shape = self._verify_forward(key), (key.size, key.tokens_per_row)
        if key.full_sampler:
            token_ids_BN = lanes.token_ids.view(shape)
            output = self._parts.call(
                self._drawn, lanes.logits, lanes.rows, lanes.positions, token_ids_BN
            )
        else:
            assert lanes.tokens is not None
            output = StepOutput(lanes.tokens, lanes.logits, None)
        return self._accepted(output, key, lanes)

    def _drafts(self, key: StepKey) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rows of a verify step, their drafts and how many tokens are valid."""
        assert self.drafts is not None, "these steps were made without room for drafts"
        assert (key.phase, key.steps) == ("decode", 1)
        size, drafts = key.size, self.drafts
        return (
            self.inputs.decode_rows[:size],
            drafts.token_ids[:size, : key.tokens_per_row - 1],
            drafts.counts[:size],
        )

    def _verify_forward(self, key: StepKey) -> _Lanes:
        """Run a verify step up to the logits, or to greedy tokens."""
        part = self._verify_parts
        inputs = self._parts.inputs(part, *self._drafts(key))
        lanes: _Lanes = self._parts.call(part, *inputs, key.read_blocks, self._greedy(part, key))
        return lanes

    def _accepted(
        self, output: StepOutput, key: StepKey, lanes: _Lanes | None = None
    ) -> StepOutput:
        """Accept drafts, and return the output by position. With lanes, new drafts may follow."""
        shape = key.size, key.tokens_per_row
        with operation("accept"):
            tokens_BN = output.tokens.view(shape)
            self._accept(*self._drafts(key), tokens_BN)
        proposed = None if lanes is None else self._proposed_after(key, lanes, output.tokens)
        with operation("outputs"):
            logits_NBV = output.logits.unflatten(0, shape).transpose(0, 1)
            if output.details is None:
                return StepOutput(tokens_BN.T.contiguous(), logits_NBV, None, proposed)
            details = output.details.by_position(*shape)
            if logits_NBV.is_cuda:
                details = details.pack()  # so that one copy transfers them to the host
        return StepOutput(details.tokens, logits_NBV, details, proposed)

    def _proposed_after(self, key: StepKey, lanes: _Lanes, tokens_T: torch.Tensor) -> Drafts | None:
        """As `_proposed`, after a verify step with padding."""
        rows_B = self.inputs.decode_rows[: key.size]
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
        tokens = FollowedTokens(lanes.token_ids, tokens_T, lanes.features, batch)
        first_B = torch.arange(key.size, device=rows_B.device) * key.tokens_per_row
        return self._proposed(key, tokens, first_B)

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

    def _decode_ragged(self, key: StepKey) -> StepOutput:
        """As `_decode_step`, on the C++ operators."""
        return self._run_ragged(key, self._no_drafts[: key.size], self._ones[: key.size])[0]

    def _verify_ragged(self, key: StepKey) -> StepOutput:
        """As `verify`, without padding between rows."""
        _, drafts_BK, counts_B = self._drafts(key)
        result, lanes_NB = self._run_ragged(key, drafts_BK, counts_B)
        if result.details is None:
            return StepOutput(result.tokens[lanes_NB], result.logits, None, result.drafts)
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
        rows_T, masks = inputs.token_rows, None
        if key.masked:
            self._wait_for_masks()
            with operation("inputs"):
                rows_T, drafts_BK, masks = self._masked_lanes(inputs, counts_B, kept_B, drafts_BK)
        if key.full_sampler:
            output = self._drawn(logits_TV, rows_T, inputs.positions, inputs.token_ids, masks)
        else:
            output = self._largest(logits_TV, masks)
        with operation("accept"):
            lanes_NB = accept_drafts(
                output.tokens, rows_B, drafts_BK, counts_B, state.token_ids, state.positions
            )
        if key.drafts:
            tokens = FollowedTokens(inputs.token_ids, output.tokens, features_TF, batch)
            proposed = self._proposed(key, tokens, lanes_NB[0])
            output = dataclasses.replace(output, drafts=proposed)
        return output, lanes_NB

    def _masked_lanes(
        self,
        inputs: VerifyInputs,
        counts_B: torch.Tensor,
        kept_B: torch.Tensor,
        drafts_BK: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, LaneMasks]:
        """Return the rows that sample after the tokens of a step, its drafts, and the masks.

        Of `counts_B` tokens of each row `kept_B` are left. After the others the null row samples,
        and no token is equal to their drafts.
        """
        bits, rows_T = self._masks.bits, inputs.token_rows
        if not drafts_BK.shape[1]:
            return rows_T, drafts_BK, LaneMasks(bits, rows_T)
        first_T = inputs.query_start_loc[:-1].repeat_interleave(counts_B)
        step_T = torch.arange(len(rows_T)) - first_T
        masks = LaneMasks(bits, rows_T + self.state.token_ids.shape[0] * step_T)
        kept_T = step_T < kept_B.repeat_interleave(counts_B)
        number_K = torch.arange(1, 1 + drafts_BK.shape[1])
        drafts_BK = torch.where(number_K < kept_B[:, None], drafts_BK, _NO_TOKEN)
        return torch.where(kept_T, rows_T, self.state.null_row), drafts_BK, masks

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
        masks: LaneMasks | None = None,
    ) -> StepOutput:
        """Draw the token after each of the tokens of a verify step."""
        with operation("sample"):
            if self.model.vocabulary is not None:
                logits_TV = self.model.vocabulary.gather(logits_TV)
            logits_TV, *own = self._apply(masks, logits_TV)
            state = self.state.sampling
            if self._sampler.drafted is None:
                details = self._sampler.full(logits_TV, state, rows_T, positions_T + 1, *own)
            else:
                details = self._sampler.drafted(
                    logits_TV, state, rows_T, positions_T + 1, token_ids_BN, *own
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
        if self._masks_thread is not None and self.model.stack is not None:
            self._masks_thread.start()  # not earlier: the thread needs Python's lock to start
        return x_TD

    def _sampled(
        self,
        logits_BV: torch.Tensor,
        rows_B: torch.Tensor,
        positions_B: torch.Tensor,
        full_sampler: bool,
        masks: LaneMasks | None = None,
    ) -> StepOutput:
        """Sample the token after each position, and store it as the row's newest."""
        sampler, state, vocabulary = self._sampler, self.state, self.model.vocabulary
        assert masks is None or vocabulary is None, "masks are those of the whole vocabulary"
        logits_BV, *own = self._apply(masks, logits_BV)
        feedback = Feedback(rows_B, positions_B, state.token_ids, state.positions)
        if not full_sampler:
            with operation("greedy"):
                if sampler.greedy_step is not None and vocabulary is None:
                    return StepOutput(sampler.greedy_step(logits_BV, feedback), logits_BV, None)
                tokens_B = self._greedy_tokens(logits_BV, *own)
                feedback.store(tokens_B)
                return StepOutput(tokens_B, logits_BV, None)
        with operation("sample"):
            if vocabulary is not None:
                logits_BV = vocabulary.gather(logits_BV)
            if sampler.full_step is not None:
                details = sampler.full_step(logits_BV, state.sampling, feedback)
            else:
                details = sampler.full(logits_BV, state.sampling, rows_B, positions_B + 1, *own)
                feedback.store(details.tokens)
            return StepOutput(details.tokens, logits_BV, details)

    def _greedy_tokens(self, logits_BV: torch.Tensor, *masks: LaneMasks) -> torch.Tensor:
        """Return the most probable tokens, int64 `[B]`, of logits or of a rank's part of them."""
        sample, vocabulary = self._sampler.greedy, self.model.vocabulary
        if vocabulary is None:
            return sample(logits_BV, *masks)
        return vocabulary.greedy(logits_BV, sample)

    def close(self) -> None:
        """Release compiled code, which references this object."""
        self._parts.close()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a CUDA device current, because Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
