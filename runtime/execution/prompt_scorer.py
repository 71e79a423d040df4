"""Scores prompt tokens: log-probabilities after a prefill step, from its hidden states.

Prefill steps, captured or not, copy their final hidden states to a buffer. For requests with
`prompt_logprobs` the scorer reads that buffer after the step, on the same stream, and computes
logits of a few positions at a time, so that memory is bounded:

    hidden states [M, hidden_size] -> slice of tokens -> logits -> log-softmax -> next token, top k

Steps without such requests launch nothing of this. The scorer itself is never captured.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from ...graphs.buffers import StaticBuffers, TensorSpec
from ..kernels.ops.draws import largest
from ..kernels.triton.dependent import dependent_launch
from ..logprobs import Float32Array, Int64Array
from ..models.modules import each_token
from ..models.transformers.decoder import DecoderModel
from ..request import Request
from ..sampling_params import MAX_LOGPROBS
from ..scheduling.plan import RowSpan
from .rank_commands import Command, CommandSender
from .step_functions import on_device

__all__ = ["LaunchedScores", "PromptScorer", "Score", "ScoreArrays", "ScoreInputs", "slice_tokens"]

A = TypeVar("A", torch.Tensor, npt.NDArray[np.int64])

MOST_SLICE_TOKENS = 64
LEAST_SLICE_TOKENS = 16


def slice_tokens(max_num_seqs: int) -> int:
    """Return the positions whose logits exist at a time.

    As many as rows, because their logits then take no more memory than sampling. Not fewer than 16,
    since every slice reads the whole head, and not more than 64, which gains little.
    """
    return min(max(max_num_seqs, LEAST_SLICE_TOKENS), MOST_SLICE_TOKENS)


@dataclass(frozen=True)
class ScoreInputs(Generic[A]):
    """The scored tokens of a prefill step. M: maximum tokens of one."""

    tokens: A
    """int64 `[M]`: index of each of them in the step; 0 for padding."""
    next_ids: A
    """int64 `[M]`: the token that follows it in its prompt."""

    @staticmethod
    def layout(*, prefill_tokens: int) -> dict[str, TensorSpec]:
        """Return shape and initial value of every field."""
        return dict.fromkeys(("tokens", "next_ids"), TensorSpec((prefill_tokens,), torch.int64, 0))


@dataclass(frozen=True)
class ScoreArrays:
    """Scores of M tokens, on the device or on the host. k = min(20, vocab_size)."""

    logprobs: torch.Tensor
    """float32 `[M]`: log-probability of the next token; NaN without a distribution."""
    top_logprobs: torch.Tensor
    """float32 `[M, k]`: the highest ones; undefined in columns that no request needs."""
    top_ids: torch.Tensor
    """int64 `[M, k]`: their tokens."""

    @classmethod
    def allocate(
        cls, tokens: int, best: int, device: torch.device | str, *, pinned: bool = False
    ) -> ScoreArrays:
        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device, pin_memory=pinned)

        return cls(empty(tokens), empty(tokens, best), empty(tokens, best, dtype=torch.int64))

    @staticmethod
    def bytes_for(tokens: int, best: int) -> int:
        return tokens * (4 + 12 * best)

    def copy_async(self, source: ScoreArrays, count: int) -> None:
        """Issue the copies of the first `count` tokens, which are contiguous."""
        for name in ("logprobs", "top_logprobs", "top_ids"):
            getattr(self, name)[:count].copy_(getattr(source, name)[:count], non_blocking=True)


@dataclass(frozen=True, slots=True)
class LaunchedScores:
    """Scores of a step in flight: the chunks that they belong to, and their memory on the host."""

    chunks: Sequence[RowSpan]
    """Chunks with scored positions, in the order of the scores."""
    values: ScoreArrays

    def read(self) -> Iterable[Score]:
        """Yield the scores of each chunk, once they have arrived. Copy what must last."""
        logprobs, ids = self.values.logprobs.numpy(), self.values.top_ids.numpy()
        tops = self.values.top_logprobs.numpy()
        end = 0
        for chunk in self.chunks:
            begin, end = end, end + len(chunk.scored)
            yield chunk.request, chunk.scored, logprobs[begin:end], ids[begin:end], tops[begin:end]


Score = tuple[Request, range, Float32Array, Int64Array, Float32Array]
"""Request, scored positions, log-probabilities `[n]`, top tokens `[n, k]` and theirs `[n, k]`."""


class PromptScorer:
    """Hidden states of the last prefill step, and the scores computed from them."""

    def __init__(
        self,
        model: DecoderModel,
        *,
        prefill_tokens: int,
        max_num_seqs: int,
        host_sets: int,
        commands: CommandSender | None = None,
    ) -> None:
        """Allocate buffers for prefill steps of up to `prefill_tokens`.

        Args:
            model: whose head makes the logits.
            prefill_tokens: maximum tokens of a prefill step.
            max_num_seqs: rows of a decode step.
            host_sets: steps whose scores are kept on the host at a time; 0 if the device is the
                host.
            commands: sends inputs and runs to the other ranks of a tensor-parallel group.
        """
        self._model = model
        self._commands = commands
        device, best = model.device, min(MAX_LOGPROBS, model.config.vocab_size)
        hidden = (prefill_tokens + 1, model.config.hidden_size)
        self.hidden = torch.zeros(hidden, dtype=model.dtype, device=device)
        """`[M + 1, hidden_size]`: the first rows are written by prefill steps. The last one never
        is: without it torch compiles a step that writes all rows separately."""
        self.inputs = StaticBuffers.allocate(
            ScoreInputs[torch.Tensor], ScoreInputs.layout(prefill_tokens=prefill_tokens), device
        )
        self._arrays = self.inputs.arrays(ScoreInputs[npt.NDArray[np.int64]])
        self._scores = ScoreArrays.allocate(prefill_tokens, best, device)
        pinned = device.type == "cuda"
        self._host = [
            ScoreArrays.allocate(prefill_tokens, best, "cpu", pinned=pinned)
            for _ in range(host_sets)
        ]
        self._slice = min(slice_tokens(max_num_seqs), prefill_tokens)
        # One shape on CUDA, so that no kernel is compiled while requests wait.
        self._pads = device.type == "cuda"

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        tokens, best = self._scores.top_ids.shape
        return self.hidden.nbytes + self.inputs.nbytes + ScoreArrays.bytes_for(tokens, best)

    @property
    def host_nbytes(self) -> int:
        """Bytes of host buffers for an asynchronous device."""
        tokens, best = self._scores.top_ids.shape
        return self.inputs.nbytes + len(self._host) * ScoreArrays.bytes_for(tokens, best)

    @staticmethod
    def bytes_for(
        prefill_tokens: int, hidden_size: int, vocab_size: int, dtype: torch.dtype
    ) -> int:
        """Bytes on the device, without `inputs`."""
        best = min(MAX_LOGPROBS, vocab_size)
        hidden = (prefill_tokens + 1) * hidden_size * dtype.itemsize
        return hidden + ScoreArrays.bytes_for(prefill_tokens, best)

    @staticmethod
    def host_bytes_for(prefill_tokens: int, vocab_size: int, host_sets: int) -> int:
        """Bytes of host buffers for an asynchronous device, without the mirror of `inputs`."""
        return host_sets * ScoreArrays.bytes_for(prefill_tokens, min(MAX_LOGPROBS, vocab_size))

    def addresses(self) -> dict[str, int]:
        """Return the device address of every static tensor."""
        inputs = {f"scores.{k}": v for k, v in self.inputs.addresses().items()}
        return {"scores.hidden": self.hidden.data_ptr(), **inputs}

    def write(self, chunks: Sequence[RowSpan]) -> None:
        """Copy the inputs for the chunks of the next prefill step to the device, if any scores.

        Before the step is launched: the mirror is then free again once earlier steps have run.
        """
        if not any(chunk.scored for chunk in chunks):
            return
        self.inputs.begin_write()
        arrays, end, first = self._arrays, 0, 0
        for chunk in chunks:
            scored = chunk.scored
            begin, end = end, end + len(scored)
            at = first + scored.start - chunk.start
            arrays.tokens[begin:end] = np.arange(at, at + len(scored))
            arrays.next_ids[begin:end] = chunk.request.tokens(scored.start + 1, scored.stop + 1)
            first += chunk.count
        padded = min(-(-end // self._slice) * self._slice, len(arrays.tokens))
        arrays.tokens[end:padded] = 0
        arrays.next_ids[end:padded] = 0
        if self._commands is not None:
            self._commands.inputs("scores", arrays, {"tokens": padded, "next_ids": padded})
        self.inputs.copy_to_device()

    def launch(self, number: int, chunks: Sequence[RowSpan]) -> LaunchedScores | None:
        """Score the chunks of the prefill step `number`, which has been launched, if any does.

        Returns without waiting for the device. The scores are valid until the launch of step
        `number + host_sets`.
        """
        scored = [chunk for chunk in chunks if chunk.scored]
        if not scored:
            return None
        count = sum(len(chunk.scored) for chunk in scored)
        self.run(count, max(_num_top(chunk.request) for chunk in scored))
        if not self._host:
            return LaunchedScores(scored, self._scores)
        host = self._host[number % len(self._host)]
        host.copy_async(self._scores, count)
        return LaunchedScores(scored, host)

    def run(self, count: int, num_top: int) -> None:
        """Score the first `count` of `inputs`, with `num_top` most probable tokens each.

        On all ranks of a tensor-parallel group.
        """
        if self._commands is not None:
            self._commands.call(Command.SCORE, count, num_top, wake=True)
        with (
            on_device(self.hidden.device),
            dependent_launch(self._model.kernels.dependent_launch),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            most = self._scores.logprobs.shape[0]
            for start in range(0, count, self._slice):
                end = start + self._slice if self._pads else count
                self._score(slice(start, min(start + self._slice, end, most)), num_top)

    def run_largest_slice(self) -> None:
        """Score a whole slice of padding, which needs as much memory as scoring ever does."""
        self.run(self._slice, MAX_LOGPROBS)

    def _score(self, part: slice, num_top: int) -> None:
        inputs, scores = self.inputs.device, self._scores
        logits_BV = self._model.logits(self.hidden[inputs.tokens[part]]).float()
        log_mass = each_token(self._model.kernels, lambda x_BV: x_BV.logsumexp(-1))
        log_mass_B = log_mass(logits_BV)
        own_B = logits_BV.gather(1, inputs.next_ids[part, None])[:, 0] - log_mass_B
        scores.logprobs[part] = torch.where(log_mass_B.isfinite(), own_B, float("nan"))
        k = min(num_top, scores.top_ids.shape[1])
        if k:
            top_logits_BK, top_ids_BK = largest(logits_BV, k)
            scores.top_logprobs[part, :k] = top_logits_BK - log_mass_B[:, None]
            scores.top_ids[part, :k] = top_ids_BK


def _num_top(request: Request) -> int:
    assert request.prompt_logprobs is not None, "only such requests have scored positions"
    return request.prompt_logprobs.num_top
