"""Decides before each step which rows verify how many drafts. No torch.

`VerifyCosts` compares what a step with drafts is expected to gain with the time that it takes
longer. A speculator keeps an account of that time, in decode steps: verify steps add what they
gained or subtract what they lost, drafting is paid from it, and decode steps add a small share of
their time. So drafts that do not pay cost little more than this share. See docs/architecture.md.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from ...graphs.buckets import Buckets
from ..config import Speculation
from ..request import DRAFT_ON_DEVICE, Request, RequestStatus
from ..speculation.request_drafter import (
    LOOKUP_RATES,
    MAX_CANDIDATES,
    MAX_INDEXED_TOKENS,
    NOTHING,
    POSITION_RATES,
    PROBABILITY_RATES,
    Acceptance,
    Guess,
    RequestDrafter,
    RowDrafts,
    SharedOutputs,
    SuffixIndex,
    probability_class,
)
from .plan import Proposed, RowSpan, StepPlan

# Drafts of an output that follows a grammar. No torch.


def with_grammar(request: Request, guess: Guess, most: int) -> Guess:
    """Return what the grammar of a request allows of a guess, or at most `most` tokens it forces.

    Forced tokens are certain. Without a grammar, the guess is returned.
    """
    if request.matcher is None:
        return guess
    tokens, forced = request.matcher.drafts(request, guess.tokens)
    tokens = tokens[:most]
    return Guess(tokens, [1.0] * len(tokens) if forced else guess.chances[: len(tokens)])


# Step times by rows and tokens, and the drafts that pay. No torch.
#
#     gain = mean over rows of log(expected tokens of the row) - log(time of the verify step)
#            + log(time of the decode step)
#
# A step verifies if this is positive: the geometric mean of the rows' speeds is then higher than
# with plain decoding. So no row is slowed down much for the sake of others: in a batch of 8, one
# row that gets 4 tokens justifies a step 1.19 times as long, and not 1.38 times as the sum of
# tokens would. Nor may the mean time per token of the rows rise, as it can where a few rows gain
# much and the others wait for them: here above 1.10 times.
#
# Steps of most devices compute as many tokens for each row. Those without padding compute as many
# as there are, so that each draft of each row has to be worth its time:
#
#     chances of two rows     0.9  0.8  0.7      0.3  0.1
#     raise the mean log by   .32  .18  .11      .13  .04
#     drafts by their worth     1    2    4        3    5
#
# The drafts that are worth most come first, and the step has as many of them as maximise the gain.

LEAST_GAIN = math.log(1.1)
"""Expected gains up to this one are not worth the risk."""

LEAST_CHANCE = 0.05
"""Drafts that are less likely to be accepted are not verified."""

LEARNING_RATE = 0.1
"""Share of an error by which the time of the kind of verify step that was run is corrected."""

COMMON_RATE = 0.05
"""Share of an error by which the times of all verify steps of so many rows are corrected, at least:
longer contexts slow them down by another factor than decode steps. The first errors count more,
since what the host does for a verify step was not measured at the start."""

LARGEST_ERROR = 0.75
"""Errors are clipped to this multiple of the expected time: steps that other processes disturb
count little."""

FADING = 5e-4
"""Share by which each step lowers the times of other verify steps, never below that of a decode
step: one that was taken for too slow is tried again."""

DECODE_RATE = 0.3
"""Share of an error by which the time of a decode step is corrected: few of them are timed."""

UNTIMED = 16
"""Of decode steps that pay for drafts, one of this many is timed."""


class _Times:
    """For steps of one number of rows: the time of a decode step, and multiples of it."""

    def __init__(self, size: int, seconds: Mapping[int, float]) -> None:
        """`seconds` by tokens of the step; the fewest tokens belong to the decode step."""
        self.size = size
        self.tokens = sorted(seconds)
        self.decode = seconds[self.tokens[0]]
        self.multiples = [max(seconds[n] / self.decode, 1.0) for n in self.tokens]
        self.verified = 0
        """Verify steps that corrected the multiples."""
        self.unfaded = 0
        """Decode steps since the multiples were lowered last."""

    def fade(self) -> None:
        """Lower the multiples for the decode steps since the last time."""
        if self.unfaded:
            factor = (1 - FADING) ** self.unfaded
            self.multiples = [max(multiple * factor, 1.0) for multiple in self.multiples]
            self.unfaded = 0

    def between(self, tokens: int) -> tuple[int, float]:
        """Return the first measured point of at least `tokens`, and its weight."""
        at = min(bisect_left(self.tokens, tokens), len(self.tokens) - 1)
        if at == 0:
            return 0, 1.0
        below, above = self.tokens[at - 1], self.tokens[at]
        return at, (min(tokens, above) - below) / (above - below)

    def multiple(self, tokens: int) -> float:
        """Return the time of a step as a multiple of a decode step's."""
        at, weight = self.between(tokens)
        own = self.multiples
        return own[at] if weight == 1.0 else own[at] * weight + own[at - 1] * (1 - weight)


class VerifyCosts:
    """Seconds of decode and verify steps: measured before the first request, then corrected."""

    def __init__(
        self,
        rows: Buckets,
        seconds: Mapping[tuple[int, int], float],
        *,
        padded: bool = True,
    ) -> None:
        """Start with the seconds of each (rows, tokens per row); 1 token per row: decode steps.

        `padded`: whether all rows of a step have as many tokens, padding included.
        """
        self._padded = padded
        by_tokens: dict[int, dict[int, float]] = {}
        for (size, tokens_per_row), value in seconds.items():
            by_tokens.setdefault(size, {})[size * tokens_per_row] = value
        sizes = {size: _Times(size, own) for size, own in by_tokens.items()}
        self._times = {
            count: sizes[fitting]
            for count in range(1, rows.largest + 1)
            if (fitting := rows.fit(count))
        }

    def choose(self, chances: Sequence[Sequence[float]], otherwise: float = 1.0) -> list[int]:
        """Return the number of drafts of each row of the step with the largest gain.

        All numbers are 0 if drafts do not pay.

        Args:
            chances: of each row, the probability that each of its drafts is accepted.
            otherwise: the time of the step if it verifies nothing, in decode steps.
        """
        none = [0] * len(chances)
        if not any(chances):
            return none
        times = self._times[len(chances)]
        times.fade()
        least = LEAST_GAIN - math.log(otherwise)
        found = (self._even if self._padded else self._ragged)(chances, times, least)
        if found is None:
            return none
        drafts, multiple = found
        tokens = [1 + sum(own[:count]) for own, count in zip(chances, drafts, strict=True)]
        per_token = sum([multiple / count for count in tokens]) / len(tokens)
        return drafts if per_token <= otherwise else none

    def _even(
        self, chances: Sequence[Sequence[float]], times: _Times, least: float
    ) -> tuple[list[int], float] | None:
        """Return the drafts of the best step with as many tokens for each row, and its time."""
        rows, size = len(chances), times.size
        best, best_gain, best_multiple = 0, least, 1.0
        for tokens, multiple in zip(times.tokens[1:], times.multiples[1:], strict=True):
            drafts = tokens // size - 1
            expected = sum(math.log1p(sum(own[:drafts])) for own in chances if own) / rows
            gain = expected - math.log(multiple)
            if gain > best_gain:
                best, best_gain, best_multiple = drafts, gain, multiple
        if best == 0:
            return None
        kept = [sum(chance >= LEAST_CHANCE for chance in own[:best]) for own in chances]
        return kept, best_multiple

    def _ragged(
        self, chances: Sequence[Sequence[float]], times: _Times, least: float
    ) -> tuple[list[int], float] | None:
        """Return the drafts of the best step, see the top of this file, and its time.

        In a large batch, not every number of drafts is tried.
        """
        rows, size, log = len(chances), times.size, math.log
        most = sum([math.log1p(sum(own)) for own in chances if own]) / rows
        if most <= least + log(times.multiple(size + 1)):  # even if drafts cost no more
            return None
        worth: list[tuple[float, int]] = []
        for row, own in enumerate(chances):
            tokens = 1.0
            for chance in own:
                if chance < LEAST_CHANCE:
                    break
                worth.append((chance / tokens, row))  # falls with each draft of a row
                tokens += chance
        worth.sort(reverse=True)
        every, last = max(1, rows // 4), len(worth)
        best, best_gain, product = 0, least, 1.0
        for count, (value, _) in enumerate(worth, 1):
            product *= 1 + value
            if count % every and count != last:
                continue
            gain = log(product) / rows - log(times.multiple(size + count))
            if gain > best_gain:
                best, best_gain = count, gain
        if best == 0:
            return None
        drafts = [0] * rows
        for _, row in worth[:best]:
            drafts[row] += 1
        return drafts, times.multiple(size + best)

    def decode_seconds(self, rows: int) -> float:
        """Return the time of a decode step of this number of rows."""
        return self._times[rows].decode

    def verify_seconds(self, rows: int, tokens_per_row: int, tokens: int) -> float:
        """Return the time of a verify step; see `observe`."""
        times = self._times[rows]
        return times.decode * times.multiple(self._computed(times, rows, tokens_per_row, tokens))

    def _computed(self, times: _Times, rows: int, tokens_per_row: int, tokens: int) -> int:
        """Return the tokens that a verify step computes, padding included."""
        return times.size * tokens_per_row if self._padded else tokens + times.size - rows

    def observe_decode(self, rows: int, seconds: float, steps: int = 1) -> None:
        """Correct the time of a decode step by how long the last of `steps` took.

        Invalid times are ignored.
        """
        times = self._times[rows]
        if 0 < seconds < math.inf:
            error = seconds / times.decode - 1
            times.decode *= 1 + DECODE_RATE * min(max(error, -LARGEST_ERROR), LARGEST_ERROR)
            times.unfaded += steps

    def observe(self, rows: int, tokens_per_row: int, tokens: int, seconds: float) -> None:
        """Correct the time of a verify step by how long one took. Invalid times are ignored.

        `tokens` counts all rows, without padding.
        """
        if not 0 < seconds < math.inf:
            return
        times = self._times[rows]
        times.fade()
        computed = self._computed(times, rows, tokens_per_row, tokens)
        at, weight = times.between(computed)
        error = seconds / (times.decode * times.multiple(computed)) - 1
        error = min(max(error, -LARGEST_ERROR), LARGEST_ERROR)
        own, common = times.multiples, max(COMMON_RATE, 1 / (2 + times.verified))
        times.verified += 1
        for point in range(1, len(own)):
            share = weight if point == at else 1 - weight if point == at - 1 else 0.0
            change = error * (common + LEARNING_RATE * share) - FADING * (share == 0.0)
            own[point] = max(own[point] * (1 + change), 1.0)

    def seconds(self) -> dict[str, float]:
        """Return the present times by "rows x tokens per row"."""
        return {
            f"{own.size}x{tokens // own.size}": own.decode * multiple
            for own in dict.fromkeys(self._times.values())
            for tokens, multiple in zip(own.tokens, own.multiples, strict=True)
        }


class BatchCosts:
    """The times of steps, of the greedy and of the full sampler."""

    def __init__(self, greedy: VerifyCosts, full: VerifyCosts) -> None:
        """`full`: of steps in which a request needs more than greedy tokens."""
        self.greedy, self.full = greedy, full
        self._batch: Sequence[Request] = ()
        self._costs = greedy

    def of(self, requests: Sequence[Request]) -> VerifyCosts:
        """Return the times of steps of these requests."""
        if requests is not self._batch:  # the same list until a request joins or leaves
            self._batch = requests
            is_full = any(request.params.needs_full_sampler for request in requests)
            self._costs = self.full if is_full else self.greedy
        return self._costs

    def stats(self) -> dict[str, dict[str, float]]:
        """Return the present times; see `VerifyCosts.seconds`."""
        return {
            "step_seconds": self.greedy.seconds(),
            "sampled_step_seconds": self.full.seconds(),
        }


# What decides which rows verify how many drafts. No torch.
#
# The account is charged for each step that drafts: that looks for drafts, verifies or proposes
# some. While it is overdrawn none does. All steps add a small share of their time.

FIRST_TIMED, TIMED_AFTER, TIMED_STEPS = 8, 128, 4
"""Steps that draft after which some decode steps are run, at first and later, so that their time
remains known; and how many. The first of them does not count: it finds the caches cold."""

LOOKUP_PRICE = 2.0
"""What a second of looking for drafts costs: so half of what drafts gain may be spent on it."""

LARGEST_DELAY = 0.5
"""Decode steps that a lookup takes, at most: what takes longer is a disturbance by other
processes."""


@dataclass(eq=False)
class Speculator(ABC):
    """Chooses which drafts are verified. Keeps an account of the time that they gain and cost.

    Counts drafts, and follows the steps of a loop from launch to commit.
    """

    config: Speculation
    """The method, and whether to choose."""
    sizes: Callable[[int], Sequence[int]]
    """Returns the tokens per row that verify steps of that number of rows exist for."""
    costs: BatchCosts
    """The times of decode steps and of verify steps."""
    _: KW_ONLY
    is_async_device: bool
    """Whether steps stay in flight."""
    calibration_seconds: float = 0.0
    """Seconds that measuring the times took."""

    share: ClassVar[float]
    """Share of the time of steps that is credited to the account."""
    first_credit: ClassVar[float]
    """Time that may be lost to drafts before they have gained any, in decode steps."""
    most_credit: ClassVar[float]
    """The same, after they have gained much."""

    waits = False
    """Whether the step in flight is to be committed before the next one is planned."""
    proposes = 0
    """Drafts that the step to be planned proposes for each row, on the device."""

    def __post_init__(self) -> None:
        """Start without requests."""
        self._credit = self.first_credit
        """Time that may be lost to drafts, in decode steps."""
        self._since_timed = TIMED_AFTER - FIRST_TIMED
        """Steps that drafted since the last decode steps that were timed."""
        self._plain = 0
        """Timed decode steps since the last step that drafted."""
        self._is_timed = True
        """Whether the time of the step to be planned counts."""
        self._slowdown = 1.0
        """Measured times of steps that propose and verify nothing, relative to those expected."""
        self._untimed = 0
        """Decode steps since the last one that was timed, in a pause."""
        self._lookup_ns = 0
        """Nanoseconds that the host has looked for drafts of the step to be planned."""
        self._batch: Sequence[Request] = ()
        """The rows of the last step, of which `_has_grammar` speaks."""
        self._has_grammar = False
        self._launched: deque[tuple[StepPlan, int, float]] = deque()
        self._arrived_ns = 0
        self._verify_steps = self._verified_rows = 0
        self._drafted = [0] * self.config.num_speculative_tokens
        self._accepted = [0] * self.config.num_speculative_tokens

    def begin_plan(self) -> None:
        """Begin with the next step, which may draft nothing."""
        self.waits, self.proposes, self._is_timed, self._lookup_ns = False, 0, True, 0

    def _pay(self) -> None:
        """Plan a decode step that pays for drafts. Of several in a row, the last one is timed."""
        self._untimed += 1
        self._is_timed = self._untimed >= UNTIMED

    @property
    def _is_timing(self) -> bool:
        """Whether decode steps are to be run; those with grammars take time of their own."""
        return self.config.adaptive and self._since_timed >= TIMED_AFTER and not self._has_grammar

    @abstractmethod
    def propose(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        """Return the drafts that each decoding request verifies; nothing if none does.

        Decides too whether the step proposes.
        """

    def prompt_drafts(self, chunks: Sequence[RowSpan]) -> int:
        """Return how many drafts the device proposes after each prompt that ends in a step."""
        return 0

    def received(self, proposed: Iterable[Proposed]) -> None:
        """Take what a committed step proposed on the device."""
        raise AssertionError("only a drafter proposes on the device")

    @abstractmethod
    def launched(self, plan: StepPlan, started_ns: int) -> None:
        """Note when the loop began with a step that was launched."""

    def committed(self, plan: StepPlan, advanced: Sequence[int] | None, arrived_ns: int) -> None:
        """Count what a step accepted, and learn from its time; once for every launched step."""
        began, self._arrived_ns = self._arrived_ns, arrived_ns
        if advanced is not None:
            self._verify_steps += 1
            for drafts, count in zip(plan.drafts, advanced, strict=True):
                self._verified_rows += len(drafts) > 0
                for index in range(len(drafts)):
                    self._drafted[index] += 1
                    self._accepted[index] += index < count - 1
        if self._launched and self._launched[0][0] is plan:  # not of `score`
            _, started, lookup_seconds = self._launched.popleft()
            # An asynchronous device begins a step when the previous one has ended.
            seconds = (arrived_ns - max(began, started)) / 1e9
            self._learn(plan, advanced, seconds, lookup_seconds)

    def _learn(
        self, plan: StepPlan, advanced: Sequence[int] | None, seconds: float, lookup_seconds: float
    ) -> None:
        """Learn from the time of a step, and of the search for drafts before it."""
        if not plan.decode or any(request.matcher is not None for request in plan.decode):
            return  # masks take time of their own
        drafted = advanced is not None or plan.proposes or lookup_seconds
        if plan.prefill and not drafted:
            return
        rows, costs = len(plan.decode), self.costs.of(plan.decode)
        untimed, self._untimed = max(self._untimed, 1), 0
        gained = self.share * untimed
        if not drafted:
            self._plain += 1
            if self._plain > 1:
                costs.observe_decode(rows, seconds, untimed)
            if self._plain == TIMED_STEPS:
                self._since_timed = 0
        else:
            self._plain = 0
            decode_seconds = costs.decode_seconds(rows)
            n, tokens = plan.tokens_per_row, plan.decode_tokens
            if advanced is None:
                expected, reached = self._undrafted(rows) * decode_seconds, rows
            else:
                expected, reached = costs.verify_seconds(rows, n, tokens), sum(advanced)
            took = expected  # with a chunk of prefill, the step took longer
            if not plan.prefill:
                self._since_timed += 1
                took = min(seconds, (1 + LARGEST_ERROR) * expected)
                if advanced is not None:
                    costs.observe(rows, n, tokens, seconds)
                elif plan.proposes:
                    self._slowdown *= 1 + LEARNING_RATE * (took / expected - 1)
            gained += reached / rows - took / decode_seconds
            gained -= LOOKUP_PRICE * min(lookup_seconds / decode_seconds, LARGEST_DELAY)
        self._credit = min(self._credit + gained, self.most_credit)

    def _undrafted(self, rows: int) -> float:
        """Return the time of a step that drafts and verifies nothing, in decode steps."""
        return 1.0

    def _begin_batch(self, requests: Sequence[Request]) -> None:
        """Take the rows of the next step: the same list until a request joins or leaves."""
        if requests is not self._batch:
            self._batch = requests
            self._has_grammar = any(request.matcher is not None for request in requests)

    @property
    def counts(self) -> dict[str, int]:
        """Verify steps, their rows with drafts, and the drafts that they verified and accepted."""
        return {
            "verify_steps": self._verify_steps,
            "verified_rows": self._verified_rows,
            "drafted": sum(self._drafted),
            "accepted": sum(self._accepted),
        }

    @property
    def accepted_by_position(self) -> tuple[int, ...]:
        """Accepted drafts by their number in the draft of a row, the first one first."""
        return tuple(self._accepted)

    def stats(self) -> dict[str, Any]:
        """Return counters and step times as plain numbers; see `Engine.stats`."""
        return {
            "method": self.config.method,
            "calibration_seconds": self.calibration_seconds,
            **self.counts,
            "drafted_by_position": list(self._drafted),
            "accepted_by_position": list(self._accepted),
            **self.costs.stats(),
        }


# Drafts of a drafter on the device.
#
#     step        N                          N + 1                        N + 2
#     device      decode, propose x y z      verify x y z, propose u v w  verify u v ...
#     host        plan N + 1: verify 3       commit N, plan N + 2         commit N + 1
#
# A step that proposes takes longer, whether or not its drafts are verified. When the account is
# overdrawn the drafter is paused. Each decode step refunds a little; once there is enough, a few
# steps propose, and go on if their drafts gain time. Slow steps among fast ones are what a 99th
# percentile shows, so these are fewer than one in a hundred.
#
# Steps with token masks propose nothing. Of rows whose output follows a grammar, tokens that it
# forces are verified. Only before such a step the loop commits the step in flight (`waits`).
#
# On an asynchronous device the next step is planned before the host has read the drafts. Their row
# keeps them (`DRAFT_ON_DEVICE`), and the host chooses how many are verified by how many it has
# accepted so far, by number of the draft. Where it knows the drafts, it sends them, and chooses by
# the probabilities that the drafter gave them.

PROBE = 2.0
"""Credit at which a pause ends."""

PAUSED_TIME = 0.7
"""Decode steps that a draft after a prompt must be worth while the drafter is paused: it was judged
on other text."""

MOST_DRAFTER_DEFICIT = 8.0
"""How far below zero the credit may fall, in decode steps, before a paused drafter no longer
proposes after prompts."""


@dataclass(eq=False)
class DrafterSpeculator(Speculator):
    """Chooses how many of a drafter's proposals are verified, and when it proposes.

    Verify steps of `costs` propose.
    """

    proposing: Callable[[int], float]
    """Returns how long a step with this number of rows takes that proposes and verifies nothing, as
    a multiple of the time of a decode step."""

    share, first_credit, most_credit = 0.002, 64.0, 128.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._acceptance = Acceptance(PROBABILITY_RATES, 256.0)
        self._by_position = Acceptance(POSITION_RATES, 256.0)
        self._paused = False
        self._proposing_steps = 0

    def propose(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        self.begin_plan()
        self._begin_batch(requests)
        has_grammar = self._has_grammar
        self._paused = self._is_overdrawn
        if self._is_timing:
            return ()
        if self._paused and not (has_grammar or any(request.num_drafts for request in requests)):
            self._pay()
            return ()
        sizes = self.sizes(len(requests))
        if not sizes:
            return ()
        # Drafts of a step with fewer rows can be more than this one verifies.
        guesses = [self._guess(request).first(sizes[-1] - 1) for request in requests]
        counts = [len(own.tokens) for own in guesses]
        if self.config.adaptive and any(counts):
            otherwise = PAUSED_TIME if self._paused else self._undrafted(len(requests))
            chances = [own.chances for own in guesses]
            counts = self.costs.of(requests).choose(chances, 1.0 if has_grammar else otherwise)
        verifies = any(counts)
        if has_grammar:
            self.waits = self.is_async_device and verifies
            if any(request.num_pending for request in requests):
                return ()
        elif verifies or not self._paused:
            self.proposes = min(self.config.num_speculative_tokens, sizes[-1] - 1)
        if not verifies:
            return ()
        return [own.tokens[:count] for own, count in zip(guesses, counts, strict=True)]

    def prompt_drafts(self, chunks: Sequence[RowSpan]) -> int:
        """Return how many drafts the drafter proposes after each prompt that ends in a step.

        It does so in a pause too, where the host reads drafts before it plans the next step: they
        show whether this text is easier to predict, and no decode step is longer for them.
        """
        ending = [chunk.request for chunk in chunks if chunk.samples]
        sizes = self.sizes(1)
        if not sizes or all(request.num_unsampled <= 1 for request in ending):
            return 0
        if any(request.matcher is not None for request in ending):
            return 0
        if self._is_overdrawn and (self.is_async_device or self._credit < -MOST_DRAFTER_DEFICIT):
            return 0
        return min(self.config.num_speculative_tokens, sizes[-1] - 1)

    @property
    def _is_overdrawn(self) -> bool:
        """Whether the drafter is to pause."""
        return self.config.adaptive and self._credit < (PROBE if self._paused else 0.0)

    def _guess(self, request: Request) -> Guess:
        """Return what may follow a request's newest token."""
        if request.matcher is not None:
            return with_grammar(request, NOTHING, self.config.num_speculative_tokens)
        drafts: RowDrafts | None = request.proposed
        if request.num_pending:  # of the step in flight, which leaves them on the device
            acceptance = self._by_position if drafts is None else drafts.acceptance
            count = request.num_drafts
            return Guess([DRAFT_ON_DEVICE] * count, acceptance.chances(range(count)))
        if drafts is None or drafts.at != request.num_tokens:
            return NOTHING
        return Guess(drafts.tokens[: len(drafts.chances)], drafts.chances)

    def received(self, proposed: Iterable[Proposed]) -> None:
        """Take what a committed step proposed, and judge what the one before it did.

        A draft after one that found no slot is worthless.
        """
        for request, stop, drafts, probabilities in proposed:
            if request.status is RequestStatus.FINISHED:
                continue
            last: RowDrafts | None = request.proposed
            known = request.num_tokens
            if last is None:
                acceptance = self._by_position.of_row(16.0)
            else:
                acceptance, sampled = last.acceptance, request.tokens(last.at, known)
                classes = map(probability_class, last.probabilities)
                self._acceptance.judge(classes, last.tokens, sampled)
                if self.is_async_device:  # for drafts that are verified before they are read
                    positions = range(len(last.probabilities))
                    acceptance.judge(positions, last.tokens, sampled)
            own = probabilities[: max(stop - known, 0)]
            chances = self._acceptance.chances(map(probability_class, own))
            request.proposed = RowDrafts(known, drafts, own, chances, acceptance)

    def launched(self, plan: StepPlan, started_ns: int) -> None:
        if not (self._is_timed or plan.prefill):
            return  # in a pause, no row has drafts to reset
        self._launched.append((plan, started_ns, 0.0))
        for request in plan.decode:
            request.num_drafts = plan.proposes
        for chunk in plan.prefill:
            chunk.request.num_drafts = plan.prompt_drafts if chunk.samples else 0

    def _learn(
        self, plan: StepPlan, advanced: Sequence[int] | None, seconds: float, lookup_seconds: float
    ) -> None:
        self._proposing_steps += plan.proposes > 0 or plan.prompt_drafts > 0
        super()._learn(plan, advanced, seconds, lookup_seconds)

    def _undrafted(self, rows: int) -> float:
        return max(self._slowdown * self.proposing(rows), 1.0)

    def stats(self) -> dict[str, Any]:
        """As `Speculator.stats`, with the steps that proposed."""
        return {**super().stats(), "proposing_steps": self._proposing_steps}


# Drafts that the host looks up.
#
# They continue the newest token, which on an asynchronous device is known only once the step in
# flight is committed. While drafts are expected to pay, the loop commits it before it plans the
# next step (`waits`): the device then idles for the work of the host, which the measured times of
# these steps contain.
#
# Lookups are paid from the account too. When it is overdrawn, nothing is looked up until decode
# steps have paid, and a step costs a comparison. Prompts are indexed in the steps that compute
# them, which is not charged.

INDEXED_PER_STEP = 512
"""Tokens that are indexed between two steps, of all rows: about a quarter of a millisecond."""

FEW_TOKENS = 32
"""Rows with no more new tokens are indexed at once: any step adds fewer."""

NEW_CREDIT = 0.5
"""The least credit of a batch of other requests: their text may be easier to predict."""


@dataclass(eq=False)
class LookupSpeculator(Speculator):
    """Proposes the drafts of all rows, and chooses how many are verified."""

    share, first_credit, most_credit = 0.01, 2.0, 16.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._acceptance = Acceptance(LOOKUP_RATES, 64.0)
        self._candidates = 1 if self.config.method == "ngram" else MAX_CANDIDATES
        self._shared: SharedOutputs | None = None
        if self.config.share_outputs:
            self._shared = SharedOutputs(self.config.prompt_lookup_min, self._candidates)
        self._open: list[Request] = []

    def propose(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        self.begin_plan()
        self._begin_batch(requests)
        sizes = self.sizes(len(requests))
        if not sizes:
            return ()
        if self._is_timing:
            return ()
        if self.config.adaptive and self._credit < 0:
            if not self._has_grammar:
                self._pay()
                return ()
            # Nothing is looked up, but what a grammar forces is certain.
            return self._chosen(requests, [NOTHING] * len(requests), sizes[-1] - 1)
        began = time.perf_counter_ns()
        drafts = self._chosen(requests, self._looked(requests), sizes[-1] - 1)
        self._lookup_ns = time.perf_counter_ns() - began
        return drafts

    def _begin_batch(self, requests: Sequence[Request]) -> None:
        if requests is not self._batch and set(self._batch).isdisjoint(requests):
            self._credit = max(self._credit, NEW_CREDIT)
        super()._begin_batch(requests)

    def _chosen(
        self, requests: Sequence[Request], guesses: list[Guess], most: int
    ) -> Sequence[Sequence[int]]:
        """Return the tokens of each guess that are verified, at most `most` of a request.

        Adds what grammars force.
        """
        if self._has_grammar:
            drafts = self.config.num_speculative_tokens
            guesses = [
                with_grammar(request, guess, drafts)
                for request, guess in zip(requests, guesses, strict=True)
            ]
        if most < self.config.num_speculative_tokens:
            guesses = [guess.first(most) for guess in guesses]
        counts = [len(guess.tokens) for guess in guesses]
        if self.config.adaptive and any(counts):
            chances = [guess.chances for guess in guesses]
            counts = self.costs.of(requests).choose(chances)
        self.waits = self.is_async_device and any(counts)
        if not any(counts) or any(request.num_pending for request in requests):
            return ()
        return [guess.tokens[:count] for guess, count in zip(guesses, counts, strict=True)]

    def launched(self, plan: StepPlan, started_ns: int) -> None:
        """Note when the loop began with a step that was launched, and index its prompts."""
        if plan.prefill:
            if self._shared is not None:
                self._share_ended(self._shared)
            if self._credit >= 0 or not self.config.adaptive:
                for chunk in plan.prefill:
                    request = chunk.request
                    drafter = request.drafter or self._new_drafter(request)
                    drafter.read(chunk.start + chunk.count, request.tokens, chunk.count)
        if not self._is_timed:
            return
        # On an asynchronous device, looking overlaps with a step in flight, or delays the next one.
        if not self.is_async_device:
            started_ns += self._lookup_ns
        self._launched.append((plan, started_ns, self._lookup_ns / 1e9))

    def _looked(self, requests: Sequence[Request]) -> list[Guess]:
        """Return what may follow each request.

        Rows share the tokens that are indexed between two steps: first a few of each row, then
        long prompts, outputs of other requests last.
        """
        left, behind = INDEXED_PER_STEP, []
        drafters: list[RequestDrafter] = [r.drafter or self._new_drafter(r) for r in requests]
        for request, drafter in zip(requests, drafters, strict=True):
            known = request.num_tokens
            if known - drafter.seen > FEW_TOKENS:
                behind.append((drafter, known, request.tokens))
            else:
                left -= drafter.catch_up(known, request.tokens, FEW_TOKENS)
        for drafter, known, tokens_of in behind:
            left -= drafter.catch_up(known, tokens_of, max(left, 0))
        if self._shared is not None:
            self._share_ended(self._shared)
            self._shared.index_some(left)
        return [drafter.guess for drafter in drafters]

    def _share_ended(self, shared: SharedOutputs) -> None:
        """Add the outputs of requests that have ended; so no more are kept than have a row."""
        ended = [r for r in self._open if r.status is RequestStatus.FINISHED]
        if ended:
            self._open = [r for r in self._open if r.status is not RequestStatus.FINISHED]
            for request in ended:
                shared.add(request.salt, request.output_ids)

    def _new_drafter(self, request: Request) -> RequestDrafter:
        index = SuffixIndex(self.config.prompt_lookup_min, self._candidates)
        first = max(0, request.num_tokens - MAX_INDEXED_TOKENS // 2)
        own, most = self._acceptance.of_row(64.0), self.config.num_speculative_tokens
        drafter = RequestDrafter(index, own, most, first, self._shared, request.salt)
        request.drafter = drafter
        if self._shared is not None:
            self._open.append(request)
        return drafter
