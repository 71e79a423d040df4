"""Decides before each step which rows verify how many drafts. No torch.

Every row's proposer drafts after each token, and learns from the next ones whether it was right
(`acceptance.py`). `VerifyCosts` compares what a step with drafts is expected to gain with the time
that it takes longer.

Drafts of the host continue the newest token, which on an asynchronous device is known only once the
step in flight is committed. While drafts are expected to pay, the loop commits it before it plans
the next step (`waits`): the device then idles for the work of the host, which the measured times of
these steps contain. Otherwise one step stays in flight as without speculation.

Speculation keeps an account of time, in decode steps. Looking for drafts is paid from it twice, and
a verify step adds what it gained, or subtracts what it lost, compared with decode steps of as many
tokens. Decode steps add 1 % of their time. Without credit no drafts are looked for, but tokens that
a grammar forces are verified. So even if too much is expected of drafts, they cost little more than
this. Prompts are indexed in the steps that compute them, which is not charged.

Nearly all of that is saved where drafts do not pay. A row whose drafts are not promising rests for
1, 2, 4, ... steps, at most 32, before it looks for drafts again, with the tokens of these steps at
once; so does a batch whose drafts are not verified (`pause.py`). While all rows rest, a step costs
a comparison. Looks that gain nothing are hence a few in a hundred steps, and verify steps reset it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..request import Request, RequestStatus
from ..scheduling.plan import StepPlan
from .acceptance import Acceptance
from .config import Speculation
from .grammar_drafts import with_grammar
from .guess import NOTHING, Guess
from .pause import MAX_PAUSE, Pause
from .request_drafter import MAX_INDEXED_TOKENS, RequestDrafter
from .shared_outputs import SharedOutputs
from .step_counter import StepCounter
from .suffix_index import MAX_CANDIDATES, SuffixIndex
from .verify_costs import LARGEST_ERROR, BatchCosts

__all__ = ["Speculator"]

INDEXED_PER_STEP = 512
"""Tokens that are indexed between two steps, of all rows: about a quarter of a millisecond."""

FEW_TOKENS = 32
"""Rows with no more new tokens are indexed at once: any step adds fewer."""

LOOK_SHARE, LOOK_PRICE = 0.01, 2.0
"""Share of the time of decode steps that is credited to speculation, and what a second of looking
for drafts costs: so half of what drafts gain may be spent on looking for them."""

LOOKS_IN_A_ROW = 7
"""Decode steps in a row with a look for drafts, before one without. Looking fills the processor's
caches and slows the step down: only steps without show how long plain decoding takes."""

UNTIMED = 16
"""While all rows rest, one of so many steps is timed."""

LARGEST_DELAY = 0.5
"""Decode steps that a look takes, and that it slows a step down, at most: what takes longer is a
disturbance by other processes."""

FIRST_CREDIT, MOST_CREDIT = 2.0, 16.0
"""Time that may be lost to speculation before it has gained any, and after it has gained much: in
decode steps."""

NEW_CREDIT, MOST_DEBT = 0.5, 2.0
"""The least credit of a batch of other requests, and the largest debt, which 200 decode steps pay:
text that follows may be easier to predict."""

GAINING = 4.0
"""Credit above which rows rest at most `SHORT_PAUSE` steps: drafts have gained lately."""

SHORT_PAUSE = 4


class Speculator:
    """Proposes the drafts of all rows, and chooses how many are verified."""

    def __init__(
        self,
        config: Speculation,
        sizes: Callable[[int], Sequence[int]],
        costs: BatchCosts,
        *,
        is_async_device: bool,
        calibration_seconds: float = 0.0,
    ) -> None:
        """Start without requests.

        Args:
            config: the proposer, and whether to choose.
            sizes: returns the tokens per row that verify steps of so many rows exist for.
            costs: the times of steps.
            is_async_device: whether steps stay in flight.
            calibration_seconds: that measuring the times took.
        """
        self._calibration_seconds = calibration_seconds
        self.config = config
        self.sizes = sizes
        self.waits = False
        """Whether the step in flight is to be committed before the next one is planned."""
        self.proposes = 0
        """Drafts that the step proposes on the device; see `DrafterSpeculator`."""
        self._costs = costs
        self._is_async_device = is_async_device
        self._credit = FIRST_CREDIT
        self._look_ns = self._looks = 0
        self._step = 0
        """Steps so far that could draft."""
        self._pause = Pause()
        """Of the batch, after drafts that were not worth a verify step."""
        self._batch: Sequence[Request] = ()
        """The rows of the last one, of which `_has_grammar` and `_rests_until` speak."""
        self._has_grammar = False
        self._rests_until = 0
        """The first step for which a row of the batch looks for drafts."""
        self._is_behind = False
        """Whether tokens of a row wait to be indexed."""
        self._is_timed = True
        self._untimed = 0
        """Decode steps since the last one that was timed."""
        self._acceptance = Acceptance()
        self._candidates = 1 if config.method == "ngram" else MAX_CANDIDATES
        self._shared: SharedOutputs | None = None
        if config.share_outputs:
            self._shared = SharedOutputs(config.prompt_lookup_min, self._candidates)
        self._open: list[Request] = []
        self._counter = StepCounter(config.num_speculative_tokens)

    def begin_plan(self) -> None:
        """Begin with the next step, which may draft nothing."""
        self.waits, self._is_timed = False, True
        self._look_ns = 0

    def propose(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        """Return the drafts of each decoding request; nothing if no request should draft."""
        self.begin_plan()
        self._step = step = self._step + 1
        if requests is not self._batch:  # the same list until a request joins or leaves
            self._begin_batch(requests)
        elif step < self._rests_until:
            self._is_timed = step % UNTIMED == 0
            self._untimed += not self._is_timed
            return ()
        rests = self.config.adaptive and (self._credit < 0 or self._looks >= LOOKS_IN_A_ROW)
        if rests and not self._has_grammar:
            if self._credit < 0:  # until decode steps have paid
                self._rests_until = step + min(math.ceil(-self._credit / LOOK_SHARE), MAX_PAUSE)
            return ()
        sizes = self.sizes(len(requests))
        if not sizes:
            return ()
        if rests:  # nothing is looked for, but what a grammar forces is certain
            return self._chosen(requests, [NOTHING] * len(requests), sizes[-1] - 1)
        began = time.perf_counter_ns()
        drafts = self._chosen(requests, self._looked(requests), sizes[-1] - 1)
        if drafts or self.waits:
            self._pause = Pause()
        elif self.config.adaptive and not (self._has_grammar or self._is_behind):
            own = self._pause.next_look(step, self._most_pause())
            self._rests_until = max(self._rests_until, own)
        self._look_ns = time.perf_counter_ns() - began
        return drafts

    def _begin_batch(self, requests: Sequence[Request]) -> None:
        if set(self._batch).isdisjoint(requests):
            self._pause, self._credit = Pause(), max(self._credit, NEW_CREDIT)
        self._batch, self._rests_until = requests, 0
        self._has_grammar = any(request.matcher is not None for request in requests)

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
        chances = [guess.chances for guess in guesses]
        if not any(chances):
            return ()
        if self.config.adaptive:
            counts = self._costs.of(requests).choose(chances)
        else:
            counts = [len(own) for own in chances]
        self.waits = self._is_async_device and any(counts)
        if not any(counts) or any(request.num_pending for request in requests):
            return ()
        return [guess.tokens[:count] for guess, count in zip(guesses, counts, strict=True)]

    def launched(self, plan: StepPlan, started_ns: int) -> None:
        """Note when the loop began with a step that was launched, and index its prompts."""
        if plan.prefill:
            if self._shared is not None:
                self._share_ended(self._shared)
            if self._credit >= 0 or not self.config.adaptive:
                self._index(plan)
        if not self._is_timed:
            return
        # On an asynchronous device, looking overlaps with a step in flight, or delays the next one.
        if not self._is_async_device:
            started_ns += self._look_ns
        self._counter.launched(plan, started_ns, self._look_ns / 1e9)

    def committed(self, plan: StepPlan, advanced: Sequence[int] | None, arrived_ns: int) -> None:
        """Count what a step accepted, and learn from its time; once for every launched step."""
        took = self._counter.committed(plan, advanced, arrived_ns)
        if took is None or not plan.decode:
            return
        rows, costs = len(plan.decode), self._costs.of(plan.decode)
        costs.count(plan.tokens_per_row)
        looked = took.look_seconds > 0
        if not looked or advanced is not None:
            self._looks = 0
        if plan.prefill or any(request.matcher is not None for request in plan.decode):
            return  # chunks and masks take time of their own
        decode_seconds = costs.decode_seconds(rows)
        untimed, self._untimed = self._untimed, 0
        if advanced is None:
            gained, most_credit = LOOK_SHARE * (1 + untimed), FIRST_CREDIT
            if looked:
                self._looks += 1
                gained += max(1 - took.seconds / decode_seconds, -LARGEST_DELAY)
            else:
                decode_seconds = costs.observe_decode(rows, took.seconds, 1 + untimed)
        else:
            n, tokens = plan.tokens_per_row, plan.decode_tokens
            most = (1 + LARGEST_ERROR) * costs.verify_seconds(rows, n, tokens)
            costs.observe(rows, n, tokens, took.seconds)
            gained = sum(advanced) / rows - min(took.seconds, most) / decode_seconds
            most_credit = MOST_CREDIT  # only drafts earn more than the first credit
        gained -= LOOK_PRICE * min(took.look_seconds / decode_seconds, LARGEST_DELAY)
        most_credit = max(most_credit, self._credit)
        self._credit = min(max(self._credit + gained, -MOST_DEBT), most_credit)

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
            **self._counter.stats(),
            **self._costs.stats(),
        }

    def _looked(self, requests: Sequence[Request]) -> list[Guess]:
        """Return what may follow each request, of those that do not rest.

        Rows share the tokens that are indexed between two steps, those of long prompts after the
        newest ones of others, and outputs of other requests last.
        """
        step, left, behind = self._step, INDEXED_PER_STEP, []
        adaptive, guesses = self.config.adaptive, [NOTHING] * len(requests)
        promising = self._costs.of(requests).least_drafts(len(requests)) if adaptive else 0.0
        most_pause = self._most_pause()
        rests_until = step + MAX_PAUSE
        for row, request in enumerate(requests):
            drafter = request.drafter
            if drafter is None:
                drafter = self._new_drafter(request)
            if step >= drafter.rests_until:
                known = request.num_tokens
                if known - drafter.seen > FEW_TOKENS:
                    behind.append((row, known))
                    continue
                left -= drafter.catch_up(known, request.tokens, FEW_TOKENS)
                if drafter.is_promising(promising, step, most_pause):
                    guesses[row] = drafter.guess
            if drafter.rests_until < rests_until:
                rests_until = drafter.rests_until
        for row, known in behind:
            drafter = requests[row].drafter
            assert drafter is not None, "it has looked for drafts"
            left -= drafter.catch_up(known, requests[row].tokens, max(left, 0))
            if drafter.seen == known and drafter.is_promising(promising, step, most_pause):
                guesses[row] = drafter.guess
            rests_until = min(rests_until, drafter.rests_until)
        self._is_behind = left <= 0 and bool(behind)
        if self._shared is not None:
            self._share_ended(self._shared)
            self._shared.index_some(left)
        self._rests_until = 0 if self._has_grammar or not adaptive else rests_until
        return guesses

    def _index(self, plan: StepPlan) -> None:
        """Index as many tokens of each prompt as the step computes."""
        for chunk in plan.prefill:
            request = chunk.request
            drafter = request.drafter or self._new_drafter(request)
            drafter.read(chunk.start + chunk.count, request.tokens, chunk.count)

    def _most_pause(self) -> int:
        """Return how long rows rest at most: hardly at all while drafts gain."""
        return SHORT_PAUSE if self._credit > GAINING else MAX_PAUSE

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
        own, most = Acceptance(self._acceptance), self.config.num_speculative_tokens
        request.drafter = RequestDrafter(index, own, most, first, self._shared, request.salt)
        if self._shared is not None:
            self._open.append(request)
        return request.drafter
