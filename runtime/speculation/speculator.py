"""Decides before each step which rows verify how many drafts. No torch.

Every row's proposer drafts after each token, and learns from the next ones whether it was right
(`acceptance.py`). `VerifyCosts` compares what a step with drafts is expected to gain with the time
that it takes longer.

Drafts of the host continue the newest token, which on an asynchronous device is known only once the
step in flight is committed. While drafts are expected to pay, the loop commits it before it plans
the next step (`waits`): the device then idles for the work of the host, which the measured times of
these steps contain. Otherwise one step stays in flight as without speculation.

Speculation keeps an account of time. Looking for drafts is paid from it twice, and a verify step
adds what it gained, or subtracts what it lost, compared with decode steps of as many tokens. Decode
steps add 1 % of their time. Without credit no drafts are looked for, but tokens that a grammar
forces are verified. So even if too much is expected of drafts, they cost little more than this.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

from ..request import Request, RequestStatus
from ..scheduling.plan import StepPlan
from .acceptance import Acceptance
from .config import Speculation
from .guess import NOTHING, Guess, with_grammar
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

FIRST_CREDIT, MOST_CREDIT = 2.0, 16.0
"""Time that may be lost to speculation before it has gained any, and after it has gained much: in
decode steps."""


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
        self._credit = FIRST_CREDIT * costs.greedy.decode_seconds(1)
        self._look_ns = self._looks = 0
        self._acceptance = Acceptance()
        self._candidates = 1 if config.method == "ngram" else MAX_CANDIDATES
        self._shared: SharedOutputs | None = None
        if config.share_outputs:
            self._shared = SharedOutputs(config.prompt_lookup_min, self._candidates)
        self._open: list[Request] = []
        self._counter = StepCounter(config.num_speculative_tokens)

    def begin_plan(self) -> None:
        """Begin with the next step, which may draft nothing."""
        self.waits = False
        self._look_ns = 0

    def propose(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        """Return the drafts of each decoding request; nothing if no request should draft."""
        self.begin_plan()
        rests = self.config.adaptive and (self._credit < 0 or self._looks >= LOOKS_IN_A_ROW)
        if rests and not any(request.matcher is not None for request in requests):
            return ()
        sizes = self.sizes(len(requests))
        if not sizes:
            return ()
        if rests:  # nothing is looked for, but what a grammar forces is certain
            return self._chosen(requests, self._guesses(requests, None), sizes[-1] - 1)
        began = time.perf_counter_ns()
        drafts = self._chosen(
            requests, self._guesses(requests, self._caught_up(requests)), sizes[-1] - 1
        )
        self._look_ns = time.perf_counter_ns() - began
        return drafts

    def _guesses(
        self, requests: Sequence[Request], drafters: Sequence[RequestDrafter] | None
    ) -> list[Guess]:
        """Return what may follow each request; without drafters, what grammars force."""
        most, guesses = self.config.num_speculative_tokens, []
        for request, drafter in zip(requests, drafters or repeat(None), strict=False):
            guess = NOTHING
            if drafter is not None and drafter.draft is not None:
                guess = Guess(drafter.draft.tokens[: len(drafter.chances)], drafter.chances)
            guesses.append(with_grammar(request, guess, most))
        return guesses

    def _chosen(
        self, requests: Sequence[Request], guesses: Sequence[Guess], most: int
    ) -> Sequence[Sequence[int]]:
        """Return the tokens of each guess that are verified, at most `most` of a request."""
        chances = [guess.chances for guess in guesses]
        if not any(chances):
            return ()
        if self.config.adaptive:
            counts = self._costs.of(requests).choose(chances)
        else:
            counts = [min(len(own), most) for own in chances]
        self.waits = self._is_async_device and any(counts)
        if not any(counts) or any(request.num_pending for request in requests):
            return ()
        return [guess.tokens[:count] for guess, count in zip(guesses, counts, strict=True)]

    def launched(self, plan: StepPlan, started_ns: int) -> None:
        """Note when the loop began with a step that was launched."""
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
        if advanced is None:
            gained = LOOK_SHARE * decode_seconds
            if looked:
                self._looks += 1
                gained += max(decode_seconds - took.seconds, -decode_seconds)
            else:
                decode_seconds = costs.observe_decode(rows, took.seconds)
        else:
            n, tokens = plan.tokens_per_row, plan.decode_tokens
            most = (1 + LARGEST_ERROR) * costs.verify_seconds(rows, n, tokens)
            costs.observe(rows, n, tokens, took.seconds)
            gained = decode_seconds * sum(advanced) / rows - min(took.seconds, most)
        gained -= LOOK_PRICE * min(took.look_seconds, decode_seconds)
        most_credit = MOST_CREDIT * decode_seconds
        self._credit = min(max(self._credit + gained, -most_credit), most_credit)

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

    def _caught_up(self, requests: Sequence[Request]) -> list[RequestDrafter]:
        """Return the drafters of requests with their known tokens.

        Rows share the tokens that are indexed between two steps, those of long prompts after the
        newest ones of others, and outputs of other requests last.
        """
        left, drafters, behind = INDEXED_PER_STEP, [], []
        for request in requests:
            drafter = request.drafter or self._new_drafter(request)
            if request.num_tokens - drafter.seen > FEW_TOKENS:
                behind.append((drafter, request))
            else:
                left -= drafter.catch_up(request.num_tokens, request.tokens, FEW_TOKENS)
            drafters.append(drafter)
        for drafter, request in behind:
            left -= drafter.catch_up(request.num_tokens, request.tokens, max(left, 0))
        if self._shared is not None:
            self._share(self._shared, left)
        return drafters

    def _share(self, shared: SharedOutputs, most: int) -> None:
        """Add the outputs of requests that have ended, and index at most `most` tokens."""
        ended = [r for r in self._open if r.status is RequestStatus.FINISHED]
        if ended:
            self._open = [r for r in self._open if r.status is not RequestStatus.FINISHED]
            for request in ended:
                shared.add(request.salt, request.output_ids)
        shared.index_some(most)

    def _new_drafter(self, request: Request) -> RequestDrafter:
        index = SuffixIndex(self.config.prompt_lookup_min, self._candidates)
        first = max(0, request.num_tokens - MAX_INDEXED_TOKENS // 2)
        own, most = Acceptance(self._acceptance), self.config.num_speculative_tokens
        request.drafter = RequestDrafter(index, own, most, first, self._shared, request.salt)
        if self._shared is not None:
            self._open.append(request)
        return request.drafter
