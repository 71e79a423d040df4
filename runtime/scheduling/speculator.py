"""Decides before each step which rows verify how many drafts. No torch.

`choose_drafts` compares what a step with drafts is expected to gain with the time that it takes
longer. A speculator keeps an account of that time, in decode steps: verify steps add what they
gained or subtract what they lost, drafting is paid from it, and decode steps add a small share of
their time. So drafts that do not pay cost little more than this share. See docs/architecture.md.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from ..config import Speculation
from ..request import Request, RequestStatus
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
from .step_times import DraftTimes, StepTimes


def with_grammar(request: Request, guess: Guess, most: int) -> Guess:
    """Return what the grammar of a request allows of a guess, or at most `most` tokens it forces.

    Forced tokens are certain. Without a grammar, the guess is returned.
    """
    if request.matcher is None:
        return guess
    tokens, forced = request.matcher.drafts(request, guess.tokens)
    tokens = tokens[:most]
    return Guess(tokens, [1.0] * len(tokens) if forced else guess.chances[: len(tokens)])


# The drafts that pay, by step times.
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


def choose_drafts(
    chances: Sequence[Sequence[float]], times: DraftTimes, otherwise: float = 1.0
) -> list[int]:
    """Return the number of drafts of each row of the step with the largest gain.

    All numbers are 0 if drafts do not pay.

    Args:
        chances: of each row, the probability that each of its drafts is accepted.
        times: of steps of these rows.
        otherwise: the time of the step if it verifies nothing, in decode steps.
    """
    none = [0] * len(chances)
    if not any(chances):
        return none
    choose = _even if times.padded else _ragged
    drafts, multiple = choose(chances, times, LEAST_GAIN - math.log(otherwise))
    if not any(drafts):
        return none
    tokens = [1 + sum(own[:count]) for own, count in zip(chances, drafts, strict=True)]
    per_token = sum([multiple / count for count in tokens]) / len(tokens)
    return drafts if per_token <= otherwise else none


def _even(
    chances: Sequence[Sequence[float]], times: DraftTimes, least: float
) -> tuple[list[int], float]:
    """Return the drafts of the best step with as many tokens for each row, and its time.

    All numbers are 0 if no gain is larger than `least`.
    """
    rows, size = len(chances), times.size
    best, best_gain, best_multiple = 0, least, 1.0
    for tokens, multiple in zip(times.tokens[1:], times.multiples[1:], strict=True):
        drafts = tokens // size - 1
        expected = sum(math.log1p(sum(own[:drafts])) for own in chances if own) / rows
        gain = expected - math.log(multiple)
        if gain > best_gain:
            best, best_gain, best_multiple = drafts, gain, multiple
    if best == 0:
        return [0] * rows, 1.0
    kept = [sum(chance >= LEAST_CHANCE for chance in own[:best]) for own in chances]
    return kept, best_multiple


def _ragged(
    chances: Sequence[Sequence[float]], times: DraftTimes, least: float
) -> tuple[list[int], float]:
    """As `_even`, of steps in which rows have different numbers of tokens; see above.

    In a large batch, not every number of drafts is tried.
    """
    rows, size, log = len(chances), times.size, math.log
    drafts = [0] * rows
    most = sum([math.log1p(sum(own)) for own in chances if own]) / rows
    if most <= least + log(times.multiple(size + 1)):  # even if drafts cost no more
        return drafts, 1.0
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
    for _, row in worth[:best]:
        drafts[row] += 1
    return drafts, times.multiple(size + best)


FIRST_TIMED, TIMED_AFTER, TIMED_STEPS = 8, 128, 4
"""Steps that draft after which some decode steps are run, at first and later, so that their time
remains known; and how many. The first of them does not count: it finds the caches cold."""

UNTIMED = 16
"""Of later decode steps, one of this many is timed."""

LOOKUP_PRICE = 2.0
"""What a second of looking for drafts costs: so half of what drafts gain may be spent on it."""

LARGEST_DELAY = 0.5
"""Decode steps that a lookup takes, at most: what takes longer is a disturbance by other
processes."""


@dataclass(eq=False)
class Speculator(ABC):
    """Chooses which drafts are verified. Keeps an account of the time that they gain and cost.

    The account is charged for each step that drafts: that looks for drafts, verifies or proposes
    some. While it is overdrawn none does. Follows the steps of a loop from launch to commit.
    """

    config: Speculation
    """The method, and whether to choose."""
    times: StepTimes
    """The times of decode steps and of steps with drafts."""
    _: KW_ONLY
    is_async_device: bool
    """Whether steps stay in flight."""

    share: ClassVar[float]
    """Share of the time of steps that is credited to the account."""
    first_credit: ClassVar[float]
    """Time that may be lost to drafts before they have gained any, in decode steps."""
    most_credit: ClassVar[float]
    """The same, after they have gained much."""
    probe: ClassVar[float] = 0.0
    """Credit at which a pause ends."""

    waits = False
    """Whether the step in flight is to be committed before the next one is planned."""
    proposes = 0
    """Drafts that the step to be planned proposes for each row, on the device."""
    unread: Sequence[int] = ()
    """Drafts of each row that the step to be planned verifies as the row keeps them on the device,
    before the host has read them."""

    def __post_init__(self) -> None:
        """Start without requests."""
        self._credit = self.first_credit
        """Time that may be lost to drafts, in decode steps."""
        self._paused = False
        """Whether the account is overdrawn, as the next step is planned."""
        self._keeps_drafts = False
        """Whether a row of the step to be planned may have drafts on the device, or get some."""
        self._since_timed = TIMED_AFTER - FIRST_TIMED
        """Steps that drafted since the last decode steps that were timed."""
        self._plain = 0
        """Decode steps since the last step that drafted."""
        self._lookup_ns = 0
        """Nanoseconds that the host has looked for drafts of the step to be planned."""
        self._batch: Sequence[Request] = ()
        """The rows of the last step, which the next two describe."""
        self._has_grammar = False
        self._needs_logits = False
        """Whether a row has `logprob_token_ids`, which steps of one token per row report."""
        self._verify_steps = self._verified_rows = 0
        self._drafted = [0] * self.config.num_speculative_tokens
        self._accepted = [0] * self.config.num_speculative_tokens

    def begin_plan(self, requests: Sequence[Request]) -> None:
        """Begin with the next step, which may draft nothing.

        `requests`: its rows, the same list until a request joins or leaves.
        """
        self.waits, self.proposes, self.unread, self._lookup_ns = False, 0, (), 0
        paused_below = self.probe if self._paused else 0.0
        self._paused = self.config.adaptive and self._credit < paused_below
        if requests is not self._batch:
            self._begin_batch(requests)

    def _begin_batch(self, requests: Sequence[Request]) -> None:
        self._batch = requests
        self._has_grammar = any(request.matcher is not None for request in requests)
        self._needs_logits = any(request.params.logprob_token_ids for request in requests)

    def propose(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        """Return the drafts that each decoding request verifies, as far as the host knows them.

        Nothing if none does, or if the rows keep them (`unread`). Decides too whether the step
        proposes.
        """
        self.begin_plan(requests)
        adaptive, has_grammar = self.config.adaptive, self._has_grammar
        times = self.times.with_drafts(requests)
        most, drafts = times.most_drafts, self.config.num_speculative_tokens
        if not most or self._needs_logits:
            return ()
        if adaptive and self._since_timed >= TIMED_AFTER and not has_grammar:
            return ()  # decode steps are to be timed
        guesses = self._guesses(requests)
        if not guesses:
            return ()
        if has_grammar:
            rows = zip(requests, guesses, strict=True)
            guesses = [with_grammar(request, guess, drafts) for request, guess in rows]
        if most < drafts:
            guesses = [guess.first(most) for guess in guesses]
        counts = [len(guess.chances) for guess in guesses]
        if adaptive and any(counts):
            otherwise = 1.0 if has_grammar else self._undrafted(times)
            counts = choose_drafts([guess.chances for guess in guesses], times, otherwise)
        verifies = any(counts)
        if has_grammar or not self.config.uses_drafter:
            self.waits = self.is_async_device and verifies
            if any(request.num_pending for request in requests):
                return ()
        elif verifies or not self._paused:
            self.proposes = min(drafts, most)
        if not verifies:
            return ()
        if any(request.num_pending for request in requests):
            self.unread = counts
            return ()
        return [guess.tokens[:count] for guess, count in zip(guesses, counts, strict=True)]

    @abstractmethod
    def _guesses(self, requests: Sequence[Request]) -> Sequence[Guess]:
        """Return what may follow each request without its grammar; nothing in a pause."""

    def _undrafted(self, times: DraftTimes) -> float:
        """Return the time of a step that verifies nothing, in decode steps."""
        return 1.0

    def prompt_drafts(self, chunks: Sequence[RowSpan]) -> int:
        """Return how many drafts the device proposes after each prompt that ends in a step."""
        return 0

    def received(self, proposed: Iterable[Proposed]) -> None:
        """Take what a committed step proposed on the device."""
        raise AssertionError("only a drafter proposes on the device")

    def launched(self, plan: StepPlan) -> None:
        """Note a step that was launched, and decide whether its time counts."""
        plan.lookup_ns = self._lookup_ns
        # On an asynchronous device, looking overlaps with a step in flight, or delays the next one.
        if not self.is_async_device:
            plan.started_ns += self._lookup_ns
        if plan.prefill or self._keeps_drafts:
            self._note_rows(plan)
        drafts, has_budget = plan.decode_counts or plan.proposes, self.times.prefill is not None
        if self._has_grammar:
            # Masks take time of their own, which belongs to a latency budget alone.
            plan.timed, plan.lookup_ns = int(has_budget and not drafts), 0
            return
        drafts = drafts or plan.lookup_ns
        if not plan.decode or (plan.prefill and not drafts):
            return
        self._credit = min(self._credit + self.share, self.most_credit)
        if drafts:
            self._plain = 0
            return
        self._plain += 1
        if self._plain == TIMED_STEPS:
            self._since_timed = 0
        if not (has_budget or 1 < self._plain <= TIMED_STEPS):  # a budget learns from all steps
            plan.timed = 0 if self._plain % UNTIMED else UNTIMED

    @abstractmethod
    def _note_rows(self, plan: StepPlan) -> None:
        """Note the rows of a launched step that prefills, or may leave drafts on the device."""

    def committed(self, plan: StepPlan, advanced: Sequence[int] | None, took: float) -> None:
        """Count what a step accepted, and what its time gained; once for every launched step.

        `took`: its time in decode steps, see `StepTimes.learn`; 0.0 if that is not known.
        """
        if advanced is not None:
            self._verify_steps += 1
            # Masks may have taken drafts out of a step after it was planned.
            counts = map(len, plan.drafts) if plan.drafts else (n - 1 for n in plan.decode_counts)
            for drafts, count in zip(counts, advanced, strict=True):
                self._verified_rows += drafts > 0
                for index in range(drafts):
                    self._drafted[index] += 1
                    self._accepted[index] += index < count - 1
        if not (took and (plan.decode_counts or plan.proposes or plan.lookup_ns)):
            return
        self._since_timed += not plan.prefill
        rows = len(plan.decode)
        gained = (rows if advanced is None else sum(advanced)) / rows - took
        if plan.lookup_ns:
            lookup = plan.lookup_ns / 1e9 / self.times.decode_seconds(plan.decode)
            gained -= LOOKUP_PRICE * min(lookup, LARGEST_DELAY)
        self._credit = min(self._credit + gained, self.most_credit)

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
        greedy, sampled = self.times.seconds_with_drafts()
        return {
            "method": self.config.method,
            "calibration_seconds": self.times.calibration_seconds,
            **self.counts,
            "drafted_by_position": list(self._drafted),
            "accepted_by_position": list(self._accepted),
            "step_seconds": greedy,
            "sampled_step_seconds": sampled,
        }


# Drafts of a drafter on the device.
#
#     step        N                          N + 1                        N + 2
#     device      decode, propose x y z      verify x y z, propose u v w  verify u v ...
#     host        plan N + 1: verify 3       commit N, plan N + 2         commit N + 1
#
# A step that proposes takes longer, whether or not its drafts are verified. A 99th percentile shows
# slow steps among fast ones, so in pauses fewer than one step in a hundred proposes.
#
# Steps with token masks propose nothing. Of rows whose output follows a grammar, tokens that it
# forces are verified. Only before such a step the loop commits the step in flight (`waits`).
#
# Of drafts that are `unread`, the host chooses how many are verified by how many it has accepted so
# far, by number of the draft; of others, by the probabilities that the drafter gave them.

PAUSED_TIME = 0.7
"""Decode steps that a draft after a prompt must be worth while the drafter is paused: it was judged
on other text."""

MOST_DRAFTER_DEFICIT = 8.0
"""How far below zero the credit may fall, in decode steps, before a paused drafter no longer
proposes after prompts."""


@dataclass(eq=False)
class DrafterSpeculator(Speculator):
    """Chooses how many of a drafter's proposals are verified, and when it proposes."""

    share, first_credit, most_credit, probe = 0.002, 64.0, 128.0, 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._acceptance = Acceptance(PROBABILITY_RATES, 256.0)
        self._by_position = Acceptance(POSITION_RATES, 256.0)
        self._keeps_drafts = True
        self._proposing_steps = 0

    def _guesses(self, requests: Sequence[Request]) -> Sequence[Guess]:
        self._keeps_drafts = (
            self._has_grammar or not self._paused or any(request.num_drafts for request in requests)
        )
        return [self._guess(request) for request in requests] if self._keeps_drafts else ()

    def prompt_drafts(self, chunks: Sequence[RowSpan]) -> int:
        """Return how many drafts the drafter proposes after each prompt that ends in a step.

        It does so in a pause too, where the host reads drafts before it plans the next step: they
        show whether this text is easier to predict, and no decode step is longer for them.
        """
        ending = [chunk.request for chunk in chunks if chunk.samples]
        most = self.times.drafts[False][0].most_drafts  # of a row alone
        if not most or all(request.num_unsampled <= 1 for request in ending):
            return 0
        if any(request.matcher is not None for request in ending):
            return 0
        if self._paused and (self.is_async_device or self._credit < -MOST_DRAFTER_DEFICIT):
            return 0
        return min(self.config.num_speculative_tokens, most)

    def _guess(self, request: Request) -> Guess:
        """Return what may follow a request's newest token."""
        if request.matcher is not None:  # what its grammar forces alone
            return NOTHING
        drafts: RowDrafts | None = request.proposed
        if request.num_pending:  # of the step in flight, which leaves them on the device
            acceptance = self._by_position if drafts is None else drafts.acceptance
            return Guess((), acceptance.chances(range(request.num_drafts)))
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

    def _note_rows(self, plan: StepPlan) -> None:
        self._proposing_steps += plan.proposes > 0 or plan.prompt_drafts > 0
        for request in plan.decode:
            request.num_drafts = plan.proposes
        for chunk in plan.prefill:
            chunk.request.num_drafts = plan.prompt_drafts if chunk.samples else 0

    def _undrafted(self, times: DraftTimes) -> float:
        return PAUSED_TIME if self._paused else times.multiples[0]

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
# Prompts are indexed in the steps that compute them, which the account is not charged for.

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

    def _guesses(self, requests: Sequence[Request]) -> Sequence[Guess]:
        if self._paused:
            # Nothing is looked up, but what a grammar forces is certain.
            return [NOTHING] * len(requests) if self._has_grammar else ()
        began = time.perf_counter_ns()
        guesses = self._looked(requests)
        self._lookup_ns = time.perf_counter_ns() - began
        return guesses

    def _begin_batch(self, requests: Sequence[Request]) -> None:
        if set(self._batch).isdisjoint(requests):
            self._credit = max(self._credit, NEW_CREDIT)
        super()._begin_batch(requests)

    def _note_rows(self, plan: StepPlan) -> None:
        """Index the prompts of a launched step."""
        if self._shared is not None:
            self._share_ended(self._shared)
        if not self._paused:
            for chunk in plan.prefill:
                request = chunk.request
                drafter = request.drafter or self._new_drafter(request)
                drafter.read(chunk.start + chunk.count, request.tokens, chunk.count)

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
        for request in ended:
            self._open.remove(request)
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
