"""Decides when the drafter on the device proposes, and which rows verify how many drafts. No torch.

    step        N                          N + 1                        N + 2
    device      decode, propose x y z      verify x y z, propose u v w  verify u v ...
    host        plan N + 1: verify 3       commit N, plan N + 2         commit N + 1

A step that proposes takes longer than one that does not, whether or not its drafts are verified. So
the engine keeps an account of the time that drafts have gained and cost. Once it is overdrawn, the
drafter rests, until decode steps, each of which pays a little into it, have paid for a trial. It is
one step that proposes, unless its drafts promise more than decode steps, and then those that verify
them. Slow steps among fast ones are what a 99th percentile shows, so that trials in vain become
rarer. While the drafter works otherwise, drafts are verified unless a step that only proposes would
gain more.

Steps with token masks propose nothing. Of rows whose output follows a grammar, tokens that it
forces are verified.

On an asynchronous device the next step is planned before the host has read the drafts. Their row
keeps them, and the host chooses how many are verified by how many it has accepted so far, by number
of the draft (`OWN_DRAFT`). Where steps run synchronously, and if the step was committed before, it
knows the drafts: it sends them, and chooses by the probabilities that the drafter gave them.

Only before a step with drafts and with rows whose output follows a grammar the loop commits the
step in flight (`waits`): what a grammar forces is known when its tokens are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ..request import OWN_DRAFT, Request, RequestStatus
from ..scheduling.plan import Proposed, RowSpan, StepPlan
from .config import Speculation
from .drafter_acceptance import DrafterAcceptance, PositionAcceptance
from .grammar_drafts import with_grammar
from .guess import NOTHING, Guess
from .row_drafts import RowDrafts
from .step_counter import StepCounter
from .verify_costs import LARGEST_ERROR, BatchCosts

__all__ = ["DrafterSpeculator"]

DRAFT_SHARE, LEAST_SHARE = 0.006, 0.0015
"""Share of the time of decode steps that may be spent on drafts that do not pay, until the drafter
first rests, and the least. Each rest without a gain before it halves the share. A step that
proposes takes two to three times as long as a decode step, so that in the end one in 1,000 does."""

FIRST_CREDIT, TRIAL, MOST_CREDIT = 64.0, 2.0, 128.0
"""Time that may be lost to drafts before they have gained any, after a rest, and after they have
gained much: in decode steps. Some steps of a text are easier to predict than others, so a few of
them do not tell whether drafts pay."""

GAINING = 8.0
"""Credit of a trial that shows that drafts pay again."""

RESTING_TIME = 0.7
"""Decode steps that a draft after a prompt must be worth while the drafter rests. The drafter was
judged on other text, so weak promises do not count."""

MOST_DEBT = 8.0
"""How far below zero the credit may fall, in decode steps, before a drafter at rest no longer
proposes after prompts."""

FIRST_TIMED, TIMED_AFTER, TIMED_STEPS = 8, 128, 4
"""Steps that propose after which some decode steps are run, at first and later, so that their time
remains known; and how many. The first of them does not count: it finds the caches cold."""

RESTING_TIMED = 16
"""While the drafter rests, one of so many steps is timed."""

TIMED_RATE = 0.3
"""Share of an error by which the time of decode steps is corrected."""

PROPOSING_RATE = 0.1
"""Share of an error by which the time of steps that propose and verify nothing is corrected."""


class DrafterSpeculator:
    """Chooses how many of a drafter's proposals are verified, and when it proposes."""

    def __init__(
        self,
        config: Speculation,
        sizes: Callable[[int], Sequence[int]],
        costs: BatchCosts,
        proposing: Callable[[int], float],
        *,
        is_async_device: bool,
        calibration_seconds: float = 0.0,
    ) -> None:
        """Start without requests.

        Args:
            config: the drafter, and whether to choose.
            sizes: returns the tokens per row that verify steps of so many rows exist for.
            costs: the times of decode steps and of verify steps with proposals.
            proposing: returns the time of a step of so many rows that proposes and verifies
                nothing, as a multiple of that of a decode step.
            is_async_device: whether steps stay in flight.
            calibration_seconds: that measuring the times took.
        """
        self.config = config
        self.sizes = sizes
        self.proposes = 0
        """Drafts that the step to be planned proposes for each row."""
        self._forces = False
        """Whether the step to be planned has drafts, and rows with a grammar."""
        self._costs, self._proposing = costs, proposing
        self._is_async_device = is_async_device
        self._calibration_seconds = calibration_seconds
        self._acceptance = DrafterAcceptance()
        self._by_position = PositionAcceptance()
        self._credit, self._rests, self._share = FIRST_CREDIT, False, DRAFT_SHARE
        self._is_trial = False
        """Whether the drafter works after a rest, and has not gained yet."""
        self._untimed = TIMED_AFTER - FIRST_TIMED
        """Steps that proposed since the last decode steps that were timed."""
        self._plain = 0
        """Timed decode steps since the last step that proposed."""
        self._is_timed = True
        self._skipped = 0
        """Decode steps since the last one that was timed, at rest."""
        self._slowdown = 1.0
        """Measured times of steps that propose and verify nothing, relative to `proposing`."""
        self._batch: Sequence[Request] = ()
        """The rows of the last step, of which `_has_grammar` speaks."""
        self._has_grammar = False
        self._counter = StepCounter(config.num_speculative_tokens)
        self._proposing_steps = 0

    @property
    def waits(self) -> bool:
        """Whether the step in flight is to be committed before the next one is planned."""
        return self._is_async_device and self._forces

    def begin_plan(self) -> None:
        """Begin with the next step, which may draft nothing."""
        self.proposes, self._forces, self._is_timed = 0, False, True

    def propose(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        """Return the drafts that each decoding request verifies; nothing if none does.

        Decides too whether the step proposes.
        """
        self.begin_plan()
        if requests is not self._batch:  # the same list until a request joins or leaves
            self._batch = requests
            self._has_grammar = any(request.matcher is not None for request in requests)
        has_grammar, rests = self._has_grammar, self._is_overdrawn
        if self.config.adaptive:
            self._set_rest(rests)
            if self._untimed >= TIMED_AFTER and not has_grammar:  # whose steps are not timed
                return ()
        if rests and not (has_grammar or any(request.num_drafts for request in requests)):
            self._skipped += 1
            self._is_timed = self._skipped >= RESTING_TIMED
            return ()
        sizes = self.sizes(len(requests))
        if not sizes:
            return ()
        # Drafts of a step with fewer rows can be more than this one verifies.
        guesses = [self._guess(request).first(sizes[-1] - 1) for request in requests]
        counts = [len(own.tokens) for own in guesses]
        if self.config.adaptive and any(counts):
            chances, otherwise = [own.chances for own in guesses], 1.0
            if rests and not has_grammar:
                otherwise = RESTING_TIME
            elif not (has_grammar or self._is_trial):
                otherwise = self._propose_multiple(len(requests))
            counts = self._costs.of(requests).choose(chances, otherwise)
            if self._is_trial and not any(counts):
                rests = True
                self._set_rest(rests)
        verifies = any(counts)
        if has_grammar:
            self._forces = verifies
            if any(request.num_pending for request in requests):
                return ()
        elif verifies or not rests:
            self.proposes = min(self.config.num_speculative_tokens, sizes[-1] - 1)
        if not verifies:
            return ()
        return [own.tokens[:count] for own, count in zip(guesses, counts, strict=True)]

    def prompt_drafts(self, chunks: Sequence[RowSpan]) -> int:
        """Return how many drafts the drafter proposes after each prompt that ends in a step.

        It does so at rest too, where the host reads drafts before it plans the next step: they
        show whether this text is easier to predict, and no decode step is longer for them.
        """
        ending = [chunk.request for chunk in chunks if chunk.samples]
        sizes = self.sizes(1)
        if not sizes or all(request.num_unsampled <= 1 for request in ending):
            return 0
        if any(request.matcher is not None for request in ending):
            return 0
        if self._is_overdrawn and (self._is_async_device or self._credit < -MOST_DEBT):
            return 0
        return min(self.config.num_speculative_tokens, sizes[-1] - 1)

    @property
    def _is_overdrawn(self) -> bool:
        """Whether the drafter is to rest."""
        return self.config.adaptive and self._credit < (TRIAL if self._rests else 0.0)

    def _set_rest(self, rests: bool) -> None:
        """Begin or end a rest of the drafter, or continue as before."""
        if rests == self._rests:
            return
        self._rests, self._is_trial = rests, not rests
        if rests:
            self._share = max(self._share / 2, LEAST_SHARE)

    def _guess(self, request: Request) -> Guess:
        """Return what may follow a request's newest token."""
        if request.matcher is not None:
            return with_grammar(request, NOTHING, self.config.num_speculative_tokens)
        drafts = request.proposed
        if request.num_pending:  # of the step in flight, which leaves them on the device
            acceptance = self._by_position if drafts is None else drafts.acceptance
            return Guess([OWN_DRAFT] * request.num_drafts, acceptance.chances(request.num_drafts))
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
            last, known = request.proposed, request.num_tokens
            if last is None:
                acceptance = PositionAcceptance(self._by_position)
            else:
                acceptance, sampled = last.acceptance, request.tokens(last.at, known)
                self._acceptance.judge(last.tokens, last.probabilities, sampled)
                if self._is_async_device:  # for drafts that are verified before they are read
                    acceptance.judge(last.tokens[: len(last.probabilities)], sampled)
            own = probabilities[: max(stop - known, 0)]
            chances = self._acceptance.chances(own)
            request.proposed = RowDrafts(known, drafts, own, chances, acceptance)

    def launched(self, plan: StepPlan, started_ns: int) -> None:
        """Note when the loop began with a step that was launched."""
        if not (self._is_timed or plan.prefill):
            return  # at rest, no row has drafts to reset
        self._counter.launched(plan, started_ns)
        for request in plan.decode:
            request.num_drafts = plan.proposes
        for chunk in plan.prefill:
            chunk.request.num_drafts = plan.prompt_drafts if chunk.samples else 0

    def committed(self, plan: StepPlan, advanced: Sequence[int] | None, arrived_ns: int) -> None:
        """Count what a step accepted, and learn from its time; once for every launched step."""
        took = self._counter.committed(plan, advanced, arrived_ns)
        if took is None:
            return
        self._proposing_steps += plan.proposes > 0 or plan.prompt_drafts > 0
        if not plan.decode:
            return
        rows, costs = len(plan.decode), self._costs.of(plan.decode)
        if any(request.matcher is not None for request in plan.decode):
            return  # masks take time of their own
        if not plan.proposes:
            if advanced is not None or plan.prefill:
                return
            skipped, self._skipped = self._skipped, 0
            self._plain += 1
            if self._plain > 1:
                costs.observe_decode(rows, took.seconds, 1 + skipped, TIMED_RATE)
            if self._plain == TIMED_STEPS:
                self._untimed = 0
            gained = self._share * max(skipped, 1)
        else:
            self._untimed, self._plain = self._untimed + 1, 0
            decode_seconds = costs.decode_seconds(rows)
            n, tokens = plan.tokens_per_row, plan.decode_tokens
            if advanced is None:
                expected, reached = self._propose_multiple(rows) * decode_seconds, rows
            else:
                expected, reached = costs.verify_seconds(rows, n, tokens), sum(advanced)
            seconds = expected  # with a chunk of prefill, the step took longer
            if not plan.prefill:
                seconds = min(took.seconds, (1 + LARGEST_ERROR) * expected)
                if advanced is not None:
                    costs.observe(rows, n, tokens, took.seconds)
                else:
                    self._slowdown *= 1 + PROPOSING_RATE * (seconds / expected - 1)
            gained = reached / rows - seconds / decode_seconds
            if self._credit > GAINING:
                self._share, self._is_trial = DRAFT_SHARE, False
        self._credit = min(self._credit + gained, MOST_CREDIT)

    def _propose_multiple(self, rows: int) -> float:
        """Return the time of a step that proposes and verifies nothing, in decode steps."""
        return max(self._slowdown * self._proposing(rows), 1.0)

    @property
    def counts(self) -> dict[str, int]:
        """Verify steps, and the drafts that they verified and accepted."""
        return self._counter.counts

    @property
    def accepted_by_position(self) -> tuple[int, ...]:
        """Accepted drafts by their number in the draft of a row, the first one first."""
        return self._counter.accepted_by_position

    def stats(self) -> dict[str, Any]:
        """Return counters and step times as plain numbers; see `Engine.stats`."""
        return {
            "method": self.config.method,
            "calibration_seconds": self._calibration_seconds,
            "proposing_steps": self._proposing_steps,
            **self._counter.stats(),
            **self._costs.stats(),
        }
