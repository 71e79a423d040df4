"""What the steps of a model have in common: the forward pass, and sampling."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from ..kernels import RaggedBatch
from ..kernels.ops.feedback import Feedback
from ..kernels.ops.token_masks import LaneMasks, mask_logits
from ..models.decoder_model import DecoderModel
from ..models.drafters.drafter import Drafts, FollowedTokens
from ..models.sharded_vocabulary import ShardedVocabulary
from ..operation_scopes import operation
from ..sampling.reference_sampler import drafted_lanes, sample_lanes
from ..sampling.sample_output import SampleOutput
from ..sampling.samplers import SAMPLERS
from .batches import ragged_batch
from .compiled_parts import CompiledParts
from .draft_step import DraftStep
from .inputs import DraftInputs, EmbedInputs, StepInputs
from .mask_state import MaskState
from .row_state import RowState
from .step_key import StepKey, StepOutput

__all__ = ["Lanes", "MasksThread", "StepParts", "on_device"]


class Lanes(NamedTuple):
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


class StepParts(ABC):
    """The tensors of steps, and the parts that several kinds of steps have."""

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
        if compiled and model.stack is None and model.kernels.sampler == "triton":
            self._sampler = SAMPLERS["torch"]  # torch.compile cannot trace launches of Triton
        self._compile_parts(compiled)

    @abstractmethod
    def _compile_parts(self, compiled: bool) -> None:
        """Add the methods that are to be compiled to `_parts`; `compiled`: see `__init__`."""

    def _greedy(self, part: Callable[..., object], key: StepKey) -> bool:
        """Whether a part samples greedy tokens; compiled ones always do, to be one version."""
        later = key.full_sampler or key.masked or key.part == "forward"
        return self._parts.compiles(part) or not later

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

    def _call(self, part: Callable[..., StepOutput], *arguments: Any) -> StepOutput:
        output: StepOutput = self._parts.call(part, *arguments)
        if output.details is None or not output.logits.is_cuda:
            return output
        details = output.details.pack()  # so that one copy transfers them to the host
        return StepOutput(details.tokens, output.logits, details)

    def _masked_logits(self, logits_BV: torch.Tensor, mask_rows_B: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary with the masks of their lanes."""
        with operation("mask"):
            return mask_logits(logits_BV, LaneMasks(self._masks.bits, mask_rows_B))

    def _apply(
        self, logits_BV: torch.Tensor, mask_rows_B: torch.Tensor | None
    ) -> tuple[torch.Tensor, LaneMasks | None]:
        """Return the logits of the whole vocabulary, and the masks that the sampler is to apply.

        Samplers without masks get masked logits. So they have the same compiled code in steps with
        masks and in others.
        """
        logits_BV = self._gathered(logits_BV)
        if mask_rows_B is None:
            return logits_BV, None
        if self._sampler.takes_masks:
            return logits_BV, LaneMasks(self._masks.bits, mask_rows_B)
        (mask_rows_B,) = self._parts.inputs(self._masked_logits, mask_rows_B)
        masked_BV: torch.Tensor = self._parts.call(self._masked_logits, logits_BV, mask_rows_B)
        return masked_BV, None

    @property
    def _masks(self) -> MaskState:
        assert self.state.masks is not None, "these steps were made without token masks"
        return self.state.masks

    def _wait_for_masks(self) -> None:
        if self._masks_thread is not None:
            self._masks_thread.wait()

    def _sampled(
        self,
        logits_BV: torch.Tensor,
        rows_B: torch.Tensor,
        positions_B: torch.Tensor,
        masks: LaneMasks | None = None,
    ) -> StepOutput:
        """Draw the token after each position, and store it as the row's newest."""
        sampler, state, own = self._sampler, self.state, () if masks is None else (masks,)
        feedback = Feedback(rows_B, positions_B, state.token_ids, state.positions)
        with operation("sample"):
            if sampler.full_step is not None:
                details = sampler.full_step(logits_BV, state.sampling, feedback, *own)
            elif self._parts.compiles(self._drawn_lanes):
                lanes = drafted_lanes(rows_B.new_zeros(len(rows_B), 1))
                details = self._parts.call(
                    self._drawn_lanes, logits_BV, rows_B, positions_B, *lanes
                )
                feedback.store(details.tokens)
            else:
                details = sampler.full(logits_BV, state.sampling, rows_B, positions_B + 1, *own)
                feedback.store(details.tokens)
            return StepOutput(details.tokens, logits_BV, details)

    def _greedy_step(
        self,
        logits_BV: torch.Tensor,
        rows_B: torch.Tensor,
        positions_B: torch.Tensor,
        vocabulary: ShardedVocabulary | None,
        masks: LaneMasks | None = None,
    ) -> torch.Tensor:
        """Take the most probable token after each position, and store it as the row's newest.

        The logits are those of the whole vocabulary, or with `vocabulary` the rank's own.
        """
        fused, own = self._sampler.greedy_step, () if masks is None else (masks,)
        feedback = Feedback(rows_B, positions_B, self.state.token_ids, self.state.positions)
        with operation("greedy"):
            if fused is not None and vocabulary is None:
                return fused(logits_BV, feedback, *own)
            tokens_B = self._greedy_tokens(logits_BV, vocabulary, *own)
            feedback.store(tokens_B)
            return tokens_B

    def _gathered(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Return the logits of the whole vocabulary, as masks and the full sampler need them."""
        vocabulary = self.model.vocabulary
        if vocabulary is None:
            return logits_BV
        with operation("sample"):
            return vocabulary.gather(logits_BV)

    def _greedy_tokens(
        self,
        logits_BV: torch.Tensor,
        vocabulary: ShardedVocabulary | None,
        *masks: LaneMasks,
    ) -> torch.Tensor:
        """Return the most probable tokens, int64 `[B]`, of logits or of a rank's part of them."""
        sample = self._sampler.greedy
        if vocabulary is None:
            return sample(logits_BV, *masks)
        return vocabulary.greedy(logits_BV, sample)

    def _drawn(
        self,
        logits_TV: torch.Tensor,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        token_ids_BN: torch.Tensor,
        masks: LaneMasks | None = None,
    ) -> StepOutput:
        """Draw the token after each of the tokens of a verify step."""
        state, own = self.state.sampling, () if masks is None else (masks,)
        with operation("sample"):
            if self._parts.compiles(self._drawn_lanes):
                lanes = logits_TV, rows_T, positions_T, *drafted_lanes(token_ids_BN)
                details = self._parts.call(self._drawn_lanes, *lanes)
            else:
                details = self._sampler.drafted(
                    logits_TV, state, rows_T, positions_T + 1, token_ids_BN, *own
                )
            return StepOutput(details.tokens, logits_TV, details)

    def _drawn_lanes(
        self,
        logits_TV: torch.Tensor,
        rows_T: torch.Tensor,
        positions_T: torch.Tensor,
        tokens_TN: torch.Tensor,
        place_T: torch.Tensor,
    ) -> SampleOutput:
        """Compiled code of the full sampler that steps with and without drafts share."""
        lanes = rows_T, positions_T + 1, tokens_TN, place_T
        return sample_lanes(logits_TV, self.state.sampling, *lanes)

    def _largest(
        self,
        logits_TV: torch.Tensor,
        masks: LaneMasks | None = None,
        vocabulary: ShardedVocabulary | None = None,
    ) -> StepOutput:
        """Take the most probable token of each lane, of logits or of a rank's part of them."""
        own = () if masks is None else (masks,)
        with operation("greedy"):
            return StepOutput(self._greedy_tokens(logits_TV, vocabulary, *own), logits_TV, None)

    @property
    def ragged(self) -> bool:
        """Whether decode and verify steps run on the C++ operators, without padding between rows:
        their sizes are not captured."""
        kernels = self.model.kernels
        return self.model.stack is not None and kernels.library is not None

    def _proposed(
        self, key: StepKey, tokens: FollowedTokens, first_B: torch.Tensor
    ) -> Drafts | None:
        """Let the drafter continue the rows of a step, if it is to; `first_B`: their first tokens.

        The rows have advanced already. They keep the drafts.
        """
        if not key.drafts:
            return None
        assert self._drafting is not None, "these steps were made without a drafter"
        assert self.drafts is not None, "a drafter needs room for its drafts"
        rows_B, stops_B = tokens.batch.rows, self.drafts.stops[: key.size]
        return self._drafting.propose(key, tokens, rows_B, first_B, stops_B)

    def close(self) -> None:
        """Release compiled code, which references this object."""
        self._parts.close()


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a CUDA device current, because Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
