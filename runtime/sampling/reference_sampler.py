"""The reference sampler, in plain torch, that can be compiled and captured.

Parameters are device state that is read by row index. Shapes are static and nothing waits for the
device. Dimensions, as suffixes of names:

    B  rows of a step           R  rows of the state, max_num_seqs + 1; the last one is the null row
    V  vocabulary

`sample_full` works in this order:

    log-probabilities of the model's own logits, before anything below changes them
    logit bias -> min_tokens -> repetition penalty -> presence and frequency penalty
    temperature 0: argmax
    otherwise: temperature -> top-k -> top-p -> min-p -> draw

Hugging Face transformers has the same order. vLLM applies min-p before top-k and top-p, so there
top-p counts the probability of fewer tokens.

A row whose logits are not a distribution (NaN, +inf or nothing but -inf) gets `NON_FINITE` instead
of a token, which is not counted. Single logits of -inf are tokens of probability 0.

Top-k, top-p and min-p become one threshold: a token is kept if it is at least that probable. So
tokens of equal probability are kept or dropped together, and a top-k may keep more than k of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..kernels.ops.batch import NON_FINITE
from ..kernels.ops.draws import bisect_thresholds, draw, largest, uniform
from ..sampling_params import MAX_LOGPROBS
from .sampling_state import (
    COUNT_MASK,
    MAX_ROW_STOP_IDS,
    NUM_INTEGERS,
    NUM_REALS,
    SamplingState,
)


@dataclass(frozen=True)
class SampleOutput:
    """What a step drew, on the device. B rows of a step, V tokens of the vocabulary.

    Log-probabilities are of the model's own distribution, the log-softmax of its logits in
    float32. Those of a row whose token is `NON_FINITE` are undefined.
    """

    tokens: torch.Tensor
    """int64 `[B]`: ids of the vocabulary, or `NON_FINITE`."""
    logprob: torch.Tensor
    """float32 `[B]`: log-probability of `tokens`."""
    top_logprobs: torch.Tensor
    """float32 `[B, min(20, V)]`: the highest log-probabilities, highest first."""
    top_ids: torch.Tensor
    """int64 `[B, min(20, V)]`: their tokens."""
    packed: torch.Tensor | None = None
    """uint8 `[packed_bytes]`: the buffer that the four are views of; None: separate tensors."""

    @staticmethod
    def packed_bytes(rows: int, tops: int) -> int:
        """Return the bytes of the four tensors, with `tops` top log-probabilities a row."""
        return -(-rows * (1 + tops) * 12 // 8) * 8

    @classmethod
    def unpack(cls, packed: torch.Tensor, rows: int, tops: int) -> SampleOutput:
        """Return the four as views of uint8 `[packed_bytes]`, or `[1 + k, packed_bytes]`."""
        views, at = [], 0
        for width, dtype in (
            (1, torch.int64),
            (tops, torch.int64),
            (1, torch.float32),
            (tops, torch.float32),
        ):
            end = at + rows * width * dtype.itemsize
            views.append(packed[..., at:end].view(dtype).unflatten(-1, (rows, width)))
            at = end
        tokens, top_ids, logprob, top_logprobs = views
        return cls(tokens.squeeze(-1), logprob.squeeze(-1), top_logprobs, top_ids, packed)

    def pack(self) -> torch.Tensor:
        """Return `packed`, or a packed copy."""
        if self.packed is not None:
            return self.packed
        rows, tops = self.top_ids.shape[-2:]
        parts = (self.tokens, self.top_ids.flatten(-2), self.logprob, self.top_logprobs.flatten(-2))
        as_bytes = [part.contiguous().view(torch.uint8) for part in parts]
        missing = self.packed_bytes(rows, tops) - sum(part.shape[-1] for part in as_bytes)
        return torch.cat((*as_bytes, as_bytes[0][..., :missing]), dim=-1)

    def at(self, lanes: torch.Tensor | int) -> SampleOutput:
        """Return the output of some lanes, in the shape of `lanes`, int64, or at one position."""
        columns = self.tokens, self.logprob, self.top_logprobs, self.top_ids
        return SampleOutput(*(column[lanes] for column in columns))


def sample_greedy(logits_BV: torch.Tensor) -> torch.Tensor:
    """Return the most probable token of each row, int64 `[B]`; of equal ones the lowest id.

    `NON_FINITE` where the logits hold NaN or +inf, or nothing but -inf.
    """
    best_B = logits_BV.argmax(-1)  # NaN counts as the largest
    sound_B = logits_BV.gather(1, best_B[:, None])[:, 0].isfinite()
    return torch.where(sound_B, best_B, NON_FINITE)


def sample_full(
    logits_BV: torch.Tensor,
    state: SamplingState,
    rows_B: torch.Tensor,
    positions_B: torch.Tensor,
) -> SampleOutput:
    """Draw a token for each row with the row's sampling parameters, and count it.

    `NON_FINITE` where the logits are not a distribution, before or after the parameters apply. A
    token depends on the logits, the state row and the position of its own row only.

    Args:
        logits_BV: the model's logits, of any floating dtype.
        state: parameters and counts of all rows; `token_counts` is updated in place.
        rows_B: int64, state row of each row. One with penalties may occur only once.
        positions_B: int64, the position that the drawn token takes in its sequence: the length of
            the prompt for the first one.
    """
    output, counted_B = _sample(logits_BV, state, rows_B, positions_B, state.token_counts[rows_B])
    state.token_counts.index_put_((rows_B, output.tokens.clamp(min=0)), counted_B, accumulate=True)
    return output


def sample_drafted(
    logits_TV: torch.Tensor,
    state: SamplingState,
    rows_T: torch.Tensor,
    positions_T: torch.Tensor,
    token_ids_BN: torch.Tensor,
) -> SampleOutput:
    """Draw a token after each of the tokens `[B, N]` of a verify step, as `sample_full` one by one.

    For the penalties of a row each draft counts where it precedes, and then each token up to the
    first that differs from the draft in its place. Tokens after that one are arbitrary.

    T = B * N, row by row. Lanes of padding have the null row, and no penalties.
    """
    return sample_lanes(logits_TV, state, rows_T, positions_T, *drafted_lanes(token_ids_BN))


def drafted_lanes(token_ids_BN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of each lane's row, `[B * N, max(N, 2)]`, and the lane's place among them.

    Compiled code is specific to sizes of 1, so a row of one token gets a second, which no lane
    reads.
    """
    rows, n = token_ids_BN.shape
    place_T = torch.arange(n, device=token_ids_BN.device).repeat(rows)
    if n == 1:
        return torch.nn.functional.pad(token_ids_BN, (0, 1)), place_T
    # Compiled code is specific to strides, which a view of a single row has of its own.
    tokens_TN = token_ids_BN[:, None].expand(-1, n, -1).reshape(rows * n, n).contiguous()
    return tokens_TN, place_T


def sample_lanes(
    logits_TV: torch.Tensor,
    state: SamplingState,
    rows_T: torch.Tensor,
    positions_T: torch.Tensor,
    tokens_TN: torch.Tensor,
    place_T: torch.Tensor,
) -> SampleOutput:
    """`sample_drafted` with the results of `drafted_lanes`; `sample_full` if all places are 0.

    No size is the number of rows, so compiled code serves any number of them, one included.
    """
    device = rows_T.device
    place_N = torch.arange(tokens_TN.shape[1], device=device)
    # The newest token, at place 0, has been counted.
    precede_TN = (place_N > 0) & (place_N <= place_T[:, None])
    counts_TV = state.token_counts[rows_T].scatter_add(1, tokens_TN, precede_TN.to(torch.int32))
    output, counted_T = _sample(logits_TV, state, rows_T, positions_T, counts_TV)
    first_T = torch.arange(len(rows_T), device=device) - place_T
    # In place of a token, the lane before it has drawn one.
    drawn_TN = output.tokens[(first_T[:, None] + place_N - 1).clamp(min=0)]
    accepted_T = ((drawn_TN == tokens_TN) | ~precede_TN).all(1)
    counted_T = counted_T * accepted_T.to(torch.int32)
    state.token_counts.index_put_((rows_T, output.tokens.clamp(min=0)), counted_T, accumulate=True)
    return output


def _sample(
    logits_BV: torch.Tensor,
    state: SamplingState,
    rows_B: torch.Tensor,
    positions_B: torch.Tensor,
    counts_BV: torch.Tensor,
) -> tuple[SampleOutput, torch.Tensor]:
    """Draw with these token counts; also return, int32 `[B]`, what the drawn token adds to them."""
    raw_BV = logits_BV.float()
    log_mass_B = raw_BV.logsumexp(-1)
    top_logits, top_ids = largest(raw_BV, min(MAX_LOGPROBS, raw_BV.shape[1]))

    reals, integers = state.reals[rows_B], state.integers[rows_B]
    temperature_B, top_p_B, min_p_B, repetition_B, presence_B, frequency_B = reals[
        :, :NUM_REALS
    ].unbind(1)
    top_k_B, seed_B, ban_until_B = integers[:, :NUM_INTEGERS].unbind(1)

    ban_B = torch.where(positions_B < ban_until_B, float("-inf"), 0.0)
    added = torch.cat((reals[:, NUM_REALS:], ban_B[:, None].expand(-1, MAX_ROW_STOP_IDS)), dim=1)
    wanted_BV = raw_BV.scatter_add(1, integers[:, NUM_INTEGERS:], added)

    penalised_B = (repetition_B != 1.0) | (presence_B != 0.0) | (frequency_B != 0.0)
    wanted_BV = torch.where(
        penalised_B[:, None],
        _penalise(wanted_BV, counts_BV, repetition_B, presence_B, frequency_B),
        wanted_BV,
    )

    # Relative to the best token, which has weight exactly 1, and subtracted before the division, so
    # that no temperature overflows.
    greedy_B = temperature_B == 0.0
    divisor_B = torch.where(greedy_B, 1.0, temperature_B)
    best_B = wanted_BV.amax(-1)
    weights_BV = ((wanted_BV - best_B[:, None]) / divisor_B[:, None]).exp()
    threshold_B = torch.maximum(bisect_thresholds(weights_BV, top_k_B, top_p_B), min_p_B)
    kept_BV = torch.where(weights_BV >= threshold_B[:, None], weights_BV, 0.0)
    drawn_B = draw(kept_BV, uniform(seed_B, positions_B))
    ids_B = torch.where(greedy_B, wanted_BV.argmax(-1), drawn_B)

    sound_B = log_mass_B.isfinite() & best_B.isfinite()
    counted_B = (penalised_B & sound_B).to(torch.int32)
    output = SampleOutput(
        tokens=torch.where(sound_B, ids_B, NON_FINITE),
        logprob=raw_BV.gather(1, ids_B[:, None])[:, 0] - log_mass_B,
        top_logprobs=top_logits - log_mass_B[:, None],
        top_ids=top_ids,
    )
    return output, counted_B


def _penalise(
    logits_BV: torch.Tensor,
    counts_BV: torch.Tensor,
    repetition_B: torch.Tensor,
    presence_B: torch.Tensor,
    frequency_B: torch.Tensor,
) -> torch.Tensor:
    """Apply the penalties to `[B, V]`.

    Repetition: Keskar et al. 2019 (arXiv 1909.05858, section 4.1), with the case of negative logits
    that transformers adds in `RepetitionPenaltyLogitsProcessor`. Presence and frequency: as the
    OpenAI API defines them, over the output alone.
    """
    repetition = repetition_B[:, None]
    divided = torch.where(logits_BV > 0, logits_BV / repetition, logits_BV * repetition)
    logits_BV = torch.where(counts_BV != 0, divided, logits_BV)
    outputs_BV = counts_BV & COUNT_MASK
    present_BV = (outputs_BV > 0).float()
    return logits_BV - presence_B[:, None] * present_BV - frequency_B[:, None] * outputs_BV.float()
