"""The sampling parameters of all rows as device tensors, which steps read by row index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ..errors import RequestError
from ..sampling_params import MAX_LOGIT_BIAS_ENTRIES, SamplingParams

MAX_ROW_STOP_IDS = 32
"""Stop ids that `min_tokens` can forbid in a row: the request's own and the model's."""

NUM_REALS = 6
"""Columns of `SamplingState.reals` before the biases."""
NUM_INTEGERS = 3
"""Columns of `SamplingState.integers` before the token ids."""

_IN_PROMPT = 1 << 30
"""The bit of an element of `token_counts` for tokens of the prompt."""
COUNT_MASK = _IN_PROMPT - 1
"""The bits of an element of `token_counts` for occurrences in the output."""

_MIN_DIVISOR = 1e-30
"""Smaller temperatures and repetition penalties are raised to it. It is a normal float32 (the
device may flush others to zero), and logits divided by it stay finite."""


class RowParameters(NamedTuple):
    """The values of a row of `SamplingState`, on the host."""

    reals: npt.NDArray[np.float32]
    """`[6 + 300]`."""
    integers: npt.NDArray[np.int64]
    """`[3 + 300 + 32]`."""
    token_counts: npt.NDArray[np.int32] | None
    """`[V]`; None for a row without penalties, whose counts are not used."""


@dataclass(frozen=True)
class SamplingState:
    """Sampling parameters and token counts of every row, at addresses that never change.

    R rows, `max_num_seqs` and the null row, which stays greedy. V tokens of the vocabulary.
    """

    reals: torch.Tensor
    """float32 `[R, 6 + 300]`: temperature, top_p, min_p, repetition, presence and frequency
    penalty; then the biases of the 300 token ids below."""
    integers: torch.Tensor
    """int64 `[R, 3 + 300 + 32]`: top_k (V if off), seed, first position at which stop ids may be
    drawn; then 300 ids with a logit bias (unused: token 0, bias 0) and 32 stop ids (unused: the
    first one again)."""
    token_counts: torch.Tensor
    """int32 `[R, V]`: occurrences in the output, plus 2^30 for tokens of the prompt. Rows without
    penalties neither read nor write their counts, which an earlier request may have left."""

    @classmethod
    def allocate(cls, max_num_seqs: int, vocab_size: int, device: torch.device) -> SamplingState:
        """Allocate the state of `max_num_seqs` rows and the null row, all of them greedy."""
        rows = max_num_seqs + 1
        greedy = SamplingParams(temperature=0.0).resolved()
        reals = torch.tensor(_row_reals(greedy), dtype=torch.float32).expand(rows, -1)
        integers = _row_integers(greedy, seed=0, ban_until=0, stop_ids=(), vocab_size=vocab_size)
        return cls(
            # `repeat` of a "meta" tensor (memory plan) would import much Python code of torch.
            reals=torch.empty(reals.shape, device=device).copy_(reals),
            integers=torch.empty((rows, len(integers)), dtype=torch.int64, device=device).copy_(
                torch.tensor(integers, dtype=torch.int64)
            ),
            token_counts=torch.zeros(rows, vocab_size, dtype=torch.int32, device=device),
        )

    def row_parameters(
        self,
        params: SamplingParams,
        *,
        seed: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        stop_token_ids: Sequence[int],
    ) -> RowParameters:
        """Return the values of the row of a request.

        Args:
            params: the request's sampling parameters.
            seed: selects the request's stream of random numbers, 0 to 2^63 - 1.
            prompt_ids: its prompt.
            output_ids: its output so far; not empty if it resumes after a preemption.
            stop_token_ids: every id that ends it, at most 32 of them if it has `min_tokens`.

        Raises:
            RequestError: too many stop ids, or an id outside the vocabulary.
        """
        vocab_size = self.token_counts.shape[1]
        params = params.resolved()
        params.check_vocabulary(vocab_size)
        stop_ids: tuple[int, ...] = ()
        if params.min_tokens:  # an id that the model has no logit for cannot be drawn anyway
            stop_ids = tuple(token_id for token_id in stop_token_ids if token_id < vocab_size)
        if len(stop_ids) > MAX_ROW_STOP_IDS:
            raise RequestError(
                f"min_tokens allows at most {MAX_ROW_STOP_IDS} stop token ids, the model's own "
                f"included, and there are {len(stop_ids)}: give fewer in stop_token_ids",
                field="stop_token_ids",
            )
        ban_until = len(prompt_ids) + params.min_tokens if stop_ids else 0
        integers = _row_integers(params, seed, ban_until, stop_ids, vocab_size)
        counts = None
        if params.uses_penalties:
            occurrences = torch.bincount(
                torch.tensor(output_ids, dtype=torch.int64), minlength=vocab_size
            )
            occurrences[torch.tensor(prompt_ids, dtype=torch.int64)] |= _IN_PROMPT
            counts = occurrences.to(torch.int32).numpy()
        reals = torch.tensor(_row_reals(params), dtype=torch.float32).numpy()
        return RowParameters(reals, np.array(integers, np.int64), counts)

    def store_row(self, row: int, parameters: RowParameters) -> None:
        """Assign a row: two copies to the device, three if the request uses penalties.

        State of the row's previous request has no effect afterwards. The copies are ordered on the
        current stream, so they take effect between the steps launched before and after this call.
        """
        assert 0 <= row < self.token_counts.shape[0] - 1, "the null row belongs to no request"
        if parameters.token_counts is not None:
            _copy(parameters.token_counts, self.token_counts[row])
        _copy(parameters.reals, self.reals[row])
        _copy(parameters.integers, self.integers[row])


def _biases(params: SamplingParams) -> dict[int, float]:
    """Return the biases that are not 0: kernels read the first to see whether a row has any."""
    return {token_id: bias for token_id, bias in params.logit_bias.items() if bias != 0.0}


def _row_reals(params: SamplingParams) -> list[float]:
    bias = list(_biases(params).values())
    temperature, top_p, min_p = params.temperature, params.top_p, params.min_p
    penalty = params.repetition_penalty
    assert temperature is not None, "parameters that are not resolved"
    assert top_p is not None
    assert min_p is not None
    assert penalty is not None
    return [
        max(temperature, _MIN_DIVISOR) if temperature > 0.0 else 0.0,
        top_p,
        min_p,
        max(penalty, _MIN_DIVISOR),
        params.presence_penalty,
        params.frequency_penalty,
        *bias,
        *[0.0] * (MAX_LOGIT_BIAS_ENTRIES - len(bias)),
    ]


def _row_integers(
    params: SamplingParams, seed: int, ban_until: int, stop_ids: Sequence[int], vocab_size: int
) -> list[int]:
    bias = list(_biases(params))
    spare = stop_ids[0] if stop_ids else 0
    return [
        min(params.top_k or vocab_size, vocab_size),
        seed,
        ban_until,
        *bias,
        *[0] * (MAX_LOGIT_BIAS_ENTRIES - len(bias)),
        *stop_ids,
        *[spare] * (MAX_ROW_STOP_IDS - len(stop_ids)),
    ]


def _copy(array: npt.NDArray[Any], target: torch.Tensor) -> None:
    """Copy asynchronously; the caching allocator keeps pinned memory until the copy is done."""
    host = torch.from_numpy(array)
    target.copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)
