"""When a drafter on the device proposes, and which of its drafts are verified. No torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stepgraph.runtime.config import Speculation
from stepgraph.runtime.request import Request
from stepgraph.runtime.scheduling.plan import Proposed, RowSpan, StepPlan
from stepgraph.runtime.scheduling.speculator import DrafterSpeculator
from stepgraph.runtime.speculation.request_drafter import (
    PROBABILITY_RATES,
    Acceptance,
    probability_class,
)

from .test_draft_choice import Served, row, serve, step, step_times

DRAFTS = 3
PROPOSING = {1: 1.4, 2: 1.5, 3: 1.6, 4: 1.7}
"""Seconds of steps that propose, by tokens per row. A decode step takes 1 s."""


def make(*, adaptive: bool = True, is_async_device: bool = False) -> DrafterSpeculator:
    return DrafterSpeculator(
        Speculation(method="eagle3", model="x", num_speculative_tokens=DRAFTS, adaptive=adaptive),
        step_times({1: PROPOSING}),
        is_async_device=is_async_device,
    )


def decode(speculator: DrafterSpeculator, request: Request, right: float, tokens: int) -> Served:
    """Decode a row whose drafts are right by chance, with probabilities that say so."""
    return serve(speculator, request, [1] * tokens, PROPOSING | {1: 1.0}, right=right)


@pytest.mark.parametrize("is_async_device", [False, True])
def test_a_good_drafter_proposes_in_every_step(is_async_device: bool) -> None:
    speculator = make(is_async_device=is_async_device)
    served = decode(speculator, row([1, 2, 3]), 0.9, 600)
    assert served.proposing > 0.9 * served.steps
    assert served.seconds < 400
    assert not speculator.waits
    stats = speculator.stats()
    assert stats["proposing_steps"] == served.proposing
    assert stats["accepted"] > 0.7 * stats["drafted"]


def test_a_bad_drafter_costs_next_to_nothing_until_it_is_right_again() -> None:
    """A step that proposes is longer by 0.4 of a step.

    Once the first credit is spent, these are one in two hundred steps.
    """
    speculator, request = make(), row([1, 2, 3])
    assert decode(speculator, request, 0.02, 300).seconds < 300 + speculator.first_credit + 1
    served = decode(speculator, request, 0.02, 3800)
    assert 0 < served.proposing < 25
    assert served.seconds < 3500 * 1.01
    decode(speculator, request, 0.02, 5000)
    assert 0 < decode(speculator, request, 0.02, 15_000).proposing < 60
    decode(speculator, request, 0.9, 20_000)
    served = decode(speculator, request, 0.9, 20_600)
    assert served.proposing > 0.9 * served.steps


def prefill(speculator: DrafterSpeculator, request: Request, chance: float, token: int) -> None:
    """A step that ends a prompt, whose next tokens are 1; perhaps with drafts of another one."""
    chunk = RowSpan(request, 0, 0, 3, samples=True)
    plan = StepPlan(prefill=[chunk], prompt_drafts=speculator.prompt_drafts([chunk]))
    step(speculator, plan, 1.0)
    request.append_token(1, 0)
    if plan.prompt_drafts:
        speculator.received([Proposed(request, 10**6, [token] * DRAFTS, [chance] * DRAFTS)])


def test_drafts_after_a_prompt_end_a_rest() -> None:
    speculator = make()
    decode(speculator, row([1, 2, 3]), 0.02, 1000)
    request = row([1, 2, 3])
    prefill(speculator, request, 0.9, 1)
    served = decode(speculator, request, 0.9, 100)
    assert served.proposing > 0.9 * served.steps


def test_drafts_after_prompts_lose_little_at_rest() -> None:
    """Which the drafter takes for right, though they never are."""
    speculator = make()
    decode(speculator, row([1, 2, 3]), 0.02, 1000)
    seconds = 0.0
    for _ in range(200):
        request = row([1, 2, 3])
        prefill(speculator, request, 0.9, 7)
        seconds += decode(speculator, request, 0.02, 21).seconds
    assert seconds < 4000 * 1.01


@pytest.mark.parametrize("every", [1, 2, 4, 30])
def test_a_rest_ends_while_others_prefill(every: int) -> None:
    """Each so many steps have a chunk of a prompt too; such steps do not pay for a trial."""
    speculator, request, other = make(), row([1, 2, 3]), row([1, 2, 3])
    decode(speculator, request, 0.02, 1000)
    began = speculator.stats()["proposing_steps"]
    for number in range(4000):
        speculator.propose([request])
        plan = StepPlan(decode=[request], proposes=speculator.proposes)
        if number % every == 0:
            plan.prefill = [RowSpan(other, 1, number, 1, samples=False)]
        step(speculator, plan, 1.4 if plan.proposes else 1.0)
    trials = speculator.stats()["proposing_steps"] - began
    assert trials == 0 if every == 1 else 1 <= trials <= 30


def test_forced_tokens_do_not_wait_for_decode_steps_to_be_timed() -> None:
    """After some steps that propose decode steps are timed, but not those with a grammar."""
    speculator, request = make(), row([1, 2, 3])
    while speculator.propose([request]) or speculator.proposes:
        plan = StepPlan(decode=[request], proposes=speculator.proposes)
        step(speculator, plan, 1.0)
    follows: Any = row([1, 2, 3])
    follows.matcher = SimpleNamespace(drafts=lambda request, tokens: ([5, 6, 7], True))
    for _ in range(3):
        assert speculator.propose([follows]) == [[5, 6, 7]]


def test_drafts_without_slots_or_of_an_old_position_are_dropped() -> None:
    """Draft 1 is at position 3, draft 2 at 4."""
    speculator, request = make(adaptive=False), row([1, 2, 3])
    for stop, count in ((2, 0), (4, 1), (5, 2), (9, 3)):
        speculator.received([Proposed(request, stop, [7, 8, 9], [0.9] * 3)])
        assert request.proposed is not None
        assert request.proposed.tokens == [7, 8, 9], "as the row keeps them"
        assert speculator.propose([request]) == ([[7, 8, 9][:count]] if count else ())
    request.append_token(7, 0)
    assert speculator.propose([request]) == ()


@pytest.mark.parametrize("padded", [False, True])
def test_steps_of_more_rows_verify_fewer_drafts(padded: bool) -> None:
    """Drafts that were proposed in steps of fewer rows, or that a grammar forces."""
    sizes = {1: (1, 2, 3, 4), 4: (1, 2)}
    seconds = {rows: {n: 1.0 + 0.001 * rows * n for n in own} for rows, own in sizes.items()}
    speculator = DrafterSpeculator(
        Speculation(method="eagle3", model="x", num_speculative_tokens=DRAFTS),
        step_times(seconds, padded=padded),
        is_async_device=False,
    )
    requests = [row([1, 2, 3]) for _ in range(3)]
    for request in requests:
        speculator.received([Proposed(request, 10**6, [7, 8, 9], [0.99] * 3)])
    assert speculator.propose(requests[:1]) == [[7, 8, 9]]
    assert speculator.propose(requests) == [[7]] * 3
    assert speculator.proposes == 1
    follows: Any = row([1, 2, 3])
    follows.matcher = SimpleNamespace(drafts=lambda request, tokens: ([5, 6, 7], True))
    assert speculator.propose([follows, *requests])[0] == [5]


def test_drafts_in_flight_are_verified_unseen() -> None:
    """As many as the launched step proposes, and none after one that has proposed nothing."""
    speculator, request = make(adaptive=False, is_async_device=True), row([1, 2, 3])
    request.num_pending = 1
    assert speculator.propose([request]) == ()
    assert not speculator.unread
    speculator.launched(StepPlan(decode=[request], proposes=DRAFTS))
    assert speculator.propose([request]) == ()
    assert speculator.unread == [DRAFTS]
    speculator.launched(StepPlan(decode=[request]))
    assert speculator.propose([request]) == ()
    assert not speculator.unread


def test_the_number_of_unseen_drafts_follows_their_acceptance() -> None:
    """The costs are those of one row: 0.5 decode steps for a draft, 0.1 for each more."""
    speculator, request = make(is_async_device=True), row([1, 2, 3])

    def decode_one(right: int, proposed: list[int]) -> int:
        """A step that samples `right` drafts and another token; drafts that the next verifies."""
        speculator.launched(StepPlan(decode=[request], proposes=DRAFTS))
        for token in [1] * right + [2]:
            request.append_token(token, 0)
        speculator.received([Proposed(request, 10**6, proposed, [0.5] * DRAFTS)])
        request.num_pending = 1
        speculator.propose([request])
        request.num_pending = 0
        return speculator.unread[0] if speculator.unread else 0

    drafts = [1] * DRAFTS
    counts = [decode_one(right, drafts) for right in (0, *[3] * 12, *[0] * 40, *[1] * 40)]
    assert counts[12] == DRAFTS
    assert counts[52] == 0
    assert counts[-1] == 1


@given(
    st.lists(st.tuples(st.floats(allow_nan=True, allow_infinity=True), st.booleans()), max_size=400)
)
def test_acceptance_is_a_probability_whatever_the_drafter_says(
    drafts: list[tuple[float, bool]],
) -> None:
    acceptance = Acceptance(PROBABILITY_RATES, 256)
    for probability, right in drafts:
        acceptance.judge([probability_class(probability)], [1], [1 if right else 2])
    chances = acceptance.chances(probability_class(probability) for probability, _ in drafts)
    assert all(0 <= chance <= 1 for chance in chances)
    assert chances == sorted(chances, reverse=True)
