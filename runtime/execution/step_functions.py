"""The computation of a step, as callables over tensors with fixed addresses.

The only host input of a decode step is the list of its rows. Newest tokens, positions and block
tables are state on the device. The step derives the write index from them, and writes the sampled
tokens back.

    decode   rows -> token, position -> slot -> forward -> sample -> token, position + 1
    verify   rows, drafts -> newest token and drafts -> slots -> forward -> sample at each of them
             -> accept the drafts that were sampled too -> token, position + 1 + accepted
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
from typing import Any, NamedTuple, Protocol

import torch

from ..kernels import DecodeResult, DecodeStep, RaggedBatch
from ..kernels.ops.feedback import Feedback
from ..kernels.ops.token_masks import LaneMasks, mask_logits
from ..kernels.triton.dependent import dependent_launch
from ..models.decoder_model import DecoderModel
from ..operation_scopes import operation
from ..sampling.sample_output import SampleOutput
from ..sampling.samplers import SAMPLERS, torch_sampler
from .compiled_parts import CompiledParts
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


class _Lanes(NamedTuple):
    """The tokens to sample of a step; of a verify step row by row, T: rows times tokens per row."""

    logits: torch.Tensor
    """`[T, vocab_size]`, or those of the rank's own tokens."""
    rows: torch.Tensor
    """int64 `[T]`: the row that samples after each token; the null row for padding."""
    positions: torch.Tensor
    """int64 `[T]`: the positions after which tokens are sampled."""
    tokens: torch.Tensor | None
    """int64 `[T]`: greedy tokens; None: not sampled yet."""


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
        masks_thread: MasksThread | None = None,
    ) -> None:
        """Bind the tensors. With `compiled`, steps are compiled at their first call.

        Prefill steps read `embeds` if prompts may have embeddings, and write their final hidden
        states to `hidden`, at least `[M, hidden_size]`, if it is given. Verify steps read `drafts`.
        Whole steps with token masks let `masks_thread` compute these.
        """
        self.model = model
        self.arena = arena
        self.block_size = block_size
        self.state = state
        self.inputs = inputs
        self.embeds = embeds
        self.drafts = drafts
        self.hidden = hidden
        self._masks_thread = masks_thread
        self._sampler = SAMPLERS[model.kernels.sampler]
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
        if key.tokens_per_row > 1:
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
        hidden_BD = self._forward_pass(token_ids_B, batch)
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
        if self._masks_thread is not None:
            if self.model.stack is None:
                self._masks_thread.start()
            lanes = self._forward(key)
            self._masks_thread.wait()
        else:
            lanes = self._forward(key)
        return self._sample_masked(lanes.logits, lanes.positions, key)

    def forward_part(self, key: StepKey) -> StepOutput:
        """Run a step up to its logits, and store these; `sample_part` continues."""
        masks, lanes = self._masks, self._forward(key)
        with operation("outputs"):
            masks.store(lanes.logits, lanes.positions)
        count = len(lanes.positions)
        return StepOutput(masks.positions[:count], masks.logits[:count], None)

    def sample_part(self, key: StepKey) -> StepOutput:
        """Sample from the logits of the last forward part, and update the rows' state."""
        lanes = key.size * key.tokens_per_row
        return self._sample_masked(self._masks.logits[:lanes], self._masks.positions[:lanes], key)

    def _forward(self, key: StepKey) -> _Lanes:
        """Run a step up to its logits."""
        if key.phase == "prefill":
            forward, rows_B = self._prefill_forward(key)
        elif key.tokens_per_row > 1:
            return self._verify_forward(key)
        elif self.model.decode_step is not None:
            result = self._run_fused(self.model.decode_step, key)
            return _Lanes(
                result.logits, self.inputs.decode_rows[: key.size], result.positions, None
            )
        else:
            forward, rows_B = self._decode_forward(key)
        return _Lanes(forward.logits, rows_B, forward.positions, None)

    def _sample_masked(
        self, logits_TV: torch.Tensor, positions_T: torch.Tensor, key: StepKey
    ) -> StepOutput:
        """Sample from the logits of a step with the masks of its rows, which are ready."""
        part, verifies = self._masked_tokens, key.tokens_per_row > 1
        inputs = self.inputs
        rows_T = inputs.decode_rows if key.phase == "decode" else inputs.sample_rows
        rows_T = mask_rows_T = rows_T[: len(positions_T) // key.tokens_per_row]
        if verifies:
            assert self.drafts is not None, "these steps were made without room for drafts"
            with operation("inputs"):
                step_N = torch.arange(key.tokens_per_row, device=rows_T.device)
                mask_rows_T = (rows_T[:, None] + self.state.token_ids.shape[0] * step_N).flatten()
                valid_BN = step_N < self.drafts.counts[: key.size, None]
                rows_T = torch.where(valid_BN, rows_T[:, None], self.state.null_row).flatten()
        tensors = self._parts.inputs(part, logits_TV, rows_T, positions_T, mask_rows_T)
        output = self._call(part, *tensors, key.full_sampler, verifies)
        return self._accepted(output, key) if verifies else output

    def _masked_tokens(
        self,
        logits_TV: torch.Tensor,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        mask_rows_T: torch.Tensor,
        full_sampler: bool,
        verifies: bool,
    ) -> StepOutput:
        """As `_sampled`, or for a verify step as `_drawn`, with the masks of these rows."""
        masks = LaneMasks(self._masks.bits, mask_rows_T)
        if not verifies:
            return self._sampled(logits_TV, rows_T, positions_T, full_sampler, masks)
        if full_sampler:
            return self._drawn(logits_TV, rows_T, positions_T, masks)
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
        lanes = self._verify_forward(key)
        if key.full_sampler:
            output = self._parts.call(self._drawn, lanes.logits, lanes.rows, lanes.positions)
        else:
            assert lanes.tokens is not None
            output = StepOutput(lanes.tokens, lanes.logits, None)
        return self._accepted(output, key)

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

    def _accepted(self, output: StepOutput, key: StepKey) -> StepOutput:
        """Accept drafts, and return the output by position."""
        shape = key.size, key.tokens_per_row
        with operation("accept"):
            tokens_BN = output.tokens.view(shape)
            self._accept(*self._drafts(key), tokens_BN)
            logits_NBV = output.logits.unflatten(0, shape).transpose(0, 1)
            if output.details is None:
                return StepOutput(tokens_BN.T.contiguous(), logits_NBV, None)
            details = output.details.by_position(*shape)
            if logits_NBV.is_cuda:
                details = details.pack()  # so that one copy transfers them to the host
        return StepOutput(details.tokens, logits_NBV, details)

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
            positions_T, token_rows_BN.flatten(), rows_B, read_blocks, tokens_per_row=n
        )
        batch = dataclasses.replace(batch, slots=torch.where(valid_BN.flatten(), batch.slots, 0))
        hidden_TD = self._forward_pass(token_ids_BN.flatten(), batch)
        logits_TV = self.model.own_logits(hidden_TD)
        tokens_T = None
        if greedy:
            with operation("greedy"):
                tokens_T = self._greedy_tokens(logits_TV)
        sampled_rows_T = torch.where(valid_BN, token_rows_BN, state.null_row).flatten()
        return _Lanes(logits_TV, sampled_rows_T, positions_T, tokens_T)

    def _drawn(
        self,
        logits_TV: torch.Tensor,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        masks: LaneMasks | None = None,
    ) -> StepOutput:
        """Draw the token after each position of a verify step.

        The sampler counts the tokens of rows with penalties, which therefore have no drafts.
        """
        with operation("sample"):
            if self.model.vocabulary is not None:
                logits_TV = self.model.vocabulary.gather(logits_TV)
            logits_TV, *own = self._apply(masks, logits_TV)
            state = self.state.sampling
            details = self._sampler.full(logits_TV, state, rows_T, positions_T + 1, *own)
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
        return self._finished(*self._prefill_forward(key), key)

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
        hidden_TD = self._forward_pass(token_ids_T, batch, *embeds)
        with operation("last_tokens"):
            if self.hidden is not None:
                self.hidden[: hidden_TD.shape[0]].copy_(hidden_TD)
            # Rows of padding have no tokens; clamp their index, which can be -1.
            last_R = (query_start_loc[1:] - 1).clamp(min=0)
            hidden_RD, positions_R = hidden_TD[last_R], positions_T[last_R]
        return self._forward_output(hidden_RD, sample_rows_R, positions_R, greedy)

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

    def _batch(
        self,
        positions_T: torch.Tensor,
        token_rows_T: torch.Tensor,
        rows_R: torch.Tensor,
        read_blocks: int,
        *,
        tokens_per_row: int | None = None,
        query_start_loc: torch.Tensor | None = None,
    ) -> RaggedBatch:
        """Return the batch of these tokens, with its write index.

        Token at position 37 of row 2, blocks of 16: it is written to slot
        `block_tables[group, 2, 37 // 16] * 16 + 37 % 16` in each layer group.
        """
        block_tables, size = self.state.block_tables, self.block_size
        with operation("begin"):
            blocks_GT = block_tables[:, token_rows_T, positions_T // size]
            slots_GT = blocks_GT.to(torch.int64) * size + positions_T % size
            rope_lengths_T = None
            if self.state.rope_lengths is not None:
                own_T = self.state.rope_lengths[token_rows_T]
                rope_lengths_T = torch.maximum(positions_T + 1, own_T)
        return RaggedBatch(
            positions=positions_T,
            slots=slots_GT,
            token_rows=token_rows_T,
            rows=rows_R,
            block_tables=block_tables,
            read_blocks=read_blocks,
            block_size=size,
            tokens_per_row=tokens_per_row,
            query_start_loc=query_start_loc,
            rope_lengths=rope_lengths_T,
        )

    def _forward_pass(
        self,
        token_ids_T: torch.Tensor,
        batch: RaggedBatch,
        embeds_TD: torch.Tensor | None = None,
        embed_mask_T: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the final hidden states `[T, hidden_size]`."""
        with operation("begin"):
            x_TD = self.model.embed(token_ids_T)
            if embeds_TD is not None and embed_mask_T is not None:
                x_TD = torch.where(embed_mask_T[:, None], embeds_TD.to(x_TD.dtype), x_TD)
        if self._masks_thread is not None and self.model.stack is not None:
            self._masks_thread.start()  # not earlier: the thread needs Python's lock to start
        return self.model.decode(x_TD, self.arena, batch)

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
