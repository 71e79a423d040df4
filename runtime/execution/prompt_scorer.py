"""Scores prompt tokens: log-probabilities after a prefill step, from its hidden states.

Prefill steps, captured or not, copy their final hidden states to a buffer. For requests with
`prompt_logprobs` the scorer reads that buffer after the step, on the same stream, and computes
logits of a few positions at a time, so that memory is bounded:

    hidden states [M, hidden_size] -> slice of tokens -> logits -> log-softmax -> next token, top k

Steps without such requests launch nothing of this. The scorer itself is never captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kernels.ops.draws import largest
from ..kernels.ops.operation import per_token
from ..kernels.triton.dependent import dependent_launch
from ..models.config import DecoderConfig
from ..models.transformers.decoder import DecoderModel
from ..sampling.reference_sampler import SampleOutput
from ..sampling_params import MAX_LOGPROBS
from .inputs import PrefillChunk
from .step_functions import on_device
from .step_key import StepOutput

__all__ = ["PromptScorer", "slice_tokens"]

MOST_SLICE_TOKENS = 64
LEAST_SLICE_TOKENS = 16


def slice_tokens(max_num_seqs: int) -> int:
    """Return the positions whose logits exist at a time.

    As many as rows, because their logits then take no more memory than sampling. Not fewer than 16,
    since every slice reads the whole head, and not more than 64, which gains little.
    """
    return min(max(max_num_seqs, LEAST_SLICE_TOKENS), MOST_SLICE_TOKENS)


class PromptScorer:
    """Hidden states of the last prefill step, and the scores computed from them."""

    def __init__(self, model: DecoderModel, next_ids: torch.Tensor, *, max_num_seqs: int) -> None:
        """Allocate buffers for prefill steps of up to M tokens.

        Args:
            model: whose head makes the logits.
            next_ids: int64 `[M]`, see `StepInputs`.
            max_num_seqs: rows of a decode step.
        """
        self._model, self._next_ids = model, next_ids
        most = len(next_ids)
        self.hidden, self.scores = self.allocate(most, model.config, model.dtype, model.device)
        """`[M + 1, hidden_size]`: the first rows are written by prefill steps. The last one never
        is: without it torch compiles a step that writes all rows separately.

        Lane t scores what follows token t of the step, NaN without a distribution. Undefined in
        lanes without a score, and in columns that no request needs."""
        self._slice = min(slice_tokens(max_num_seqs), most)
        # One shape on CUDA, so that no kernel is compiled while requests wait.
        self._pads = model.device.type == "cuda"

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        assert self.scores.packed is not None
        return self.hidden.nbytes + self.scores.packed.nbytes

    @staticmethod
    def allocate(
        tokens: int, model: DecoderConfig, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.Tensor, SampleOutput]:
        """Allocate hidden states and scores of prefill steps of up to this number of tokens."""
        best = min(MAX_LOGPROBS, model.vocab_size)
        size = SampleOutput.packed_bytes(tokens, best)
        packed = torch.zeros(size, dtype=torch.uint8, device=device)
        hidden = torch.zeros(tokens + 1, model.hidden_size, dtype=dtype, device=device)
        return hidden, SampleOutput.unpack(packed, tokens, best)

    def launch(self, chunks: Sequence[PrefillChunk]) -> StepOutput | None:
        """Score the chunks of the prefill step that was launched last, if any has scored positions.

        Returns without waiting for the device. The output has the tokens of the step as lanes, and
        their hidden states in the place of logits. It is valid until the next launch.
        """
        starts: list[int] = []
        offset = covered = num_top = 0
        for chunk in chunks:
            first, offset = offset - chunk.start, offset + len(chunk.token_ids)
            if not chunk.scored:
                continue
            num_top = max(num_top, chunk.num_top)
            stop = first + chunk.scored.stop
            for start in range(max(covered, first + chunk.scored.start), stop, self._slice):
                starts.append(min(start, len(self._next_ids) - self._slice))
                covered = start + self._slice
        if not starts:
            return None
        self.run(starts, len(self._next_ids) if self._pads else stop, num_top)
        return StepOutput(self.scores.tokens, self.hidden, self.scores)

    def run(self, starts: Sequence[int], stop: int, num_top: int) -> None:
        """Score slices of the tokens up to `stop`, with `num_top` most probable tokens each."""
        with (
            on_device(self.hidden.device),
            dependent_launch(self._model.kernels.dependent_launch),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            for start in starts:
                self._score(slice(start, min(start + self._slice, stop)), num_top)

    def run_largest_slice(self) -> None:
        """Score a whole slice of padding, which needs as much memory as scoring ever does."""
        self.run([0], self._slice, MAX_LOGPROBS)

    def _score(self, part: slice, num_top: int) -> None:
        scores, next_ids_B = self.scores, self._next_ids[part]
        logits_BV = self._model.logits(self.hidden[part]).float()
        log_mass = per_token(self._model.kernels, lambda x_BV: x_BV.logsumexp(-1))
        log_mass_B = log_mass(logits_BV)
        own_B = logits_BV.gather(1, next_ids_B[:, None])[:, 0] - log_mass_B
        scores.tokens[part] = next_ids_B
        scores.logprob[part] = torch.where(log_mass_B.isfinite(), own_B, float("nan"))
        k = min(num_top, scores.top_ids.shape[1])
        if k:
            top_logits_BK, top_ids_BK = largest(logits_BV, k)
            scores.top_logprobs[part, :k] = top_logits_BK - log_mass_B[:, None]
            scores.top_ids[part, :k] = top_ids_BK
