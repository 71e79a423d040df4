"""Decides before each step which rows verify how many drafts. No torch.

Every row's proposer drafts after each token, and learns from the next ones whether it was right
(`acceptance.py`). `VerifyCosts` compares what a step with drafts is expected to gain with the time
that it takes longer.

Drafts of the host continue the newest token, which on an asynchronous device is known only once the
step in flight is committed. While drafts are expected to pay, the loop commits it before it plans
the next step (`waits`): the device then idles for the work of the host, which the measured times of
these steps contain. Otherwise one step stays in flight as without speculation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ..request import Request
from ..scheduling.plan import StepPlan
from .acceptance import Acceptance
from .config import Speculation
from .request_drafter import MAX_INDEXED_TOKENS, RequestDrafter
from .suffix_index import MAX_CANDIDATES, SuffixIndex
from .verify_costs import VerifyCosts

__all__ = ["Speculator"]

INDEXED_PER_STEP = 512
"""Tokens that are indexed between two steps, of all rows: about a quarter of a millisecond."""

FEW_TOKENS = 32
"""Rows with no more new tokens are indexed at once: any step adds fewer."""

LOOKS_IN_VAIN, SKIPPED_STEPS = 16, 3
"""After `LOOKS_IN_VAIN` steps in which drafts did not pay, so many steps draft nothing before the
next look: looking up the drafts of 8 rows takes a tenth of a step of a millisecond, and more."""

LEAST_CHANCE = 0.05
"""Drafts that are less likely to be accepted are not verified."""


class Speculator:
    """Proposes the drafts of all rows, and chooses how many are verified."""

    def __init__(
        self,
        config: Speculation,
        sizes: Callable[[int], Sequence[int]],
        costs: tuple[VerifyCosts, VerifyCosts],
        *,
        is_async_device: bool,
        calibration_seconds: float = 0.0,
    ) -> None:
        """Start without requests.

        Args:
            config: the proposer, and whether to choose.
            sizes: returns the tokens per row that verify steps of so many rows exist for.
            costs: the times of steps, by whether the full sampler runs.
            is_async_device: whether steps stay in flight.
            calibration_seconds: that measuring the times took.
        """
        self._calibration_seconds = calibration_seconds
        self.config = config
        self.sizes = sizes
        self.waits = False
        """Whether the step in flight is to be committed before the next one is planned."""
        self._costs = costs
        self._is_async_device = is_async_device
        self._in_vain = self._skipped = 0
        self._acceptance = Acceptance()
        self._candidates = 1 if config.method == "ngram" else MAX_CANDIDATES
        self._launched: deque[tuple[StepPlan, int]] = deque()
        self._arrived_ns = 0
        self._verify_steps = 0
        self._drafted = [0] * config.num_speculative_tokens
        self._accepted = [0] * config.num_speculative_tokens

    def propose(self, requests: Sequence[Request]) -> Sequence[Sequence[int]]:
        """Return the drafts of each decoding request; nothing if no request should draft."""
        self.waits = False
        sizes = self.sizes(len(requests))
        if not sizes:
            return ()
        has_grammar = any(request.matcher is not None for request in requests)
        if self.config.adaptive and self._in_vain >= LOOKS_IN_VAIN and not has_grammar:
            self._skipped = (self._skipped + 1) % (SKIPPED_STEPS + 1)
            if self._skipped:
                return ()
        self._in_vain += 1
        guesses = [
            _guess(request, drafter, self.config.num_speculative_tokens)
            for request, drafter in zip(requests, self._caught_up(requests), strict=True)
        ]
        chances = [own for _, own in guesses]
        if not any(chances):
            return ()
        if self.config.adaptive:
            most = self._costs[_full_sampler(requests)].choose(chances) - 1
        else:
            most = min(max(map(len, chances)), sizes[-1] - 1)
        if most:
            self._in_vain = 0
        self.waits = self._is_async_device and most > 0
        if not most or any(request.num_pending for request in requests):
            return ()
        least = LEAST_CHANCE if self.config.adaptive else 0.0
        return [tokens[: sum(chance >= least for chance in own[:most])] for tokens, own in guesses]

    def launched(self, plan: StepPlan, started_ns: int) -> None:
        """Note when the loop began with a step that was launched."""
        self._launched.append((plan, started_ns))

    def committed(self, plan: StepPlan, advanced: Sequence[int] | None, arrived_ns: int) -> None:
        """Count what a step accepted, and learn from its time; once for every launched step."""
        began, self._arrived_ns = self._arrived_ns, arrived_ns
        if advanced is not None:
            self._verify_steps += 1
            for drafts, count in zip(plan.drafts, advanced, strict=True):
                for index in range(len(drafts)):
                    self._drafted[index] += 1
                    self._accepted[index] += index < count - 1
        if not (self._launched and self._launched[0][0] is plan):  # of `score`, or with token masks
            return
        _, started = self._launched.popleft()
        if not plan.decode:
            return
        costs = self._costs[_full_sampler(plan.decode)]
        costs.count(plan.tokens_per_row)
        if not plan.prefill:
            # An asynchronous device begins a step when the previous one has ended.
            seconds = (arrived_ns - max(began, started)) / 1e9
            costs.observe(len(plan.decode), plan.tokens_per_row, seconds)

    @property
    def counts(self) -> dict[str, int]:
        """Verify steps, and the drafts that they verified and accepted."""
        return {
            "verify_steps": self._verify_steps,
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
            "calibration_seconds": self._calibration_seconds,
            **self.counts,
            "drafted_by_position": list(self._drafted),
            "accepted_by_position": list(self._accepted),
            "step_seconds": self._costs[0].seconds(),
            "sampled_step_seconds": self._costs[1].seconds(),
        }

    def _caught_up(self, requests: Sequence[Request]) -> list[RequestDrafter | None]:
        """Return the drafters of requests with their known tokens; None for those that never draft.

        The sampler counts one token per step for the penalties of a row. Rows share the tokens that
        are indexed between two steps, those of long prompts after the newest ones of others.
        """
        left, drafters, behind = INDEXED_PER_STEP, [], []
        for request in requests:
            drafter = None
            if not request.params.uses_penalties:
                drafter = request.drafter or self._new_drafter(request)
                if request.num_tokens - drafter.seen > FEW_TOKENS:
                    behind.append((drafter, request))
                else:
                    left -= drafter.catch_up(request.num_tokens, request.tokens, FEW_TOKENS)
            drafters.append(drafter)
        for drafter, request in behind:
            left -= drafter.catch_up(request.num_tokens, request.tokens, max(left, 0))
        return drafters

    def _new_drafter(self, request: Request) -> RequestDrafter:
        index = SuffixIndex(self.config.prompt_lookup_min, self._candidates)
        first = max(0, request.num_tokens - MAX_INDEXED_TOKENS)
        own, most = Acceptance(self._acceptance), self.config.num_speculative_tokens
        request.drafter = RequestDrafter(index, own, most, first)
        return request.drafter


def _guess(
    request: Request, drafter: RequestDrafter | None, most: int
) -> tuple[Sequence[int], Sequence[float]]:
    """Return what may follow a request, and the chance of each token.

    Tokens that a grammar forces are certain.
    """
    if drafter is None:
        return (), ()
    tokens: Sequence[int] = () if drafter.draft is None else drafter.draft.tokens
    chances: Sequence[float] = drafter.chances
    tokens = tokens[: len(chances)]
    if request.matcher is not None:
        tokens, forced = request.matcher.drafts(request, tokens)
        tokens = tokens[:most]
        chances = [1.0] * len(tokens) if forced else chances[: len(tokens)]
    return tokens, chances


def _full_sampler(requests: Sequence[Request]) -> bool:
    return any(request.params.needs_full_sampler for request in requests)
