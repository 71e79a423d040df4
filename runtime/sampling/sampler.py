"""Sampling that can be compiled and captured: what rows ask for is device state, read by row index.

Shapes are static and nothing waits for the device. Dimensions, as suffixes of names:

    B  lanes of a step          R  rows of the state, max_num_seqs + 1; the last one is the null row
    V  vocabulary

`sample_full` works in this order:

    log-probabilities of the model's own logits, before anything below changes them
    logit bias -> min_tokens -> repetition penalty -> presence and frequency penalty
    temperature 0: argmax
    otherwise: temperature -> top-k -> top-p -> min-p -> draw

Hugging Face transformers has the same order. vLLM applies min-p before top-k and top-p, so there
top-p counts the probability of fewer tokens.

A lane whose logits are not a distribution (NaN, +inf or nothing but -inf) gets `NON_FINITE` instead
of a token, and nothing is counted for it. Single logits of -inf are tokens of probability 0.

Top-k, top-p and min-p become one threshold: a token is kept if it is at least that probable. So
tokens of equal probability are kept or dropped together, and a top-k may keep more than k of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from ..errors import RequestError
from ..kernels.choice import SamplerName
from ..kernels.cpu.sampling import fused_full, fused_greedy
from ..kernels.ops.draws import draw, largest, uniform
from ..kernels.ops.feedback import NON_FINITE, Feedback
from ..kernels.ops.thresholds import bisect_thresholds
from ..sampling_params import MAX_LOGIT_BIAS_ENTRIES, MAX_LOGPROBS, SamplingParams

__all__ = [
    "SAMPLERS",
    "SampleOutput",
    "Sampler",
    "SamplingState",
    "fused_sampler",
    "sample_full",
    "sample_greedy",
    "torch_sampler",
    "triton_sampler",
]

MAX_ROW_STOP_IDS = 32
"""Stop ids that `min_tokens` can forbid in a row: the request's own and those of its model."""

# Columns of `SamplingState.reals` and `.integers` before the bias values and the token ids.
_NUM_REALS = 6
_NUM_INTEGERS = 3

# Temperatures and repetition penalties below this are raised to it. It is a normal float32 (the
# device may flush others to zero), and logits divided by it stay finite.
_MIN_DIVISOR = 1e-30

# An element of `token_counts`: occurrences in the output, and a bit for tokens of the prompt.
_IN_PROMPT = 1 << 30
_COUNT_MASK = _IN_PROMPT - 1


@dataclass(frozen=True)
class SampleOutput:
    """What a step drew, on the device.

    Log-probabilities are those of the model's own distribution, the log-softmax of its logits in
    float32. Those of a lane whose token is `NON_FINITE` mean nothing.
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
    def packed_bytes(lanes: int, tops: int) -> int:
        """Bytes of the four of `lanes` lanes with `tops` highest log-probabilities each."""
        return -(-lanes * (1 + tops) * 12 // 8) * 8

    @classmethod
    def unpack(cls, packed: torch.Tensor, lanes: int, tops: int) -> SampleOutput:
        """Return the four as views of uint8 `[packed_bytes]`, or `[steps, packed_bytes]`."""
        views, at = [], 0
        for width, dtype in (
            (1, torch.int64),
            (tops, torch.int64),
            (1, torch.float32),
            (tops, torch.float32),
        ):
            end = at + lanes * width * dtype.itemsize
            views.append(packed[..., at:end].view(dtype).unflatten(-1, (lanes, width)))
            at = end
        tokens, top_ids, logprob, top_logprobs = views
        return cls(tokens.squeeze(-1), logprob.squeeze(-1), top_logprobs, top_ids, packed)

    def pack(self) -> SampleOutput:
        """Return itself if it is `packed`, else a packed copy."""
        if self.packed is not None:
            return self
        lanes, tops = self.top_ids.shape[-2:]
        parts = (self.tokens, self.top_ids.flatten(-2), self.logprob, self.top_logprobs.flatten(-2))
        as_bytes = [part.contiguous().view(torch.uint8) for part in parts]
        missing = self.packed_bytes(lanes, tops) - sum(part.shape[-1] for part in as_bytes)
        packed = torch.cat((*as_bytes, as_bytes[0][..., :missing]), dim=-1)
        return SampleOutput.unpack(packed, lanes, tops)

    def copy_(self, source: SampleOutput) -> None:
        """Copy tensor by tensor, without waiting for the device."""
        for own, other in zip(self._four(), source._four(), strict=True):
            own.copy_(other, non_blocking=True)

    @classmethod
    def stack(cls, steps: Sequence[SampleOutput]) -> SampleOutput:
        """Return what several steps drew, with a dimension of steps before all others."""
        packed = [step.packed for step in steps if step.packed is not None]
        if len(packed) == len(steps):
            return cls.unpack(torch.stack(packed), *steps[0].top_ids.shape)
        return cls(*(torch.stack(column) for column in zip(*map(cls._four, steps), strict=True)))

    def unbind(self) -> list[SampleOutput]:
        """Return what each of the stacked steps drew, as views."""
        columns = zip(*(tensor.unbind() for tensor in self._four()), strict=True)
        return [SampleOutput(*column) for column in columns]

    def _four(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.tokens, self.logprob, self.top_logprobs, self.top_ids


@dataclass(frozen=True)
class SamplingState:
    """Sampling parameters and token counts of every row, at addresses that never change.

    The null row is greedy and stays as `allocate` made it.
    """

    reals: torch.Tensor
    """float32 `[R, 6 + 300]`: temperature, top_p, min_p, repetition, presence and frequency
    penalty; then what is added to the logits of the 300 ids below."""
    integers: torch.Tensor
    """int64 `[R, 3 + 300 + 32]`: top_k (V if off), seed, first position at which stop ids may be
    drawn; then 300 ids with a logit bias (unused: token 0, bias 0) and 32 stop ids (unused: a
    repetition of another one)."""
    token_counts: torch.Tensor
    """int32 `[R, V]`: occurrences in the output, plus 2^30 for tokens of the prompt. A row without
    penalties neither heeds nor changes its counts: they are of whoever needed them last."""

    @classmethod
    def allocate(cls, max_num_seqs: int, vocab_size: int, device: torch.device) -> SamplingState:
        """Allocate the state of `max_num_seqs` rows and the null row, all of them greedy."""
        rows = max_num_seqs + 1
        greedy = SamplingParams(temperature=0.0)
        reals = torch.tensor(_row_reals(greedy), dtype=torch.float32, device=device)
        integers = _row_integers(greedy, seed=0, ban_until=0, stop_ids=(), vocab_size=vocab_size)
        return cls(
            reals=reals.repeat(rows, 1),
            integers=torch.tensor(integers, dtype=torch.int64, device=device).repeat(rows, 1),
            token_counts=torch.zeros(rows, vocab_size, dtype=torch.int32, device=device),
        )

    @staticmethod
    def bytes_for(max_num_seqs: int, vocab_size: int) -> int:
        """Bytes that `allocate` takes."""
        reals = 4 * (_NUM_REALS + MAX_LOGIT_BIAS_ENTRIES)
        integers = 8 * (_NUM_INTEGERS + MAX_LOGIT_BIAS_ENTRIES + MAX_ROW_STOP_IDS)
        return (max_num_seqs + 1) * (reals + integers + 4 * vocab_size)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(getattr(self, field.name).nbytes for field in fields(self))

    def count(
        self, rows_B: torch.Tensor, tokens_B: torch.Tensor, times: int | torch.Tensor
    ) -> None:
        """Count tokens, int64 `[B]`, in the output of their rows, where these have penalties.

        `times` may be int64 `[B]`, and negative to take back. `NON_FINITE` is not counted.
        """
        _, _, _, repetition_B, presence_B, frequency_B = self.reals[rows_B, :_NUM_REALS].unbind(1)
        penalised_B = (repetition_B != 1.0) | (presence_B != 0.0) | (frequency_B != 0.0)
        counted_B = torch.where(penalised_B & (tokens_B >= 0), times, 0).to(torch.int32)
        self.token_counts.index_put_((rows_B, tokens_B.clamp(min=0)), counted_B, accumulate=True)

    def write_row(
        self,
        row: int,
        params: SamplingParams,
        *,
        seed: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        stop_token_ids: Sequence[int],
    ) -> None:
        """Give a row to a request: two copies to the device, three if the request uses penalties.

        Nothing of the row's last owner has an influence afterwards. The copies are ordered on the
        current stream, so they take effect between the steps launched before and after this call.

        Args:
            row: 0 to max_num_seqs - 1.
            params: what the request asks for.
            seed: names the request's stream of random numbers, 0 to 2^63 - 1.
            prompt_ids: its prompt.
            output_ids: what it generated so far; not empty if it comes back after a preemption.
            stop_token_ids: every id that ends it, at most 32 of them if it has `min_tokens`.

        Raises:
            RequestError: too many stop ids, or an id outside the vocabulary. The row is unchanged.
        """
        num_rows, vocab_size = self.token_counts.shape
        assert 0 <= row < num_rows - 1, "the null row has no owner"
        params.check_vocabulary(vocab_size)
        stop_ids: tuple[int, ...] = ()
        if params.min_tokens:  # an id that the model has no logit for cannot be drawn anyway
            stop_ids = tuple(token_id for token_id in stop_token_ids if token_id < vocab_size)
        if len(stop_ids) > MAX_ROW_STOP_IDS:
            raise RequestError(
                f"min_tokens holds back {len(stop_ids)} stop token ids; allowed is at most "
                f"{MAX_ROW_STOP_IDS}, those of the model included: name fewer in stop_token_ids"
            )
        ban_until = len(prompt_ids) + params.min_tokens if stop_ids else 0
        integers = _row_integers(params, seed, ban_until, stop_ids, vocab_size)
        if params.uses_penalties:
            counts = torch.bincount(
                torch.tensor(output_ids, dtype=torch.int64), minlength=vocab_size
            )
            counts[torch.tensor(prompt_ids, dtype=torch.int64)] |= _IN_PROMPT
            _copy(counts.to(torch.int32), self.token_counts[row])
        _copy(torch.tensor(_row_reals(params), dtype=torch.float32), self.reals[row])
        _copy(torch.tensor(integers, dtype=torch.int64), self.integers[row])


def _biases(params: SamplingParams) -> dict[int, float]:
    """The biases that are not 0: kernels read the first one to learn whether a row has any."""
    return {token_id: bias for token_id, bias in params.logit_bias.items() if bias != 0.0}


def _row_reals(params: SamplingParams) -> list[float]:
    bias = list(_biases(params).values())
    return [
        max(params.temperature, _MIN_DIVISOR) if params.temperature > 0.0 else 0.0,
        params.top_p,
        params.min_p,
        max(params.repetition_penalty, _MIN_DIVISOR),
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


def _copy(host: torch.Tensor, target: torch.Tensor) -> None:
    """Copy without waiting: the caching allocator keeps pinned memory until the copy is done."""
    target.copy_(host.pin_memory() if target.is_cuda else host, non_blocking=True)


def sample_greedy(logits_BV: torch.Tensor) -> torch.Tensor:
    """Return the most probable token of each lane, int64 `[B]`; of equal ones the lowest id.

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
    """Draw a token for each lane as its row asks for, and count it in the row.

    `NON_FINITE` where the logits are not a distribution, or are not one after the row's parameters
    were applied. A lane's token depends on nothing but its own logits, row and position.

    Args:
        logits_BV: the model's logits, of any floating dtype.
        state: parameters and counts of all rows; `token_counts` is updated in place.
        rows_B: int64, row of each lane. A row with penalties may be named only once.
        positions_B: int64, the position that the drawn token takes in its sequence: the length of
            the prompt for the first one.
    """
    raw_BV = logits_BV.float()
    log_mass_B = raw_BV.logsumexp(-1)
    top_logits, top_ids = largest(raw_BV, min(MAX_LOGPROBS, raw_BV.shape[1]))

    reals, integers = state.reals[rows_B], state.integers[rows_B]
    temperature_B, top_p_B, min_p_B, repetition_B, presence_B, frequency_B = reals[
        :, :_NUM_REALS
    ].unbind(1)
    top_k_B, seed_B, ban_until_B = integers[:, :_NUM_INTEGERS].unbind(1)

    ban_B = torch.where(positions_B < ban_until_B, float("-inf"), 0.0)
    added = torch.cat((reals[:, _NUM_REALS:], ban_B[:, None].expand(-1, MAX_ROW_STOP_IDS)), dim=1)
    wanted_BV = raw_BV.scatter_add(1, integers[:, _NUM_INTEGERS:], added)

    penalised_B = (repetition_B != 1.0) | (presence_B != 0.0) | (frequency_B != 0.0)
    wanted_BV = torch.where(
        penalised_B[:, None],
        _penalise(wanted_BV, state.token_counts[rows_B], repetition_B, presence_B, frequency_B),
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
    state.token_counts.index_put_((rows_B, ids_B), counted_B, accumulate=True)
    return SampleOutput(
        tokens=torch.where(sound_B, ids_B, NON_FINITE),
        logprob=raw_BV.gather(1, ids_B[:, None])[:, 0] - log_mass_B,
        top_logprobs=top_logits - log_mass_B[:, None],
        top_ids=top_ids,
    )


def _sample_full_fused(
    logits_BV: torch.Tensor,
    state: SamplingState,
    rows_B: torch.Tensor,
    positions_B: torch.Tensor,
) -> SampleOutput:
    """Do what `sample_full` does, in one call of an operator for CPUs."""
    return SampleOutput(
        *fused_full(
            logits_BV,
            state.reals,
            state.integers,
            state.token_counts,
            rows_B,
            positions_B,
            min(MAX_LOGPROBS, logits_BV.shape[1]),
        )
    )


def _triton_greedy(logits_BV: torch.Tensor, feed: Feedback | None = None) -> torch.Tensor:
    from ..kernels.triton.sampler import greedy_rows  # needs triton

    return greedy_rows(logits_BV, feed)


def _triton_full(
    logits_BV: torch.Tensor,
    state: SamplingState,
    rows_B: torch.Tensor,
    positions_B: torch.Tensor,
    feed: Feedback | None = None,
) -> SampleOutput:
    """Do what `sample_full` does, in two Triton kernels."""
    from ..kernels.triton.sampler import full_rows  # needs triton

    lanes, vocab_size = logits_BV.shape
    tops = min(MAX_LOGPROBS, vocab_size)
    size = SampleOutput.packed_bytes(lanes, tops)
    packed = torch.empty(size, dtype=torch.uint8, device=logits_BV.device)
    output = SampleOutput.unpack(packed, lanes, tops)
    full_rows(
        logits_BV,
        state.reals,
        state.integers,
        state.token_counts,
        rows_B,
        positions_B,
        (output.tokens, output.logprob, output.top_ids, output.top_logprobs),
        feed,
    )
    return output


def _triton_full_step(
    logits_BV: torch.Tensor, state: SamplingState, feed: Feedback
) -> SampleOutput:
    return _triton_full(logits_BV, state, feed.rows, feed.positions, feed)


@dataclass(frozen=True, slots=True)
class Sampler:
    """One choice of implementations."""

    greedy: Callable[[torch.Tensor], torch.Tensor]
    """Signature of `sample_greedy`."""
    full: Callable[[torch.Tensor, SamplingState, torch.Tensor, torch.Tensor], SampleOutput]
    """Signature of `sample_full`."""
    greedy_step: Callable[[torch.Tensor, Feedback], torch.Tensor] | None = None
    """As `greedy`, and writes the tokens to the rows' state; None: not available."""
    full_step: Callable[[torch.Tensor, SamplingState, Feedback], SampleOutput] | None = None
    """As `full`, and writes the tokens to the rows' state; None: not available."""


torch_sampler = Sampler(sample_greedy, sample_full)
"""For every device, to be compiled where that is possible."""

fused_sampler = Sampler(fused_greedy, _sample_full_fused)
"""For CPUs after `load_cpu_ops`: nothing that a compiler could improve."""

triton_sampler = Sampler(_triton_greedy, _triton_full, _triton_greedy, _triton_full_step)
"""For CUDA devices: two kernels for either, token feedback included. Needs triton."""

SAMPLERS: dict[SamplerName, Sampler] = {
    "torch": torch_sampler,
    "cpu": fused_sampler,
    "triton": triton_sampler,
}
"""The samplers by the name that `Kernels.sampler` gives them."""


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
    OpenAI interface defines them, over the output alone.
    """
    repetition = repetition_B[:, None]
    divided = torch.where(logits_BV > 0, logits_BV / repetition, logits_BV * repetition)
    logits_BV = torch.where(counts_BV != 0, divided, logits_BV)
    outputs_BV = counts_BV & _COUNT_MASK
    present_BV = (outputs_BV > 0).float()
    return logits_BV - presence_B[:, None] * present_BV - frequency_B[:, None] * outputs_BV.float()
